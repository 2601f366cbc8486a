//! Responses as server-sent events (section 6), with the options of a request for them (TR-1303, TR-1304).
//!
//! ```text
//!   responses ─► Sending ─► replay buffer, if asked for ─► pings, if asked for ─► response body
//! ```

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use http::{HeaderName, HeaderValue, Response, header};
use tokio::time::timeout;

use super::call::CallResponses;
use super::detached::StreamRegistration;
use super::event_channel::EventReader;
use super::request_error::{EVENTS, RequestError};
use super::request_options::RequestOptions;
use super::response_json::JsonResponseContext;
use super::sending::{Sending, cut};
use super::stats::RequestTimer;
use crate::faces::cut_body::flush_before_error;

/// A comment that shows that an idle stream is alive (TR-1304).
const PING: Bytes = Bytes::from_static(b": ping\n\n");

/// The header with the name of a stream that can be resumed (TR-1303).
const STREAM: HeaderName = HeaderName::from_static("sapwood-stream-id");

const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// The events of a request, as they go to its client.
pub(super) type EventStream = BoxStream<'static, io::Result<Bytes>>;

/// Answers with a stream of events. The first response or error decides the status (TR-602 to TR-604). With a
/// `registration` the stream can be resumed.
///
/// # Errors
/// Requests that were refused before a model ran.
pub(super) async fn answer(
    mut responses: CallResponses,
    reported: JsonResponseContext,
    mut request_timer: RequestTimer,
    options: RequestOptions,
    registration: Option<StreamRegistration<'_>>,
) -> Result<Response<Body>, RequestError> {
    // The head can be sent only once, so the status waits for the first response. A client that wants pings has asked
    // not to wait in silence: it gets its head after one interval, and an error then comes as an event.
    let first = match options.ping {
        None => Some(responses.next().await),
        Some(idle_timeout) => timeout(idle_timeout, responses.next()).await.ok(),
    };
    let begun = first.is_some();
    let first = match first.flatten() {
        // Plain JSON, also on this URL (TR-605).
        Some(Err(failure)) if failure.early => return Err(failure),
        Some(Err(failure)) if !failure.cut => return Ok(failure.stream()),
        Some(Err(failure)) => return Ok(stream_of(stream::iter([Err(cut(&failure))]))),
        None if begun => {
            request_timer.succeeded();
            return Ok(stream_of(stream::empty()));
        }
        Some(Ok(response)) => Some(Ok(response)),
        None => None,
    };
    // Taken before the timer moves into the stream: a DELETE of the stream decides how its request has ended.
    let ending = request_timer.ending();
    let sending = Sending::new(responses, reported, request_timer, first);
    let Some(registration) = registration else {
        return Ok(dressed(sending, options, !begun));
    };
    let name = registration.name().to_owned();
    Ok(read_on(
        // One event in each piece: the replay buffer numbers pieces, and a client continues behind an event.
        registration.keep(sending.singly().boxed(), ending),
        &name,
        options,
        !begun,
    ))
}

/// The response to a reader of the stream with this name. `silent`: an interval without events has passed.
pub(super) fn read_on(
    reader: EventReader,
    name: &str,
    options: RequestOptions,
    silent: bool,
) -> Response<Body> {
    let mut answer = dressed(reader.events(), options, silent);
    // Letters and digits, which a header takes.
    if let Ok(name) = HeaderValue::from_str(name) {
        answer.headers_mut().insert(STREAM, name);
    }
    answer
}

/// Events with the pings that a request asks for.
fn dressed(
    events: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    options: RequestOptions,
    silent: bool,
) -> Response<Body> {
    let events = flush_before_error(events);
    match options.ping {
        None => stream_of(events),
        Some(idle_timeout) => stream_of(pinging(events.boxed(), idle_timeout, silent)),
    }
}

fn stream_of(events: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Response<Body> {
    // Without the last two proxies collect the answer: caches until its end, nginx until its buffer is full.
    let headers = [
        (header::CONTENT_TYPE, EVENTS),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (NO_BUFFERING, HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(events)).into_response()
}

/// Sends a comment after each `idle_timeout` without an event; `silent`: one has passed already.
fn pinging(events: EventStream, idle_timeout: Duration, silent: bool) -> EventStream {
    let pinging = stream::unfold((events, silent), move |(mut events, silent)| async move {
        if silent {
            return Some((Ok(PING), (events, false)));
        }
        // Nothing is lost where the wait ends first: the event is still to come.
        match timeout(idle_timeout, events.next()).await {
            Ok(event) => Some((event?, (events, false))),
            Err(_elapsed) => Some((Ok(PING), (events, false))),
        }
    });
    pinging.boxed()
}
