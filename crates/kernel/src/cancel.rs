//! Cancellation: a token that asks a call to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

/// A request to stop, shared between the side that cancels and the calls that are cancelled. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<Signal>);

#[derive(Debug, Default)]
struct Signal {
    /// Set before `token`. A run asks for each chunk whether it is cancelled, and the token takes a lock for the answer.
    fired: AtomicBool,
    /// Wakes the waiters of this token and of its children.
    token: CancellationToken,
    parent: Option<Cancel>,
}

impl Cancel {
    /// A token that has not fired.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A child token: fires with this one, and may fire alone.
    #[must_use]
    pub fn child(&self) -> Self {
        Self(Arc::new(Signal {
            fired: AtomicBool::new(false),
            token: self.0.token.child_token(),
            parent: Some(self.clone()),
        }))
    }

    /// Requests cancellation. Further calls have no effect.
    pub fn cancel(&self) {
        // Before the waiters are woken: they look at the flag.
        self.0.fired.store(true, Ordering::Release);
        self.0.token.cancel();
    }

    /// Whether cancellation was requested. Takes no lock.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        let parent = self.0.parent.as_ref();
        // As deep as calls are nested, which `call_depth` bounds.
        self.0.fired.load(Ordering::Acquire) || parent.is_some_and(Self::is_cancelled)
    }

    /// Whether both are the same token.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Resolves when cancellation is requested.
    #[must_use]
    pub fn cancelled(&self) -> BoxFuture<'static, ()> {
        Box::pin(self.0.token.clone().cancelled_owned())
    }
}
