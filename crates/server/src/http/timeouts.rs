//! Timeouts of a request: for its body to arrive, and for its response to begin (OA-911).

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http::HeaderMap;
use hyper::body::{Body as _, Frame, SizeHint};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::time::{Instant, Sleep, sleep};

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

/// State shared by a body's timeout and its reader. Stands in the request's extensions.
#[derive(Debug, Default)]
pub(crate) struct BodyArrival {
    stalled: AtomicBool,
    exempt: AtomicBool,
}

impl BodyArrival {
    /// It has stopped arriving.
    pub(crate) fn has_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// Exempts the body from the idle timeout, or ends the exemption. Returns whether that is a change; the caller polls the
    /// body again then, because the timer is only started and stopped by a poll.
    pub(crate) fn exempt(&self, exempt: bool) -> bool {
        self.exempt.swap(exempt, Ordering::Relaxed) != exempt
    }
}

/// A body that may not pause for long.
pub(crate) struct TimedBody {
    body: Body,
    idle: Duration,
    /// Runs while nothing arrives.
    pause: Option<Pin<Box<Sleep>>>,
    arrival: Arc<BodyArrival>,
}

impl TimedBody {
    /// The body with an idle timeout, and the state that it shares with its reader.
    pub(crate) fn watching(body: Body, idle: Duration) -> (Body, Arc<BodyArrival>) {
        let arrival = Arc::new(BodyArrival::default());
        if body.is_end_stream() {
            return (body, arrival);
        }
        let arriving = Self {
            body,
            idle,
            pause: None,
            arrival: Arc::clone(&arrival),
        };
        (Body::new(arriving), arrival)
    }
}

impl hyper::body::Body for TimedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.pause = None;
            return Poll::Ready(frame);
        }
        if this.arrival.exempt.load(Ordering::Relaxed) {
            // Dropped and not paused: after the exemption the client gets a whole new limit.
            this.pause = None;
            return Poll::Pending;
        }
        let idle = this.idle;
        let pause = this.pause.get_or_insert_with(|| Box::pin(sleep(idle)));
        if pause.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        // The flag tells the middleware the cause: the error below reaches the handler, which may answer anything to it.
        this.arrival.stalled.store(true, Ordering::Relaxed);
        Poll::Ready(Some(Err(axum::Error::new("the body stopped arriving"))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

const HEADER: &str = "x-request-timeout-ms";
/// Ten years: longer than any process.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 86_400);

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use http_body_util::BodyExt;

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

    #[tokio::test(start_paused = true)]
    async fn oa_911_a_body_may_pause_up_to_its_limit() {
        let pieces = |pauses: [u64; 3]| {
            Body::from_stream(stream::unfold(0, move |index| async move {
                let pause = pauses.get(index)?;
                sleep(Duration::from_millis(*pause)).await;
                Some((Ok::<_, std::io::Error>(Bytes::from_static(b"x")), index + 1))
            }))
        };
        let limit = Duration::from_secs(30);
        for (pauses, arrives) in [
            // The limit applies to each pause, not to all together.
            ([29_999, 29_999, 29_999], true),
            ([0, 30_001, 0], false),
        ] {
            let (body, arrival) = TimedBody::watching(pieces(pauses), limit);
            let read = body.collect().await;
            assert_eq!(
                read.map(|all| all.to_bytes().len()).ok(),
                arrives.then_some(3)
            );
            assert_eq!(arrival.has_stalled(), !arrives, "{pauses:?}");
        }
        // One that is read as a stream may pause while what it asked for runs.
        let (body, arrival) = TimedBody::watching(pieces([600_000, 0, 29_999]), limit);
        assert!(arrival.exempt(true) && !arrival.exempt(true));
        let mut body = body.into_data_stream();
        assert!(body.next().await.unwrap().is_ok());
        assert!(arrival.exempt(false));
        assert!(body.next().await.unwrap().is_ok() && body.next().await.unwrap().is_ok());
        let (body, arrival) = TimedBody::watching(pieces([0, 600_000, 0]), limit);
        arrival.exempt(true);
        let mut body = body.into_data_stream();
        assert!(body.next().await.unwrap().is_ok());
        arrival.exempt(false);
        assert!(body.next().await.unwrap().is_err() && arrival.has_stalled());
        let (empty, _) = TimedBody::watching(Body::empty(), limit);
        assert!(empty.is_end_stream());
    }
}
