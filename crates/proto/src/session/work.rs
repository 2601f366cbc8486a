//! The budget of flattening and searching for one session (EV-306, EV-217, D-27).
//!
//! A graph of a few kilobytes can be visited a million times over by each of its readers, and searched anew with each
//! message. All readers and all searches of a session share one budget of visits, which fills again as time passes: a reader
//! that finds it empty waits, a search is cut short and what it leaves undone is found by readers. Besides, one turn of
//! the session's task makes few visits, so that other sessions have theirs in between.
//!
//! ```text
//!   session_visits ──visit──► 0: readers wait ──session_visits_per_second──► ENOUGH: they go on
//! ```

use std::time::Duration;

use super::SessionMachine;
use super::port::{CursorId, CursorRead, SessionOutput};
use crate::evergreen::SessionLimits;
use crate::time::Time;

/// The budget.
#[derive(Debug)]
pub(super) struct ReadBudget {
    left: u32,
    /// Until when it was filled.
    since: Time,
    /// What is left of this turn.
    turn: u32,
}

/// Why a reader goes no further for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadStop {
    /// The turn is over: ask again in the next one.
    Turn,
    /// The budget is used up.
    Budget,
}

impl ReadBudget {
    pub(super) const fn new(limits: &SessionLimits, now: Time) -> Self {
        Self {
            left: limits.session_visits,
            since: now,
            turn: TURN_VISITS,
        }
    }

    /// For readers of a session that is over: nobody sends it anything more, and no timer runs for it.
    pub(super) const fn unlimited(turn: u32) -> Self {
        Self {
            left: u32::MAX,
            since: Time::ZERO,
            turn,
        }
    }

    /// What is left of this turn.
    pub(super) const fn turn(&self) -> u32 {
        self.turn
    }

    /// Another turn begins.
    pub(super) const fn begin_turn(&mut self) {
        self.turn = TURN_VISITS;
    }

    /// Uses so much of this turn, which another counter has counted.
    pub(super) const fn set_turn(&mut self, turn: u32) {
        self.turn = turn;
    }

    /// One more visit, if there is any.
    pub(super) const fn visit(&mut self) -> Result<(), ReadStop> {
        if self.left == 0 {
            return Err(ReadStop::Budget);
        }
        if self.turn == 0 {
            return Err(ReadStop::Turn);
        }
        self.left -= 1;
        self.turn -= 1;
        Ok(())
    }

    /// Visits that are left.
    pub(super) const fn left(&self) -> u32 {
        self.left
    }

    /// So many visits were made elsewhere.
    pub(super) const fn charge(&mut self, visits: u32) {
        self.left = self.left.saturating_sub(visits);
    }

    /// Time has passed.
    pub(super) fn refill(&mut self, limits: &SessionLimits, now: Time) {
        let rate = u128::from(limits.session_visits_per_second);
        let gained = (now - self.since).as_micros() * rate / MICROS;
        // What is less than one visit adds up.
        if gained > 0 {
            let gained = u32::try_from(gained).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(gained).min(limits.session_visits);
            self.since = now;
        }
    }

    /// Whether waiting readers may go on.
    fn is_enough(&self, limits: &SessionLimits) -> bool {
        self.left >= ENOUGH.min(limits.session_visits.max(1))
    }

    /// When waiting readers may go on.
    fn enough_at(&self, limits: &SessionLimits) -> Time {
        let missing = ENOUGH.min(limits.session_visits.max(1));
        let missing = u64::from(missing.saturating_sub(self.left));
        let rate = u64::from(limits.session_visits_per_second.max(1));
        let micros = (missing * 1_000_000).div_ceil(rate);
        self.since + Duration::from_micros(micros)
    }
}

impl SessionMachine {
    /// Starts another turn of the task that drives this session: readers may make some more visits.
    pub const fn begin_turn(&mut self) {
        self.work.begin_turn();
    }

    /// A reader has used up the budget: it waits until there is some again.
    pub(super) fn starve(&mut self, id: CursorId) -> CursorRead {
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.starved = true;
            self.starved.push(id);
            self.emit(SessionOutput::Timed);
        }
        CursorRead::Pending
    }

    /// What the session reads itself goes on with the next turn.
    pub(super) fn pause_leaves(&mut self) {
        self.leaves_paused = true;
        self.emit(SessionOutput::Timed);
    }

    /// When starved readers go on, or what the session reads itself does.
    pub(super) fn work_at(&self, now: Time) -> Option<Time> {
        if self.leaves_paused {
            return Some(now);
        }
        (!self.starved.is_empty()).then(|| self.work.enough_at(&self.config.limits))
    }

    /// Time has passed: wakes who waited for visits.
    pub(super) fn refill_work(&mut self, now: Time) {
        let limits = &self.config.limits;
        self.work.refill(limits, now);
        if std::mem::take(&mut self.leaves_paused) {
            self.leaves_ready = true;
            self.work.begin_turn();
        }
        if self.starved.is_empty() || !self.work.is_enough(limits) {
            return;
        }
        for id in std::mem::take(&mut self.starved) {
            if let Some(cursor) = self.cursors.get_mut(id.0) {
                cursor.starved = false;
                self.ready(id);
            }
        }
    }
}

/// Visits of all readers in one turn of the session's task: a millisecond or two.
const TURN_VISITS: u32 = 16_384;
/// Waiting readers are woken for no less than this.
const ENOUGH: u32 = 4_096;
const MICROS: u128 = 1_000_000;
