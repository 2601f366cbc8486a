//! Client connections to hosts, in plain text or over TLS.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use http::{HeaderMap, Request, Uri};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::sleep;
use tokio_rustls::TlsConnector;
use tokio_tungstenite::tungstenite::{self, protocol::WebSocketConfig};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use crate::tls;

/// A connection of any kind.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The TLS settings for one host. Clones share the configuration, which is read once.
#[derive(Clone)]
pub(crate) struct ClientTls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

/// Why a connection failed.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// The address or the authorities are invalid; a retry cannot succeed.
    Bad(&'static str),
    /// The peer does not answer, or TLS or the protocol failed.
    Unreachable(io::Error),
}

impl From<&'static str> for ConnectError {
    fn from(why: &'static str) -> Self {
        Self::Bad(why)
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        Self::Unreachable(error)
    }
}

/// Connects to the host of `uri`: for `https` and `wss` over TLS, with `authorities` (PEM) trusted beside the well-known ones.
pub(crate) async fn connect(
    uri: &Uri,
    authorities: Option<&[u8]>,
) -> Result<Box<dyn Io>, ConnectError> {
    let host = bare_host(uri)?;
    let (default, tls) = if is_secure(uri) {
        (443, Some(tls(host, authorities)?))
    } else {
        (80, None)
    };
    let port = uri.port_u16().unwrap_or(default);
    Ok(dial(host, port, tls).await?)
}

/// Begins TLS with the host of `uri` as [`connect`] does, over a connection that leads to it.
pub(crate) async fn connect_within(
    io: Box<dyn Io>,
    uri: &Uri,
    authorities: Option<&[u8]>,
) -> Result<Box<dyn Io>, ConnectError> {
    let tls = tls(bare_host(uri)?, authorities)?;
    Ok(Box::new(tls.connector.connect(tls.name, io).await?))
}

/// The host without the brackets in which a URL has an IPv6 address: neither the resolver nor TLS takes them.
fn bare_host(uri: &Uri) -> Result<&str, &'static str> {
    let host = uri.host().ok_or("it has no host")?;
    Ok(host.trim_matches(['[', ']']))
}

/// Returns whether the scheme of a URL, with or without a prefix such as `evergreen+`, asks for TLS.
pub(crate) fn is_secure(uri: &Uri) -> bool {
    let transport = uri
        .scheme_str()
        .and_then(|scheme| scheme.rsplit('+').next());
    matches!(transport, Some("https" | "wss" | "grpcs"))
}

/// Returns the endpoint of a server of gRPC: for `https` over TLS, with `authorities` (PEM) trusted beside the well-known ones.
///
/// # Errors
/// The authorities are invalid.
pub(crate) fn grpc_endpoint(
    uri: Uri,
    authorities: Option<&[u8]>,
) -> Result<Endpoint, &'static str> {
    let secure = is_secure(&uri);
    let endpoint = Endpoint::from(uri);
    if !secure {
        return Ok(endpoint);
    }
    // tonic's own TLS settings, because its channel takes no others; they trust what `tls::client` trusts.
    let mut tls = ClientTlsConfig::new().with_webpki_roots();
    if let Some(pem) = authorities {
        tls = tls.ca_certificate(Certificate::from_pem(pem));
    }
    endpoint.tls_config(tls).map_err(|_| tls::AUTHORITIES)
}

/// Upgrades `io` to a WebSocket; returns it with the headers of the answer.
///
/// # Errors
/// The server refuses the upgrade, or the connection is lost.
pub(crate) async fn websocket<T: Io>(
    request: Request<()>,
    io: T,
) -> Result<(WebSocketStream<T>, HeaderMap), tungstenite::Error> {
    let config = WebSocketConfig::default()
        // The library's default is 128 KiB for each connection, and each session of Evergreen has its own.
        .read_buffer_size(BUFFER_BYTES)
        .write_buffer_size(BUFFER_BYTES)
        // The server is not trusted: a message is limited, however many frames it has (EV-705).
        .max_message_size(Some(MESSAGE_BYTES_MAX))
        .max_frame_size(Some(MESSAGE_BYTES_MAX));
    let (socket, answer) = client_async_with_config(request, io, Some(config)).await?;
    Ok((socket, answer.into_parts().0.headers))
}

