//! Synchronisation primitives that the model checker can replace.
//!
//! The tests `takeover_loom` and `task_waker_loom` have other implementations, and compile the files that use this one
//! over them.

pub(crate) use std::sync::atomic::AtomicU8;
pub(crate) use std::sync::{Mutex, MutexGuard};
pub(crate) use std::thread::ThreadId;

pub(crate) use futures::task::AtomicWaker;

/// Who is running.
pub(crate) fn current_thread() -> ThreadId {
    std::thread::current().id()
}
