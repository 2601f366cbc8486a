//! LMTP in the body of one HTTP request, `POST /lmtp` (LM-113 to LM-115).
//!
//! ```text
//!   request body ─ lines │ array ─► ConnectionDriver, in a task of its own ─ lines │ events ─► channel of one ─► response body
//! ```
//!
//! A request body may be silent while anything runs that it asked for. A response whose request broke off, or whose
//! reader is too slow, breaks off too, so that no client takes it for a complete one.
//!
//! The task is dropped with the response, so a client that disconnects cancels everything (LM-115). A client that does
//! not read stops the driver at the channel, while its timers go on (LM-607).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use bytestring::ByteString;
use futures::{StreamExt, future, stream};
use http::{HeaderMap, Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use sapwood_kernel::pool::{BlockingPool, TaskSize};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::PollSender;
use tokio_util::task::AbortOnDropHandle;

use super::array_input::ArrayInput;
use super::context::{LmtpClientInfo, LmtpContext};
use super::driver::{
    ClientClosed, ConnectionDriver, ConversationEnd, LmtpInput, LmtpTransport, OFFLOAD_BYTES,
};
use super::line_input::LineInput;
use crate::auth::caller::Caller;
use crate::faces::cut_body::flush_before_error;
use crate::http::body_budget::Reservation;
use crate::http::intake::{BodyFailure, BodyIntake};
use crate::http::rejection::Rejection;
use crate::http::request_trace;

/// The messages of a request body, each of at most `max` bytes.
async fn input(
    headers: &HeaderMap,
    body: Body,
    max: usize,
    intake: Option<&BodyIntake>,
) -> Result<PostInput, Rejection> {
    // An array has to be complete before it can be parsed. Lines are acted on as they arrive (LM-113).
    if media_type(headers, header::CONTENT_TYPE) == "application/json" {
        return array(body, max, intake).await;
    }
    Ok(PostInput::Lines {
        body: body.into_data_stream(),
        lines: LineInput::new(max),
    })
}

/// The handler of `POST /lmtp`.
pub(super) async fn answer(
    context: Arc<LmtpContext>,
    request: Request<Body>,
) -> Result<Response, Rejection> {
    let (parts, body) = request.into_parts();
    let caller = Caller::of(&parts.extensions)?.clone();
    let position = context.admit(&caller.identity)?;
    let form = PostFormat::of(&parts.headers);
    let max = context.config.limits.max_message_in;
    let intake: Option<Arc<BodyIntake>> = parts.extensions.get().cloned();
    let incoming = input(&parts.headers, body, max, intake.as_deref()).await?;
    let query = parts.uri.query().unwrap_or_default();
    let connection = LmtpClientInfo {
        bare: query.split('&').any(|pair| pair == "items=object"),
        caller: Some(caller),
        ..LmtpClientInfo::of_lines()
    };
    let whole = Arc::new(AtomicBool::new(false));
    // One piece in flight: the task stops sending while the client does not read.
    let (sender, receiver) = mpsc::channel(1);
    let mut conversation = ConnectionDriver::new(&context, connection);
    let mut wire = PostTransport {
        incoming,
        intake: intake.clone(),
        form,
        out: BytesMut::new(),
        sender: PollSender::new(sender),
        ping: form.ping(),
    };
    let sent_whole = Arc::clone(&whole);
    let task = tokio::spawn(request_trace::carry(async move {
        let end = std::future::poll_fn(|cx| {
            let end = conversation.poll_end(&mut wire, cx);
            // While streams run the client has nothing to send, and the pause timer of its body must not end them.
            let busy = conversation.is_busy();
            if intake.as_ref().is_some_and(|it| it.exempt(busy)) {
                // The body starts or stops its timer only where it is polled.
                cx.waker().wake_by_ref();
            }
            end
        });
        let end = end.await;
        // Ends what still runs before the last messages are awaited: a slow reader of these must not keep a slot of the
        // engine.
        drop(conversation);
        if matches!(end, ConversationEnd::Close(_)) {
            // Before the last bytes are sent: the body ends when the sender is dropped, and reads this flag then.
            // Without it the response counts as cut off.
            sent_whole.store(true, Ordering::Relaxed);
            wire.form.end(&mut wire.out);
            // A client that does not take the last messages by then goes without them (LM-505).
            let sent = std::future::poll_fn(|cx| wire.poll_sent(cx));
            let _ = timeout(GOODBYE, sent).await;
        }
        drop(position);
    }));
    // Dropped with the response, which aborts the task.
    let task = AbortOnDropHandle::new(task);
    let end = async move {
        drop(task);
        // Relaxed is enough: the channel's close orders the store before this load.
        let cut = || io::Error::other("the LMTP connection ended before all streams had");
        (!whole.load(Ordering::Relaxed)).then(|| Err(cut()))
    };
    let pieces = ReceiverStream::new(receiver).map(Ok);
    let pieces = pieces.chain(stream::once(end).filter_map(future::ready));
    let headers = [
        (header::CONTENT_TYPE, form.content_type()),
        (header::CACHE_CONTROL, "no-store"),
        (NO_BUFFERING, "no"),
    ];
    Ok((headers, Body::from_stream(flush_before_error(pieces))).into_response())
}

/// Reads a JSON array of pairs, and checks all of it before its first message is acted on.
async fn array(
    body: Body,
    max: usize,
    intake: Option<&BodyIntake>,
) -> Result<PostInput, Rejection> {
    let wrong = |why: String| {
        let message = format!("{why}: send [[\"TYPE\", {{..}}], ..], or lines as text/plain.");
        Rejection::new(
            Code::InvalidRequest,
            ErrorReason::custom("malformed"),
            message,
        )
    };
    let body = Limited::new(body, max).collect().await.map_err(|_| {
        let message = format!("The body has more than {max} bytes, or ended early.");
        Rejection::new(
            Code::LimitExceeded,
            ErrorReason::custom("message_too_large"),
            message,
        )
        .with_status(StatusCode::PAYLOAD_TOO_LARGE)
    })?;
    let check = |body: Bytes| {
        let text = ByteString::try_from(body).map_err(|_| "The body is no UTF-8".to_owned())?;
        ArrayInput::new(text)
    };
    let body = body.to_bytes();
    let input = if body.len() < OFFLOAD_BYTES {
        check(body)
    } else {
        // On another thread: the streams of other connections go on meanwhile (LM-607).
        let turn = request_trace::present_turn().caller;
        let size = TaskSize::of(body.len());
        let checked = BlockingPool::global().run_only(turn, size, move || check(body));
        // Not the client's mistake.
        checked.await.map_err(|error| {
            Rejection::new(error.code(), error.known_reason(), error.to_string())
        })?
    };
    Ok(PostInput::Array {
        input: input.map_err(wrong)?,
        // What was charged while the body arrived would be refunded when the response begins, and the text is held for
        // longer. Taken and not charged a second time: a request that waits for room beside its own charge waits for itself.
        charge: intake.map(BodyIntake::take_kept).unwrap_or_default(),
    })
}

/// The input of a request body.
enum PostInput {
    Lines {
        body: BodyDataStream,
        lines: LineInput,
    },
    Array {
        input: ArrayInput,
        /// Refunded with the text.
        charge: Vec<Reservation>,
    },
}

/// The format of the response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PostFormat {
    Lines,
    /// Server-sent events (LM-114).
    Events,
}

