//! [`ComputePool`]: ggml's worker threads, and whose turn it is to use the processors.
//!
//! The threads of a decode call wait for each other without sleeping, several hundred times per token. Two models that decode
//! at once with a thread for each processor would wait for threads that have none. So a decode call takes as many
//! processors as it may have threads, calls wait for them in the order of asking, and contexts that use all processors share one
//! set of threads, or the idle ones of one would spin on the processors of the other.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use llama_cpp_sys_2 as sys;

use super::backends::ThreadpoolFunctions;
use crate::model::DecodeSignals;
use crate::processors;

/// The maximum of threads of one decode call.
pub(in super::super) const THREADS_MAX: u32 = 256;

/// What operators see of these threads, such as in `top -H`; Linux shows 15 bytes.
const THREAD_NAME: &str = "engine-compute";

/// How often a context that waits for its turn shows that it is alive, and looks whether it should give up.
const PULSE: Duration = Duration::from_millis(20);

/// The processors that decode calls of this process take.
static PROCESSORS: LazyLock<Turns> = LazyLock::new(|| Turns::of(processors::usable()));

/// The threads of contexts that use all processors.
static SHARED: Mutex<Vec<Weak<ComputePool>>> = Mutex::new(Vec::new());

/// Returns how many processors there are for decode calls.
pub(super) fn processors() -> u32 {
    PROCESSORS.total
}

/// Whether the calls of a context take turns with those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnTaking {
    /// With all that take turns too.
    Shared,
    /// Not at all: a GPU would be idle meanwhile, or a call may take seconds, for which no stream of another model should wait.
    Free,
}

/// Worker threads, one decode call at a time.
#[derive(Debug)]
pub(super) struct ComputePool {
    threads: NonNull<sys::ggml_threadpool>,
    functions: ThreadpoolFunctions,
    count: u32,
    poll: u32,
    turns: TurnTaking,
}

// SAFETY: ggml's pool is an object behind locks and atomics; it is used for one graph at a time: by its only context, or by
// whoever has all processors.
unsafe impl Send for ComputePool {}
// SAFETY: as above.
unsafe impl Sync for ComputePool {}

impl ComputePool {
    /// Returns threads for a context whose calls have at most `count` of them; `None` if ggml has no memory for them. `poll`
    /// is how long idle threads spin before they sleep, 0 to 100.
    pub(super) fn new(count: u32, poll: u32, turns: TurnTaking) -> Option<Arc<Self>> {
        // More threads would overrun ggml's fixed CPU mask.
        let (count, poll) = (count.clamp(1, THREADS_MAX), poll.min(100));
        if turns == TurnTaking::Free || count < PROCESSORS.total {
            return Self::own(count, poll, turns).map(Arc::new);
        }
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|pool| pool.strong_count() > 0);
        let mut used = shared.iter().filter_map(Weak::upgrade);
        if let Some(pool) = used.find(|pool| pool.count >= count && pool.poll == poll) {
            return Some(pool);
        }
        let pool = Arc::new(Self::own(count, poll, turns)?);
        shared.push(Arc::downgrade(&pool));
        Some(pool)
    }

    fn own(count: u32, poll: u32, turns: TurnTaking) -> Option<Self> {
        // ggml names no thread, so its threads keep the name of the one that creates them. That would be whichever loads the model.
        let creator = thread::Builder::new().name(THREAD_NAME.to_owned());
        let created = creator.spawn(move || Self::create(count, poll, turns));
        created.ok()?.join().ok()?
    }

    fn create(count: u32, poll: u32, turns: TurnTaking) -> Option<Self> {
        let functions = ThreadpoolFunctions::find()?;
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::ggml_threadpool_params_default(count.cast_signed()) };
        params.poll = poll;
        // SAFETY: the parameters are copied; the pool is freed by `Drop`.
        let threads = NonNull::new(unsafe { (functions.new)(&raw mut params) })?;
        Some(Self {
            threads,
            functions,
            count,
            poll,
            turns,
        })
    }

    /// Has a context compute with these threads.
    ///
    /// # Safety
    /// The context must be live and not computing, must be freed before this pool, and must compute only during a
    /// [`Turn`].
    pub(super) unsafe fn attach(&self, context: NonNull<sys::llama_context>) {
        let threads = self.threads.as_ptr();
        // SAFETY: as the caller promises.
        unsafe { sys::llama_attach_threadpool(context.as_ptr(), threads, threads) };
    }

    /// Waits until there are processors for these threads; `None` if `signals` ask to give up.
    pub(super) fn turn(&self, signals: &DecodeSignals) -> Option<Turn<'static>> {
        match self.turns {
            TurnTaking::Shared => PROCESSORS.take(self.count, signals),
            TurnTaking::Free => PROCESSORS.take(0, signals),
        }
    }
}

impl Drop for ComputePool {
    fn drop(&mut self) {
        // SAFETY: the only owner; the contexts that used it were freed before.
        unsafe { (self.functions.free)(self.threads.as_ptr()) };
    }
}

/// Who computes, and who waits for it, in the order in which they came.
#[derive(Debug)]
struct Turns {
    total: u32,
    state: Mutex<TakenProcessors>,
    passed: Condvar,
}

#[derive(Debug, Default)]
struct TakenProcessors {
    taken: u32,
    waiting: VecDeque<u64>,
    /// The number of the next one that has to wait.
    next: u64,
}

/// Permission to compute, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    processors: u32,
    /// How long it was waited for.
    pub(super) waited: Duration,
}

impl Turns {
    fn of(total: u32) -> Self {
        Self {
            total: total.max(1),
            state: Mutex::default(),
            passed: Condvar::new(),
        }
    }

