//! A client of a server's REST routes: one request per connection, a JSON answer or a stream of events.
//!
//! For the routes that have no protocol of their own: `/v1/controllers` and `/v1/run`.

use std::time::Duration;

use ::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use ::http::{Request, Response, Uri};
use bytes::Bytes;
use futures::{Stream, stream};
use http_body_util::{BodyExt, Full, Limited};
use sapwood_proto::sse::{SseLimits, SseReader};
use serde_json::Value;
use tokio::time::timeout;

use crate::address::{ServerAddress, without_credentials};
use crate::connection::{self, ConnectError};
use crate::http1::{ResponseBody, exchange};

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestError {
    /// The address or the key is invalid.
    #[error("{0}")]
    Address(&'static str),
    /// No server answers there.
    #[error("no server answers there")]
    Unreachable,
    /// It refused the request.
    #[error("{message}")]
    Refused {
        /// The status.
        status: u16,
        /// The server's message.
        message: String,
    },
    /// The answer is not what these routes send.
    #[error("{0}")]
    Protocol(&'static str),
    /// The answer was cut off.
    #[error("the answer was cut off")]
    Truncated,
}

/// A server's REST routes.
pub struct RestClient {
    uri: Uri,
    authority: HeaderValue,
    address: ServerAddress,
}

/// The method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestMethod {
    /// Reads.
    Get,
    /// Creates or runs.
    Post,
    /// Removes.
    Delete,
}

impl RestMethod {
    const fn http(self) -> ::http::Method {
        match self {
            Self::Get => ::http::Method::GET,
            Self::Post => ::http::Method::POST,
            Self::Delete => ::http::Method::DELETE,
        }
    }
}

/// The body of a request, with its type.
#[derive(Clone, Debug)]
pub struct RestBody {
    /// The value of `content-type`.
    pub content_type: &'static str,
    /// The bytes.
    pub bytes: Bytes,
}

impl RestBody {
    /// A JSON body.
    #[must_use]
    pub fn json(value: &Value) -> Self {
        Self {
            content_type: "application/json",
            bytes: value.to_string().into(),
        }
    }
}

impl RestClient {
    /// The server at `address`: `http://HOST:PORT` or `https://HOST:PORT`, with or without `evergreen+` in front. Nothing
    /// is connected yet.
    ///
    /// # Errors
    /// [`RestError::Address`].
    pub fn new(address: ServerAddress) -> Result<Self, RestError> {
        let url = address.url.strip_prefix("evergreen+");
        let uri: Uri = url
            .unwrap_or(&address.url)
            .parse()
            .map_err(|_| RestError::Address("it is not a URL"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            let why = "it must begin with http:// or https:// for this command";
            return Err(RestError::Address(why));
        }
        without_credentials(&uri).map_err(RestError::Address)?;
        let authority = uri.authority().map(|authority| authority.as_str());
        let authority = authority.and_then(|text| HeaderValue::from_str(text).ok());
        Ok(Self {
            authority: authority.ok_or(RestError::Address("it has no host"))?,
            uri,
            address,
        })
    }

    /// Sends a request and reads its JSON answer; `null` if it has no body.
    ///
    /// # Errors
    /// [`RestError`].
    pub async fn json(
        &self,
        method: RestMethod,
        path: &str,
        body: Option<RestBody>,
    ) -> Result<Value, RestError> {
        let answer = self.ask(method, path, body, "application/json").await?;
        let text = whole(answer.into_body()).await?;
        // 204 has no body.
        if text.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&text).map_err(|_| RestError::Protocol("its answer is not JSON"))
    }

    /// Sends a request and returns the data of its events. Dropping the stream closes the connection, which cancels what
    /// runs there.
    ///
    /// # Errors
    /// [`RestError`].
    pub async fn events(
        &self,
        path: &str,
        body: RestBody,
    ) -> Result<impl Stream<Item = Result<Bytes, RestError>> + Send + Unpin, RestError> {
        let answer = self
            .ask(RestMethod::Post, path, Some(body), "text/event-stream")
            .await?;
        let state = (answer.into_body(), SseReader::new(SseLimits::default()));
        Ok(Box::pin(stream::try_unfold(state, next_event)))
    }

    async fn ask(
        &self,
        method: RestMethod,
        path: &str,
        body: Option<RestBody>,
        accept: &'static str,
    ) -> Result<Response<ResponseBody>, RestError> {
        let bytes = body.as_ref().map(|body| body.bytes.clone());
        let mut request = Request::new(Full::new(bytes.unwrap_or_default()));
        *request.method_mut() = method.http();
        *request.uri_mut() = path
            .parse()
            .map_err(|_| RestError::Address("no URL has this name"))?;
        let headers = request.headers_mut();
        headers.insert(HOST, self.authority.clone());
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        headers.insert(ACCEPT, HeaderValue::from_static(accept));
        if let Some(body) = body {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(body.content_type));
        }
        if let Some(key) = self.address.bearer().map_err(RestError::Address)? {
            headers.insert(AUTHORIZATION, key);
        }
        let authorities = self.address.authorities.as_deref();
        let dialled = connection::connect(&self.uri, authorities);
        let io = timeout(self.address.connect_timeout, dialled).await;
        let io = io
            .map_err(|_| RestError::Unreachable)?
            .map_err(dial_error)?;
        // A server that reads nothing more may have answered already with the reason, so its answer is read in any case.
        let answer = exchange(io, request).await.map_err(|error| {
            tracing::debug!(%error, "no answer");
            RestError::Truncated
        })?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        Err(refused(answer).await)
    }
}

