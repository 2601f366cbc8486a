//! [`Steering`]: the steerer of one sequence, and the phase of its round.
//!
//! ```text
//!   round:  Pre ── pre: run, fork ──► Ready ── the batch computes the last known token ──► InMid ── a result ──► Pre
//!            │ └── pre: suspend ──► `pre` is called again in the next step
//!            └── no result yet ──► InPre ── a result, as from Pre
//! ```
//!
//! A steerer is foreign code: each call catches panics, and a panic ends the sequence with an error. When steerers
//! are called, and what follows from their results, is in [`super::steer_rounds`] and [`super::sampling`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Appended, Begun, Branch, Mid, Post, Pre, Sample, Steer, SteerFailure, Steered, StepReport,
    Token,
};
use sapwood_proto::time::Time;

use super::sequence::RunningSequence;
use super::steered_output::SteeredOutput;
use crate::stats::Counter;

/// A steerer whose result stays late for this many times its deadline (`steer_ms`) fails (AI-812). The limit is
/// a time and not a number of steps, because the length of a step depends on what else is in the batch.
const LATE_TIMES_MAX: u32 = 10;
/// Noops in a row after which a sequence counts as suspended. A runtime in another process answers with a noop when it is
/// late, and may do so ten times (AI-507).
const NOOPS_MAX: u32 = 7;

/// Tokens of an output row that a steerer is shown (AI-1009).
const BEST_TOKENS_MAX: usize = 64;

/// Limits against which the results of steerers are checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct SteerRules {
    /// A result is late if it takes longer than this (`steer_ms`).
    pub(super) deadline_budget: Duration,
    /// The size that masks must have.
    pub(super) vocabulary: u32,
}

/// The phase of a steerer within its round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SteerPhase {
    /// `pre` comes next.
    Pre,
    /// `pre` was first called at this time and has no result yet.
    InPre(Time),
    /// `pre` returned run; `mid` begins when the batch computes the sequence's last token.
    Ready,
    /// `mid` began at this time and has no result yet.
    InMid(Time),
}

/// The steerer of a sequence, with its state.
pub(super) struct Steering {
    steer: Box<dyn Steer>,
    /// [`Steer::ends_at_eos`].
    ends_at_eos: bool,
    /// [`Steer::limits_itself`].
    limits_itself: bool,
    /// [`Steer::best_tokens_wanted`].
    best_wanted: usize,
    /// Its number within the request, from 1; 0 before [`Steering::bind`].
    number: u32,
    /// The numbers of the sequences of a fork, for the next `mid` alone.
    group: Option<Arc<[u32]>>,
    phase: SteerPhase,
    /// How late its result is; `None` while it is not.
    late: Option<Lateness>,
    /// The panic of a method that returns no result, until the next one that does.
    failure: Option<SteerFailure>,
    /// It skips this step.
    suspended: bool,
    /// It skips steps until something happens that it has named, or has not done anything since (AI-1005).
    waits: bool,
    /// Rounds in a row that ended with a noop.
    noops: u32,
    /// Replaces the request's temperature.
    pub(super) temperature: Option<f32>,
    /// What belongs into the next report; `None`: nobody asked for reports.
    pending_report: Option<StepReport>,
    /// The reported output, for rollbacks and forks.
    pub(super) output: SteeredOutput,
}

#[derive(Clone, Copy, Debug)]
struct Lateness {
    /// When the result was first found late.
    since: Time,
    /// How many times the deadline has passed since, as far as it was logged.
    logged: u32,
}

impl std::fmt::Debug for Steering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Steering")
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}

impl Steering {
    /// The steering of a request that has begun. `watched`: it makes reports.
    pub(super) fn new(steer: Box<dyn Steer>, watched: bool, panics: &Counter) -> Self {
        let asked = fenced(panics, || {
            let wanted = steer.best_tokens_wanted();
            Ok((steer.ends_at_eos(), steer.limits_itself(), wanted))
        });
        let (ends_at_eos, limits_itself, best_wanted) = asked.clone().unwrap_or_default();
        Self {
            steer,
            ends_at_eos,
            limits_itself,
            best_wanted: best_wanted.min(BEST_TOKENS_MAX),
            number: 0,
            group: None,
            phase: SteerPhase::Pre,
            late: None,
            failure: asked.err(),
            suspended: false,
            waits: false,
            noops: 0,
            temperature: None,
            pending_report: watched.then(StepReport::default),
            output: SteeredOutput::default(),
        }
    }

