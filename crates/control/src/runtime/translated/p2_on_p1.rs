//! [`P2OnP1`]: a P2 module of a P1 engine.
//!
//! Its one callback runs in `Pre`, with everything that happened since the last time. What it decides for sampling is kept: a
//! mask until `Mid`, splices that depend on the sampled token until `Post`. There a splice that keeps the token becomes tokens
//! to be forced in the next `Pre`, and one that removes it a splice in the next `Mid`, because the engine has appended it by then.

use std::collections::VecDeque;

use sapwood_proto::steer::{SharedMask, StepReport, Token};

use super::super::sequence::{
    CallFailure, Callback, MidReturned, Outcome, Returned, ReturnedBranch, ReturnedSplice,
    Sequence, Waiting,
};
use super::outcome;
use crate::host::Unreported;

/// The module, and what it has decided for the coming step.
#[derive(Debug)]
pub(crate) struct P2OnP1<S> {
    inner: S,
    number: u32,
    /// The ids of its last fork.
    fork_group: Vec<u32>,
    unreported: Unreported,
    /// The branches for `Mid`, and which of them is this sequence's.
    kept: Vec<Kept>,
    branch: usize,
    /// What a fork waits for that had nothing to do in its first step.
    wait: Option<Waiting>,
    /// Forks since the branches were decided.
    forks: usize,
    /// Splices that depend on the token that is sampled.
    conditional: Vec<ReturnedSplice>,
    /// Tokens that follow the sampled one.
    forced: Vec<Token>,
    /// A splice that removes the sampled token, which is appended by now.
    removal: Option<Removal>,
    /// The last `Pre` had tokens to be appended, and their `Post` follows.
    forwarding: bool,
    /// The engine turned out to be of P2, as the module is (AI-104): nothing is translated.
    direct: bool,
    dropped_temperature: bool,
    ready: VecDeque<Returned>,
    report: StepReport,
}

/// A branch, as `Mid` answers it.
#[derive(Clone, Debug)]
enum Kept {
    Sample(SharedMask, Vec<ReturnedSplice>),
    Splice(u32, Vec<Token>),
    /// Nothing happens, and the module may wait for something.
    Noop(Option<Waiting>),
}

/// A removal of committed tokens, the sampled one being the last of them.
#[derive(Clone, Debug)]
struct Removal {
    backtrack: u32,
    tokens: Vec<Token>,
    sampled: Token,
    /// `Mid` has answered it, and its `Post` follows.
    answered: bool,
}

impl<S: Sequence> P2OnP1<S> {
    pub(super) fn new(inner: S) -> Self {
        Self {
            inner,
            number: 0,
            fork_group: Vec::new(),
            unreported: Unreported::default(),
            kept: Vec::new(),
            branch: 0,
            wait: None,
            forks: 0,
            conditional: Vec::new(),
            forced: Vec::new(),
            removal: None,
            forwarding: false,
            direct: false,
            dropped_temperature: false,
            ready: VecDeque::new(),
            report: StepReport::default(),
        }
    }

    pub(super) fn bind(&mut self, id: u32) {
        self.number = id;
        self.fork_group = vec![id];
        self.inner.bind(id);
    }

    pub(super) fn call(&mut self, callback: Callback) {
        match callback {
            Callback::Pre => self.pre(),
            Callback::Mid { fork_group } => self.mid(fork_group),
            Callback::Post { backtrack, tokens } => {
                self.post(backtrack, &tokens);
                self.ready.push_back(Returned::Post { stop: false });
            }
            Callback::Process { .. } => {
                self.direct = true;
                self.inner.call(callback);
            }
        }
    }

    fn pre(&mut self) {
        let forced = std::mem::take(&mut self.forced);
        let wait = self.wait.take();
        if !forced.is_empty() {
            self.answer_pre(1, None, forced);
        } else if self.removal.is_some() {
            self.answer_pre(1, None, Vec::new());
        } else if wait.is_some() {
            self.answer_pre(1, Some(wait), Vec::new());
        } else if self.kept.is_empty() {
            let mut group = std::mem::replace(&mut self.fork_group, vec![self.number]);
            if group.is_empty() {
                // Not bound yet (AI-316).
                group.push(self.number);
            }
            self.inner.call(self.unreported.report(group));
        } else {
            // The engine asks in every step, also where it did not run the sequence.
            self.answer_kept();
        }
    }

    /// `suspended`: what it waits for, if it waits for something.
    fn answer_pre(
        &mut self,
        num_forks: u32,
        suspended: Option<Option<Waiting>>,
        ff_tokens: Vec<Token>,
    ) {
        self.forwarding = !ff_tokens.is_empty();
        self.ready.push_back(Returned::Pre {
            num_forks,
            suspend: suspended.is_some(),
            ff_tokens,
            wait: suspended.flatten(),
        });
    }

    fn answer_kept(&mut self) {
        let forks = u32::try_from(self.kept.len()).unwrap_or(u32::MAX);
        self.answer_pre(forks, None, Vec::new());
    }

