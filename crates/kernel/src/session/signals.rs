//! Signals from the inputs of an action to the task that polls it, beside the function's own waker.
//!
//! A function sees kernel errors, which have less detail than a status; the peer must get the whole status.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sapwood_proto::evergreen::Status;

use crate::error::Error;

/// Shared by the inputs of one action and its future.
#[derive(Debug, Default)]
pub(super) struct InputSignals {
    parked: AtomicBool,
    /// Whether a reader has stopped although there is more, and has woken its task for it.
    yielded: AtomicBool,
    /// Number of readers that wait for external content, which neither a peer nor an action delays.
    waiting_for_others: AtomicUsize,
    failed: Mutex<Option<Arc<Status>>>,
}

impl InputSignals {
    /// A reader found no data.
    pub(super) fn park(&self) {
        self.parked.store(true, Ordering::Relaxed);
    }

    /// A reader has used up the visits of this turn.
    pub(super) fn yielded(&self) {
        self.yielded.store(true, Ordering::Relaxed);
    }

    /// Whether a reader found no data since the last call, none has more in the next turn, and none waits for external
    /// content.
    pub(super) fn take_parked(&self) -> bool {
        // Relaxed: the function reads its inputs while the task that asks polls it, so both run on one thread.
        let parked = self.parked.swap(false, Ordering::Relaxed);
        let goes_on = self.yielded.swap(false, Ordering::Relaxed);
        parked && !goes_on && self.waiting_for_others.load(Ordering::Relaxed) == 0
    }

    /// A reader starts or stops waiting for external content.
    pub(super) fn waits_for_others(&self, waits: bool) {
        if waits {
            self.waiting_for_others.fetch_add(1, Ordering::Relaxed);
        } else {
            self.waiting_for_others.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Records the status of a failed read.
    pub(super) fn fail(&self, status: &Arc<Status>) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(status));
    }

    /// The status of the failed read that `error` comes from, if it comes from one.
    pub(super) fn behind(&self, error: &Error) -> Option<Arc<Status>> {
        // A function may handle the failed read and fail for a reason of its own, so code and reason must agree.
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed
            .clone()
            .filter(|status| status.code == error.code() && status.reason == error.reason())
    }
}
