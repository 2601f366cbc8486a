//! The budget of flattening and searching for one session (EV-306, EV-217, D-27).
//!
//! A graph of a few kilobytes can be visited a million times over by each of its readers, and searched again with each
//! message. All readers and searches of a session share one budget of visits, which refills over time: a reader that
//! finds it empty waits; a search is cut short, and readers detect what it has missed. In addition, one turn of the
//! session's task makes a limited number of visits, so that other sessions get their turns in between.
//!
//! ```text
//!   session_visits ──visit──► 0: readers wait ──session_visits_per_second──► ENOUGH: they go on
//! ```

use std::time::Duration;

use crate::evergreen::SessionLimits;
use crate::time::Time;

/// The budget of visits.
#[derive(Debug)]
pub(in crate::session) struct ReadBudget {
    left: u32,
    /// When it was last refilled.
    since: Time,
    /// Visits left in this turn.
    turn: u32,
}

/// Why a reader stops for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::session) enum ReadStop {
    /// The visits of this turn are used up: read again in the next turn.
    Turn,
    /// The session's budget is used up.
    Budget,
}

impl ReadBudget {
    pub(in crate::session) const fn new(limits: &SessionLimits, now: Time) -> Self {
        Self {
            left: limits.session_visits,
            since: now,
            turn: TURN_VISITS,
        }
    }

    /// Grants as many visits as there can be. The limit of a turn still holds.
    pub(in crate::session) const fn lift(&mut self) {
        self.left = u32::MAX;
    }

    /// Starts the next turn.
    pub(in crate::session) const fn begin_turn(&mut self) {
        self.turn = TURN_VISITS;
    }

    /// Uses one visit, if there is one.
    pub(in crate::session) const fn visit(&mut self) -> Result<(), ReadStop> {
        // First: a reader that also has no visits left in this turn would otherwise come back in each turn, for
        // nothing.
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

    /// Visits left in the session's budget.
    pub(in crate::session) const fn left(&self) -> u32 {
        self.left
    }

    /// Makes a walk over a part of the graph, which counts down the visits that it is granted, and charges what it has
    /// used.
    pub(in crate::session) fn spend<R>(&mut self, walk: impl FnOnce(&mut u32) -> R) -> R {
        let granted = self.left.min(WALK_VISITS);
        let mut left = granted;
        let result = walk(&mut left);
        self.charge(granted - left);
        result
    }

    /// Charges visits that a search has made.
    pub(in crate::session) const fn charge(&mut self, visits: u32) {
        self.left = self.left.saturating_sub(visits);
    }

    /// Refills the budget for the time that has passed.
    pub(in crate::session) fn refill(&mut self, limits: &SessionLimits, now: Time) {
        let rate = u128::from(limits.session_visits_per_second);
        let gained = (now - self.since).as_micros() * rate / MICROS;
        // `since` moves only when a whole visit is gained, so that fractions add up.
        if gained > 0 {
            let gained = u32::try_from(gained).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(gained).min(limits.session_visits);
            self.since = now;
        }
    }

    /// Whether waiting readers may continue.
    pub(in crate::session) fn is_enough(&self, limits: &SessionLimits) -> bool {
        // Where the whole budget is less than `ENOUGH`, a full one is enough.
        self.left >= ENOUGH.min(limits.session_visits.max(1))
    }

    /// When waiting readers may continue.
    pub(in crate::session) fn enough_at(&self, limits: &SessionLimits) -> Time {
        let missing = ENOUGH.min(limits.session_visits.max(1));
        let missing = u64::from(missing.saturating_sub(self.left));
        let rate = u64::from(limits.session_visits_per_second.max(1));
        let micros = (missing * 1_000_000).div_ceil(rate);
        self.since + Duration::from_micros(micros)
    }
}

/// Visits of all readers in one turn of the session's task: one to two milliseconds.
const TURN_VISITS: u32 = 16_384;
/// Visits of one walk over all nodes that concern a count or a sweep.
const WALK_VISITS: u32 = 262_144;
/// Waiting readers are woken once the budget has at least this many visits.
const ENOUGH: u32 = 4_096;
const MICROS: u128 = 1_000_000;
