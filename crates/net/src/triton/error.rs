//! Errors of a request to a Triton server.

use std::time::Duration;

use ::http::{HeaderMap, StatusCode};
use sapwood_proto::code::Code;

/// Why there is no response, or no further one.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The address is invalid; a retry cannot succeed.
    #[error("the server's address cannot be used: {0}")]
    Address(&'static str),
    /// The request cannot be encoded for its transport.
    #[error("the request cannot be sent: {0}")]
    Request(&'static str),
    /// The server does not answer, or the connection broke before any response.
    #[error("no answer from the server: {0}")]
    Unreachable(&'static str),
    /// The server returned an error.
    #[error("{}", .0.message)]
    Reply(ErrorReply),
    /// The response stream was cut before its end.
    #[error("the answer ended before it was finished")]
    Truncated,
    /// The response is invalid.
    #[error("the server violated the protocol: {0}")]
    Protocol(&'static str),
    /// The response exceeds a limit.
    #[error("{name} is limited to {max}")]
    Limit {
        /// The limit's name.
        name: &'static str,
        /// Its value.
        max: u64,
    },
}

/// An error that a server returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorReply {
    /// The kind of error.
    pub code: Code,
    /// Its text, one line, truncated to 1 KiB.
    pub message: String,
    /// When the server said to retry.
    pub retry_after: Option<Duration>,
    /// Whether responses were received before it.
    pub started: bool,
}

impl Error {
    /// Returns the closed code.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Address(_) | Self::Request(_) => Code::InvalidRequest,
            Self::Unreachable(_) => Code::Unavailable,
            Self::Reply(reply) => reply.code,
            Self::Truncated => Code::Truncated,
            Self::Protocol(_) | Self::Limit { .. } => Code::UpstreamFailed,
        }
    }

    /// Converts an HTTP response with this status.
    pub(super) fn of_http(status: StatusCode, headers: &HeaderMap, text: &str) -> Self {
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
        // From the most to the least precise: our own servers send their code, Triton's texts say more than its status.
        let code = header("sapwood-error")
            .and_then(Code::from_name)
            .or_else(|| by_text(text))
            .unwrap_or_else(|| by_status(status));
        let seconds = header("retry-after").and_then(|value| value.parse().ok());
        Self::Reply(ErrorReply {
            code: theirs(code),
            message: shown(
                text,
                status.canonical_reason().unwrap_or("the server failed"),
            ),
            // Bounded: the value is passed on to clients, who would wait for as long as a broken server says.
            retry_after: seconds.map(|seconds: u64| Duration::from_secs(seconds.min(3_600))),
            started: false,
        })
    }

    /// Converts the status of a call.
    pub(super) fn of_grpc(status: &tonic::Status, started: bool) -> Self {
        // An error with a cause below gRPC was not sent by the server.
        if std::error::Error::source(status).is_some() {
            tracing::debug!(cause = %status, "the connection was lost");
            return if started { Self::Truncated } else { LOST };
        }
        let code = match status.code() {
            // These would become `internal`, which means a defect of this server.
            tonic::Code::Unknown | tonic::Code::Internal | tonic::Code::DataLoss => {
                by_text(status.message()).unwrap_or(Code::UpstreamFailed)
            }
            code => by_text(status.message()).unwrap_or_else(|| Code::from_grpc(code as i32)),
        };
        Self::Reply(ErrorReply {
            code: theirs(code),
            message: shown(status.message(), "the server failed"),
            retry_after: None,
            started,
        })
    }

    /// Converts an error within a stream.
    pub(super) fn of_text(text: &str, started: bool) -> Self {
        Self::Reply(ErrorReply {
            code: by_text(text).unwrap_or(Code::UpstreamFailed),
            message: shown(text, "the server failed"),
            retry_after: None,
            started,
        })
    }
}

/// Texts that say more than the status: an unknown model is a 400 there (TR-204), and an error within a stream has no
/// status at all.
fn by_text(text: &str) -> Option<Code> {
    const TEXTS: [(&str, Code); 7] = [
        ("is not at ready state", Code::Unavailable),
        ("Request for unknown model", Code::NotFound),
        ("Exceeds maximum queue size", Code::Overloaded),
        ("Request timeout expired", Code::DeadlineExceeded),
        ("Request was cancelled", Code::Cancelled),
        (
            "exceeds the maximum allowed input size",
            Code::LimitExceeded,
        ),
        ("too many requests on this stream", Code::Overloaded),
    ];
    let found = TEXTS.iter().find(|(part, _)| text.contains(part));
    found.map(|(_, code)| *code)
}

