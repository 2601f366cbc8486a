//! Time as the cores see it: a value that is passed in.
//!
//! Owns: the one instant type of every state machine (session, scheduler, timers).
//! Refuses to know: any clock. The shells read clocks; a simulator makes instants up (D-4).

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// An instant, counted from an origin that the shell chose once (usually process start).
///
/// Two values are comparable only if the same shell made them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(Duration);

impl Time {
    /// The origin.
    pub const ZERO: Self = Self(Duration::ZERO);

    /// The instant `since_origin` after the origin.
    #[must_use]
    pub const fn new(since_origin: Duration) -> Self {
        Self(since_origin)
    }

    /// The instant `ms` milliseconds after the origin; mostly for tests and simulators.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(Duration::from_millis(ms))
    }

    /// How long after the origin this is.
    #[must_use]
    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not after it.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Time {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }
}

impl Sub<Self> for Time {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}s", self.0.as_secs_f64())
    }
}
