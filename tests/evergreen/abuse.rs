//! Abuse of the Evergreen face over real sockets: floods, malformed input, idle connections, memory.

mod dialects;
mod floods;
mod graphs;
mod idle;
mod pieces;
mod sizes;

use sapwood_net::evergreen::{ClientSession, ClientSessionOptions, ServerAddress};
use sapwood_tests::{Running, WAIT_LIMIT, request};

use super::loopback::{text, whole};

/// Serves a new, well-behaved client at once, over gRPC and over a WebSocket, beside the connections that are open.
async fn honest(server: &Running) {
    for scheme in ["http", "ws"] {
        let served = async {
            let address = ServerAddress::new(format!("{scheme}://{}", server.address));
            let session = ClientSession::connect(&address, ClientSessionOptions::default())
                .await
                .unwrap();
            let mut writer = session.write().unwrap();
            writer.write(&text(""), "ping".into()).await.unwrap();
            let input = writer.end(&text("")).unwrap();
            let call = session.call(request("echo", &[("text", &input)], &["response"]));
            let call = call.unwrap();
            assert_eq!(whole(call.output("response")).await, "ping");
            drop((input, call));
            session.close().await.unwrap();
        };
        let served = tokio::time::timeout(WAIT_LIMIT, served).await;
        served.expect("a well-behaved client is served at once");
    }
}

/// Well-behaved clients are served, and no connection, session, action or retained byte is left.
async fn unharmed(server: &Running) {
    honest(server).await;
    let numbers = &server.shared.metrics;
    let evergreen = &numbers.evergreen;
    let left = || {
        [
            &numbers.connections_open,
            &evergreen.sessions_open,
            &evergreen.actions_open,
            &evergreen.retained_bytes,
        ]
        .map(|gauge| gauge.get())
    };
    let removed = async {
        while left() != [0; 4] {
            tokio::task::yield_now().await;
        }
    };
    if tokio::time::timeout(WAIT_LIMIT, removed).await.is_err() {
        panic!(
            "left of connections, sessions, actions, bytes: {:?}",
            left()
        );
    }
    assert_eq!(numbers.panics.get(), 0);
}
