//! Responses as server-sent events (section 6), and what a request may ask of them beside that (TR-1301, TR-1303, TR-1304).
//!
//! Owns: what decides the status, pings, packed streams. Refuses to know: what is computed, the events and their order
//! (`sending`), and how a stream is held.
//!
//! ```text
//!   responses ─► sending ─► held, if wished for ─► pings in silence, if wished for ─► packed, if wished for ─► the answer's body
//! ```

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use http::{HeaderName, HeaderValue, Response, header};
use tokio::time::timeout;

use super::call::Responses;
use super::compression::{Packer, Packing};
use super::failure::{EVENTS, Failure};
use super::held::Place;
use super::line::Reader;
use super::sending::{Sending, cut};
use super::stats::Counting;
use super::told::Told;
use super::wishes::Wishes;

/// What a stream says that has nothing to say (TR-1304).
const PING: Bytes = Bytes::from_static(b": ping\n\n");

/// The name of a stream that can be come back to (TR-1303).
const STREAM: HeaderName = HeaderName::from_static("sapwood-stream-id");

/// The events of a request, as they go to its client.
pub(super) type Events = BoxStream<'static, io::Result<Bytes>>;

/// TR-602 to TR-604: the first thing that comes decides the status. With a `place` the stream can be come back to, once
/// there is one.
///
/// # Errors
/// What was refused before a model began.
pub(super) async fn answer(
    mut responses: Responses,
    told: Told,
    mut counting: Counting,
    wishes: Wishes,
    place: Option<Place<'_>>,
) -> Result<Response<Body>, Failure> {
    let first = match wishes.ping {
        None => Some(responses.next().await),
        Some(silence) => timeout(silence, responses.next()).await.ok(),
    };
    let begun = first.is_some();
    let first = match first.flatten() {
        Some(Err(failure)) if failure.early => return Err(failure),
        Some(Err(failure)) if !failure.cut => return Ok(failure.stream()),
        Some(Err(failure)) => return Ok(stream_of(stream::iter([Err(cut(&failure))]))),
        None if begun => {
            counting.succeeded();
            let mut end = Vec::new();
            told.end(&mut end);
            return Ok(stream_of(stream::iter([Ok(end.into())])));
        }
        Some(Ok(response)) => Some(Ok(response)),
        None => None,
    };
    let ending = counting.ending();
    let sending = Sending::new(responses, told, counting, first);
    let Some(place) = place else {
        return Ok(dressed(sending, wishes, !begun));
    };
    let name = place.name().to_owned();
    Ok(read_on(
        place.keep(sending.singly().boxed(), ending),
        &name,
        wishes,
        !begun,
    ))
}

/// What a reader reads of the stream with this name. `silent`: nothing has been said for long.
pub(super) fn read_on(reader: Reader, name: &str, wishes: Wishes, silent: bool) -> Response<Body> {
    let mut answer = dressed(reader.events(), wishes, silent);
    // Letters and digits, which a header takes.
    if let Ok(name) = HeaderValue::from_str(name) {
        answer.headers_mut().insert(STREAM, name);
    }
    answer
}

/// Events as a request wishes them to be sent.
fn dressed(
    events: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    wishes: Wishes,
    silent: bool,
) -> Response<Body> {
    if wishes.ping.is_none() && wishes.packing.is_none() {
        return stream_of(events);
    }
    let mut events = events.boxed();
    if let Some(silence) = wishes.ping {
        events = pinging(events, silence, silent);
    }
    let Some(packing) = wishes.packing else {
        return stream_of(events);
    };
    let mut answer = stream_of(packed(events, packing));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_ENCODING, packing.name());
    answer
}

fn stream_of(events: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Response<Body> {
    let mut answer = Response::new(Body::from_stream(events));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, EVENTS);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    answer
}

/// A comment wherever nothing was said for so long; `silent`: that is so already.
fn pinging(events: Events, silence: Duration, silent: bool) -> Events {
    let pinging = stream::unfold((events, silent), move |(mut events, silent)| async move {
        if silent {
            return Some((Ok(PING), (events, false)));
        }
        // Nothing is lost where the wait ends first: the event is still to come.
        match timeout(silence, events.next()).await {
            Ok(event) => Some((event?, (events, false))),
            Err(_elapsed) => Some((Ok(PING), (events, false))),
        }
    });
    pinging.boxed()
}

/// Each event packed, with nothing left behind in the packer.
fn packed(events: Events, packing: Packing) -> Events {
    let begin = Some((events, Packer::new(packing)));
    let packed = stream::unfold(begin, |state| async move {
        let (mut events, mut packer) = state?;
        let failed = || io::Error::other("packing failed");
        match events.next().await {
            Some(Ok(event)) => {
                let event = packer.event(&event).ok_or_else(failed);
                Some((event, Some((events, packer))))
            }
            Some(Err(error)) => Some((Err(error), None)),
            None => Some((packer.end().ok_or_else(failed), None)),
        }
    });
    packed.boxed()
}
