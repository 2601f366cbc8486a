//! The routes below `/v2/streams`, with which a client reconnects to a stream (TR-1303).

use axum::body::Body;
use axum::response::IntoResponse;
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode, header};
use sapwood_proto::code::Code;

use super::catalog::ModelCatalog;
use super::detached::StreamRegistration;
use super::events::read_on;
use super::request_error::{EVENTS, RequestError};
use super::request_options::RequestOptions;
use crate::auth::caller::Caller;

/// The number of the last event that the client has.
const LAST: &str = "last-event-id";

/// Registers the stream of a request, if the request asks for that and there is room. Without room the stream is sent
/// all the same, and cannot be resumed: its client sees that no name came.
pub(super) fn register<'a>(
    catalog: &'a ModelCatalog,
    parts: &Parts,
    options: RequestOptions,
) -> Option<StreamRegistration<'a>> {
    let caller = Caller::of(&parts.extensions).ok()?;
    let slot = || catalog.streams.registration(&caller.identity);
    options.resume.then(slot).flatten()
}

/// Answers one request about the stream of this name.
pub(super) fn answer(
    name: &str,
    catalog: &ModelCatalog,
    parts: &Parts,
) -> Result<Response<Body>, RequestError> {
    let caller_identity = Caller::of(&parts.extensions)?.identity.clone();
    let streams = &catalog.streams;
    let nothing = StatusCode::NO_CONTENT.into_response();
    if parts.method == Method::DELETE {
        streams.cancel(name, &caller_identity)?;
        return Ok(nothing);
    }
    let options = RequestOptions::of(&parts.headers)?;
    let after = last(&parts.headers)?;
    if parts.method == Method::HEAD {
        // This check does not cut off the present reader, so a client may ask before it reconnects.
        let there = streams.look(name, &caller_identity, after)?;
        let head = || [(header::CONTENT_TYPE, EVENTS)].into_response();
        return Ok(if there { head() } else { nothing });
    }
    let reader = streams.read(name, &caller_identity, after)?;
    let answer = reader.map(|reader| read_on(reader, name, options, false));
    // 204 tells a browser's `EventSource` not to reconnect.
    Ok(answer.unwrap_or(nothing))
}

/// The event after which to continue; 0 where none is named, which is the start.
fn last(headers: &HeaderMap) -> Result<u64, RequestError> {
    let Some(last) = headers.get(LAST) else {
        return Ok(0);
    };
    let digits = last.to_str().ok().map(str::trim);
    let digits = digits.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    match digits {
        // A client that has no event yet may send it empty.
        Some("") => Ok(0),
        Some(digits) => digits.parse().map_err(|_| wrong()),
        None => Err(wrong()),
    }
}

fn wrong() -> RequestError {
    let message = format!("header '{LAST}' must be the number of an event");
    RequestError::new(Code::InvalidRequest, message)
}
