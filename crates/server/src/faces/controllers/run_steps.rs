//! Gathers the engine's events of a run into steps, as the client reads them (AI-912 to AI-916).

use std::collections::BTreeMap;

use sapwood_engine::api::{ChoiceEnd, EngineEvent, EventKind, FinishReason, Tokens};
use sapwood_kernel::Error;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, VariableWrite};
use serde_json::{Map, Value, json};

use super::run_variables::hex;
use crate::branch_text::BranchTexts;

/// The steps of a run.
#[derive(Default)]
pub(super) struct RunSteps {
    texts: BranchTexts,
    usage: RunCost,
    /// What the present step has of each sequence.
    forks: BTreeMap<u32, ForkStep>,
    step: u64,
    /// The sequences that have begun, and whether they have ended.
    ended: BTreeMap<u32, bool>,
    /// An event was written.
    reported: bool,
}

/// What one sequence did in a step.
#[derive(Default)]
struct ForkStep {
    text: String,
    error: String,
    logs: String,
    storage: Vec<Value>,
    micros: u64,
    finish: Option<&'static str>,
}

/// The member `usage`: what a run has cost so far.
#[derive(Debug, Default)]
struct RunCost {
    sampled: u64,
    /// Tokens that went through the model.
    processed: u64,
    /// The tokens of each sequence that go through it in its next step.
    pending: BTreeMap<u32, u64>,
}

/// What stands before the text that follows a backtrack (AI-914).
const BACKTRACK: &str = " ↩ ";

impl RunSteps {
    /// The tokens of the prompt went through the model.
    pub(super) fn prompt(&mut self, tokens: u64) {
        self.usage.processed += tokens;
    }

    /// Whether the event belongs to a later step than what was added.
    pub(super) fn begins_later(&self, event: &EngineEvent) -> bool {
        // The usage is of the whole request.
        !self.forks.is_empty()
            && event.step != self.step
            && !matches!(event.kind, EventKind::Usage(_))
    }

    /// Adds an event to the present step.
    pub(super) fn add(&mut self, event: EngineEvent) {
        let index = event.choice;
        match event.kind {
            // The run has the error as well, and the usage is counted here.
            EventKind::Usage(_) | EventKind::Error(_) => return,
            EventKind::Tokens(tokens) => self.tokens(index, &tokens),
            EventKind::Report(report) => self.report(index, report),
            EventKind::Finish(end) => self.end(index, finish(&end)),
            EventKind::Failed(error) => {
                let error = Error::from(error);
                self.fork(index).error = error.to_string();
                self.end(index, failed(&error));
            }
        }
        self.step = event.step;
    }

    fn end(&mut self, index: u32, finish: &'static str) {
        self.fork(index).finish = Some(finish);
        self.ended.insert(index, true);
    }

    fn fork(&mut self, index: u32) -> &mut ForkStep {
        self.ended.entry(index).or_default();
        self.forks.entry(index).or_default()
    }

    fn tokens(&mut self, index: u32, tokens: &Tokens) {
        self.usage.count(index, tokens);
        let new = self.texts.take(index, tokens).text.to_owned();
        let fork = self.fork(index);
        if tokens.backtrack > 0 {
            fork.text.push_str(BACKTRACK);
        }
        fork.text.push_str(&new);
    }

    fn report(&mut self, index: u32, report: StepReport) {
        let StepReport {
            logs,
            storage,
            micros,
        } = report;
        let fork = self.fork(index);
        fork.logs.push_str(&logs);
        fork.storage.extend(storage.iter().map(command));
        fork.micros = fork.micros.saturating_add(micros);
    }

    /// Ends the run with an error: every sequence that has not ended fails (AI-915).
    pub(super) fn fail(&mut self, error: &Error) {
        let message = error.to_string();
        // A controller that fails before its first step is sequence 0.
        self.ended.entry(0).or_default();
        let finish = failed(error);
        let open = self.ended.iter().filter(|(_, ended)| !**ended);
        let open: Vec<_> = open.map(|(index, _)| *index).collect();
        for index in open {
            let fork = self.fork(index);
            fork.error.clone_from(&message);
            fork.finish = Some(finish);
            self.ended.insert(index, true);
        }
    }

    /// Takes the present step as an event. `None` if no sequence has anything to report.
    pub(super) fn take(&mut self) -> Option<Value> {
        let forks = std::mem::take(&mut self.forks);
        let forks = forks.into_iter().filter(|(_, fork)| fork.is_shown());
        let forks: Vec<_> = forks.map(|(index, fork)| fork.written(index)).collect();
        if forks.is_empty() {
            return None;
        }
        Some(self.event(forks))
    }

    /// The event without which the client fails at its end, if there was no other (AI-913). It has a sequence, since some
    /// clients read the first one without asking.
    pub(super) fn last(&mut self) -> Option<Value> {
        (!self.reported).then(|| self.event(vec![ForkStep::default().written(0)]))
    }

    fn event(&mut self, forks: Vec<Value>) -> Value {
        self.reported = true;
        json!({"object": "run", "forks": forks, "usage": self.usage.written()})
    }
}

impl ForkStep {
    fn is_shown(&self) -> bool {
        !self.text.is_empty()
            || !self.error.is_empty()
            || !self.logs.is_empty()
            || !self.storage.is_empty()
            || self.finish.is_some()
    }

    /// All members but the last are always there: the client reads them without asking (AI-913).
    fn written(self, index: u32) -> Value {
        let mut members = Map::new();
        members.insert("index".into(), index.into());
        members.insert("text".into(), self.text.into());
        members.insert("error".into(), self.error.into());
        members.insert("logs".into(), self.logs.into());
        members.insert("storage".into(), self.storage.into());
        members.insert("micros".into(), self.micros.into());
        if let Some(finish) = self.finish {
            members.insert("finish_reason".into(), finish.into());
        }
        members.into()
    }
}

impl RunCost {
    fn count(&mut self, index: u32, step: &Tokens) {
        let pending = self.pending.entry(index).or_default();
        // Tokens that are taken back before the model has seen them.
        *pending = pending.saturating_sub(step.backtrack.into());
        for token in step.tokens.iter().skip(step.inherited as usize) {
            if token.forced {
                *pending += 1;
                continue;
            }
            // A token is sampled after all before it went through the model.
            self.sampled += 1;
            self.processed += std::mem::replace(pending, 1);
        }
    }

    fn written(&self) -> Value {
        let (sampled, processed) = (self.sampled, self.processed);
        json!({"sampled_tokens": sampled, "ff_tokens": processed, "cost": 2 * sampled + processed})
    }
}

/// A write of a variable, as the controllers' interface has it (AI-951).
fn command(write: &VariableWrite) -> Value {
    let value = hex(&write.value);
    let op = if write.append { "Append" } else { "Set" };
    json!({"WriteVar": {
        "name": write.name, "value": value, "op": op, "when_version_is": write.when_version_is,
    }})
}

fn finish(end: &ChoiceEnd) -> &'static str {
    match end.reason {
        FinishReason::Stop => "eos",
        FinishReason::Length => "length",
        FinishReason::Fuel => "aici-out-of-fuel",
        FinishReason::Controller => "aici-stop",
        FinishReason::Cancelled => "abort",
    }
}

fn failed(error: &Error) -> &'static str {
    match error.code() {
        _ if error.known_reason() == ErrorReason::DEADLOCK => "deadlock",
        Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable => "abort",
        _ => "fail",
    }
}

#[cfg(test)]
mod tests;
