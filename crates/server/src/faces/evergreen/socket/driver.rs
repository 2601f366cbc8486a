//! Drives one session on one WebSocket in one dialect (EV-710, EV-720, EV-730, EV-903).
//!
//! ```text
//!   socket ─ SocketMessages ─► session ─ outgoing ─► codec ─► socket    all polled by one task, in this order
//!   the session ends ─► last messages ─► Close       the peer disconnects ─► the session is dropped, and all that it runs
//!
//!   detached:  socket ─ inbox ─► session ─ outgoing ─► socket           a session that may outlive the connection has a
//!                                                                       task of its own (EV-940)
//! ```

mod detached;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use futures::future::{BoxFuture, FutureExt};
use futures::{Stream, StreamExt};
use sapwood_kernel::pool::{BlockingPool, PoolRun, TaskSize};
use sapwood_kernel::session::{Observe, OutgoingMessages, Session, SessionCommand};
use sapwood_proto::evergreen::socket::{Codec, FrameContent, ParsedFrame};
use sapwood_proto::evergreen::{Dialect, Reason, Status, WebSocketFrame, WireMessage};
use sapwood_proto::session::Side;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::faces::evergreen::unread;
use crate::http::request_trace;
use crate::websocket::{SocketLoss, SocketMessage, WebSocket};

pub(super) use self::detached::run_detached;

/// Runs a session that ends with its socket, until either side ends it.
pub(super) async fn run(
    session: Session<impl Observe>,
    orders: impl Stream<Item = SessionCommand> + Send + 'static,
    outgoing: OutgoingMessages,
    wire: Box<SocketTransport>,
) {
    let line = SharedTransport(Arc::new(Mutex::new(*wire)));
    let incoming = SocketMessages(line.clone());
    let conversation = SessionDriver {
        session: Some(session.run(incoming, orders).boxed()),
        outgoing,
        line: line.clone(),
        limit: None,
    };
    let ended = conversation.await;
    // The driver has dropped the session and its input by then, so this is the last reference to the transport. Without
    // an end the peer is gone, and there is nobody to send a Close to.
    let (Some(ended), Some(wire)) = (ended, Arc::into_inner(line.0)) else {
        return;
    };
    let wire = wire.into_inner().unwrap_or_else(PoisonError::into_inner);
    Box::pin(wire.end(ended.as_ref())).await;
}

/// A message of the socket as the codec reads it.
pub(super) fn frame(received: SocketMessage) -> WebSocketFrame {
    match received {
        SocketMessage::Text(text) => WebSocketFrame::Text(text),
        SocketMessage::Binary(bytes) => WebSocketFrame::Binary(bytes),
    }
}

/// The close code and the status of a socket that can receive no more; `None` if the client has disconnected.
pub(super) fn status(lost: SocketLoss) -> Option<(u16, Status)> {
    let (code, reason, message) = match lost {
        SocketLoss::Left | SocketLoss::Closed => return None,
        SocketLoss::TooLarge => (
            1009,
            Reason::MessageTooLarge,
            "a message is larger than max_message_bytes: send smaller ones",
        ),
        SocketLoss::NotText => (1007, Reason::BadMessage, "a text message is not UTF-8"),
        SocketLoss::Overloaded => (
            1013,
            Reason::EngineBusy,
            "the server has no room for this message: send it again later",
        ),
        SocketLoss::Broken => (
            1002,
            Reason::BadMessage,
            "the data is not a WebSocket frame of a client",
        ),
    };
    Some((code, Status::new(reason, message)))
}

/// What the session's input yields: a message, an abort, or `None` for a half-close.
type SocketItem = Option<Result<WireMessage, Status>>;

/// The content of a frame as an item for the session; `None` if it has none.
fn item(sent: Result<FrameContent, Status>) -> Option<SocketItem> {
    match sent {
        Ok(FrameContent::Message(message)) => Some(Some(Ok(message))),
        Ok(FrameContent::Finish) => Some(None),
        Ok(FrameContent::Nothing) => None,
        Ok(FrameContent::Abort(status)) | Err(status) => Some(Some(Err(status))),
    }
}

/// The socket with its codec.
pub(super) struct SocketTransport {
    socket: Box<WebSocket>,
    codec: Codec,
    buf: BytesMut,
    /// Read while the session did not want it. Never more than this one: beyond it a paused session pauses the network,
    /// while a Close behind it is still seen (EV-802, D-28).
    ahead: Option<SocketItem>,
    /// A long message that is being decoded on another thread. Nothing is received meanwhile, which keeps the order.
    reading: Option<PoolRun<Result<ParsedFrame, Status>>>,
    /// The session has looked for a message, found none, and waits.
    wanted: bool,
    /// The session was notified that no more input comes.
    input_ended: bool,
    /// Nothing more can be read; the close code for the reason.
    broken: Option<u16>,
    /// The peer has disconnected.
    lost: Option<PeerLoss>,
}

