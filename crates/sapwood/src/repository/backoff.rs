//! How soon a model that could not be loaded, or whose engine ended, is loaded again.

use std::time::Duration;

use tokio::time::Instant;

/// The failures of one model, and when it is tried again: after 1 s, then twice as long each time.
#[derive(Debug, Default)]
pub(super) struct LoadBackoff {
    failures: u32,
    until: Option<Instant>,
    /// The wait is for a reason outside of it, and nobody has been told of its end.
    is_postponed: bool,
    loaded: Option<Instant>,
}

impl LoadBackoff {
    /// Records a failure. Returns the time until the next try.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        // An engine that ran for long ended for another reason than the last time.
        if self
            .loaded
            .take()
            .is_some_and(|loaded| now - loaded >= STEADY)
        {
            self.failures = 0;
        }
        let wait = FIRST
            .saturating_mul(1 << self.failures.min(16))
            .min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        self.until = Some(now + wait);
        self.is_postponed = false;
        wait
    }

    /// Records that it cannot be loaded now, for a reason outside of it. Returns the time until the next try.
    pub(super) fn postponed(&mut self, now: Instant) -> Duration {
        self.until = Some(now + FIRST);
        self.is_postponed = true;
        FIRST
    }

    /// Whether a wait after [`Self::postponed`] is over; true once.
    pub(super) fn take_end_of_postponement(&mut self, now: Instant) -> bool {
        let is_over = self.is_postponed && self.wait(now).is_none();
        self.is_postponed &= !is_over;
        is_over
    }

    /// Records that it was loaded.
    pub(super) fn loaded(&mut self, now: Instant) {
        self.loaded = Some(now);
        self.until = None;
        self.is_postponed = false;
    }

    /// The time until the next try; `None` if it may be tried now.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// Whether it failed so often in a row that a restart of the process may help more than another try.
    pub(super) const fn is_hopeless(&self) -> bool {
        self.failures >= HOPELESS
    }
}

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_mins(5);
/// After so long the failures before are forgotten.
const STEADY: Duration = Duration::from_mins(10);
const HOPELESS: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_a_steady_run_forgets_them() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut backoff = LoadBackoff::default();
        assert_eq!(backoff.wait(at(0)), None);
        let waits: Vec<_> = (0..11).map(|_| backoff.failed(at(0)).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert!(backoff.is_hopeless());
        assert_eq!(backoff.wait(at(299)), Some(Duration::from_secs(1)));
        assert_eq!(backoff.wait(at(300)), None);
        // Loaded, and lost before it ran for long: the waits go on.
        backoff.loaded(at(300));
        assert_eq!(backoff.wait(at(300)), None);
        assert_eq!(backoff.failed(at(899)).as_secs(), 300);
        backoff.loaded(at(1000));
        assert_eq!(backoff.failed(at(1600)).as_secs(), 1);
        assert!(!backoff.is_hopeless());
        // For another model's sake, however often.
        for _ in 0..9 {
            assert_eq!(backoff.postponed(at(1601)).as_secs(), 1);
        }
        assert_eq!(backoff.wait(at(1601)), Some(Duration::from_secs(1)));
        let ends = [1601, 1602, 1602].map(|now| backoff.take_end_of_postponement(at(now)));
        assert_eq!(ends, [false, true, false]);
        assert!(!backoff.is_hopeless());
        assert_eq!(backoff.failed(at(1602)).as_secs(), 2);
    }
}
