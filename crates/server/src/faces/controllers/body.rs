//! Reads the bodies of this face, within their limits.

use axum::body::{Body, Bytes};
use http::request::Parts;
use http::{StatusCode, header};
use http_body_util::{BodyExt, Limited};
use sapwood_proto::bounded_json::{self, JsonBounds, JsonUnread};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use serde_json::{Map, Value};

use super::refusals;
use crate::http::rejection::Rejection;

/// Reads the whole body, if it has at most `max` bytes; `what` begins the message of the error.
pub(super) async fn whole(
    parts: &Parts,
    body: Body,
    max: usize,
    what: &str,
) -> Result<Bytes, Rejection> {
    let coding = parts.headers.get(header::CONTENT_ENCODING);
    if coding.is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        let message = "This route takes bodies as they are: send no Content-Encoding.";
        let reason = ErrorReason::custom("unsupported_media_type");
        return Err(Rejection::new(Code::InvalidRequest, reason, message)
            .with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
    }
    let too_large = || {
        let message = format!("{what} may have at most {max} bytes");
        let reason = ErrorReason::custom("request_too_large");
        Rejection::new(Code::LimitExceeded, reason, message)
    };
    // By the header before a byte is read: the client sees the answer instead of sending for nothing.
    let length = parts.headers.get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > max as u64) {
        return Err(too_large());
    }
    // A body that ends early or finds no room is answered by the middleware, whatever this returns.
    let read = Limited::new(body, max).collect().await;
    read.map(http_body_util::Collected::to_bytes)
        .map_err(|_| too_large())
}

/// Reads a JSON object.
pub(super) fn object(bytes: &[u8]) -> Result<Map<String, Value>, Rejection> {
    let invalid = |message: String| {
        let reason = ErrorReason::custom("invalid_json");
        Rejection::new(Code::InvalidRequest, reason, message)
    };
    let bounds = JsonBounds {
        values: VALUES_MAX,
        entries: MEMBERS_MAX,
    };
    match bounded_json::read(bytes, bounds) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(_) => Err(invalid("The body must be a JSON object.".into())),
        Err(JsonUnread::Syntax(error)) => Err(invalid(format!("The body is not JSON: {error}"))),
        Err(unread) => Err(refusals::invalid(format!("The body has {unread}."))),
    }
}

/// Members of a body; the routes know fewer than 20.
const MEMBERS_MAX: usize = 256;
/// JSON values of a body: an argument is the only one that may have many (D-47).
const VALUES_MAX: usize = 262_144;
