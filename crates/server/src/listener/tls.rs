//! TLS on the listener, with certificates that can be reloaded while it serves (OA-907).

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use std::{fmt, fs, io};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Whether clients must present a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mtls {
    /// A client without one is admitted, and needs a key where keys are configured.
    Optional,
    /// A client without one fails the handshake.
    #[default]
    Required,
}

/// The authority that signs clients' certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clients {
    /// PEM file of one or more certificates.
    pub authority: PathBuf,
    /// Whether each client must present one.
    pub mtls: Mtls,
}

/// The files of TLS, all PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The server's certificate and the chain above it.
    pub certificate: PathBuf,
    /// Its private key (PKCS#8, PKCS#1 or SEC1).
    pub key: PathBuf,
    /// Client certificates, if they are asked for.
    pub clients: Option<Clients>,
}

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A file has no PEM block of the expected kind.
    #[error("{path} holds no {wanted} in PEM form")]
    Missing {
        /// The file.
        path: PathBuf,
        /// `certificate` or `private key`.
        wanted: &'static str,
    },
    /// The files are readable but do not fit each other.
    #[error("the certificate and its key cannot be used: {0}")]
    Unusable(String),
}

/// The name in a client's certificate, verified; stands in the extensions of its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject(pub Arc<str>);

/// The configuration in use, and the bytes of its files, by which a change is detected.
struct Loaded {
    bytes: Vec<Vec<u8>>,
    server: Arc<ServerConfig>,
}

/// Files that were read and checked, ready for [`Tls::apply`].
pub struct PreparedTls(Loaded);

