//! [`Table`]: the sequences of the main channel by their ids, and the ids whose sequences have failed.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepReport, Token};

use super::answer::{Label, RESULT_TOO_LARGE, SeqResult};
use super::envelope::RequestError;
use super::sequence::{CallFailure, Pace};
use crate::steer::add_report;

/// Time limits and sizes of the steps of both dialects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepConfig {
    /// Tokens of the vocabulary.
    pub(crate) vocabulary: usize,
    /// The token that ends a text.
    pub(crate) eos: Token,
    /// P1: for post and pre together.
    pub(crate) pre_step_time: Duration,
    /// For mid.
    pub(crate) step_time: Duration,
    /// P1: waited longer than the limit, once per request.
    pub(crate) grace_time: Duration,
    /// Late steps in a row until a sequence fails.
    pub(crate) late_steps: u32,
    /// P1: a late mid skips the step instead of failing.
    pub(crate) late_mid_skips: bool,
    /// P1: a `pre` that appends tokens is answered again until the next mid or post (AI-316).
    pub(crate) repeats_pre: bool,
    /// Live sequences of one request.
    pub(crate) forks: usize,
    /// Live sequences of the runtime.
    pub(crate) sequences: usize,
}

impl StepConfig {
    /// How long a request of P1 waits for post and pre.
    pub(crate) const fn pre_wait(&self) -> Duration {
        self.pre_step_time.saturating_add(self.grace_time)
    }

    /// How long a request of P1 waits for mid.
    pub(crate) const fn mid_wait(&self) -> Duration {
        self.step_time.saturating_add(self.grace_time)
    }
}

/// The steps in a row in which a sequence was late.
///
/// A sequence that was late once is not waited for again while others are (see [`Table::gather`]), so an engine may ask
/// for it many times within one time limit. Those are one late step, or a fast engine would end a callback after a
/// fraction of its time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LateSteps {
    steps: u32,
    /// When the last of them was counted.
    counted: Option<Instant>,
}

/// The time limit of a phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseLimit {
    /// As the log names it.
    pub(crate) deadline: Duration,
    /// How long a request waits at most, with grace.
    pub(crate) wait: Duration,
    /// Whether the last of the late steps is answered as those before it, and the one after it fails the sequence, as in
    /// P2. In P1 the last fails it.
    pub(crate) answers_last: bool,
}

impl LateSteps {
    /// Counts a late step of a phase, unless the last one was counted less than its wait ago. Returns the log line;
    /// `None`: it was one too many, and the sequence fails (AI-441, AI-507).
    pub(crate) fn add(
        &mut self,
        config: &StepConfig,
        limit: PhaseLimit,
        now: Instant,
    ) -> Option<String> {
        let since = |counted| now.saturating_duration_since(counted);
        if self.counted.is_none_or(|it| since(it) >= limit.wait) {
            self.steps += 1;
            self.counted = Some(now);
        }
        let (deadline, step, most) = (limit.deadline.as_millis(), self.steps, config.late_steps);
        let goes_on = step < most || (limit.answers_last && step == most);
        goes_on.then(|| format!("⏲ timeout [deadline: {deadline}ms; step {step}/{most}]"))
    }

    /// A step was in time.
    pub(crate) const fn clear(&mut self) {
        self.steps = 0;
        self.counted = None;
    }
}

/// When a request arrived, and who waits.
#[derive(Clone, Copy)]
pub(crate) struct StepClock<'a> {
    pub(crate) arrival: Instant,
    pub(crate) pace: &'a dyn Pace,
}

/// What the request that is being answered has of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TurnProgress {
    /// Nothing is expected of it: it is not listed, or waits for something.
    #[default]
    Idle,
    /// A callback that this request has started.
    Running,
    /// A callback that was late in an earlier request, and goes on.
    Late,
    /// Its result is there.
    Ended,
}

impl TurnProgress {
    /// Whether a callback of it runs.
    pub(crate) const fn is_awaited(self) -> bool {
        matches!(self, Self::Running | Self::Late)
    }

    /// Its callback has ended, which is of no interest where nothing was expected of it.
    pub(crate) const fn end(&mut self) {
        if self.is_awaited() {
            *self = Self::Ended;
        }
    }
}

/// A sequence in its dialect.
pub(crate) trait Turn {
    /// Takes what its controller has returned.
    fn advance(&mut self) -> TurnProgress;
}

/// The sequences by id.
#[derive(Debug)]
pub(crate) struct Table<L> {
    pub(crate) entries: BTreeMap<u64, Entry<L>>,
}

/// An id that was bound and not freed yet.
#[derive(Debug)]
pub(crate) enum Entry<L> {
    Live(L),
    /// A tombstone: its sequence failed (AI-402).
    Failed(Failure),
}

/// Why a sequence failed; all its later ops are answered with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// One of its callbacks.
    Callback,
    /// The runtime gave it up.
    Worker(String),
}

/// The failure of an op, and its answer. Boxed, because results are passed through several calls.
#[derive(Debug)]
pub(crate) struct OpError(Box<(Failure, SeqResult)>);

impl OpError {
    pub(crate) fn of(parts: (Failure, SeqResult)) -> Self {
        Self(Box::new(parts))
    }

    pub(crate) fn into_parts(self) -> (Failure, SeqResult) {
        *self.0
    }
}

impl Failure {
    /// A failure of the runtime, as an error.
    pub(crate) fn op_error(message: impl Into<String>) -> OpError {
        OpError::of(Self::worker(message))
    }