/// The reason of a status for a failed TLS handshake: the server's certificate is not trusted, or the server does not
/// speak TLS.
pub const UNTRUSTED: &str = "UNTRUSTED_SERVER";

/// The reason of a status for a connection that could not be established: nothing listens at the address, or it is
/// unreachable.
pub const NO_ANSWER: &str = "NO_ANSWER";

/// Returns a description of the TLS error that caused an error, if there is one.
pub(crate) fn distrust(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    let mut next = Some(error);
    while let Some(error) = next {
        // `io::Error` does not return the error that it wraps from `source`.
        let inner = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        let inner = inner.map(|inner| inner as &(dyn std::error::Error + 'static));
        if let Some(why) = [Some(error), inner].into_iter().flatten().find_map(of_tls) {
            return Some(why);
        }
        next = inner.or_else(|| error.source());
    }
    None
}

fn of_tls(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    use rustls::{CertificateError, Error};
    Some(match error.downcast_ref::<Error>()? {
        Error::InvalidCertificate(why) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "its certificate has expired"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "its certificate is not valid yet"
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "its certificate is for another name"
            }
            _ => "its certificate is not signed by a trusted authority",
        },
        Error::InvalidMessage(_) => "it does not speak TLS",
        Error::AlertReceived(_) => "it refused TLS: it may want a client certificate",
        _ => return None,
    })
}

/// Returns whether `host`, a name or an address, with or without brackets, is this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    let name = host.to_ascii_lowercase();
    name == "localhost"
        // RFC 6761 reserves the whole domain for this machine.
        || name.ends_with(".localhost")
        || host
            .parse::<IpAddr>()
            // Canonical: `::ffff:127.0.0.1` is loopback too.
            .is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Returns the TLS settings for the host of this name.
///
/// # Errors
/// The host or the authorities are invalid.
pub(crate) fn tls(host: &str, authorities: Option<&[u8]>) -> Result<ClientTls, &'static str> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| "its host is not a valid TLS server name")?;
    let config = tls::client(authorities)?;
    Ok(ClientTls {
        connector: TlsConnector::from(Arc::new(config)),
        name,
    })
}

/// Connects to a host, over TLS if settings are given.
pub(crate) async fn dial(host: &str, port: u16, tls: Option<ClientTls>) -> io::Result<Box<dyn Io>> {
    let addresses = lookup_host((host, port)).await?.collect();
    // TLS begins after the race: only one of the addresses gets a handshake.
    let tcp = connect_to_any(addresses).await?;
    match tls {
        Some(tls) => Ok(Box::new(tls.connector.connect(tls.name, tcp).await?)),
        None => Ok(Box::new(tcp)),
    }
}

/// Connects to one of the addresses of a host.
pub(crate) async fn connect_to_any(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let tcp = race(alternating(addresses), TcpStream::connect).await?;
    // Small messages, such as a CANCEL or one token, must not wait for the acknowledgement of those before.
    tcp.set_nodelay(true)?;
    Ok(tcp)
}

