//! A connection that carries LMTP messages, over any transport.
//!
//! ```text
//!   outgoing ─► task that writes, and pings ─► peer        a frame or a line for each message
//!   incoming ◄─ frames, or lines ◄──────────── peer        ends when the peer is lost, for whatever reason
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
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message, Utf8Bytes};
use tokio_util::task::AbortOnDropHandle;

use super::ConnectOptions;
use super::address::{LmtpTarget, PeerAddress};
use super::post;
use crate::connection::{self, ConnectError};

/// A connection. Dropping it ends it.
pub(super) struct LmtpConnection {
    /// One message or several in each text.
    pub(super) incoming: BoxStream<'static, ByteString>,
    /// A message each, without the end of a line. Closed when nothing can be written any more.
    pub(super) outgoing: mpsc::Sender<Bytes>,
    _writing: Option<AbortOnDropHandle<()>>,
    /// Gone with this: then who writes has a moment for a last word.
    _here: Option<oneshot::Sender<Infallible>>,
}

impl LmtpConnection {
    /// Connects, once.
    ///
    /// # Errors
    /// `connection_lost` where nobody answers, `invalid_value` for an address that cannot be used, and what the peer's
    /// status says if it does not upgrade.
    pub(super) async fn to(
        address: &PeerAddress,
        options: &ConnectOptions,
    ) -> Result<Self, LmtpError> {
        let opening = async {
            match &address.target {
                LmtpTarget::WebSocket { uri, secure } => {
                    Self::websocket(uri, *secure, address, options).await
                }
                LmtpTarget::Unix(path) => {
                    let socket = UnixStream::connect(path).await.map_err(connection_lost)?;
                    Ok(Self::over(socket))
                }
                LmtpTarget::Stdio(program, args) => Self::program(program, args),
                LmtpTarget::Post { uri, secure } => {
                    post::open(uri, *secure, address, options).await
                }
            }
        };
        match options.connect_timeout {
            None => opening.await,
            Some(limit) => {
                let late = |_| lost("the upstream has not answered in time");
                timeout(limit, opening).await.map_err(late)?
            }
        }
    }

    /// What is read here and written there; who writes goes with who reads.
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

    /// Lines over whatever carries bytes.
    pub(super) fn over(io: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        let (read, write) = tokio::io::split(io);
        Self::lines(read, write, ())
    }

    fn program(program: &str, args: &[String]) -> Result<Self, LmtpError> {
        let mut command = Command::new(program);
        command.args(args).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(connection_lost)?;
        let (Some(write), Some(read)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(lost("the upstream's program has no pipes"));
        };
        Ok(Self::lines(read, write, child))
    }

