//! What benches measure with.
//!
//! Owns: the clock that other processes disturb least, the figure that outliers disturb least. Refuses to know: what is
//! measured.

use std::time::Duration;

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};

/// How long this thread has run on a core.
///
/// # Errors
/// If the system's clock gives a time before its beginning.
pub fn core_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::ThreadCPUTime).try_into()?)
}

/// The middle of some figures; not a number if there are none.
#[must_use]
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
