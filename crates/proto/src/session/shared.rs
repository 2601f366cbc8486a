//! The lock of a session.
//!
//! The lock is never held while a waker is called, nor across an await.

use std::sync::Arc;
use std::task::Waker;

use super::{Live, SessionMachine};
use crate::sync::Mutex;

/// A machine behind its lock. Clones share it.
#[derive(Clone, Debug)]
pub struct SharedSession(Arc<Mutex<Live>>);

impl SharedSession {
    /// Shares `machine`.
    #[must_use]
    pub fn new(machine: SessionMachine) -> Self {
        Self(Arc::new(Mutex::new(Live::new(machine))))
    }

    /// Does something to the machine, then wakes whom that concerns; not the transport, so that a shell can write many
    /// fragments and wake once (D-6).
    pub fn with<R>(&self, act: impl FnOnce(&mut Live) -> R) -> R {
        // The machine does not panic on input. Were it to, what it was about to do is half done: the session ends, and
        // everybody who waits for it learns that.
        let mut live = self.0.lock().unwrap_or_else(|poisoned| {
            let mut live = poisoned.into_inner();
            live.fail();
            live
        });
        let result = act(&mut live);
        live.settle();
        let woken = live.take_woken();
        drop(live);
        woken.into_iter().flatten().for_each(Waker::wake);
        result
    }

    /// The same, and wakes the transport if there is something for it.
    pub fn with_flushed<R>(&self, act: impl FnOnce(&mut Live) -> R) -> R {
        self.with(|live| {
            let result = act(live);
            live.settle();
            live.flush();
            result
        })
    }

    /// Whether both are the same session.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
