//! The clock of a session: times of the machine count from its beginning.

use sapwood_proto::session::SessionMachine;
use sapwood_proto::time::Time;
use tokio::time::Instant;

use crate::SharedSession;

/// The instant at which a session's times begin.
#[derive(Clone, Copy, Debug)]
pub struct SessionClock(Instant);

impl SessionClock {
    /// Makes a session whose times begin now.
    pub fn start(make: impl FnOnce(Time) -> SessionMachine) -> (SharedSession, Self) {
        // Tokio's clock, as for the timer of the pump: in a test with paused time both advance together.
        (SharedSession::new(make(Time::ZERO)), Self(Instant::now()))
    }

    /// The time of the session.
    #[must_use]
    pub fn now(&self) -> Time {
        Time::new(self.0.elapsed())
    }

    /// The instant on tokio's clock for `time`. No clock reaches [`Time::MAX`].
    #[must_use]
    pub fn instant(&self, time: Time) -> Instant {
        // Cannot overflow: times that clients send saturate at `Time::MAX`, 136 years after the start.
        self.0 + time.since_origin()
    }
}
