//! A connection that carries LMTP messages, over any transport.
//!
//! ```text
//!   outgoing ─► task that writes, and pings ─► peer        a frame or a line for each message
//!   incoming ◄─ frames, or lines ◄──────────── peer        ends when the connection is lost, for whatever reason
//! ```

use std::convert::Infallible;
use std::process::Stdio;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use bytestring::ByteString;
use futures::stream::BoxStream;
use futures::{Sink, SinkExt, StreamExt, stream};
use http::Uri;
use http::header::{AUTHORIZATION, HeaderValue};
use sapwood_proto::lmtp::{LineSplitter, LmtpError, LmtpReason, WireLine};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message, Utf8Bytes};
use tokio_util::task::AbortOnDropHandle;

use super::ConnectOptions;
use super::address::{LmtpTarget, PeerAddress};
use super::post;
use crate::address::bearer;
use crate::connection::{self, ConnectError, Io, MESSAGE_BYTES_MAX};

/// A connection. Dropping it closes it.
pub(super) struct LmtpConnection {
    /// Received texts, each with one message or several.
    pub(super) incoming: BoxStream<'static, ByteString>,
    /// Encoded messages to send, without line ends. Closed when nothing can be written any more.
    pub(super) outgoing: mpsc::Sender<Bytes>,
    _writing: Option<AbortOnDropHandle<()>>,
    /// Dropped with the connection: the writing task then has a moment to send a close frame.
    _here: Option<oneshot::Sender<Infallible>>,
}

impl LmtpConnection {
    /// Connects, once.
    ///
    /// # Errors
    /// `connection_lost` if no peer answers, `invalid_value` for an address that cannot be used, and the error of the
    /// peer's HTTP status if it does not upgrade.
    pub(super) async fn to(
        address: &PeerAddress,
        options: &ConnectOptions,
    ) -> Result<Self, LmtpError> {
        let opening = async {
            match &address.target {
                LmtpTarget::WebSocket(uri) => Self::websocket(uri, address, options).await,
                LmtpTarget::Unix(path) => {
                    let socket = UnixStream::connect(path).await.map_err(connection_lost)?;
                    Ok(Self::over(socket))
                }
                LmtpTarget::Stdio(program, args) => Self::program(program, args),
                LmtpTarget::Post(uri) => post::open(uri, address, options).await,
            }
        };
        // One limit for name resolution, TCP, TLS and the upgrade together.
        match options.connect_timeout {
            None => opening.await,
            Some(limit) => {
                let late = |_| lost("the upstream has not answered in time");
                timeout(limit, opening).await.map_err(late)?
            }
        }
    }

    /// Creates a connection of these channels; whatever writes must end with `incoming`.
    pub(super) const fn of(
        incoming: BoxStream<'static, ByteString>,
        outgoing: mpsc::Sender<Bytes>,
    ) -> Self {
        Self {
            incoming,
            outgoing,
            _writing: None,
            _here: None,
        }
    }

    /// Exchanges lines over any byte stream.
    pub(super) fn over(io: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        let (read, write) = tokio::io::split(io);
        Self::lines(read, write, ())
    }

    fn program(program: &str, args: &[String]) -> Result<Self, LmtpError> {
        let mut command = Command::new(program);
        command.args(args).kill_on_drop(true);
        // Its standard error remains that of this process: it is the program's log.
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(connection_lost)?;
        let (Some(write), Some(read)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(lost("the upstream's program could not be connected to"));
        };
        // The child goes with the reading side, and is killed when that is dropped (LM-701).
        Ok(Self::lines(read, write, child))
    }

    /// Exchanges lines; `guard` is dropped with the reading side.
    fn lines(
        read: impl AsyncRead + Send + Unpin + 'static,
        mut write: impl AsyncWrite + Send + Unpin + 'static,
        guard: impl Send + 'static,
    ) -> Self {
        let (outgoing, mut messages) = mpsc::channel::<Bytes>(OUTGOING_MAX);
        let writing = tokio::spawn(async move {
            let (mut batch, mut text) = (Vec::new(), BytesMut::new());
            // Everything that waits goes out in one write, which matters more than what serialisation costs (section
            // 13).
            while messages.recv_many(&mut batch, OUTGOING_MAX).await > 0 {
                for message in batch.drain(..) {
                    text.extend_from_slice(&message);
                    text.extend_from_slice(b"\n");
                }
                let written = write.write_all_buf(&mut text).await;
                // Ends the task, and with it the channel: the keeper takes that for the loss of the connection.
                if written.is_err() || write.flush().await.is_err() {
                    return;
                }
            }
        });
        Self {
            incoming: read_lines(read, guard),
            outgoing,
            _writing: Some(AbortOnDropHandle::new(writing)),
            _here: None,
        }
    }

