//! WebSockets for every face: upgrade, message limits, pings, close (EV-705, D-32).
//!
//! Extensions are declined: there is no compression. Frame headers, close codes and the handshake's key are tungstenite's; the
//! buffers are ours, because buffers that suit large messages are too much for ten thousand idle connections (EV-981, EV-982).
//!
//! ```text
//!   GET ─ accept ─► 101 ─► the connection's task runs `serve` ─► messages ─► last messages ─► Close ─► the peer's Close
//! ```

mod carrier;
#[cfg(feature = "echo")]
pub mod echo;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod handshake;
mod reader;
mod writer;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::{BufMut, Bytes};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header};
use hyper::upgrade::OnUpgrade;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use self::carrier::{PeekConnection, SocketIo};
use self::handshake::{asks_for_websocket, has_token, tokens};
use self::reader::{FrameReader, ReadFrame};
use self::writer::{FrameKind, FrameWriter};
use crate::http::body_budget::{BudgetFull, FREE, Reservation};
use crate::http::intake::BodyIntake;
use crate::http::rejection::Rejection;
use crate::http::request_trace::{self, RequestTrace};
use crate::http::upload_pace::LEAST_BYTES;
use crate::listener::upgrade::UpgradeSlot;

/// An upgrade that may be accepted.
pub(crate) struct UpgradeRequest {
    key: HeaderValue,
    offered: Vec<String>,
    upgrade: OnUpgrade,
    slot: UpgradeSlot,
    /// Charges its messages to the byte budget.
    reservation: Option<Reservation>,
}

/// Interval of pings, and how long a peer may be silent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keepalive {
    pub(crate) every: Duration,
    pub(crate) idle_timeout: Duration,
}

/// A complete message of the peer.
#[derive(Debug)]
pub(crate) enum SocketMessage {
    /// UTF-8.
    Text(Bytes),
    /// Bytes.
    Binary(Bytes),
}

/// Why nothing more can be received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketLoss {
    /// The peer has closed normally: with the code 1000, or with none.
    Left,
    /// The connection is gone, or the peer has closed it for another reason.
    Closed,
    /// A message is larger than allowed.
    TooLarge,
    /// A text message is not UTF-8.
    NotText,
    /// The peer has sent an invalid frame.
    Broken,
    /// There was no room for a message in the byte budget (D-47).
    Overloaded,
}

impl UpgradeRequest {
    /// Checks a request.
    ///
    /// # Errors
    /// 426 for a request that does not ask for a WebSocket of version 13, 400 for a malformed one.
    pub(crate) fn of(request: &mut Request<Body>) -> Result<Self, Rejection> {
        let headers = request.headers();
        let version = headers.get(header::SEC_WEBSOCKET_VERSION);
        let dialect = version.is_some_and(|version| version == VERSION);
        let upgradable = request.version() == Version::HTTP_11 && request.method() == Method::GET;
        if !asks_for_websocket(headers) || !dialect || !upgradable {
            let message =
                "This path serves WebSockets: request an upgrade, version 13, over HTTP/1.1.";
            return Err(Rejection::new(
                Code::InvalidRequest,
                ErrorReason::UPGRADE_REQUIRED,
                message,
            )
            .with_status(StatusCode::UPGRADE_REQUIRED));
        }
        let malformed = |what| Rejection::new(Code::InvalidRequest, ErrorReason::BAD_UPGRADE, what);
        if !has_token(headers, header::CONNECTION, "upgrade") {
            return Err(malformed("The header Connection must contain Upgrade."));
        }
        let Some(key) = headers.get(header::SEC_WEBSOCKET_KEY).cloned() else {
            return Err(malformed("The header Sec-WebSocket-Key is missing."));
        };
        // A body would be read as frames here and as a body by a proxy on the way, which is a way to smuggle requests.
        let length = headers.get(header::CONTENT_LENGTH);
        if headers.contains_key(header::TRANSFER_ENCODING) || length.is_some_and(|it| it != "0") {
            return Err(malformed("A WebSocket handshake must not have a body."));
        }
        let offered = tokens(headers, header::SEC_WEBSOCKET_PROTOCOL);
        let offered = offered.map(ToOwned::to_owned).collect();
        // The slot and hyper's upgrade are taken out, because both can be used only once.
        let extensions = request.extensions_mut();
        let intake = extensions.get::<Arc<BodyIntake>>();
        let reservation = intake.map(|intake| intake.reserve());
        let (Some(upgrade), Some(slot)) = (extensions.remove(), extensions.remove()) else {
            return Err(malformed("This connection cannot be upgraded."));
        };
        Ok(Self {
            key,
            offered,
            upgrade,
            slot,
            reservation,
        })
    }

