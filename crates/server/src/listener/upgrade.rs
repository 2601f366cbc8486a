//! Continues a connection after a 101 response: the face leaves a future that the connection's task runs (EV-705).
//!
//! The task stays the same, so the connection keeps its slot and its count, and a drain still ends it.

use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, FutureExt};

/// Stands in the extensions of every request of a connection; clones share it.
#[derive(Clone, Default)]
pub(crate) struct UpgradeSlot(Arc<Mutex<Option<BoxFuture<'static, ()>>>>);

impl UpgradeSlot {
    /// Leaves the future that the connection's task runs once HTTP has released the socket.
    pub(crate) fn leave(&self, rest: impl Future<Output = ()> + Send + 'static) {
        // Replaces an earlier one, whose 101 was not sent: HTTP would have ended with it.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(rest.boxed());
    }

    /// Takes the future, for the connection's task.
    pub(crate) fn take(&self) -> Option<BoxFuture<'static, ()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
