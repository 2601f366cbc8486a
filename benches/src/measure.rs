//! What benches measure with.
//!
//! Owns: the clock that other processes disturb least, the figure that outliers disturb least. Refuses to know: what is
//! measured.

use std::time::Duration;

use anyhow::Result;

/// How long this thread has run on a core (Linux).
///
/// # Errors
/// Where the kernel does not tell.
pub fn core_time() -> Result<Duration> {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = told.split_ascii_whitespace().next().unwrap_or_default();
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}

/// The middle of some figures; not a number if there are none.
#[must_use]
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
