//! Counts requests that end before their work does, by reason (OA-801): the client disconnects, a timeout, the drain,
//! or a DELETE.
//!
//! A client that takes nothing for too long is counted by its connection.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use futures::{Stream, StreamExt};
use sapwood_proto::generate::ResponsePayload;

use super::call::CallResponses;
use super::request_error::RequestError;
use crate::http::request_trace::RequestTrace;
use crate::ops::metrics::ServerMetrics;

/// Why work ends early rather than wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EarlyEnd {
    Client,
    Timeout,
    Drain,
    Delete,
    Revoked,
}

impl EarlyEnd {
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
pub(super) struct RequestEnd {
    decided: Arc<AtomicBool>,
    metrics: Arc<ServerMetrics>,
}

impl RequestEnd {
    pub(super) fn new(metrics: &Arc<ServerMetrics>) -> Self {
        Self {
            decided: Arc::default(),
            metrics: Arc::clone(metrics),
        }
    }

    /// It has ended, well or wrongly, or early.
    pub(super) fn decide(&self, early: Option<EarlyEnd>) {
        let known = self.decided.swap(true, Ordering::Relaxed);
        if let Some(why) = early.filter(|_| !known) {
            let cancelled = &self.metrics.cancelled;
            cancelled.with_label_values(&[why.name()]).inc();
        }
    }
}

/// The responses of a request; who drops them before their end has left.
pub(super) struct WatchedResponses {
    responses: CallResponses,
    ending: RequestEnd,
    /// The connection has let its answer go, and counted that.
    let_go: Option<Arc<AtomicBool>>,
}

impl WatchedResponses {
    pub(super) fn new(responses: CallResponses, ending: RequestEnd) -> Self {
        Self {
            responses,
            ending,
            let_go: RequestTrace::present().map(|request_trace| request_trace.let_go()),
        }
    }
}

impl Stream for WatchedResponses {
    type Item = Result<ResponsePayload, RequestError>;

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

impl Drop for WatchedResponses {
    fn drop(&mut self) {
        let let_go = self.let_go.as_ref();
        let stalled = let_go.is_some_and(|it| it.load(Ordering::Relaxed));
        // A response stream that has ended has decided already, and this changes nothing. One that has not was dropped with
        // its body: the client has gone, unless the connection cut it off, which has counted that itself.
        self.ending.decide((!stalled).then_some(EarlyEnd::Client));
    }
}
