//! A Triton server over HTTP/1.1 (sections 2, 5, 6 and 7 of the page).
//!
//! ```text
//!   POST …/generate_stream ─► status 200 ─► event, event, … ─► the body's own end | truncated
//!                        │                        ▲   cut, and its server has a replay buffer (`resumable`)
//!                        │                        └────────┘
//!                        └──► any other: Error::Reply, before any response
//! ```

use std::sync::Arc;
use std::time::Duration;

use ::http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST,
    HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING, USER_AGENT,
};
use ::http::{Method, StatusCode};
use bytes::Bytes;
use futures::{StreamExt, stream};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use sapwood_proto::generated::inference::repository_index_response::ModelIndex;
use sapwood_proto::sse::{self, SseReader, Violation};
use serde_json::{Map, Value};
use tokio::time::timeout;

use super::address::TritonTarget;
use super::error::{Error, LOST};
use super::model::{self, ModelSignature};
use super::request::{InferRequest, ModelResponse};
use super::resumable::{self, ResumableStream};
use super::{IDLE_TIMEOUT, ModelResponses};
use crate::address::ServerAddress;
use crate::connection::{self, ClientTls};
use crate::http1::{ResponseBody, exchange};

/// A server, and the credentials to use.
pub(super) struct Http {
    host: String,
    port: u16,
    headers: HeaderMap,
    tls: Option<ClientTls>,
    connect_timeout: Duration,
}

impl Http {
    pub(super) fn new(target: &TritonTarget, address: &ServerAddress) -> Result<Self, Error> {
        let mut headers = HeaderMap::new();
        let host = HeaderValue::try_from(&*target.authority)
            .map_err(|_| Error::Address("its host is invalid"))?;
        headers.insert(HOST, host);
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        // Limits count the bytes that are received, so nothing may be larger than that.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(IDENTITY));
        if let Some(key) = address.bearer().map_err(Error::Address)? {
            headers.insert(AUTHORIZATION, key);
        }
        let tls = || connection::tls(&target.host, address.authorities.as_deref());
        let tls = target.secure.then(tls).transpose();
        Ok(Self {
            host: target.host.clone(),
            port: target.port,
            headers,
            tls: tls.map_err(Error::Address)?,
            connect_timeout: address.connect_timeout,
        })
    }

    /// Returns whether the server, or this model, is ready.
    pub(super) async fn ready(&self, model: Option<&str>) -> Result<bool, Error> {
        let path = model.map_or_else(
            || "/v2/health/ready".to_owned(),
            |model| format!("{}/ready", model_path(model)),
        );
        let answer = self.ask(Method::GET, &path, None, None).await?;
        match answer.status() {
            StatusCode::OK => Ok(true),
            // A server that is not ready answers with 400 and nothing else (section 2).
            StatusCode::BAD_REQUEST if model.is_none() => Ok(false),
            _ => Err(refused(answer).await),
        }
    }

    pub(super) async fn index(&self) -> Result<Vec<ModelIndex>, Error> {
        let ready = Bytes::from_static(b"{\"ready\":true}");
        let index = self
            .json(Method::POST, "/v2/repository/index", Some(ready))
            .await?;
        model::index_from_json(&index)
    }

    pub(super) async fn model(&self, name: &str) -> Result<ModelSignature, Error> {
        let path = model_path(name);
        let metadata = self.json(Method::GET, &path, None).await?;
        let mut model = ModelSignature::from_json(&metadata)?;
        match self
            .json(Method::GET, &format!("{path}/config"), None)
            .await
        {
            Ok(config) => model.configure(&config),
            // KServe v2 servers other than Triton have no configurations. An error of the connection is passed on.
            Err(Error::Reply(reply)) => tracing::debug!(code = %reply.code, "no configuration"),
            Err(error) => return Err(error),
        }
        Ok(model)
    }

    /// Sends a request and returns its stream of responses.
    pub(super) async fn generate(
        self: &Arc<Self>,
        request: InferRequest,
    ) -> Result<ModelResponses, Error> {
        // Also for models with one response: a server may answer with JSON nevertheless, which is read below.
        let path = format!("{}/generate_stream", model_path(&request.model.name));
        let body = request.json()?;
        let asked = self.ask(
            Method::POST,
            &path,
            Some(body),
            Some(resumable::RESUME_HEADER),
        );
        // The status line waits for the first response (TR-602), so this is no time for a connection.
        let answer = timeout(IDLE_TIMEOUT, asked).await.map_err(|_| LOST)??;
        if answer.status() != StatusCode::OK {
            return Err(refused(answer).await);
        }
        plain(answer.headers())?;
        if is(answer.headers(), JSON) {
            // A server that answers in one piece has computed all of it, so one limit is enough for the whole body.
            let text = timeout(IDLE_TIMEOUT, whole(answer, ANSWER_BYTES)).await;
            let members = object(&text.map_err(|_| Error::Truncated)??)?;
            let response = read(&request.model, members, false)?;
            return Ok(stream::iter([Ok(response)]).boxed());
        }
        if !is(answer.headers(), EVENTS) {
            return Err(Error::Protocol(
                "its answer is neither an event stream nor JSON",
            ));
        }
        let streamed = SseResponses {
            model: request.model,
            resumable: ResumableStream::of(self, answer.headers()),
            has_end: has_end(answer.headers()),
            body: answer.into_body(),
            events: SseReader::new(sse::SseLimits::default()),
            started: false,
        };
        Ok(stream::try_unfold(streamed, SseResponses::next).boxed())
    }

