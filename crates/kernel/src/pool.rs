//! A thread pool for CPU-bound work (rendering, tokenising, parsing, unpacking), away from the async workers.
//!
//! A worker of the async runtime that renders a template for a second serves no connection for a second, so work that
//! takes more than about a millisecond runs here, on a few threads of its own.
//!
//! ```text
//!   run(turn, size, work) ──► one queue per size ── turn by turn ──► threads ──► Running (a future)
//! ```
//!
//! - **Sizes.** At least one thread is reserved for small work, so that a short prompt never waits for a long one, and
//!   one may always do large work, so that small work cannot starve it.
//! - **Turns.** Work of one size is taken from the callers in turn (D-54): a caller with a long backlog delays only
//!   itself. One more thread is reserved for large work of another caller than the one that has all others: what arrives
//!   later does not wait until somebody's long work ends.
//! - **Ends.** Dropping the future removes the work from its queue, or requests it to stop ([`stop`]). A panic ends
//!   that work alone.
//! - **Bounds.** [`QUEUE_MAX`] pieces of work may wait in all, and [`QUEUE_EACH_MAX`] of one caller.
//!
//! The processor belongs to the whole process, so all users share one [`BlockingPool::global`]; only work of seconds
//! has [`BlockingPool::compiling`].

mod queue;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::channel::oneshot;
pub use sapwood_engine::stop;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use self::queue::{FairQueue, QueuedJob};
use crate::error::Error;
use crate::name::Name;
use crate::node::panic_text;

/// Pieces of work that may wait, over all callers.
pub const QUEUE_MAX: usize = 4096;
/// Pieces of work of one caller that may wait.
pub const QUEUE_EACH_MAX: usize = 1024;
/// Threads that compile grammars and modules. More than processors need, because modules are compiled by a child for
/// which the thread only waits. One caller may have three of them.
const COMPILING_THREADS: usize = 5;
/// Work on a text of this many bytes or more is large: at some megabytes a second it takes milliseconds.
pub const LARGE_BYTES: usize = 16 << 10;

/// The size class of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskSize {
    /// A few milliseconds at most.
    Small,
    /// Anything else.
    Large,
}

impl TaskSize {
    /// The size class of work on a text of so many bytes.
    #[must_use]
    pub const fn of(bytes: usize) -> Self {
        if bytes < LARGE_BYTES {
            Self::Small
        } else {
            Self::Large
        }
    }
}

/// The thread pool. Clones share it; its threads end some seconds after the last clone is dropped.
#[derive(Clone, Debug)]
pub struct BlockingPool(Arc<PoolShared>);

#[derive(Debug)]
struct PoolShared {
    state: Mutex<PoolState>,
    wake: Condvar,
    threads: usize,
    refused: AtomicU64,
    panics: AtomicU64,
    waited_us: AtomicU64,
    done: AtomicU64,
}

#[derive(Debug, Default)]
struct PoolState {
    small: FairQueue,
    large: FairQueue,
    started: usize,
    running: usize,
    /// The turns of large work that is running.
    running_large: Vec<u64>,
    next_id: u64,
}

/// Counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Pieces of work that are waiting.
    pub waiting: usize,
    /// Pieces of work that are running.
    pub running: usize,
    /// Pieces of work that ran, to their end or not.
    pub done: u64,
    /// Total waiting time of all pieces of work that ran.
    pub waited: Duration,
    /// Pieces of work that were refused because too many waited.
    pub refused: u64,
    /// Pieces of work that panicked.
    pub panics: u64,
}

