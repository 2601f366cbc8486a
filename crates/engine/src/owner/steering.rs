//! [`Steering`]: the steerer of one sequence, and the phase of its round.
//!
//! ```text
//!   round:  Pre ── pre: run ──► Ready ── the batch computes the last known token ──► Begun ── mid has a result ──► Pre
//!            └── pre: suspend ──► `pre` is called again in the next step
//! ```
//!
//! A steerer is foreign code: each call catches panics, and a panic fails the request of the sequence. When steerers
//! are called, and what follows from their results, is in [`super::steer_rounds`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Branch, Mid, Post, Pre, Sample, Steer, SteerFailure, Steered, Token,
};
use sapwood_proto::time::Time;

use super::sequence::RunningSequence;
use crate::api::Sampled;
use crate::stats::Counter;

/// A steerer whose result stays late for this many times its deadline (`steer_ms`) fails its request (AI-812). The limit is
/// a time and not a number of steps, because the length of a step depends on what else is in the batch.
const LATE_TIMES_MAX: u32 = 10;

/// Limits against which the results of steerers are checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct SteerRules {
    /// `mid` is late if it takes longer than this (`steer_ms`).
    pub(super) deadline_budget: Duration,
    /// The size that masks must have.
    pub(super) vocabulary: usize,
}

/// The phase of a steerer within its round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SteerPhase {
    /// `pre` comes next.
    Pre,
    /// `pre` returned run; `mid` begins when the batch computes the sequence's last token.
    Ready,
    /// `mid` began at this time and has no result yet.
    Begun(Time),
}

/// The steerer of a sequence, with its state.
pub(super) struct Steering {
    steer: Box<dyn Steer>,
    /// Its number within the request, from 1; 0 before [`Steering::bind`].
    number: u32,
    phase: SteerPhase,
    /// When its result was first found late; `None` while it is not.
    late: Option<Time>,
    /// The panic of a method that returns no result, until the next one that does.
    failure: Option<SteerFailure>,
    /// It skips this step.
    suspended: bool,
    /// The reported output, for rewinds and forks.
    pub(super) output: Vec<Sampled>,
}

impl std::fmt::Debug for Steering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Steering")
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}

impl Steering {
    pub(super) fn new(steer: Box<dyn Steer>) -> Self {
        Self {
            steer,
            number: 0,
            phase: SteerPhase::Pre,
            late: None,
            failure: None,
            suspended: false,
            output: Vec::new(),
        }
    }

    /// Sets the number of its sequence, unique in the request.
    pub(super) fn bind(&mut self, number: u32, panics: &Counter) {
        self.number = number;
        let bound = fenced(panics, || {
            self.steer.bind(number);
            Ok(())
        });
        self.failure = bound.err();
    }

    /// Returns whether it skips this step.
    pub(super) fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Returns whether `mid` has begun and has no result yet.
    pub(super) fn is_in_mid(&self) -> bool {
        matches!(self.phase, SteerPhase::Begun(_))
    }

    /// Calls `pre` if a round begins; `None` if one is in progress.
    pub(super) fn pre(&mut self, panics: &Counter) -> Option<Steered<Pre>> {
        // Cleared by the next call and not before: until then it counts as suspended, also while it waits without a
        // slot (`fail_deadlocked` in `steer_rounds`).
        self.suspended = false;
        // A steerer whose `mid` has no result yet stays in that round: a call of `pre` would begin a second one within it.
        if self.phase != SteerPhase::Pre {
            return None;
        }
        if let Some(failure) = self.failure.take() {
            return Some(Err(failure));
        }
        let pre = match fenced(panics, || self.steer.pre()) {
            Ok(Some(pre)) => Ok(pre),
            // Asked again in the next step.
            Ok(None) => return None,
            Err(failure) => Err(failure),
        };
        match &pre {
            // A fork becomes `Ready` only when it is complete (`forked`), because it may fail half way.
            Ok(Pre::Run { .. }) => self.phase = SteerPhase::Ready,
            Ok(Pre::Suspend) => self.suspended = true,
            _ => {}
        }
        Some(pre)
    }

    /// The fork that `pre` requested is complete: the round goes on.
    pub(super) fn forked(&mut self) {
        self.phase = SteerPhase::Ready;
    }

    /// Creates the steering of a branch, which goes on in the same round as its parent.
    pub(super) fn branch(&mut self, index: u32, panics: &Counter) -> Steered<Self> {
        let steer = fenced(panics, || self.steer.fork(index))?;
        Ok(Self {
            phase: SteerPhase::Ready,
            output: self.output.clone(),
            ..Self::new(steer)
        })
    }

