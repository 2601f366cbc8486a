//! [`Watchdog`]: ends the constraints whose work takes the engine's thread from all other sequences.
//!
//! The library limits the work of masks and of forced tokens, but not that of the tokens that are appended. It stops when it
//! is cancelled, so a thread looks every few milliseconds at what the watched threads are in the middle of. A watched call
//! costs two atomic operations, and looks at no clock.
//!
//! What is looked at so often takes as large a part of its thread's time. So a constraint ends after one call that goes on for
//! [`Watchdog::BUSY_MAX`] ticks, and after many that together take more than a ninth of the time.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

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
    closed: bool,
}

/// Watches one automaton.
pub(super) struct Watch {
    state: AtomicU8,
    /// Eighths of ticks. Only the watchdog writes it.
    busy: AtomicU32,
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

    fn run(&self) {
        loop {
            let sleeps = |watches: &mut Watches| watches.list.is_empty() && !watches.closed;
            let watches = self.changed.wait_while(self.watches(), sleeps);
            let watches = watches.unwrap_or_else(PoisonError::into_inner);
            let open = |watches: &mut Watches| !watches.closed;
            let waited = self.changed.wait_timeout_while(watches, TICK, open);
            let (mut watches, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if watches.closed {
                return;
            }
            watches.tick();
        }
    }
}

impl Watches {
    fn tick(&mut self) {
        // The others are dropped.
        self.list.retain(|watch| Arc::strong_count(watch) > 1);
        for watch in &self.list {
            watch.tick();
        }
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
            shared.watches().tick();
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
    fn what_is_dropped_is_no_longer_watched() {
        let shared = Shared::default();
        let (first, _) = watch(&shared);
        let (second, _) = watch(&shared);
        drop(first);
        ticks(&shared, 1);
        assert_eq!(shared.watches().list.len(), 1);
        drop(second);
        ticks(&shared, 1);
        assert!(shared.watches().list.is_empty());
    }
}
