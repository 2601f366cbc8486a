//! A session's state machine with its clock.

use std::ops::Deref;

use sapwood_proto::evergreen::Dialect;
use sapwood_proto::session::SessionMachine;
use sapwood_proto::time::Time;
use sapwood_session::{Live, SessionClock, SessionPump, SharedSession};

/// A session's machine, shared by its runs, its nodes and its transport.
#[derive(Clone, Debug)]
pub(crate) struct SessionLink {
    shared: SharedSession,
    clock: SessionClock,
}

impl SessionLink {
    /// A link to the machine that `make` builds; its time begins now.
    pub(super) fn new(dialect: Dialect, make: impl FnOnce(Time) -> SessionMachine) -> Self {
        let (shared, clock) = SessionClock::start(make);
        shared.with(|live| live.set_dialect(dialect));
        Self::to(shared, clock)
    }

    /// A link to a machine with this clock.
    pub(crate) const fn to(shared: SharedSession, clock: SessionClock) -> Self {
        Self { shared, clock }
    }

    /// What drives the machine.
    pub(super) fn pump(&self) -> SessionPump {
        SessionPump::new(self.shared.clone(), self.clock)
    }

    /// The machine without the clock.
    pub(super) fn shared(&self) -> SharedSession {
        self.shared.clone()
    }

    /// The time of this session.
    pub(super) fn now(&self) -> Time {
        self.clock.now()
    }

    /// The dialect of the current connection.
    pub(super) fn dialect(&self) -> Dialect {
        self.with(|live| live.dialect())
    }

    /// Sets the dialect if the connection with this number is still the current one. `false`: another one has taken
    /// over.
    pub(super) fn returned(&self, connection: u64, dialect: Dialect) -> bool {
        let now = self.now();
        self.with(|live| {
            let stands = live.connection() == connection;
            if stands {
                live.set_dialect(dialect);
                live.returned(now);
            }
            stands
        })
    }

    /// Wakes the transport if it has messages to send.
    pub(crate) fn flush(&self) {
        self.with(Live::flush);
    }
}

impl Deref for SessionLink {
    type Target = SharedSession;

    fn deref(&self) -> &SharedSession {
        &self.shared
    }
}