    /// Polls the result of `begin`; `None`: there is none yet.
    pub(super) fn begin_poll(&mut self, panics: &Counter) -> Steered<Option<Begun>> {
        fenced(panics, || self.steer.begin_poll())
    }

    /// Sets the number of its sequence, unique in the request.
    pub(super) fn bind(&mut self, number: u32, panics: &Counter) {
        self.number = number;
        let bound = fenced(panics, || {
            self.steer.bind(number);
            Ok(())
        });
        self.failure = self.failure.take().or_else(|| bound.err());
    }

    /// Its number within the request.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Sets the numbers that the next `mid` receives, the parent's first.
    pub(super) fn set_group(&mut self, group: Arc<[u32]>) {
        self.group = Some(group);
    }

    /// Returns whether it skips this step because it is suspended.
    pub(super) fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Returns whether it counts as suspended in the search for deadlocks: noops do not go on for ever either.
    pub(super) fn is_idle(&self) -> bool {
        // The callback that follows a wait does not end the search by itself: a noop form of waiting runs one each time.
        self.suspended || self.noops > NOOPS_MAX || (self.waits && !self.is_late())
    }

    /// Returns whether it counts as suspended no more often than it is asked, which may be once in
    /// [`WAIT_TIME_MAX`](sapwood_proto::steer::WAIT_TIME_MAX).
    pub(super) fn is_waiting(&self) -> bool {
        self.waits
    }

    /// Returns whether `pre` was called and has no result yet.
    pub(super) fn is_in_pre(&self) -> bool {
        matches!(self.phase, SteerPhase::InPre(_))
    }

    /// Returns whether `mid` has begun and has no result yet.
    pub(super) fn is_in_mid(&self) -> bool {
        matches!(self.phase, SteerPhase::InMid(_))
    }

    /// Returns whether a result is missing and its deadline has passed.
    pub(super) fn is_late(&self) -> bool {
        self.late.is_some()
    }

    /// Returns whether a sampled EOG token ends the sequence; otherwise the steerer decides (AI-804).
    pub(super) fn ends_at_eos(&self) -> bool {
        self.ends_at_eos
    }

    /// Calls `pre` if a round begins or its result is missing; `None` if there is no result in this step.
    pub(super) fn pre(
        &mut self,
        now: Time,
        rules: SteerRules,
        panics: &Counter,
    ) -> Steered<Option<Pre>> {
        // Cleared by the next call and not before: until then it counts as suspended, also while it waits without a
        // slot (`fail_deadlocked` in `steer_rounds`).
        self.suspended = false;
        let since = match self.phase {
            SteerPhase::Pre => now,
            SteerPhase::InPre(since) => since,
            // A steerer whose `mid` has no result yet stays in that round: a call of `pre` would begin a second one
            // within it.
            SteerPhase::Ready | SteerPhase::InMid(_) => return Ok(None),
        };
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let Some(pre) = fenced(panics, || self.steer.pre())? else {
            self.phase = SteerPhase::InPre(since);
            self.check_late(since, now, rules.deadline_budget)?;
            return Ok(None);
        };
        self.late = None;
        self.phase = match pre {
            // The branches of a fork go on in this round.
            Pre::Run { .. } | Pre::Fork(_) => SteerPhase::Ready,
            Pre::Suspend | Pre::Wait | Pre::Stop => SteerPhase::Pre,
        };
        self.suspended = matches!(pre, Pre::Suspend | Pre::Wait);
        self.waits = match &pre {
            Pre::Wait => true,
            // What `mid` returns decides whether it has ended.
            Pre::Run { fast_forward } if fast_forward.is_empty() => self.waits,
            _ => false,
        };
        Ok(Some(pre))
    }

