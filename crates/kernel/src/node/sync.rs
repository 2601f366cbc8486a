//! The few primitives that [`super::relay`] is built on, so that the model checker can put its own in their place.
//!
//! Owns: nothing. Refuses to know: everything else. `tests/takeover_loom.rs` has the other implementation.

pub(super) use std::sync::{Mutex, MutexGuard};
pub(super) use std::thread::ThreadId;

/// Who is running.
pub(super) fn current_thread() -> ThreadId {
    std::thread::current().id()
}
