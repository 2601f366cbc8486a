//! Streams whose readers were dropped, queued for the connection's task to cancel.

use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

/// The abandoned streams. Adding one never waits, and none is lost.
#[derive(Default)]
pub(super) struct AbandonedStreams {
    serials: Mutex<Vec<u64>>,
    changed: Notify,
}

impl AbandonedStreams {
    /// Adds a stream whose reader was dropped.
    pub(super) fn push(&self, serial: u64) {
        // Called by `Drop`, which can neither wait nor fail: hence a list, and not a bounded channel. It has at most
        // one entry for each stream that a caller has opened.
        self.list(|serials| serials.push(serial));
        // `notify_one` keeps one permit if the keeper does not wait at this moment, so an entry is never overlooked.
        self.changed.notify_one();
    }

    /// Resolves when a stream was added since it last resolved.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Takes the serial numbers of the abandoned streams.
    pub(super) fn take(&self) -> Vec<u64> {
        self.list(std::mem::take)
    }

    fn list<T>(&self, change: impl FnOnce(&mut Vec<u64>) -> T) -> T {
        change(&mut self.serials.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
