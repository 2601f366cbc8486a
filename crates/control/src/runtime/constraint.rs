//! [`ConstraintSequence`]: a native constraint in the place of a module (AI-840).
//!
//! It has the one callback of P2 modules; on a P1 wire it is translated as they are.
//!
//! ```text
//!   Process ─► post ─► pre ─(forced tokens)──────────► one splice; the next Process reports it, and it is not posted
//!                       └─(none)─► mid_begin ─► mid ─► one branch with a mask, or none
//! ```

use std::sync::Arc;

use sapwood_proto::steer::{
    Appended, Branch, Mid, Post, Pre, Steer, SteerFailure, StepWaker, Token,
};

use super::sequence::{
    CallFailure, Callback, Outcome, Returned, ReturnedBranch, ReturnedSplice, Sequence,
};
use crate::host::{Instance, Member};

/// What the name of every native constraint begins with, and that of no module.
pub(crate) const CONSTRAINT_PREFIX: &str = "sapwood:";

/// The constraint of one sequence.
pub(crate) struct ConstraintSequence {
    steer: Box<dyn Steer>,
    request: Member,
    state: ConstraintStage,
    /// What `pre` forced in the last step. The engine repeats it, and the steerer has counted it already.
    forced: Vec<Token>,
    forks: u32,
}

enum ConstraintStage {
    /// Between callbacks.
    Idle,
    Beginning,
    /// `pre` is asked; the group is for the mask after it.
    Forcing(Vec<u32>),
    Masking,
    /// The outcome is there.
    Ready(Result<Returned, CallFailure>),
}

impl ConstraintSequence {
    /// Begins a sequence of a request.
    pub(crate) fn new(
        mut steer: Box<dyn Steer>,
        prompt: &[Token],
        waker: &Arc<dyn StepWaker>,
        request: Member,
    ) -> Self {
        steer.begin(prompt, waker);
        Self {
            steer,
            request,
            state: ConstraintStage::Beginning,
            forced: Vec::new(),
            forks: 0,
        }
    }

    /// Reports what happened to the sequence.
    fn post(
        &mut self,
        backtrack: u32,
        tokens: &[Token],
        sampled: Option<Token>,
    ) -> Result<Post, SteerFailure> {
        let forced = std::mem::take(&mut self.forced);
        let mut tokens = tokens;
        if !forced.is_empty() {
            match tokens.strip_prefix(&forced[..]) {
                Some(rest) if backtrack == 0 => tokens = rest,
                _ => {
                    // The engine did something else.
                    let backtrack = u32::try_from(forced.len()).unwrap_or(u32::MAX);
                    self.steer.post(Appended {
                        backtrack,
                        ..Appended::default()
                    })?;
                }
            }
        }
        if backtrack == 0 && tokens.is_empty() {
            return Ok(Post::Continue);
        }
        self.steer.post(Appended {
            backtrack,
            tokens,
            sampled,
        })
    }

    fn advance(&mut self) -> Option<Result<Returned, CallFailure>> {
        let step = match &mut self.state {
            ConstraintStage::Idle => return None,
            ConstraintStage::Ready(_) => {
                match std::mem::replace(&mut self.state, ConstraintStage::Idle) {
                    ConstraintStage::Ready(result) => return Some(result),
                    _ => return None,
                }
            }
            ConstraintStage::Beginning => {
                let begun = self.steer.begin_poll();
                begun.map(|begun| {
                    Some(Ok(Returned::Begun {
                        prompt: begun?.prompt,
                    }))
                })
            }
            ConstraintStage::Forcing(group) => {
                let group = std::mem::take(group);
                self.force(group)
            }
            ConstraintStage::Masking => self.mask(),
        };
        let done = step.unwrap_or_else(|failure| Some(Err(failed(failure))))?;
        self.state = ConstraintStage::Idle;
        Some(done)
    }

