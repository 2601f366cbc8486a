//! Reconnects to a resumable stream (TR-1303). Only Sapwood's servers have them.
//!
//! ```text
//!   read ── cut ──► GET behind the last event ─► its rest                     ─► read
//!                     │  nobody there: again, 100 ms later, doubling           ─► …, and at last: truncated
//!                     └─ all was read: the end · gone, unknown: truncated
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

/// The stream. Dropping it before it is over ends it at its server, as far as that can be reached.
pub(super) struct ResumableStream {
    http: Arc<Http>,
    path: String,
    /// The last event that was read; the beginning if there was none.
    last: Bytes,
    /// How often it was tried to come back since then, and how often that gave nothing but another cut.
    tries: u32,
    in_vain: u32,
    /// There is nothing more to be had, or to be ended.
    over: bool,
}

impl ResumableStream {
    /// The stream of an answer, if its server keeps it.
    pub(super) fn of(http: &Arc<Http>, headers: &HeaderMap) -> Option<Self> {
        let name = headers.get(STREAM)?.to_str().ok()?;
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

    /// An event was read.
    pub(super) fn read(&mut self, id: &Bytes) {
        if !id.is_empty() {
            self.last = id.clone();
            (self.tries, self.in_vain) = (0, 0);
        }
    }

    /// Everything was read.
    pub(super) const fn finish(&mut self) {
        self.over = true;
    }

    /// Its connection was cut: the answer with the rest of it, or `None` if there is no more and it has ended well.
    ///
    /// # Errors
    /// [`Error::Truncated`] if there is no way back, or none was found for as long as it is looked for.
    pub(super) async fn back(&mut self) -> Result<Option<Response<ResponseBody>>, Error> {
        self.in_vain += u32::from(self.tries > 0);
        while self.tries < TRIES_MAX && self.in_vain < IN_VAIN_MAX {
            if self.tries > 0 {
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
                    tracing::debug!("a stream that was cut goes on");
                    return Ok(Some(answer));
                }
                StatusCode::NO_CONTENT => {
                    self.over = true;
                    return Ok(None);
                }
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
        // Without a runtime there is nobody to say it, and the server ends the stream after its time.
        if self.over {
            return;
        }
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let (http, path) = (Arc::clone(&self.http), std::mem::take(&mut self.path));
        // Nobody waits for it, and it does not last.
        runtime.spawn(async move {
            let asked = http.ask(Method::DELETE, &path, None, None);
            if !matches!(timeout(RECONNECT_TIMEOUT, asked).await, Ok(Ok(_))) {
                tracing::debug!("a stream that nobody wants could not be ended");
            }
        });
    }
}

/// Asks a server to keep the stream.
pub(super) const RESUME_HEADER: (HeaderName, HeaderValue) = (
    HeaderName::from_static("sapwood-resume"),
    HeaderValue::from_static("1"),
);
const STREAM: HeaderName = HeaderName::from_static("sapwood-stream-id");
const LAST: HeaderName = HeaderName::from_static("last-event-id");
const NAME_BYTES: usize = 256;
/// Without an event between them: some three seconds.
const TRIES_MAX: u32 = 6;
const DELAY_MIN: Duration = Duration::from_millis(100);
/// A stream that is cut again wherever it is come back to was cut by its model.
const IN_VAIN_MAX: u32 = 2;
/// For an answer's head.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(10);