    /// Takes so many processors, at most all of them.
    fn take(&self, processors: u32, signals: &DecodeSignals) -> Option<Turn<'_>> {
        let processors = processors.min(self.total);
        let turn = |waited| Turn {
            turns: self,
            processors,
            waited,
        };
        if processors == 0 {
            return Some(turn(Duration::ZERO));
        }
        let mut state = self.lock();
        let fits = |state: &TakenProcessors| state.taken + processors <= self.total;
        // Not if others wait: whoever decodes without pause would come back before they have woken.
        if fits(&state) && state.waiting.is_empty() {
            state.taken += processors;
            return Some(turn(Duration::ZERO));
        }
        let began = Instant::now();
        let number = state.next;
        state.next += 1;
        state.waiting.push_back(number);
        loop {
            let is_first = state.waiting.front() == Some(&number);
            let gives_up = !(is_first && fits(&state)) && signals.pulse();
            if is_first && fits(&state) || gives_up {
                state.waiting.retain(|&other| other != number);
                if !gives_up {
                    state.taken += processors;
                }
                // There may be enough left for the next one too.
                self.passed.notify_all();
                return (!gives_up).then(|| turn(began.elapsed()));
            }
            let waited = self.passed.wait_timeout(state, PULSE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, TakenProcessors> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.processors > 0 {
            self.turns.lock().taken -= self.processors;
            self.turns.passed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn contexts_that_use_all_processors_share_their_threads() {
        let all = PROCESSORS.total;
        // A way of spinning that no other test has.
        let new = |count, poll, turns| ComputePool::new(count, poll, turns).unwrap();
        let first = new(all, 91, TurnTaking::Shared);
        let more = new(all + 1, 91, TurnTaking::Shared);
        assert!(Arc::ptr_eq(&first, &new(all, 91, TurnTaking::Shared)));
        assert!(!Arc::ptr_eq(&first, &more));
        assert!(Arc::ptr_eq(&more, &new(all + 1, 91, TurnTaking::Shared)));
        assert!(!Arc::ptr_eq(&first, &new(all, 91, TurnTaking::Free)));
        assert!(!Arc::ptr_eq(&first, &new(all, 92, TurnTaking::Shared)));
        let fewer = |count| new(count, 91, TurnTaking::Shared);
        assert!(all == 1 || !Arc::ptr_eq(&fewer(all - 1), &fewer(all - 1)));
        drop((first, more));
        let shared = SHARED.lock().unwrap();
        let alive = shared.iter().filter_map(Weak::upgrade);
        let alive = alive.filter(|pool| pool.poll == 91).count();
        assert_eq!(alive, 0, "freed with their contexts");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_have_a_name() {
        let named = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let names = tasks.filter_map(|task| std::fs::read(task.ok()?.path().join("comm")).ok());
            let ours = names.filter(|name| name.trim_ascii_end() == THREAD_NAME.as_bytes());
            ours.count()
        };
        // Other tests of this process may have threads of their own.
        let pool = ComputePool::new(3, 93, TurnTaking::Free).unwrap();
        assert!(named() >= 2, "one of the three is the thread that calls");
        drop(pool);
    }

    #[test]
    fn calls_that_fit_beside_each_other_do_not_wait() {
        let (turns, signals) = (Turns::of(4), DecodeSignals::default());
        let take = |processors| turns.take(processors, &signals).unwrap();
        let taken = [take(1), take(2), take(1), take(0)];
        assert_eq!(turns.lock().taken, 4);
        drop(taken);
        let all = take(9);
        assert_eq!((all.waited, turns.lock().taken), (Duration::ZERO, 4));
        let free = take(0);
        signals.raise();
        assert!(turns.take(1, &signals).is_none(), "it waits, and gives up");
        drop((all, free));
        assert_eq!(turns.lock().taken, 0);
    }

    #[test]
    fn turns_are_in_the_order_of_asking_and_whoever_gives_up_is_left_out() {
        let (turns, going) = (Turns::of(2), DecodeSignals::default());
        let gives_up = DecodeSignals::default();
        let (sent, order) = mpsc::sync_channel(4);
        let turn = turns.take(2, &going).unwrap();
        let waiting = |count: usize| {
            while turns.lock().waiting.len() != count {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            for (number, signals) in [(0, &going), (1, &gives_up), (2, &going), (3, &going)] {
                let (sent, turns) = (sent.clone(), &turns);
                scope.spawn(move || {
                    let turn = turns.take(2, signals);
                    sent.send((number, turn.is_some())).unwrap();
                });
                waiting(number + 1);
            }
            gives_up.raise();
            assert_eq!(order.recv(), Ok((1, false)));
            drop(turn);
            let rest: Vec<_> = order.iter().take(3).collect();
            assert_eq!(rest, [(0, true), (2, true), (3, true)]);
        });
        assert!(turns.take(1, &going).is_some());
    }

    #[test]
    fn a_model_that_never_rests_lets_others_in() {
        let (turns, signals) = (Turns::of(2), DecodeSignals::default());
        let (busy, other) = (Mutex::new(0_u32), Mutex::new(0_u32));
        thread::scope(|scope| {
            for count in [&busy, &other] {
                scope.spawn(|| {
                    while *other.lock().unwrap() < 50 || *busy.lock().unwrap() < 50 {
                        let _turn = turns.take(2, &signals).unwrap();
                        *count.lock().unwrap() += 1;
                    }
                });
            }
        });
        let (busy, other) = (*busy.lock().unwrap(), *other.lock().unwrap());
        assert!(busy.min(other) >= 50 && turns.lock().waiting.is_empty());
    }
}
