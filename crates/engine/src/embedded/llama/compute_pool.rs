//! [`ComputePool`]: ggml's worker threads, which the models of a process share, and whose turn it is to use them.
//!
//! The threads of a decode call wait for each other without sleeping, several hundred times per token. With threads of its own
//! for each model, two models that decode at once would wait for threads that have no processor. So a decode call has
//! all threads to itself, and the models take turns.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use llama_cpp_sys_2 as sys;

use crate::model::DecodeSignals;

/// The maximum of threads of one decode call.
pub(in super::super) const THREADS_MAX: u32 = 256;

/// How often a model that waits for its turn shows that it is alive, and looks whether it should give up.
const PULSE: Duration = Duration::from_millis(20);

/// The pools that contexts use now.
static POOLS: Mutex<Vec<Weak<ComputePool>>> = Mutex::new(Vec::new());

/// Worker threads, one decode call at a time.
#[derive(Debug)]
pub(super) struct ComputePool {
    threads: NonNull<sys::ggml_threadpool>,
    count: u32,
    poll: u32,
    turns: Turns,
}

// SAFETY: ggml's pool is an object behind locks and atomics; it is used for one graph at a time, by whoever has the turn.
unsafe impl Send for ComputePool {}
// SAFETY: as above.
unsafe impl Sync for ComputePool {}

impl ComputePool {
    /// Returns a pool with at least this many threads, which others may use too; `None` if the threads cannot be started.
    /// `poll` is how long idle threads spin before they sleep, 0 to 100.
    pub(super) fn shared(count: u32, poll: u32) -> Option<Arc<Self>> {
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|pool| pool.strong_count() > 0);
        let mut used = pools.iter().filter_map(Weak::upgrade);
        let (count, poll) = bounded(count, poll);
        if let Some(pool) = used.find(|pool| pool.count >= count && pool.poll == poll) {
            return Some(pool);
        }
        let pool = Arc::new(Self::new(count, poll)?);
        pools.push(Arc::downgrade(&pool));
        Some(pool)
    }

    /// Returns a pool that no other context uses: where a GPU computes, waiting for another model's turn would leave it idle.
    pub(super) fn own(count: u32, poll: u32) -> Option<Arc<Self>> {
        let (count, poll) = bounded(count, poll);
        Self::new(count, poll).map(Arc::new)
    }

    fn new(count: u32, poll: u32) -> Option<Self> {
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::ggml_threadpool_params_default(count.cast_signed()) };
        params.poll = poll;
        // SAFETY: the parameters are copied; the pool is freed by `Drop`.
        let threads = NonNull::new(unsafe { sys::ggml_threadpool_new(&raw mut params) })?;
        Some(Self {
            threads,
            count,
            poll,
            turns: Turns::default(),
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

    /// Waits until no other context computes; `None` if `signals` ask to give up.
    pub(super) fn turn(&self, signals: &DecodeSignals) -> Option<Turn<'_>> {
        self.turns.take(signals)
    }
}

impl Drop for ComputePool {
    fn drop(&mut self) {
        // SAFETY: the only owner; the contexts that used it were freed before.
        unsafe { sys::ggml_threadpool_free(self.threads.as_ptr()) };
    }
}

/// More threads would overrun ggml's fixed CPU mask.
fn bounded(count: u32, poll: u32) -> (u32, u32) {
    (count.clamp(1, THREADS_MAX), poll.min(100))
}

/// Who computes, and who waits for it, in the order in which they came.
#[derive(Debug, Default)]
struct Turns {
    state: Mutex<TurnState>,
    passed: Condvar,
}

#[derive(Debug, Default)]
struct TurnState {
    taken: bool,
    waiting: VecDeque<u64>,
    /// The number of the next one that has to wait.
    next: u64,
}

/// Permission to compute, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    fn take(&self, signals: &DecodeSignals) -> Option<Turn<'_>> {
        let mut state = self.lock();
        // Not if others wait: whoever decodes without pause would come back before they have woken.
        if !state.taken && state.waiting.is_empty() {
            state.taken = true;
            return Some(Turn(self));
        }
        let number = state.next;
        state.next += 1;
        state.waiting.push_back(number);
        loop {
            if !state.taken && state.waiting.front() == Some(&number) {
                state.waiting.pop_front();
                state.taken = true;
                return Some(Turn(self));
            }
            if signals.pulse() {
                state.waiting.retain(|&other| other != number);
                // The next one may have been behind this one only.
                self.passed.notify_all();
                return None;
            }
            let waited = self.passed.wait_timeout(state, PULSE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().taken = false;
        self.0.passed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn models_share_threads_if_there_are_enough_of_them() {
        // A way of spinning that no other test has.
        let first = ComputePool::shared(3, 91).unwrap();
        let fewer = ComputePool::shared(2, 91).unwrap();
        let more = ComputePool::shared(4, 91).unwrap();
        assert!(Arc::ptr_eq(&first, &fewer) && !Arc::ptr_eq(&first, &more));
        assert!(!Arc::ptr_eq(&first, &ComputePool::own(3, 91).unwrap()));
        assert!(!Arc::ptr_eq(&first, &ComputePool::shared(3, 92).unwrap()));
        drop((first, fewer, more));
        let pools = POOLS.lock().unwrap();
        let alive = pools.iter().filter_map(Weak::upgrade);
        assert_eq!(
            alive.filter(|pool| pool.poll == 91).count(),
            0,
            "freed with their contexts"
        );
    }

    #[test]
    fn turns_are_in_the_order_of_asking_and_whoever_gives_up_is_left_out() {
        let (turns, going) = (Turns::default(), DecodeSignals::default());
        let gives_up = DecodeSignals::default();
        let (sent, order) = mpsc::channel();
        let turn = turns.take(&going).unwrap();
        let waiting = |count: usize| {
            while turns.lock().waiting.len() != count {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            for (number, signals) in [(0, &going), (1, &gives_up), (2, &going), (3, &going)] {
                let (sent, turns) = (sent.clone(), &turns);
                scope.spawn(move || {
                    let turn = turns.take(signals);
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
        assert!(turns.take(&going).is_some());
    }

    #[test]
    fn a_model_that_never_rests_lets_others_in() {
        let (turns, signals) = (Turns::default(), DecodeSignals::default());
        let (busy, other) = (Mutex::new(0_u32), Mutex::new(0_u32));
        thread::scope(|scope| {
            for count in [&busy, &other] {
                scope.spawn(|| {
                    while *other.lock().unwrap() < 50 || *busy.lock().unwrap() < 50 {
                        let _turn = turns.take(&signals).unwrap();
                        *count.lock().unwrap() += 1;
                    }
                });
            }
        });
        let (busy, other) = (*busy.lock().unwrap(), *other.lock().unwrap());
        assert!(busy.min(other) >= 50 && turns.lock().waiting.is_empty());
    }
}
