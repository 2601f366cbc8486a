//! [`Workers`]: the threads that run guest code, and the clock that interrupts it.
//!
//! A fixed number of threads is kept (AI-703). With one of them, and one controller in an endless loop, all others
//! would wait until the loop is interrupted, so a thread whose callback takes long is *replaced*: while work is
//! waiting, another thread is started in its stead, up to a limit, and the slow one ends after its callback. A callback
//! that is past its step limit also loses its priority, because its sequence has missed the step already and others
//! need the processor.
//!
//! Starts of instances have a queue of their own, which is looked at after the other one, and a share of the threads: a burst
//! of new requests, whose `init` may take a thousand times as long as a step, must not make the steps of others late.
//!
//! The *clock* is one further thread. While a callback runs it moves the engine's epoch once per millisecond, at which
//! all running guests look at their deadlines, and it looks for slow threads. When nothing runs it sleeps.
//!
//! Results are announced in groups. The engine's thread collects those of a whole step, so waking it for each of them
//! would cost two switches of threads per callback, several times the callback itself. A worker wakes it when no work
//! waits any more, after a callback that took long, or when the first result has waited for a moment; the clock does it
//! where a callback that followed turns out to take long.
//!
//! A worker whose queue is empty spins for a moment before it sleeps, as long as that has paid lately: on an idle machine
//! it takes longer to wake a thread than to run most callbacks. It remembers what it gained after `mid`, where a model
//! computes for milliseconds before the next callback, apart from what it gained after the others, which `mid` follows at
//! once.
//!
//! Nobody joins these threads: the last reference to a host may be dropped on one of them. They end when the host is
//! dropped and their callback has returned, within its time limit, and hold nothing but their own state.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::steer::StepWaker;
use wasmtime::Engine;

use super::config::HostConfig;
use super::controller::Controller;
use super::threads::Slot;
use crate::spin::Spin;

/// What a worker thread does next.
pub(super) enum Work {
    /// Run the calls that wait in this slot.
    Run {
        slot: Arc<Slot>,
        /// The first of them starts an instance.
        starts: bool,
        /// How long that may take before its thread loses priority.
        late_after: Duration,
    },
    /// Free an instance: returning its memory to the system takes longer than an engine's thread should wait.
    Discard(Box<Controller>),
}

/// When more work is to be expected after some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextWork {
    /// At once, if the sequence goes on.
    Soon,
    /// When the model has computed.
    AfterPass,
}

/// The threads of a host. Ends them when it is dropped.
pub(super) struct Workers(Arc<WorkerPool>);

struct WorkerPool {
    state: Mutex<PoolState>,
    /// How much is queued, for workers that spin. Written under the lock.
    queued: AtomicUsize,
    /// For workers without work.
    work: Condvar,
    /// For the clock.
    busy: Condvar,
    engine: Engine,
    kept: usize,
    spare: usize,
    /// How many threads may start instances at the same time.
    starting_max: usize,
    stack_bytes: usize,
    idle_spin: Duration,
}

#[derive(Default)]
struct PoolState {
    /// Every slot is in one of the queues at most once, so the number of instances bounds them.
    queue: VecDeque<Work>,
    /// Starts of instances.
    starts: VecDeque<Work>,
    /// Threads that start one.
    starting: usize,
    /// Callbacks that went before a start that waits.
    before_start: u32,
    threads: HashMap<u64, WorkerThread>,
    next_thread: u64,
    /// Threads that spin for work. They look at the queue before they sleep.
    spinning: usize,
    /// Threads that sleep until there is work.
    idle: usize,
    /// How many of them were notified and have not run since. One more notification would be a system call for nothing.
    notified: usize,
    /// Who is to be woken, each once.
    wakes: Vec<Arc<dyn StepWaker>>,
    /// When the first of them was added.
    wakes_since: Option<Instant>,
    clock: ClockState,
    closed: bool,
}

