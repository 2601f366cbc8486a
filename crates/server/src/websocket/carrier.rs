//! What carries a WebSocket once HTTP has let go of the connection.
//!
//! Owns: [`Carrier`], and [`Watched`]: whether the peer has closed, seen without reading. Refuses to know: frames. Nothing
//! of HTTP is kept, neither its buffers nor its wrappers, so a connection that says little holds little (EV-982).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::upgrade::downcast;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// The connection itself.
pub(crate) enum Carrier {
    Plain(TcpStream),
    Secure(Box<TlsStream<TcpStream>>),
    /// None of this house's listeners gives one.
    Other(TokioIo<Upgraded>),
}

/// A connection that can be looked at without being read.
pub(crate) trait Watched {
    /// Whether the peer has closed it, or it broke, behind whatever is still unread.
    fn is_closed(&self) -> bool;
}

impl Carrier {
    /// The connection of an upgrade, and what was read ahead of it.
    pub(super) fn of(upgraded: Upgraded) -> (Self, Vec<u8>) {
        let upgraded = match downcast::<TokioIo<TcpStream>>(upgraded) {
            Ok(parts) => return (Self::Plain(parts.io.into_inner()), parts.read_buf.into()),
            Err(upgraded) => upgraded,
        };
        match downcast::<TokioIo<TlsStream<TcpStream>>>(upgraded) {
            Ok(parts) => {
                let stream = Box::new(parts.io.into_inner());
                (Self::Secure(stream), parts.read_buf.into())
            }
            Err(upgraded) => (Self::Other(TokioIo::new(upgraded)), Vec::new()),
        }
    }
}

impl Watched for Carrier {
    fn is_closed(&self) -> bool {
        let tcp = match self {
            Self::Plain(tcp) => tcp,
            Self::Secure(stream) => stream.get_ref().0,
            Self::Other(_) => return false,
        };
        match tcp.ready(Interest::READABLE).now_or_never() {
            Some(Ok(ready)) => ready.is_read_closed(),
            Some(Err(_)) => true,
            None => false,
        }
    }
}

impl AsyncRead for Carrier {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(io) => Pin::new(io).poll_read(cx, buf),
            Self::Secure(io) => Pin::new(io).poll_read(cx, buf),
            Self::Other(io) => Pin::new(io).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Carrier {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(io) => Pin::new(io).poll_write(cx, buf),
            Self::Secure(io) => Pin::new(io).poll_write(cx, buf),
            Self::Other(io) => Pin::new(io).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(io) => Pin::new(io).poll_flush(cx),
            Self::Secure(io) => Pin::new(io).poll_flush(cx),
            Self::Other(io) => Pin::new(io).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(io) => Pin::new(io).poll_shutdown(cx),
            Self::Secure(io) => Pin::new(io).poll_shutdown(cx),
            Self::Other(io) => Pin::new(io).poll_shutdown(cx),
        }
    }
}
