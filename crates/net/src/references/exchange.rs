//! Sends one HTTP request over its own connection, to a checked address.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Body;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use url::Url;

use super::address::is_public;
use super::error::Error;
use crate::connection::connect_to_any;
use crate::http1::{ResponseBody, exchange};

/// Connects to checked addresses and sends requests.
#[derive(Clone, Debug)]
pub(super) struct Dialler {
    tls: Arc<ClientConfig>,
}

/// Which addresses may be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Public addresses.
    Public,
    /// Any address: the operator has listed the host as private.
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
    ) -> Result<Response<ResponseBody>, Error>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let host = url.host_str().ok_or(Error::Malformed("it has no host"))?;
        // Neither the resolver nor TLS takes the brackets in which a URL has an IPv6 address.
        let host = host.trim_matches(['[', ']']);
        let port = url
            .port_or_known_default()
            .ok_or(Error::Malformed("it has no port"))?;
        // Connected here and not by an HTTP client, which would resolve the name again, honour proxies and reuse
        // connections.
        let tcp = connect(host, port, reach).await?;
        if url.scheme() != "https" {
            return exchange(tcp, request).await.map_err(|error| broken(&error));
        }
        // The certificate is checked for the name in the URL, although the connection goes to an address.
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| Error::Malformed("its host is not a valid TLS server name"))?;
        let tls = TlsConnector::from(Arc::clone(&self.tls));
        let tls = tls.connect(name, tcp).await.map_err(|error| {
            // Details go to the log only: a client could otherwise map the networks behind this server by its errors.
            tracing::debug!(%error, "the TLS handshake failed");
            Error::Failed("the TLS handshake with its server failed")
        })?;
        exchange(tls, request).await.map_err(|error| broken(&error))
    }
}

/// Connects to an address of the host. The name is resolved once, and the checked address is the one that is used, so a
/// later DNS answer cannot change it.
async fn connect(host: &str, port: u16, reach: Reach) -> Result<TcpStream, Error> {
    let addresses = lookup_host((host, port)).await.map_err(|error| {
        tracing::debug!(%error, "could not resolve a host");
        Error::Failed("its host could not be resolved")
    })?;
    // Also for addresses in the URL itself, for which no resolver is asked (EV-414).
    let may = |address: &SocketAddr| reach == Reach::Any || is_public(address.ip());
    let allowed: Vec<_> = addresses.filter(may).take(ADDRESSES_TRIED).collect();
    if allowed.is_empty() {
        return Err(Error::Denied {
            what: "a host without a public address is",
            key: "private_hosts",
        });
    }
    // Short, because ten seconds are all there is for the first byte (EV-416), redirects included.
    match timeout(CONNECT, connect_to_any(allowed)).await {
        Ok(Ok(tcp)) => return Ok(tcp),
        Ok(Err(error)) => tracing::debug!(%error, "could not connect"),
        Err(_) => tracing::debug!("could not connect in time"),
    }
    Err(Error::Failed("its host does not answer"))
}

fn broken(error: &hyper::Error) -> Error {
    tracing::debug!(%error, "no HTTP response");
    Error::Failed("its server did not send a valid HTTP response")
}

/// The time limit of connecting.
const CONNECT: Duration = Duration::from_secs(3);
/// The maximum of addresses of one host that are tried.
const ADDRESSES_TRIED: usize = 4;