const fn by_status(status: StatusCode) -> Code {
    match status.as_u16() {
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        408 | 504 => Code::DeadlineExceeded,
        409 => Code::AlreadyExists,
        413 => Code::LimitExceeded,
        429 => Code::RateLimited,
        499 => Code::Cancelled,
        501 => Code::Unimplemented,
        503 => Code::Unavailable,
        400..=499 => Code::InvalidRequest,
        _ => Code::UpstreamFailed,
    }
}

/// A defect of the remote server is not reported as a defect of this one.
const fn theirs(code: Code) -> Code {
    match code {
        Code::Internal => Code::UpstreamFailed,
        code => code,
    }
}

fn shown(text: &str, otherwise: &str) -> String {
    let text = if text.trim().is_empty() {
        otherwise
    } else {
        text.trim()
    };
    let mut line = String::with_capacity(text.len().min(MESSAGE_BYTES));
    for letter in text.chars() {
        if line.len() + letter.len_utf8() > MESSAGE_BYTES {
            break;
        }
        // The text goes into headers, logs and events, where a line end would begin something new.
        line.push(if letter.is_control() { ' ' } else { letter });
    }
    line
}

pub(super) const LOST: Error = Error::Unreachable("the connection was lost");
const MESSAGE_BYTES: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(error: Error) -> (Code, String, Option<u64>) {
        let Error::Reply(received) = error else {
            panic!("{error}");
        };
        (
            received.code,
            received.message,
            received.retry_after.map(|after| after.as_secs()),
        )
    }

    /// Section 15 in reverse; D-30.
    #[test]
    fn tr_1501_statuses_and_texts_have_one_code_each() {
        for (status, text, code) in [
            (400, "bad", Code::InvalidRequest),
            (
                400,
                "Request for unknown model: 'm' is not found",
                Code::NotFound,
            ),
            (400, "Request was cancelled", Code::Cancelled),
            (401, "", Code::Unauthenticated),
            (403, "", Code::PermissionDenied),
            (404, "", Code::NotFound),
            (405, "", Code::InvalidRequest),
            (408, "", Code::DeadlineExceeded),
            (429, "", Code::RateLimited),
            (500, "the parrot is tired", Code::UpstreamFailed),
            (501, "", Code::Unimplemented),
            (502, "", Code::UpstreamFailed),
            (
                503,
                "Request for unknown model: 'm' version 1 is not at ready state",
                Code::Unavailable,
            ),
            (
                503,
                "[request id: 1] Exceeds maximum queue size",
                Code::Overloaded,
            ),
            (
                503,
                "[request id: 1] Request timeout expired",
                Code::DeadlineExceeded,
            ),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            let error = Error::of_http(status, &HeaderMap::new(), text);
            assert_eq!(error.code(), code, "{status} {text}");
            assert!(!reply(error).1.is_empty());
        }
        for (status, code) in [
            (tonic::Code::InvalidArgument, Code::InvalidRequest),
            (tonic::Code::NotFound, Code::NotFound),
            (tonic::Code::Unavailable, Code::Unavailable),
            (tonic::Code::Unimplemented, Code::Unimplemented),
            (tonic::Code::Internal, Code::UpstreamFailed),
            (tonic::Code::Unknown, Code::UpstreamFailed),
            (tonic::Code::Cancelled, Code::Cancelled),
            (tonic::Code::ResourceExhausted, Code::LimitExceeded),
        ] {
            let error = Error::of_grpc(&tonic::Status::new(status, "x"), true);
            assert_eq!(error.code(), code, "{status:?}");
        }
        assert_eq!(Error::of_text("tired", true).code(), Code::UpstreamFailed);
    }

    /// The headers say more than status and text; TR-206.
    #[test]
    fn tr_206_the_headers_are_read_and_the_text_is_one_short_line() {
        let mut headers = HeaderMap::new();
        headers.insert("sapwood-error", "overloaded".parse().unwrap());
        headers.insert("retry-after", "7".parse().unwrap());
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let error = Error::of_http(status, &headers, "a\nb\0");
        assert_eq!(reply(error), (Code::Overloaded, "a b ".into(), Some(7)));
        headers.insert("sapwood-error", "internal".parse().unwrap());
        headers.insert("retry-after", "99999999".parse().unwrap());
        let long = "\u{e9}".repeat(2_000);
        let (code, text, after) = reply(Error::of_http(status, &headers, &long));
        assert_eq!(
            (code, text.len(), after),
            (Code::UpstreamFailed, 1_024, Some(3_600))
        );
    }

    #[test]
    fn tr_907_a_lost_connection_is_not_an_error_of_the_server() {
        let cut = || tonic::Status::from_error(Box::new(std::io::Error::other("reset")));
        assert_eq!(Error::of_grpc(&cut(), false), LOST);
        assert_eq!(Error::of_grpc(&cut(), true), Error::Truncated);
    }
}
