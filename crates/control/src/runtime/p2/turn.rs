//! [`P2Live`]: one sequence of a P2 engine.

use std::time::Instant;

use sapwood_proto::steer::{StepReport, Token};
use serde::Deserialize;

use super::super::answer::{Label, SeqResult, SeqValue, WireBranch};
use super::super::envelope::RequestError;
use super::super::pending::Member;
use super::super::sequence::{
    CallFailure, Callback, Outcome, Returned, ReturnedBranch, Sequence, Waiting,
};
use super::super::table::{
    Failure, LateSteps, OpError, PhaseLimit, StepConfig, Turn, TurnProgress, check_tokens,
    controller_id,
};

/// One sequence.
#[derive(Debug)]
pub(super) struct P2Live<S> {
    sequence: S,
    member: Member,
    /// Its callback has not returned.
    running: bool,
    /// Of the request that is being answered.
    progress: TurnProgress,
    late: LateSteps,
    outcome: Option<Outcome>,
    /// What each branch of the last result waits for, this sequence's first.
    waits: Vec<Option<Waiting>>,
    /// The op that is being answered came while it waits.
    skips: bool,
    /// Its fork, of which no callback knows yet.
    fork_group: Option<Vec<u32>>,
    /// What was wrong with its op.
    refused: Option<(Failure, SeqResult)>,
}

/// How an op ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// Its callback decided this.
    Decided {
        branches: Vec<ReturnedBranch>,
        report: StepReport,
    },
    /// Nothing happens in this step.
    Skips(SeqResult),
}

/// What happened to a sequence since its last op.
#[derive(Debug, Default, Deserialize)]
pub(super) struct StepInput {
    #[serde(default)]
    sampled: Option<Token>,
    #[serde(default)]
    backtrack: u32,
    #[serde(default)]
    tokens: Vec<Token>,
}

impl StepInput {
    /// Checks that it is within the limits of the protocol (AI-222).
    pub(super) fn check(&self) -> Result<(), RequestError> {
        check_tokens(&self.tokens)
    }
}

impl<S: Sequence> P2Live<S> {
    pub(super) fn new(sequence: S, member: Member) -> Self {
        Self {
            sequence,
            member,
            running: false,
            progress: TurnProgress::Idle,
            late: LateSteps::default(),
            outcome: None,
            waits: Vec::new(),
            skips: false,
            fork_group: None,
            refused: None,
        }
    }

    /// Starts the callback of an op, or goes on waiting for a late one. `fork_group`: of a fork in this step.
    pub(super) fn begin(
        &mut self,
        id: u64,
        input: StepInput,
        fork_group: Option<Vec<u32>>,
        now: Instant,
    ) {
        let nothing_new = input.tokens.is_empty() && input.backtrack == 0;
        self.fork_group = fork_group.or_else(|| self.fork_group.take());
        let waits = |wait: &Waiting| !wait.is_over(now);
        self.skips = nothing_new && self.wait().is_some_and(waits);
        self.progress = TurnProgress::Idle;
        if self.skips {
            return;
        }
        self.progress = match (self.running, &self.outcome) {
            (true, _) => TurnProgress::Late,
            (false, Some(_)) => TurnProgress::Ended,
            (false, None) => TurnProgress::Running,
        };
        if !self.running && self.outcome.is_none() {
            self.waits.clear();
            let fork_group = self.fork_group.take();
            let fork_group = fork_group.unwrap_or_else(|| vec![controller_id(id)]);
            self.running = true;
            self.sequence.call(Callback::Process {
                backtrack: input.backtrack,
                tokens: input.tokens,
                sampled: input.sampled,
                fork_group,
            });
        } else if !nothing_new {
            // Its result is for a text that the engine has changed meanwhile.
            self.refused = Some(still_running(id));
            self.progress = TurnProgress::Ended;
        }
    }

    /// What it waits for.
    fn wait(&self) -> Option<&Waiting> {
        self.waits.first()?.as_ref()
    }

    /// Ends the op.
    pub(super) fn end(&mut self, config: &StepConfig, now: Instant) -> Result<Ended, OpError> {
        self.progress = TurnProgress::Idle;
        if let Some(refused) = self.refused.take() {
            return Err(OpError::of(refused));
        }
        if self.skips {
            return Ok(Ended::Skips(noop_answer(self.wait().cloned())));
        }
        let Some(outcome) = self.outcome.take() else {
            let limit = PhaseLimit {
                deadline: config.step_time,
                wait: config.step_time,
                answers_last: true,
            };
            let line = self.late.add(config, limit, now);
            let line = line.ok_or_else(|| Failure::op_error("timeout"))?;
            return Ok(Ended::Skips(late_answer(&line)));
        };
        self.late.clear();
        match outcome.result {
            Ok(Returned::Branches(branches)) => {
                self.waits = branches.iter().map(|it| it.wait.clone()).collect();
                Ok(Ended::Decided {
                    branches,
                    report: outcome.report,
                })
            }
            Ok(_) => Err(OpError::of(Failure::of_call(
                &CallFailure::unexpected(),
                Label::Mid,
                outcome.report,
            ))),
            Err(failure) => Err(OpError::of(Failure::of_call(
                &failure,
                Label::Mid,
                outcome.report,
            ))),
        }
    }

    /// Makes a clone for `child`, which is branch `index` of the last result.
    pub(super) fn fork(
        &mut self,
        id: u64,
        (child, index): (u64, u32),
        config: &StepConfig,
    ) -> Result<Self, OpError> {
        if self.running || self.outcome.is_some() {
            return Err(OpError::of(still_running(id)));
        }
        let member = self.member.fork(config.forks, config.sequences);
        let member = member.map_err(Failure::op_error)?;
        let forked = self.sequence.fork();
        let mut sequence = forked.map_err(|failure| Failure::op_error(failure.message))?;
        sequence.bind(controller_id(child));
        let mut clone = Self::new(sequence, member);
        let wait = self.waits.get(index as usize).and_then(Option::as_ref);
        clone.waits.push(wait.map(Waiting::of_fork));
        Ok(clone)
    }
}

impl<S: Sequence> Turn for P2Live<S> {
    fn advance(&mut self) -> TurnProgress {
        if self.running
            && let Some(outcome) = self.sequence.poll()
        {
            self.running = false;
            self.outcome = Some(outcome);
            self.progress.end();
        }
        self.progress
    }
}

/// The answer of a late callback (AI-507).
fn late_answer(line: &str) -> SeqResult {
    let mut result = noop_answer(None);
    result.log(line);
    result
}

fn noop_answer(wait: Option<Waiting>) -> SeqResult {
    let branches = vec![WireBranch::noop(wait)];
    SeqResult::new(Some(SeqValue::Branches { branches }), StepReport::default())
}

fn still_running(id: u64) -> (Failure, SeqResult) {
    Failure::worker(format!("sequence {id} is still running"))
}
