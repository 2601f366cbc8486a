//! [`Watchdog`]: ends the constraints whose work takes the engine's thread from all other sequences.
//!
//! The library limits the work of masks and of forced tokens, but not that of the tokens that are appended. It stops when it
//! is cancelled, so a thread looks every few milliseconds at what the watched threads are in the middle of. A watched call
//! costs two atomic operations, and looks at no clock.
//!
//! What is looked at so often takes as large a part of its thread's time. So a constraint ends after one call that goes on for
//! [`Watchdog::BUSY_MAX`] ticks, and after many that together take more than a ninth of the time.
//!
//! The calls of a controller are on a thread of its own, and end with its callback ([`TimedWatch`]).

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

/// Looks after the constraints of all models. Its thread starts with the first one, and sleeps while there is none.
#[derive(Default)]
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    watches: Mutex<Watches>,
    changed: Condvar,
}

#[derive(Default)]
struct Watches {
    list: Vec<Arc<Watch>>,
    timed: Vec<Arc<TimedWatch>>,
    closed: bool,
}

/// Watches one automaton.
pub(super) struct Watch {
    state: AtomicU8,
    /// Eighths of ticks. Only the watchdog writes it.
    busy: AtomicU32,
    cancellation: CancellationHandle,
}

/// Watches one automaton whose calls have deadlines.
pub(super) struct TimedWatch {
    /// When the call that is running is late.
    deadline: Mutex<Option<Instant>>,
    cancellation: CancellationHandle,
}

/// No call is running.
const IDLE: u8 = 0;
const RUNNING: u8 = 1;
/// The automaton was cancelled.
const LATE: u8 = 2;

/// How often the watchdog looks.
const TICK: Duration = Duration::from_millis(10);
/// Code without optimisation takes many times as long.
const BUILD_FACTOR: u32 = if cfg!(debug_assertions) { 5 } else { 1 };
/// What a tick within a call adds. One outside takes away one.
const BUSY_STEP: u32 = 8;

impl Watchdog {
    /// Ticks of one call. The thread may have been waiting for a processor in some of them.
    pub(super) const BUSY_MAX: u32 = 10 * BUILD_FACTOR;

    /// Watches an automaton as long as the result lives.
    pub(super) fn watch(&self, cancellation: CancellationHandle) -> Arc<Watch> {
        self.start();
        let watch = self.shared.add(cancellation);
        self.shared.changed.notify_one();
        watch
    }

    /// As [`Watchdog::watch`].
    pub(super) fn watch_timed(&self, cancellation: CancellationHandle) -> Arc<TimedWatch> {
        self.start();
        let watch = self.shared.add_timed(cancellation);
        self.shared.changed.notify_one();
        watch
    }

    #[cfg(test)]
    pub(super) fn is_running(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.is_some()
    }

    fn start(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_some() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let started = thread::Builder::new()
            .name("mask-watch".to_owned())
            .spawn(move || shared.run());
        match started {
            Ok(started) => *thread = Some(started),
            // Tried again with the next one.
            Err(error) => tracing::error!(%error, "no thread that watches constraints"),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.watches().closed = true;
        self.shared.changed.notify_all();
        let thread = self.thread.get_mut();
        if let Some(thread) = thread.unwrap_or_else(PoisonError::into_inner).take() {
            let _ended = thread.join();
        }
    }
}

impl Shared {
    fn watches(&self) -> MutexGuard<'_, Watches> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, cancellation: CancellationHandle) -> Arc<Watch> {
        let watch = Arc::new(Watch {
            state: AtomicU8::new(IDLE),
            busy: AtomicU32::new(0),
            cancellation,
        });
        self.watches().list.push(Arc::clone(&watch));
        watch
    }

    fn add_timed(&self, cancellation: CancellationHandle) -> Arc<TimedWatch> {
        let watch = Arc::new(TimedWatch {
            deadline: Mutex::default(),
            cancellation,
        });
        self.watches().timed.push(Arc::clone(&watch));
        watch
    }

    fn run(&self) {
        loop {
            let sleeps = |watches: &mut Watches| watches.is_empty() && !watches.closed;
            let watches = self.changed.wait_while(self.watches(), sleeps);
            let watches = watches.unwrap_or_else(PoisonError::into_inner);
            let open = |watches: &mut Watches| !watches.closed;
            let waited = self.changed.wait_timeout_while(watches, TICK, open);
            let (mut watches, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if watches.closed {
                return;
            }
            watches.tick(Instant::now());
        }
    }
}

impl Watches {
    fn is_empty(&self) -> bool {
        self.list.is_empty() && self.timed.is_empty()
    }

    fn tick(&mut self, now: Instant) {
        // The others are dropped.
        self.list.retain(|watch| Arc::strong_count(watch) > 1);
        self.timed.retain(|watch| Arc::strong_count(watch) > 1);
        for watch in &self.list {
            watch.tick();
        }
        for watch in &self.timed {
            watch.tick(now);
        }
    }
}

impl TimedWatch {
    /// Runs a call of the automaton, which is cancelled soon after the deadline. Only one thread at a time does.
    pub(super) fn during<T>(&self, deadline: Instant, call: impl FnOnce() -> T) -> T {
        *self.deadline() = Some(deadline);
        let _running = RunningTimed(self);
        call()
    }

