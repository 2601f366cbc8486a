//! Counts what the parser looks at, so that a test of its work need not measure time.

use std::cell::Cell;

thread_local! {
    pub(super) static COUNT: Cell<usize> = const { Cell::new(0) };
}

/// Adds bytes that were looked at.
pub(super) fn add(bytes: usize) {
    COUNT.set(COUNT.get() + bytes);
}