    async fn json(&self, method: Method, path: &str, body: Option<Bytes>) -> Result<Value, Error> {
        let answer = self.ask(method, path, body, None).await?;
        if answer.status() != StatusCode::OK {
            return Err(refused(answer).await);
        }
        plain(answer.headers())?;
        let text = whole(answer, ABOUT_BYTES).await?;
        serde_json::from_slice(&text).map_err(|_| Error::Protocol("its answer is not JSON"))
    }

    /// Sends one request and returns the response head. `more`: an additional header.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<Bytes>,
        more: Option<(HeaderName, HeaderValue)>,
    ) -> Result<::http::Response<ResponseBody>, Error> {
        let mut request = ::http::Request::new(Full::new(body.clone().unwrap_or_default()));
        *request.method_mut() = method;
        *request.uri_mut() = path
            .parse()
            .map_err(|_| Error::Request("no URL has this name"))?;
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().extend(more);
        if body.is_some() {
            let json = HeaderValue::from_static(JSON);
            request.headers_mut().insert(CONTENT_TYPE, json);
            let both = HeaderValue::from_static("text/event-stream, application/json");
            request.headers_mut().insert(ACCEPT, both);
        }
        // A connection for each request: closing it is how the server learns that nobody reads on (TR-608).
        let io = connection::dial(&self.host, self.port, self.tls.clone());
        let io = timeout(self.connect_timeout, io).await;
        let io = io.map_err(|_| Error::Unreachable("it does not answer in time"))?;
        let io = io.map_err(|cause| {
            tracing::debug!(%cause, "cannot connect");
            Error::Unreachable("is the server running there?")
        })?;
        exchange(io, request).await.map_err(|error| {
            tracing::debug!(%error, "no answer");
            // Told apart, because another port is the remedy for one, and another attempt for the other.
            if error.is_parse() {
                Error::Protocol("it does not speak HTTP")
            } else {
                LOST
            }
        })
    }
}

impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http")
            .field("host", &self.host)
            .field("port", &self.port)
            .finish()
    }
}

/// The responses of an event stream.
struct SseResponses {
    model: Arc<ModelSignature>,
    /// The stream at its server, if it is resumable.
    resumable: Option<ResumableStream>,
    /// The body marks its own end; for a body that goes on until the connection closes, an end cannot be told from a
    /// cut.
    has_end: bool,
    body: ResponseBody,
    events: SseReader,
    started: bool,
}

impl SseResponses {
    async fn next(mut self) -> Result<Option<(ModelResponse, Self)>, Error> {
        loop {
            if let Some(event) = self.events.next().map_err(broken)? {
                if &*event.data == DONE {
                    return Ok(self.ended());
                }
                if let Some(resumable) = &mut self.resumable {
                    resumable.read(&event.id);
                }
                let response = read(&self.model, object(&event.data)?, self.started);
                // The server has ended the stream with this error, so dropping it must not ask for a DELETE.
                if matches!(response, Err(Error::Reply(_))) {
                    self.ended();
                }
                let response = response?;
                self.started = true;
                return Ok(Some((response, self)));
            }
            let frame = timeout(IDLE_TIMEOUT, self.body.frame()).await;
            match frame.map_err(|_| Error::Truncated)? {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.events.push(&data);
                    }
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "an answer was cut off");
                    if !self.back().await? {
                        return Ok(self.ended());
                    }
                }
                // A proxy may end a body in good order in the middle of an event: that is a cut too.
                None if self.has_end && self.events.finish().is_ok() => return Ok(self.ended()),
                None => {
                    if !self.back().await? {
                        return Ok(self.ended());
                    }
                }
            }
        }
    }

    /// Marks the stream as ended: there is nothing to resume or to cancel.
    fn ended(&mut self) -> Option<(ModelResponse, Self)> {
        if let Some(resumable) = &mut self.resumable {
            resumable.finish();
        }
        None
    }

    /// Reconnects after a cut; returns whether there is more to read.
    async fn back(&mut self) -> Result<bool, Error> {
        let resumable = self.resumable.as_mut().ok_or(Error::Truncated)?;
        let Some(answer) = resumable.back().await? else {
            return Ok(false);
        };
        plain(answer.headers())?;
        // Not an error of the protocol: a proxy may answer for a server that restarts.
        if !is(answer.headers(), EVENTS) {
            return Err(Error::Truncated);
        }
        self.has_end = has_end(answer.headers());
        self.body = answer.into_body();
        // A partial event is sent again as a whole.
        self.events = SseReader::new(sse::SseLimits::default());
        Ok(true)
    }
}

