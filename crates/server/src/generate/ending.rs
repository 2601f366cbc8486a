//! Requests that end before their work does, by why (OA-801): their client goes, their time is up, a drain cuts them, or
//! somebody deletes them.
//!
//! Owns: [`Early`], and [`Watched`], responses that count such an end, once. Refuses to know: who reads them. A client that takes nothing
//! for too long is counted by its connection.

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
}

impl Early {
    /// As the metric calls it.
    const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Timeout => "timeout",
            Self::Drain => "drain",
            Self::Delete => "delete",
        }
    }
}

/// The responses of a request; who drops them before their end has left.
pub(super) struct Watched {
    responses: Responses,
    /// What became of the request is known.
    decided: Arc<AtomicBool>,
    /// The connection has let its answer go, and counted that.
    let_go: Option<Arc<AtomicBool>>,
    metrics: Arc<Metrics>,
}

impl Watched {
    pub(super) fn new(
        responses: Responses,
        decided: Arc<AtomicBool>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            responses,
            decided,
            let_go: Trail::present().map(|trail| trail.let_go()),
            metrics,
        }
    }

    fn ended(&self, why: Option<Early>) {
        let known = self.decided.swap(true, Ordering::Relaxed);
        if let Some(why) = why.filter(|_| !known) {
            self.metrics
                .cancelled
                .with_label_values(&[why.name()])
                .inc();
        }
    }
}

impl Stream for Watched {
    type Item = Result<Response, Failure>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.responses.poll_next_unpin(cx));
        match &next {
            Some(Ok(_)) => {}
            Some(Err(failure)) => self.ended(failure.ended),
            None => self.ended(None),
        }
        Poll::Ready(next)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let let_go = self.let_go.as_ref();
        let stalled = let_go.is_some_and(|it| it.load(Ordering::Relaxed));
        self.ended((!stalled).then_some(Early::Client));
    }
}
