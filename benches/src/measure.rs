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
