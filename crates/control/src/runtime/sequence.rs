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

    /// Starts a callback. At most one is outstanding.
    fn call(&mut self, callback: Callback);

    /// Returns the outcome of the outstanding callback, once. The waker is called when there is one.
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
