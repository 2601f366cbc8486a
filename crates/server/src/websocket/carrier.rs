//! The byte stream under a WebSocket, after the upgrade.
//!
//! Neither buffers nor wrappers of HTTP are kept, so an idle connection holds little memory (EV-982).

use std::io;

use futures::FutureExt;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::upgrade::downcast;
use tokio::io::{AsyncRead, AsyncWrite, Interest, Ready};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

use crate::listener::read_watch::{AbortConnection, ReadWatch};

/// The socket as the listener has accepted it, with TLS if it has that.
pub(crate) type SocketIo = Box<dyn AcceptedConnection>;

/// A connection whose end can be noticed without reading.
pub(crate) trait PeekConnection {
    /// Whether the peer has closed the connection, or it broke, after whatever is still unread.
    fn is_closed(&self) -> bool;
}

pub(crate) trait AcceptedConnection:
    PeekConnection + AsyncRead + AsyncWrite + Send + Unpin
{
}
impl<T: PeekConnection + AsyncRead + AsyncWrite + Send + Unpin> AcceptedConnection for T {}

/// The socket of an upgrade, and the bytes that hyper has read ahead.
pub(super) fn socket(upgraded: Upgraded) -> (SocketIo, Vec<u8>) {
    // hyper hides the type of its transport, and a downcast needs it: each kind that the listener can serve is tried.
    let found = taken::<TcpStream>(upgraded)
        .or_else(taken::<TlsStream<TcpStream>>)
        .or_else(taken::<UnixStream>)
        .or_else(taken::<TlsStream<UnixStream>>);
    found.unwrap_or_else(|upgraded| (Box::new(TokioIo::new(upgraded)), Vec::new()))
}

/// The socket below HTTP's wrappers, if it is of this type.
fn taken<T>(upgraded: Upgraded) -> Result<(SocketIo, Vec<u8>), Upgraded>
where
    T: AcceptedConnection + AbortConnection + 'static,
{
    let parts = downcast::<TokioIo<ReadWatch<T>>>(upgraded)?;
    let connection = parts.io.into_inner().into_inner();
    Ok((Box::new(connection), parts.read_buf.into()))
}

fn closed(ready: Option<io::Result<Ready>>) -> bool {
    // `None`: not readable now, so not closed either. The flag of the poller is looked at, and no byte is consumed.
    ready.is_some_and(|ready| ready.map_or(true, Ready::is_read_closed))
}

impl PeekConnection for TcpStream {
    fn is_closed(&self) -> bool {
        closed(self.ready(Interest::READABLE).now_or_never())
    }
}

impl PeekConnection for UnixStream {
    fn is_closed(&self) -> bool {
        closed(self.ready(Interest::READABLE).now_or_never())
    }
}

impl<S: PeekConnection> PeekConnection for TlsStream<S> {
    fn is_closed(&self) -> bool {
        // That of TCP: an alert of TLS stands unread among the bytes.
        self.get_ref().0.is_closed()
    }
}

/// No listener of ours produces one; it hides its socket.
impl PeekConnection for TokioIo<Upgraded> {
    fn is_closed(&self) -> bool {
        false
    }
}

impl PeekConnection for SocketIo {
    fn is_closed(&self) -> bool {
        (**self).is_closed()
    }
}