    /// Creates the steering of a branch, which goes on in the same phase as its parent.
    pub(super) fn branch(&mut self, index: u32, panics: &Counter) -> Steered<Self> {
        let steer = fenced(panics, || self.steer.fork(index))?;
        Ok(Self {
            phase: self.phase,
            noops: self.noops,
            temperature: self.temperature,
            output: self.output.clone(),
            ..Self::new(steer, self.pending_report.is_some(), panics)
        })
    }

    /// Starts `mid`, if `pre` has returned run.
    pub(super) fn begin_mid(&mut self, now: Time, panics: &Counter) {
        if self.phase != SteerPhase::Ready {
            return;
        }
        // Set even if the call below panics: the result is then collected, and fails, like any other.
        self.phase = SteerPhase::InMid(now);
        let group = self.group.take();
        let begun = fenced(panics, || {
            self.steer
                .mid_begin(group.as_deref().unwrap_or(&[self.number]));
            Ok(())
        });
        // Reported with the results of `mid`: a sequence that failed here would leave the batch while it is being built.
        self.failure = self.failure.take().or_else(|| begun.err());
    }

    /// Polls the result of `mid`, validates it, and ends the round. `None`: there is none yet.
    pub(super) fn poll_mid(
        &mut self,
        now: Time,
        rules: SteerRules,
        panics: &Counter,
    ) -> Steered<Option<Mid>> {
        let SteerPhase::InMid(since) = self.phase else {
            // Its row was cached in an earlier step (`cached_row`), and this round has only reached `pre`.
            return Ok(None);
        };
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        // Other sequences of the step are sampled in time whatever this steerer does.
        let Some(mid) = fenced(panics, || self.steer.mid_poll())? else {
            self.check_late(since, now, rules.deadline_budget)?;
            return Ok(None);
        };
        self.late = None;
        // Before the checks, because the round is over whatever they find: an invalid result ends the sequence.
        self.phase = SteerPhase::Pre;
        if does_nothing(&mid) {
            self.noops = self.noops.saturating_add(1);
        } else {
            self.noops = 0;
            self.waits = false;
        }
        check_mid(&mid, rules.vocabulary)?;
        Ok(Some(mid))
    }

    fn check_late(&mut self, since: Time, now: Time, budget: Duration) -> Steered<()> {
        // Being slower than the decode call is not late: the row waits and other sequences go on.
        if now.since(since) < budget {
            return Ok(());
        }
        // Counts from the first poll that found it late: a long decode call before that is not the steerer's fault.
        let late = self.late.get_or_insert(Lateness {
            since: now,
            logged: 0,
        });
        let allowed = budget * LATE_TIMES_MAX;
        let for_long = now.since(late.since);
        if for_long < allowed || self.limits_itself {
            let times = (1..LATE_TIMES_MAX).take_while(|&times| for_long >= budget * times);
            let times = u32::try_from(times.count()).unwrap_or(0) + 1;
            if times > late.logged {
                late.logged = times;
                self.log_late(times, budget);
            }
            return Ok(());
        }
        let allowed = allowed.as_millis();
        Err(SteerFailure {
            reason: ErrorReason::TIMEOUT,
            message: format!("the controller was late for more than {allowed} ms"),
        })
    }

    /// Logs for those who watch the controller that it was late (AI-812).
    fn log_late(&mut self, times: u32, budget: Duration) {
        if let Some(report) = &mut self.pending_report {
            let budget = budget.as_millis();
            report.logs.push_str(&format!(
                "⏲ timeout [deadline: {budget}ms; step {times}/{LATE_TIMES_MAX}]\n"
            ));
        }
    }

    /// Tells the steerer that the calls of this step are made.
    pub(super) fn flush(&mut self, panics: &Counter) {
        let flushed = fenced(panics, || {
            self.steer.flush();
            Ok(())
        });
        self.failure = self.failure.take().or_else(|| flushed.err());
    }

