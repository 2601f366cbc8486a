//! [`P2Live`]: one sequence of a P2 engine.

use sapwood_proto::steer::{StepReport, Token};
use serde::Deserialize;

use super::super::answer::{Label, SeqResult, SeqValue, WireBranch};
use super::super::pending::Member;
use super::super::sequence::{CallFailure, Callback, Outcome, Returned, ReturnedBranch, Sequence};
use super::super::table::{Failure, OpError, StepConfig, Turn, controller_id};

/// One sequence.
#[derive(Debug)]
pub(super) struct P2Live<S> {
    sequence: S,
    member: Member,
    /// Its callback has not returned.
    running: bool,
    /// The request that is being answered waits for it.
    awaited: bool,
    /// Late steps in a row.
    late: u32,
    outcome: Option<Outcome>,
    /// What was wrong with its op.
    refused: Option<(Failure, SeqResult)>,
}

/// What its callback decided.
#[derive(Debug)]
pub(super) struct Decided {
    pub(super) branches: Vec<ReturnedBranch>,
    pub(super) report: StepReport,
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

impl<S: Sequence> P2Live<S> {
    pub(super) const fn new(sequence: S, member: Member) -> Self {
        Self {
            sequence,
            member,
            running: false,
            awaited: false,
            late: 0,
            outcome: None,
            refused: None,
        }
    }

    /// Starts the callback of an op, or goes on waiting for a late one.
    pub(super) fn begin(&mut self, id: u64, input: StepInput, fork_group: Vec<u32>) {
        let nothing_new = input.tokens.is_empty() && input.backtrack == 0;
        if !self.running && self.outcome.is_none() {
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
        }
        self.awaited = true;
    }

    /// Ends the op. `None`: its callback is late.
    pub(super) fn end(&mut self, config: &StepConfig) -> Result<Option<Decided>, OpError> {
        self.awaited = false;
        if let Some(refused) = self.refused.take() {
            return Err(OpError::of(refused));
        }
        let Some(outcome) = self.outcome.take() else {
            self.late += 1;
            if self.late >= config.late_steps {
                return Err(Failure::op_error("timeout"));
            }
            return Ok(None);
        };
        self.late = 0;
        match outcome.result {
            Ok(Returned::Branches(branches)) => Ok(Some(Decided {
                branches,
                report: outcome.report,
            })),
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

    /// The answer of a late callback: nothing happens in this step (AI-507).
    pub(super) fn late_answer(&self, config: &StepConfig) -> SeqResult {
        let branches = vec![WireBranch::noop()];
        let mut result =
            SeqResult::new(Some(SeqValue::Branches { branches }), StepReport::default());
        result.log(&config.late_line(config.step_time, self.late));
        result
    }

    /// Makes a clone for `child`.
    pub(super) fn fork(
        &mut self,
        id: u64,
        child: u64,
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
        Ok(Self::new(sequence, member))
    }
}

impl<S: Sequence> Turn for P2Live<S> {
    fn advance(&mut self) -> bool {
        if self.running
            && let Some(outcome) = self.sequence.poll()
        {
            self.running = false;
            self.outcome = Some(outcome);
        }
        self.awaited && self.running && self.refused.is_none()
    }
}

fn still_running(id: u64) -> (Failure, SeqResult) {
    Failure::worker(format!("sequence {id} is still running"))
}