impl BlockingPool {
    /// A pool of so many threads, at least two. They are started on demand.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self(Arc::new(PoolShared {
            state: Mutex::default(),
            wake: Condvar::new(),
            // With one thread, small work would wait for large work.
            threads: threads.max(2),
            refused: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            waited_us: AtomicU64::new(0),
            done: AtomicU64::new(0),
        }))
    }

    /// The pool of this process: one thread per processor, but at least two and at most eight, and one more, which a single
    /// caller with large work leaves to others.
    #[must_use]
    pub fn global() -> &'static Self {
        static POOL: OnceLock<BlockingPool> = OnceLock::new();
        POOL.get_or_init(|| {
            let processors = std::thread::available_parallelism().map_or(2, usize::from);
            Self::new(processors.clamp(2, 8) + 1)
        })
    }

    /// The pool of this process for grammars and modules, which take seconds to compile: a few of them would otherwise
    /// have all threads for large work, and long prompts would wait behind them.
    #[must_use]
    pub fn compiling() -> &'static Self {
        static POOL: OnceLock<BlockingPool> = OnceLock::new();
        POOL.get_or_init(|| Self::new(COMPILING_THREADS))
    }

    /// Runs `work` on one of the threads, in the turn of the caller with the number `turn`. The work asks
    /// [`stop::stopped`] whether its future was dropped.
    ///
    /// # Errors
    /// Of the future: `ENGINE_BUSY` if too much waits already, [`Error::Panicked`] if the work panics.
    pub fn run<T: Send + 'static>(
        &self,
        turn: u64,
        size: TaskSize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> PoolRun<T> {
        self.begin(turn, size, true, work)
    }

    /// Like [`BlockingPool::run`], but never refuses. For callers that have one piece of work at a time and are limited
    /// themselves, such as connections.
    pub fn run_only<T: Send + 'static>(
        &self,
        turn: u64,
        size: TaskSize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> PoolRun<T> {
        self.begin(turn, size, false, work)
    }

    fn begin<T: Send + 'static>(
        &self,
        turn: u64,
        size: TaskSize,
        bounded: bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> PoolRun<T> {
        let (sender, result) = oneshot::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let entered = Instant::now();
        // Weak, because a queued job is owned by the pool itself.
        let shared = Arc::downgrade(&self.0);
        let flag = Arc::clone(&stop);
        let run = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| stop::with(&flag, work)));
            let outcome = outcome.map_err(|payload| {
                let panic = panic_text(payload);
                if let Some(shared) = shared.upgrade() {
                    shared.panics.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(panic, "slow work panicked");
                }
                panicked()
            });
            // If sending fails, the future has been dropped.
            let _ = sender.send(outcome);
        };
        let job = QueuedJob {
            id: 0,
            entered,
            run: Box::new(run),
        };
        let id = self.0.enter(turn, size, bounded, job);
        PoolRun {
            result,
            work: id.map(|id| PoolTask {
                pool: Arc::clone(&self.0),
                turn,
                size,
                id,
                stop,
            }),
        }
    }

    /// The current counters.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.0.state();
        let waited = Duration::from_micros(self.0.waited_us.load(Ordering::Relaxed));
        PoolStats {
            waiting: state.small.len() + state.large.len(),
            running: state.running,
            done: self.0.done.load(Ordering::Relaxed),
            waited,
            refused: self.0.refused.load(Ordering::Relaxed),
            panics: self.0.panics.load(Ordering::Relaxed),
        }
    }
}

impl PoolShared {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        // No work runs under this lock, and the state is whole after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues work and returns its number; `None` if the queue is full.
    fn enter(
        self: &Arc<Self>,
        turn: u64,
        size: TaskSize,
        bounded: bool,
        mut job: QueuedJob,
    ) -> Option<u64> {
        let mut state = self.state();
        let full = state.small.len() + state.large.len() >= QUEUE_MAX;
        let queue = state.queue(size);
        // A share for each caller, so that one of them cannot fill the queue for all.
        if bounded && (full || queue.len_of(turn) >= QUEUE_EACH_MAX) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        state.next_id += 1;
        let id = state.next_id;
        job.id = id;
        state.queue(size).push(turn, job);
        let abandoned = self.start_thread(&mut state);
        drop(state);
        drop(abandoned);
        self.wake.notify_one();
        Some(id)
    }

    /// Starts one more thread if there is work for more than have been started. If the system refuses, the existing
    /// threads do the work; without any, nothing would ever do it, and the futures of all that waits fail.
    /// These are returned, because their values must be dropped after the lock is released.
    fn start_thread(self: &Arc<Self>, state: &mut PoolState) -> Option<[FairQueue; 2]> {
        let wanted = state.running + state.small.len() + state.large.len();
        if state.started >= wanted.min(self.threads) {
            return None;
        }
        // Weak: a thread ends when its pool is gone, so it must not keep it alive.
        let shared = Arc::downgrade(self);
        let builder = std::thread::Builder::new().name("slow work".to_owned());
        match builder.spawn(move || work_until_closed(&shared)) {
            Ok(_detached) => {
                state.started += 1;
                None
            }
            Err(why) => {
                tracing::error!(%why, "could not start a thread for slow work");
                let queues = [&mut state.small, &mut state.large];
                (state.started == 0).then(|| queues.map(std::mem::take))
            }
        }
    }
}