#[derive(Default, PartialEq)]
enum ClockState {
    #[default]
    NotStarted,
    Asleep,
    Ticking,
}

/// A thread as others see it.
#[derive(Default)]
struct WorkerThread {
    /// When its present work began.
    since: Option<Instant>,
    late_after: Duration,
    /// It is a start.
    starts: bool,
    /// Another thread has been started in its stead.
    replaced: bool,
    /// It has lost its priority, and cannot get it back.
    slowed: bool,
    #[cfg(target_os = "linux")]
    id: Option<rustix::process::Pid>,
}

impl Workers {
    pub(super) fn new(engine: Engine, config: &HostConfig) -> Self {
        Self(Arc::new(WorkerPool {
            state: Mutex::default(),
            queued: AtomicUsize::new(0),
            work: Condvar::new(),
            busy: Condvar::new(),
            engine,
            kept: config.kept_threads(),
            spare: config.spare_threads,
            // On an idle machine as many as it has cores, and some for those that wait for their limit in a loop.
            starting_max: config.kept_threads() + config.spare_threads / 4,
            stack_bytes: config.stack_bytes,
            idle_spin: config.idle_spin(),
        }))
    }

    /// Queues work. Never waits for a callback.
    pub(super) fn push(&self, work: Work) {
        let pool = &self.0;
        let mut state = pool.lock();
        match work {
            Work::Run { starts: true, .. } => state.starts.push_back(work),
            _ => state.queue.push_back(work),
        }
        pool.publish_queue(&state);
        if pool.ready(&state) <= state.spinning + state.notified {
            // Somebody comes for it.
        } else if state.idle > state.notified {
            state.notified += 1;
            drop(state);
            pool.work.notify_one();
        } else if state.idle == 0 {
            pool.staff(&mut state, Instant::now());
        }
    }

    /// Wakes the engine that waits for a result, together with other results if they follow at once. Called by workers.
    pub(super) fn wake_soon(&self, waker: &Arc<dyn StepWaker>) {
        let mut state = self.0.lock();
        if !state.wakes.iter().any(|known| Arc::ptr_eq(known, waker)) {
            state.wakes.push(Arc::clone(waker));
            state.wakes_since.get_or_insert_with(Instant::now);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.work.notify_all();
        self.0.busy.notify_all();
    }
}

impl WorkerPool {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish_queue(&self, state: &PoolState) {
        // `Relaxed`: what a spinning thread acts on is the queue, under the lock.
        self.queued.store(self.ready(state), Ordering::Relaxed);
    }

    /// How much of what is queued may begin now.
    fn ready(&self, state: &PoolState) -> usize {
        let starts = self.starting_max.saturating_sub(state.starting);
        state.queue.len() + state.starts.len().min(starts)
    }

    /// What is to be done next.
    fn pop(&self, state: &mut PoolState) -> Option<Work> {
        let may_start = !state.starts.is_empty() && state.starting < self.starting_max;
        // Now and then before callbacks: with many sequences those may never end.
        let starts =
            may_start && (state.queue.is_empty() || state.before_start >= CALLBACKS_BEFORE_START);
        let work = if starts {
            state.before_start = 0;
            state.starts.pop_front()?
        } else {
            state.before_start += u32::from(may_start);
            state.queue.pop_front()?
        };
        self.publish_queue(state);
        Some(work)
    }

    /// Marks slow threads, and starts threads as long as work waits and there are too few.
    fn staff(self: &Arc<Self>, state: &mut PoolState, now: Instant) {
        let free = state.idle + state.spinning;
        let waiting = self.ready(state).saturating_sub(free);
        let mut replaced = state
            .threads
            .values()
            .filter(|thread| thread.replaced)
            .count();
        for thread in state.threads.values_mut() {
            let Some(elapsed) = thread
                .since
                .map(|since| now.saturating_duration_since(since))
            else {
                continue;
            };
            if waiting > 0 && elapsed >= SLOW && !thread.replaced && replaced < self.spare {
                thread.replaced = true;
                replaced += 1;
            }
            if elapsed >= thread.late_after && !thread.slowed {
                thread.slow_down();
            }
        }
        let missing = (self.kept + replaced).saturating_sub(state.threads.len());
        for _ in 0..missing.min(waiting) {
            self.start_thread(state);
        }
    }

