//! [`RemoteNumbers`]: what metrics say of runtimes in other processes, as plain atomics that are read without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers of all runtimes that were given it. They are those of the processes together.
#[derive(Debug, Default)]
pub struct RemoteNumbers {
    sequences: AtomicU64,
    memory_bytes: AtomicU64,
    restarts: AtomicU64,
}

impl RemoteNumbers {
    /// The sequences that controllers steer now.
    #[must_use]
    pub fn sequences(&self) -> u64 {
        self.sequences.load(Ordering::Relaxed)
    }

    /// Bytes of memory of all controllers, as of the last time that the processes were asked, which is every two seconds
    /// while they have any. Only this program's own runtime says it.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    /// How many processes were started after one that had ended (AI-852).
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    pub(super) fn restarted(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts one sequence for as long as it lives.
#[derive(Debug)]
pub(super) struct CountedSequence(Arc<RemoteNumbers>);

impl CountedSequence {
    pub(super) fn new(numbers: &Arc<RemoteNumbers>) -> Self {
        numbers.sequences.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(numbers))
    }
}

impl Drop for CountedSequence {
    fn drop(&mut self) {
        self.0.sequences.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The memory of one process, as far as it is part of the sum.
#[derive(Debug)]
pub(super) struct CountedMemory {
    numbers: Arc<RemoteNumbers>,
    bytes: AtomicU64,
}

impl CountedMemory {
    pub(super) fn new(numbers: Arc<RemoteNumbers>) -> Self {
        Self {
            numbers,
            bytes: AtomicU64::new(0),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Replaces what this process has reported before. What no process can have counts as the most that one may have.
    pub(super) fn set(&self, bytes: u64) {
        let bytes = bytes.min(BYTES_MAX);
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        // Wraps around zero and back.
        let change = bytes.wrapping_sub(before);
        self.numbers
            .memory_bytes
            .fetch_add(change, Ordering::Relaxed);
    }
}

impl Drop for CountedMemory {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// 2^48: what a processor addresses.
const BYTES_MAX: u64 = 1 << 48;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_several_processes_is_added_and_goes_with_them() {
        let numbers = Arc::new(RemoteNumbers::default());
        let of = || CountedMemory::new(Arc::clone(&numbers));
        let (first, second) = (of(), of());
        first.set(100);
        second.set(7);
        assert_eq!(numbers.memory_bytes(), 107);
        first.set(20);
        assert_eq!((numbers.memory_bytes(), first.bytes()), (27, 20));
        second.set(u64::MAX);
        assert_eq!(numbers.memory_bytes(), 20 + BYTES_MAX);
        drop(second);
        assert_eq!(numbers.memory_bytes(), 20);
        drop(first);
        assert_eq!(numbers.memory_bytes(), 0);
    }
}
