//! Streams whose readers were dropped, queued for the connection's task to cancel.

use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

/// The list. Leaving never waits, and nothing that leaves is lost.
#[derive(Default)]
pub(super) struct AbandonedStreams {
    serials: Mutex<Vec<u64>>,
    changed: Notify,
}

impl AbandonedStreams {
    /// Nobody reads this stream any more.
    pub(super) fn push(&self, serial: u64) {
        self.list(|serials| serials.push(serial));
        self.changed.notify_one();
    }

    /// Resolves when a reader was dropped since it last did.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Who has left.
    pub(super) fn take(&self) -> Vec<u64> {
        self.list(std::mem::take)
    }

    fn list<T>(&self, change: impl FnOnce(&mut Vec<u64>) -> T) -> T {
        change(&mut self.serials.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
