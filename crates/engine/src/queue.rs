//! Quota of an engine's admission queue: charges requests and their prompt tokens, limits the share of each caller, and
//! estimates when there is room again (OA-910).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use crate::api::EngineError;
use crate::stats::EngineStats;
use crate::submission::Submission;

/// Limits of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLimits {
    pub(crate) requests: usize,
    pub(crate) tokens: usize,
}

/// The limit that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueFull {
    Requests,
    Tokens,
}

/// Charges requests that were submitted and are not yet admitted. Above the limits a quarter more is reserved for
/// callers with few queued requests, so that a caller who fills the queue does not lock out others (D-54).
#[derive(Debug, Default)]
pub(crate) struct AdmissionQueue {
    shares: Mutex<CallerShares>,
    /// Smoothed microseconds between requests that leave the queue; 0: not measured yet. Only the owner writes it.
    pace_us: AtomicU64,
}

/// `all` is the sum of `callers`; a caller without queued requests has no entry.
#[derive(Debug, Default)]
struct CallerShares {
    all: QueueCharge,
    callers: HashMap<u64, QueueCharge>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct QueueCharge {
    requests: usize,
    tokens: usize,
}

impl AdmissionQueue {
    /// Charges a request of `caller` and its prompt tokens. A request that finds the queue empty is always accepted.
    pub(crate) fn enter(
        &self,
        caller: u64,
        prompt_tokens: usize,
        limits: QueueLimits,
    ) -> Result<(), QueueFull> {
        // The owner takes this lock too, when a request leaves the queue. It is only ever held for these few
        // operations, so no submitter can delay a step.
        let mut shares = self.lock();
        let QueueCharge { requests, tokens } = shares.all;
        let theirs = shares.callers.get(&caller).copied().unwrap_or_default();
        let theirs = theirs.and(prompt_tokens);
        if requests >= room(limits.requests, theirs.requests, requests) {
            return Err(QueueFull::Requests);
        }
        let all = tokens.saturating_add(prompt_tokens);
        // An empty queue accepts any prompt that fits the context: it would be refused for ever otherwise.
        if tokens > 0 && all > room(limits.tokens, theirs.tokens, tokens) {
            return Err(QueueFull::Tokens);
        }
        shares.all = shares.all.and(prompt_tokens);
        shares.callers.insert(caller, theirs);
        Ok(())
    }

    /// Refunds the charge of a request.
    pub(crate) fn refund(&self, submission: &Submission) {
        self.leave(submission.turn.caller, submission.prompt.len());
    }

    /// Replaces the charge of a request whose prompt was replaced.
    pub(crate) fn recharge(&self, caller: u64, from: usize, to: usize) {
        let mut shares = self.lock();
        shares.all = shares.all.without(from).and(to);
        let theirs = shares.callers.entry(caller).or_default();
        *theirs = theirs.without(from).and(to);
    }