    /// The subprotocols that the client offers, in its order.
    pub(crate) fn offered(&self) -> impl Iterator<Item = &str> {
        self.offered.iter().map(String::as_str)
    }

    /// Accepts with the chosen subprotocol; `serve` runs in the connection's task. Messages may have up to
    /// `message_bytes_max` bytes.
    pub(crate) fn accept<F>(
        self,
        subprotocol: Option<&'static str>,
        message_bytes_max: usize,
        keepalive: Keepalive,
        serve: impl FnOnce(Box<WebSocket>) -> F + Send + 'static,
    ) -> Response<Body>
    where
        F: Future<Output = ()> + Send,
    {
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = answer.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        if let Ok(accept) = derive_accept_key(self.key.as_bytes()).parse() {
            headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        }
        if let Some(name) = subprotocol {
            let name = HeaderValue::from_static(name);
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, name);
        }
        let upgrade = self.upgrade;
        let reservation = self.reservation;
        // hyper sends the 101 after this function returns, and only then releases the socket: this future runs in the
        // connection's task, after HTTP (`listener::serve`).
        let serving = async move {
            // Fails if the connection broke before the 101 was sent: then there is nothing to serve.
            if let Ok(upgraded) = upgrade.await {
                let (io, ahead) = carrier::socket(upgraded);
                let mut socket = WebSocket::new(io, ahead, message_bytes_max, keepalive);
                socket.reservation = reservation;
                serve(Box::new(socket)).await;
            }
        };
        let revocation = RequestTrace::present().and_then(|trace| trace.revocation());
        self.slot.leave(request_trace::carry(async move {
            match revocation {
                // The middleware's own `within` ended with the 101. The face has sent its error by the time this cuts.
                Some(revocation) => drop(revocation.within(serving).await),
                None => serving.await,
            }
        }));
        answer
    }
}

/// A connection that has become a WebSocket.
pub(crate) struct WebSocket<S = SocketIo> {
    io: S,
    reader: FrameReader,
    /// The charge for the bytes that are held in `reader`; adjusted whenever more is to be read.
    reservation: Option<Reservation>,
    writer: FrameWriter,
    /// The payload of the last unanswered ping; earlier ones are not answered (RFC 6455, section 5.5.3).
    pong: Option<Bytes>,
    keepalive: Keepalive,
    /// When anything was received last, pongs included.
    last_received: Instant,
    /// Something was received since `last_received` was set: the clock is not read for every message.
    stirred: bool,
    /// Number of complete messages.
    messages: u64,
    /// The incomplete message at the last check.
    under_way: Option<UnderWay>,
    /// When the next ping is due.
    ping_at: Instant,
    timer: Pin<Box<Sleep>>,
    /// Why nothing is read any more.
    lost: Option<SocketLoss>,
    /// A Close was sent or queued: nothing may be sent after it.
    closed: bool,
    /// Something was queued or written, and not flushed.
    unflushed: bool,
}

/// An incomplete message.
struct UnderWay {
    /// The number of messages before it, which identifies it.
    before: u64,
    /// Bytes of it at the last check that found enough progress.
    bytes: usize,
    /// The time of that check.
    moved: Instant,
    /// The time of the first check that found it.
    since: Instant,
}

