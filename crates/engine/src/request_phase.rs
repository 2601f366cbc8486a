//! Progress of a request before its first token, for observers.
//!
//! A phase is not an event of the request's stream: it is not counted, and a reader may ignore it. A newer phase
//! replaces an unread one, so there is never more than one.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

/// The phase of a request (LM-921).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPhase {
    /// It is queued.
    Waits {
        /// Requests that are before it in the queue now.
        ahead: u32,
        /// Estimated wait at the pace of earlier admissions, if there were any.
        eta: Option<Duration>,
    },
    /// Its prompt is being computed.
    Prefill {
        /// Tokens of the prompt that are computed.
        computed: u32,
        /// Tokens of the prompt.
        prompt: u32,
    },
    /// It has produced tokens and was preempted. It resumes by itself.
    Displaced {
        /// Estimated wait until it resumes.
        eta: Duration,
    },
}

/// Observes one request. Put a clone into [`crate::api::GenerationRequest::follower`]; the reader of the request's
/// events is woken at each update, about every 100 ms while there are any.
#[derive(Clone, Debug)]
pub struct Follower(Arc<ArrayQueue<RequestPhase>>);

impl Follower {
    /// Creates a follower without a phase.
    #[must_use]
    pub fn new() -> Self {
        // One place: a slow observer sees the newest phase, and nothing piles up.
        Self(Arc::new(ArrayQueue::new(1)))
    }

    /// Returns the latest phase since the last call.
    #[must_use]
    pub fn latest(&self) -> Option<RequestPhase> {
        self.0.pop()
    }

    pub(crate) fn publish(&self, phase: RequestPhase) {
        // The replaced phase is outdated.
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
