//! The one lock of a session, and the clock beside it.
//!
//! Owns: [`Link`], how everybody of a session reaches its machine. Refuses to know: what they want of it. The lock is
//! never held across an await, and never while a waker is called.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use sapwood_proto::evergreen::Dialect;
use sapwood_proto::session::{Live, Session};
use sapwood_proto::time::Time;
use tokio::time::Instant;

/// A session's machine, shared by its runs, its nodes and its transport.
#[derive(Clone, Debug)]
pub(super) struct Link(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    live: Mutex<Live>,
    origin: Instant,
    /// In which dialect the connection speaks.
    dialect: Mutex<Dialect>,
}

impl Link {
    /// A link to the machine that `make` builds; its time begins now.
    pub(super) fn new(dialect: Dialect, make: impl FnOnce(Time) -> Session) -> Self {
        let live = Live::new(make(Time::ZERO));
        Self(Arc::new(Shared {
            live: Mutex::new(live),
            origin: Instant::now(),
            dialect: Mutex::new(dialect),
        }))
    }

    /// The time of this session.
    pub(super) fn now(&self) -> Time {
        Time::new(self.0.origin.elapsed())
    }

    /// The instant on tokio's clock that `time` stands for.
    pub(super) fn instant(&self, time: Time) -> Instant {
        self.0.origin + time.since_origin()
    }

    /// In which dialect the session speaks now.
    pub(super) fn dialect(&self) -> Dialect {
        *self
            .0
            .dialect
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection with this number stands, and speaks so. `false`: another one has taken over meanwhile.
    pub(super) fn returned(&self, connection: u64, dialect: Dialect) -> bool {
        let now = self.now();
        let stands = self.with(|live| {
            let stands = live.connection() == connection;
            if stands {
                live.machine().speak(dialect.manners());
                live.returned(now);
            }
            stands
        });
        if stands {
            *self
                .0
                .dialect
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = dialect;
        }
        stands
    }

    /// Does something to the machine, then wakes whom that concerns; not the transport, see [`Link::flush`].
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Live) -> R) -> R {
        // The machine does not panic on input; were it to, the state would still be the session's own.
        let mut live = self.0.live.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut live);
        live.settle();
        let woken = live.take_woken();
        drop(live);
        woken.into_iter().flatten().for_each(Waker::wake);
        result
    }

    /// Wakes the transport if there is something for it.
    pub(super) fn flush(&self) {
        self.with(Live::flush);
    }
}
