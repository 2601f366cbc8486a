//! A server with TLS on a loopback port, and clients with and without certificates.

use std::sync::Arc;

use axum::routing::get;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use super::*;
use crate::Face;
use crate::Server;
use crate::auth::caller::Caller;
use crate::auth::scopes::{KeyScope, RouteAccess};
use crate::http::route::Route;
use crate::ops::metrics::ServerMetrics;

/// An authority, and a folder with what it signed.
struct Signed {
    authority: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Signed {
    fn new() -> Self {
        let mut about = CertificateParams::default();
        about.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(about, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("authority.pem"), authority.pem()).unwrap();
        let signed = Self { authority, folder };
        signed.server("first");
        signed
    }

    /// A certificate and its key for `name`.
    fn sign(&self, name: &str) -> (CertificateDer<'static>, KeyPair, String) {
        let mut about = CertificateParams::new(vec!["localhost".into()]).unwrap();
        about.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let signed = about.signed_by(&key, &self.authority).unwrap();
        (signed.der().clone(), key, signed.pem())
    }

    /// Puts a new certificate where the server reads its own.
    fn server(&self, name: &str) {
        let (_, key, pem) = self.sign(name);
        fs::write(self.path("server.pem"), pem).unwrap();
        fs::write(self.path("server.key"), key.serialize_pem()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config(&self, mtls: Option<Mtls>) -> Config {
        Config {
            certificate: self.path("server.pem"),
            key: self.path("server.key"),
            clients: mtls.map(|mtls| Clients {
                authority: self.path("authority.pem"),
                mtls,
            }),
        }
    }

    /// A client that trusts the authority, and shows a certificate of this name if one is given.
    fn client(&self, name: Option<&str>) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        match name {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let (certificate, key, _) = self.sign(name);
                let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
                builder
                    .with_client_auth_cert(vec![certificate], key)
                    .unwrap()
            }
        }
    }
}

/// A server whose one route says who asked; gives its address and the handle to reload.
async fn serving(signed: &Signed, mtls: Option<Mtls>) -> (std::net::SocketAddr, Arc<Tls>) {
    let (address, tls, _) = watched(signed, mtls).await;
    (address, tls)
}

/// The same, with what can be seen of it from within.
async fn watched(
    signed: &Signed,
    mtls: Option<Mtls>,
) -> (std::net::SocketAddr, Arc<Tls>, Arc<ServerMetrics>) {
    let tls = Arc::new(Tls::load(signed.config(mtls)).unwrap());
    let config = crate::Config {
        tls: Some(Arc::clone(&tls)),
        ..crate::Config::default()
    };
    let who = |caller: axum::Extension<Caller>| async move { caller.identity.to_string() };
    let face = Face {
        name: crate::ops::metrics::FaceLabel::Http,
        root: None,
        routes: vec![Route::http(
            "/who",
            RouteAccess::Needs(KeyScope::Infer),
            get(who),
        )],
        descriptors: Vec::new(),
        services: Vec::new(),
    };
    let builder = Server::builder(config, Vec::new()).unwrap();
    let metrics = Arc::clone(&builder.shared().metrics);
    let server = builder.face(face).build().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(server.serve(listener, std::future::pending()));
    (address, tls, metrics)
}

const ASK: &[u8] = b"GET /who HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// The answer to one request, and the name in the server's certificate.
async fn ask(address: std::net::SocketAddr, client: ClientConfig) -> io::Result<(String, String)> {
    let socket = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = TlsConnector::from(Arc::new(client))
        .connect(name, socket)
        .await?;
    stream.write_all(ASK).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let shown = stream.get_ref().1.peer_certificates().unwrap()[0].to_vec();
    let (_, certificate) = X509Certificate::from_der(&shown).unwrap();
    let name = certificate.subject().iter_common_name().next().unwrap();
    Ok((answer, name.as_str().unwrap().to_owned()))
}

#[tokio::test]
async fn oa_907_tls_serves_http_and_names_the_client_by_its_certificate() {
    let signed = Signed::new();
    for (mtls, shown, expect) in [
        (None, None, Some("anonymous")),
        (Some(Mtls::Optional), None, Some("anonymous")),
        (Some(Mtls::Optional), Some("anna"), Some("anna")),
        (Some(Mtls::Required), Some("anna"), Some("anna")),
        (Some(Mtls::Required), None, None),
    ] {
        let (address, _) = serving(&signed, mtls).await;
        let answer = ask(address, signed.client(shown)).await;
        match expect {
            Some(name) => assert!(
                answer.as_ref().is_ok_and(|(text, _)| text.ends_with(name)),
                "{answer:?}"
            ),
            None => assert!(answer.is_err(), "{answer:?}"),
        }
    }
}

#[tokio::test]
async fn oa_907_h2_and_http_1_are_offered() {
    let signed = Signed::new();
    let (address, _) = serving(&signed, None).await;
    for (offered, chosen) in [
        ("h2", Some("h2")),
        ("http/1.1", Some("http/1.1")),
        ("spdy", None),
    ] {
        let mut client = signed.client(None);
        client.alpn_protocols = vec![offered.into()];
        let socket = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TlsConnector::from(Arc::new(client))
            .connect(name, socket)
            .await;
        let got = stream
            .ok()
            .and_then(|stream| stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec));
        assert_eq!(got.as_deref(), chosen.map(str::as_bytes), "{offered}");
    }
}

