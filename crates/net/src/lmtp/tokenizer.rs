//! Downloads the tokenizer files that LMTP servers offer (LM-712, LM-951).

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use sapwood_proto::lmtp::{LmtpError, LmtpReason};
use tokio::time::timeout;

use super::address::PeerAddress;
use super::wire::{self, lost};
use crate::http1::exchange;

impl PeerAddress {
    /// Fetches the file at `path` of this server, as the facts of its model name it (LM-951): at most 64 MiB, within 5
    /// s. No redirect is followed.
    ///
    /// # Errors
    /// `unsupported_operation` for a peer that is not an HTTP server; `invalid_value` for an invalid path;
    /// `message_too_large`, `timeout`, `connection_lost`, or the error with which the peer refuses it.
    pub async fn fetch(&self, path: &str) -> Result<Bytes, LmtpError> {
        let uri = self.target.uri().ok_or_else(|| {
            let why =
                "files are fetched over HTTP only, and the upstream is reached in another way";
            LmtpError::new(LmtpReason::UnsupportedOperation, why)
        })?;
        // In a URL `//HOST` names another server, and the key below is for this one alone. The peer chooses the path.
        if !path.starts_with('/') || path.starts_with("//") {
            return Err(wire::bad("the upstream names a file on another server"));
        }
        let late = |_| {
            LmtpError::new(
                LmtpReason::Timeout,
                "the upstream did not send the file in time",
            )
        };
        let fetching = self.get(uri, path);
        timeout(FILE_TIMEOUT, fetching).await.map_err(late)?
    }

    async fn get(&self, uri: &Uri, path: &str) -> Result<Bytes, LmtpError> {
        let io = wire::dial(uri, self).await?;
        // The query may contain a key (LM-108).
        let query = uri.query().map(|query| format!("?{query}"));
        let mut request = Request::get([path, query.as_deref().unwrap_or_default()].concat())
            .header(HOST, uri.authority().map_or("", |host| host.as_str()))
            .header(ACCEPT, "application/json");
        if let Some(key) = wire::credential(self)? {
            request = request.header(AUTHORIZATION, key);
        }
        let request = request
            .body(Empty::<Bytes>::new())
            .map_err(|_| wire::bad("the upstream names a file with an invalid path"))?;
        let broken = |error: Box<dyn Error + Send + Sync>| {
            tracing::debug!(%error, "the download of a file failed");
            lost("the upstream did not send the file")
        };
        let answer = exchange(io, request).await;
        let answer = answer.map_err(|error| broken(error.into()))?;
        if answer.status() != StatusCode::OK {
            return Err(wire::refused_with(answer.status().as_u16()));
        }
        let body = Limited::new(answer.into_body(), FILE_BYTES_MAX);
        let file = body.collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() {
                let why = "the upstream's file is larger than 64 MiB";
                return LmtpError::new(LmtpReason::MessageTooLarge, why);
            }
            broken(error)
        })?;
        Ok(file.to_bytes())
    }
}

/// The maximum of bytes of a file; twice the largest known one.
const FILE_BYTES_MAX: usize = 64 << 20;
/// Half of the time that joining an upstream may take.
const FILE_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
