//! Time as a value that callers pass in.
//!
//! The shells read clocks; a simulator generates instants (D-4).

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

/// An instant, measured from an origin that the shell chose once (usually process start).
///
/// Two values are comparable only if they come from the same shell. None is later than [`Time::MAX`]: durations that
/// clients send saturate here and nowhere else, so that a shell can add any value to its own clock without overflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(Duration);

impl Time {
    /// The origin.
    pub const ZERO: Self = Self(Duration::ZERO);

    /// The latest instant, which stands for never: 136 years after the origin. Clocks of operating systems count
    /// seconds in 63 bits or more.
    pub const MAX: Self = Self(Duration::from_secs(u32::MAX as u64));

    /// The instant `since_origin` after the origin, or [`Time::MAX`].
    #[must_use]
    pub const fn new(since_origin: Duration) -> Self {
        // By seconds, because two `Duration`s cannot be compared in a const function.
        if since_origin.as_secs() >= Self::MAX.0.as_secs() {
            return Self::MAX;
        }
        Self(since_origin)
    }

    /// The instant `ms` milliseconds after the origin; mostly for tests and simulators.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self::new(Duration::from_millis(ms))
    }

    /// The time from the origin to this instant.
    #[must_use]
    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// The time from `earlier` to this instant; zero if it is not after it.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Time {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        // Adding two `Duration`s panics on overflow, and `span` may come from a client.
        Self::new(self.0.saturating_add(span))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_saturate_at_the_maximum() {
        let most = Duration::MAX;
        for late in [
            Time::new(most),
            Time::from_millis(u64::MAX),
            Time::ZERO + most,
            Time::MAX + Duration::from_nanos(1),
            Time::new(Time::MAX.since_origin()),
        ] {
            assert_eq!(late, Time::MAX);
            assert!(
                std::time::Instant::now()
                    .checked_add(late.since_origin())
                    .is_some()
            );
        }
        let before = Time::MAX.since_origin() - Duration::from_nanos(1);
        assert_eq!(
            Time::new(before).since_origin(),
            before,
            "up to there they are exact"
        );
    }
}
