//! The access log: one line per request, written when its answer has been sent or dropped (OA-804).
//!
//! Owns: the line, and the body around the answer that knows when it ends. Refuses to know: what is in the body, and
//! who fills the trail; neither payloads nor keys nor query strings are logged.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::time::Instant;

use crate::activity::InFlight;
use crate::metrics::Face;
use crate::request_id::RequestId;
use crate::trail::Trail;

/// What the line says; written on drop, so that a client that goes away is logged too.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: RequestId,
    pub(crate) key: Arc<str>,
    /// The face that answered; none did if the gate refused.
    pub(crate) face: Option<Face>,
    /// What models did for it.
    pub(crate) trail: Trail,
    pub(crate) method: http::Method,
    pub(crate) path: String,
    pub(crate) status: u16,
    pub(crate) grpc: Option<i32>,
    pub(crate) began: Instant,
    pub(crate) ended: bool,
    /// Keeps the connection from counting as idle until the answer is out.
    pub(crate) _in_flight: Option<InFlight>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let sums = self.trail.sums();
        let models: Vec<_> = sums.models.iter().map(|model| model.as_str()).collect();
        tracing::info!(
            target: "sapwood::access",
            request = self.id.as_str(),
            key = &*self.key,
            face = self.face.map_or("-", Face::name),
            method = %self.method,
            route = self.path,
            model = (!models.is_empty()).then(|| models.join(",")),
            status = self.status,
            grpc = self.grpc,
            prompt_tokens = sums.usage.map(|usage| usage.prompt_tokens),
            cached_tokens = sums.usage.map(|usage| usage.cached_tokens),
            completion_tokens = sums.usage.map(|usage| usage.completion_tokens),
            ttft_ms = sums.first_output.map(milliseconds),
            ms = milliseconds(self.began.elapsed()),
            end = if self.ended { "sent" } else { "dropped" },
            "request"
        );
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Reads a gRPC status out of headers or trailers.
pub(crate) fn grpc_status(headers: &http::HeaderMap) -> Option<i32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// An answer's body that writes its line when it is over.
pub(crate) struct Logged {
    body: Body,
    entry: Entry,
}

impl Logged {
    pub(crate) fn new(body: Body, mut entry: Entry) -> Self {
        entry.ended = body.is_end_stream();
        Self { body, entry }
    }
}

impl hyper::body::Body for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, entry } = &mut *self;
        // A face that makes its answer while it is read does so here.
        let polled = entry.trail.within(|| Pin::new(body).poll_frame(cx));
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            let trailers = frame.trailers_ref();
            self.entry.grpc = trailers.and_then(grpc_status).or(self.entry.grpc);
            self.entry.ended = trailers.is_some() || self.body.is_end_stream();
        }
        if let Poll::Ready(None) = &polled {
            self.entry.ended = true;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
