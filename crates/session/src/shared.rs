//! The lock of a session.
//!
//! The lock is never held while a waker is called, nor across an await.

use std::sync::Arc;
use std::task::Waker;

use sapwood_proto::session::SessionMachine;

use crate::live::Live;
use crate::sync::Mutex;

/// A session behind its lock. Clones share it.
#[derive(Clone, Debug)]
pub struct SharedSession(Arc<Mutex<Live>>);

impl SharedSession {
    /// Wraps `machine` in a lock.
    #[must_use]
    pub fn new(machine: SessionMachine) -> Self {
        Self(Arc::new(Mutex::new(Live::new(machine))))
    }

    /// Runs `act` under the lock, then wakes the tasks concerned; not the transport, so that a shell can write many
    /// fragments and wake it once (D-6).
    pub fn with<R>(&self, act: impl FnOnce(&mut Live) -> R) -> R {
        // The machine does not panic on input. If it panics nevertheless, its state may be half changed: the session
        // ends, and every task that waits for it is notified.
        let mut live = self.0.lock().unwrap_or_else(|poisoned| {
            let mut live = poisoned.into_inner();
            live.fail();
            live
        });
        let result = act(&mut live);
        // Under the same lock, so that no task can lock a session whose outputs are not yet turned into wake-ups.
        live.settle();
        let woken = live.take_woken();
        // Released first: a woken task may lock this session at once, also on this thread if its waker polls inline.
        drop(live);
        woken.into_iter().flatten().for_each(Waker::wake);
        result
    }

    /// The same as [`Self::with`], and wakes the transport if there is something for it.
    pub fn with_flushed<R>(&self, act: impl FnOnce(&mut Live) -> R) -> R {
        self.with(|live| {
            let result = act(live);
            // `flush` looks at the end and the half-close, which reach `Live` only through `settle`.
            live.settle();
            live.flush();
            result
        })
    }

    /// Whether both handles refer to the same session.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
