//! [`Gate`]: waits as the engine's thread does.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use sapwood_engine::SteererWait;
use sapwood_proto::steer::StepWaker;

/// Wakes the thread that made it.
#[derive(Debug)]
pub struct Gate {
    thread: Thread,
    wakes: AtomicU32,
    wait: Mutex<SteererWait>,
}

impl Gate {
    /// A gate of this thread.
    #[must_use]
    pub fn here() -> Arc<Self> {
        Arc::new(Self {
            thread: thread::current(),
            wakes: AtomicU32::new(0),
            wait: Mutex::default(),
        })
    }

    /// Calls `poll` after each wake-up, until it has a value.
    ///
    /// # Errors
    /// Those of `poll`, or nothing happens for too long.
    pub fn wait<T>(&self, poll: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        self.wait_beside(Duration::ZERO, poll)
    }

    /// The same in a step whose forward pass takes `decode`.
    ///
    /// # Errors
    /// Those of `poll`, or nothing happens for too long.
    pub fn wait_beside<T>(
        &self,
        decode: Duration,
        mut poll: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let begin = Instant::now();
        let mut wait = self.wait.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let seen = self.wakes.load(Ordering::Acquire);
            if let Some(value) = poll()? {
                return Ok(value);
            }
            ensure!(begin.elapsed() < WAIT_MAX, "no result for {WAIT_MAX:?}");
            wait.wait(WAIT_MAX, decode, || {
                self.wakes.load(Ordering::Acquire) != seen
            });
        }
    }
}

impl StepWaker for Gate {
    fn wake(&self) {
        self.wakes.fetch_add(1, Ordering::Release);
        self.thread.unpark();
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
