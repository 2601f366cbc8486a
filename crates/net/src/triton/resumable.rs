//! Reconnects to a resumable stream (TR-1303). Only Sapwood's servers have them.
//!
//! ```text
//!   reading ── cut ──► GET after the last event ─► the rest                      ─► reading
//!                     │  no answer: retry 100 ms later, doubling                  ─► …, and finally: truncated
//!                     └─ everything was read: end · expired, unknown: truncated
//!   dropped before its end ──► DELETE
//! ```

use std::sync::Arc;
use std::time::Duration;

use ::http::header::{HeaderMap, HeaderName, HeaderValue};
use ::http::{Method, Response, StatusCode};
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use super::error::Error;
use super::http::Http;
use crate::http1::ResponseBody;

/// The stream. Dropping it before its end cancels it at its server, if the server can be reached.
pub(super) struct ResumableStream {
    http: Arc<Http>,
    path: String,
    /// The id of the last event that was read; empty if there was none.
    last: Bytes,
    /// Number of reconnection attempts since that event, and how many of these only led to another cut.
    tries: u32,
    in_vain: u32,
    /// The stream has ended, so there is nothing to resume or to cancel.
    over: bool,
}

impl ResumableStream {
    /// Returns the resumable stream of a response, if its server has a replay buffer.
    pub(super) fn of(http: &Arc<Http>, headers: &HeaderMap) -> Option<Self> {
        let name = headers.get(STREAM)?.to_str().ok()?;
        // The name becomes a part of a path, and the server is not trusted to choose another one.
        let plain = |letter: u8| letter.is_ascii_alphanumeric() || matches!(letter, b'_' | b'-');
        if name.is_empty() || name.len() > NAME_BYTES || !name.bytes().all(plain) {
            return None;
        }
        Some(Self {
            http: Arc::clone(http),
            path: format!("/v2/streams/{name}"),
            last: Bytes::new(),
            tries: 0,
            in_vain: 0,
            over: false,
        })
    }

    /// Records that an event was read.
    pub(super) fn read(&mut self, id: &Bytes) {
        if !id.is_empty() {
            self.last = id.clone();
            // An event is progress. Without this, a long stream over a bad network would use its attempts up.
            (self.tries, self.in_vain) = (0, 0);
        }
    }

    /// Records that everything was read.
    pub(super) const fn finish(&mut self) {
        self.over = true;
    }

    /// Reconnects after a cut: returns the response with the rest, or `None` if everything was read and the stream has
    /// ended normally.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the stream cannot be resumed, or all attempts fail.
    pub(super) async fn back(&mut self) -> Result<Option<Response<ResponseBody>>, Error> {
        // Called again without an event since the last attempt: that attempt's connection brought nothing.
        self.in_vain += u32::from(self.tries > 0);
        while self.tries < TRIES_MAX && self.in_vain < IN_VAIN_MAX {
            if self.tries > 0 {
                // At most 100 ms << 4, because `tries` ends at `TRIES_MAX`.
                sleep(DELAY_MIN * (1 << (self.tries - 1))).await;
            }
            self.tries += 1;
            let behind = HeaderValue::from_maybe_shared(self.last.clone());
            let behind = behind.map_err(|_| Error::Truncated)?;
            let asked = self
                .http
                .ask(Method::GET, &self.path, None, Some((LAST, behind)));
            let Ok(Ok(answer)) = timeout(RECONNECT_TIMEOUT, asked).await else {
                continue;
            };
            match answer.status() {
                StatusCode::OK => {
                    tracing::debug!("resumed a detached stream");
                    return Ok(Some(answer));
                }
                StatusCode::NO_CONTENT => {
                    self.over = true;
                    return Ok(None);
                }
                // A proxy in front of a server that restarts. Everything below 500 is the server's own answer, which
                // stays as it is.
                status if status.is_server_error() => {}
                _ => {
                    self.over = true;
                    return Err(Error::Truncated);
                }
            }
        }
        Err(Error::Truncated)
    }
}

impl Drop for ResumableStream {
    fn drop(&mut self) {
        // Without a runtime the DELETE cannot be sent, and the server ends the stream after its grace period.
        if self.over {
            return;
        }
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let (http, path) = (Arc::clone(&self.http), std::mem::take(&mut self.path));
        // Detached: its result does not matter, and it has a timeout.
        runtime.spawn(async move {
            let asked = http.ask(Method::DELETE, &path, None, None);
            if !matches!(timeout(RECONNECT_TIMEOUT, asked).await, Ok(Ok(_))) {
                tracing::debug!("could not cancel an abandoned stream");
            }
        });
    }
}

/// Asks a server to retain the stream for reconnection.
pub(super) const RESUME_HEADER: (HeaderName, HeaderValue) = (
    HeaderName::from_static("sapwood-resume"),
    HeaderValue::from_static("1"),
);
const STREAM: HeaderName = HeaderName::from_static("sapwood-stream-id");
const LAST: HeaderName = HeaderName::from_static("last-event-id");
const NAME_BYTES: usize = 256;
/// The maximum of attempts without an event between them: some three seconds.
const TRIES_MAX: u32 = 6;
const DELAY_MIN: Duration = Duration::from_millis(100);
/// A stream that is cut again after every reconnection was cut by its model.
const IN_VAIN_MAX: u32 = 2;
/// The time limit for a response head.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(10);
