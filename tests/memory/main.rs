//! What a server holds, in bytes of the allocator (EV-104, EV-805, LM-1305, TR-1303).
//!
//! Client and server are one process: both have to let go.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a test's name says what it shows, and what it cannot do without is a failed test"
)]

mod evergreen;
mod generate;
mod lmtp;
mod test_server;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::sync::Mutex;

#[global_allocator]
static GLOBAL: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by the test whose bytes are counted.
static TURN: Mutex<()> = Mutex::const_new(());

/// What a round leaves behind, given the bytes held [`after`](held) each one. Lists keep the room of their best times, so
/// one round may take more once in a while; a leak is there in every one.
fn usual_growth(after: &[isize]) -> isize {
    let mut grown: Vec<isize> = after.windows(2).map(|two| two[1] - two[0]).collect();
    grown.sort_unstable();
    grown[grown.len() / 2]
}

/// Bytes allocated and not freed.
fn live_bytes() -> isize {
    let stats = GLOBAL.stats();
    stats.bytes_allocated.cast_signed() - stats.bytes_deallocated.cast_signed()
}
