//! [`MaskWorkers`]: threads that compute masks while the model runs (AI-811), and free what the engine's thread would take long
//! to free.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;
use sapwood_proto::steer::StepWaker;

use super::automaton::{Automaton, AutomatonError, Next};
use super::compile::Compiled;
use super::watchdog::{TimedWatch, Watch, Watchdog};

/// Stack of a worker: the automata of large grammars are walked on it.
const STACK_BYTES: usize = 16 << 20;

/// A pool of threads for masks, shared by the constraints of all models. The threads start with the first mask.
pub struct MaskWorkers {
    threads_max: usize,
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    watchdog: Watchdog,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    changed: Condvar,
}

/// Bounded by the number of sequences: each has one mask at most, and [`FREED_MAX`] bounds the rest.
#[derive(Default)]
struct Jobs {
    waiting: Turns<Job>,
    closed: bool,
}

/// Jobs whose grammars take turns: however many sequences have a grammar whose masks take long, those of another one wait
/// for one such mask, and not for all that were asked for before.
struct Turns<J> {
    /// None of them is empty.
    by_grammar: HashMap<usize, VecDeque<J>>,
    /// Whose turn is next. Each grammar with jobs is in it once.
    order: VecDeque<usize>,
}

impl<J> Default for Turns<J> {
    fn default() -> Self {
        Self {
            by_grammar: HashMap::new(),
            order: VecDeque::new(),
        }
    }
}

impl<J> Turns<J> {
    fn push(&mut self, grammar: usize, job: J) {
        let jobs = self.by_grammar.entry(grammar).or_default();
        if jobs.is_empty() {
            self.order.push_back(grammar);
        }
        jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<J> {
        let grammar = self.order.pop_front()?;
        let jobs = self.by_grammar.get_mut(&grammar)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.by_grammar.remove(&grammar);
        } else {
            self.order.push_back(grammar);
        }
        job
    }

    fn count_of(&self, grammar: usize) -> usize {
        self.by_grammar.get(&grammar).map_or(0, VecDeque::len)
    }

    fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

/// What a worker computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The tokens that must follow, perhaps none.
    Forced,
    /// The mask.
    Mask,
    /// The tokens that must follow, or the mask if there are none.
    Either,
}

enum Job {
    Mask(Box<MaskJob>),
    /// Only dropped.
    Free(Garbage),
}

/// Values that take long to free.
type Garbage = Box<dyn Send>;

/// Takes turns with the grammars. None has this address.
const GARBAGE: usize = 0;
/// Values that wait to be freed. Their memory is in use until then.
pub(super) const FREED_MAX: usize = 64;

struct MaskJob {
    automaton: Automaton,
    compiled: Arc<Compiled>,
    wanted: Wanted,
    slot: Arc<Slot>,
    waker: Option<Arc<dyn StepWaker>>,
}

/// Where a result is put, with the automaton that computed it.
#[derive(Default)]
struct Slot {
    done: Mutex<Option<Done>>,
    filled: Condvar,
}

type Done = (Automaton, Result<Next, AutomatonError>);

/// A mask that is being computed. Dropping it stops the computation.
pub(super) struct PendingMask {
    slot: Arc<Slot>,
    cancellation: CancellationHandle,
    /// The result was taken: cancelling now would end the sequence that goes on with the automaton.
    taken: bool,
}