    /// Starts `mid`, if `pre` has returned run.
    pub(super) fn begin_mid(&mut self, now: Time, panics: &Counter) {
        if self.phase != SteerPhase::Ready {
            return;
        }
        // Set even if the call below panics: the result is then collected, and fails, like any other.
        self.phase = SteerPhase::Begun(now);
        let begun = fenced(panics, || {
            self.steer.mid_begin(&[self.number]);
            Ok(())
        });
        // Reported with the results of `mid`: a request that failed here would leave the batch while it is being built.
        self.failure = self.failure.take().or(begun.err());
    }

    /// Polls the result of `mid`, validates it, and ends the round. `None`: there is none yet.
    pub(super) fn poll_mid(
        &mut self,
        now: Time,
        rules: SteerRules,
        panics: &Counter,
    ) -> Steered<Option<Mid>> {
        let SteerPhase::Begun(since) = self.phase else {
            // Its row was cached in an earlier step (`cached_row`), and this round has only reached `pre`.
            return Ok(None);
        };
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        // Polled once and never waited for: other sequences of the step are sampled in time whatever this steerer does.
        let Some(mid) = fenced(panics, || self.steer.mid_poll())? else {
            return self.check_late(since, now, rules.deadline_budget);
        };
        self.late = None;
        // Before the checks, because the round is over whatever they find: an invalid result fails the request.
        self.phase = SteerPhase::Pre;
        if let Mid::One(Branch::Sample(sample)) = &mid {
            check_sample(sample, rules.vocabulary)?;
        }
        Ok(Some(mid))
    }

    fn check_late(&mut self, since: Time, now: Time, budget: Duration) -> Steered<Option<Mid>> {
        // Being slower than the decode call is not late: the row waits and other sequences go on.
        if now.since(since) < budget {
            return Ok(None);
        }
        // Counts from the first poll that found it late: a long decode call before that is not the steerer's fault.
        let late = now.since(*self.late.get_or_insert(now));
        let allowed = budget * LATE_TIMES_MAX;
        if late < allowed {
            return Ok(None);
        }
        let allowed = allowed.as_millis();
        Err(SteerFailure {
            reason: ErrorReason::TIMEOUT,
            message: format!("the controller was late for more than {allowed} ms"),
        })
    }

    /// Calls `post` with what happened to the sequence.
    pub(super) fn post(&mut self, appended: Appended<'_>, panics: &Counter) -> Steered<Post> {
        fenced(panics, || self.steer.post(appended))
    }
}

/// Checks a splice: it stays within the output and the vocabulary (AI-826).
pub(super) fn check_splice(
    sequence: &RunningSequence,
    backtrack: u32,
    tokens: &[Token],
    vocabulary: u32,
) -> Steered<()> {
    let output = sequence.tokens.len() - sequence.prompt_tokens;
    if backtrack as usize > output {
        let message = format!("backtrack {backtrack} past the beginning");
        return Err(bad_result(message));
    }
    match tokens.iter().find(|&&token| token >= vocabulary) {
        Some(token) => Err(bad_result(format!(
            "token {token} is outside the vocabulary"
        ))),
        None => Ok(()),
    }
}

fn check_sample(sample: &Sample, vocabulary: usize) -> Steered<()> {
    let Sample {
        mask,
        bias,
        temperature,
        ..
    } = sample;
    if mask
        .as_ref()
        .is_some_and(|mask| mask.vocabulary() != vocabulary)
    {
        return Err(bad_result("the mask is not over the model's vocabulary"));
    }
    if temperature.is_some_and(|temperature| !(0.0..=100.0).contains(&temperature)) {
        return Err(bad_result("temperature must be from 0 to 100"));
    }
    // Minus infinity forbids a token and is allowed. A huge positive bias would overflow to infinity, which the sampler
    // takes for a defect of the model.
    if bias.iter().any(|(_, bias)| bias.is_nan() || *bias > 1e30) {
        return Err(bad_result("a bias must be at most 1e30"));
    }
    Ok(())
}

fn bad_result(message: impl Into<String>) -> SteerFailure {
    SteerFailure {
        reason: ErrorReason::BAD_RESULT,
        message: message.into(),
    }
}

/// Calls a steerer; converts its panic into a failure and counts it.
fn fenced<T>(panics: &Counter, call: impl FnOnce() -> Steered<T>) -> Steered<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_panic| {
        // The steerer is not called again: its request fails, and its sequences are dropped with it.
        panics.add(1);
        Err(SteerFailure {
            reason: ErrorReason::TRAP,
            message: "the controller panicked".to_owned(),
        })
    })
}

#[cfg(test)]
mod tests;
