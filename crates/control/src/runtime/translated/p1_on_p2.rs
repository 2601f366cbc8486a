//! [`P1OnP2`]: a P1 module of a P2 engine.
//!
//! ```text
//!   Process ─► (post) ─► pre ─┬─ ff_tokens ─► post ─► pre …
//!                             ├─ suspend, fork, stop: the answer
//!                             └─ go on ─► mid: the answer
//! ```

use std::sync::Arc;

use sapwood_proto::steer::{Mask, StepReport, Token};

use super::super::sequence::{
    CallFailure, Callback, MidReturned, Outcome, Returned, ReturnedBranch, ReturnedSplice,
    Sequence, Waiting,
};
use super::super::table::merge;
use super::outcome;
use crate::host::PreRounds;

/// The module, and where it is in the step.
#[derive(Debug)]
pub(crate) struct P1OnP2<S> {
    inner: S,
    vocabulary: usize,
    stage: Stage,
    fork_group: Vec<u32>,
    /// Fast-forward tokens of the step, which the module knows already.
    rounds: PreRounds,
    /// The engine appends these because we asked for it; `post` has had them.
    expected: Vec<Token>,
    /// A fork was answered: the next step is its `mid`, of each branch.
    after_fork: bool,
    report: StepReport,
    /// An answer that needs no callback.
    ready: Option<Returned>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// No callback runs; the start has not been answered either.
    #[default]
    Idle,
    Post,
    Pre,
    Mid,
}

impl<S: Sequence> P1OnP2<S> {
    pub(super) fn new(inner: S, vocabulary: usize) -> Self {
        Self {
            inner,
            vocabulary,
            stage: Stage::Idle,
            fork_group: Vec::new(),
            rounds: PreRounds::default(),
            expected: Vec::new(),
            after_fork: false,
            report: StepReport::default(),
            ready: None,
        }
    }

    pub(super) fn bind(&mut self, id: u32) {
        self.inner.bind(id);
    }

    pub(super) fn call(&mut self, callback: Callback) {
        let Callback::Process {
            backtrack,
            tokens,
            fork_group,
            ..
        } = callback
        else {
            // The engine turned out to be of P1 (AI-104), as the module is.
            return self.inner.call(callback);
        };
        self.fork_group = fork_group;
        let expected = std::mem::take(&mut self.expected);
        let known = backtrack == 0 && tokens == expected;
        if !known {
            self.stage = Stage::Post;
            self.inner.call(Callback::Post { backtrack, tokens });
        } else if std::mem::take(&mut self.after_fork) {
            self.call_mid();
        } else {
            self.call_pre();
        }
    }

    fn call_pre(&mut self) {
        self.stage = Stage::Pre;
        self.inner.call(Callback::Pre);
    }

    fn call_mid(&mut self) {
        self.stage = Stage::Mid;
        let fork_group = std::mem::take(&mut self.fork_group);
        self.inner.call(Callback::Mid { fork_group });
    }

    pub(super) fn poll(&mut self) -> Option<Outcome> {
        loop {
            if let Some(ready) = self.ready.take() {
                self.stage = Stage::Idle;
                return Some(outcome(Ok(ready), &mut self.report));
            }
            let Outcome { result, report } = self.inner.poll()?;
            if self.stage == Stage::Idle {
                // The start: its result is the same in both generations.
                return Some(Outcome { result, report });
            }
            merge(&mut self.report, report);
            if let Err(failure) = result.and_then(|returned| self.take(returned)) {
                self.stage = Stage::Idle;
                return Some(outcome(Err(failure), &mut self.report));
            }
        }
    }

    fn take(&mut self, returned: Returned) -> Result<(), CallFailure> {
        match (self.stage, returned) {
            (Stage::Post, Returned::Post { stop: true }) => self.answer(Vec::new()),
            (Stage::Post, Returned::Post { stop: false }) => self.call_pre(),
            (
                Stage::Pre,
                Returned::Pre {
                    num_forks,
                    suspend,
                    ff_tokens,
                    wait,
                },
            ) => return self.take_pre(num_forks, suspend.then_some(wait), ff_tokens),
            (Stage::Mid, Returned::Mid(returned)) => {
                let branches = self.branches(returned);
                self.answer(branches);
            }
            _ => return Err(CallFailure::unexpected()),
        }
        Ok(())
    }

    fn take_pre(
        &mut self,
        num_forks: u32,
        suspended: Option<Option<Waiting>>,
        ff_tokens: Vec<Token>,
    ) -> Result<(), CallFailure> {
        if !ff_tokens.is_empty() {
            let post = self.rounds.add(ff_tokens)?;
            self.stage = Stage::Post;
            self.inner.call(post);
            return Ok(());
        }
        let forwarded = self.rounds.finish();
        if !forwarded.is_empty() {
            // In this step the engine appends them; the module is asked again in the next one.
            self.expected.clone_from(&forwarded);
            self.answer(vec![splice(0, forwarded)]);
        } else if let Some(wait) = suspended {
            self.answer(vec![ReturnedBranch { wait, ..noop() }]);
        } else if num_forks == 1 {
            self.call_mid();
        } else {
            self.after_fork = num_forks > 1;
            self.answer((0..num_forks).map(|_| noop()).collect());
        }
        Ok(())
    }

    fn answer(&mut self, branches: Vec<ReturnedBranch>) {
        self.ready = Some(Returned::Branches(branches));
    }

    fn branches(&self, returned: MidReturned) -> Vec<ReturnedBranch> {
        match returned {
            MidReturned::Stop => Vec::new(),
            MidReturned::Sample(mask) => vec![ReturnedBranch {
                // Without a row nothing would be sampled.
                mask: Some(mask.unwrap_or_else(|| Arc::new(Mask::all(self.vocabulary)))),
                temperature: None,
                splices: Vec::new(),
                wait: None,
            }],
            MidReturned::Splice {
                backtrack,
                ff_tokens,
            } => vec![splice(backtrack, ff_tokens)],
        }
    }

    pub(super) fn fork(&mut self) -> Result<Self, CallFailure> {
        Ok(Self {
            inner: self.inner.fork()?,
            vocabulary: self.vocabulary,
            stage: Stage::Idle,
            fork_group: Vec::new(),
            rounds: PreRounds::default(),
            expected: self.expected.clone(),
            after_fork: self.after_fork,
            report: StepReport::default(),
            ready: None,
        })
    }
}

fn noop() -> ReturnedBranch {
    splice(0, Vec::new())
}

fn splice(backtrack: u32, ff_tokens: Vec<Token>) -> ReturnedBranch {
    ReturnedBranch {
        mask: None,
        temperature: None,
        splices: vec![ReturnedSplice {
            when_sampled: Vec::new(),
            backtrack,
            ff_tokens,
        }],
        wait: None,
    }
}
