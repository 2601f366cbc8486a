//! The phase of a request before its first token, for observers.
//!
//! A phase is no event of the request's stream: it counts for nothing, a reader that ignores it misses only progress,
//! and a later one takes the place of one that nobody looked at, so there is never more than one.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

/// Where a request is (LM-921).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPhase {
    /// It waits for a place in the batch.
    Waits {
        /// So many requests go before it, as things stand.
        ahead: u32,
        /// How long that may take at the pace of those that went before, if there were any.
        eta: Option<Duration>,
    },
    /// Its prompt is being computed.
    Prefill {
        /// Tokens of the prompt that are done.
        computed: u32,
        /// Tokens of the prompt.
        prompt: u32,
    },
    /// It has given tokens, and had to leave its place to others. It goes on by itself.
    Displaced {
        /// When that may be.
        eta: Duration,
    },
}

/// Follows one request. Put a clone into [`crate::api::GenerationRequest::follower`]; the reader of the request's events is woken
/// when there is an update, about every 100 ms as long as there is any.
#[derive(Clone, Debug)]
pub struct Follower(Arc<ArrayQueue<RequestPhase>>);

impl Follower {
    /// One that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(ArrayQueue::new(1)))
    }

    /// The latest phase since the last call.
    #[must_use]
    pub fn latest(&self) -> Option<RequestPhase> {
        self.0.pop()
    }

    pub(crate) fn publish(&self, phase: RequestPhase) {
        // What it takes the place of is old.
        let _ = self.0.force_push(phase);
    }
}

impl Default for Follower {
    fn default() -> Self {
        Self::new()
    }
}

/// Clones are the same follower.
impl PartialEq for Follower {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
