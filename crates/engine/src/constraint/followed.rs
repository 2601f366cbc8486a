//! [`FollowedConstraint`]: a constraint that a controller follows itself, through the host's functions (AI-1007).
//!
//! It computes on the caller's thread, which is one for callbacks and never the engine's, so it needs no worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood_proto::steer::{
    HostConstraint, HostConstraintCall, HostConstraintSource, Mask, SharedMask, SteerRefusal,
    Steered, Token,
};

use super::ConstraintSource;
use super::argument::Argument;
use super::automaton::{Automaton, AutomatonError, Next};
use super::compile::Compiled;
use super::grammar::Kind;
use super::mask_workers::MaskWorkers;
use super::steerer::{FORCED_MAX, past_the_beginning};
use super::watchdog::TimedWatch;

impl HostConstraintSource for ConstraintSource {
    fn prepare(&self) {
        // Why it cannot be made, the first constraint says.
        let _made = self.factory.get();
    }

    fn open(&self, call: HostConstraintCall<'_>) -> Result<Box<dyn HostConstraint>, String> {
        let kind = Kind::from_name(call.kind).ok_or_else(|| {
            let names = Kind::NAMES.replace(super::NAME_PREFIX, "");
            format!("there is no constraint of this name; use one of {names}")
        })?;
        let message = |refusal: SteerRefusal| refusal.message;
        self.check_bytes(call.value).map_err(message)?;
        let argument = Argument::of_pattern(call.value);
        let compiled = self
            .compiled(kind, &argument, call.user, call.time)
            .map_err(message)?;
        let automaton = compiled.automaton().map_err(|error| error.to_string())?;
        Ok(Box::new(FollowedConstraint {
            compiled,
            timing: Timing::new(&automaton, self.watches_followed.then_some(&self.workers)),
            automaton: Some(automaton),
            consumed: Vec::new(),
            automaton_bytes: 0,
        }))
    }
}

/// Ends calls that go on for longer than the callback which makes them.
struct Timing {
    deadline: Option<Instant>,
    /// `None` in processes that are cloned.
    watch: Option<(Arc<TimedWatch>, Arc<MaskWorkers>)>,
}

impl Timing {
    fn new(automaton: &Automaton, workers: Option<&Arc<MaskWorkers>>) -> Self {
        Self {
            deadline: None,
            watch: workers.map(|workers| (workers.watch_timed(automaton), Arc::clone(workers))),
        }
    }

    /// For a copy of the automaton, which is cancelled on its own.
    fn of_copy(&self, automaton: &Automaton) -> Self {
        Self::new(automaton, self.watch.as_ref().map(|(_, workers)| workers))
    }
}

/// Where a controller is in a grammar. The automaton has consumed the tokens of `consumed` that are no EOG tokens.
struct FollowedConstraint {
    compiled: Arc<Compiled>,
    /// Taken out only to be kept for another sequence.
    automaton: Option<Automaton>,
    consumed: Vec<Consumed>,
    timing: Timing,
    /// What the automaton took when it last said so.
    automaton_bytes: usize,
}

#[derive(Clone, Copy)]
struct Consumed {
    is_end: bool,
}

impl FollowedConstraint {
    fn automaton(&mut self) -> Result<&mut Automaton, AutomatonError> {
        self.automaton.as_mut().ok_or(AutomatonError::Cancelled)
    }

    fn has_ended(&self) -> bool {
        self.consumed.last().is_some_and(|last| last.is_end)
    }

    /// Runs what calls the library for long. It is cancelled when the callback is late.
    fn timed<T>(&mut self, call: impl FnOnce(&mut Self) -> Steered<T>) -> Steered<T> {
        let (Some(deadline), Some((watch, _))) = (self.timing.deadline, &self.timing.watch) else {
            return call(self);
        };
        let watch = Arc::clone(watch);
        let result = watch.during(deadline, || call(self));
        if watch.is_late() {
            return Err(AutomatonError::Slow.into());
        }
        result
    }

