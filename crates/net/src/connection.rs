//! Connections to hosts, in the clear or over TLS, as clients need them.
//!
//! Owns: [`connect`], [`dial`], [`Tls`]. Refuses to know: what is spoken on a connection.

use std::io;
use std::sync::Arc;

use http::Uri;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::tls;

/// A connection of whatever kind.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// How TLS is spoken to one host. Clones share what was read once.
#[derive(Clone)]
pub(crate) struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

/// Why there is none.
#[derive(Debug)]
pub(crate) enum Unreached {
    /// The address, or the authorities to trust, cannot be used ever.
    Bad(&'static str),
    /// Nobody answers there, or not as it should be.
    Gone(io::Error),
}

impl From<io::Error> for Unreached {
    fn from(error: io::Error) -> Self {
        Self::Gone(error)
    }
}

/// Connects to the host of `uri`; `secure`: over TLS, with `authorities` (PEM) trusted beside the well-known ones.
pub(crate) async fn connect(
    uri: &Uri,
    secure: bool,
    authorities: Option<&[u8]>,
) -> Result<Box<dyn Io>, Unreached> {
    let host = uri.host().ok_or(Unreached::Bad("it has no host"))?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let default = if secure { 443 } else { 80 };
    let port = uri.port_u16().unwrap_or(default);
    let tls = if secure {
        Some(tls(host, authorities)?)
    } else {
        None
    };
    Ok(dial(host, port, tls).await?)
}

/// TLS to the host of this name.
///
/// # Errors
/// [`Unreached::Bad`].
pub(crate) fn tls(host: &str, authorities: Option<&[u8]>) -> Result<Tls, Unreached> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| Unreached::Bad("its host is no name that a certificate could have"))?;
    let config = tls::client(authorities).map_err(|bad| Unreached::Bad(bad.why()))?;
    Ok(Tls {
        connector: TlsConnector::from(Arc::new(config)),
        name,
    })
}

/// Connects to a host, over TLS if that is given.
pub(crate) async fn dial(host: &str, port: u16, tls: Option<Tls>) -> io::Result<Box<dyn Io>> {
    let tcp = TcpStream::connect((host, port)).await?;
    tcp.set_nodelay(true)?;
    match tls {
        Some(tls) => Ok(Box::new(tls.connector.connect(tls.name, tcp).await?)),
        None => Ok(Box::new(tcp)),
    }
}
