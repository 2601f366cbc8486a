//! [`StepClock`]: reads the time within a step, and limits how long the step waits for steerers.
//!
//! A step that finds results of steerers missing waits for them a little, because without them their sequences miss a
//! whole decode call. The grace is a fraction of the decode call, so that the other sequences hardly notice (D-49).

use std::time::Duration;

use sapwood_proto::time::Time;

/// The maximum of a step's grace, whatever its decode call takes.
const GRACE_MAX: Duration = Duration::from_millis(1);
/// The grace is this fraction of the last decode call.
const GRACE_SHARE: u32 = 10;

/// A source of time, and a way to wait that ends early if a steerer wakes the owner.
struct RunningClock {
    now: Box<dyn Fn() -> Time + Send>,
    /// Receives how long to wait at most, and how long the last decode call took.
    wait: Box<dyn FnMut(Duration, Duration) + Send>,
}

/// The clock of an owner.
#[derive(Default)]
pub(super) struct StepClock {
    /// `None` if stepped by hand: time then stands still during a step, and nothing is waited for.
    clock: Option<RunningClock>,
    /// The duration of the last decode call.
    decode: Duration,
    /// What this step has waited.
    waited: Duration,
}

impl StepClock {
    /// A clock that runs. `wait` returns after the given time or when the owner is woken, whichever is first; it is also
    /// given the duration of the last decode call.
    pub(super) fn running(
        now: impl Fn() -> Time + Send + 'static,
        wait: impl FnMut(Duration, Duration) + Send + 'static,
    ) -> Self {
        Self {
            clock: Some(RunningClock {
                now: Box::new(now),
                wait: Box::new(wait),
            }),
            ..Self::default()
        }
    }

    /// Starts the grace of a new step.
    pub(super) fn begin_step(&mut self) {
        self.waited = Duration::ZERO;
    }

    /// Records the duration of a decode call, on which the grace depends from now on.
    pub(super) fn decoded(&mut self, took: Duration) {
        self.decode = took;
    }

    /// Returns the time; `otherwise` if it stands still.
    pub(super) fn now_or(&self, otherwise: Time) -> Time {
        self.clock.as_ref().map_or(otherwise, |clock| (clock.now)())
    }

    /// Returns whether time passes within a step.
    pub(super) fn is_running(&self) -> bool {
        self.clock.is_some()
    }

    /// Waits until a steerer wakes the owner or the grace is used up, and returns the time. `None`: nothing of the grace
    /// is left.
    pub(super) fn wait(&mut self) -> Option<Time> {
        let clock = self.clock.as_mut()?;
        let grace = GRACE_MAX.min(self.decode / GRACE_SHARE);
        let left = grace.checked_sub(self.waited)?;
        if left.is_zero() {
            return None;
        }
        let before = (clock.now)();
        (clock.wait)(left, self.decode);
        let now = (clock.now)();
        // At least a microsecond, so that a waker that is called without end does not keep the step.
        self.waited += now.since(before).max(Duration::from_micros(1));
        Some(now)
    }

    /// Waits between two steps for steerers that were late in the first: until one of them wakes the owner, or for `time`.
    pub(super) fn wait_for_late(&mut self, time: Duration) {
        if let Some(clock) = &mut self.clock {
            (clock.wait)(time, self.decode);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A clock whose waits last as long as the test decides.
    fn clock(wait: fn(Duration) -> Duration) -> (StepClock, Arc<Mutex<Time>>) {
        let time = Arc::new(Mutex::new(Time::ZERO));
        let (read, pass) = (Arc::clone(&time), Arc::clone(&time));
        let running = StepClock::running(
            move || *read.lock().unwrap(),
            move |most, _| {
                let mut now = pass.lock().unwrap();
                *now = *now + wait(most);
            },
        );
        (running, time)
    }

    #[test]
    fn d_49_the_grace_of_a_step_is_a_tenth_of_the_decode_call_and_at_most_a_millisecond() {
        for (decode_us, grace_us) in [
            (0, 0),
            (500, 50),
            (9_990, 999),
            (10_000, 1_000),
            (90_000, 1_000),
        ] {
            let (mut clock, time) = clock(|most| most);
            clock.decoded(Duration::from_micros(decode_us));
            clock.begin_step();
            while clock.wait().is_some() {}
            let waited = time.lock().unwrap().since_origin();
            assert_eq!(waited, Duration::from_micros(grace_us), "{decode_us}");
            assert_eq!(clock.wait(), None, "once in a step");
            clock.begin_step();
            assert_eq!(
                clock.wait().is_some(),
                grace_us > 0,
                "and again in the next"
            );
        }
    }

    #[test]
    fn d_49_waking_without_end_does_not_keep_the_step() {
        let (mut clock, _) = clock(|_| Duration::ZERO);
        clock.decoded(Duration::from_secs(1));
        clock.begin_step();
        let waits = (0..).take_while(|_| clock.wait().is_some()).count();
        assert_eq!(waits, 1_000);
    }

    #[test]
    fn a_clock_that_stands_still_waits_for_nothing() {
        let mut clock = StepClock::default();
        clock.decoded(Duration::from_secs(1));
        assert_eq!(clock.wait(), None);
        assert_eq!(clock.now_or(Time::from_millis(7)), Time::from_millis(7));
    }
}
