//! An Evergreen session over TLS.

use std::sync::Arc;

use bytes::Bytes;
use sapwood_kernel::Kernel;
use sapwood_kernel::session::test_functions;
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Metadata;
use sapwood_server::faces::evergreen::Config;
use sapwood_server::listener::tls::{self, Tls};
use sapwood_server::server;

use sapwood_tests::{Running, request};

/// A client has to trust the server's certificate; then the session runs as without TLS.
#[tokio::test]
async fn oa_907_an_evergreen_session_runs_inside_tls() {
    let folder = tempfile::tempdir().unwrap();
    let signed = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into()]).unwrap();
    let (certificate, key) = (
        folder.path().join("server.pem"),
        folder.path().join("server.key"),
    );
    std::fs::write(&certificate, signed.cert.pem()).unwrap();
    std::fs::write(&key, signed.signing_key.serialize_pem()).unwrap();
    let files = tls::Config {
        certificate,
        key,
        clients: None,
    };
    let config = server::Config {
        tls: Some(Arc::new(Tls::load(files).unwrap())),
        ..server::Config::default()
    };
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let server = Running::start_with(config, kernel, Config::default(), Vec::new()).await;

    for scheme in ["https", "wss", "evergreen+wss"] {
        let mut address = ServerAddress::new(format!("{scheme}://{}", server.address));
        let stranger = ClientSession::connect(&address, ClientSessionOptions::default()).await;
        assert_eq!(stranger.err().unwrap().code, Code::Unavailable, "{scheme}");
        address.authorities = Some(signed.cert.pem().into_bytes());
        echo(&address).await;
    }
}

async fn echo(address: &ServerAddress) {
    let session = ClientSession::connect(address, ClientSessionOptions::default())
        .await
        .unwrap();
    let metadata = Arc::new(Metadata::of("text/plain"));
    let mut input = session.write().unwrap();
    let call = session
        .call(request("echo", &[("text", input.node())], &["response"]))
        .unwrap();
    input
        .write(&metadata, Bytes::from_static(b"safe"))
        .await
        .unwrap();
    input.end(&metadata).unwrap();
    let echoed = call
        .output("response")
        .unwrap()
        .read()
        .whole()
        .await
        .unwrap();
    assert_eq!(echoed, b"safe");
}
