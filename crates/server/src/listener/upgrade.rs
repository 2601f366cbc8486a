//! Hands a connection over after a 101 response: the face leaves a future that the connection's task runs (EV-705).
//!
//! The connection's own task goes on with it, so its place among the connections, its count and its end in a drain
//! stay what they were.

use std::sync::{Arc, Mutex, PoisonError};

use futures::future::{BoxFuture, FutureExt};

/// Stands in the extensions of every request of a connection; clones share it.
#[derive(Clone, Default)]
pub(crate) struct UpgradeSlot(Arc<Mutex<Option<BoxFuture<'static, ()>>>>);

impl UpgradeSlot {
    /// What the connection's task does once HTTP has let go of it.
    pub(crate) fn leave(&self, rest: impl Future<Output = ()> + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(rest.boxed());
    }

    /// What was left, for the connection's task.
    pub(crate) fn take(&self) -> Option<BoxFuture<'static, ()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
