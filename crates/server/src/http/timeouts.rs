//! Timeouts of a request: for its body to arrive, and for its response to begin (OA-911).

use std::time::Duration;

use http::HeaderMap;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::time::Instant;

use crate::http::body_budget::FREE;
use crate::http::rejection::Rejection;
use crate::http::upload_pace::LEAST_BYTES;

/// Limits of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// A body may pause for this long. gRPC has its own rules: a session may be silent.
    pub body_idle: Duration,
    /// A request may take this long, or as long as it likes where this is zero (section 14 of the Triton face); a client may
    /// ask for less in `x-request-timeout-ms`.
    pub request: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            body_idle: Duration::from_secs(30),
            request: Duration::from_secs(600),
        }
    }
}

/// When a request must be over; stands in its extensions. The middleware answers a request whose response has not begun by
/// then; a face ends its own streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(pub Instant);

impl Config {
    /// The deadline of a request that begins now.
    ///
    /// # Errors
    /// `invalid-request` if the header is no positive number of milliseconds.
    pub(crate) fn deadline(&self, headers: &HeaderMap) -> Result<Deadline, Rejection> {
        let now = Instant::now();
        // A far deadline and not an `Option`, whose absence every face would have to handle.
        let most = match self.request {
            Duration::ZERO => FOREVER,
            limit => limit,
        };
        let Some(asked) = headers.get(HEADER) else {
            return Ok(Deadline(now + most));
        };
        let milliseconds = asked.to_str().ok().and_then(|text| text.parse().ok());
        match milliseconds {
            // Lower only (OA-911); an unreadable value is refused, because a client that asks for a limit relies on it.
            Some(1_u64..) => {
                let asked = Duration::from_millis(milliseconds.unwrap_or(u64::MAX));
                Ok(Deadline(now + asked.min(most)))
            }
            _ => Err(Rejection::new(
                Code::InvalidRequest,
                ErrorReason::INVALID_VALUE,
                "The header x-request-timeout-ms must be a number of milliseconds, 1 or more.",
            )),
        }
    }
}

/// The answer to a request whose deadline passed before its response began.
pub(crate) fn too_late() -> Rejection {
    let message = "The time allowed for this request has passed.";
    // 500 and not 504, as section 15 of the OpenAI page has it; official clients retry both.
    Rejection::new(Code::DeadlineExceeded, ErrorReason::TIMEOUT, message)
        .with_status(http::StatusCode::INTERNAL_SERVER_ERROR)
}

/// The answer to a request whose body stopped arriving.
pub(crate) fn stalled() -> Rejection {
    let message = "The body of this request stopped arriving.";
    Rejection::new(Code::InvalidRequest, ErrorReason::REQUEST_TIMEOUT, message)
        .with_status(http::StatusCode::REQUEST_TIMEOUT)
}

/// The answer to a request whose body arrived too slowly for what it held.
pub(crate) fn slow() -> Rejection {
    let message = format!(
        "The body of this request arrives too slowly: of more than {FREE} bytes, {LEAST_BYTES} must come in the time that it may pause."
    );
    Rejection::new(Code::InvalidRequest, ErrorReason::REQUEST_TIMEOUT, message)
        .with_status(http::StatusCode::REQUEST_TIMEOUT)
}

const HEADER: &str = "x-request-timeout-ms";
/// Ten years: longer than any process.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 86_400);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn oa_911_a_client_may_lower_the_timeout_of_its_request_but_not_raise_it() {
        let now = Instant::now();
        for (limit, asked, seconds) in [
            (600, None, Some(600)),
            (600, Some("1000"), Some(1)),
            (600, Some("600000"), Some(600)),
            (600, Some("600001"), Some(600)),
            (600, Some("18446744073709551615"), Some(600)),
            (600, Some("0"), None),
            (600, Some("-5"), None),
            (600, Some("soon"), None),
            // None at all.
            (0, None, Some(FOREVER.as_secs())),
            (0, Some("700000"), Some(700)),
            (0, Some("18446744073709551615"), Some(FOREVER.as_secs())),
        ] {
            let config = Config {
                request: Duration::from_secs(limit),
                ..Config::default()
            };
            let mut headers = HeaderMap::new();
            if let Some(asked) = asked {
                headers.insert(HEADER, asked.parse().unwrap());
            }
            let deadline = config.deadline(&headers);
            let expect = seconds.map(|seconds| Deadline(now + Duration::from_secs(seconds)));
            assert_eq!(deadline.ok(), expect, "{limit} {asked:?}");
        }
    }
}
