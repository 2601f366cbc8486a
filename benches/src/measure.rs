//! Measuring tools of the benches.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use rustix::time::{ClockId, clock_gettime};

/// The processor time of this thread.
///
/// # Errors
/// If the system's clock gives a negative time.
pub fn core_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::ThreadCPUTime).try_into()?)
}

/// The median of some figures; NaN if there are none.
#[must_use]
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The percentile of some times, in microseconds; 0 if there are none.
#[must_use]
pub fn percentile(times: &[Duration], hundredths: usize) -> u128 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = sorted.len().saturating_sub(1) * hundredths / 100;
    sorted.get(at).map_or(0, Duration::as_micros)
}

/// The processor time of all threads of this process, ended ones included.
///
/// # Errors
/// If the system's clock gives a negative time.
pub fn process_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::ProcessCPUTime).try_into()?)
}

/// Some figures, in short.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The one in the middle.
    pub median: f64,
    /// The one that 1 of 100 exceeds.
    pub p99: f64,
}

impl Spread {
    /// All are NaN if there are no figures.
    #[must_use]
    pub fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_by(f64::total_cmp);
        let at = |hundredths: usize| {
            let index = figures.len().saturating_sub(1) * hundredths / 100;
            figures.get(index).copied().unwrap_or(f64::NAN)
        };
        Self {
            min: at(0),
            median: at(50),
            p99: at(99),
        }
    }
}

/// Microseconds of a time.
#[must_use]
pub fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The flags of benches that measure in rounds.
#[derive(Args, Clone, Copy, Debug)]
pub struct Rounds {
    /// Measured rounds
    #[arg(long, default_value = "5", default_value_if("quick", "true", "3"))]
    pub rounds: usize,
    /// Length of a round
    #[arg(long, default_value = "3", default_value_if("quick", "true", "0.5"))]
    pub seconds: f64,
    /// Fewer and shorter rounds
    #[arg(long)]
    quick: bool,
}

impl Rounds {
    /// Length of a round.
    #[must_use]
    pub fn span(self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}
