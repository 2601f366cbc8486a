//! [`StepWake`]: how the main channel waits for callbacks, and [`LaunchWaker`], which also continues an `instantiate`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use sapwood_proto::steer::StepWaker;

use super::sequence::Pace;
use super::side::SideQueue;

/// Woken by controllers, waited on by the thread of the main channel.
#[derive(Debug, Default)]
pub(crate) struct StepWake {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl StepWaker for StepWake {
    fn wake(&self) {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever was woken already and has not run yet finds everything.
        if !std::mem::replace(&mut *woken, true) {
            drop(woken);
            self.changed.notify_one();
        }
    }
}

impl Pace for StepWake {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait(&self, until: Instant) {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        while !*woken {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(woken, left);
            woken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *woken = false;
    }
}

/// Wakes the side channel until the instance has begun, and the main channel from then on.
#[derive(Debug)]
pub(crate) struct LaunchWaker {
    step: Arc<StepWake>,
    side: Weak<SideQueue>,
    /// The number of the launch.
    number: u64,
    begun: AtomicBool,
}

impl LaunchWaker {
    pub(crate) fn new(step: Arc<StepWake>, side: &Arc<SideQueue>, number: u64) -> Self {
        Self {
            step,
            side: Arc::downgrade(side),
            number,
            begun: AtomicBool::new(false),
        }
    }

    /// The instance can be bound: from here on its outcomes are the main channel's.
    pub(crate) fn set_begun(&self) {
        self.begun.store(true, Ordering::Release);
    }
}

impl StepWaker for LaunchWaker {
    fn wake(&self) {
        if self.begun.load(Ordering::Acquire) {
            self.step.wake();
        } else if let Some(side) = self.side.upgrade() {
            side.begun(self.number);
        }
    }
}
