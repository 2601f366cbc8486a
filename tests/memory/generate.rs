//! Memory after streams of the Triton face that are abandoned in every way.

use std::time::Duration;

use sapwood_server::faces::generate;
use sapwood_tests::http::{Head, Wire, head, post};
use sapwood_tests::{Faces, Running};

use super::TURN;
use super::test_server::TestServer;

const STREAM: &str = "/v2/models/m/generate_stream";
const BODY: &[u8] = br#"{"id":"a","text_input":"x","stream":true,"max_tokens":4000}"#;

/// Resumable streams are removed at once.
async fn open() -> TestServer {
    TestServer::open(Faces {
        generate: generate::Config {
            resume_grace: Duration::ZERO,
            // So small that a stream pauses before its end.
            resume_bytes: 64 << 10,
            ..generate::Config::default()
        },
        ..Faces::default()
    })
    .await
}

/// A resumable stream that has sent an event, and the path to resume it.
async fn begin(server: &Running, headers: &[&str]) -> (Wire, String) {
    let mut wire = Wire::connect(server.address).await;
    wire.send(post(STREAM, headers, BODY)).await;
    let head: Head = wire.head().await;
    wire.chunk().await.unwrap();
    let name = head.header("sapwood-stream-id").unwrap_or_default();
    (wire, format!("/v2/streams/{name}"))
}

/// The number of ways to use and leave a stream.
const WAYS: usize = 6;

/// A client that uses and leaves a stream in one of the [`WAYS`].
async fn visit(server: &Running, way: usize) {
    let resume = "sapwood-resume: 1";
    let mut other = Wire::connect(server.address).await;
    match way {
        // Before the first event, and in the middle.
        0 => other.send(post(STREAM, &[resume], BODY)).await,
        1 => drop(begin(server, &[]).await),
        // Resumable, with no grace.
        2 => drop(begin(server, &[resume]).await),
        // Cancelled by DELETE.
        3 => {
            let (_wire, path) = begin(server, &[resume]).await;
            let answer = other.ask(head("DELETE", &path, &[])).await;
            assert_eq!(answer.summary().0, 204);
        }
        // Resumed while it was connected, or too late.
        4 => {
            let (_wire, path) = begin(server, &[resume]).await;
            other.send(head("GET", &path, &[])).await;
            // Unread events are sent, and soon evicted.
            if other.head().await.status == 200 {
                other.chunk().await.unwrap();
            }
        }
        // Read to its end.
        _ => {
            let request = post(STREAM, &[resume], br#"{"text_input":"x","max_tokens":20}"#);
            assert!(other.ask(request).await.complete);
        }
    }
}

/// TR-608, TR-609
#[tokio::test]
async fn tr_1303_clients_that_leave_in_any_way_leave_no_sequences_tasks_or_memory() {
    let _turn = TURN.lock().await;
    let context = open().await;
    context
        .keeps_nothing(WAYS, async |way| visit(&context.server, way).await)
        .await;
}
