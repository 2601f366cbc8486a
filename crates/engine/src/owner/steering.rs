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
use sapwood_proto::steer::{Mask, Mid, Post, Pre, Steer, SteerFailure, Steered, Token};
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
    phase: SteerPhase,
    /// When its result was first found late; `None` while it is not.
    late: Option<Time>,
    /// The panic of `mid_begin`, until the results of `mid` are collected.
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
            phase: SteerPhase::Pre,
            late: None,
            failure: None,
            suspended: false,
            output: Vec::new(),
        }
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
        let pre = fenced(panics, || self.steer.pre());
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
            self.steer.mid_begin(now);
            Ok(())
        });
        // Reported with the results of `mid`: a request that failed here would leave the batch while it is being built.
        self.failure = begun.err();
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
        let Some(mid) = fenced(panics, || self.steer.mid_poll(now))? else {
            return self.check_late(since, now, rules.deadline_budget);
        };
        self.late = None;
        // Before the checks, because the round is over whatever they find: an invalid result fails the request.
        self.phase = SteerPhase::Pre;
        if let Mid::Sample {
            mask,
            bias,
            temperature,
        } = &mid
        {
            check_sample(mask.as_ref(), bias, *temperature, rules.vocabulary)?;
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

    /// Calls `post` with tokens that were appended after a rollback of `backtrack` tokens.
    pub(super) fn post(
        &mut self,
        backtrack: u32,
        tokens: &[Token],
        sampled: bool,
        panics: &Counter,
    ) -> Steered<Post> {
        fenced(panics, || self.steer.post(backtrack, tokens, sampled))
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

fn check_sample(
    mask: Option<&Mask>,
    bias: &[(Token, f32)],
    temperature: Option<f32>,
    vocabulary: usize,
) -> Steered<()> {
    if mask.is_some_and(|mask| mask.vocabulary() != vocabulary) {
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
mod tests {
    use super::*;

    const RULES: SteerRules = SteerRules {
        deadline_budget: Duration::from_millis(10),
        vocabulary: 8,
    };

    /// Returns the results in order; `None` is a `mid` without a result yet. Panics in `mid_begin` if told to.
    #[derive(Default)]
    struct Script {
        mids: Vec<Option<Mid>>,
        panics: bool,
    }

    impl Steer for Script {
        fn pre(&mut self) -> Steered<Pre> {
            let fast_forward = Vec::new();
            Ok(Pre::Run { fast_forward })
        }

        fn mid_begin(&mut self, _now: Time) {
            assert!(!self.panics, "scripted panic");
        }

        fn mid_poll(&mut self, _now: Time) -> Steered<Option<Mid>> {
            Ok(self.mids.pop().flatten())
        }

        fn post(&mut self, _backtrack: u32, _tokens: &[Token], _sampled: bool) -> Steered<Post> {
            Ok(Post::Continue)
        }

        fn fork(&mut self, _index: u32) -> Steered<Box<dyn Steer>> {
            Ok(Box::new(Self::default()))
        }
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn a_round_is_pre_then_mid_then_pre_again() {
        let panics = Counter::default();
        let mids = vec![Some(Mid::Stop)];
        let mut steering = Steering::new(Box::new(Script {
            mids,
            panics: false,
        }));
        steering.begin_mid(at(0), &panics);
        assert!(!steering.is_in_mid(), "pre comes first");
        assert!(steering.pre(&panics).is_some());
        assert!(steering.pre(&panics).is_none(), "once in a round");
        steering.begin_mid(at(0), &panics);
        assert!(steering.is_in_mid());
        let mid = steering.poll_mid(at(1), RULES, &panics);
        assert!(matches!(mid, Ok(Some(Mid::Stop))));
        assert!(steering.pre(&panics).is_some(), "the next round");
    }

    #[test]
    fn ai_812_lateness_counts_from_the_first_poll_that_finds_it() {
        let panics = Counter::default();
        let mut steering = Steering::new(Box::new(Script::default()));
        let _ = steering.pre(&panics);
        steering.begin_mid(at(0), &panics);
        // A decode call of a minute is not the steerer's fault.
        for ms in [60_000, 60_099] {
            let mid = steering.poll_mid(at(ms), RULES, &panics);
            assert!(matches!(mid, Ok(None)));
        }
        let late = steering.poll_mid(at(60_100), RULES, &panics);
        assert!(matches!(late, Err(failure) if failure.reason == "timeout"));
    }

    #[test]
    fn a_panic_before_the_decode_call_is_reported_after_it() {
        let panics = Counter::default();
        let mut steering = Steering::new(Box::new(Script {
            mids: Vec::new(),
            panics: true,
        }));
        let _ = steering.pre(&panics);
        steering.begin_mid(at(0), &panics);
        let mid = steering.poll_mid(at(1), RULES, &panics);
        assert!(matches!(mid, Err(failure) if failure.reason == "trap"));
        assert_eq!(panics.get(), 1);
    }

    #[test]
    fn a_branch_goes_on_in_the_round_of_its_parent() {
        let panics = Counter::default();
        let mut steering = Steering::new(Box::new(Script::default()));
        let mut branch = steering.branch(1, &panics).unwrap();
        assert!(branch.pre(&panics).is_none());
        branch.begin_mid(at(0), &panics);
        assert!(branch.is_in_mid());
    }

    #[test]
    fn results_outside_the_vocabulary_are_refused() {
        let refused = |mid| {
            let panics = Counter::default();
            let mids = vec![Some(mid)];
            let mut steering = Steering::new(Box::new(Script {
                mids,
                panics: false,
            }));
            let _ = steering.pre(&panics);
            steering.begin_mid(at(0), &panics);
            steering.poll_mid(at(1), RULES, &panics).is_err()
        };
        let sample = |mask, bias, temperature| Mid::Sample {
            mask,
            bias,
            temperature,
        };
        assert!(!refused(sample(
            Some(Mask::all(8)),
            vec![(1, 0.5)],
            Some(1.0)
        )));
        assert!(refused(sample(Some(Mask::all(9)), Vec::new(), None)));
        assert!(refused(sample(None, vec![(1, f32::NAN)], None)));
        assert!(refused(sample(None, Vec::new(), Some(-1.0))));
    }
}
