//! [`GpuTurn`]: where there is a GPU, models are planned and loaded one after another.
//!
//! A plan counts on the memory of GPUs that is free, and llama.cpp takes it while it loads: two plans at the same time would
//! count on the same bytes, and the second load would fail.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::llama::{self, LlamaBackend};
use super::load::LoadOptions;
use super::load_error::LoadError;
use super::memory::ASK;
use crate::llama_options::GpuLayers;

/// The turns of all models of this process.
static TURNS: GpuTurns = GpuTurns::new();

/// A model is loaded; others wait until this is dropped.
#[derive(Debug)]
pub(super) struct GpuTurn<'a>(&'a GpuTurns);

#[derive(Debug)]
struct GpuTurns {
    is_taken: Mutex<bool>,
    released: Condvar,
}

/// Waits until no other model is being loaded, if there is a GPU; `None` without one, where reservations of memory are enough.
///
/// # Errors
/// There are no kernels for this machine, or `progress` has stopped the wait.
pub(super) fn take(
    options: &LoadOptions,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Option<GpuTurn<'static>>, LoadError> {
    // The GPUs are known from here on.
    LlamaBackend::start(options.llama.numa)?;
    // One that computes on the CPU alone waits for nobody.
    let has_no_layers = options.llama.gpu_layers == Some(GpuLayers::Number(0));
    if has_no_layers || !llama::has_gpu() {
        return Ok(None);
    }
    let turn = TURNS.take(&mut || progress(0.0));
    turn.map(Some).ok_or(LoadError::Stopped)
}

impl GpuTurns {
    const fn new() -> Self {
        Self {
            is_taken: Mutex::new(false),
            released: Condvar::new(),
        }
    }

    /// `None` if `goes_on` returns false meanwhile.
    fn take(&self, goes_on: &mut dyn FnMut() -> bool) -> Option<GpuTurn<'_>> {
        let mut is_taken = self.lock();
        while *is_taken {
            // With a limit, so that a caller who gives up is noticed although no turn ends.
            let waited = self.released.wait_timeout(is_taken, ASK);
            // The lock is released before `goes_on`, which is the caller's code and may take time.
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            if !goes_on() {
                return None;
            }
            is_taken = self.lock();
        }
        *is_taken = true;
        Some(GpuTurn(self))
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for GpuTurn<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        // One of those that wait, as only one can have the next turn. Should it be giving up just now, the others look again
        // after [`ASK`].
        self.0.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn one_model_at_a_time_has_the_turn() {
        let turns = GpuTurns::new();
        let (running, done) = (AtomicU32::new(0), AtomicU32::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let turn = turns.take(&mut || true).unwrap();
                        assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0);
                        thread::yield_now();
                        running.fetch_sub(1, Ordering::SeqCst);
                        drop(turn);
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(done.into_inner(), 200);
    }

    #[test]
    fn a_wait_for_the_turn_can_be_stopped() {
        let turns = GpuTurns::new();
        let turn = turns.take(&mut || false).expect("nobody has it");
        let mut asked = 0;
        let stopped = turns.take(&mut || {
            asked += 1;
            asked < 2
        });
        assert!(stopped.is_none());
        assert_eq!(asked, 2);
        drop(turn);
        assert!(turns.take(&mut || false).is_some());
    }
}
