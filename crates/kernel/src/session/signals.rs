//! Signals from the inputs of an action to the task that polls it, beside the function's own waker.
//!
//! A function sees errors of the kernel, which carry less than a status; the peer is owed the whole of it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sapwood_proto::evergreen::Status;

use crate::error::Error;

/// Shared by the inputs of one action and its future.
#[derive(Debug, Default)]
pub(super) struct InputSignals {
    parked: AtomicBool,
    /// Readers that wait for content elsewhere, which no peer and no action holds up.
    waiting_for_others: AtomicUsize,
    failed: Mutex<Option<Arc<Status>>>,
}

impl InputSignals {
    /// A reader found nothing.
    pub(super) fn park(&self) {
        self.parked.store(true, Ordering::Relaxed);
    }

    /// Whether a reader found nothing since this was asked last, and nobody waits for content elsewhere.
    pub(super) fn take_parked(&self) -> bool {
        let parked = self.parked.swap(false, Ordering::Relaxed);
        parked && self.waiting_for_others.load(Ordering::Relaxed) == 0
    }

    /// A reader waits for content elsewhere, or waits no more.
    pub(super) fn waits_for_others(&self, waits: bool) {
        if waits {
            self.waiting_for_others.fetch_add(1, Ordering::Relaxed);
        } else {
            self.waiting_for_others.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A read failed.
    pub(super) fn fail(&self, status: &Arc<Status>) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(status));
    }

    /// The status of the read that `error` comes from, if it comes from one.
    pub(super) fn behind(&self, error: &Error) -> Option<Arc<Status>> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed
            .clone()
            .filter(|status| status.code == error.code() && status.reason == error.reason())
    }
}
