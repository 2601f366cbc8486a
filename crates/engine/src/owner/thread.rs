//! The engine's thread: steps its owner while there is work and sleeps otherwise.

use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::time::Time;

use super::EngineOwner;
use super::step_clock::StepClock;

/// Steps `owner` until the engine is dropped. Dropping the owner then ends every request with an error.
pub(crate) fn run(mut owner: EngineOwner, started: Instant) {
    let clock = move || Time::new(started.elapsed());
    owner.clock = StepClock::running(clock, std::thread::park_timeout);
    let stats = Arc::clone(&owner.requests.stats);
    while !owner.admission.is_closing() {
        let now = clock();
        stats
            .last_step_ms
            .set(u64::try_from(now.since_origin().as_millis()).unwrap_or(u64::MAX));
        // After `last_step_ms`: in the other order the watchdog could take the idle time before this step for a long
        // step.
        stats.idle.set(0);
        let wake_at = owner.step(now).wake_at;
        // A wake-up from here on sets the thread's unpark token, so `park` returns at once and no wake-up is lost.
        match wake_at {
            // The clock is read again, because the step took time. `idle` stays 0 between steps that follow each other.
            Some(at) if at <= clock() => {}
            Some(at) => {
                stats.idle.set(1);
                std::thread::park_timeout(at.since(clock()));
            }
            None => {
                stats.idle.set(1);
                std::thread::park();
            }
        }
    }
}
