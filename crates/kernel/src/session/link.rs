//! The one lock of a session, and the clock beside it.
//!
//! Owns: [`Link`], how everybody of a session reaches its machine. Refuses to know: what they want of it. The lock is
//! never held across an await, and never while a waker is called.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

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
}

impl Link {
    /// A link to the machine that `make` builds; its time begins now.
    pub(super) fn new(make: impl FnOnce(Time) -> Session) -> Self {
        let live = Live::new(make(Time::ZERO));
        Self(Arc::new(Shared {
            live: Mutex::new(live),
            origin: Instant::now(),
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
