//! [`Gate`]: waits as the engine's thread does.

use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use sapwood_proto::steer::StepWaker;

/// Wakes the thread that made it.
#[derive(Debug)]
pub struct Gate(Thread);

impl Gate {
    /// A gate of this thread.
    #[must_use]
    pub fn here() -> Arc<Self> {
        Arc::new(Self(thread::current()))
    }

    /// Calls `poll` after each wake-up, until it has a value.
    ///
    /// # Errors
    /// Those of `poll`, or nothing happens for too long.
    pub fn wait<T>(&self, mut poll: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let begin = Instant::now();
        loop {
            if let Some(value) = poll()? {
                return Ok(value);
            }
            ensure!(begin.elapsed() < WAIT_MAX, "no result for {WAIT_MAX:?}");
            thread::park_timeout(WAIT_MAX);
        }
    }
}

impl StepWaker for Gate {
    fn wake(&self) {
        self.0.unpark();
    }
}

/// Longer than anything that is measured.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Lets time pass without work: the peer falls asleep, or another processor computes.
#[expect(
    clippy::disallowed_methods,
    reason = "the pause is part of what is measured"
)]
pub fn pause(time: Duration) {
    thread::sleep(time);
}
