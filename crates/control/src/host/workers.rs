//! [`Workers`]: the threads that run guest code, and the clock that interrupts it.
//!
//! A fixed number of threads is kept (AI-703). With one of them, and one controller in an endless loop, all others
//! would wait until the loop is interrupted, so a thread whose callback takes long is *replaced*: while work is
//! waiting, another thread is started in its stead, up to a limit, and the slow one ends after its callback. A callback
//! that is past its step limit also loses its priority, because its sequence has missed the step already and others
//! need the processor.
//!
//! The *clock* is one further thread. While a callback runs it moves the engine's epoch once per millisecond, at which
//! all running guests look at their deadlines, and it looks for slow threads. When nothing runs it sleeps.
//!
//! Nobody joins these threads: the last reference to a host may be dropped on one of them. They end when the host is
//! dropped and their callback has returned, within its time limit, and hold nothing but their own state.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wasmtime::Engine;

use super::controller::Controller;
use super::threads::Slot;

/// What a worker thread does next.
pub(super) enum Work {
    /// Run the calls that wait in this slot.
    Run {
        slot: Arc<Slot>,
        /// How long that may take before its thread loses priority.
        late_after: Duration,
    },
    /// Free an instance: returning its memory to the system takes longer than an engine's thread should wait.
    Discard(Box<Controller>),
}

/// The threads of a host. Ends them when it is dropped.
pub(super) struct Workers(Arc<Pool>);

struct Pool {
    state: Mutex<State>,
    /// For workers without work.
    work: Condvar,
    /// For the clock.
    busy: Condvar,
    engine: Engine,
    kept: usize,
    spare: usize,
    stack_bytes: usize,
}

#[derive(Default)]
struct State {
    /// Every slot is in it at most once, so the number of instances bounds it.
    queue: VecDeque<Work>,
    threads: HashMap<u64, Thread>,
    next_thread: u64,
    /// Threads that wait for work.
    idle: usize,
    clock: Clock,
    closed: bool,
}

#[derive(Default, PartialEq)]
enum Clock {
    #[default]
    NotStarted,
    Asleep,
    Ticking,
}

/// A thread as others see it.
#[derive(Default)]
struct Thread {
    /// When its present work began.
    since: Option<Instant>,
    late_after: Duration,
    /// Another thread has been started in its stead.
    replaced: bool,
    /// It has lost its priority, and cannot get it back.
    slowed: bool,
    #[cfg(target_os = "linux")]
    id: Option<rustix::process::Pid>,
}

impl Workers {
    pub(super) fn new(engine: Engine, kept: usize, spare: usize, stack_bytes: usize) -> Self {
        Self(Arc::new(Pool {
            state: Mutex::default(),
            work: Condvar::new(),
            busy: Condvar::new(),
            engine,
            kept,
            spare,
            stack_bytes,
        }))
    }

    /// Queues work. Never waits for a callback.
    pub(super) fn push(&self, work: Work) {
        let pool = &self.0;
        let mut state = pool.lock();
        state.queue.push_back(work);
        if state.idle > 0 {
            drop(state);
            pool.work.notify_one();
        } else {
            pool.staff(&mut state, Instant::now());
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

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks slow threads, and starts threads as long as work waits and there are too few.
    fn staff(self: &Arc<Self>, state: &mut State, now: Instant) {
        let waiting = state.queue.len().saturating_sub(state.idle);
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

    fn start_thread(self: &Arc<Self>, state: &mut State) {
        let key = state.next_thread;
        let pool = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name(format!("controller-{key}"))
            .stack_size(self.stack_bytes + HOST_STACK_BYTES)
            .spawn(move || pool.work(key));
        match thread {
            Ok(_) => {
                state.next_thread += 1;
                state.threads.insert(key, Thread::default());
            }
            // The work stays queued, and is done by the threads there are, or at the next attempt.
            Err(error) => tracing::warn!(%error, "a thread for controllers cannot be started"),
        }
    }

    /// The life of a worker.
    fn work(self: Arc<Self>, key: u64) {
        loop {
            let Some(work) = self.next(key) else {
                return;
            };
            match work {
                Work::Run { slot, .. } => slot.run(),
                Work::Discard(controller) => drop(controller),
            }
        }
    }

    /// Ends the work of the thread `key`, and waits for more. `None` if it is not needed any longer.
    fn next(self: &Arc<Self>, key: u64) -> Option<Work> {
        let mut state = self.lock();
        self.end_work(&mut state, key)?;
        loop {
            if let Some(work) = state.queue.pop_front() {
                self.begin_work(&mut state, key, &work);
                return Some(work);
            }
            if state.closed {
                state.threads.remove(&key);
                return None;
            }
            state.idle += 1;
            state = self
                .work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }

    fn end_work(self: &Arc<Self>, state: &mut State, key: u64) -> Option<()> {
        let replaced = state
            .threads
            .values()
            .filter(|thread| thread.replaced)
            .count();
        let active = state.threads.len() - replaced;
        let thread = state.threads.get_mut(&key)?;
        thread.since = None;
        if thread.slowed || (thread.replaced && active >= self.kept) {
            state.threads.remove(&key);
            // Work may wait for just this thread.
            self.staff(state, Instant::now());
            return None;
        }
        thread.replaced = false;
        Some(())
    }

    fn begin_work(self: &Arc<Self>, state: &mut State, key: u64, work: &Work) {
        let Some(thread) = state.threads.get_mut(&key) else {
            return;
        };
        thread.since = Some(Instant::now());
        thread.late_after = match work {
            Work::Run { late_after, .. } => *late_after,
            Work::Discard(_) => Duration::MAX,
        };
        #[cfg(target_os = "linux")]
        if thread.id.is_none() {
            thread.id = Some(rustix::thread::gettid());
        }
        match state.clock {
            Clock::Ticking => {}
            Clock::Asleep => {
                state.clock = Clock::Ticking;
                self.busy.notify_one();
            }
            Clock::NotStarted => {
                let pool = Arc::clone(self);
                let clock = std::thread::Builder::new()
                    .name("controller-clock".to_owned())
                    .spawn(move || pool.tick());
                match clock {
                    Ok(_) => state.clock = Clock::Ticking,
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
                state.clock = Clock::Asleep;
                while state.clock == Clock::Asleep && !state.closed {
                    state = self
                        .busy
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                state.clock = Clock::Ticking;
                quiet = 0;
            }
            let waited = self.busy.wait_timeout(state, TICK);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            self.engine.increment_epoch();
            self.staff(&mut state, Instant::now());
            let busy = state.threads.values().any(|thread| thread.since.is_some());
            quiet = if busy { 0 } else { quiet + 1 };
        }
    }
}

impl Thread {
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

/// How often the epoch moves: the precision of time limits.
const TICK: Duration = Duration::from_millis(1);
/// The clock sleeps after so many ticks without work: waking it costs more than some ticks.
const QUIET_TICKS: u32 = 50;
/// After that time others no longer wait for a callback's thread.
const SLOW: Duration = Duration::from_millis(2);
/// Stack for what the host does around a guest: host functions, JSON, tokenizers.
const HOST_STACK_BYTES: usize = 2 << 20;
/// A thirtieth of the usual share. With the lowest priority of all, a busy machine would not even let it reach its
/// limit.
#[cfg(target_os = "linux")]
const LOW_PRIORITY: i32 = 15;
