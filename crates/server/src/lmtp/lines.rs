//! LMTP as lines: over standard input and output (LM-110), and over Unix sockets (LM-111).
//!
//! Owns: the wire of lines, half-closes and hang-ups, the accepting of Unix connections. Refuses to know: where the streams
//! come from, and what a line says.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures::FutureExt;
use sapwood_proto::lmtp::{Close, Line, Lines as Cut, Unreadable};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::conversation::{Conversation, End, Gone, Heard, Wire};
use super::house::{Guest, House};
use crate::caller::Identity;
use crate::drain::Phase;
use crate::socket::{Accepted, Socket};
use crate::trail;

/// How a conversation over a pair of streams ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Everything that was asked for was said, or a drain has ended it in order.
    Finished,
    /// The reader of our output has gone, or what it sent could not be read on.
    Cut,
}

/// A reader and a writer, and how to see that the peer of both has gone.
pub(super) struct Stream<R, W> {
    reader: R,
    writer: W,
    hung_up: fn(&W) -> bool,
}

impl<R, W> Stream<R, W> {
    /// Of which nothing can be seen but by reading and writing.
    pub(super) const fn pair(reader: R, writer: W) -> Self {
        Self {
            reader,
            writer,
            hung_up: |_| false,
        }
    }
}

impl Stream<OwnedReadHalf, OwnedWriteHalf> {
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

/// Talks lines to the end. A `visitor` can come back.
pub(super) async fn speak(
    house: &Arc<House>,
    stream: Stream<impl AsyncRead + Send + Unpin, impl AsyncWrite + Send + Unpin>,
    visitor: Option<Identity>,
    cancel_at_end: bool,
) -> Ended {
    let guest = Guest {
        visitor,
        ..Guest::of_lines()
    };
    let mut conversation = Conversation::new(house, guest);
    let mut wire = Lines::new(stream, house.config.limits.max_message_in);
    let end = std::future::poll_fn(|cx| {
        let end = conversation.poll_end(&mut wire, cx);
        if end.is_pending() && cancel_at_end && wire.ended && conversation.is_busy() {
            return Poll::Ready(End::Gone);
        }
        end
    });
    let end = end.await;
    if end == End::Lost {
        conversation.wait();
        return Ended::Cut;
    }
    drop(conversation);
    if matches!(end, End::Close(_)) {
        let said = std::future::poll_fn(|cx| wire.poll_sent(cx));
        // Whoever does not take the last words by then goes without them (LM-505).
        if !matches!(timeout(GOODBYE, said).await, Ok(Ok(()))) {
            return Ended::Cut;
        }
    }
    match end {
        End::Close(Close::FINISHED | Close::SHUTDOWN) => Ended::Finished,
        End::Gone if cancel_at_end && wire.ended => Ended::Finished,
        End::Close(_) | End::Gone | End::Reset | End::Lost | End::Taken => Ended::Cut,
    }
}

/// Talks with everybody who connects, until the server is gone.
pub(super) async fn listen(house: &Arc<House>, socket: Socket) {
    let drain = house.shared.drain.clone();
    let mut tasks = JoinSet::new();
    loop {
        // Both arms may be cancelled: a connection not yet accepted stays in the backlog.
        let accepted = tokio::select! {
            () = drain.reached(Phase::Refusing) => break,
            accepted = socket.accept() => accepted,
        };
        while tasks.try_join_next().is_some() {}
        match accepted {
            Ok(Accepted::Unix(stream)) => {
                let visitor = Identity::Anonymous(None);
                let Ok(place) = house.admit(&visitor) else {
                    continue;
                };
                let house = Arc::clone(house);
                tasks.spawn(trail::in_turns_of(&Identity::Anonymous(None), async move {
                    speak(&house, Stream::unix(stream), Some(visitor), false).await;
                    drop(place);
                }));
            }
            Ok(Accepted::Tcp(..)) => {}
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }
    // Nobody connects any more; whoever is there stays until the drain is over and has then said its last words.
    drop(socket);
    while tasks.join_next().await.is_some() {}
}

/// The wire of lines.
struct Lines<R, W> {
    stream: Stream<R, W>,
    cut: Cut,
    scratch: Box<[u8]>,
    out: BytesMut,
    /// Nothing more comes.
    ended: bool,
    look: Pin<Box<Interval>>,
}

impl<R, W> Lines<R, W> {
    fn new(stream: Stream<R, W>, max: usize) -> Self {
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

fn heard(line: Line) -> Heard {
    match line {
        Line::Text(text) => Heard::Text(text),
        Line::BadText => Heard::Unreadable(Unreadable::BadText),
        Line::TooLong => Heard::Unreadable(Unreadable::TooLarge),
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Lines<R, W> {
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = ready!(Pin::new(&mut self.stream.writer).poll_write(cx, &self.out))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written);
        }
        if self.out.capacity() > KEPT_BYTES {
            self.out = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Wire for Lines<R, W> {
    fn poll_heard(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        loop {
            if let Some(line) = self.cut.next_line() {
                return Poll::Ready(heard(line));
            }
            if self.ended {
                return Poll::Ready(self.cut.last_line().map_or(Heard::End, heard));
            }
            let mut buffer = ReadBuf::new(&mut self.scratch);
            match ready!(Pin::new(&mut self.stream.reader).poll_read(cx, &mut buffer)) {
                Ok(()) if buffer.filled().is_empty() => self.ended = true,
                Ok(()) => self.cut.push(buffer.filled()),
                Err(_) => return Poll::Ready(Heard::Gone),
            }
        }
    }

    fn poll_gone(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()> {
        // Half-closed and hung up look alike to whoever reads.
        while deaf && self.look.poll_tick(cx).is_ready() {
            if (self.stream.hung_up)(&self.stream.writer) {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        if self.out.len() < WRITE_BYTES {
            return Poll::Ready(Ok(()));
        }
        self.poll_write(cx).map_err(|_| Gone)
    }

    fn send(&mut self, message: Bytes) -> Result<(), Gone> {
        self.out.extend_from_slice(&message);
        Ok(())
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        ready!(self.poll_write(cx)).map_err(|_| Gone)?;
        Pin::new(&mut self.stream.writer)
            .poll_flush(cx)
            .map_err(|_| Gone)
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
const KEPT_BYTES: usize = 16 * 1024;
/// How often a peer that is not read from is looked at.
const LOOK: Duration = Duration::from_secs(1);