impl<S: AsyncRead + AsyncWrite + PeekConnection + Unpin> WebSocket<S> {
    /// A WebSocket over `io`, of which hyper has already read `ahead`.
    pub(crate) fn new(
        io: S,
        ahead: Vec<u8>,
        message_bytes_max: usize,
        keepalive: Keepalive,
    ) -> Self {
        let now = Instant::now();
        Self {
            io,
            reader: FrameReader::new(ahead, message_bytes_max),
            reservation: None,
            writer: FrameWriter::default(),
            pong: None,
            keepalive,
            last_received: now,
            stirred: false,
            messages: 0,
            under_way: None,
            ping_at: now + keepalive.every,
            timer: Box::pin(sleep_until(now + keepalive.every)),
            lost: None,
            closed: false,
            unflushed: false,
        }
    }

    /// Receives the next message. The caller polls [`Self::poll_alive`] too, which sends what this leaves to be sent.
    pub(crate) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<SocketMessage, SocketLoss>> {
        if let Some(lost) = self.lost {
            return Poll::Ready(Err(lost));
        }
        loop {
            let lost = match self.reader.next() {
                Ok(Some(sent)) => {
                    self.stirred = true;
                    // Control frames may come within a message, so they do not count as its end.
                    if matches!(sent, ReadFrame::Text(_) | ReadFrame::Binary(_)) {
                        self.messages += 1;
                    }
                    match sent {
                        ReadFrame::Text(text) => return Poll::Ready(Ok(SocketMessage::Text(text))),
                        ReadFrame::Binary(bytes) => {
                            return Poll::Ready(Ok(SocketMessage::Binary(bytes)));
                        }
                        ReadFrame::Ping(data) => {
                            self.pong = Some(data);
                            continue;
                        }
                        ReadFrame::Pong => continue,
                        ReadFrame::Close(code) => self.left(code, cx),
                    }
                }
                Ok(None) => match self.poll_more(cx) {
                    Poll::Ready(Ok(true)) => continue,
                    Poll::Ready(Ok(false)) => SocketLoss::Closed,
                    Poll::Ready(Err(BudgetFull)) => {
                        // Its charge was refunded, so the bytes have to go as well.
                        self.reader = FrameReader::new(Vec::new(), 0);
                        SocketLoss::Overloaded
                    }
                    Poll::Pending => {
                        // Nothing has arrived: memory that a large message needed is freed now, because ten thousand
                        // connections may be idle at a time (EV-982).
                        self.reader.rest();
                        self.settle();
                        // Only when reading has to wait: of many pings that arrive together only the last is answered.
                        if self.pong.is_some() {
                            // An error means that the peer is gone, which reading will show.
                            let _ = self.poll_sent(cx);
                        }
                        return Poll::Pending;
                    }
                },
                Err(lost) => lost,
            };
            self.lost = Some(lost);
            return Poll::Ready(Err(lost));
        }
    }