impl PoolState {
    fn queue(&mut self, size: TaskSize) -> &mut FairQueue {
        match size {
            TaskSize::Small => &mut self.small,
            TaskSize::Large => &mut self.large,
        }
    }

    /// Takes the next piece of work, with its turn, for a free thread.
    fn next(&mut self, threads: usize) -> Option<(TaskSize, u64, QueuedJob)> {
        let anybody = |_| true;
        // One thread always does large work, so that small work cannot starve it.
        if self.running_large.is_empty()
            && self.running > 0
            && let Some((turn, job)) = self.large.pop(anybody)
        {
            return Some((TaskSize::Large, turn, job));
        }
        if let Some((turn, job)) = self.small.pop(anybody) {
            return Some((TaskSize::Small, turn, job));
        }
        // The last free thread stays for small work.
        if self.running_large.len() + 1 >= threads {
            return None;
        }
        // The one before stays for another caller than the one with all others. With two threads there is none.
        let each_max = threads.saturating_sub(2).max(1);
        let running = &self.running_large;
        let has_room = |turn| running.iter().filter(|other| **other == turn).count() < each_max;
        let (turn, job) = self.large.pop(has_room)?;
        Some((TaskSize::Large, turn, job))
    }

    fn began(&mut self, size: TaskSize, turn: u64) {
        self.running += 1;
        if size == TaskSize::Large {
            self.running_large.push(turn);
        }
    }

    fn ended(&mut self, size: TaskSize, turn: u64) {
        self.running -= 1;
        let mut large = self.running_large.iter();
        if size == TaskSize::Large
            && let Some(position) = large.position(|other| *other == turn)
        {
            self.running_large.swap_remove(position);
        }
    }
}

/// How long an idle thread waits for work before it checks whether its pool still exists.
const IDLE: Duration = Duration::from_secs(10);

fn work_until_closed(pool: &std::sync::Weak<PoolShared>) {
    while let Some(shared) = pool.upgrade() {
        let mut state = shared.state();
        let next = loop {
            if let Some(next) = state.next(shared.threads) {
                break Some(next);
            }
            let (guard, waited) = shared
                .wake
                .wait_timeout(state, IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            // Gives up the strong pointer, so that a pool without users can be dropped; `upgrade` decides whether to
            // wait again.
            if waited.timed_out() {
                break None;
            }
        };
        let Some((size, turn, job)) = next else {
            continue;
        };
        state.began(size, turn);
        drop(state);
        let waited = u64::try_from(job.entered.elapsed().as_micros()).unwrap_or(u64::MAX);
        shared.waited_us.fetch_add(waited, Ordering::Relaxed);
        (job.run)();
        shared.done.fetch_add(1, Ordering::Relaxed);
        shared.state().ended(size, turn);
        // Work that this one prevented from starting may start now: wakes one idle thread for it.
        shared.wake.notify_one();
    }
}

/// Work that waits or runs. Resolves to its result. Dropping it ends the work.
#[must_use = "work that nobody waits for is not done"]
#[derive(Debug)]
pub struct PoolRun<T> {
    result: oneshot::Receiver<Result<T, Error>>,
    /// `None` if it was refused, and at the end.
    work: Option<PoolTask>,
}

#[derive(Debug)]
struct PoolTask {
    pool: Arc<PoolShared>,
    turn: u64,
    size: TaskSize,
    id: u64,
    stop: Arc<AtomicBool>,
}

impl Drop for PoolTask {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The values that it holds are dropped after the lock is released.
        let removed = self
            .pool
            .state()
            .queue(self.size)
            .remove(self.turn, self.id);
        drop(removed);
    }
}

impl<T> Future for PoolRun<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.work.is_none() {
            return Poll::Ready(Err(too_much_waits()));
        }
        let result = std::task::ready!(Pin::new(&mut self.result).poll(cx));
        // The pool is released now, and not when the future is dropped.
        self.work = None;
        Poll::Ready(result.unwrap_or_else(|_gone| Err(panicked())))
    }
}

fn panicked() -> Error {
    Error::Panicked {
        function: Name::new("prompt processing"),
    }
}

/// The error for a full queue; the same as for a full engine queue.
fn too_much_waits() -> Error {
    Error::Engine {
        code: Code::Overloaded,
        reason: ErrorReason::ENGINE_BUSY,
        message: "the queue for prompt processing is full: try again later".to_owned(),
        retry_after: Some(Duration::from_secs(1)),
    }
}
