//! [`CpuTime`]: the processor time of callbacks.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Measures the processor time of this thread from a moment on.
///
/// The thread's clock is a system call, which takes as long as a whole trivial callback. So it is read only where the last
/// reading is old, and after callbacks that may have a time other than 0; what passed between that reading and the
/// callback is taken for processor time, which is wrong by [`FRESH`] at most.
pub(super) struct CpuTime {
    begun: Instant,
    last: Reading,
}

/// Both clocks at one moment.
#[derive(Clone, Copy)]
struct Reading {
    wall: Instant,
    cpu: Duration,
}

thread_local! {
    static LAST: Cell<Option<Reading>> = const { Cell::new(None) };
}

impl CpuTime {
    pub(super) fn now() -> Self {
        let begun = Instant::now();
        let is_fresh = |last: &Reading| begun.saturating_duration_since(last.wall) < FRESH;
        let last = LAST
            .get()
            .filter(is_fresh)
            .unwrap_or_else(|| Reading::at(begun));
        Self { begun, last }
    }

    /// Since then, rounded down to 10 µs: a finer clock would let callbacks measure each other.
    pub(super) fn micros(&self) -> u64 {
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.begun);
        if passed < STEP {
            return 0;
        }
        let before = self.begun.saturating_duration_since(self.last.wall);
        let spent = Reading::at(now).cpu.saturating_sub(self.last.cpu);
        let steps = spent.saturating_sub(before).min(passed).as_micros() / STEP.as_micros();
        u64::try_from(steps * STEP.as_micros()).unwrap_or(u64::MAX)
    }
}

impl Reading {
    fn at(wall: Instant) -> Self {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
        let reading = Self {
            wall,
            cpu: Duration::new(seconds, nanos),
        };
        LAST.set(Some(reading));
        reading
    }
}

const STEP: Duration = Duration::from_micros(10);
/// How old a reading may be. A thread that was interrupted meanwhile, or slept, has an old one.
const FRESH: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micros_are_processor_time_in_steps_of_ten() {
        // Twice: with an old reading, and with the one that the first measurement left.
        for _ in 0..2 {
            let time = CpuTime::now();
            let begun = time.last.cpu;
            let worked = Duration::from_millis(2);
            while Reading::at(Instant::now()).cpu.saturating_sub(begun) < worked {
                std::hint::spin_loop();
            }
            let micros = time.micros();
            let passed = time.begun.elapsed().as_micros();
            assert!(micros.is_multiple_of(10) && u128::from(micros) <= passed);
            assert!(u128::from(micros) + 2 * FRESH.as_micros() >= worked.as_micros());
        }
    }
}