    /// `kept` goes with what is read.
    fn lines(
        read: impl AsyncRead + Send + Unpin + 'static,
        mut write: impl AsyncWrite + Send + Unpin + 'static,
        guard: impl Send + 'static,
    ) -> Self {
        let (outgoing, mut messages) = mpsc::channel::<Bytes>(WAITING_MAX);
        let writing = tokio::spawn(async move {
            let (mut batch, mut text) = (Vec::new(), BytesMut::new());
            while messages.recv_many(&mut batch, WAITING_MAX).await > 0 {
                for message in batch.drain(..) {
                    text.extend_from_slice(&message);
                    text.extend_from_slice(b"\n");
                }
                let written = write.write_all_buf(&mut text).await;
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
        secure: bool,
        address: &PeerAddress,
        options: &ConnectOptions,
    ) -> Result<Self, LmtpError> {
        let authorities = address.authorities.as_deref();
        let connecting = connection::connect(uri, secure, authorities);
        let io = connecting.await.map_err(unreached)?;
        let mut request = uri
            .into_client_request()
            .map_err(|_| bad("the address is no URL of a WebSocket"))?;
        if let Some(key) = credential(address)? {
            request.headers_mut().insert(AUTHORIZATION, key);
        }
        let config = WebSocketConfig::default()
            .read_buffer_size(BUFFER_BYTES)
            .write_buffer_size(BUFFER_BYTES)
            .max_message_size(Some(MESSAGE_BYTES_MAX))
            .max_frame_size(Some(MESSAGE_BYTES_MAX));
        let (socket, _) = client_async_with_config(request, io, Some(config))
            .await
            .map_err(|error| refused(&error))?;
        let (sink, frames) = socket.split();
        let (outgoing, messages) = mpsc::channel::<Bytes>(WAITING_MAX);
        let (here, left) = oneshot::channel::<Infallible>();
        let writing = write_frames(sink, messages, options.ping);
        // It outlives the connection by a moment, and by no more.
        tokio::spawn(async move {
            let departing = async {
                // Nothing is sent there.
                let _ = left.await;
                sleep(GOODBYE).await;
            };
            // Both may be cancelled: the connection is over.
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

/// Writes messages, and pings when there are none for long. A peer that retains streams is told that the client does not reconnect
/// (LM-964).
async fn write_frames(
    mut sink: impl Sink<Message> + Unpin,
    mut messages: mpsc::Receiver<Bytes>,
    every: Option<Duration>,
) {
    let mut ping_at = next(every);
    loop {
        // Both arms may be cancelled: no message is lost.
        let mut message = tokio::select! {
            message = messages.recv() => message,
            () = until(ping_at) => {
                ping_at = next(every);
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
            // Whether it arrives or not, this is the end.
            let _ = sink.send(Message::Close(Some(close))).await;
            return;
        }
        while let Some(bytes) = message {
            // JSON is UTF-8.
            let text = Utf8Bytes::try_from(bytes).unwrap_or_default();
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

/// What a peer says in frames; binary ones mean nothing (LM-705).
fn read_frames(
    frames: impl stream::Stream<Item = Result<Message, Error>> + Send + Unpin + 'static,
    idle_timeout: Option<Duration>,
) -> BoxStream<'static, ByteString> {
    stream::unfold(frames, move |mut frames| async move {
        loop {
            let frame = match idle_timeout {
                None => frames.next().await,
                Some(limit) => timeout(limit, frames.next()).await.ok().flatten(),
            };
            match frame?.ok()? {
                Message::Text(text) => {
                    // It was checked.
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

/// What is read, as it comes.
fn read_lines(
    read: impl AsyncRead + Send + Unpin + 'static,
    guard: impl Send + 'static,
) -> BoxStream<'static, ByteString> {
    let state = (read, guard, BytesMut::new());
    let chunks = stream::unfold(state, |(mut read, guard, mut buf)| async move {
        buf.reserve(BUFFER_BYTES);
        match read.read_buf(&mut buf).await {
            Ok(1..) => Some((buf.split().freeze(), (read, guard, buf))),
            Ok(0) | Err(_) => None,
        }
    });
    cut(chunks.boxed())
}

/// What a peer says in lines. One that is too long or no UTF-8 may have been of any stream: then nothing is certain any
/// more, and the connection is given up. What is not ended when the peer ends is no message.
pub(super) fn cut(chunks: BoxStream<'static, Bytes>) -> BoxStream<'static, ByteString> {
    let state = (chunks, LineSplitter::new(MESSAGE_BYTES_MAX));
    stream::unfold(state, |(mut chunks, mut lines)| async move {
        loop {
            if let Some(line) = lines.next_line() {
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

/// That much later.
pub(super) fn next(every: Option<Duration>) -> Option<Instant> {
    every.map(|every| Instant::now() + every)
}

/// Resolves then, or never.
pub(super) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// `connection_lost`, which may be tried again.
pub(super) fn lost(why: &'static str) -> LmtpError {
    LmtpError::new(LmtpReason::ConnectionLost, why)
}

fn connection_lost(error: std::io::Error) -> LmtpError {
    tracing::debug!(%error, "no connection");
    lost("the upstream cannot be reached: is it running there?")
}

/// A peer that does not upgrade says why in its own way; the number is what all have in common.
fn refused(error: &Error) -> LmtpError {
    let Error::Http(answer) = error else {
        tracing::debug!(%error, "no upgrade");
        return lost("the upstream speaks no WebSocket there");
    };
    refused_with(answer.status().as_u16())
}

/// What the status of an answer says.
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

/// The key that is shown to the peer, if there is one.
///
/// # Errors
/// It cannot stand in a header.
pub(super) fn credential(address: &PeerAddress) -> Result<Option<HeaderValue>, LmtpError> {
    let Some(key) = &address.key else {
        return Ok(None);
    };
    let mut value = HeaderValue::try_from(key.bearer())
        .map_err(|_| bad("the key holds characters that no header can carry"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// An address that can never be used.
pub(super) fn bad(what: &'static str) -> LmtpError {
    LmtpError::new(LmtpReason::InvalidValue, what)
}

/// Why there is no connection.
pub(super) fn unreached(why: ConnectError) -> LmtpError {
    match why {
        ConnectError::Bad(why) => bad(why),
        ConnectError::Unreachable(error) => connection_lost(error),
    }
}

/// Messages that wait to be written.
pub(super) const WAITING_MAX: usize = 64;
/// For the last word on a connection that is not wanted any more.
const GOODBYE: Duration = Duration::from_secs(1);
/// What is read or written at once.
const BUFFER_BYTES: usize = 32 * 1024;
/// Longer messages of a peer are not read. Its frames should have 4 MiB at most.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
