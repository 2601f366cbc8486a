//! Timers of a session: idle timeout, write stalls, deadlines (EV-111, EV-803, EV-950).
//!
//! A timer that starts between two calls is anchored at the next call that passes the time, so it can start late by
//! that much, never early.

use std::time::Duration;

use super::SessionMachine;
use crate::evergreen::Reason;
use crate::time::Time;

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
        self.idle_since = Some(now);
    }

    /// Stops the stall timer while there is no connection to read from (D-29).
    pub(super) const fn disconnected(&mut self) {
        self.stalled_since = None;
    }

    /// The transport took a message; `more` tells whether another one waits.
    pub(super) fn sent(&mut self, now: Time, more: bool) {
        self.stalled_since = more.then_some(now);
    }
}

impl SessionMachine {
    /// When to call [`Self::tick`] next, if nothing else happens before. Ask after every call.
    pub fn wake_at(&mut self, now: Time) -> Option<Time> {
        if self.is_closed() {
            return None;
        }
        self.anchor(now);
        self.refill_work(now);
        let limits = &self.config.limits;
        let after = |since: Option<Time>, span: Duration| since.map(|since| since + span);
        let times = [
            after(self.clock.idle_since, limits.idle_timeout),
            after(self.clock.stalled_since, limits.outbound_stall),
            self.actions.deadline().map(|(deadline, _)| deadline),
            self.config.deadline,
            self.ttls.next(),
            self.resume_until(),
            self.work_at(now),
        ];
        times.into_iter().flatten().min()
    }

    /// Handles timers that are due at `now`.
    pub fn tick(&mut self, now: Time) {
        if self.is_closed() {
            return;
        }
        self.anchor(now);
        if self.resume_until().is_some_and(|until| now >= until) {
            self.abort_for(
                Reason::Cancelled,
                "the connection was lost, and nobody came back in time",
            );
            return;
        }
        if self.config.deadline.is_some_and(|deadline| now >= deadline) {
            self.abort_for(
                Reason::Deadline,
                "the session was not finished in the time allowed",
            );
            return;
        }
        while let Some((deadline, action)) = self.actions.deadline().filter(|_| !self.is_closed()) {
            if now < deadline {
                break;
            }
            if self.actions.get(action).is_some_and(|entry| entry.served) {
                self.action_is_late(action);
            } else {
                self.client_is_late(action);
            }
        }
        if self.is_closed() {
            return;
        }
        self.refill_work(now);
        self.search.refill(&self.config.limits, &self.work);
        self.expire(now);
        self.search.settle(&mut self.work);
        let limits = &self.config.limits;
        let past =
            |since: Option<Time>, span: Duration| since.is_some_and(|since| now >= since + span);
        if past(self.clock.stalled_since, limits.outbound_stall) {
            self.abort_for(Reason::SlowReader, "the peer has not read for too long");
        } else if past(self.clock.idle_since, limits.idle_timeout) {
            self.abort_for(Reason::IdleTimeout, "nothing has happened for too long");
        }
    }

    /// Starts and stops timers according to the state that the last calls left.
    fn anchor(&mut self, now: Time) {
        self.start_time_limits(now);
        self.clock.idle_since = if self.actions.any_runs() {
            None
        } else {
            Some(self.clock.idle_since.unwrap_or(now))
        };
        self.clock.stalled_since = if self.has_message() {
            Some(self.clock.stalled_since.unwrap_or(now))
        } else {
            None
        };
    }
}
