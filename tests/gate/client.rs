//! Bare requests over either version of HTTP, without TLS or over TLS with a certificate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use sapwood_server::listener::tls::{Clients, Config, Mtls, Tls};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use sapwood_tests::WAIT_LIMIT;

/// The version of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    One,
    Two,
}

/// The address, version and transport of requests.
#[derive(Clone)]
pub(super) struct Way {
    pub(super) address: SocketAddr,
    pub(super) version: Version,
    pub(super) tls: Option<Arc<ClientConfig>>,
}

/// The parts of a response that show whether the caller was let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reported {
    /// The HTTP status, or the one that corresponds to a gRPC status in the head.
    pub(super) class: u16,
    pub(super) headers: HeaderMap,
    /// The body of an error response.
    pub(super) body: Bytes,
}

enum Sender {
    One(http1::SendRequest<Empty<Bytes>>),
    Two(http2::SendRequest<Empty<Bytes>>),
}

/// A connection that is opened on first use.
pub(super) struct Client {
    way: Way,
    sender: Option<Sender>,
}

impl Client {
    pub(super) fn new(way: Way) -> Self {
        Self { way, sender: None }
    }

    /// Sends one request and returns what the response shows. A request that was let in is not waited for.
    pub(super) async fn ask(&mut self, request: Request<Empty<Bytes>>) -> Reported {
        let asking = async {
            let answer = match self.sender().await {
                Sender::One(sender) => sender.send_request(request).await,
                Sender::Two(sender) => sender.send_request(request).await,
            };
            classify(answer.unwrap()).await
        };
        let (received, whole) = timeout(WAIT_LIMIT, asking)
            .await
            .expect("a response in time");
        if !whole && self.way.version == Version::One {
            self.sender = None;
        }
        received
    }

    async fn sender(&mut self) -> &mut Sender {
        let open = match &self.sender {
            Some(Sender::One(sender)) => !sender.is_closed(),
            Some(Sender::Two(sender)) => !sender.is_closed(),
            None => false,
        };
        if !open {
            self.sender = Some(open_to(&self.way).await);
        }
        let sender = self.sender.as_mut().unwrap();
        if let Sender::One(sender) = sender
            && sender.ready().await.is_err()
        {
            self.sender = Some(open_to(&self.way).await);
        }
        self.sender.as_mut().unwrap()
    }
}

async fn open_to(way: &Way) -> Sender {
    let tcp = TcpStream::connect(way.address).await.unwrap();
    match &way.tls {
        None => handshake(tcp, way.version).await,
        Some(config) => {
            let mut config = ClientConfig::clone(config);
            config.alpn_protocols = match way.version {
                Version::One => vec![b"http/1.1".to_vec()],
                Version::Two => vec![b"h2".to_vec()],
            };
            let connector = TlsConnector::from(Arc::new(config));
            let name = ServerName::try_from("localhost").unwrap();
            let tls = connector.connect(name, tcp).await.unwrap();
            handshake(tls, way.version).await
        }
    }
}

async fn handshake<S>(socket: S, version: Version) -> Sender
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(socket);
    match version {
        Version::One => {
            let (sender, connection) = http1::handshake(io).await.unwrap();
            tokio::spawn(connection.with_upgrades());
            Sender::One(sender)
        }
        Version::Two => {
            let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
            tokio::spawn(connection);
            Sender::Two(sender)
        }
    }
}

/// What a response shows, and whether all of it was read.
async fn classify(answer: Response<Incoming>) -> (Reported, bool) {
    let (head, body) = answer.into_parts();
    let grpc = head.headers.get("grpc-status");
    let class = match grpc.and_then(|status| status.to_str().ok()) {
        Some("16") => 401,
        Some("7") => 403,
        Some("5") => 404,
        Some("12") => 501,
        _ => head.status.as_u16(),
    };
    let refused = class >= 400;
    let body = if refused {
        timeout(READ, body.collect()).await.ok()
    } else {
        None
    };
    let whole = matches!(body, Some(Ok(_)));
    let body = body.and_then(Result::ok).map(|body| body.to_bytes());
    let received = Reported {
        class,
        headers: head.headers,
        body: body.unwrap_or_default(),
    };
    (received, whole)
}

/// Error responses are immediate; a response that takes longer is none.
const READ: Duration = Duration::from_secs(10);

/// A certificate authority in a folder: a server's certificate, and certificates of clients.
pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Authority {
    pub(super) fn new() -> Self {
        let mut about = CertificateParams::default();
        about.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(about, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("authority.pem"), issuer.pem()).unwrap();
        let authority = Self { issuer, folder };
        let (certificate, key) = authority.sign("server");
        std::fs::write(authority.path("server.pem"), certificate.pem()).unwrap();
        std::fs::write(authority.path("server.key"), key.serialize_pem()).unwrap();
        authority
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn sign(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let mut about = CertificateParams::new(vec!["localhost".into()]).unwrap();
        about.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        (about.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// TLS for a server that requires a client certificate, or accepts clients without one.
    pub(super) fn tls(&self, mtls: Mtls) -> Arc<Tls> {
        let config = Config {
            certificate: self.path("server.pem"),
            key: self.path("server.key"),
            clients: Some(Clients {
                authority: self.path("authority.pem"),
                mtls,
            }),
        };
        Arc::new(Tls::load(config).unwrap())
    }

    /// A client with a certificate of this common name, if any.
    pub(super) fn client(&self, name: Option<&str>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        Arc::new(match name {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let (certificate, key) = self.sign(name);
                let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
                let chain = vec![certificate.der().clone()];
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        })
    }
}
