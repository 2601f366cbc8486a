//! The engine's thread: steps its owner while there is work and sleeps otherwise.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sapwood_proto::time::Time;

use super::EngineOwner;
use super::step_clock::StepClock;
use crate::outbox::OwnerWaker;
use crate::steerer_wait::SteererWait;

/// Steps `owner` until the engine is dropped. Dropping the owner then ends every request with an error.
pub(crate) fn run(mut owner: EngineOwner, started: Instant) {
    let clock = move || Time::new(started.elapsed());
    owner.clock = StepClock::running(clock, wait_for_steerers(owner.admission.waker()));
    owner.begin();
    let stats = Arc::clone(&owner.requests.stats);
    while !owner.admission.is_closing() {
        let now = clock();
        stats
            .last_step_ms
            .set(u64::try_from(now.since_origin().as_millis()).unwrap_or(u64::MAX));
        // After `last_step_ms`: in the other order the watchdog could take the idle time before this step for a long
        // step.
        stats.idle.set(0);
        let report = owner.step(now);
        // A wake-up from here on sets the thread's unpark token, so `park` returns at once and no wake-up is lost.
        match report.wake_at {
            // The clock is read again, because the step took time. `idle` stays 0 between steps that follow each other.
            Some(at) if at <= clock() => {}
            Some(at) => {
                stats.idle.set(1);
                let time = at.since(clock());
                if report.late.is_empty() {
                    thread::park_timeout(time);
                } else {
                    owner.clock.wait_for_late(time);
                }
            }
            None => {
                stats.idle.set(1);
                thread::park();
            }
        }
    }
    owner.finish();
}

/// How the owner's thread waits for steerers. What else wakes it ends a spin only with its time, which is short.
fn wait_for_steerers(waker: Arc<OwnerWaker>) -> impl FnMut(Duration, Duration) {
    let mut waiting = SteererWait::default();
    // What the step has seen: everything before its start, and before the waits since.
    let (mut before, mut seen) = (0, 0);
    move |time, decode| {
        let of_step = waker.steered_before();
        if std::mem::replace(&mut before, of_step) != of_step {
            seen = of_step;
        }
        waiting.wait(time, decode, || {
            let steered = waker.steered();
            std::mem::replace(&mut seen, steered) != steered
        });
    }
}
