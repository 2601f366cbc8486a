//! Clients that do not read their responses.

use std::time::Duration;

use sapwood_engine::scripted::{self, Script};
use sapwood_proto::generate::RequestLimits;
use sapwood_server::faces::generate::Config;
use sapwood_server::server;
use sapwood_tests::http::post;
use sapwood_tests::{Faces, Running, spawned, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;

use super::{ask, script};

/// The response of a client that reads nothing is cut and its sequence freed; other clients are not affected.
#[tokio::test(flavor = "multi_thread")]
async fn tr_609_a_client_that_never_reads_is_reset_and_its_sequence_freed() {
    let engine = spawned(scripted::Config {
        context_tokens: 10_000_000,
        parallel: 2,
        kept_prefixes: 0,
        ..script(Script::Tokens)
    });
    let kernel = sapwood_kernel::Kernel::new();
    kernel
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let mut config = server::Config::default();
    config.listener.stall = Duration::from_millis(100);
    let faces = Faces {
        generate: Config {
            limits: RequestLimits {
                new_tokens: 0,
                ..RequestLimits::default()
            },
            ..Config::default()
        },
        ..Faces::default()
    };
    let server = Running::start_faces(config, kernel, faces, Vec::new()).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let mut socket = socket.connect(server.address).await.unwrap();
    // Each event repeats the id, so that the socket buffers are full soon.
    let id = "i".repeat(1_000);
    let body = format!(r#"{{"id":"{id}","text_input":"x","stream":true,"max_tokens":9000000}}"#);
    let request = post("/v2/models/m/generate_stream", &[], body.as_bytes());
    socket.write_all(&request).await.unwrap();
    let running = || engine.stats().requests_running.get();
    until("the sequence waits for its reader", || {
        engine.stats().streams_parked.get() == 1
    })
    .await;
    let other = r#"{"text_input":"x","max_tokens":3}"#;
    let other = ask(&server, "/v2/models/m/generate", other).await;
    assert_eq!(other.summary().0, 200);
    until("the sequence is gone", || running() == 0).await;
    let mut seen = Vec::new();
    let end = socket.read_to_end(&mut seen).await;
    // Whether the client sees an end or a reset depends on its operating system.
    let cut = end.is_err() || !seen.ends_with(b"0\r\n\r\n");
    assert!(cut && seen.starts_with(b"HTTP/1.1 200 OK"));
    let cancelled = &server.shared.metrics.cancelled;
    let counted = ["stall", "client"].map(|why| cancelled.with_label_values(&[why]).get());
    assert_eq!(counted, [1, 0], "once");
}
