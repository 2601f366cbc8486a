//! [`SamplerPool`]: samples several rows at once, on threads that all engines of the process share.
//!
//! The engine's thread hands its processor over and waits: whichever thread of the pool runs first takes rows, and with it
//! those that run next. Where all processors are busy with others, as with threads of llama.cpp that have not gone to sleep
//! yet, one thread does all, and nobody waits for one that has begun nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{Sample, SampleError, SampleParams, Sampler};
use crate::processors;

/// The maximum of threads of a step: they are woken one after the other.
const THREADS_MAX: usize = 16;

/// Logits that a thread passes over at least. That takes about half a millisecond. Waking it takes a few microseconds where a processor
/// is idle, but those of llama.cpp's threads are not at once: with a quarter of this, eight greedy streams over 49,000 tokens on two
/// processors were no faster, and rather slower. Less in tests, whose vocabularies are small.
const LOGITS_PER_THREAD: usize = if cfg!(test) { 1 << 9 } else { 1 << 19 };

/// The threads, which end with the last engine that uses them.
static SHARED: Mutex<Weak<ThreadPool>> = Mutex::new(Weak::new());

static USABLE: LazyLock<u32> = LazyLock::new(processors::usable);

/// A row to be sampled.
#[derive(Debug)]
pub(crate) struct RowTask<'a> {
    row: &'a mut [f32],
    params: SampleParams<'a>,
    sampled: Result<Sample, SampleError>,
}

impl<'a> RowTask<'a> {
    pub(crate) fn new(row: &'a mut [f32], params: SampleParams<'a>) -> Self {
        Self {
            row,
            params,
            // What it stays if the sampler panics.
            sampled: Err(SampleError::Panicked),
        }
    }

    /// The result, once it was sampled.
    pub(crate) fn into_result(self) -> Result<Sample, SampleError> {
        self.sampled
    }
}

/// Samplers for several threads.
#[derive(Debug)]
pub(crate) struct SamplerPool {
    threads_max: usize,
    /// `None` before there was work for it.
    pool: Option<Arc<ThreadPool>>,
    /// One for each thread, because it has the buffers.
    samplers: Vec<Sampler>,
}

impl SamplerPool {
    /// Samplers for so many threads; `None`: for as many as there are processors.
    pub(crate) fn new(threads: Option<u32>) -> Self {
        let threads = threads.unwrap_or_else(|| *USABLE);
        let threads = usize::try_from(threads).unwrap_or(THREADS_MAX);
        Self {
            threads_max: threads.clamp(1, THREADS_MAX),
            pool: None,
            samplers: Vec::new(),
        }
    }

    /// Returns how many threads so many rows are worth, with so many logits to pass over in all.
    pub(crate) fn threads_for(&self, rows: usize, logits: usize) -> usize {
        let most = self.threads_max.min(rows);
        most.min(logits / LOGITS_PER_THREAD).max(1)
    }

    /// Samples rows on so many threads, at most those that [`SamplerPool::threads_for`] returns; with one on the caller's.
    pub(crate) fn sample(&mut self, tasks: &mut [RowTask<'_>], threads: usize) {
        if self.samplers.len() < threads {
            self.samplers.resize_with(threads, Sampler::default);
        }
        if self.pool.is_none() && threads > 1 {
            self.pool = shared(self.threads_max);
            if self.pool.is_none() {
                // The system gives no threads. Not asked for again in each step.
                self.threads_max = 1;
            }
        }
        let pool = self.pool.as_deref().filter(|_| threads > 1);
        let samplers = &mut self.samplers[..threads];
        work_off(pool, samplers, tasks, |sampler, task| {
            task.sampled = sampler.sample(task.row, &task.params);
        });
    }
}

/// Returns the shared threads, at least so many. Where they are too few for an engine, it and those after it get others.
fn shared(threads: usize) -> Option<Arc<ThreadPool>> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = shared.upgrade();
    if let Some(pool) = pool.filter(|pool| pool.current_num_threads() >= threads) {
        return Some(pool);
    }
    let builder = ThreadPoolBuilder::new().num_threads(threads);
    match builder.thread_name(|at| format!("sample-{at}")).build() {
        Ok(pool) => {
            let pool = Arc::new(pool);
            *shared = Arc::downgrade(&pool);
            Some(pool)
        }
        Err(error) => {
            tracing::error!(%error, "no threads to sample on");
            None
        }
    }
}

