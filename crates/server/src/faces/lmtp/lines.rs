//! LMTP as lines, over standard input and output (LM-110) and Unix sockets (LM-111).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures::FutureExt;
use sapwood_proto::lmtp::{LineSplitter as Cut, LmtpClose, Unreadable, WireLine};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::context::{LmtpClientInfo, LmtpContext};
use super::driver::{ClientClosed, ConnectionDriver, ConversationEnd, LmtpInput, LmtpTransport};
use crate::auth::identity::CallerIdentity;
use crate::http::request_trace;
use crate::listener::socket::{AcceptedStream, ListeningSocket};
use crate::ops::drain::DrainPhase;

/// How a conversation over a pair of streams ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinesEnd {
    /// Everything that was asked for was said, or a drain has ended it in order.
    Finished,
    /// The reader of our output has gone, or what it sent could not be read on.
    Cut,
}

/// A reader and a writer, and how to see that the peer of both has gone.
pub(super) struct LineStream<R, W> {
    reader: R,
    writer: W,
    hung_up: fn(&W) -> bool,
}

impl<R, W> LineStream<R, W> {
    /// Of which nothing can be seen but by reading and writing.
    pub(super) const fn pair(reader: R, writer: W) -> Self {
        Self {
            reader,
            writer,
            hung_up: |_| false,
        }
    }
}

impl LineStream<OwnedReadHalf, OwnedWriteHalf> {
    fn unix(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self {
            reader,
            writer,
            hung_up: |writer| {
                let ready = writer.as_ref().ready(Interest::WRITABLE).now_or_never();
                ready.is_some_and(|ready| ready.map_or(true, |ready| ready.is_write_closed()))
            },
        }
    }
}

/// Serves the line transport to its end. A client with an identity can reconnect.
pub(super) async fn serve_lines(
    context: &Arc<LmtpContext>,
    stream: LineStream<impl AsyncRead + Send + Unpin, impl AsyncWrite + Send + Unpin>,
    caller_identity: Option<CallerIdentity>,
    cancel_at_end: bool,
) -> LinesEnd {
    let connection = LmtpClientInfo {
        identity: caller_identity,
        ..LmtpClientInfo::of_lines()
    };
    let mut conversation = ConnectionDriver::new(context, connection);
    let mut wire = LineTransport::new(stream, context.config.limits.max_message_in);
    let end = std::future::poll_fn(|cx| {
        let end = conversation.poll_end(&mut wire, cx);
        if end.is_pending() && cancel_at_end && wire.ended && conversation.is_busy() {
            return Poll::Ready(ConversationEnd::Closed);
        }
        end
    });
    let end = end.await;
    if end == ConversationEnd::Lost {
        conversation.wait();
        return LinesEnd::Cut;
    }
    drop(conversation);
    if matches!(end, ConversationEnd::Close(_)) {
        let sent = std::future::poll_fn(|cx| wire.poll_sent(cx));
        // A client that does not take the last messages by then goes without them (LM-505).
        if !matches!(timeout(GOODBYE, sent).await, Ok(Ok(()))) {
            return LinesEnd::Cut;
        }
    }
    match end {
        ConversationEnd::Close(LmtpClose::FINISHED | LmtpClose::SHUTDOWN) => LinesEnd::Finished,
        ConversationEnd::Closed if cancel_at_end && wire.ended => LinesEnd::Finished,
        ConversationEnd::Close(_)
        | ConversationEnd::Closed
        | ConversationEnd::Reset
        | ConversationEnd::Lost
        | ConversationEnd::Taken => LinesEnd::Cut,
    }
}