    fn start_thread(self: &Arc<Self>, state: &mut PoolState) {
        let key = state.next_thread;
        let pool = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name(format!("controller-{key}"))
            .stack_size(self.stack_bytes + HOST_STACK_BYTES)
            .spawn(move || pool.work(key));
        match thread {
            Ok(_) => {
                state.next_thread += 1;
                state.threads.insert(key, WorkerThread::default());
            }
            // The work stays queued, and is done by the threads there are, or at the next attempt.
            Err(error) => tracing::warn!(%error, "a thread for controllers cannot be started"),
        }
    }

    /// The life of a worker.
    fn work(self: Arc<Self>, key: u64) {
        let mut soon = Spin::new(self.idle_spin);
        let mut after_pass = Spin::new(self.idle_spin);
        let mut expected = None;
        loop {
            let spin = expected.map(|expected| match expected {
                NextWork::Soon => &mut soon,
                NextWork::AfterPass => &mut after_pass,
            });
            let Some(work) = self.next(key, spin) else {
                return;
            };
            expected = match work {
                Work::Run { slot, .. } => Some(slot.run()),
                Work::Discard(controller) => {
                    drop(controller);
                    None
                }
            };
        }
    }

    /// Ends the work of the thread `key`, and waits for more, first with `spin`. `None` if it is not needed any longer.
    fn next(self: &Arc<Self>, key: u64, mut spin: Option<&mut Spin>) -> Option<Work> {
        let mut state = self.lock();
        let now = Instant::now();
        let took = state.threads.get(&key).and_then(|thread| thread.since);
        let was_slow = took.is_some_and(|since| now - since >= WAKE_DELAY);
        let goes_on = self.end_work(&mut state, key);
        if was_slow || goes_on.is_none() || self.ready(&state) == 0 || state.wakes_are_due(now) {
            state = self.wake_all(state);
        }
        goes_on?;
        loop {
            if let Some(work) = self.pop(&mut state) {
                self.begin_work(&mut state, key, &work);
                return Some(work);
            }
            if state.closed {
                state.threads.remove(&key);
                return None;
            }
            if let Some(spin) = spin.take() {
                state.spinning += 1;
                drop(state);
                spin.until(|| self.queued.load(Ordering::Relaxed) > 0);
                state = self.lock();
                state.spinning -= 1;
                continue;
            }
            state.idle += 1;
            state = self
                .work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            state.notified = state.notified.saturating_sub(1);
        }
    }

    /// Wakes the engines whose results are there, without the lock: they come for the next callback at once.
    fn wake_all<'s>(&'s self, mut state: MutexGuard<'s, PoolState>) -> MutexGuard<'s, PoolState> {
        state.wakes_since = None;
        let wakes = std::mem::take(&mut state.wakes);
        if wakes.is_empty() {
            return state;
        }
        drop(state);
        for waker in wakes {
            waker.wake();
        }
        self.lock()
    }

    fn end_work(self: &Arc<Self>, state: &mut PoolState, key: u64) -> Option<()> {
        let replaced = state
            .threads
            .values()
            .filter(|thread| thread.replaced)
            .count();
        let active = state.threads.len() - replaced;
        let thread = state.threads.get_mut(&key)?;
        thread.since = None;
        if std::mem::take(&mut thread.starts) {
            // Another start may begin now.
            state.starting -= 1;
            self.publish_queue(state);
        }
        let thread = state.threads.get_mut(&key)?;
        if thread.slowed || (thread.replaced && active >= self.kept) {
            state.threads.remove(&key);
            // Work may wait for just this thread.
            self.staff(state, Instant::now());
            return None;
        }
        thread.replaced = false;
        Some(())
    }

