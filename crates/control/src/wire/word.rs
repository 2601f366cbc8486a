//! How the two processes access a word of shared memory, so that what a word announces is there when the word is: the
//! bytes of a message, or the room for the next one (AI-211).
//!
//! The test `slot_loom` compiles this file once more, over the primitives of a model checker.

use super::sync::{AtomicU32, Ordering, fence};

/// Loads a word of a map; what it announces is read after it.
pub(super) fn load(word: &AtomicU32) -> u32 {
    word.load(Ordering::Acquire)
}

/// Sets a word of a map; what it announces is written before it.
pub(super) fn store(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Release);
}

/// Sets a word of a map if it has this value. Returns whether it had.
pub(super) fn replace(word: &AtomicU32, old: u32, new: u32) -> bool {
    word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
        .is_ok()
}

/// To be called after a word was read by a system call, and before what it announces is read.
pub(super) fn was_read() {
    fence(Ordering::SeqCst);
}

/// To be called before a word is written by a system call, and after what it announces was written.
pub(super) fn is_about_to_be_written() {
    fence(Ordering::SeqCst);
}