/// TLS with reloadable certificates. Shared; the configuration is replaced as a whole when the files change.
pub struct Tls {
    config: Config,
    loaded: RwLock<Loaded>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without `loaded`, which has the bytes of the private key.
        f.debug_struct("Tls")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`], naming the file.
    pub fn load(config: Config) -> Result<Self, TlsError> {
        let loaded = load(&config, read(&config)?)?;
        Ok(Self {
            config,
            loaded: RwLock::new(loaded),
        })
    }

    /// Whether clients are asked for certificates.
    #[must_use]
    pub const fn asks_clients(&self) -> bool {
        self.config.clients.is_some()
    }

    /// Reads the files again; open connections are not affected. True if something changed.
    ///
    /// # Errors
    /// [`TlsError`]; the previous configuration stays in use.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let prepared = self.prepare()?;
        let changed = prepared.is_some();
        if let Some(prepared) = prepared {
            self.apply(prepared);
        }
        Ok(changed)
    }

    /// Reads and checks the files without using them yet; `None` if nothing changed.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn prepare(&self) -> Result<Option<PreparedTls>, TlsError> {
        let bytes = read(&self.config)?;
        // Compares bytes and not times: a file that is written again with the same content changes nothing, and session tickets
        // stay valid.
        let same = |loaded: &Loaded| loaded.bytes == bytes;
        // Unlocked before the files are parsed: handshakes take the same lock.
        if same(&self.loaded.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(None);
        }
        load(&self.config, bytes).map(PreparedTls).map(Some)
    }

    /// Uses prepared files from now on; open connections are not affected.
    pub fn apply(&self, PreparedTls(loaded): PreparedTls) {
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded;
    }

    /// Checks the files every [`LOOK`], for ever. That is cheap, and unlike a watch on the file system it also notices mounted
    /// secrets and changed links.
    pub(crate) async fn follow(self: Arc<Self>) {
        let mut tick = tokio::time::interval(LOOK);
        loop {
            tick.tick().await;
            let tls = Arc::clone(&self);
            // Reading files may block.
            match tokio::task::spawn_blocking(move || tls.reload()).await {
                Ok(Ok(true)) => tracing::info!("reloaded the TLS certificate"),
                Ok(Ok(false)) => {}
                // With each check, until it is fixed: the previous certificate expires some day.
                Ok(Err(error)) => {
                    tracing::error!(%error, "could not reload the certificate: the old one stays in use");
                }
                // The next check may succeed.
                Err(error) if error.is_panic() => {
                    tracing::error!(%error, "checking the certificate panicked");
                }
                // The runtime is being shut down.
                Err(_) => return,
            }
        }
    }

    /// Does the handshake. The caller sets the time limit.
    pub(crate) async fn accept<S>(&self, socket: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        // Locked for the clone only: a handshake may take ten seconds, and a reload must not wait for it.
        let server = {
            let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(&loaded.server)
        };
        TlsAcceptor::from(server).accept(socket).await
    }
}

/// The subject of the client's certificate, or `None` without one: its common name if it has exactly one, else the whole
/// distinguished name.
pub(crate) fn subject<S>(stream: &TlsStream<S>) -> Option<Subject> {
    let shown = stream.get_ref().1.peer_certificates()?.first()?;
    let (_, certificate) = X509Certificate::from_der(shown).ok()?;
    let subject = certificate.subject();
    let mut common = subject.iter_common_name();
    let name = match (common.next(), common.next()) {
        // With `=` it could equal the distinguished name of another certificate, and so take its identity.
        (Some(name), None) => name.as_str().ok().filter(|name| !name.contains('=')),
        _ => None,
    };
    let name = name.map_or_else(|| subject.to_string(), str::to_owned);
    Some(Subject(name.into()))
}

/// The bytes of all files, in a fixed order.
fn read(config: &Config) -> Result<Vec<Vec<u8>>, TlsError> {
    let authority = config.clients.iter().map(|clients| &clients.authority);
    [&config.certificate, &config.key]
        .into_iter()
        .chain(authority)
        .map(|path| {
            fs::read(path).map_err(|error| TlsError::Read {
                path: path.clone(),
                error,
            })
        })
        .collect()
}

fn load(config: &Config, bytes: Vec<Vec<u8>>) -> Result<Loaded, TlsError> {
    // The order of `read`: certificate, key, authority.
    let chain = certificates(&config.certificate, &bytes[0])?;
    let key = PrivateKeyDer::from_pem_slice(&bytes[1]).map_err(|_| TlsError::Missing {
        path: config.key.clone(),
        wanted: "private key",
    })?;
    let unusable = |error: rustls::Error| TlsError::Unusable(error.to_string());
    let verifier = match &config.clients {
        None => WebPkiClientVerifier::no_client_auth(),
        Some(clients) => verifier(clients, &bytes[2])?,
    };
    // Named, because rustls has no default provider as soon as a dependency enables a second one.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(unusable)?;
    // HTTP/2 first: the server's order decides.
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Loaded {
        bytes,
        server: Arc::new(server),
    })
}

fn verifier(clients: &Clients, bytes: &[u8]) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&clients.authority, bytes)? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::Unusable(error.to_string()))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let builder = match clients.mtls {
        Mtls::Optional => builder.allow_unauthenticated(),
        Mtls::Required => builder,
    };
    builder
        .build()
        .map_err(|error| TlsError::Unusable(error.to_string()))
}

fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        _ => Err(TlsError::Missing {
            path: path.to_owned(),
            wanted: "certificate",
        }),
    }
}

const LOOK: Duration = Duration::from_secs(10);

/// The first byte of a TLS connection: a handshake record.
pub(crate) const HANDSHAKE: u8 = 0x16;

/// Answers a client that sends plain HTTP to a TLS port (OA-907).
pub(crate) async fn answer_plain<S>(mut socket: S) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // The request is read first: closing over unread bytes resets the connection, and the client loses the answer.
    let mut asked = [0; 4096];
    let _ = socket.read(&mut asked).await?;
    let body = r#"{"error":{"message":"This port requires TLS: use https://","type":"invalid_request_error","param":null,"code":"tls_required"}}"#;
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await?;
    socket.write_all(body.as_bytes()).await?;
    socket.shutdown().await
}

#[cfg(test)]
mod tests;
