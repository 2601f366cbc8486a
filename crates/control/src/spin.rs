//! Bounded spinning before a wait: of the peers of the wire (AI-214), and of threads that have just run a callback.
//!
//! A thread that sleeps on an idle core is woken in 25 to 50 µs, which is more than most callbacks take.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Spins before a thread sleeps, as long as it pays: each spin in vain halves how often it is tried again.
#[derive(Debug)]
pub struct Spin {
    budget: Duration,
    /// Spins in vain since the last one that was not.
    misses: u32,
    /// Waits until the next spin.
    skip: u32,
}

impl Spin {
    /// Spins at most `asked`, and never longer than [`SPIN_MAX`]; zero turns it off.
    #[must_use]
    pub fn new(asked: Duration) -> Self {
        Self {
            budget: asked.min(SPIN_MAX),
            misses: 0,
            skip: 0,
        }
    }

    /// Returns whether `ready` became true within the budget. Asks at least once.
    pub fn until(&mut self, mut ready: impl FnMut() -> bool) -> bool {
        if ready() {
            self.misses = 0;
            self.skip = 0;
            return true;
        }
        if self.budget.is_zero() {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let Some(_turn) = SpinTurn::begin() else {
            return false;
        };
        let start = Instant::now();
        while start.elapsed() < self.budget {
            if ready() {
                self.misses = 0;
                return true;
            }
            std::hint::spin_loop();
        }
        // Up to 63 waits without a spin: an idle runtime, or an engine that computes for milliseconds, costs nothing.
        self.misses = (self.misses + 1).min(6);
        self.skip = (1 << self.misses) - 1;
        false
    }
}

/// One of the threads of this process that may spin at this moment.
struct SpinTurn;

impl SpinTurn {
    fn begin() -> Option<Self> {
        // One core is left to the peer: its answer is what the spin waits for.
        if SPINNING.fetch_add(1, Ordering::Relaxed) + 1 < cores() {
            return Some(Self);
        }
        SPINNING.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

impl Drop for SpinTurn {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The cores that this process may use. Asked for once: the system answers from several files, which takes as long as a spin.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Threads of this process that spin.
static SPINNING: AtomicUsize = AtomicUsize::new(0);
/// The longest spin. The reference spins for 200 ms, which costs more than it gains wherever cores are shared.
pub const SPIN_MAX: Duration = Duration::from_micros(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_214_spins_in_vain_are_tried_less_and_less() {
        let mut spin = Spin::new(Duration::from_secs(1));
        assert_eq!(spin.budget, SPIN_MAX);
        let mut asked = 0;
        for _ in 0..130 {
            assert!(!spin.until(|| {
                asked += 1;
                false
            }));
        }
        // On one core none may spin; elsewhere the pauses double up to 63.
        assert!(spin.misses == 0 || spin.misses == 6, "{spin:?}");
        assert!(asked >= 130);
        assert!(spin.until(|| true));
        assert_eq!((spin.misses, spin.skip), (0, 0));
    }

    #[test]
    fn ai_214_without_a_budget_it_asks_once() {
        let mut spin = Spin::new(Duration::ZERO);
        let mut asked = 0;
        assert!(!spin.until(|| {
            asked += 1;
            false
        }));
        assert_eq!(asked, 1);
    }
}
