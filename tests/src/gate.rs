//! Holds up the calls of a model, as while the model is being loaded.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{StreamExt, stream};
use sapwood_kernel::{Call, Kernel, Next};
use tokio::sync::Semaphore;

/// The gate before a model; each call waits until it is let through.
pub struct CallGate {
    begun: Arc<AtomicUsize>,
    open: Arc<Semaphore>,
}

impl CallGate {
    /// A closed gate before the function of this name.
    #[must_use]
    pub fn before(kernel: &Kernel, name: &str) -> Self {
        let gate = Self {
            begun: Arc::default(),
            open: Arc::new(Semaphore::new(0)),
        };
        let (begun, open) = (Arc::clone(&gate.begun), Arc::clone(&gate.open));
        kernel.layer_on(name, move |call: Call, next: Next| {
            begun.fetch_add(1, Ordering::Relaxed);
            let open = Arc::clone(&open);
            let entered = async move {
                open.acquire().await.unwrap().forget();
                next.call(call)
            };
            stream::once(entered).flatten().boxed()
        });
        gate
    }

    /// Calls that have come to it.
    #[must_use]
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }

    /// Lets so many calls through.
    pub fn open(&self, calls: usize) {
        self.open.add_permits(calls);
    }
}
