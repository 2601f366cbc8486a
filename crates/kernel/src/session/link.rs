//! A session's state machine with its clock.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use sapwood_proto::evergreen::Dialect;
use sapwood_proto::session::{Live, SessionMachine, SharedSession};
use sapwood_proto::time::Time;
use tokio::time::Instant;

/// A session's machine, shared by its runs, its nodes and its transport.
#[derive(Clone, Debug)]
pub(crate) struct SessionLink {
    shared: SharedSession,
    origin: Instant,
    /// The dialect of the current connection.
    dialect: Arc<Mutex<Dialect>>,
}

impl SessionLink {
    /// A link to the machine that `make` builds; its time begins now.
    pub(super) fn new(dialect: Dialect, make: impl FnOnce(Time) -> SessionMachine) -> Self {
        Self::to(
            SharedSession::new(make(Time::ZERO)),
            Instant::now(),
            dialect,
        )
    }

    /// A link to a machine whose times count from `origin`.
    pub(crate) fn to(shared: SharedSession, origin: Instant, dialect: Dialect) -> Self {
        Self {
            shared,
            origin,
            dialect: Arc::new(Mutex::new(dialect)),
        }
    }

    /// The machine without the clock.
    pub(super) fn shared(&self) -> SharedSession {
        self.shared.clone()
    }

    /// The time of this session.
    pub(super) fn now(&self) -> Time {
        Time::new(self.origin.elapsed())
    }

    /// The instant on tokio's clock for `time`. No clock reaches [`Time::MAX`].
    pub(super) fn instant(&self, time: Time) -> Instant {
        self.origin + time.since_origin()
    }

    /// The dialect of the current connection.
    pub(super) fn dialect(&self) -> Dialect {
        *self.dialect.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the dialect if the connection with this number is still the current one. `false`: another one has taken
    /// over.
    pub(super) fn returned(&self, connection: u64, dialect: Dialect) -> bool {
        let now = self.now();
        let stands = self.with(|live| {
            let stands = live.connection() == connection;
            if stands {
                live.machine().set_capabilities(dialect.capabilities());
                live.returned(now);
            }
            stands
        });
        if stands {
            *self.dialect.lock().unwrap_or_else(PoisonError::into_inner) = dialect;
        }
        stands
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
