//! [`OwnerThread`]: the thread of an owner, which is stopped and joined when the last handle is dropped.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sapwood_proto::time::Time;

use crate::model::Interrupt;
use crate::outbox::OwnerWaker;
use crate::stats::EngineStats;

/// A running owner.
pub(crate) struct OwnerThread {
    /// `None` after it was joined.
    join: Mutex<Option<JoinHandle<()>>>,
    /// Beside the handle, so that nobody has to lock that to ask.
    ended: Arc<AtomicBool>,
    interrupt: Interrupt,
    waker: Arc<OwnerWaker>,
    started: Instant,
}

impl OwnerThread {
    /// Starts the thread. `run` gets the instant of its start, and returns once `waker` is closed.
    ///
    /// # Errors
    /// If the operating system cannot create a thread.
    pub(crate) fn spawn(
        name: String,
        waker: Arc<OwnerWaker>,
        interrupt: Interrupt,
        run: impl FnOnce(Instant) + Send + 'static,
    ) -> io::Result<Self> {
        let started = Instant::now();
        let ended = Arc::<AtomicBool>::default();
        let end = SetWhenDropped(Arc::clone(&ended));
        let join = std::thread::Builder::new().name(name).spawn(move || {
            // Also if it panics.
            let _end = end;
            run(started);
        })?;
        // No wake-up is lost before this line: no request can be submitted until the handle is returned.
        waker.set_thread(join.thread().clone());
        Ok(Self {
            join: Mutex::new(Some(join)),
            ended,
            interrupt,
            waker,
            started,
        })
    }

    /// Stops the thread after the current step.
    pub(crate) fn end(&self) {
        self.interrupt.raise();
        self.waker.close();
    }

    /// Waits until the thread has ended, after [`OwnerThread::end`].
    pub(crate) fn wait_ended(&self) {
        // Locked until it has ended, so that a second caller waits too.
        let mut join = self.join.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(join) = join.take() {
            // The owner runs wakers, and a reader's waker may hold the last engine. A thread cannot join itself.
            if join.thread().id() != std::thread::current().id() {
                // If the owner itself panicked, dropping its outboxes has already notified every reader.
                let _ = join.join();
            }
        }
    }

    /// Returns whether no request can be served any more: the model is lost, or the thread has ended.
    pub(crate) fn is_lost(&self, stats: &EngineStats) -> bool {
        self.ended.load(Ordering::Acquire) || stats.dead.get() == 1
    }

    /// Returns how long the thread has been in its current step without progress; zero while it is idle.
    /// [`Duration::MAX`] if the model is lost, or if the thread has ended without being stopped (OA-913).
    pub(crate) fn stalled_for(&self, stats: &EngineStats) -> Duration {
        // It makes no step again, so it is reported as stalled at once, not after the watchdog's time.
        if self.is_lost(stats) {
            return Duration::MAX;
        }
        if stats.idle.get() == 1 {
            return Duration::ZERO;
        }
        let began = Duration::from_millis(stats.last_step_ms.get());
        let in_step = Time::new(self.started.elapsed()).since(Time::new(began));
        // The pulse may be older than the step, if the last decode call was in an earlier one; the smaller of the two
        // is the time without progress.
        in_step.min(self.interrupt.since_pulse())
    }
}

struct SetWhenDropped(Arc<AtomicBool>);

impl Drop for SetWhenDropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Drop for OwnerThread {
    fn drop(&mut self) {
        self.end();
        self.wait_ended();
    }
}