    fn force(&mut self, group: Vec<u32>) -> Stepped {
        let forced = match self.steer.pre()? {
            None => {
                self.state = ConstraintStage::Forcing(group);
                return Ok(None);
            }
            Some(Pre::Run { fast_forward }) => fast_forward,
            Some(Pre::Stop) => return Ok(Some(Ok(Returned::Branches(Vec::new())))),
            // A constraint does neither.
            Some(Pre::Suspend | Pre::Wait | Pre::Fork(_)) => {
                return Ok(Some(Err(CallFailure::unexpected())));
            }
        };
        if forced.is_empty() {
            self.steer.mid_begin(&group);
            self.state = ConstraintStage::Masking;
            return self.mask();
        }
        self.forced.clone_from(&forced);
        let splice = ReturnedSplice {
            when_sampled: Vec::new(),
            backtrack: 0,
            ff_tokens: forced,
        };
        Ok(Some(Ok(Returned::Branches(vec![ReturnedBranch {
            mask: None,
            temperature: None,
            splices: vec![splice],
            wait: None,
        }]))))
    }

    fn mask(&mut self) -> Stepped {
        Ok(match self.steer.mid_poll()? {
            None => None,
            Some(Mid::Stop) => Some(Ok(Returned::Branches(Vec::new()))),
            Some(Mid::One(Branch::Sample(sample))) => {
                Some(Ok(Returned::Branches(vec![ReturnedBranch {
                    mask: sample.mask,
                    temperature: sample.temperature,
                    splices: Vec::new(),
                    wait: None,
                }])))
            }
            // A constraint changes nothing else, and does not fork.
            Some(Mid::One(_) | Mid::Fork(_)) => Some(Err(CallFailure::unexpected())),
        })
    }
}

/// The result of a callback, if it is there.
type Stepped = Result<Option<Result<Returned, CallFailure>>, SteerFailure>;

fn failed(failure: SteerFailure) -> CallFailure {
    CallFailure::new(failure.reason, failure.message)
}

impl Sequence for ConstraintSequence {
    fn bind(&mut self, id: u32) {
        self.steer.bind(id);
    }

    fn call(&mut self, callback: Callback) {
        let Callback::Process {
            backtrack,
            tokens,
            sampled,
            fork_group,
        } = callback
        else {
            self.state = ConstraintStage::Ready(Err(CallFailure::unexpected()));
            return;
        };
        self.state = match self.post(backtrack, &tokens, sampled) {
            Ok(Post::Continue) => ConstraintStage::Forcing(fork_group),
            Ok(Post::Stop) => ConstraintStage::Ready(Ok(Returned::Branches(Vec::new()))),
            Err(failure) => ConstraintStage::Ready(Err(failed(failure))),
        };
    }

    fn poll(&mut self) -> Option<Outcome> {
        let result = self.advance()?;
        let report = self.steer.take_report();
        Some(Outcome {
            result,
            report: report.unwrap_or_default(),
        })
    }

    fn fork(&mut self) -> Result<Self, CallFailure> {
        let request = self.request.group().enter()?;
        self.forks += 1;
        Ok(Self {
            steer: self.steer.fork(self.forks).map_err(failed)?,
            request,
            state: ConstraintStage::Idle,
            forced: self.forced.clone(),
            forks: 0,
        })
    }
}

/// What steers a sequence on the wire.
pub(crate) enum WireSteering {
    Module(Instance),
    Constraint(ConstraintSequence),
}

impl Sequence for WireSteering {
    fn bind(&mut self, id: u32) {
        match self {
            Self::Module(instance) => instance.bind(id),
            Self::Constraint(constraint) => constraint.bind(id),
        }
    }

    fn call(&mut self, callback: Callback) {
        match self {
            Self::Module(instance) => instance.call(callback),
            Self::Constraint(constraint) => constraint.call(callback),
        }
    }

    fn call_all<const N: usize>(&mut self, callbacks: [Callback; N]) {
        match self {
            Self::Module(instance) => instance.call_all(callbacks),
            Self::Constraint(constraint) => {
                callbacks.into_iter().for_each(|it| constraint.call(it))
            }
        }
    }

    fn poll(&mut self) -> Option<Outcome> {
        match self {
            Self::Module(instance) => instance.poll(),
            Self::Constraint(constraint) => constraint.poll(),
        }
    }

    fn fork(&mut self) -> Result<Self, CallFailure> {
        Ok(match self {
            Self::Module(instance) => Self::Module(instance.fork()?),
            Self::Constraint(constraint) => Self::Constraint(constraint.fork()?),
        })
    }
}

#[cfg(test)]
mod tests;
