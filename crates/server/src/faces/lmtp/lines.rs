//! LMTP as lines, over standard input and output (LM-110) and Unix sockets (LM-111).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures::FutureExt;
use sapwood_proto::lmtp::LmtpClose;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::context::{LmtpClientInfo, LmtpContext};
use super::driver::{ClientClosed, ConnectionDriver, ConversationEnd, LmtpInput, LmtpTransport};
use super::line_input::LineInput;
use crate::auth::identity::CallerIdentity;
use crate::http::request_trace;
use crate::listener::socket::{AcceptedStream, ListeningSocket};
use crate::ops::drain::DrainPhase;

/// How a connection over a pair of streams ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinesEnd {
    /// All output was sent, or a drain has ended it in order.
    Finished,
    /// The reader of the output has disconnected, or its input could not be read any further.
    Cut,
}

/// A reader and a writer, and a check of whether the peer of both has disconnected.
pub(super) struct LineStream<R, W> {
    reader: R,
    writer: W,
    hung_up: fn(&W) -> bool,
}

impl<R, W> LineStream<R, W> {
    /// Streams that show a disconnect only where they are read and written.
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
                // Half-closed and closed look alike to a read. Only after a hang-up of both directions is the write side
                // closed as well (LM-111). `now_or_never`: the present state is asked for, and not a change.
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
        // After the poll, which has handled the last messages: only then does the driver know what they have started.
        if end.is_pending() && cancel_at_end && wire.lines.ended && conversation.is_busy() {
            return Poll::Ready(ConversationEnd::Closed);
        }
        end
    });
    let end = end.await;
    if end == ConversationEnd::Lost {
        conversation.wait();
        return LinesEnd::Cut;
    }
    // Before the last messages are sent: a slow reader of these must not keep what still runs.
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
        // `cancel_at_end` ends the connection so on purpose, above.
        ConversationEnd::Closed if cancel_at_end && wire.lines.ended => LinesEnd::Finished,
        ConversationEnd::Close(_)
        | ConversationEnd::Closed
        | ConversationEnd::Reset
        | ConversationEnd::Lost
        | ConversationEnd::Taken => LinesEnd::Cut,
    }
}

/// Serves all who connect, until the server has drained.
pub(super) async fn listen(context: &Arc<LmtpContext>, socket: ListeningSocket) {
    let drain = context.shared.drain.clone();
    let mut tasks = JoinSet::new();
    loop {
        // Both arms may be cancelled: a connection not yet accepted stays in the backlog.
        let accepted = tokio::select! {
            () = drain.reached(DrainPhase::Refusing) => break,
            accepted = socket.accept() => accepted,
        };
        // The set keeps the results of finished tasks until they are taken. A panic is one of them; it was logged.
        while tasks.try_join_next().is_some() {}
        match accepted {
            Ok(AcceptedStream::Unix(stream)) => {
                // The mode of the socket's file is the access control (LM-111): all who can connect are one anonymous
                // caller.
                let identity = CallerIdentity::Anonymous(None);
                // There is no HTTP here that could carry a refusal: the connection is dropped.
                let Ok(position) = context.admit(&identity) else {
                    continue;
                };
                // The administration of controllers is for keys, where there are any.
                let scopes = context.shared.auth.local_scopes();
                let context = Arc::clone(context);
                tasks.spawn(request_trace::in_turns_of(
                    &CallerIdentity::Anonymous(None),
                    scopes,
                    async move {
                        serve_lines(&context, LineStream::unix(stream), Some(identity), false)
                            .await;
                        drop(position);
                    },
                ));
            }
            // The socket was bound to a path, which gives no TCP streams.
            Ok(AcceptedStream::Tcp(..)) => {}
            Err(error) => {
                // Usually too many open files, which would fail again at once: the pause keeps the loop from spinning.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }
    // New clients cannot connect; present ones stay until the drain is over and their last messages are sent.
    drop(socket);
    while tasks.join_next().await.is_some() {}
}

/// The transport of lines.
struct LineTransport<R, W> {
    stream: LineStream<R, W>,
    lines: LineInput,
    scratch: Box<[u8]>,
    out: BytesMut,
    /// When `hung_up` is asked again.
    look: Pin<Box<Interval>>,
}

impl<R, W> LineTransport<R, W> {
    fn new(stream: LineStream<R, W>, max: usize) -> Self {
        let mut look = Box::pin(interval(LOOK));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            stream,
            lines: LineInput::new(max),
            scratch: vec![0; READ_BYTES].into(),
            out: BytesMut::new(),
            look,
        }
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> LineTransport<R, W> {
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = ready!(Pin::new(&mut self.stream.writer).poll_write(cx, &self.out))?;
            // A writer that takes nothing for ever must not keep this loop.
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written);
        }
        // The memory of one large message is not kept by an idle connection.
        if self.out.capacity() > RETAINED_BYTES {
            self.out = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> LmtpTransport for LineTransport<R, W> {
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<LmtpInput> {
        loop {
            if let Some(input) = self.lines.next_input() {
                return Poll::Ready(input);
            }
            let mut buffer = ReadBuf::new(&mut self.scratch);
            match ready!(Pin::new(&mut self.stream.reader).poll_read(cx, &mut buffer)) {
                Ok(()) if buffer.filled().is_empty() => self.lines.ended = true,
                Ok(()) => self.lines.push(buffer.filled()),
                Err(_) => return Poll::Ready(LmtpInput::Closed),
            }
        }
    }

    fn poll_closed(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()> {
        // Where the connection reads, the read shows the disconnect. Where it does not, nothing wakes for one, so it is
        // asked for by a timer.
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
        // Standard output is buffered: without a flush its reader would wait for the next message (LM-110).
        Pin::new(&mut self.stream.writer)
            .poll_flush(cx)
            .map_err(|_| ClientClosed)
    }
}

/// How long the last messages may take (LM-505).
const GOODBYE: Duration = Duration::from_secs(2);
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);
/// Size of the buffer that is read into.
const READ_BYTES: usize = 4 * 1024;
/// Bytes that are gathered for one write.
const WRITE_BYTES: usize = 64 * 1024;
/// Size of the write buffer, in bytes, up to which it is kept while nothing is sent.
const RETAINED_BYTES: usize = 16 * 1024;
/// How often a peer that is not read from is checked for a disconnect.
const LOOK: Duration = Duration::from_secs(1);