/// How a peer disconnected. A cut is what EV-940 waits for; a client that has left does not come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerLoss {
    /// It has closed in good order.
    Left,
    /// Its connection was cut.
    Cut,
}

impl SocketTransport {
    /// A driver for `socket` in `dialect`, with the message that was received already if it showed the dialect.
    pub(super) fn new(
        socket: Box<WebSocket>,
        dialect: Dialect,
        first: Option<WebSocketFrame>,
    ) -> Box<Self> {
        let mut wire = Box::new(Self {
            socket,
            codec: Codec::new(dialect, Side::Server),
            buf: BytesMut::new(),
            ahead: None,
            reading: None,
            wanted: false,
            input_ended: false,
            broken: None,
            lost: None,
        });
        wire.ahead = first.and_then(|frame| wire.read(frame));
        wire
    }

    /// The item of a frame; `None` if it has none, or is long: then it is decoded on another thread.
    fn read(&mut self, frame: WebSocketFrame) -> Option<SocketItem> {
        let unread = match self.codec.unread(frame) {
            Ok(unread) => unread,
            Err(status) => return item(Err(status)),
        };
        let size = TaskSize::of(unread.len());
        if size == TaskSize::Large {
            // Per caller, so that one with many long messages does not delay those of others.
            let turn = request_trace::present_turn().caller;
            self.reading = Some(BlockingPool::global().run_only(turn, size, move || unread.read()));
            return None;
        }
        item(unread.read().map(|parsed| self.codec.take(parsed)))
    }

    /// The item of a long message, as soon as it is decoded.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Option<SocketItem>> {
        let Some(reading) = &mut self.reading else {
            return Poll::Ready(None);
        };
        let read = ready!(reading.poll_unpin(cx));
        self.reading = None;
        let lost = |_logged| Err(unread());
        let parsed = read.unwrap_or_else(lost);
        // Only now: the codec's state changes in the order of the frames, and the pool has none.
        Poll::Ready(item(parsed.map(|parsed| self.codec.take(parsed))))
    }

    /// The dialect of the connection.
    pub(super) const fn dialect(&self) -> Dialect {
        self.codec.dialect()
    }

    /// The next item for the session. Once the peer is gone it is pending for ever: the driver drops the session then.
    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<SocketItem> {
        if let Some(item) = self.ahead.take() {
            return Poll::Ready(item);
        }
        if self.lost.is_some() {
            return Poll::Pending;
        }
        loop {
            if let Some(item) = ready!(self.poll_read(cx)) {
                return Poll::Ready(item);
            }
            match ready!(self.socket.poll_receive(cx)) {
                Ok(received) => {
                    if let Some(item) = self.read(frame(received)) {
                        return Poll::Ready(item);
                    }
                }
                Err(lost) => {
                    let Some((code, status)) = status(lost) else {
                        let left = lost == SocketLoss::Left;
                        self.lost = Some(if left { PeerLoss::Left } else { PeerLoss::Cut });
                        return Poll::Pending;
                    };
                    // The socket reports it at every poll, and the session gets it once: what is left is to close.
                    if self.broken.replace(code).is_some() {
                        return Poll::Pending;
                    }
                    return Poll::Ready(Some(Err(status)));
                }
            }
        }
    }

    /// Resolves when the peer is gone. Reads one message ahead for that, while the session does not read.
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.ahead.is_none() && self.lost.is_none() {
            match self.poll_item(cx) {
                // After its half-close or an error the peer can say nothing that counts; it is read to see the Close.
                Poll::Ready(_) if self.input_ended => {}
                Poll::Ready(item) => {
                    self.ahead = Some(item);
                    if self.wanted {
                        cx.waker().wake_by_ref();
                    }
                }
                Poll::Pending => break,
            }
        }
        // With an item in hand nothing more is read, pongs included: a peer must not count as silent for that.
        let deaf = self.ahead.is_some() || self.reading.is_some();
        if self.lost.is_some() || self.socket.poll_alive(deaf, cx).is_ready() {
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Sends what is ready; resolves with the session's end, once everything before it is in the socket's buffer.
    fn poll_send(
        &mut self,
        outgoing: &mut OutgoingMessages,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Arc<Status>>, SocketLoss>> {
        // One look at the clock for all that is sent together, and none where nothing is.
        let mut now = None;
        loop {
            // Room first: a message that is taken from the session and cannot be sent would be out of its bounds
            // (EV-803).
            if self.socket.poll_room(cx)?.is_pending() {
                return Poll::Pending;
            }
            match outgoing.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(message))) => {
                    let now = *now.get_or_insert_with(unix_micros);
                    self.codec.encode(&message, now, &mut self.buf);
                    self.send()?;
                }
                Poll::Ready(Some(Err(status))) => return Poll::Ready(Ok(Some(status))),
                Poll::Ready(None) => return Poll::Ready(Ok(None)),
                Poll::Pending => {
                    // Flushed only here: what was ready together leaves in one write, and nothing waits for a timer
                    // (EV-706).
                    let _ = self.socket.poll_sent(cx)?;
                    return Poll::Pending;
                }
            }
        }
    }

    fn send(&mut self) -> Result<(), SocketLoss> {
        let bytes = self.buf.split().freeze();
        // `split` keeps the allocation for the next message. After a large one it is dropped with what was sent, so
        // that an idle connection does not hold it (EV-982).
        if bytes.len() > RETAINED_BYTES {
            self.buf = BytesMut::new();
        }
        self.socket.send(bytes, self.codec.is_text())
    }

    /// Sends the last messages of the session and closes.
    pub(super) async fn end(mut self, status: Option<&Arc<Status>>) {
        let now = unix_micros();
        let words = match status {
            Some(status) => self.codec.abort(status, now),
            None if self.codec.finish(now, &mut self.buf) => vec![self.buf.split()],
            None => Vec::new(),
        };
        // Each in a message of its own: Action Engine clients hang where failures share one with `__abort__` (EV-739).
        for word in words {
            if self
                .socket
                .send(word.freeze(), self.codec.is_text())
                .is_err()
            {
                return;
            }
        }
        let close = self.codec.close(status.map(Arc::as_ref));
        // What the socket could not read has its own code (1009 for its size), whatever the session made of it.
        let code = self.broken.unwrap_or(close.code);
        self.socket.close(code, close.reason, LAST_WORDS).await;
    }
}

