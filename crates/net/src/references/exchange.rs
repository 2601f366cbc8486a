//! One HTTP request over a connection of its own.
//!
//! Owns: dialling an address that was checked, TLS, HTTP/1.1, and an answer that keeps its connection alive. Refuses to
//! know: redirects, cookies, credentials, proxies, decompression, pools: none of them is here.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use url::{Host, Url};

use super::address::is_public;
use super::error::Error;

/// Dials and asks.
#[derive(Clone, Debug)]
pub(super) struct Dialler {
    tls: Arc<ClientConfig>,
}

/// Which addresses may be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Public ones.
    Public,
    /// Any: the operator has named the host.
    Any,
}

impl Dialler {
    pub(super) fn new(tls: ClientConfig) -> Self {
        Self { tls: Arc::new(tls) }
    }

    /// Sends `request`, whose URI is in origin form, to the host of `url`.
    pub(super) async fn ask<B>(
        &self,
        url: &Url,
        reach: Reach,
        request: Request<B>,
    ) -> Result<Response<Answer>, Error>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let host = url.host().ok_or(Error::Malformed("it has no host"))?;
        let port = url
            .port_or_known_default()
            .ok_or(Error::Malformed("it has no port"))?;
        let tcp = connect(&host, port, reach).await?;
        if url.scheme() != "https" {
            return exchange(tcp, request).await;
        }
        let name = server_name(&host)?;
        let tls = TlsConnector::from(Arc::clone(&self.tls));
        let tls = tls.connect(name, tcp).await.map_err(|error| {
            tracing::debug!(%error, "no TLS");
            Error::Failed("its server is not who it should be")
        })?;
        exchange(tls, request).await
    }
}

fn server_name(host: &Host<&str>) -> Result<ServerName<'static>, Error> {
    match host {
        Host::Domain(name) => ServerName::try_from((*name).to_owned())
            .map_err(|_| Error::Malformed("its host is no name that a certificate could have")),
        Host::Ipv4(address) => Ok(ServerName::from(IpAddr::from(*address))),
        Host::Ipv6(address) => Ok(ServerName::from(IpAddr::from(*address))),
    }
}

/// A connection to an address that was looked up once and may be connected to.
async fn connect(host: &Host<&str>, port: u16, reach: Reach) -> Result<TcpStream, Error> {
    let addresses: Vec<SocketAddr> = match host {
        Host::Ipv4(address) => vec![(*address, port).into()],
        Host::Ipv6(address) => vec![(*address, port).into()],
        Host::Domain(name) => {
            let found = lookup_host((*name, port)).await.map_err(|error| {
                tracing::debug!(%error, "no address");
                Error::Failed("its host is not known")
            })?;
            found.collect()
        }
    };
    let may = |address: &&SocketAddr| reach == Reach::Any || is_public(address.ip());
    let mut allowed = addresses.iter().filter(may).peekable();
    if allowed.peek().is_none() {
        return Err(Error::Denied {
            what: "a host without a public address is",
            key: "private_hosts",
        });
    }
    for address in allowed.take(ADDRESSES_TRIED) {
        match timeout(CONNECT, TcpStream::connect(address)).await {
            Ok(Ok(tcp)) => return Ok(tcp),
            Ok(Err(error)) => tracing::debug!(%error, "no connection"),
            Err(_) => tracing::debug!("no connection in time"),
        }
    }
    Err(Error::Failed("its host does not answer"))
}

async fn exchange<B>(
    io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<B>,
) -> Result<Response<Answer>, Error>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let broken = |error: hyper::Error| {
        tracing::debug!(%error, "no answer");
        Error::Failed("its server does not speak HTTP as it should")
    };
    let mut builder = http1::Builder::new();
    builder.max_buf_size(BUFFER_BYTES);
    let (mut sender, connection) = builder.handshake(TokioIo::new(io)).await.map_err(broken)?;
    // Ends with the answer, which owns it; how it ends the answer tells.
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        let _told_by_the_answer = connection.await;
    }));
    let answer = sender.send_request(request).await.map_err(broken)?;
    Ok(answer.map(|body| Answer {
        body,
        _connection: connection,
    }))
}

/// The body of an answer, together with its connection.
#[derive(Debug)]
pub(super) struct Answer {
    body: Incoming,
    _connection: AbortOnDropHandle<()>,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Time for one address.
const CONNECT: Duration = Duration::from_secs(3);
/// Addresses of one host that are tried.
const ADDRESSES_TRIED: usize = 4;
/// Bytes of an answer's head.
const BUFFER_BYTES: usize = 64 * 1024;