#[tokio::test]
async fn oa_907_plain_http_on_a_tls_port_is_answered_400() {
    let signed = Signed::new();
    let (address, _) = serving(&signed, None).await;
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(ASK).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 400 ") && answer.contains("tls_required"),
        "{answer}"
    );
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(
        answer.contains(&format!("content-length: {}\r\n", body.len())),
        "{answer}"
    );
}

#[tokio::test]
async fn oa_907_a_new_certificate_is_loaded_and_an_invalid_one_is_not() {
    let signed = Signed::new();
    let (address, tls) = serving(&signed, None).await;
    let name = async || ask(address, signed.client(None)).await.unwrap().1;
    assert_eq!(name().await, "first");
    // The server looks at the files as well, so only one that serves nobody says for certain what a look has found.
    let idle = Tls::load(signed.config(None)).unwrap();
    assert!(!idle.reload().unwrap());
    signed.server("second");
    assert!(idle.reload().unwrap());
    tls.reload().unwrap();
    assert_eq!(name().await, "second");
    fs::write(signed.path("server.pem"), "no certificate").unwrap();
    assert!(matches!(
        tls.reload(),
        Err(TlsError::Missing {
            wanted: "certificate",
            ..
        })
    ));
    assert_eq!(name().await, "second");
}

#[test]
fn oa_907_load_errors_name_the_file() {
    let signed = Signed::new();
    let removed = Config {
        key: signed.path("gone.key"),
        ..signed.config(None)
    };
    let swapped = Config {
        key: signed.path("server.pem"),
        ..signed.config(None)
    };
    let (_, other, _) = signed.sign("other");
    fs::write(signed.path("other.key"), other.serialize_pem()).unwrap();
    let foreign = Config {
        key: signed.path("other.key"),
        ..signed.config(None)
    };
    for (config, why) in [
        (removed, "gone.key"),
        (swapped, "holds no private key"),
        (foreign, "cannot be used"),
    ] {
        let error = Tls::load(config).err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// Sends `bytes`, one a second from `begin` on, until it is dropped: when that was.
async fn trickle(address: std::net::SocketAddr, begin: Duration, bytes: &[u8]) -> Duration {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let began = Instant::now();
    let mut next = began + begin;
    let (mut bytes, mut answer) = (bytes.iter(), [0; 64]);
    loop {
        // Both arms may be cancelled: no byte is lost.
        tokio::select! {
            read = socket.read(&mut answer) => match read {
                Ok(1..) => {}
                Ok(0) | Err(_) => return began.elapsed(),
            },
            () = tokio::time::sleep_until(next) => {
                next += Duration::from_secs(1);
                if let Some(byte) = bytes.next() {
                    // That it is dropped is seen by reading.
                    let _ = socket.write_all(&[*byte]).await;
                }
            }
        }
    }
}

/// EV-705
#[tokio::test(start_paused = true)]
async fn oa_911_slow_handshakes_are_dropped_and_block_no_others() {
    let signed = Signed::new();
    let (address, _, metrics) = watched(&signed, None).await;
    let name = ServerName::try_from("localhost").unwrap();
    let client = Arc::new(signed.client(None));
    let mut client = rustls::ClientConnection::new(client, name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    assert!(hello.len() > 60);
    let began = Instant::now();
    let slow = [
        // Nothing at all.
        (0, &[][..], 10),
        // A byte a second.
        (0, &hello[..], 10),
        // The first byte at the last moment, which gives it the limit once more and no longer.
        (9, &hello[..], 19),
        // What is no handshake behind its first byte.
        (0, &[0x16, 3, 1, 0x40][..], 10),
    ];
    let mut peers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        for (begin, bytes, dropped) in slow {
            let bytes = bytes.to_vec();
            peers.spawn(async move {
                let took = trickle(address, Duration::from_secs(begin), &bytes).await;
                assert_eq!(
                    took.as_secs(),
                    dropped,
                    "{} bytes from {begin}",
                    bytes.len()
                );
            });
        }
    }
    // Among all of these an honest one is served, at once.
    for after in [0, 5, 9] {
        tokio::time::sleep_until(began + Duration::from_secs(after)).await;
        let (answer, _) = ask(address, signed.client(None)).await.unwrap();
        assert!(answer.ends_with("anonymous"), "{answer}");
        assert_eq!(began.elapsed().as_secs(), after);
    }
    while let Some(peer) = peers.join_next().await {
        peer.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(metrics.connections_open.get(), 0);
}
