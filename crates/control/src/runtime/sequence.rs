//! [`Sequence`]: one sequence's controller, as the main channel runs it.
//!
//! A trait, so that the bookkeeping of both dialects is tested without Wasm, and so that controllers of the other
//! generation and native constraints can stand behind the same calls.

use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;

pub(crate) use crate::host::{
    CallFailure, Callback, Capabilities, MidReturned, Outcome, Returned, ReturnedBranch,
    ReturnedSplice, Waiting,
};

/// A controller of one sequence. Its callbacks run elsewhere, one at a time.
pub(crate) trait Sequence: Send + Sized + 'static {
    /// Sets the id of the sequence.
    fn bind(&mut self, id: u32);

    /// Starts a callback, while none is outstanding.
    fn call(&mut self, callback: Callback);

    /// Starts callbacks that follow each other whatever they return; after one that fails no other runs. Handing over
    /// several at once costs hardly more than one.
    fn call_all<const N: usize>(&mut self, callbacks: [Callback; N]) {
        for callback in callbacks {
            self.call(callback);
        }
    }

    /// Returns the next outcome of the outstanding callbacks, once. The waker is called when they have ended.
    fn poll(&mut self) -> Option<Outcome>;

    /// Creates a sequence in the same state. Only between callbacks.
    fn fork(&mut self) -> Result<Self, CallFailure>;

    /// Whether `Pre` does the work of `Mid`, and so has its time limit.
    fn needs_mid_time(&self) -> bool {
        false
    }
}

/// Waits for outcomes. The clock is in the same hands, so that tests decide what is late.
pub(crate) trait Pace {
    /// Returns the time.
    fn now(&self) -> Instant;

    /// A step begins: callbacks are started, and waited for.
    fn begin(&self) {}

    /// The step has been answered.
    fn end(&self) {}

    /// Waits until a sequence may have an outcome, but not longer than `until`.
    fn wait(&self, until: Instant);
}

impl Sequence for crate::host::Instance {
    fn bind(&mut self, id: u32) {
        self.bind(id);
    }

    fn call(&mut self, callback: Callback) {
        self.call(callback);
    }

    fn call_all<const N: usize>(&mut self, callbacks: [Callback; N]) {
        self.call_all(callbacks);
    }

    fn poll(&mut self) -> Option<Outcome> {
        self.poll()
    }

    fn fork(&mut self) -> Result<Self, CallFailure> {
        self.fork()
    }
}

impl CallFailure {
    /// A callback returned what another one returns, which only a mistake in the host can cause.
    pub(crate) fn unexpected() -> Self {
        Self::new(ErrorReason::BAD_RESULT, "the result is of another callback")
    }
}
