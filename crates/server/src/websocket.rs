//! WebSockets for every face: upgrade, message limits, pings, close (EV-705, D-32).
//!
//! Extensions are declined: there is no compression. Heads of frames, close codes and the handshake's key are the
//! library's; the memory around them is ours, because what is wide enough for large messages is too much for ten
//! thousand idle connections (EV-981, EV-982).
//!
//! ```text
//!   GET ─ asked ─► 101 ─► handed over to the connection's task ─► messages ─► last words ─► Close ─► the peer's Close
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
use self::handshake::{has_token, is_asked, tokens};
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
    /// What its messages are charged to.
    reservation: Option<Reservation>,
}

/// How often a peer is asked whether it is there, and how long it may be silent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keepalive {
    pub(crate) every: Duration,
    pub(crate) idle_timeout: Duration,
}

/// A whole message of the peer.
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
    /// The peer has closed in good order: with the code 1000, or with none.
    Left,
    /// The connection is gone, or the peer has closed it for another reason.
    Closed,
    /// A message is larger than allowed.
    TooLarge,
    /// A text message is not UTF-8.
    NotText,
    /// What came is no WebSocket frame.
    Broken,
    /// There was no room for a message in the byte budget (D-47).
    Overloaded,
}

impl UpgradeRequest {
    /// Looks at a request.
    ///
    /// # Errors
    /// 426 for a request that asks for no WebSocket of a version that we speak, 400 for a malformed one.
    pub(crate) fn of(request: &mut Request<Body>) -> Result<Self, Rejection> {
        let headers = request.headers();
        let version = headers.get(header::SEC_WEBSOCKET_VERSION);
        let dialect = version.is_some_and(|version| version == VERSION);
        let upgradable = request.version() == Version::HTTP_11 && request.method() == Method::GET;
        if !is_asked(headers) || !dialect || !upgradable {
            let message =
                "This address speaks WebSocket: ask for an upgrade, version 13, over HTTP/1.1.";
            return Err(Rejection::new(
                Code::InvalidRequest,
                ErrorReason::UPGRADE_REQUIRED,
                message,
            )
            .with_status(StatusCode::UPGRADE_REQUIRED));
        }
        let malformed = |what| Rejection::new(Code::InvalidRequest, ErrorReason::BAD_UPGRADE, what);
        if !has_token(headers, header::CONNECTION, "upgrade") {
            return Err(malformed("The header Connection does not say Upgrade."));
        }
        let Some(key) = headers.get(header::SEC_WEBSOCKET_KEY).cloned() else {
            return Err(malformed("The header Sec-WebSocket-Key is missing."));
        };
        // Its bytes would be read as frames here and as a body by a proxy on the way.
        let length = headers.get(header::CONTENT_LENGTH);
        if headers.contains_key(header::TRANSFER_ENCODING) || length.is_some_and(|it| it != "0") {
            return Err(malformed("A request that becomes a WebSocket has no body."));
        }
        let offered = tokens(headers, header::SEC_WEBSOCKET_PROTOCOL);
        let offered = offered.map(ToOwned::to_owned).collect();
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

    /// Accepts, with the subprotocol that was chosen; `serve` goes on in the connection's task. Messages have at most
    /// `message_bytes_max`.
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
        // The 101 is sent by hyper after this returns. What is left in the slot runs behind it, in the connection's task.
        let upgrade = self.upgrade;
        let reservation = self.reservation;
        // Only after the 101 has left hyper can the socket be had: this runs in the connection's task, behind HTTP
        // (`listener::serve`).
        let serving = async move {
            // The answer may have been lost on its way.
            if let Ok(upgraded) = upgrade.await {
                let (io, ahead) = SocketIo::of(upgraded);
                let mut socket = WebSocket::new(io, ahead, message_bytes_max, keepalive);
                socket.reservation = reservation;
                serve(Box::new(socket)).await;
            }
        };
        let revocation = RequestTrace::present().and_then(|trace| trace.revocation());
        self.slot.leave(request_trace::carry(async move {
            match revocation {
                // The face has said its last words by then, if it can.
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
    /// What is charged for the message that has not come whole; it is refunded when the next one is asked for.
    reservation: Option<Reservation>,
    writer: FrameWriter,
    /// The answer to the last ping; a client that sends many before it can be sent gets one for them all.
    pong: Option<Bytes>,
    keepalive: Keepalive,
    /// When anything came last, a pong included.
    last_received: Instant,
    /// Something was received since `last_received` was set: the clock is not read for every message.
    stirred: bool,
    /// Messages that have come whole.
    messages: u64,
    /// The message that had begun and not ended when that was looked at last.
    under_way: Option<UnderWay>,
    /// When the next ping is due.
    ping_at: Instant,
    timer: Pin<Box<Sleep>>,
    /// Why nothing is read any more.
    lost: Option<SocketLoss>,
    /// Either side has said goodbye: nothing may be said behind it.
    closed: bool,
    /// Something was written and not flushed.
    unflushed: bool,
}

/// A message that has begun.
struct UnderWay {
    /// Messages that came before it.
    before: u64,
    /// How much of it had come when it last came fast enough.
    bytes: usize,
    /// When that was seen.
    moved: Instant,
    /// When anything of it was first seen.
    since: Instant,
}

impl<S: AsyncRead + AsyncWrite + PeekConnection + Unpin> WebSocket<S> {
    /// `io`, of which `ahead` has been read.
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

    /// The next message.
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
                        // What it held was refunded.
                        self.reader = FrameReader::new(Vec::new(), 0);
                        SocketLoss::Overloaded
                    }
                    Poll::Pending => {
                        // Nothing has come: memory that a large message needed goes now, because ten thousand connections
                        // may rest at a time.
                        self.reader.rest();
                        self.settle();
                        // Only where reading has to wait: of many pings that came together the last is answered.
                        if self.pong.is_some() {
                            // If it fails, the peer is gone, which reading shows.
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

    /// Reads what has come, as soon as there is room for what came before; `Ok(false)` if nothing more can.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, BudgetFull>> {
        let retained = self.reader.held_bytes();
        if let Some(reservation) = &mut self.reservation {
            ready!(reservation.poll_hold(retained, cx))?;
        }
        // No more at a time than may come before it is charged.
        let mut room = self.reader.room().limit(READ_BYTES);
        let read = pin!(self.io.read_buf(&mut room));
        let more = matches!(ready!(read.poll(cx)), Ok(read) if read > 0);
        self.reader.came();
        // A client that is busy with a large message may have no time for pongs.
        self.stirred |= more;
        Poll::Ready(Ok(more))
    }

    /// The peer has sent a close frame, which is answered if it still reads.
    fn left(&mut self, code: Option<CloseCode>, cx: &mut Context<'_>) -> SocketLoss {
        if !std::mem::replace(&mut self.closed, true) {
            let code = code.map(|code| u16::from(code).to_be_bytes());
            let echo = code.map_or_else(Bytes::new, |code| Bytes::copy_from_slice(&code));
            self.pong = None;
            self.put(FrameKind::Close, echo);
            let _ = self.poll_sent(cx);
        }
        let well = code.is_none_or(|code| code == CloseCode::Normal);
        if well {
            SocketLoss::Left
        } else {
            SocketLoss::Closed
        }
    }

    /// Dates what came.
    fn settle(&mut self) {
        if std::mem::take(&mut self.stirred) {
            self.last_received = Instant::now();
        }
    }

    /// The next message.
    pub(crate) async fn receive(&mut self) -> Result<SocketMessage, SocketLoss> {
        std::future::poll_fn(|cx| {
            if self.poll_alive(false, cx).is_ready() {
                return Poll::Ready(Err(SocketLoss::Closed));
            }
            self.poll_receive(cx)
        })
        .await
    }

    /// Waits until a message can be sent without piling up.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketLoss>> {
        if self.writer.len() < WRITE_BYTES {
            return Poll::Ready(Ok(()));
        }
        let written = ready!(self.writer.poll_write(Pin::new(&mut self.io), cx));
        Poll::Ready(written.map_err(|_| SocketLoss::Closed))
    }

    /// Sends a message, text being UTF-8; ask [`Self::poll_room`] before, and [`Self::poll_sent`] after the last one.
    pub(crate) fn send(&mut self, bytes: Bytes, is_text: bool) -> Result<(), SocketLoss> {
        if self.closed {
            return Err(SocketLoss::Closed);
        }
        // The ping came before whatever this answers: a client that measures with it must not wait for a long message.
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

    /// Answers the last ping, if there is room: a client that sends pings and reads nothing must not fill memory.
    fn put_pong(&mut self) {
        if self.writer.len() < WRITE_BYTES
            && let Some(data) = self.pong.take()
            && !self.closed
        {
            self.put(FrameKind::Pong, data);
        }
    }

    /// Hands everything to the network.
    pub(crate) fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SocketLoss>> {
        self.put_pong();
        if !self.unflushed {
            return Poll::Ready(Ok(()));
        }
        let mut io = Pin::new(&mut self.io);
        let written = ready!(self.writer.poll_write(io.as_mut(), cx));
        let sent = match written {
            Ok(()) => ready!(io.poll_flush(cx)),
            Err(error) => Err(error),
        };
        self.unflushed = false;
        Poll::Ready(sent.map_err(|_| SocketLoss::Closed))
    }

    /// Whether less than [`LEAST_BYTES`] come of a message that has begun, for as long as a peer may be silent, or it is not
    /// whole after [`MESSAGE_TIME`]: pongs keep a connection, but what has come of the message is charged to the byte budget (D-47).
    fn stands_still(&mut self, deaf: bool, now: Instant) -> bool {
        let bytes = self.reader.held_bytes();
        let before = self.messages;
        if deaf || bytes == 0 {
            self.under_way = None;
            return false;
        }
        match &mut self.under_way {
            Some(seen) if seen.before == before => {
                let more = bytes.saturating_sub(seen.bytes);
                // Little is not charged, and may come as slowly as it likes.
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

    /// Sends pings; resolves when the peer is gone, or has been silent for too long. A peer that we do not listen to is not
    /// silent, but watched: nothing of it is read, and yet it is seen when it has closed (EV-802, D-28).
    pub(crate) fn poll_alive(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()> {
        if deaf && self.timer.deadline() > Instant::now() + LOOK {
            self.timer.as_mut().reset(Instant::now() + LOOK);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
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
                if self.poll_room(cx).is_ready() && !self.closed {
                    self.put(FrameKind::Ping, Bytes::new());
                }
            }
            let next = if deaf { now + LOOK } else { self.ping_at };
            self.timer.as_mut().reset(next.min(self.ping_at));
        }
        match self.poll_sent(cx) {
            Poll::Ready(Err(_)) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Sends a Close behind everything else and waits for the peer's, in all no longer than `limit`. What still comes
    /// is thrown away, so that the network does not throw away what we have said.
    pub(crate) async fn close(mut self: Box<Self>, code: u16, reason: String, limit: Duration) {
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
            let io = &mut self.io;
            if io.shutdown().await.is_ok() {
                let mut scratch = [0; 1024];
                while io.read(&mut scratch).await.is_ok_and(|read| read > 0) {}
            }
        };
        // A client that does not answer by then is disconnected.
        let _ = timeout(limit, goodbye).await;
    }
}

/// The payload of a Close; one too long is cut where a character ends.
fn close_frame(code: u16, reason: &str) -> Bytes {
    let reason = &reason[..reason.floor_char_boundary(REASON_BYTES_MAX)];
    [&code.to_be_bytes(), reason.as_bytes()].concat().into()
}

const VERSION: &str = "13";
/// Bytes that are read at a time.
const READ_BYTES: usize = 64 * 1024;
/// What is written together while there is more to write.
const WRITE_BYTES: usize = 32 * 1024;
/// RFC 6455, section 5.5.
const REASON_BYTES_MAX: usize = 123;
/// How long a message may be on its way: as long as a request by default.
const MESSAGE_TIME: Duration = Duration::from_secs(600);
/// How often a peer that is not listened to is looked at.
const LOOK: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