impl PostFormat {
    fn of(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).into_iter();
        let mut accepted = accepted.filter_map(|value| value.to_str().ok());
        if accepted.any(|value| value.contains("text/event-stream")) {
            Self::Events
        } else {
            Self::Lines
        }
    }

    const fn content_type(self) -> &'static str {
        match self {
            Self::Lines => "application/x-lmtp; charset=utf-8",
            Self::Events => "text/event-stream; charset=utf-8",
        }
    }

    /// Writes a message, which includes its line feed.
    fn write(self, message: &Bytes, out: &mut BytesMut) {
        if self == Self::Events {
            out.extend_from_slice(b"data: ");
        }
        out.extend_from_slice(message);
        // With the message's own line feed this is the blank line that ends an event.
        if self == Self::Events {
            out.extend_from_slice(b"\n");
        }
    }

    fn end(self, out: &mut BytesMut) {
        if self == Self::Events {
            out.extend_from_slice(b"event: done\ndata: {}\n\n");
        }
    }

    fn ping(self) -> Option<Pin<Box<Interval>>> {
        (self == Self::Events).then(|| {
            let mut ping = interval(PING);
            // After a long stop at the channel one ping is enough.
            ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
            // An interval is ready at once otherwise.
            ping.reset();
            Box::pin(ping)
        })
    }
}

