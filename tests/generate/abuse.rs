//! Abuse of both front ends of the Triton face: abandoned streams, clients that do not read, floods of bad requests.
//! Each test ends with a check of the server's metrics: no state is left (TR-608, TR-609).

use std::time::Duration;

use futures::channel::mpsc;
use futures::{StreamExt, stream};
use sapwood_engine::{Engine, scripted};
use sapwood_kernel::Kernel;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::rate_limit;
use sapwood_server::faces::generate::Config;
use sapwood_server::ops::drain;
use sapwood_server::server;
use sapwood_tests::http::{Wire, head, post};
use sapwood_tests::{Faces, Running, WAIT_LIMIT, key, until};
use serde_json::json;
use tokio::runtime::Handle;

use super::grpc::{Grpc, last, number, prompt, text};
use super::script;

/// A key with rate limits.
const BEARER: &str = "authorization: Bearer hush";

/// A model that generates words without end, at this pace for each sequence; 0 is as fast as they are read.
fn endless(tokens_per_s: f64) -> Engine {
    let config = scripted::Config {
        name: "m".into(),
        context_tokens: 1 << 20,
        count: 1 << 19,
        // There is a slot for every sequence, so that abandoned ones are not hidden by preemption.
        parallel: 2_100,
        tokens_per_s,
        ..script(scripted::Script::Tokens)
    };
    let model = sapwood_tests::scripted(config);
    let limits = sapwood_engine::Config {
        queue_requests: 1 << 16,
        outbox_events: 8,
        ..sapwood_engine::Config::default()
    };
    Engine::spawn(model, limits).unwrap()
}

/// A server of that model, and the number of its tasks before any client connected.
struct TestServer {
    server: Running,
    engine: Engine,
    tasks: usize,
}

impl TestServer {
    async fn open(keys: Vec<ApiKey>, tokens_per_s: f64) -> Self {
        Self::of(server::Config::default(), keys, tokens_per_s).await
    }

    async fn of(config: server::Config, keys: Vec<ApiKey>, tokens_per_s: f64) -> Self {
        let engine = endless(tokens_per_s);
        let kernel = Kernel::new();
        kernel
            .add(sapwood_kernel::model("m", engine.clone()))
            .unwrap();
        let mut generate = Config::default();
        generate.limits.new_tokens = 0;
        let faces = Faces {
            generate,
            ..Faces::default()
        };
        let server = Running::start_faces(config, kernel, faces, keys).await;
        let here = Self {
            server,
            engine,
            tasks: 0,
        };
        here.serves().await;
        until("a first client has gone", || here.left()[0] == 0).await;
        Self {
            tasks: tasks(),
            ..here
        }
    }

    /// A well-behaved client is served at once.
    async fn serves(&self) {
        let mut wire = Wire::connect(self.server.address).await;
        let body = br#"{"text_input":"x","max_tokens":2}"#;
        let answer = wire
            .ask(post("/v2/models/m/generate", &[BEARER], body))
            .await;
        assert_eq!(answer.summary().0, 200, "{}", answer.text());
    }

    /// Connections, streams, open work, and sequences that run, wait or are parked. (KV cells are not counted: they have
    /// cached prefixes of ended requests.)
    fn left(&self) -> [u64; 6] {
        let numbers = &self.server.shared.metrics;
        let streams = numbers.streams_open.with_label_values(&["generate"]);
        let stats = self.engine.stats();
        [
            numbers.connections_open.get().cast_unsigned(),
            streams.get().cast_unsigned(),
            self.server.shared.drain.open(),
            stats.requests_running.get(),
            stats.requests_waiting.get(),
            stats.streams_parked.get(),
        ]
    }