impl std::fmt::Debug for RestClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RestClient").field(&self.address).finish()
    }
}

fn dial_error(error: ConnectError) -> RestError {
    match error {
        ConnectError::Bad(why) => RestError::Address(why),
        ConnectError::Unreachable(cause) => {
            tracing::debug!(%cause, "cannot connect");
            RestError::Unreachable
        }
    }
}

async fn next_event(
    (mut body, mut events): (ResponseBody, SseReader),
) -> Result<Option<(Bytes, (ResponseBody, SseReader))>, RestError> {
    loop {
        let event = events.next();
        let event = event.map_err(|_| RestError::Protocol("its events cannot be read"))?;
        if let Some(event) = event {
            return Ok(Some((event.data, (body, events))));
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    events.push(&data);
                }
            }
            Some(Err(_)) => return Err(RestError::Truncated),
            None => return Ok(None),
        }
    }
}

async fn whole(body: ResponseBody) -> Result<Bytes, RestError> {
    let body = Limited::new(body, ANSWER_BYTES).collect().await;
    // The limit and a cut look alike here, and either way there is nothing to show.
    Ok(body.map_err(|_| RestError::Truncated)?.to_bytes())
}

/// The error of an answer: `error.message`, `message`, or the status alone.
async fn refused(answer: Response<ResponseBody>) -> RestError {
    let status = answer.status();
    let text = timeout(ERROR_TIMEOUT, whole(answer.into_body())).await;
    let value: Option<Value> = text
        .ok()
        .and_then(Result::ok)
        .and_then(|text| serde_json::from_slice(&text).ok());
    let message = value.as_ref().and_then(|value| {
        let nested = value.pointer("/error/message");
        nested.or_else(|| value.get("message"))?.as_str()
    });
    RestError::Refused {
        status: status.as_u16(),
        message: message.map_or_else(|| status.to_string(), str::to_owned),
    }
}

const AGENT: &str = concat!("sapwood/", env!("CARGO_PKG_VERSION"));
/// The maximum of bytes of an answer that is no stream.
const ANSWER_BYTES: usize = 64 << 20;
const ERROR_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_an_http_url() {
        let read = |url: &str| RestClient::new(ServerAddress::new(url));
        for url in ["http://h:8000", "https://h", "evergreen+http://[::1]:8000"] {
            assert!(read(url).is_ok(), "{url}");
        }
        for url in ["", "h:8000", "ws://h", "lmtp://h/m", "http://user@h"] {
            assert!(
                matches!(read(url), Err(RestError::Address(_))),
                "{url} was taken"
            );
        }
    }
}
