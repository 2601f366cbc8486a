//! The content of a file, as it is received.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_RANGE, ETAG, HeaderName, LAST_MODIFIED};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::time::{Instant, timeout_at};

use super::error::HubError;
use super::exchange::HubAnswer;
use super::listing::sha256;
use crate::http1::ResponseBody;

/// The content of a file from [`offset`](Self::offset) on.
pub struct FileContent {
    /// Where it begins: 0, if the server sends the whole file.
    pub offset: u64,
    /// Bytes of the whole file, if the server says so.
    pub bytes: Option<u64>,
    /// The SHA-256 of the whole file in hexadecimal digits, if the hub says so.
    pub sha256: Option<String>,
    /// What tells this version of the file from another one: a strong `etag`, or `last-modified`.
    pub validator: Option<String>,
    body: ResponseBody,
    stall: Duration,
    /// When the current interval of the stall timeout began, and the bytes that were received in it.
    interval: (Instant, usize),
}

impl FileContent {
    pub(super) fn new(answer: HubAnswer, from: u64, stall: Duration) -> Result<Self, HubError> {
        let headers = answer.response.headers();
        let body_bytes = answer.response.body().size_hint().exact();
        let (offset, bytes) = match answer.response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range = text(headers, &CONTENT_RANGE).and_then(range);
                let (first, last, total) = range.ok_or(WRONG_RANGE)?;
                // A piece of the rest would do for a client that asks again; no server of files sends one.
                if first != from || last.checked_add(1) != Some(total) {
                    return Err(WRONG_RANGE);
                }
                (first, Some(total))
            }
            _ => (0, body_bytes),
        };
        let linked = answer.linked_size.as_ref().and_then(number);
        // A content network that sends something else than the hub announces.
        if let (Some(linked), Some(bytes)) = (linked, bytes)
            && linked != bytes
        {
            return Err(HubError::Protocol(
                "the file has another size than the hub announces",
            ));
        }
        let etag = text(headers, &ETAG).filter(|etag| etag.starts_with('"'));
        let validator = etag.or_else(|| text(headers, &LAST_MODIFIED));
        let linked_etag = answer.linked_etag.as_ref();
        let linked_etag = linked_etag.and_then(|etag| etag.to_str().ok());
        Ok(Self {
            offset,
            bytes: bytes.or(linked),
            sha256: linked_etag.and_then(|etag| sha256(etag.trim_matches('"'))),
            validator: validator.map(str::to_owned),
            body: answer.response.into_body(),
            stall,
            interval: (Instant::now(), 0),
        })
    }

    /// The next bytes; `None` at the end of the body, which says nothing about whether the file is complete.
    ///
    /// # Errors
    /// [`HubError::Cut`]; [`HubError::Stalled`], also if less than 16 KiB are received within the timeout.
    pub async fn next(&mut self) -> Result<Option<Bytes>, HubError> {
        // The time that the caller has spent with the bytes before is not the server's.
        if self.interval.0.elapsed() >= self.stall {
            self.interval = (Instant::now(), 0);
        }
        loop {
            let frame = timeout_at(self.interval.0 + self.stall, self.body.frame()).await;
            match frame.map_err(|_| HubError::Stalled)? {
                None => return Ok(None),
                Some(Err(error)) => {
                    tracing::debug!(%error, "a transfer was cut off");
                    return Err(HubError::Cut);
                }
                // Trailers have no data.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => {
                        self.interval.1 += data.len();
                        if self.interval.1 >= INTERVAL_BYTES_MIN {
                            self.interval = (Instant::now(), 0);
                        }
                        return Ok(Some(data));
                    }
                    _ => {}
                },
            }
        }
    }
}

impl fmt::Debug for FileContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileContent")
            .field("offset", &self.offset)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn number(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.trim().parse().ok()
}

/// First byte, last byte and size of `bytes FIRST-LAST/SIZE`.
fn range(value: &str) -> Option<(u64, u64, u64)> {
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((
        first.trim().parse().ok()?,
        last.trim().parse().ok()?,
        total.trim().parse().ok()?,
    ))
}

const WRONG_RANGE: HubError =
    HubError::Protocol("the server sends another part of the file than was requested");
/// A server that sends less within the stall timeout counts as stalled: one byte at a time would never end.
const INTERVAL_BYTES_MIN: usize = 16 << 10;
