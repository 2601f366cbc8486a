//! Drives one session on one WebSocket in one dialect (EV-710, EV-720, EV-730, EV-903).
//!
//! ```text
//!   socket ─ Incoming ─► session ─ outgoing ─► codec ─► socket        all polled by one task, in this order
//!   the session ends ─► last words ─► Close          the peer goes ─► the session is dropped, and all it runs
//!
//!   apart:  socket ─ inbox ─► session ─ outgoing ─► socket            a session that outlives the connection has a task
//!                                                                     of its own (EV-940)
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

/// Runs a session that ends with its socket, until either side has had enough.
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
    let (Some(ended), Some(wire)) = (ended, Arc::into_inner(line.0)) else {
        return;
    };
    let wire = wire.into_inner().unwrap_or_else(PoisonError::into_inner);
    Box::pin(wire.end(ended.as_ref())).await;
}

/// How the codec of the session reads a message of the socket.
pub(super) fn frame(received: SocketMessage) -> WebSocketFrame {
    match received {
        SocketMessage::Text(text) => WebSocketFrame::Text(text),
        SocketMessage::Binary(bytes) => WebSocketFrame::Binary(bytes),
    }
}

/// The error of what was received, and the close code; `None` if there is no client left to get it.
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
            "the server is reading as much as it may: send this again later",
        ),
        SocketLoss::Broken => (
            1002,
            Reason::BadMessage,
            "what came is no WebSocket frame of a client",
        ),
    };
    Some((code, Status::new(reason, message)))
}

/// What goes to the session.
type SocketItem = Option<Result<WireMessage, Status>>;

/// What is said is for the session; `None` if it is nothing.
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
    /// Read while the session did not want it: no more than this one, so that a pause is one for the network, and a
    /// Close behind it is still seen (EV-802, D-28).
    ahead: Option<SocketItem>,
    /// A long message that is decoded on another thread; nothing more is received until then.
    reading: Option<PoolRun<Result<ParsedFrame, Status>>>,
    /// The session has looked for a message, found none, and waits.
    wanted: bool,
    /// The session was notified that no more input comes.
    input_ended: bool,
    /// What comes can no longer be read, and how one closes for this reason.
    broken: Option<u16>,
    /// The peer is not there any more.
    lost: Option<PeerLoss>,
}

/// How a peer went.
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

    /// What a frame is for the session; `None` if it is nothing, or is long: then it is read elsewhere.
    fn read(&mut self, frame: WebSocketFrame) -> Option<SocketItem> {
        let unread = match self.codec.unread(frame) {
            Ok(unread) => unread,
            Err(status) => return item(Err(status)),
        };
        let size = TaskSize::of(unread.len());
        if size == TaskSize::Large {
            let turn = request_trace::present_turn().caller;
            self.reading = Some(BlockingPool::global().run_only(turn, size, move || unread.read()));
            return None;
        }
        item(unread.read().map(|parsed| self.codec.take(parsed)))
    }

    /// What a long message is for the session, as soon as it is read.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Option<SocketItem>> {
        let Some(reading) = &mut self.reading else {
            return Poll::Ready(None);
        };
        let read = ready!(reading.poll_unpin(cx));
        self.reading = None;
        let lost = |_logged| Err(unread());
        let parsed = read.unwrap_or_else(lost);
        Poll::Ready(item(parsed.map(|parsed| self.codec.take(parsed))))
    }

    /// In which dialect it speaks.
    pub(super) const fn dialect(&self) -> Dialect {
        self.codec.dialect()
    }

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
                    // The socket reports it for ever, the session gets it once: what is left is to close.
                    if self.broken.replace(code).is_some() {
                        return Poll::Pending;
                    }
                    return Poll::Ready(Some(Err(status)));
                }
            }
        }
    }

    /// Looks whether the peer is still there, where the session does not look.
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.ahead.is_none() && self.lost.is_none() {
            match self.poll_item(cx) {
                // What comes after the end means nothing.
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
        let deaf = self.ahead.is_some() || self.reading.is_some();
        if self.lost.is_some() || self.socket.poll_alive(deaf, cx).is_ready() {
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Sends what there is; resolves with the end of it.
    fn poll_send(
        &mut self,
        outgoing: &mut OutgoingMessages,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Arc<Status>>, SocketLoss>> {
        // One look at the clock for all that is sent together, and none where nothing is.
        let mut now = None;
        loop {
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
                    let _ = self.socket.poll_sent(cx)?;
                    return Poll::Pending;
                }
            }
        }
    }

    fn send(&mut self) -> Result<(), SocketLoss> {
        let bytes = self.buf.split().freeze();
        // One large message must not cost every idle connection its memory.
        if bytes.len() > RETAINED_BYTES {
            // Its memory goes when it is written.
            self.buf = BytesMut::new();
        }
        self.socket.send(bytes, self.codec.is_text())
    }

    /// Says the last words and closes.
    pub(super) async fn end(mut self, status: Option<&Arc<Status>>) {
        let now = unix_micros();
        let words = match status {
            Some(status) => self.codec.abort(status, now),
            None if self.codec.finish(now, &mut self.buf) => vec![self.buf.split()],
            None => Vec::new(),
        };
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
        let code = self.broken.unwrap_or(close.code);
        self.socket.close(code, close.reason, LAST_WORDS).await;
    }
}

/// The wire, shared by the session's input and the conversation around it. Both are polled by one task, so nobody ever
/// waits for the lock.
#[derive(Clone)]
struct SharedTransport(Arc<Mutex<SocketTransport>>);

impl SharedTransport {
    fn wire(&self) -> MutexGuard<'_, SocketTransport> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the session reads.
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

/// Session and socket together. Resolves with how the session ended, or with nothing if the peer has gone.
struct SessionDriver {
    session: Option<BoxFuture<'static, Option<Arc<Status>>>>,
    outgoing: OutgoingMessages,
    line: SharedTransport,
    /// How long what is said after the session's end may take.
    limit: Option<Pin<Box<Sleep>>>,
}

impl Future for SessionDriver {
    type Output = Option<Option<Arc<Status>>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(session) = &mut this.session
            && session.as_mut().poll(cx).is_ready()
        {
            this.session = None;
            let limit = Instant::now() + LAST_WORDS;
            this.limit = Some(Box::pin(sleep_until(limit)));
        }
        // Behind the session's poll, which takes the same lock in its input stream: what it has just said is sent in this
        // turn.
        let mut wire = this.line.wire();
        // Sending before looking: answers to what was received go out although the peer has closed its side meanwhile.
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

/// How long the last words and the closing handshake may take together.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(10);
/// Room for messages that is kept for the next one.
const RETAINED_BYTES: usize = 4 * 1024;