    /// No state is left, and nothing has panicked.
    async fn is_unharmed(&self) {
        let clean = || self.left() == [0; 6] && tasks() <= self.tasks;
        let waiting = async {
            while !clean() {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(WAIT_LIMIT, waiting).await;
        assert!(
            waited.is_ok(),
            "left: {:?}, tasks {} of {}",
            self.left(),
            tasks(),
            self.tasks
        );
        assert_eq!(self.server.shared.metrics.panics.get(), 0);
        self.serves().await;
    }

    /// Waits until that many streams are open.
    async fn holds(&self, streams: u64) {
        let waiting = async {
            while self.streams() != streams {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(WAIT_LIMIT, waiting).await;
        assert!(waited.is_ok(), "{streams} expected: {:?}", self.left());
    }

    fn streams(&self) -> u64 {
        self.left()[1]
    }
}

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// OA-801, TR-608, TR-904, TR-907: four calls of five hundred requests each on one connection, abandoned in every way.
#[tokio::test]
async fn tr_904_thousands_of_streams_on_one_connection_leave_no_state() {
    let context = TestServer::open(Vec::new(), 2.0).await;
    let mut grpc = Grpc::connect(&context.server).await;
    let mut calls = Vec::new();
    for call in 0..4 {
        // Half of them keep their request stream open.
        let (mut more, requests) = mpsc::channel(500);
        for index in 0..500 {
            let id = format!("{call}.{index}");
            more.try_send(prompt("m", &id, "x", true)).unwrap();
        }
        let more = (call % 2 == 0).then_some(more);
        calls.push((grpc.stream(requests, false).await, more));
    }
    // A reader gets words of many sequences.
    for (answers, _) in &mut calls {
        let mut seen = std::collections::BTreeSet::new();
        while seen.len() < 16 {
            let received = answers.message().await.unwrap().unwrap();
            assert_eq!(received.error_message, "");
            let received = received.infer_response.unwrap();
            assert!(!text(&received).is_empty());
            seen.insert(received.id);
        }
    }
    context.holds(2_000).await;
    // The engine's metrics are those of its last step.
    let stats = context.engine.stats();
    until("all of them are at work or wait", || {
        stats.requests_running.get() + stats.requests_waiting.get() == 2_000
    })
    .await;
    // Dropping a call cancels its own requests and no others.
    calls.truncate(3);
    context.holds(1_500).await;
    assert!(calls[0].0.message().await.unwrap().is_some());
    drop(calls);
    context.holds(0).await;
    let cancelled = &context.server.shared.metrics.cancelled;
    let removed = cancelled.with_label_values(&["client"]);
    until("all of them are counted", || removed.get() == 2_000).await;
    // The connection stays usable for the next call.
    let mut answers = grpc
        .stream(stream::iter([prompt("m", "", "x", true)]), false)
        .await;
    assert!(answers.message().await.unwrap().is_some());
    // A lost connection ends everything on it.
    let calls = (0..64)
        .map(|_| prompt("m", "", "x", true))
        .collect::<Vec<_>>();
    let lost = grpc.stream(stream::iter(calls), false).await;
    drop((answers, lost, grpc));
    context.is_unharmed().await;
}

/// TR-609 over gRPC: an unread call parks only its own sequences; others continue, also on the same connection.
#[tokio::test]
async fn tr_609_an_unread_call_parks_only_its_own_sequences() {
    let context = TestServer::open(Vec::new(), 0.0).await;
    let mut grpc = Grpc::connect(&context.server).await;
    let requests = (0..16).map(|index| prompt("m", &index.to_string(), "x", true));
    let unread = grpc.stream(stream::iter(requests), false).await;
    let stats = context.engine.stats();
    until("its sequences are parked", || {
        stats.streams_parked.get() == 16
    })
    .await;
    let computed = stats.generation_tokens.get();
    let mut read = grpc
        .stream(stream::iter([prompt("m", "r", "x", true)]), false)
        .await;
    for _ in 0..300 {
        let received = read.message().await.unwrap().unwrap();
        assert_eq!(received.infer_response.unwrap().id, "r");
    }
    // The parked sequences computed no token; the reader's outbox and its transport buffers hold some more.
    assert!(stats.streams_parked.get() >= 16);
    let grown = stats.generation_tokens.get() - computed;
    assert!((300..4_096).contains(&grown), "{grown}");
    drop((unread, read, grpc));
    context.is_unharmed().await;
}

/// A call that is never read is reset and its requests are cancelled; the connection carries the next call.
#[tokio::test]
async fn tr_609_a_call_that_is_never_read_is_reset() {
    let mut config = server::Config::default();
    config.listener.stall = Duration::from_millis(200);
    let context = TestServer::of(config, Vec::new(), 0.0).await;
    let mut grpc = Grpc::connect(&context.server).await;
    let requests = (0..8).map(|index| prompt("m", &index.to_string(), "x", true));
    let mut unread = grpc.stream(stream::iter(requests), false).await;
    let cancelled = &context.server.shared.metrics.cancelled;
    let stalled = cancelled.with_label_values(&["stall"]);
    until("the call is cut", || stalled.get() == 1).await;
    context.holds(0).await;
    until("its sequences are gone", || context.left()[3..] == [0; 3]).await;
    let mut read = grpc
        .stream(stream::iter([prompt("m", "r", "x", true)]), false)
        .await;
    for _ in 0..50 {
        read.message().await.unwrap().unwrap();
    }
    // What was in the transport's buffers arrives; then the call ends with an error.
    let end = loop {
        match unread.message().await {
            Ok(Some(_)) => {}
            end => break end,
        }
    };
    assert!(end.is_err());
    drop((unread, read, grpc));
    context.is_unharmed().await;
}

/// TR-608, TR-610: three hundred connections, dropped at different points of their requests.
#[tokio::test]
async fn tr_608_hundreds_of_connections_dropped_at_any_point_leave_no_state() {
    let allowance = rate_limit::RateLimits {
        requests_running: Some(400),
        ..rate_limit::RateLimits::default()
    };
    let mut mine = key("anna", "hush");
    mine.allowance = Some(std::sync::Arc::new(rate_limit::TokenMeter::new(
        "key", allowance,
    )));
    let context = TestServer::open(vec![mine], 2.0).await;
    // Twice: what is not released the first time is missing the second time.
    for _ in 0..2 {
        let mut wires = Vec::new();
        for index in 0..300 {
            let mut wire = Wire::connect(context.server.address).await;
            let stream = br#"{"text_input":"x","stream":true}"#.as_slice();
            let (path, body, missing) = match index % 5 {
                0 => (
                    "/v2/models/m/generate",
                    br#"{"text_input":"x"}"#.as_slice(),
                    0,
                ),
                // Half a body.
                1 => ("/v2/models/m/generate_stream", stream, 10),
                _ => ("/v2/models/m/generate_stream", stream, 0),
            };
            let length = body.len() + missing;
            let length = format!("content-length: {length}");
            wire.send(head("POST", path, &[BEARER, &length])).await;
            wire.send(body).await;
            wires.push(wire);
        }
        for (index, wire) in wires.iter_mut().enumerate() {
            if matches!(index % 5, 2 | 3) {
                assert_eq!(wire.head().await.status, 200);
            }
            if index % 5 == 3 {
                wire.chunk().await.unwrap();
            }
        }
        context.holds(300).await;
        drop(wires);
        until("all of them are gone", || context.left() == [0; 6]).await;
    }
    context.is_unharmed().await;
}

/// TR-207: each bad request gets one response, and neither the connection nor other clients are affected.
#[tokio::test]
async fn tr_905_a_flood_of_bad_requests_is_answered_one_by_one() {
    let context = TestServer::open(Vec::new(), 2.0).await;
    let mut grpc = Grpc::connect(&context.server).await;
    let bad = (0..1_500).map(|index| {
        let id = index.to_string();
        let mut message = prompt("m", &id, "x", true);
        match index % 6 {
            0 => message.model_name = "nobody".into(),
            1 => message.model_version = "x".into(),
            2 => message.raw_input_contents.truncate(1),
            3 => message.inputs[0].name = "no_such_input".into(),
            4 => message.inputs[0].shape = vec![i64::MAX, i64::MAX],
            _ => message.raw_input_contents[0] = vec![0xff; 3].into(),
        }
        message
    });
    let good = prompt("m", "good", "x", true);
    let mut answers = grpc.stream(stream::iter(bad.chain([good])), false).await;
    let (mut refused, mut served) = (std::collections::BTreeSet::new(), false);
    while refused.len() < 1_500 || !served {
        let received = answers.message().await.unwrap().unwrap();
        let response = received.infer_response.unwrap();
        if received.error_message.is_empty() {
            assert_eq!(response.id, "good");
            served = true;
        } else {
            assert!(refused.insert(response.id), "told once");
        }
    }
    drop((answers, grpc));

    let mut wire = Wire::connect(context.server.address).await;
    for index in 0..500 {
        let (path, body) = match index % 5 {
            0 => ("/v2/models/m/generate", "{"),
            1 => ("/v2/models/m/generate_stream", r#"{"text_input":[1]}"#),
            2 => ("/v2/models/nobody/generate_stream", "{}"),
            3 => ("/v2/models/m/infer", r#"{"inputs":[{"name":"x"}]}"#),
            _ => ("/v2/models/m/generate", "[[[[[["),
        };
        let answer = wire.post(path, body).await;
        assert_eq!(answer.summary().0, 400, "{path} {body} {}", answer.text());
        assert!(answer.json()["error"].is_string());
    }
    drop(wire);
    context.is_unharmed().await;
}

/// OA-801, OA-904 at both front ends: a drain waits for running streams; those that it cuts end with an error.
#[tokio::test]
async fn oa_904_a_drain_waits_for_streams_and_ends_late_ones_with_an_error() {
    for deadline in [Duration::from_secs(20), Duration::from_millis(50)] {
        let config = server::Config {
            drain: drain::Config {
                grace: Duration::ZERO,
                deadline,
                ..drain::Config::default()
            },
            ..server::Config::default()
        };
        let slow = scripted::Config {
            tokens_per_s: 200.0,
            ..script(scripted::Script::Tokens)
        };
        let kernel = super::kernel(&[("m", slow)]);
        let server = Running::start_faces(config, kernel, Faces::default(), Vec::new()).await;
        let cut = deadline < Duration::from_secs(1);
        let tokens = if cut { 4_096 } else { 40 };
        let mut wire = Wire::connect(server.address).await;
        let body = json!({"text_input": "x", "stream": true, "max_tokens": tokens}).to_string();
        wire.send(post("/v2/models/m/generate_stream", &[], body.as_bytes()))
            .await;
        assert_eq!(wire.head().await.status, 200);
        let mut grpc = Grpc::connect(&server).await;
        let mut asked = prompt("m", "7", "x", true);
        asked.parameters.insert("max_tokens".into(), number(tokens));
        let mut answers = grpc
            .stream(stream::iter([asked]).chain(stream::pending()), false)
            .await;
        answers.message().await.unwrap().unwrap();
        assert_eq!(server.shared.drain.open(), 2);
        let draining = tokio::spawn({
            let drain = server.shared.drain.clone();
            async move { drain.run().await }
        });
        let mut event = Vec::new();
        while let Some(chunk) = wire.chunk().await.filter(|chunk| !chunk.is_empty()) {
            event = chunk;
        }
        let event = String::from_utf8(event).unwrap();
        let mut received = None;
        while let Some(answer) = answers.message().await.unwrap() {
            received = Some(answer);
        }
        let received = received.unwrap();
        let outcome = draining.await.unwrap();
        assert_eq!(
            (outcome.cut > 0, event.contains("shutting down")),
            (cut, cut),
            "{event}"
        );
        assert_eq!(
            received.error_message.contains("shutting down"),
            cut,
            "{received:?}"
        );
        assert!(last(&received.infer_response.unwrap()));
        let cancelled = &server.shared.metrics.cancelled;
        let counted = ["drain", "client"].map(|why| cancelled.with_label_values(&[why]).get());
        assert_eq!(counted, [if cut { 2 } else { 0 }, 0]);
    }
}
