//! Counts requests that end before their work does, by reason (OA-801): the client disconnects, a timeout, the drain,
//! or a DELETE.
//!
//! A client that does not read for too long is counted by its connection (`listener::write_stall`).

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

/// Why a request ends early rather than with a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EarlyEnd {
    Client,
    Timeout,
    Drain,
    Delete,
    Revoked,
}

impl EarlyEnd {
    /// The label of the metric.
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

/// How a request ends; the first decision counts. Clones share it.
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

    /// Decides how the request has ended: early for this reason, or with success or failure, which are counted elsewhere.
    pub(super) fn decide(&self, early: Option<EarlyEnd>) {
        // Relaxed is enough: the swap alone decides which call is first, and nothing else is read by it.
        let known = self.decided.swap(true, Ordering::Relaxed);
        if let Some(why) = early.filter(|_| !known) {
            let cancelled = &self.metrics.cancelled;
            cancelled.with_label_values(&[why.name()]).inc();
        }
    }
}

/// The responses of a request. Dropping them before their end counts as a disconnect of the client.
pub(super) struct WatchedResponses {
    responses: CallResponses,
    ending: RequestEnd,
    /// Set when the connection has dropped its answer for a write stall, and counted that.
    let_go: Option<Arc<AtomicBool>>,
}

impl WatchedResponses {
    pub(super) fn new(responses: CallResponses, ending: RequestEnd) -> Self {
        Self {
            responses,
            ending,
            // Taken now: a drop may happen outside the trace of the request.
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