/// Talks with everybody who connects, until the server is gone.
pub(super) async fn listen(context: &Arc<LmtpContext>, socket: ListeningSocket) {
    let drain = context.shared.drain.clone();
    let mut tasks = JoinSet::new();
    loop {
        // Both arms may be cancelled: a connection not yet accepted stays in the backlog.
        let accepted = tokio::select! {
            () = drain.reached(DrainPhase::Refusing) => break,
            accepted = socket.accept() => accepted,
        };
        while tasks.try_join_next().is_some() {}
        match accepted {
            Ok(AcceptedStream::Unix(stream)) => {
                let identity = CallerIdentity::Anonymous(None);
                let Ok(position) = context.admit(&identity) else {
                    continue;
                };
                let context = Arc::clone(context);
                tasks.spawn(request_trace::in_turns_of(
                    &CallerIdentity::Anonymous(None),
                    async move {
                        serve_lines(&context, LineStream::unix(stream), Some(identity), false)
                            .await;
                        drop(position);
                    },
                ));
            }
            Ok(AcceptedStream::Tcp(..)) => {}
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }
    // New clients cannot connect; present ones stay until the drain is over and their last messages are sent.
    drop(socket);
    while tasks.join_next().await.is_some() {}
}

/// The wire of lines.
struct LineTransport<R, W> {
    stream: LineStream<R, W>,
    cut: Cut,
    scratch: Box<[u8]>,
    out: BytesMut,
    /// Nothing more comes.
    ended: bool,
    look: Pin<Box<Interval>>,
}

impl<R, W> LineTransport<R, W> {
    fn new(stream: LineStream<R, W>, max: usize) -> Self {
        let mut look = Box::pin(interval(LOOK));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            stream,
            cut: Cut::new(max),
            scratch: vec![0; READ_BYTES].into(),
            out: BytesMut::new(),
            ended: false,
            look,
        }
    }
}

fn to_input(line: WireLine) -> LmtpInput {
    match line {
        WireLine::Text(text) => LmtpInput::Text(text),
        WireLine::BadText => LmtpInput::Unreadable(Unreadable::BadText),
        WireLine::TooLong => LmtpInput::Unreadable(Unreadable::TooLarge),
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> LineTransport<R, W> {
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = ready!(Pin::new(&mut self.stream.writer).poll_write(cx, &self.out))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written);
        }
        if self.out.capacity() > RETAINED_BYTES {
            self.out = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> LmtpTransport for LineTransport<R, W> {
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<LmtpInput> {
        loop {
            if let Some(line) = self.cut.next_line() {
                return Poll::Ready(to_input(line));
            }
            if self.ended {
                return Poll::Ready(self.cut.last_line().map_or(LmtpInput::End, to_input));
            }
            let mut buffer = ReadBuf::new(&mut self.scratch);
            match ready!(Pin::new(&mut self.stream.reader).poll_read(cx, &mut buffer)) {
                Ok(()) if buffer.filled().is_empty() => self.ended = true,
                Ok(()) => self.cut.push(buffer.filled()),
                Err(_) => return Poll::Ready(LmtpInput::Closed),
            }
        }
    }

    fn poll_closed(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()> {
        // Half-closed and closed look alike to a reader.
        while deaf && self.look.poll_tick(cx).is_ready() {
            if (self.stream.hung_up)(&self.stream.writer) {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        if self.out.len() < WRITE_BYTES {
            return Poll::Ready(Ok(()));
        }
        self.poll_write(cx).map_err(|_| ClientClosed)
    }

    fn send(&mut self, message: Bytes) -> Result<(), ClientClosed> {
        self.out.extend_from_slice(&message);
        Ok(())
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        ready!(self.poll_write(cx)).map_err(|_| ClientClosed)?;
        Pin::new(&mut self.stream.writer)
            .poll_flush(cx)
            .map_err(|_| ClientClosed)
    }
}

/// How long last words may take.
const GOODBYE: Duration = Duration::from_secs(2);
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);
/// Size of the buffer that is read into.
const READ_BYTES: usize = 4 * 1024;
/// What is gathered before it is written; then it is one write.
const WRITE_BYTES: usize = 64 * 1024;
/// Room for messages that is kept while nothing is said.
const RETAINED_BYTES: usize = 16 * 1024;
/// How often a peer that is not read from is looked at.
const LOOK: Duration = Duration::from_secs(1);