    /// Reads what has arrived, as soon as the bytes before are charged; `Ok(false)` at the end of the connection.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, BudgetFull>> {
        let retained = self.reader.held_bytes();
        if let Some(reservation) = &mut self.reservation {
            ready!(reservation.poll_hold(retained, cx))?;
        }
        // Limited, because these bytes are charged only before the next read.
        let mut room = self.reader.room().limit(READ_BYTES);
        let read = pin!(self.io.read_buf(&mut room));
        let more = matches!(ready!(read.poll(cx)), Ok(read) if read > 0);
        self.reader.came();
        // Every byte is a sign of life: a client that is busy sending a large message may not send pongs.
        self.stirred |= more;
        Poll::Ready(Ok(more))
    }

    /// The peer has sent a Close, which is answered with its code.
    fn left(&mut self, code: Option<CloseCode>, cx: &mut Context<'_>) -> SocketLoss {
        if !std::mem::replace(&mut self.closed, true) {
            let code = code.map(|code| u16::from(code).to_be_bytes());
            let echo = code.map_or_else(Bytes::new, |code| Bytes::copy_from_slice(&code));
            // No pong after the Close.
            self.pong = None;
            self.put(FrameKind::Close, echo);
            // What is pending or fails here does not matter: a peer that has closed need not read any more.
            let _ = self.poll_sent(cx);
        }
        let well = code.is_none_or(|code| code == CloseCode::Normal);
        if well {
            SocketLoss::Left
        } else {
            SocketLoss::Closed
        }
    }

    /// Sets `last_received` if anything was received since it was set.
    fn settle(&mut self) {
        if std::mem::take(&mut self.stirred) {
            self.last_received = Instant::now();
        }
    }

    /// Receives the next message, and sends pings meanwhile.
    pub(crate) async fn receive(&mut self) -> Result<SocketMessage, SocketLoss> {
        std::future::poll_fn(|cx| {
            if self.poll_alive(false, cx).is_ready() {
                return Poll::Ready(Err(SocketLoss::Closed));
            }
            self.poll_receive(cx)
        })
        .await
    }

    /// Waits until the write buffer has room, so that messages do not pile up.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketLoss>> {
        if self.writer.len() < WRITE_BYTES {
            return Poll::Ready(Ok(()));
        }
        let written = ready!(self.writer.poll_write(Pin::new(&mut self.io), cx));
        Poll::Ready(written.map_err(|_| SocketLoss::Closed))
    }

    /// Queues a message; text must be UTF-8. Poll [`Self::poll_room`] before, and [`Self::poll_sent`] after the last one.
    pub(crate) fn send(&mut self, bytes: Bytes, is_text: bool) -> Result<(), SocketLoss> {
        if self.closed {
            return Err(SocketLoss::Closed);
        }
        // The pong first: a client that measures the latency with pings must not wait for a long message.
        self.put_pong();
        self.put(
            if is_text {
                FrameKind::Text
            } else {
                FrameKind::Binary
            },
            bytes,
        );
        Ok(())
    }

    fn put(&mut self, kind: FrameKind, payload: Bytes) {
        self.writer.put(kind, payload);
        self.unflushed = true;
    }

    /// Queues the pong for the last ping, if there is room: a client that sends pings and reads nothing must not fill memory.
    fn put_pong(&mut self) {
        if self.writer.len() < WRITE_BYTES
            && let Some(data) = self.pong.take()
            && !self.closed
        {
            self.put(FrameKind::Pong, data);
        }
    }

    /// Writes and flushes everything that is queued.
    pub(crate) fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketLoss>> {
        self.put_pong();
        if !self.unflushed {
            return Poll::Ready(Ok(()));
        }
        let mut io = Pin::new(&mut self.io);
        let sent = match ready!(self.writer.poll_write(io.as_mut(), cx)) {
            Ok(()) => ready!(io.poll_flush(cx)),
            failed => failed,
        };
        // After an error something is still queued, and the next call has to fail as well.
        self.unflushed = sent.is_err();
        Poll::Ready(sent.map_err(|_| SocketLoss::Closed))
    }

    /// Whether an incomplete message has got less than [`LEAST_BYTES`] for as long as a peer may be silent, or is not complete
    /// after [`MESSAGE_TIME`]. Pongs keep a connection alive, but an incomplete message is charged to the byte budget (D-47).
    fn stands_still(&mut self, deaf: bool, now: Instant) -> bool {
        let bytes = self.reader.held_bytes();
        let before = self.messages;
        // While we do not read, the message stands still because of us.
        if deaf || bytes == 0 {
            self.under_way = None;
            return false;
        }
        match &mut self.under_way {
            Some(seen) if seen.before == before => {
                let more = bytes.saturating_sub(seen.bytes);
                // Up to `FREE` bytes are not charged, and may arrive as slowly as they like.
                if more >= LEAST_BYTES || more > 0 && bytes <= FREE {
                    seen.bytes = bytes;
                    seen.moved = now;
                }
                now.duration_since(seen.moved) >= self.keepalive.idle_timeout
                    || now.duration_since(seen.since) >= MESSAGE_TIME
            }
            seen => {
                *seen = Some(UnderWay {
                    before,
                    bytes,
                    moved: now,
                    since: now,
                });
                false
            }
        }
    }

    /// Sends pings; resolves when the peer is gone, or has been silent for too long. `deaf`: reading is paused. Then the peer's
    /// silence does not count, but it is still noticed when it has closed the connection (EV-802, D-28).
    pub(crate) fn poll_alive(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()> {
        // The timer may still be set to the next ping from before the pause.
        if deaf && self.timer.deadline() > Instant::now() + LOOK {
            self.timer.as_mut().reset(Instant::now() + LOOK);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            // Its pongs are among what we do not read, so a paused peer counts as alive until it is read again.
            self.stirred |= deaf;
            self.settle();
            let closed = deaf && self.io.is_closed();
            if closed || now.duration_since(self.last_received) >= self.keepalive.idle_timeout {
                return Poll::Ready(());
            }
            if now >= self.ping_at {
                if self.stands_still(deaf, now) {
                    return Poll::Ready(());
                }
                self.ping_at = now + self.keepalive.every;
                self.writer.rest();
                // A peer that does not read gets no pings: they would pile up. Its write stall is the face's business.
                if self.poll_room(cx).is_ready() && !self.closed {
                    self.put(FrameKind::Ping, Bytes::new());
                }
            }
            let next = if deaf { now + LOOK } else { self.ping_at };
            self.timer.as_mut().reset(next.min(self.ping_at));
        }
        // Whatever was queued goes out here, so that a face has one thing to poll while it waits.
        match self.poll_sent(cx) {
            Poll::Ready(Err(_)) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Sends a Close after everything else and waits for the peer's, within `limit`. What still arrives is read and discarded:
    /// closing over unread bytes would reset the connection, and the peer would lose what we have sent.
    pub(crate) async fn close(mut self: Box<Self>, code: u16, reason: String, limit: Duration) {
        // Already answered by `left`, or sent.
        if self.closed {
            return;
        }
        self.pong = None;
        self.put(FrameKind::Close, close_frame(code, &reason));
        self.closed = true;
        let goodbye = async {
            let sent = std::future::poll_fn(|cx| self.poll_sent(cx)).await;
            if sent.is_err() {
                return;
            }
            if self.lost.is_none() {
                while std::future::poll_fn(|cx| self.poll_receive(cx))
                    .await
                    .is_ok()
                {}
                return;
            }
            // Frames cannot be parsed any more, so the peer's Close cannot be found: the end of its bytes has to do.
            let io = &mut self.io;
            if io.shutdown().await.is_ok() {
                let mut scratch = [0; 1024];
                while io.read(&mut scratch).await.is_ok_and(|read| read > 0) {}
            }
        };
        // A peer that has not answered by then is disconnected.
        let _ = timeout(limit, goodbye).await;
    }
}

/// The payload of a Close; a reason that is too long is cut between two characters.
fn close_frame(code: u16, reason: &str) -> Bytes {
    let reason = &reason[..reason.floor_char_boundary(REASON_BYTES_MAX)];
    [&code.to_be_bytes(), reason.as_bytes()].concat().into()
}

const VERSION: &str = "13";
/// Maximum of bytes in one read.
const READ_BYTES: usize = 64 * 1024;
/// Bytes that may be queued before a sender has to wait.
const WRITE_BYTES: usize = 32 * 1024;
/// RFC 6455, section 5.5: a control frame has 125 bytes, two of them for the code.
const REASON_BYTES_MAX: usize = 123;
/// Time limit of one message: the same as the default for a request.
const MESSAGE_TIME: Duration = Duration::from_secs(600);
/// How often a peer is checked for a closed connection while reading is paused.
const LOOK: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
