//! Errors of this face: one message, one status, and details in headers (TR-205, TR-206, section 15).

use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use sapwood_kernel::Error;
use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::generate::{InvalidRequest, error_body, error_event};

use super::request_end::EarlyEnd;
use crate::http::rejection::Rejection;

/// The header with the code of the closed set (TR-206).
const CODE: HeaderName = HeaderName::from_static("sapwood-error");
/// The type of JSON answers, to the letter (TR-205).
pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");
/// The type of streams, to the letter (TR-601).
pub(super) const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

/// Why a request fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestError {
    pub(super) status: StatusCode,
    pub(super) code: Code,
    pub(super) message: String,
    pub(super) retry_after: Option<Duration>,
    /// No model has worked on it: it is a plain JSON error also on the URL of streams (TR-605).
    pub(super) early: bool,
    /// The script cuts the transport (D-11).
    pub(super) cut: bool,
    /// It is an early end rather than a failure (OA-801).
    pub(super) ended: Option<EarlyEnd>,
    /// One more header of the response.
    header: Option<(HeaderName, HeaderValue)>,
}

/// Errors of the middleware, with the status that their code has at this face.
impl From<Rejection> for RequestError {
    fn from(rejection: Rejection) -> Self {
        Self {
            retry_after: rejection.retry_after,
            ..Self::new(rejection.code, rejection.message)
        }
    }
}

impl RequestError {
    /// With the status that its code has at this face, before any work.
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            status: status(code),
            code,
            // Clipped, because the text may quote the client, and is a header in gRPC.
            message: clip::message(message.into()),
            retry_after: None,
            early: true,
            cut: false,
            ended: None,
            header: None,
        }
    }

    pub(super) const fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// With one more header.
    pub(super) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.header = Some((name, value));
        self
    }

    /// The same for a request that a model has worked on.
    pub(super) const fn late(mut self) -> Self {
        self.early = false;
        self
    }

    /// The same as an early end.
    pub(super) const fn because(mut self, why: EarlyEnd) -> Self {
        self.ended = Some(why);
        self
    }

    /// The error of a call of the kernel, for the request with this id.
    pub(super) fn of(error: &Error, id: &str) -> Self {
        let code = error.code();
        // The texts of the reference, by which its clients and load generators tell these cases; others are the
        // kernel's own.
        let message = match error {
            Error::Cancelled => "Request was cancelled".into(),
            Error::Deadline => format!("[request id: {id}] Request timeout expired"),
            _ if code == Code::Overloaded => {
                format!("[request id: {id}] Exceeds maximum queue size")
            }
            _ if code == Code::DeadlineExceeded => {
                format!("[request id: {id}] Request timeout expired")
            }
            Error::Argument { name, why, .. } => format!("parameter '{name}' {why}"),
            // An event has no place for the code, so the text begins with it (TR-1305).
            _ if code == Code::ControllerFailed => {
                format!("controller: {}: {error}", error.reason())
            }
            other => other.to_string(),
        };
        Self {
            retry_after: error.retry_after(),
            early: is_rejection(error),
            cut: is_cut(error),
            ended: early_end(error),
            ..Self::new(code, message)
        }
    }

    /// The answer as JSON (TR-205).
    pub(super) fn answer(&self) -> Response<Body> {
        self.with_body(JSON, Body::from(error_body(&self.message)))
    }

    /// The answer to a request for a stream that starts with an error (TR-604).
    pub(super) fn stream(&self) -> Response<Body> {
        self.with_body(EVENTS, Body::from(error_event(&self.message)))
    }

    fn with_body(&self, kind: HeaderValue, body: Body) -> Response<Body> {
        let head = [
            (header::CONTENT_TYPE, kind),
            // Never in the body, which has exactly one member (TR-205).
            (CODE, HeaderValue::from_static(self.code.name())),
        ];
        let mut answer = (self.status, head, body).into_response();
        let headers = answer.headers_mut();
        if matches!(self.status.as_u16(), 429 | 503) {
            let seconds = retry_seconds(self.retry_after.unwrap_or(LEAST_WAIT));
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some((name, value)) = &self.header {
            headers.insert(name, value.clone());
        }
        answer
    }
}

/// The whole seconds of `Retry-After`. Rounded up: a client that comes too early is refused again.
pub(super) fn retry_seconds(wait: Duration) -> u64 {
    let wait = wait.max(LEAST_WAIT);
    wait.as_secs() + u64::from(wait.subsec_nanos() > 0)
}

const LEAST_WAIT: Duration = Duration::from_secs(1);

impl From<InvalidRequest> for RequestError {
    fn from(refused: InvalidRequest) -> Self {
        let code = match refused {
            InvalidRequest::Unsupported(_) => Code::Unimplemented,
            _ => Code::InvalidRequest,
        };
        // An unsupported member of a body is an error of the request like any other: 400, and not the 501 of its code.
        Self::new(code, refused.to_string()).with_status(StatusCode::BAD_REQUEST)
    }
}

/// The one table of statuses (TR-1501).
pub(super) fn status(code: Code) -> StatusCode {
    match code {
        Code::InvalidRequest
        | Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::LimitExceeded
        | Code::Aborted
        | Code::Cancelled => StatusCode::BAD_REQUEST,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Overloaded | Code::Unavailable | Code::DeadlineExceeded => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        Code::Truncated | Code::UpstreamFailed | Code::ControllerFailed | Code::Internal => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

/// Errors before the model runs: arguments, its queue, callers that may not call it (TR-605).
fn is_rejection(error: &Error) -> bool {
    match error {
        Error::Engine { code, reason, .. } => {
            // By the reason, because an engine gives the same codes for failures in the midst of a request.
            *code == Code::Overloaded
                || matches!(
                    *reason,
                    ErrorReason::PROMPT_TOO_LONG
                        | ErrorReason::EMPTY_PROMPT
                        | ErrorReason::BAD_CONFIG
                        | ErrorReason::BAD_TOKENS
                        | ErrorReason::BAD_ROLE
                        | ErrorReason::NO_TEMPLATE
                        | ErrorReason::NO_INFILL
                        | ErrorReason::UNKNOWN_CONTROLLER
                        | ErrorReason::INSUFFICIENT_SCOPE
                        | ErrorReason::INVALID_GRAMMAR
                        | ErrorReason::INVALID_MODULE
                        | ErrorReason::CONTROLLERS_UNAVAILABLE
                )
        }
        // No upstream was reached, so none has worked on it.
        Error::Remote { code, reason, .. } => {
            *code == Code::Unavailable && **reason == *ErrorReason::UPSTREAM_ERROR.name()
        }
        Error::Argument { .. }
        | Error::NotFound { .. }
        | Error::Unsupported { .. }
        | Error::Denied { .. }
        | Error::Unavailable { .. }
        | Error::RateLimited { .. }
        | Error::Unimplemented { .. } => true,
        _ => false,
    }
}

fn early_end(error: &Error) -> Option<EarlyEnd> {
    match error.code() {
        // By its reason, because its code is `unavailable`, which is a failure otherwise.
        _ if error.known_reason() == ErrorReason::QUEUE_TIMEOUT => Some(EarlyEnd::Timeout),
        Code::DeadlineExceeded => Some(EarlyEnd::Timeout),
        Code::Cancelled => Some(EarlyEnd::Client),
        _ => None,
    }
}

/// Whether a script cuts the transport. An upstream's output may be truncated as well, and that is an error with a text.
fn is_cut(error: &Error) -> bool {
    let cuts = [ErrorReason::CUT_CLOSE, ErrorReason::CUT_RESET];
    error.code() == Code::Truncated && cuts.contains(&error.known_reason())
}
