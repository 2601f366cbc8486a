//! [`SteererWait`]: how a thread waits for results of steerers.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Waits for wake-ups: spins for a moment, as long as that has paid lately, and then parks the thread.
///
/// A thread that sleeps on an idle core is woken in 25 to 50 µs, more than most callbacks of steerers take. Each spin in
/// vain halves how often it is tried again, so where callbacks take long, or other programs have the cores, little time
/// is lost. Beside a long forward pass a wake-up does not count, and the processor time would: nothing spins, nor does it
/// with one core.
#[derive(Debug, Default)]
pub struct SteererWait {
    /// Spins in vain since the last one that was not.
    misses: u32,
    /// Waits until the next spin.
    skip: u32,
}

impl SteererWait {
    /// Waits until `woken`, or the thread is unparked, or `time` is over. It may return earlier without a reason. `decode`:
    /// how long the last forward pass took.
    pub fn wait(&mut self, time: Duration, decode: Duration, woken: impl FnMut() -> bool) {
        let start = Instant::now();
        if !self.spin(longest_spin(time, decode), start, woken) {
            thread::park_timeout(time.saturating_sub(start.elapsed()));
        }
    }

    fn spin(&mut self, most: Duration, start: Instant, mut woken: impl FnMut() -> bool) -> bool {
        if woken() {
            return true;
        }
        if most.is_zero() {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let Some(_turn) = SpinTurn::begin() else {
            return false;
        };
        while start.elapsed() < most {
            if woken() {
                self.misses = 0;
                return true;
            }
            std::hint::spin_loop();
        }
        self.misses = (self.misses + 1).min(MISSES_MAX);
        self.skip = (1 << self.misses) - 1;
        false
    }
}

/// How long a wait of this length spins at most, beside forward passes that take `decode`.
fn longest_spin(time: Duration, decode: Duration) -> Duration {
    if decode > SPIN_DECODE_MAX {
        Duration::ZERO
    } else {
        time.min(SPIN_MAX)
    }
}

/// One of the threads that may spin at this moment.
struct SpinTurn;

impl SpinTurn {
    fn begin() -> Option<Self> {
        static CORES: OnceLock<usize> = OnceLock::new();
        // Asked for once: the system answers from several files, which takes as long as a spin.
        let cores = *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from));
        // One core is left to what is waited for.
        if SPINNING.fetch_add(1, Ordering::Relaxed) + 1 < cores {
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

/// Threads that spin here.
static SPINNING: AtomicUsize = AtomicUsize::new(0);
/// The longest spin. A host announces results at the latest 50 µs after the first of them.
const SPIN_MAX: Duration = Duration::from_micros(60);
/// The longest forward pass beside which a wait spins: a wake-up is a hundredth of it.
const SPIN_DECODE_MAX: Duration = Duration::from_millis(5);
/// After so many spins in vain one wait in 64 spins.
const MISSES_MAX: u32 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_1103_a_wait_spins_less_and_less_where_it_does_not_pay() {
        let mut wait = SteererWait::default();
        let mut spins = 0;
        for _ in 0..200 {
            let mut asked = 0;
            let start = Instant::now();
            let woken = || {
                asked += 1;
                false
            };
            assert!(!wait.spin(SPIN_MAX, start, woken));
            assert!(asked >= 1, "it looks before it waits");
            spins += u32::from(asked > 1);
        }
        // 0, 1, 3, 7, 15, 31 and then 63 waits lie between spins. Other tests may have the turn.
        assert!(spins <= 9, "{spins}");
        assert!(wait.spin(SPIN_MAX, Instant::now(), || true));
    }

    #[test]
    fn ai_1103_a_wait_beside_a_long_forward_pass_sleeps_at_once() {
        let long = Duration::from_secs(1);
        assert_eq!(longest_spin(long, SPIN_DECODE_MAX), SPIN_MAX);
        let longer = SPIN_DECODE_MAX + Duration::from_nanos(1);
        assert_eq!(longest_spin(long, longer), Duration::ZERO);
        let short = SPIN_MAX / 2;
        assert_eq!(longest_spin(short, Duration::ZERO), short);
        let mut wait = SteererWait::default();
        let mut asked = 0;
        let woken = || {
            asked += 1;
            false
        };
        assert!(!wait.spin(Duration::ZERO, Instant::now(), woken));
        assert_eq!((asked, wait.misses, wait.skip), (1, 0, 0));
    }

    #[test]
    fn ai_1103_a_spin_that_pays_is_tried_again_at_once() {
        let mut wait = SteererWait { misses: 6, skip: 0 };
        let mut asked = 0;
        let paid = wait.spin(Duration::from_secs(60), Instant::now(), || {
            asked += 1;
            asked > 3
        });
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // With one core nothing spins, and another test may have the only turn of two.
        assert!(paid || cores <= 2);
        assert_eq!(wait.misses, if paid { 0 } else { 6 });
        assert_eq!(wait.skip, 0);
    }
}
