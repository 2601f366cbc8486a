//! Streams of the Triton face that are left in every way there is: what is left of them.

use std::time::Duration;

use sapwood_engine::scripted::{self, Script};
use sapwood_engine::{Config, Engine};
use sapwood_kernel::{Kernel, model};
use sapwood_server::generate;
use sapwood_tests::http::{Head, Wire, head, post};
use sapwood_tests::{Running, scripted as played, until};

use super::{TURN, held, lmtp::tasks, usual_growth};

/// Tokens in the model's cache.
const CELLS: u32 = 1 << 13;
const STREAM: &str = "/v2/models/m/generate_stream";
const BODY: &[u8] = br#"{"id":"a","text_input":"x","stream":true,"max_tokens":4000}"#;

/// A server of one model, which says words until nobody wants more; nobody may stay away.
async fn open() -> (Running, Engine) {
    let words = played(scripted::Config {
        name: "m".into(),
        script: Script::Tokens,
        context_tokens: CELLS,
        count: 1 << 16,
        // What the cache remembers of those who are gone is little.
        kept_prefixes: 0,
        cells: Some(CELLS),
        ..scripted::Config::default()
    });
    let config = Config {
        outbox_events: 8,
        ..Config::default()
    };
    let engine = Engine::spawn(words, config).unwrap();
    let kernel = Kernel::new();
    kernel.add(model("m", engine.clone())).unwrap();
    let config = generate::Config {
        resume_grace: Duration::ZERO,
        // So little that a stream stands still before it has ended.
        resume_bytes: 64 << 10,
        ..generate::Config::default()
    };
    (Running::generating(kernel, config).await, engine)
}

/// Waits until nothing is left of anybody, and counts the bytes.
async fn left(server: &Running, engine: &Engine, tasks_before: usize) -> isize {
    let numbers = &server.shared.metrics;
    until("everybody is gone", || numbers.connections_open.get() == 0).await;
    let open = numbers.streams_open.with_label_values(&["generate"]);
    until("no stream is open", || open.get() == 0).await;
    let stats = engine.stats();
    until("the engine has nothing left", || {
        stats.requests_running.get() + stats.requests_waiting.get() + stats.streams_parked.get()
            == 0
    })
    .await;
    until("their tasks are gone", || tasks() <= tasks_before).await;
    assert_eq!(server.shared.drain.open(), 0);
    held()
}

/// A stream that has said something, and the address to come back to.
async fn begin(server: &Running, headers: &[&str]) -> (Wire, String) {
    let mut wire = Wire::connect(server.address).await;
    wire.send(post(STREAM, headers, BODY)).await;
    let head: Head = wire.head().await;
    wire.chunk().await.unwrap();
    let name = head.header("sapwood-stream-id").unwrap_or_default();
    (wire, format!("/v2/streams/{name}"))
}

/// Ways to come, ask and go.
const WAYS: usize = 6;

/// Somebody who comes, asks and goes in one of the [`WAYS`].
async fn visit(server: &Running, way: usize) {
    let resume = "sapwood-resume: 1";
    let mut other = Wire::connect(server.address).await;
    match way {
        // Before anything was said, and in the middle of it.
        0 => other.send(post(STREAM, &[resume], BODY)).await,
        1 => drop(begin(server, &[]).await),
        // With the right to come back, for no time at all.
        2 => drop(begin(server, &[resume]).await),
        // With a word.
        3 => {
            let (_wire, path) = begin(server, &[resume]).await;
            let answer = other.ask(head("DELETE", &path, &[])).await;
            assert_eq!(answer.told().0, 204);
        }
        // Having taken over from oneself, or come too late for it.
        4 => {
            let (_wire, path) = begin(server, &[resume]).await;
            let wishes = ["sapwood-compress-stream: 1", "accept-encoding: gzip"];
            other.send(head("GET", &path, &wishes)).await;
            // What it does not read is sent nevertheless, and soon forgotten.
            if other.head().await.status == 200 {
                other.chunk().await.unwrap();
            }
        }
        // With everything.
        _ => {
            let request = post(STREAM, &[resume], br#"{"text_input":"x","max_tokens":20}"#);
            assert!(other.ask(request).await.complete);
        }
    }
}

/// TR-608, TR-609
#[tokio::test]
async fn tr_1303_who_comes_and_goes_leaves_rows_tasks_and_memory_as_they_were() {
    let _turn = TURN.lock().await;
    let (server, engine) = open().await;
    let tasks = tasks();
    let mut after = Vec::new();
    for _ in 0..25 {
        let mut bytes = 0;
        for way in 0..WAYS {
            visit(&server, way).await;
            bytes = left(&server, &engine, tasks).await;
        }
        after.push(bytes);
    }
    // What the model's cache remembers differs from time to time.
    assert!(usual_growth(&after) < 32 << 10, "{after:?}");
}