/// Does all tasks, on a thread of the pool for each scratch, or all on the caller's. A panic ends its task alone.
fn work_off<S: Default + Send, T: Send>(
    pool: Option<&ThreadPool>,
    scratches: &mut [S],
    tasks: &mut [T],
    work: impl Fn(&mut S, &mut T) + Sync,
) {
    // Each thread takes the next task when it is done with one: rows take differently long, and threads come late.
    let tasks = Mutex::new(tasks.iter_mut());
    let work_off = |scratch: &mut S| {
        loop {
            let next = tasks.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(task) = next else { return };
            let done = catch_unwind(AssertUnwindSafe(|| work(scratch, task)));
            if done.is_err() {
                // Its buffers may be in any state.
                *scratch = S::default();
            }
        }
    };
    let Some((own, others)) = scratches.split_first_mut() else {
        return;
    };
    let Some(pool) = pool else {
        return work_off(own);
    };
    // Not in place: a thread of the pool that waits for the end of the scope does what no other has begun, and the caller's
    // could only wait for it.
    pool.scope(|scope| {
        let work_off = &work_off;
        for scratch in others {
            scope.spawn(move |_| work_off(scratch));
        }
        work_off(own);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_woken_for_enough_work_only() {
        let pool = SamplerPool::new(Some(4));
        let threads = |rows, logits_of_row| pool.threads_for(rows, rows * logits_of_row);
        assert_eq!(threads(1, 1 << 30), 1, "a row is not divided");
        assert_eq!(threads(10, LOGITS_PER_THREAD / 10), 1);
        assert_eq!(threads(3, LOGITS_PER_THREAD - 1), 2);
        assert_eq!(threads(3, LOGITS_PER_THREAD), 3);
        assert_eq!(threads(32, LOGITS_PER_THREAD), 4);
        assert_eq!(SamplerPool::new(Some(1)).threads_for(32, 1 << 30), 1);
        assert_eq!(SamplerPool::new(Some(0)).threads_for(32, 1 << 30), 1);
        assert_eq!(SamplerPool::new(Some(99)).threads_for(99, 1 << 30), 16);
        assert!(SamplerPool::new(None).threads_max >= 1);
    }

    #[test]
    fn engines_share_threads_that_are_enough_for_them() {
        let first = shared(2).unwrap();
        // Other tests may share some meanwhile.
        assert!(first.current_num_threads() >= 2);
        let again = shared(1).unwrap();
        assert!(again.current_num_threads() >= 1);
        assert!(shared(5).unwrap().current_num_threads() >= 5);
        assert_eq!(first.install(|| 1), 1, "those that had others keep them");
    }

    #[test]
    fn a_panic_ends_its_task_alone_and_its_scratch_is_replaced() {
        let pool = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        for pool in [None, Some(&pool)] {
            let mut tasks: Vec<(u32, Option<u32>)> = (0..40).map(|task| (task, None)).collect();
            let mut scratches = vec![Vec::new(); 3];
            work_off(pool, &mut scratches, &mut tasks, |scratch, task| {
                scratch.push(task.0);
                assert!(!task.0.is_multiple_of(7), "a defect");
                task.1 = Some(task.0 * 2);
            });
            for (task, done) in tasks {
                let expected = (!task.is_multiple_of(7)).then_some(task * 2);
                assert_eq!(done, expected);
            }
            let panicked = |scratch: &Vec<u32>| scratch.iter().any(|task| task.is_multiple_of(7));
            assert!(!scratches.iter().any(panicked));
        }
    }
}