    /// Goes on by one token. Returns whether the grammar allows it.
    fn step(&mut self, token: Token) -> Result<bool, AutomatonError> {
        let automaton = self.automaton()?;
        // Asked first: a token that is not allowed would leave the automaton unusable. One without bytes, as those of
        // padding, is never allowed.
        let exists = (token as usize) < automaton.vocabulary();
        let allowed = exists && !automaton.spelled(token).is_empty();
        if !allowed || !automaton.accepts(&[token])? {
            return Ok(false);
        }
        automaton.consume(token)?;
        Ok(true)
    }

    fn compute_mask(&mut self) -> Steered<SharedMask> {
        let has_ended = self.has_ended();
        let compiled = Arc::clone(&self.compiled);
        let automaton = self.automaton()?;
        let nothing = Mask::none(automaton.vocabulary());
        if has_ended {
            return Ok(Arc::new(nothing));
        }
        match automaton.next(false, &compiled.ends) {
            Ok(Next::Allowed(mask)) => Ok(mask),
            Ok(Next::Complete | Next::Forced(_)) | Err(AutomatonError::Empty) => {
                Ok(Arc::new(nothing))
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl HostConstraint for FollowedConstraint {
    fn limit_time(&mut self, left: Option<Duration>) {
        self.timing.deadline = left.and_then(|left| Instant::now().checked_add(left));
    }

    fn consume(&mut self, token: Token) -> Steered<bool> {
        if self.has_ended() {
            return Ok(false);
        }
        let is_end = self.compiled.ends.contains(&token);
        let allowed = self.timed(|this| {
            Ok(if is_end {
                this.automaton()?.is_complete()?
            } else {
                this.step(token)?
            })
        })?;
        if allowed {
            self.consumed.push(Consumed { is_end });
        }
        Ok(allowed)
    }

    fn rollback(&mut self, tokens: u32) -> Steered<()> {
        let tokens = tokens as usize;
        let Some(kept) = self.consumed.len().checked_sub(tokens) else {
            return Err(past_the_beginning(tokens));
        };
        let fed = fed(&self.consumed[kept..]);
        self.timed(|this| Ok(this.automaton()?.rollback(fed)?))?;
        self.consumed.truncate(kept);
        Ok(())
    }

    fn mask(&mut self) -> Steered<SharedMask> {
        self.timed(Self::compute_mask)
    }

    fn forced(&mut self) -> Steered<Vec<Token>> {
        if self.has_ended() {
            return Ok(Vec::new());
        }
        let mut tokens = self.timed(|this| Ok(this.automaton()?.forced()?))?;
        tokens.truncate(FORCED_MAX);
        Ok(tokens)
    }

    fn fork(&mut self) -> Steered<Box<dyn HostConstraint>> {
        let automaton = self.automaton()?.fork()?;
        Ok(Box::new(Self {
            compiled: Arc::clone(&self.compiled),
            timing: self.timing.of_copy(&automaton),
            automaton: Some(automaton),
            consumed: self.consumed.clone(),
            automaton_bytes: self.automaton_bytes,
        }))
    }

    fn bytes(&mut self) -> usize {
        // A broken automaton does not say how large it is, but it does not grow any more either.
        if let Ok(automaton) = self.automaton()
            && let Ok(bytes) = automaton.bytes()
        {
            self.automaton_bytes = bytes;
        }
        let consumed = size_of_val(&self.consumed[..]);
        self.compiled.grammar_bytes() + self.automaton_bytes + consumed
    }
}

impl Drop for FollowedConstraint {
    fn drop(&mut self) {
        if let Some(automaton) = self.automaton.take() {
            self.compiled.recycle(automaton, fed(&self.consumed));
        }
    }
}

/// How many of these tokens the automaton has consumed.
fn fed(consumed: &[Consumed]) -> usize {
    consumed.iter().filter(|token| !token.is_end).count()
}