/// The transport between both bodies.
struct PostTransport {
    incoming: PostInput,
    intake: Option<Arc<BodyIntake>>,
    form: PostFormat,
    out: BytesMut,
    sender: PollSender<Bytes>,
    ping: Option<Pin<Box<Interval>>>,
}

impl LmtpTransport for PostTransport {
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<LmtpInput> {
        match &mut self.incoming {
            PostInput::Array { input, charge } => {
                let next = input.next_input();
                // The last message has been taken, and what it started may go on for long.
                if matches!(next, LmtpInput::End) {
                    charge.clear();
                }
                Poll::Ready(next)
            }
            PostInput::Lines { body, lines } => loop {
                if let Some(input) = lines.next_input() {
                    return Poll::Ready(input);
                }
                match ready!(body.poll_next_unpin(cx)) {
                    Some(Ok(bytes)) => lines.push(&bytes),
                    None => lines.ended = true,
                    Some(Err(_)) => {
                        let failure = self.intake.as_ref().and_then(|it| it.failure());
                        return Poll::Ready(match failure {
                            Some(BodyFailure::Overloaded) => LmtpInput::Overloaded,
                            // Not an end of input: the request is incomplete, and the response must show that it is too.
                            _ => LmtpInput::Closed,
                        });
                    }
                }
            },
        }
    }

    fn poll_closed(&mut self, _: bool, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(ping) = &mut self.ping
            && ping.poll_tick(cx).is_ready()
        {
            self.out.extend_from_slice(b": ping\n\n");
        }
        // Seen without a waker: the response body is dropped together with this task.
        if self.sender.is_closed() {
            return Poll::Ready(());
        }
        Poll::Pending
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        if self.out.len() < WRITE_BYTES {
            return Poll::Ready(Ok(()));
        }
        self.poll_sent(cx)
    }

    fn send(&mut self, message: Bytes) -> Result<(), ClientClosed> {
        self.form.write(&message, &mut self.out);
        Ok(())
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        if self.out.is_empty() {
            return Poll::Ready(Ok(()));
        }
        // The slot first, and the bytes after it: what is written while the channel is full joins one piece.
        ready!(self.sender.poll_reserve(cx)).map_err(|_| ClientClosed)?;
        let bytes = self.out.split().freeze();
        Poll::Ready(self.sender.send_item(bytes).map_err(|_| ClientClosed))
    }
}

/// The media type of a header, without its parameters.
fn media_type(headers: &HeaderMap, name: header::HeaderName) -> String {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    let kind = value.unwrap_or_default().split(';').next();
    kind.unwrap_or_default().trim().to_ascii_lowercase()
}

const NO_BUFFERING: header::HeaderName = header::HeaderName::from_static("x-accel-buffering");
/// The interval of pings in a response of events (LM-114).
const PING: Duration = Duration::from_secs(15);
/// How long the last messages may take (LM-505).
const GOODBYE: Duration = Duration::from_secs(2);
/// Bytes from which on no more messages are taken while the response is not read.
const WRITE_BYTES: usize = 64 * 1024;
