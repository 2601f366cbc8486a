//! Encodes items and notices as JSON.
//!
//! The output is compact JSON without raw control characters.

use std::fmt::Write as _;

use bytes::{BufMut as _, BytesMut};
use serde::Serialize;

use super::{LmtpError, LmtpModelInfo, StreamFinish, StreamId, TokenItem};
use crate::steer::Token;

/// Writes an item with a token; `top` is the number of most likely tokens shown, and `None` omits that member (SCORE).
/// `more` writes members of version 2, each with a comma before it.
pub(super) fn item(
    out: &mut BytesMut,
    id: &StreamId,
    item: &TokenItem,
    top: Option<u32>,
    more: impl FnOnce(&mut BytesMut),
) {
    // By hand and not by a serializer: the id is echoed as raw bytes (LM-206), members keep the order of the seed
    // (LM-208), and this runs for every token (LM-1301).
    out.put_slice(b"{\"token\":");
    integer(out, item.token);
    out.put_slice(b",\"stream_id\":");
    out.put_slice(id.as_json().as_bytes());
    out.put_slice(b",\"logprob\":");
    logprob(out, item.logprob);
    out.put_slice(b",\"finish_reason\":");
    match &item.finish {
        Some(finish) => json(out, finish.name()),
        None => out.put_slice(b"null"),
    }
    if let Some(top) = top {
        out.put_slice(b",\"top_logprobs\":{");
        top_logprob(out, item.token, item.logprob);
        // A forced token was not chosen among others (LM-972).
        let top = if item.forced { 0 } else { top };
        let shown = usize::try_from(top).unwrap_or(usize::MAX);
        // Cut before the sampled token is left out: k entries if it is among the k most likely ones, else k + 1
        // (LM-413).
        let others = item.top.iter().take(shown);
        for &(token, value) in others.filter(|(token, _)| *token != item.token) {
            out.put_u8(b',');
            top_logprob(out, token, value);
        }
        out.put_u8(b'}');
    }
    more(out);
    out.put_u8(b'}');
}

/// Writes an end item without a token (LM-961).
pub(super) fn end(
    out: &mut BytesMut,
    id: &StreamId,
    finish: &StreamFinish,
    more: impl FnOnce(&mut BytesMut),
) {
    answer(out, id, |out| {
        member(out, "finish_reason", finish.name());
        more(out);
    });
}

/// Opens the object of an item or notice; it belongs to no stream or request if there is no id.
pub(super) fn open(out: &mut BytesMut, id: Option<&StreamId>) {
    out.put_slice(b"{\"stream_id\":");
    out.put_slice(id.map_or("null", StreamId::as_json).as_bytes());
}

/// Writes a member, with the comma before it.
pub(super) fn member<T: Serialize + ?Sized>(out: &mut BytesMut, name: &str, value: &T) {
    out.put_u8(b',');
    json(out, name);
    out.put_u8(b':');
    json(out, value);
}

/// Writes a list of log-probabilities as a member, with the comma before it.
pub(super) fn logprobs(out: &mut BytesMut, name: &str, values: &[Option<f32>]) {
    out.put_u8(b',');
    json(out, name);
    out.put_slice(b":[");
    for (at, value) in values.iter().enumerate() {
        if at > 0 {
            out.put_u8(b',');
        }
        match value {
            Some(value) => logprob(out, *value),
            None => out.put_slice(b"null"),
        }
    }
    out.put_u8(b']');
}

/// Writes an item that ends its stream with an error (LM-502).
pub(super) fn failure(
    out: &mut BytesMut,
    id: &StreamId,
    cause: &LmtpError,
    max_bytes: usize,
    more: impl FnOnce(&mut BytesMut),
) {
    error(out, Some(id), cause, max_bytes);
    out.put_slice(b",\"retryable\":");
    json(out, &cause.reason.is_retryable());
    if let Some(after) = cause.retry_after {
        out.put_slice(b",\"retry_after_ms\":");
        integer(out, u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
    }
    more(out);
    out.put_u8(b'}');
}

/// Writes the answer to a request of version 2; `body` writes its members, each with a comma before it.
pub(super) fn answer(out: &mut BytesMut, id: &StreamId, body: impl FnOnce(&mut BytesMut)) {
    open(out, Some(id));
    body(out);
    out.put_u8(b'}');
}

/// Writes the MSG of an error that belongs to no stream or request.
pub(super) fn notice(
    out: &mut BytesMut,
    id: Option<&StreamId>,
    cause: &LmtpError,
    max_bytes: usize,
) {
    error(out, id, cause, max_bytes);
    out.put_u8(b'}');
}

/// Writes the answer to MODEL_INFO (LM-331); `name` is the model's name as requested.
pub(super) fn model_info(
    out: &mut BytesMut,
    id: &StreamId,
    name: &str,
    model: &LmtpModelInfo,
    more: impl FnOnce(&mut BytesMut),
) {
    #[derive(Serialize)]
    struct Info<'a> {
        model: &'a str,
        #[serde(flatten)]
        facts: &'a LmtpModelInfo,
    }
    let facts = model;
    answer(out, id, |out| {
        member(out, "model_info", &Info { model: name, facts });
        more(out);
    });
}

/// Writes any value that JSON can represent; floats are the shortest that read back as the same f32.
pub(super) fn json<T: Serialize + ?Sized>(out: &mut BytesMut, value: &T) {
    // This cannot fail: numbers, strings and lists of them are representable, and the writer is memory.
    let written = serde_json::to_writer(out.writer(), value);
    debug_assert!(written.is_ok());
}

/// Writes a log-probability: finite and not above 0 (LM-411, LM-412). Not for NaN.
pub(super) fn logprob(out: &mut BytesMut, value: f32) {
    if value <= f32::MIN {
        out.put_slice(MINUS_INFINITY);
    } else {
        // The comparison also removes the sign of -0.0.
        json(out, if value < 0.0 { &value } else { &0.0 });
    }
}

fn top_logprob(out: &mut BytesMut, token: Token, value: f32) {
    out.put_u8(b'"');
    integer(out, token);
    out.put_slice(b"\":");
    logprob(out, value);
}

fn error(out: &mut BytesMut, id: Option<&StreamId>, cause: &LmtpError, max_bytes: usize) {
    open(out, id);
    member(out, "error", cut(&cause.message, max_bytes));
    out.put_slice(b",\"code\":\"");
    // Names of reasons need no escapes.
    out.put_slice(cause.reason.name().as_bytes());
    out.put_u8(b'"');
}

/// Returns as much of a text as fits, in whole characters.
pub(super) fn cut(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

fn integer(out: &mut BytesMut, number: impl Into<u64>) {
    // Writing to memory does not fail.
    let _ = write!(out, "{}", number.into());
}

/// The lowest f32, written as in LM-412.
const MINUS_INFINITY: &[u8] = b"-3.4028235e38";