    fn mid(&mut self, fork_group: Vec<u32>) {
        if let Some(removal) = &mut self.removal {
            removal.answered = true;
            let splice = MidReturned::Splice {
                backtrack: removal.backtrack,
                ff_tokens: removal.tokens.clone(),
            };
            return self.ready.push_back(Returned::Mid(splice));
        }
        let mut kept = std::mem::take(&mut self.kept);
        if kept.len() > 1 {
            self.fork_group = fork_group;
        }
        // An engine may make more clones than it was asked to: they go the way of the first branch.
        let branch = std::mem::take(&mut self.branch);
        let branch = if branch < kept.len() { branch } else { 0 };
        self.forks = 0;
        let decided = if kept.is_empty() {
            // It was suspended, and the engine runs it all the same.
            Kept::Noop(None)
        } else {
            kept.swap_remove(branch)
        };
        let returned = match decided {
            Kept::Sample(mask, conditional) => {
                self.conditional = conditional;
                MidReturned::Sample(Some(mask))
            }
            Kept::Splice(backtrack, ff_tokens) => MidReturned::Splice {
                backtrack,
                ff_tokens,
            },
            Kept::Noop(wait) => {
                self.wait = wait.map(|wait| if branch > 0 { wait.of_fork() } else { wait });
                // What is sampled is taken back.
                MidReturned::Splice {
                    backtrack: 0,
                    ff_tokens: Vec::new(),
                }
            }
        };
        self.ready.push_back(Returned::Mid(returned));
    }

    fn post(&mut self, backtrack: u32, tokens: &[Token]) {
        if std::mem::take(&mut self.forwarding) {
            // They follow what has happened before, and none of them was sampled (AI-502).
            return self.unreported.append(tokens);
        }
        if let Some(removal) = self.removal.take_if(|removal| removal.answered) {
            // The sampled token was never reported, so it is not among those that are taken back.
            let backtrack = backtrack.saturating_sub(1);
            return self
                .unreported
                .add(backtrack, tokens, Some(removal.sampled));
        }
        let conditional = std::mem::take(&mut self.conditional);
        let &[sampled] = tokens else {
            return self.unreported.add(backtrack, tokens, None);
        };
        let applies = |splice: &ReturnedSplice| {
            splice.when_sampled.is_empty() || splice.when_sampled.contains(&sampled)
        };
        match conditional.into_iter().find(applies) {
            Some(splice) if splice.backtrack == 0 => {
                self.forced = splice.ff_tokens;
                self.unreported.add(backtrack, tokens, Some(sampled));
            }
            Some(splice) => {
                self.removal = Some(Removal {
                    backtrack: splice.backtrack,
                    tokens: splice.ff_tokens,
                    sampled,
                    answered: false,
                });
            }
            None => self.unreported.add(backtrack, tokens, Some(sampled)),
        }
    }

    pub(super) fn poll(&mut self) -> Option<Outcome> {
        if let Some(ready) = self.ready.pop_front() {
            return Some(outcome(Ok(ready), &mut self.report));
        }
        let Outcome { result, report } = self.inner.poll()?;
        match result {
            Ok(Returned::Branches(branches)) if !self.direct => {
                self.report = report;
                self.decide(branches);
                let ready = self.ready.pop_front()?;
                Some(outcome(Ok(ready), &mut self.report))
            }
            result => Some(Outcome { result, report }),
        }
    }

    fn decide(&mut self, branches: Vec<ReturnedBranch>) {
        if branches.iter().any(|branch| branch.temperature.is_some()) && !self.dropped_temperature {
            self.dropped_temperature = true;
            self.report.logs.push_str(NO_TEMPERATURE);
        }
        self.branch = 0;
        self.forks = 0;
        if branches.is_empty() {
            return self.answer_pre(0, None, Vec::new());
        }
        if let [branch] = &branches[..]
            && branch.mask.is_none()
            && let Some(splice) = branch.splices.first()
            && splice.backtrack == 0
        {
            let suspends = splice.ff_tokens.is_empty();
            let suspended = suspends.then(|| branch.wait.clone());
            return self.answer_pre(1, suspended, splice.ff_tokens.clone());
        }
        self.kept = branches.into_iter().map(keep).collect();
        self.answer_kept();
    }

    pub(super) fn fork(&mut self) -> Result<Self, CallFailure> {
        self.forks += 1;
        Ok(Self {
            inner: self.inner.fork()?,
            number: self.number,
            fork_group: self.fork_group.clone(),
            unreported: self.unreported.clone(),
            kept: self.kept.clone(),
            branch: self.forks,
            wait: None,
            forks: 0,
            conditional: self.conditional.clone(),
            forced: self.forced.clone(),
            removal: self.removal.clone(),
            forwarding: self.forwarding,
            direct: self.direct,
            dropped_temperature: self.dropped_temperature,
            ready: VecDeque::new(),
            report: StepReport::default(),
        })
    }
}

fn keep(branch: ReturnedBranch) -> Kept {
    match (branch.mask, branch.splices) {
        (Some(mask), splices) => Kept::Sample(mask, splices),
        // Exactly one, which the host has checked.
        (None, mut splices) => match splices.pop() {
            Some(splice) if splice.backtrack > 0 || !splice.ff_tokens.is_empty() => {
                Kept::Splice(splice.backtrack, splice.ff_tokens)
            }
            _ => Kept::Noop(branch.wait),
        },
    }
}

/// The log line of a module that sets a temperature, once in a request.
const NO_TEMPERATURE: &str = "temperature is not possible with this engine\n";
