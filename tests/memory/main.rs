//! Memory of a server, in bytes counted by the allocator (EV-104, EV-805, LM-1305, TR-1303).
//!
//! Client and server are one process: both have to release their memory.

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

/// Held by the test whose bytes are counted, so that tests run one at a time.
static TURN: Mutex<()> = Mutex::const_new(());

/// The bytes that a round leaves behind, given the live bytes `after` each. Collections keep their largest
/// capacity, so single rounds may grow; a leak grows in every round.
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