    fn begin_work(self: &Arc<Self>, state: &mut PoolState, key: u64, work: &Work) {
        let Some(thread) = state.threads.get_mut(&key) else {
            return;
        };
        thread.since = Some(Instant::now());
        (thread.late_after, thread.starts) = match work {
            Work::Run {
                late_after, starts, ..
            } => (*late_after, *starts),
            Work::Discard(_) => (Duration::MAX, false),
        };
        if thread.starts {
            state.starting += 1;
            self.publish_queue(state);
        }
        let Some(thread) = state.threads.get_mut(&key) else {
            return;
        };
        #[cfg(target_os = "linux")]
        if thread.id.is_none() {
            thread.id = Some(rustix::thread::gettid());
        }
        match state.clock {
            ClockState::Ticking => {}
            ClockState::Asleep => {
                state.clock = ClockState::Ticking;
                self.busy.notify_one();
            }
            ClockState::NotStarted => {
                let pool = Arc::clone(self);
                let clock = std::thread::Builder::new()
                    .name("controller-clock".to_owned())
                    .spawn(move || pool.tick());
                match clock {
                    Ok(_) => state.clock = ClockState::Ticking,
                    Err(error) => tracing::error!(%error, "controllers run without time limits"),
                }
            }
        }
    }

    /// The life of the clock.
    fn tick(self: Arc<Self>) {
        let mut quiet = 0;
        let mut state = self.lock();
        while !(state.closed && state.threads.is_empty()) {
            if quiet > QUIET_TICKS {
                state.clock = ClockState::Asleep;
                while state.clock == ClockState::Asleep && !state.closed {
                    state = self
                        .busy
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                state.clock = ClockState::Ticking;
                quiet = 0;
            }
            let waited = self.busy.wait_timeout(state, TICK);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            self.engine.increment_epoch();
            let now = Instant::now();
            if state.wakes_are_due(now) {
                state = self.wake_all(state);
            }
            self.staff(&mut state, now);
            // A thread that was counted on may not have got a core yet.
            if self.ready(&state) > 0 && state.idle > state.notified {
                state.notified += 1;
                self.work.notify_one();
            }
            let busy = state.threads.values().any(|thread| thread.since.is_some());
            quiet = if busy { 0 } else { quiet + 1 };
        }
    }
}

impl PoolState {
    fn wakes_are_due(&self, now: Instant) -> bool {
        self.wakes_since
            .is_some_and(|since| now.saturating_duration_since(since) >= WAKE_DELAY)
    }
}

impl WorkerThread {
    fn slow_down(&mut self) {
        self.slowed = true;
        // On Linux a process id means one thread, and its priority can be lowered by anyone, never raised again: such a
        // thread ends after its work.
        #[cfg(target_os = "linux")]
        if let Some(id) = self.id
            && let Err(error) = rustix::process::setpriority_process(Some(id), LOW_PRIORITY)
        {
            tracing::debug!(%error, "the priority of a late controller cannot be lowered");
        }
    }
}

/// How long a result may wait for others before its engine is woken. About what the two switches of threads cost.
const WAKE_DELAY: Duration = Duration::from_micros(50);
/// How often the epoch moves: the precision of time limits.
const TICK: Duration = Duration::from_millis(1);
/// The clock sleeps after so many ticks without work: waking it costs more than some ticks.
const QUIET_TICKS: u32 = 50;
/// After that time others no longer wait for a callback's thread.
const SLOW: Duration = Duration::from_millis(2);
/// So many callbacks go before a start that waits.
const CALLBACKS_BEFORE_START: u32 = 64;
/// Stack for what the host does around a guest: host functions, JSON, tokenizers.
const HOST_STACK_BYTES: usize = 2 << 20;
/// A thirtieth of the usual share. With the lowest priority of all, a busy machine would not even let it reach its
/// limit.
#[cfg(target_os = "linux")]
const LOW_PRIORITY: i32 = 15;