/// The transport, shared by the session's input and the driver around the session. Both are polled by one task, so
/// nothing ever waits for the lock.
#[derive(Clone)]
struct SharedTransport(Arc<Mutex<SocketTransport>>);

impl SharedTransport {
    fn wire(&self) -> MutexGuard<'_, SocketTransport> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The session's input.
struct SocketMessages(SharedTransport);

impl Stream for SocketMessages {
    type Item = Result<WireMessage, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<SocketItem> {
        let mut wire = self.0.wire();
        let polled = wire.poll_item(cx);
        // So that `poll_closed`, which reads one message ahead, knows that it has to wake the session for it.
        wire.wanted = polled.is_pending();
        wire.input_ended |= matches!(polled, Poll::Ready(None | Some(Err(_))));
        polled
    }
}

/// Session and socket together. Resolves with how the session ended, or with `None` if the peer has disconnected.
struct SessionDriver {
    session: Option<BoxFuture<'static, Option<Arc<Status>>>>,
    outgoing: OutgoingMessages,
    line: SharedTransport,
    /// The deadline of what is sent after the session's end.
    limit: Option<Pin<Box<Sleep>>>,
}

impl Future for SessionDriver {
    type Output = Option<Option<Arc<Status>>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(session) = &mut this.session
            && session.as_mut().poll(cx).is_ready()
        {
            // Dropped now, and not with the driver: a slow reader of the last messages must not keep its memory.
            this.session = None;
            let limit = Instant::now() + LAST_WORDS;
            this.limit = Some(Box::pin(sleep_until(limit)));
        }
        // After the session's poll, which takes the same lock in its input stream: its newest output is sent in this
        // turn.
        let mut wire = this.line.wire();
        // Sending comes before reading: answers to what was received go out although the peer has closed its side by
        // now.
        match wire.poll_send(&mut this.outgoing, cx) {
            Poll::Ready(Ok(end)) => return Poll::Ready(Some(end)),
            Poll::Ready(Err(_)) => return Poll::Ready(None),
            Poll::Pending => {}
        }
        if wire.poll_closed(cx).is_ready() {
            return Poll::Ready(None);
        }
        match &mut this.limit {
            Some(limit) => limit.as_mut().poll(cx).map(|()| None),
            None => Poll::Pending,
        }
    }
}

fn unix_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
    })
}

/// How long the last messages and the closing handshake may take together.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(10);
/// Size of a sent message, in bytes, up to which the buffer is kept for the next one.
const RETAINED_BYTES: usize = 4 * 1024;