impl MaskWorkers {
    /// Creates a pool of one thread less than there are processors, and one at least: the model needs one too.
    #[must_use]
    pub fn new() -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads(processors.saturating_sub(1))
    }

    /// Creates a pool of as many threads, one at least.
    #[must_use]
    pub fn with_threads(threads: usize) -> Self {
        Self {
            threads_max: threads.max(1),
            queue: Arc::default(),
            threads: Mutex::default(),
            watchdog: Watchdog::default(),
        }
    }

    /// Watches the work of an automaton on the threads of others.
    pub(super) fn watch(&self, automaton: &Automaton) -> Arc<Watch> {
        self.watchdog.watch(automaton.cancellation())
    }

    /// As [`MaskWorkers::watch`], where each call has a deadline of its own.
    pub(super) fn watch_timed(&self, automaton: &Automaton) -> Arc<TimedWatch> {
        self.watchdog.watch_timed(automaton.cancellation())
    }

    /// Whether the watchdog's thread runs.
    #[cfg(test)]
    pub(super) fn has_watchdog(&self) -> bool {
        self.watchdog.is_running()
    }

    /// Computes what follows on another thread.
    pub(super) fn compute(
        &self,
        automaton: Automaton,
        compiled: Arc<Compiled>,
        wanted: Wanted,
        waker: Option<Arc<dyn StepWaker>>,
    ) -> PendingMask {
        self.start();
        let pending = PendingMask {
            slot: Arc::default(),
            cancellation: automaton.cancellation(),
            taken: false,
        };
        // The job keeps it alive, so no other grammar has this address as long as it waits.
        let grammar = Arc::as_ptr(&compiled).addr();
        let job = Job::Mask(Box::new(MaskJob {
            automaton,
            compiled,
            wanted,
            slot: Arc::clone(&pending.slot),
            waker,
        }));
        self.queue.jobs().waiting.push(grammar, job);
        self.queue.changed.notify_one();
        pending
    }

    /// Frees a value on another thread. Where too many wait for that, or there is no thread, it is freed here.
    pub(super) fn free(&self, garbage: Garbage) {
        if self.start() == 0 {
            return;
        }
        let mut jobs = self.queue.jobs();
        if jobs.waiting.count_of(GARBAGE) < FREED_MAX {
            jobs.waiting.push(GARBAGE, Job::Free(garbage));
            drop(jobs);
            self.queue.changed.notify_one();
        }
    }

    /// Starts the threads that are missing. Returns how many there are.
    fn start(&self) -> usize {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        while threads.len() < self.threads_max {
            let queue = Arc::clone(&self.queue);
            let thread = thread::Builder::new()
                .name(format!("mask-{}", threads.len()))
                .stack_size(STACK_BYTES)
                .spawn(move || queue.work());
            match thread {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    // Tried again with the next mask. Without any thread the sequences are late and end with an error.
                    tracing::error!(%error, "no thread for masks");
                    break;
                }
            }
        }
        threads.len()
    }
}

impl Default for MaskWorkers {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for MaskWorkers {
    fn drop(&mut self) {
        let mut jobs = self.queue.jobs();
        jobs.closed = true;
        let dropped = std::mem::take(&mut jobs.waiting);
        drop(jobs);
        drop(dropped);
        self.queue.changed.notify_all();
        let threads = std::mem::take(
            self.threads
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for thread in threads {
            // A worker fences panics, so it ends with its loop.
            let _ended = thread.join();
        }
    }
}

impl Queue {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let waits = |jobs: &mut Jobs| jobs.waiting.is_empty() && !jobs.closed;
            let jobs = self.changed.wait_while(self.jobs(), waits);
            let job = jobs.unwrap_or_else(PoisonError::into_inner).waiting.pop();
            match job {
                Some(Job::Mask(job)) => job.run(),
                Some(Job::Free(garbage)) => drop(garbage),
                None => return,
            }
        }
    }
}

impl MaskJob {
    fn run(self) {
        let mut automaton = self.automaton;
        let ends = &self.compiled.ends;
        let begun = Instant::now();
        let next = match self.wanted {
            Wanted::Forced => automaton.forced().map(Next::Forced),
            Wanted::Mask => automaton.next(false, ends),
            Wanted::Either => automaton.next(true, ends),
        };
        let seconds = &self.compiled.times.constraint_mask_seconds;
        seconds.observe_span(begun.elapsed());
        let mut done = self
            .slot
            .done
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *done = Some((automaton, next));
        drop(done);
        self.slot.filled.notify_all();
        if let Some(waker) = self.waker {
            waker.wake();
        }
    }
}

impl PendingMask {
    /// Returns the result if it is there. It can be taken once.
    pub(super) fn poll(&mut self) -> Option<Done> {
        let done = self
            .slot
            .done
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        self.taken |= done.is_some();
        done
    }

    /// Waits for the result; `None` if it does not come within the time that any mask may take.
    pub(super) fn wait(&mut self) -> Option<Done> {
        let done = self
            .slot
            .done
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let missing = |done: &mut Option<Done>| done.is_none();
        let waited = self.slot.filled.wait_timeout_while(done, WAIT_MAX, missing);
        let done = waited.unwrap_or_else(PoisonError::into_inner).0.take();
        self.taken |= done.is_some();
        done
    }
}

/// Many times what the limits of the automata allow.
const WAIT_MAX: Duration = Duration::from_secs(1);

impl Drop for PendingMask {
    fn drop(&mut self) {
        if !self.taken {
            self.cancellation.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_811_grammars_take_turns() {
        let mut turns = Turns::default();
        for (grammar, job) in [(1, "a"), (1, "b"), (1, "c"), (2, "d"), (3, "e"), (2, "f")] {
            turns.push(grammar, job);
        }
        let first: Vec<_> = std::iter::from_fn(|| turns.pop()).take(3).collect();
        assert_eq!(first, ["a", "d", "e"]);
        // One that has had its turn waits for the others again.
        turns.push(3, "g");
        let rest: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(rest, ["b", "f", "g", "c"]);
        assert!(turns.is_empty() && turns.by_grammar.is_empty());
    }
}
