//! One waker for everything that a task polls itself.
//!
//! The work of a task often wakes futures that the task is about to poll anyway. If each of these wake-ups woke the
//! task, it would be scheduled again after every poll, and on another thread.
//!
//! ```text
//!   ASLEEP ── wake: the owner is woken ──► RUNG ── attend ──► ATTENDED ── leave ──► ASLEEP
//!                                            └◄──── wake ────────┘
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Wake, Waker};

use crate::sync::{AtomicU8, AtomicWaker};

/// Wakes its owner, unless the owner is polling already.
#[derive(Debug, Default)]
pub(super) struct TaskWaker {
    state: AtomicU8,
    owner: AtomicWaker,
}

impl TaskWaker {
    /// The owner polls everything from here on. Wake-ups are recorded, and `owner` is woken for those after it left.
    pub(super) fn attend(&self, owner: &Waker) {
        // Registered before the state can become `ASLEEP`: a waker that sees that state needs the owner of this poll.
        self.owner.register(owner);
        // A swap, not a store: it synchronises with the wake-up that it overwrites, so the owner sees all that was done
        // before it.
        self.state.swap(ATTENDED, Ordering::SeqCst);
    }

    /// Whether the waker was called since the owner attended.
    pub(super) fn has_rung(&self) -> bool {
        self.state.load(Ordering::SeqCst) == RUNG
    }

    /// The owner is about to sleep; `false` if it must not, because the waker was called.
    pub(super) fn leave(&self) -> bool {
        // Fails if the state is `RUNG`: the wake-up came after the last `attend`, and nobody has woken the owner for
        // it.
        self.state
            .compare_exchange(ATTENDED, ASLEEP, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // An attending owner looks at the state before it sleeps, and a second wake-up adds nothing to the first.
        if self.state.swap(RUNG, Ordering::SeqCst) == ASLEEP {
            self.owner.wake();
        }
    }
}

/// Also the initial state: the owner has not attended yet, so there is no task to wake.
const RUNG: u8 = 0;
const ATTENDED: u8 = 1;
const ASLEEP: u8 = 2;