    /// How many of the best tokens of an output row it is shown.
    pub(super) const fn best_wanted(&self) -> usize {
        self.best_wanted
    }

    /// Shows it the best tokens of an output row.
    pub(super) fn show_best(&mut self, best: &[(Token, f32)], panics: &Counter) {
        let shown = fenced(panics, || {
            self.steer.show_best_tokens(best);
            Ok(())
        });
        self.failure = self.failure.take().or_else(|| shown.err());
    }

    /// Calls `post` with what happened to the sequence.
    pub(super) fn post(&mut self, appended: Appended<'_>, panics: &Counter) -> Steered<Post> {
        fenced(panics, || self.steer.post(appended))
    }

    /// Takes what was printed and written since the last report; `None`: nothing, or nobody asked for it.
    pub(super) fn take_report(&mut self, panics: &Counter) -> Option<StepReport> {
        let pending = self.pending_report.as_mut()?;
        match fenced(panics, || Ok(self.steer.take_report())) {
            Ok(Some(report)) => {
                pending.logs.push_str(&report.logs);
                pending.storage.extend(report.storage);
                pending.micros = pending.micros.saturating_add(report.micros);
            }
            Ok(None) => {}
            Err(failure) => self.failure = self.failure.take().or(Some(failure)),
        }
        // The time of steps without a report goes into the next one.
        (!pending.is_empty()).then(|| std::mem::take(pending))
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
    check_tokens(tokens, vocabulary)
}

/// Whether nothing happens to the sequence, however that is written.
fn does_nothing(mid: &Mid) -> bool {
    let branch = match mid {
        Mid::One(branch) => branch,
        Mid::Fork(branches) => match &branches[..] {
            [only] => only,
            _ => return false,
        },
        Mid::Stop => return false,
    };
    match branch {
        Branch::Noop => true,
        Branch::Splice(splice) => splice.backtrack == 0 && splice.tokens.is_empty(),
        Branch::Sample(_) => false,
    }
}

/// Checks that tokens are within the vocabulary.
pub(super) fn check_tokens(tokens: &[Token], vocabulary: u32) -> Steered<()> {
    match tokens.iter().find(|&&token| token >= vocabulary) {
        Some(token) => Err(bad_result(format!(
            "token {token} is outside the vocabulary"
        ))),
        None => Ok(()),
    }
}

fn check_mid(mid: &Mid, vocabulary: u32) -> Steered<()> {
    let branches = match mid {
        Mid::One(branch) => std::slice::from_ref(branch),
        Mid::Fork(branches) if branches.is_empty() => {
            return Err(bad_result("a fork needs at least one branch"));
        }
        Mid::Fork(branches) => branches,
        Mid::Stop => &[],
    };
    for branch in branches {
        if let Branch::Sample(sample) = branch {
            check_sample(sample, vocabulary)?;
        }
    }
    Ok(())
}

fn check_sample(sample: &Sample, vocabulary: u32) -> Steered<()> {
    let Sample {
        mask,
        bias,
        temperature,
        splices,
    } = sample;
    if mask
        .as_ref()
        .is_some_and(|mask| mask.vocabulary() != vocabulary as usize)
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
    // All of them, although one at most applies: whether a result is valid must not depend on the sampled token.
    splices
        .iter()
        .try_for_each(|conditional| check_tokens(&conditional.splice.tokens, vocabulary))
}

/// A steerer returned something that cannot be done.
pub(super) fn bad_result(message: impl Into<String>) -> SteerFailure {
    SteerFailure {
        reason: ErrorReason::BAD_RESULT,
        message: message.into(),
    }
}

/// Calls a steerer; converts its panic into a failure and counts it.
fn fenced<T>(panics: &Counter, call: impl FnOnce() -> Steered<T>) -> Steered<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_panic| {
        // The steerer is not called again: its sequence ends with this failure.
        panics.add(1);
        Err(SteerFailure {
            reason: ErrorReason::TRAP,
            message: "the controller panicked".to_owned(),
        })
    })
}

#[cfg(test)]
mod tests;