fn has_end(headers: &HeaderMap) -> bool {
    let mut names = [CONTENT_LENGTH, TRANSFER_ENCODING].into_iter();
    names.any(|name| headers.contains_key(name))
}

const fn broken(violation: Violation) -> Error {
    match violation {
        Violation::Cut => Error::Truncated,
        Violation::LineTooLong(max) | Violation::EventTooLarge(max) => Error::Limit {
            name: "bytes of an event",
            max: max as u64,
        },
    }
}

/// Returns a response's members, or the error that they contain (TR-604; some servers send one with status 200).
fn read(
    model: &ModelSignature,
    members: Map<String, Value>,
    started: bool,
) -> Result<ModelResponse, Error> {
    if let Some(Value::String(text)) = members.get("error")
        // A model may have an output of this name.
        && model.output("error").is_none()
    {
        return Err(Error::of_text(text, started));
    }
    ModelResponse::from_json(model, members).ok_or(Error::Protocol("an output is not of its type"))
}

/// Parses the members of an object. A value takes about twenty times the memory of its text, so a limit of bytes alone
/// is not enough (D-47).
fn object(text: &[u8]) -> Result<Map<String, Value>, Error> {
    // Characters within strings count as well: a cheap upper bound is sufficient.
    let marks = text
        .iter()
        .filter(|byte| matches!(byte, b',' | b'[' | b'{'));
    if marks.count() > VALUES_MAX {
        return Err(Error::Limit {
            name: "values in an answer",
            max: VALUES_MAX as u64,
        });
    }
    serde_json::from_slice(text).map_err(|_| Error::Protocol("its answer is not a JSON object"))
}

/// Converts a response with a status other than 200, in JSON or as an event.
async fn refused(answer: ::http::Response<ResponseBody>) -> Error {
    let (head, body) = answer.into_parts();
    let body = timeout(
        ERROR_BODY_TIMEOUT,
        Limited::new(body, ERROR_BODY_BYTES).collect(),
    );
    // If the body cannot be read, only the status is reported.
    let bytes = match body.await {
        Ok(Ok(body)) => body.to_bytes(),
        _ => Bytes::new(),
    };
    // An error may be an event (TR-604) or plain JSON (TR-605), whatever was asked for.
    let mut events = SseReader::default();
    events.push(&bytes);
    let event = events.next().ok().flatten();
    let text = event.map_or(bytes, |event| event.data);
    let reply = serde_json::from_slice::<Value>(&text).ok();
    let error = reply.as_ref().and_then(|reply| reply.get("error"));
    let text = error.and_then(Value::as_str).unwrap_or_default();
    Error::of_http(head.status, &head.headers, text)
}

async fn whole(answer: ::http::Response<ResponseBody>, max: usize) -> Result<Bytes, Error> {
    let body = Limited::new(answer.into_body(), max).collect().await;
    let body = body.map_err(|error| {
        if error.is::<LengthLimitError>() {
            let name = "bytes of an answer";
            return Error::Limit {
                name,
                max: max as u64,
            };
        }
        Error::Truncated
    })?;
    Ok(body.to_bytes())
}

/// Checks that the response has no content encoding: none was requested.
fn plain(headers: &HeaderMap) -> Result<(), Error> {
    match headers.get(CONTENT_ENCODING) {
        Some(encoding) if encoding != IDENTITY => Err(Error::Protocol(
            "its response is compressed, which was not requested",
        )),
        _ => Ok(()),
    }
}

fn is(headers: &HeaderMap, mime: &str) -> bool {
    let value = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let essence = value.and_then(|value| value.split(';').next());
    essence.is_some_and(|essence| essence.trim().eq_ignore_ascii_case(mime))
}

fn model_path(name: &str) -> String {
    format!("/v2/models/{}", utf8_percent_encode(name, SEGMENT))
}

/// Characters that are not percent-encoded in a path's segment (TR-201).
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
const AGENT: &str = concat!("sapwood/", env!("CARGO_PKG_VERSION"));
const IDENTITY: &str = "identity";
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
/// The end mark of other protocols; some servers send it here.
const DONE: &[u8] = b"[DONE]";
/// The maximum of bytes of a response that is not a stream.
const ANSWER_BYTES: usize = 64 << 20;
/// The maximum of commas and opening brackets of a response, or of an event: it has at most as many values.
const VALUES_MAX: usize = 1 << 20;
/// The maximum of bytes of metadata of a server and its models.
const ABOUT_BYTES: usize = 4 << 20;
const ERROR_BODY_BYTES: usize = 64 << 10;
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(10);