    async fn websocket(
        uri: &Uri,
        address: &PeerAddress,
        options: &ConnectOptions,
    ) -> Result<Self, LmtpError> {
        let io = dial(uri, address).await?;
        let mut request = uri
            .into_client_request()
            .map_err(|_| bad("the address is not the URL of a WebSocket"))?;
        if let Some(key) = credential(address)? {
            request.headers_mut().insert(AUTHORIZATION, key);
        }
        // No subprotocol is offered: the reference server selects none, and features are negotiated by MODEL_INFO
        // (LM-901).
        let upgraded = connection::websocket(request, io).await;
        let (socket, _) = upgraded.map_err(|error| refused(&error))?;
        let (sink, frames) = socket.split();
        let (outgoing, messages) = mpsc::channel::<Bytes>(OUTGOING_MAX);
        let (here, left) = oneshot::channel::<Infallible>();
        let writing = write_frames(sink, messages, options.ping);
        // The writing task outlives the connection by [`GOODBYE`] at most.
        tokio::spawn(async move {
            let departing = async {
                // Resolves when the sender is dropped; nothing is ever sent.
                let _ = left.await;
                sleep(GOODBYE).await;
            };
            // Both branches may be cancelled: the connection is closed.
            tokio::select! {
                () = writing => {}
                () = departing => {}
            }
        });
        Ok(Self {
            incoming: read_frames(frames, options.idle_timeout),
            outgoing,
            _writing: None,
            _here: Some(here),
        })
    }
}

/// Writes messages, and pings at an interval. At the end it sends a normal close, which tells a peer that retains
/// streams that the client does not reconnect (LM-964).
async fn write_frames(
    mut sink: impl Sink<Message> + Unpin,
    mut messages: mpsc::Receiver<Bytes>,
    every: Option<Duration>,
) {
    let mut ping_at = next(every);
    loop {
        // Both branches are cancel-safe: no message is lost.
        let mut message = tokio::select! {
            message = messages.recv() => message,
            () = until(ping_at) => {
                ping_at = next(every);
                // Not only a sign of life: the pong is the frame that `read_frames` waits for on a connection without
                // items.
                if sink.send(Message::Ping(Bytes::new())).await.is_err() {
                    return;
                }
                continue;
            }
        };
        if message.is_none() {
            let close = CloseFrame {
                code: CloseCode::Normal,
                reason: Utf8Bytes::default(),
            };
            // The task ends whether or not the frame is delivered.
            let _ = sink.send(Message::Close(Some(close))).await;
            return;
        }
        while let Some(bytes) = message {
            // JSON is UTF-8.
            let text = Utf8Bytes::try_from(bytes).unwrap_or_default();
            // Fed, and flushed once for everything that waits.
            if sink.feed(Message::Text(text)).await.is_err() {
                return;
            }
            message = messages.try_recv().ok();
        }
        if sink.flush().await.is_err() {
            return;
        }
    }
}

/// Returns the text frames of a peer; binary frames are ignored (LM-705).
fn read_frames(
    frames: impl stream::Stream<Item = Result<Message, Error>> + Send + Unpin + 'static,
    idle_timeout: Option<Duration>,
) -> BoxStream<'static, ByteString> {
    stream::unfold(frames, move |mut frames| async move {
        loop {
            let frame = match idle_timeout {
                None => frames.next().await,
                // Frames of any kind count (LM-709). The time starts again with each of them.
                Some(limit) => timeout(limit, frames.next()).await.ok().flatten(),
            };
            // An error of the socket ends the stream of texts: for the calls it is the loss of the connection, whatever
            // it was.
            match frame?.ok()? {
                Message::Text(text) => {
                    // The WebSocket library has validated the UTF-8.
                    let text = ByteString::try_from(Bytes::from(text)).ok()?;
                    return Some((text, frames));
                }
                Message::Close(_) => return None,
                _ => {}
            }
        }
    })
    .boxed()
}

