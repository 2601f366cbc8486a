//! Requests that end before their work does, by why (OA-801): their client goes, their time is up, a drain cuts them, or
//! somebody deletes them.
//!
//! Owns: [`Early`], [`Ending`], and [`Watched`], responses that count such an end, once. Refuses to know: who reads them. A
//! client that takes nothing for too long is counted by its connection.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use futures::{Stream, StreamExt};
use sapwood_proto::generate::Response;

use super::call::Responses;
use super::failure::Failure;
use crate::metrics::Metrics;
use crate::trail::Trail;

/// Why work ends early rather than wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Early {
    Client,
    Timeout,
    Drain,
    Delete,
    Revoked,
}

impl Early {
    /// As the metric calls it.
    const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Timeout => "timeout",
            Self::Drain => "drain",
            Self::Delete => "delete",
            Self::Revoked => "revoked",
        }
    }
}

/// What becomes of a request: the first that is said of it counts. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Ending {
    decided: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
}

impl Ending {
    pub(super) fn new(metrics: &Arc<Metrics>) -> Self {
        Self {
            decided: Arc::default(),
            metrics: Arc::clone(metrics),
        }
    }

    /// It has ended, well or wrongly, or early.
    pub(super) fn decide(&self, early: Option<Early>) {
        let known = self.decided.swap(true, Ordering::Relaxed);
        if let Some(why) = early.filter(|_| !known) {
            let cancelled = &self.metrics.cancelled;
            cancelled.with_label_values(&[why.name()]).inc();
        }
    }
}

/// The responses of a request; who drops them before their end has left.
pub(super) struct Watched {
    responses: Responses,
    ending: Ending,
    /// The connection has let its answer go, and counted that.
    let_go: Option<Arc<AtomicBool>>,
}

impl Watched {
    pub(super) fn new(responses: Responses, ending: Ending) -> Self {
        Self {
            responses,
            ending,
            let_go: Trail::present().map(|trail| trail.let_go()),
        }
    }
}

impl Stream for Watched {
    type Item = Result<Response, Failure>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.responses.poll_next_unpin(cx));
        match &next {
            Some(Ok(_)) => {}
            Some(Err(failure)) => self.ending.decide(failure.ended),
            None => self.ending.decide(None),
        }
        Poll::Ready(next)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let let_go = self.let_go.as_ref();
        let stalled = let_go.is_some_and(|it| it.load(Ordering::Relaxed));
        self.ending.decide((!stalled).then_some(Early::Client));
    }
}