    /// The failure of a callback, and the answer that reports it.
    pub(crate) fn of_call(
        failure: &CallFailure,
        label: Label,
        report: StepReport,
    ) -> (Self, SeqResult) {
        // The host interrupts what runs for far too long; that is not the controller's word (AI-431).
        if failure.reason == ErrorReason::TIMEOUT {
            return Self::worker("timeout");
        }
        // Neither is the end of its process, which anybody may have caused (AI-742).
        if failure.reason == ErrorReason::RUNTIME_LOST {
            return Self::worker("died");
        }
        (Self::Callback, failed_call(failure, label, report))
    }

    /// A failure of the runtime, and the answer that reports it.
    pub(crate) fn worker(message: impl Into<String>) -> (Self, SeqResult) {
        let message = message.into();
        let answer = SeqResult::worker_error(&message);
        (Self::Worker(message), answer)
    }

    /// The answer to a later op (AI-422).
    pub(crate) fn answer(&self, label: Label) -> SeqResult {
        match self {
            Self::Callback => {
                SeqResult::callback_error(label, "Previous WASM Error", StepReport::default())
            }
            Self::Worker(message) => SeqResult::worker_error(message),
        }
    }
}

impl<L> Default for Table<L> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
        }
    }
}

impl<L: Turn> Table<L> {
    /// Waits until no sequence has to be waited for, at most until `until`.
    ///
    /// A sequence that was late before is waited for only where nobody else would be held up: its result is in the first
    /// request that finds it.
    pub(crate) fn gather(&mut self, clock: StepClock<'_>, until: Instant) {
        self.gather_of(clock, until, |_| true);
    }

    /// As [`Self::gather`], but waits for some sequences only.
    pub(crate) fn gather_of(
        &mut self,
        clock: StepClock<'_>,
        until: Instant,
        is_waited_for: impl Fn(&L) -> bool,
    ) {
        loop {
            let (mut running, mut late, mut ended) = (false, false, false);
            for entry in self.entries.values_mut() {
                let Entry::Live(live) = entry else { continue };
                match live.advance() {
                    TurnProgress::Running => running |= is_waited_for(live),
                    TurnProgress::Late => late |= is_waited_for(live),
                    TurnProgress::Ended => ended = true,
                    TurnProgress::Idle => {}
                }
            }
            let waits = running || (late && !ended);
            if !waits || clock.pace.now() >= until {
                return;
            }
            clock.pace.wait(until);
        }
    }

    /// Their results were too large for the answer, which said so.
    pub(crate) fn fail(&mut self, ids: &[u64]) {
        for id in ids {
            // Those that were freed in the same request are gone already.
            if let Some(entry) = self.entries.get_mut(id) {
                *entry = Entry::Failed(Failure::Worker(RESULT_TOO_LARGE.into()));
            }
        }
    }

    /// Returns the live sequences.
    pub(crate) fn lives(&self) -> impl Iterator<Item = &L> {
        self.entries.values().filter_map(|entry| match entry {
            Entry::Live(live) => Some(live),
            Entry::Failed(_) => None,
        })
    }

    /// Returns a live sequence.
    pub(crate) fn live(&mut self, id: u64) -> Option<&mut L> {
        match self.entries.get_mut(&id) {
            Some(Entry::Live(live)) => Some(live),
            _ => None,
        }
    }
}

/// The answer of a callback that failed.
pub(crate) fn failed_call(
    failure: &CallFailure,
    label: Label,
    mut report: StepReport,
) -> SeqResult {
    // The message of a trap begins with what the callback printed; in the logs it stands once (AI-421).
    let printed = failure.message.len() - failure.without_log().len();
    let printed = failure.message[..printed].trim_end_matches('\n');
    let logs = report.logs.trim_end_matches('\n');
    if let Some(before) = logs.strip_suffix(printed)
        && !printed.is_empty()
    {
        report.logs.truncate(before.len());
    }
    SeqResult::callback_error(label, &failure.message, report)
}

/// Checks that ids and lists are within the limits of the protocol (AI-222).
pub(crate) fn check_ids(ids: impl Iterator<Item = u64>) -> Result<(), RequestError> {
    let mut count = 0;
    for id in ids {
        if id > ID_MAX {
            return Err(RequestError::user(format!(
                "id {id} is larger than 2^53 - 1"
            )));
        }
        count += 1;
        if count > LIST_MAX {
            return Err(RequestError::user(format!("more than {LIST_MAX} entries")));
        }
    }
    Ok(())
}

/// Checks that a list of tokens is within the limit of the protocol (AI-222).
pub(crate) fn check_tokens(tokens: &[Token]) -> Result<(), RequestError> {
    if tokens.len() > LIST_MAX {
        return Err(RequestError::user(format!("more than {LIST_MAX} entries")));
    }
    Ok(())
}

/// Checks that no id occurs twice.
pub(crate) fn check_unique(ids: impl Iterator<Item = u64>) -> Result<(), RequestError> {
    let mut seen = HashSet::new();
    for id in ids {
        if !seen.insert(id) {
            return Err(RequestError::user(format!("duplicate id {id}")));
        }
    }
    Ok(())
}

/// The largest id: JSON numbers are exact up to there in every language.
const ID_MAX: u64 = (1 << 53) - 1;
/// Entries of a list.
pub(crate) const LIST_MAX: usize = 65_536;

/// Adds the report of one callback to that of a phase. What several callbacks print and write in a step has the limits of
/// one, and keeps its end (AI-608, AI-953).
pub(crate) fn merge(into: &mut StepReport, report: StepReport) {
    add_report(into, report);
    let over = into.storage.len().saturating_sub(WRITES_MAX);
    into.storage.drain(..over);
}

/// Writes of one step.
const WRITES_MAX: usize = 1_024;

/// The id as controllers get it: theirs have 32 bits.
pub(crate) const fn controller_id(id: u64) -> u32 {
    (id & 0xffff_ffff) as u32
}