/// Returns the lines read, as they arrive.
fn read_lines(
    read: impl AsyncRead + Send + Unpin + 'static,
    guard: impl Send + 'static,
) -> BoxStream<'static, ByteString> {
    let state = (read, guard, BytesMut::new());
    let chunks = stream::unfold(state, |(mut read, guard, mut buf)| async move {
        buf.reserve(BUFFER_BYTES);
        // `split` below hands the bytes on without copying them, and leaves the rest of the capacity here.
        match read.read_buf(&mut buf).await {
            Ok(1..) => Some((buf.split().freeze(), (read, guard, buf))),
            Ok(0) | Err(_) => None,
        }
    });
    cut(chunks.boxed())
}

/// Splits received bytes into lines. A line that is too long or not UTF-8 may belong to any stream, so the connection
/// is closed then. An unfinished line at the end of input is ignored.
pub(super) fn cut(chunks: BoxStream<'static, Bytes>) -> BoxStream<'static, ByteString> {
    let state = (chunks, LineSplitter::new(MESSAGE_BYTES_MAX));
    stream::unfold(state, |(mut chunks, mut lines)| async move {
        loop {
            if let Some(line) = lines.next_line() {
                // The rest of a line that is too long could be skipped, but some stream would then wait for an item in
                // it for ever.
                let WireLine::Text(text) = line else {
                    return None;
                };
                return Some((text, (chunks, lines)));
            }
            lines.push(&chunks.next().await?);
        }
    })
    .boxed()
}

/// Returns the instant after `every` from now.
pub(super) fn next(every: Option<Duration>) -> Option<Instant> {
    every.map(|every| Instant::now() + every)
}

/// Resolves at this instant; never for `None`.
pub(super) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The error `connection_lost`, which can be retried.
pub(super) fn lost(why: &'static str) -> LmtpError {
    LmtpError::new(LmtpReason::ConnectionLost, why)
}

fn connection_lost(error: std::io::Error) -> LmtpError {
    tracing::debug!(%error, "could not connect");
    lost("the upstream cannot be reached: is it running there?")
}

/// Converts a refused upgrade. Servers describe it differently; only the HTTP status is common.
fn refused(error: &Error) -> LmtpError {
    let Error::Http(answer) = error else {
        tracing::debug!(%error, "the WebSocket upgrade failed");
        return lost("the upstream does not accept WebSockets there");
    };
    refused_with(answer.status().as_u16())
}

/// Converts the HTTP status of a response.
pub(super) fn refused_with(number: u16) -> LmtpError {
    let reason = match number {
        401 | 403 => LmtpReason::InsufficientScope,
        429 => LmtpReason::RateLimitExceeded,
        503 => LmtpReason::ServerOverloaded,
        500.. => LmtpReason::UpstreamError,
        _ => LmtpReason::InvalidValue,
    };
    LmtpError::new(
        reason,
        format!("the upstream refused the connection ({number})"),
    )
}

/// Connects to the server of a URL.
pub(super) async fn dial(uri: &Uri, address: &PeerAddress) -> Result<Box<dyn Io>, LmtpError> {
    let connected = connection::connect(uri, address.authorities.as_deref()).await;
    connected.map_err(|why| match why {
        ConnectError::Bad(why) => bad(why),
        ConnectError::Unreachable(error) => connection_lost(error),
    })
}

/// Returns the key that is sent to the peer, if there is one.
///
/// # Errors
/// The key cannot be a header value.
pub(super) fn credential(address: &PeerAddress) -> Result<Option<HeaderValue>, LmtpError> {
    address.key.as_ref().map(bearer).transpose().map_err(bad)
}

/// The error of an address that can never be used.
pub(super) fn bad(what: &'static str) -> LmtpError {
    LmtpError::new(LmtpReason::InvalidValue, what)
}

/// Capacity of the queue of messages to write.
pub(super) const OUTGOING_MAX: usize = 64;
/// How long a closed connection may take to send its close frame.
const GOODBYE: Duration = Duration::from_secs(1);
/// Bytes read or written at once.
const BUFFER_BYTES: usize = 32 * 1024;