    /// Whether the automaton was cancelled because a call was late.
    pub(super) fn is_late(&self) -> bool {
        self.cancellation.is_cancelled()
    }

    fn tick(&self, now: Instant) {
        // Under the lock, which the end of the call waits for: another sequence may have the automaton after it.
        let deadline = self.deadline();
        if deadline.is_some_and(|deadline| now >= deadline) {
            self.cancellation.cancel();
        }
    }

    fn deadline(&self) -> MutexGuard<'_, Option<Instant>> {
        self.deadline.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct RunningTimed<'a>(&'a TimedWatch);

impl Drop for RunningTimed<'_> {
    fn drop(&mut self) {
        *self.0.deadline() = None;
    }
}

impl Watch {
    /// Runs a call of the automaton. Only one thread at a time does.
    pub(super) fn during<T>(&self, call: impl FnOnce() -> T) -> T {
        let _running = Running::begin(self);
        call()
    }

    /// Whether the automaton was cancelled because its calls took too long.
    pub(super) fn is_late(&self) -> bool {
        self.state.load(Ordering::Relaxed) == LATE
    }

    fn tick(&self) {
        let busy = self.busy.load(Ordering::Relaxed);
        if self.state.load(Ordering::Relaxed) != RUNNING {
            self.busy.store(busy.saturating_sub(1), Ordering::Relaxed);
            return;
        }
        let busy = busy + BUSY_STEP;
        self.busy.store(busy, Ordering::Relaxed);
        // Never after the call: another sequence may have the automaton then.
        if busy >= Watchdog::BUSY_MAX * BUSY_STEP && self.change(RUNNING, LATE) {
            self.cancellation.cancel();
        }
    }

    /// No memory but this is shared, and the automaton's flag is read again and again.
    fn change(&self, from: u8, to: u8) -> bool {
        let state = &self.state;
        state
            .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
}

/// A call within a watched one is part of it.
struct Running<'a>(Option<&'a Watch>);

impl<'a> Running<'a> {
    fn begin(watch: &'a Watch) -> Self {
        Self(watch.change(IDLE, RUNNING).then_some(watch))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(watch) = self.0 {
            // It stays late if it is.
            let _was_running = watch.change(RUNNING, IDLE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(shared: &Shared) -> (Arc<Watch>, CancellationHandle) {
        let handle = CancellationHandle::default();
        (shared.add(handle.clone()), handle)
    }

    fn ticks(shared: &Shared, count: u32) {
        for _tick in 0..count {
            shared.watches().tick(Instant::now());
        }
    }

    #[test]
    fn ai_841_a_call_that_goes_on_is_cancelled_and_no_other() {
        let shared = Shared::default();
        let ((hostile, cancelled), (other, untouched)) = (watch(&shared), watch(&shared));
        ticks(&shared, 1000);
        hostile.during(|| {
            ticks(&shared, Watchdog::BUSY_MAX - 1);
            assert!(!cancelled.is_cancelled());
            // A call within the call neither ends it nor begins anew.
            hostile.during(|| {});
            ticks(&shared, 1);
            assert!(cancelled.is_cancelled());
        });
        other.during(|| ticks(&shared, 1));
        ticks(&shared, 1000);
        assert!(hostile.is_late() && !other.is_late() && !untouched.is_cancelled());
    }

    /// One that is short is met by few ticks, one whose steps take half of the time by half of them.
    #[test]
    fn ai_841_many_calls_together_are_cancelled_if_they_take_much_of_the_time() {
        let share = |idle: u32| {
            let shared = Shared::default();
            let (watch, cancelled) = watch(&shared);
            for _step in 0..1000 {
                watch.during(|| ticks(&shared, 1));
                ticks(&shared, idle);
            }
            cancelled.is_cancelled()
        };
        assert!(share(1) && share(5));
        assert!(!share(8) && !share(100));
    }

    #[test]
    fn ai_731_a_call_with_a_deadline_is_cancelled_after_it_and_not_between_calls() {
        let shared = Shared::default();
        let handle = CancellationHandle::default();
        let watch = shared.add_timed(handle.clone());
        let deadline = Instant::now();
        let tick = |after: u64| {
            let now = deadline + Duration::from_millis(after);
            shared.watches().tick(now);
        };
        let early = deadline + Duration::from_millis(5);
        watch.during(early, || tick(4));
        tick(1000);
        assert!(!watch.is_late() && !handle.is_cancelled());
        watch.during(early, || tick(5));
        assert!(watch.is_late() && handle.is_cancelled());
    }

    #[test]
    fn what_is_dropped_is_no_longer_watched() {
        let shared = Shared::default();
        let (first, _) = watch(&shared);
        let (second, _) = watch(&shared);
        drop(first);
        ticks(&shared, 1);
        assert_eq!(shared.watches().list.len(), 1);
        drop(second);
        let timed = shared.add_timed(CancellationHandle::default());
        ticks(&shared, 1);
        assert!(shared.watches().list.is_empty() && !shared.watches().is_empty());
        drop(timed);
        ticks(&shared, 1);
        assert!(shared.watches().is_empty());
    }
}