/// Tries the addresses of one host as RFC 8305 describes: each gets a head start before the next one is tried
/// concurrently, and the first that connects is used. An address that drops packets costs one head start, not the whole
/// connect timeout. The connector of `hyper-util` gives a head start to the second family alone, and waits for each address
/// of one family in turn.
async fn race<T, F: Future<Output = io::Result<T>>>(
    addresses: Vec<SocketAddr>,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T> {
    let mut left = addresses.into_iter();
    let mut trying = FuturesUnordered::new();
    let mut first = None;
    loop {
        let next = left.next();
        let more = next.is_some();
        trying.extend(next.map(&connect));
        loop {
            // Both branches are cancel-safe: attempts in progress stay in `trying`.
            tokio::select! {
                tried = trying.next() => match tried {
                    Some(Ok(connected)) => return Ok(connected),
                    // The first error is that of the address which the resolver prefers; the others often only say that
                    // IPv6 is off.
                    Some(Err(error)) => first = first.or(Some(error)),
                    None => return Err(first.unwrap_or_else(nowhere)),
                },
                // Without a next address there is nothing to start; the timeout is the caller's.
                () = sleep(HEAD_START), if more => {}
            }
            // A failed attempt starts the next one at once. After the last one only the results are left to wait for.
            if more {
                break;
            }
        }
    }
}

/// Alternates between both address families, beginning with the one that the resolver prefers: a whole family may be
/// unreachable.
fn alternating(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let is_first = |address: &SocketAddr| {
        addresses.first().map(SocketAddr::is_ipv4) == Some(address.is_ipv4())
    };
    let (mut preferred, mut others) = (
        addresses.iter().copied().filter(is_first),
        addresses
            .iter()
            .copied()
            .filter(|address| !is_first(address)),
    );
    let mut all = Vec::with_capacity(addresses.len());
    while all.len() < addresses.len() {
        all.extend(preferred.next());
        all.extend(others.next());
    }
    all
}

fn nowhere() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the host has no address")
}

/// Bytes of a WebSocket that are read or written at once.
const BUFFER_BYTES: usize = 32 * 1024;
/// The maximum of bytes of a message of a WebSocket.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// The head start of each address before the next one is tried too.
const HEAD_START: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::Instant;

    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn address_families_alternate() {
        let v6 = ["[::1]:1", "[::2]:1", "[::3]:1"].map(at);
        let v4 = ["1.1.1.1:1"].map(at);
        let all = [&v6[..], &v4[..]].concat();
        let expect = vec![v6[0], v4[0], v6[1], v6[2]];
        assert_eq!(alternating(all), expect);
        assert_eq!(alternating(Vec::new()), []);
    }

    /// How each address behaves, which one is used, and when each was tried.
    #[tokio::test(start_paused = true)]
    async fn an_unresponsive_address_delays_connecting_by_one_head_start() {
        let silent = Duration::from_secs(3_600);
        for (delays, taken, tried) in [
            (vec![Some(0)], Some(0), vec![0]),
            (vec![None, Some(100)], Some(1), vec![0, 250]),
            // A slow address is not given up.
            (vec![Some(400), None, None], Some(0), vec![0, 250]),
            (vec![], None, vec![]),
        ] {
            let began = Instant::now();
            let log = RefCell::new(Vec::new());
            let addresses = (1..)
                .zip(&delays)
                .map(|(port, _)| at(&format!("1.1.1.1:{port}")));
            let connected = race(addresses.collect(), |address| {
                log.borrow_mut().push(began.elapsed().as_millis() as u64);
                let index = usize::from(address.port() - 1);
                let delay = delays[index].map_or(silent, Duration::from_millis);
                async move {
                    sleep(delay).await;
                    Ok(index)
                }
            });
            assert_eq!(connected.await.ok(), taken, "{delays:?}");
            assert_eq!(log.into_inner(), tried, "{delays:?}");
        }
    }

    /// After a refusal the next address is tried at once, and the first refusal is reported.
    #[tokio::test(start_paused = true)]
    async fn a_refused_address_starts_the_next_attempt_at_once() {
        let began = Instant::now();
        let addresses = ["1.1.1.1:1", "1.1.1.1:2", "1.1.1.1:3"].map(at).to_vec();
        let refused = race(addresses, |address| async move {
            Err::<(), _>(io::Error::other(address.port().to_string()))
        });
        assert_eq!(refused.await.unwrap_err().to_string(), "1");
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