    pub(crate) fn leave(&self, caller: u64, prompt_tokens: usize) {
        let mut shares = self.lock();
        shares.all = shares.all.without(prompt_tokens);
        if let Entry::Occupied(mut theirs) = shares.callers.entry(caller) {
            let left = theirs.get().without(prompt_tokens);
            *theirs.get_mut() = left;
            // Removed with the last request, so that the table does not grow with the number of callers ever seen.
            if left == QueueCharge::default() {
                theirs.remove();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, CallerShares> {
        // Nothing panics while it is held; even then the counts would only be off by one request.
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when a caller that was refused should retry.
    pub(crate) fn retry_after(&self) -> Duration {
        let pace = match self.pace_us.load(Ordering::Relaxed) {
            0 => None,
            pace => Some(Duration::from_micros(pace)),
        };
        retry_after(self.lock().all.requests, pace)
    }

    /// OA-205: counts a request that was refused, and returns its error with the time after which a retry makes sense.
    /// `tokens` is what its tokens are called.
    pub(crate) fn refused(
        &self,
        full: QueueFull,
        stats: &EngineStats,
        tokens: &'static str,
    ) -> EngineError {
        // Counted here and not by the owner, which never sees a refused request.
        let (counter, what) = match full {
            QueueFull::Requests => (&stats.rejected_queue, "requests"),
            QueueFull::Tokens => (&stats.rejected_tokens, tokens),
        };
        counter.add(1);
        let message = format!("too many {what} wait for this model: try again later");
        let rejection = EngineError::new(Code::Overloaded, ErrorReason::ENGINE_BUSY, message);
        rejection.after(self.retry_after())
    }

    /// For the owner: publishes the measured pace.
    pub(crate) fn publish(&self, pace: &QueuePace) {
        let micros = pace.smoothed.map_or(0, |pace| {
            // At least 1, because 0 means that nothing was measured.
            u64::try_from(pace.as_micros()).unwrap_or(u64::MAX).max(1)
        });
        self.pace_us.store(micros, Ordering::Relaxed);
    }
}

impl QueueCharge {
    /// Returns the sum with one more request of `tokens` tokens.
    const fn and(self, tokens: usize) -> Self {
        Self {
            requests: self.requests + 1,
            tokens: self.tokens.saturating_add(tokens),
        }
    }

    const fn without(self, tokens: usize) -> Self {
        Self {
            // A refund that is made twice must not wrap around to a queue that is full for ever.
            requests: self.requests.saturating_sub(1),
            tokens: self.tokens.saturating_sub(tokens),
        }
    }
}

/// Returns the limit for a caller that has `theirs` queued, if `most` is the configured limit and `taken` is queued in
/// all. A caller with little queued gets a higher limit, but never has more than is left: each such caller leaves at
/// least half of the room that it found, so a caller with nothing queued still finds room.
const fn room(most: usize, theirs: usize, taken: usize) -> usize {
    if theirs <= most / 16 && theirs <= at_most(most).saturating_sub(taken) {
        at_most(most)
    } else {
        most
    }
}

/// The absolute limit: the configured one and a quarter more.
pub(crate) const fn at_most(limit: usize) -> usize {
    limit.saturating_add(limit / 4)
}

/// Measures the time between requests that leave the queue while others wait.
#[derive(Debug, Default)]
pub(crate) struct QueuePace {
    last: Option<Time>,
    smoothed: Option<Duration>,
}

impl QueuePace {
    /// Records that a request which arrived at `arrived` is admitted at `now`. Time in which the queue was empty does
    /// not count.
    pub(crate) fn departed(&mut self, arrived: Time, now: Time) {
        // From its own arrival if that was later than the last departure: it could not leave before it came.
        let since = self.last.map_or(arrived, |last| last.max(arrived));
        self.last = Some(now);
        let gap = now.since(since);
        // Exponential smoothing with weight 1/8: a single gap changes little, a handful of recent gaps outweighs the
        // past.
        self.smoothed = Some(match self.smoothed {
            Some(before) => (before * 7 + gap) / 8,
            None => gap,
        });
    }

    /// Returns how long it takes until this many requests have left the queue; `None` if none has left yet.
    pub(crate) fn after(&self, requests: u32) -> Option<Duration> {
        self.smoothed.map(|gap| gap.saturating_mul(requests))
    }
}

/// Waits until half of the queue has left, so that the clients that retry find room for more than one of them. Whole
/// seconds, 1 to 60 (OA-202); one second if no pace has been measured.
fn retry_after(waiting: usize, pace: Option<Duration>) -> Duration {
    let Some(pace) = pace else { return LEAST };
    let half = u32::try_from(waiting.div_ceil(2)).unwrap_or(u32::MAX);
    let wait = pace.saturating_mul(half).clamp(LEAST, MOST);
    Duration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
}

const LEAST: Duration = Duration::from_secs(1);
const MOST: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_910_retry_after_follows_from_queue_length_and_pace() {
        let milliseconds = |pace| Some(Duration::from_millis(pace));
        for (waiting, pace, seconds) in [
            (0, None, 1),
            (1_024, None, 1),
            (1_024, milliseconds(1), 1),
            (10, milliseconds(500), 3),
            (1_024, milliseconds(20), 11),
            (1_024, milliseconds(1_000), 60),
            (usize::MAX, milliseconds(u64::MAX), 60),
        ] {
            let expect = Duration::from_secs(seconds);
            assert_eq!(retry_after(waiting, pace), expect, "{waiting} {pace:?}");
        }
    }

    #[test]
    fn oa_910_the_pace_is_the_smoothed_time_between_departures() {
        let queue = AdmissionQueue::default();
        let mut pace = QueuePace::default();
        assert_eq!(queue.retry_after(), LEAST);
        // Ten requests are queued from the start, and one leaves every four seconds.
        for departure in 1..=10 {
            pace.departed(Time::ZERO, Time::from_millis(4_000 * departure));
        }
        assert_eq!(pace.smoothed, Some(Duration::from_secs(4)));
        // An idle hour does not change the pace: this request waited four seconds too.
        let hour = 3_600_000;
        pace.departed(Time::from_millis(hour), Time::from_millis(hour + 4_000));
        assert_eq!(pace.smoothed, Some(Duration::from_secs(4)));
        queue.publish(&pace);
        let limits = QueueLimits {
            requests: 6,
            tokens: 100,
        };
        for _ in 0..6 {
            queue.enter(7, 1, limits).unwrap();
        }
        assert_eq!(queue.enter(7, 1, limits), Err(QueueFull::Requests));
        assert_eq!(queue.retry_after(), Duration::from_secs(12));
        // The estimate follows a faster engine within several requests, not at once.
        for departure in 1..=40 {
            let at = Time::from_millis(hour + 4_000 + departure);
            pace.departed(Time::from_millis(hour), at);
        }
        queue.publish(&pace);
        assert_eq!(queue.retry_after(), LEAST);
    }

    /// OA-910, section 13: `queue_requests` and `queue_tokens` at the limit and one past it.
    #[test]
    fn oa_910_requests_and_tokens_are_accepted_up_to_their_limits() {
        let limits = QueueLimits {
            requests: 3,
            tokens: 10,
        };
        for (waiting, comes, full) in [
            (&[][..], 11, None),
            (&[4, 4], 2, None),
            (&[4, 4], 3, Some(QueueFull::Tokens)),
            (&[1, 1], 1, None),
            (&[1, 1, 1], 1, Some(QueueFull::Requests)),
        ] {
            let queue = AdmissionQueue::default();
            for &tokens in waiting {
                queue.enter(7, tokens, limits).unwrap();
            }
            assert_eq!(queue.enter(7, comes, limits).err(), full, "{waiting:?}");
            if full.is_some() {
                // A refused request is not charged.
                waiting.iter().for_each(|&tokens| queue.leave(7, tokens));
                assert_eq!(queue.lock().all, QueueCharge::default());
                assert!(queue.lock().callers.is_empty());
            }
        }
    }

    /// A caller that fills the queue does not lock out others, neither with requests nor with tokens.
    #[test]
    fn d_54_a_caller_that_fills_the_queue_leaves_room_for_others() {
        let limits = QueueLimits {
            requests: 64,
            tokens: 6_400,
        };
        for (tokens, full) in [
            (1, QueueFull::Requests),
            (100, QueueFull::Requests),
            (200, QueueFull::Tokens),
        ] {
            let queue = AdmissionQueue::default();
            let taken = (0..).find(|_| queue.enter(7, tokens, limits).is_err());
            assert_eq!(taken, Some(64.min(6_400 / tokens)));
            assert_eq!(queue.enter(7, tokens, limits), Err(full));
            for other in [8, 9] {
                let few = (0..).find(|_| queue.enter(other, tokens, limits).is_err());
                assert_eq!(few, Some(4.min(400 / tokens)), "{tokens}");
            }
        }
    }

    /// Many callers with few requests each do not lock out a caller with none.
    #[test]
    fn d_54_many_callers_leave_room_for_one_with_nothing_queued() {
        let limits = QueueLimits {
            requests: 1_024,
            tokens: 1 << 20,
        };
        let queue = AdmissionQueue::default();
        for caller in 1..=8 {
            while queue.enter(caller, 1, limits).is_ok() {}
        }
        assert_eq!(queue.enter(9, 1, limits), Ok(()));
        assert_eq!(queue.enter(1, 1, limits), Err(QueueFull::Requests));
    }
}
