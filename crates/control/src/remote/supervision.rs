//! [`Supervision`]: when a runtime process is started again, and when its controllers count as unavailable (AI-852).
//!
//! ```text
//!   Starting ── ready ──► Running ── death ──► Waiting ── its time ──► Starting
//!      └────── death ────────────────────────►   ▲ back-off 0.1 s to 10 s; after too many deaths a probe every 30 s
//! ```
//!
//! Pure: the times are given.

use std::collections::VecDeque;
use std::time::Duration;

use sapwood_proto::time::Time;

/// The life of a runtime, over all of its processes.
#[derive(Debug)]
pub(super) struct Supervision {
    phase: SupervisionPhase,
    /// Within the last [`DEATHS_WINDOW`].
    deaths: VecDeque<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SupervisionPhase {
    Starting,
    Running,
    Waiting { until: Time, unavailable: bool },
}

impl Supervision {
    /// A runtime that is being started for the first time.
    pub(super) const fn new() -> Self {
        Self {
            phase: SupervisionPhase::Starting,
            deaths: VecDeque::new(),
        }
    }

    /// The process has answered as it should.
    pub(super) const fn ready(&mut self) {
        self.phase = SupervisionPhase::Running;
    }

    /// The process has ended, or could not be started. Returns when to start the next one.
    pub(super) fn died(&mut self, now: Time) -> Time {
        let was_probe = self.is_unavailable();
        self.deaths.push_back(now);
        // Only the count matters beyond that, and each probe adds one.
        while self.deaths.len() > DEATHS_MAX + 1
            || self
                .deaths
                .front()
                .is_some_and(|death| now.since(*death) > DEATHS_WINDOW)
        {
            self.deaths.pop_front();
        }
        let unavailable = was_probe || self.deaths.len() > DEATHS_MAX;
        let wait = if unavailable {
            PROBE_EVERY
        } else {
            let before = u32::try_from(self.deaths.len() - 1).unwrap_or(u32::MAX);
            BACK_OFF_MIN
                .saturating_mul(BACK_OFF_FACTOR.saturating_pow(before))
                .min(BACK_OFF_MAX)
        };
        let until = now + wait;
        self.phase = SupervisionPhase::Waiting { until, unavailable };
        until
    }

    /// The next process is being started.
    pub(super) const fn starting(&mut self) {
        // A probe keeps the phase: requests are refused until it has succeeded.
        if !self.is_unavailable() {
            self.phase = SupervisionPhase::Starting;
        }
    }

    /// Whether requests with controllers are refused.
    pub(super) const fn is_unavailable(&self) -> bool {
        matches!(
            self.phase,
            SupervisionPhase::Waiting {
                unavailable: true,
                ..
            }
        )
    }
}

/// Deaths within [`DEATHS_WINDOW`] after which requests still wait for the next process.
const DEATHS_MAX: usize = 5;
const DEATHS_WINDOW: Duration = Duration::from_secs(60);
const BACK_OFF_MIN: Duration = Duration::from_millis(100);
/// So that the last wait before the probes is nearly the longest.
const BACK_OFF_FACTOR: u32 = 3;
const BACK_OFF_MAX: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    /// Kills the process `ran` after its start, again and again; returns the waits in milliseconds.
    fn waits(ran: Duration, times: usize) -> (Vec<u128>, Supervision) {
        let mut supervision = Supervision::new();
        let mut now = Time::ZERO;
        let waits = (0..times).map(|_| {
            supervision.starting();
            now = now + ran;
            let until = supervision.died(now);
            let wait = until.since(now).as_millis();
            now = until;
            wait
        });
        (waits.collect(), supervision)
    }

    #[test]
    fn ai_852_the_wait_grows_and_the_sixth_death_in_a_minute_makes_controllers_unavailable() {
        let (all, supervision) = waits(Duration::from_secs(1), 5);
        assert_eq!(all, [100, 300, 900, 2_700, 8_100]);
        assert!(!supervision.is_unavailable());
        let (all, supervision) = waits(Duration::from_secs(1), 8);
        assert_eq!(all[5..], [30_000, 30_000, 30_000]);
        assert!(supervision.is_unavailable());
    }

    #[test]
    fn ai_852_deaths_that_are_rare_are_forgotten() {
        let (all, supervision) = waits(Duration::from_secs(61), 9);
        assert_eq!(all, [100; 9]);
        assert!(!supervision.is_unavailable());
        // Two in each minute.
        let (all, _) = waits(Duration::from_secs(31), 9);
        assert_eq!(all[1..], [300; 8]);
    }

    #[test]
    fn ai_852_a_probe_that_succeeds_ends_the_refusals_and_one_that_fails_does_not() {
        let (_, mut supervision) = waits(Duration::ZERO, 6);
        supervision.starting();
        assert!(
            supervision.is_unavailable(),
            "a probe has not succeeded yet"
        );
        let now = Time::from_millis(500_000);
        assert_eq!(supervision.died(now), now + PROBE_EVERY);
        assert!(supervision.is_unavailable());
        supervision.starting();
        supervision.ready();
        assert!(!supervision.is_unavailable());
        let later = now + PROBE_EVERY;
        assert_eq!(supervision.died(later).since(later), BACK_OFF_MIN * 3);
    }
}
