//! A socket wrapper that reports arriving bytes to the connection's [`Activity`], so that a request head has a timeout
//! of its own beside the idle timeout (OA-911).
//!
//! On HTTP/2 it reports nothing: there frames that belong to no request arrive at any time, and hyper limits heads by size.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

use crate::listener::activity::Activity;
use crate::listener::write_stall::WriteStallWatch;

/// A socket whose reads and writes are watched.
pub(crate) struct ReadWatch<S> {
    socket: S,
    activity: Activity,
    write_stalls: WriteStallWatch,
    version: HttpVersion,
}

/// A socket that can be reset.
pub(crate) trait AbortConnection {
    /// Makes the socket reset the connection when it is dropped.
    fn abort(&self);

    /// Acknowledges the received bytes at once, and not with the next response bytes or 40 ms later: a client that writes a
    /// message in pieces with Nagle's algorithm on holds the last piece back until then. Linux resets the option when bytes
    /// are sent, so it is set with each read. A no-op on other systems.
    fn acknowledge(&self);
}

impl AbortConnection for TcpStream {
    fn abort(&self) {
        // If that fails, the socket is closed in the usual way.
        let _ = self.set_zero_linger();
    }

    fn acknowledge(&self) {
        #[cfg(target_os = "linux")]
        {
            // If that fails, the connection is merely slower.
            let _ = self.set_quickack(true);
        }
    }
}

impl AbortConnection for UnixStream {
    // Neither applies: a Unix socket has no lingering close and no acknowledgements.
    fn abort(&self) {}

    fn acknowledge(&self) {}
}

impl<S: AbortConnection> AbortConnection for TlsStream<S> {
    fn abort(&self) {
        self.get_ref().0.abort();
    }

    fn acknowledge(&self) {
        self.get_ref().0.acknowledge();
    }
}

/// The version by the bytes so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HttpVersion {
    /// So many bytes have come, and they are the first ones of [`PREFACE`].
    Unknown(usize),
    One,
    Two,
}

/// How a connection of HTTP/2 begins; no method of HTTP/1 is called so.
const PREFACE: &[u8] = b"PRI";

impl HttpVersion {
    fn after(self, bytes: &[u8]) -> Self {
        let Self::Unknown(known) = self else {
            return self;
        };
        let rest = &PREFACE[known..];
        if bytes.starts_with(rest) {
            Self::Two
        } else if rest.starts_with(bytes) {
            Self::Unknown(known + bytes.len())
        } else {
            Self::One
        }
    }
}

impl<S> ReadWatch<S> {
    pub(crate) fn new(socket: S, activity: Activity, write_stalls: WriteStallWatch) -> Self {
        Self {
            socket,
            activity,
            write_stalls,
            version: HttpVersion::Unknown(0),
        }
    }

    /// The socket, after an upgrade.
    pub(crate) fn into_inner(self) -> S {
        self.socket
    }
}

impl<S: AsyncRead + AbortConnection + Unpin> AsyncRead for ReadWatch<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.socket).poll_read(cx, buf))?;
        let update = &buf.filled()[before..];
        this.version = this.version.after(update);
        // Not while the version is unknown: to HTTP/2, whose preface may come in pieces, the timeout of a head does not apply.
        if !update.is_empty() && this.version == HttpVersion::One {
            this.activity.touch();
            // HTTP/1 and WebSocket handshakes only: clients of HTTP/2 write their frames whole.
            this.socket.acknowledge();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AbortConnection> ReadWatch<S> {
    /// Fails a write to a client that has stopped reading (TR-609).
    fn check(&self) -> io::Result<()> {
        if !self.write_stalls.is_reset() {
            return Ok(());
        }
        // Reset and not closed: after a close the system keeps the send buffer, which this client does not read.
        self.socket.abort();
        Err(io::ErrorKind::ConnectionReset.into())
    }
}

impl<S: AsyncWrite + AbortConnection + Unpin> AsyncWrite for ReadWatch<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Checked in the write, because hyper owns the socket meanwhile: only here can it be reset, and the error ends hyper.
        self.check()?;
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.socket).poll_write_vectored(cx, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_911_the_http_version_is_detected_in_any_split_of_its_first_bytes() {
        for (pieces, version) in [
            (&["PRI * HTTP/2.0"][..], HttpVersion::Two),
            (&["P", "R", "I"], HttpVersion::Two),
            (&["", "P", "", "RI"], HttpVersion::Two),
            (&["GET / HTTP/1.1"], HttpVersion::One),
            (&["P", "OST"], HttpVersion::One),
            (&["PUT", "PRI"], HttpVersion::One),
            (&["G", "PR"], HttpVersion::One),
            (&["P", "ROPFIND"], HttpVersion::One),
            (&["PRO"], HttpVersion::One),
            (&["P"], HttpVersion::Unknown(1)),
            (&["P", "R"], HttpVersion::Unknown(2)),
            (&[""], HttpVersion::Unknown(0)),
        ] {
            let read = pieces
                .iter()
                .fold(HttpVersion::Unknown(0), |version, piece| {
                    version.after(piece.as_bytes())
                });
            assert_eq!(read, version, "{pieces:?}");
        }
    }

    /// One side of a pipe that counts calls of `acknowledge`.
    struct Counted {
        pipe: tokio::io::DuplexStream,
        acknowledged: std::cell::Cell<usize>,
    }

    impl AbortConnection for Counted {
        fn abort(&self) {}

        fn acknowledge(&self) {
            self.acknowledged.set(self.acknowledged.get() + 1);
        }
    }

    impl AsyncRead for Counted {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.pipe).poll_read(cx, buf)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn oa_911_the_head_timeout_is_that_of_http_1_alone() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        for (pieces, applies) in [
            (["G", "ET / HTTP/1.1"], true),
            (["P", "ROPFIND / HTTP/1.1"], true),
            (["P", "RI * HTTP/2.0"], false),
        ] {
            let (mut client, pipe) = tokio::io::duplex(64);
            let socket = Counted {
                pipe,
                acknowledged: std::cell::Cell::new(0),
            };
            let activity = Activity::new();
            let mut received = ReadWatch::new(socket, activity.clone(), WriteStallWatch::new());
            for piece in pieces {
                client.write_all(piece.as_bytes()).await.unwrap();
                let mut read = vec![0; piece.len()];
                received.read_exact(&mut read).await.unwrap();
            }
            let limit = std::time::Duration::from_secs(10);
            let late = tokio::time::timeout(limit * 2, activity.late_head(limit)).await;
            assert_eq!(late.is_ok(), applies, "{pieces:?}");
        }
    }

    /// Measured with Action Engine 0.4.0, whose messages are two writes each: an exchange took 44 ms. Whether a real socket
    /// acknowledges at once is also the system's choice, so that what is asked of it is counted.
    #[tokio::test]
    async fn reads_are_acknowledged_at_once_except_over_http_2() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        for (sent, times) in [("GET / HTTP/1.1", 3), ("PRI * HTTP/2.0", 0)] {
            let (mut client, pipe) = tokio::io::duplex(64);
            let socket = Counted {
                pipe,
                acknowledged: std::cell::Cell::new(0),
            };
            let mut received = ReadWatch::new(socket, Activity::new(), WriteStallWatch::new());
            for _ in 0..3 {
                client.write_all(sent.as_bytes()).await.unwrap();
                let mut read = [0; 14];
                received.read_exact(&mut read).await.unwrap();
            }
            assert_eq!(received.socket.acknowledged.get(), times, "{sent}");
        }
    }
}
