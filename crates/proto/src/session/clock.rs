//! Timers of a session that no other machine has: idle timeout and write stall (EV-111, EV-803).
//!
//! A timer that starts between two calls is anchored at the next call that passes the time, so it can start late by
//! that much, never early.

use std::time::Duration;

use crate::evergreen::{Reason, SessionLimits};
use crate::time::Time;

/// The timers; see the module documentation.
#[derive(Debug)]
pub(super) struct Clock {
    /// When the session became idle: nothing was received, and no action runs.
    idle_since: Option<Time>,
    /// When the transport last had a message to take and did not take it.
    stalled_since: Option<Time>,
}

impl Clock {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            idle_since: Some(now),
            stalled_since: None,
        }
    }

    pub(super) const fn received(&mut self, now: Time) {
        // Also while an action runs; `anchor` stops the timer then.
        self.idle_since = Some(now);
    }

    /// Stops the stall timer while there is no connection to read from (D-29).
    pub(super) const fn disconnected(&mut self) {
        self.stalled_since = None;
    }

    /// The transport took a message; `more` tells whether another one waits.
    pub(super) fn sent(&mut self, now: Time, more: bool) {
        // Progress restarts the timer, not an empty queue: a slow peer that reads on is no stalled one (EV-803).
        self.stalled_since = more.then_some(now);
    }

    /// Starts and stops the timers according to the state that the last calls left.
    pub(super) fn anchor(&mut self, now: Time, any_runs: bool, has_message: bool) {
        // A timer that runs keeps its start: this is called many times while nothing happens.
        self.idle_since = (!any_runs).then(|| self.idle_since.unwrap_or(now));
        self.stalled_since = has_message.then(|| self.stalled_since.unwrap_or(now));
    }

    /// When the next of the timers is due.
    pub(super) fn next(&self, limits: &SessionLimits) -> Option<Time> {
        let idle = self.idle_since.map(|since| since + limits.idle_timeout);
        let stall = self
            .stalled_since
            .map(|since| since + limits.outbound_stall);
        idle.into_iter().chain(stall).min()
    }

    /// Why the session ends at `now`, if a timer is due.
    pub(super) fn due(&self, now: Time, limits: &SessionLimits) -> Option<(Reason, &'static str)> {
        let past =
            |since: Option<Time>, span: Duration| since.is_some_and(|since| now >= since + span);
        if past(self.stalled_since, limits.outbound_stall) {
            return Some((Reason::SlowReader, "the peer has not read for too long"));
        }
        past(self.idle_since, limits.idle_timeout)
            .then_some((Reason::IdleTimeout, "the session was idle for too long"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ev_111_the_idle_timeout_starts_when_the_last_action_ends() {
        let limits = SessionLimits::default();
        let at = |seconds| Time::new(Duration::from_secs(seconds));
        let mut clock = Clock::new(Time::ZERO);
        clock.anchor(at(1), true, false);
        assert_eq!(clock.next(&limits), None, "an action runs");
        clock.anchor(at(9), false, false);
        clock.anchor(at(11), false, false);
        assert_eq!(clock.next(&limits), Some(at(9) + limits.idle_timeout));
        clock.received(at(12));
        assert_eq!(clock.next(&limits), Some(at(12) + limits.idle_timeout));
        assert!(clock.due(at(12), &limits).is_none());
        let late = at(12) + limits.idle_timeout;
        assert_eq!(
            clock.due(late, &limits).map(|(reason, _)| reason),
            Some(Reason::IdleTimeout)
        );
    }
}
