//! Clients resume streams after a lost connection (TR-1303), over real sockets.

use std::time::Duration;

use sapwood_engine::Engine;
use sapwood_kernel::Kernel;
use sapwood_tests::http::{Answer, Head, Wire, head, post};
use sapwood_tests::{Faces, in_time, key, spawned, until};

use super::*;

const STREAM: &str = "/v2/models/m/generate_stream";
const BODY: &str = r#"{"text_input":"x","stream":true}"#;
const RESUME: &str = "sapwood-resume: 1";

/// Words with a pause between them.
fn words() -> Vec<ScriptStep> {
    let words = ["a ", "lost ", "line ", "is ", "no ", "lost ", "word"];
    let steps = words.map(|word| [ScriptStep::SleepMs(2), ScriptStep::Text(word.into())]);
    steps.into_iter().flatten().collect()
}

/// A server over a model that generates a word and hangs.
async fn hanging(config: Config, keys: &[&str]) -> (Running, Engine) {
    let engine = spawned(steps(vec![
        ScriptStep::Text("a".into()),
        ScriptStep::Hang(true),
    ]));
    let kernel = Kernel::new();
    kernel
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let faces = Faces {
        generate: config,
        ..Faces::default()
    };
    let keys = keys.iter().map(|name| key(name, name)).collect();
    let server = Running::start_faces(Default::default(), kernel, faces, keys).await;
    (server, engine)
}

/// A stream that has started: its connection and its head.
async fn begin(server: &Running, headers: &[&str]) -> (Wire, Head) {
    let mut wire = Wire::connect(server.address).await;
    let headers = [&[RESUME], headers].concat();
    wire.send(post(STREAM, &headers, BODY.as_bytes())).await;
    let head = wire.head().await;
    assert_eq!(head.status, 200);
    (wire, head)
}

fn path(head: &Head) -> String {
    format!("/v2/streams/{}", head.header("sapwood-stream-id").unwrap())
}

async fn ask(server: &Running, method: &str, path: &str, headers: &[&str]) -> Answer {
    let mut wire = Wire::connect(server.address).await;
    wire.ask(head(method, path, headers)).await
}

async fn back(server: &Running, path: &str, after: usize) -> Wire {
    let mut wire = Wire::connect(server.address).await;
    let after = format!("last-event-id: {after}");
    wire.send(head("GET", path, &[&after])).await;
    wire
}

async fn chunk(wire: &mut Wire) -> String {
    String::from_utf8(wire.chunk().await.unwrap()).unwrap()
}

/// Wherever a stream is cut, once or after every event, each event arrives once.
#[tokio::test]
async fn tr_1303_a_resumed_stream_has_the_events_of_an_uncut_one() {
    let server = playing(words()).await;
    let plain = Wire::connect(server.address).await.post(STREAM, BODY).await;
    assert_eq!(plain.head.header("sapwood-stream-id"), None);
    let (mut wire, _) = begin(&server, &[]).await;
    let mut whole = Vec::new();
    loop {
        let event = chunk(&mut wire).await;
        if event.is_empty() {
            break;
        }
        whole.push(event);
    }
    assert!(whole.len() > 5);
    let events = whole.iter().enumerate().map(|(at, event)| {
        let number = format!("id: {}\n", at + 1);
        event.strip_prefix(&number).unwrap()
    });
    assert_eq!(events.collect::<String>(), plain.text());
    for at in 1..=whole.len() {
        // Cut once.
        let (mut wire, head) = begin(&server, &[]).await;
        let path = path(&head);
        for expect in &whole[..at] {
            assert_eq!(&chunk(&mut wire).await, expect);
        }
        drop(wire);
        let rest = back(&server, &path, at).await.answer().await;
        assert!(rest.complete);
        assert_eq!(rest.text(), whole[at..].concat());
        let empty = at == whole.len() && rest.head.status == 204;
        assert!(empty || rest.head.status == 200);
        if !empty {
            let name = rest.head.header("sapwood-stream-id");
            assert!(path.ends_with(&name.unwrap()));
            let kind = rest.summary().1;
            assert_eq!(kind, "text/event-stream; charset=utf-8");
        }
    }
    // After every event of one stream.
    let (mut wire, head) = begin(&server, &[]).await;
    let path = path(&head);
    let mut received = vec![chunk(&mut wire).await];
    while received.len() < whole.len() {
        wire = back(&server, &path, received.len()).await;
        assert_eq!(wire.head().await.status, 200);
        received.push(chunk(&mut wire).await);
    }
    assert_eq!(received, whole);
    let open = server.shared.metrics.streams_open.clone();
    until("nothing is open", || {
        open.with_label_values(&["generate"]).get() == 0
    })
    .await;
    // A client that has every event may ask for more; one that asks from the beginning gets all of it.
    assert_eq!(
        back(&server, &path, whole.len()).await.head().await.status,
        204
    );
    let again = ask(&server, "GET", &path, &[]).await;
    assert_eq!(again.text(), whole.concat());
}

/// TR-608: a stream that nobody resumes is cancelled after the grace; until then it runs, and counts once.
#[tokio::test]
async fn tr_1303_abandoned_streams_are_removed_after_the_grace() {
    let (server, engine) = hanging(Config::default(), &[]).await;
    let mut paths = Vec::new();
    for _ in 0..20 {
        let (mut wire, head) = begin(&server, &[]).await;
        assert!(chunk(&mut wire).await.starts_with("id: 1\ndata: "));
        paths.push(path(&head));
    }
    let numbers = &server.shared.metrics;
    let open = numbers.streams_open.with_label_values(&["generate"]);
    until("all connections are gone", || {
        numbers.connections_open.get() == 0
    })
    .await;
    let running = || engine.stats().requests_running.get();
    until("all run", || running() == 20).await;
    assert_eq!(open.get(), 20);
    let grace = Config::default().resume_grace;
    let removed = || open.get() == 0 && server.shared.drain.open() == 0;
    let took = in_time("all are gone", 2 * grace, removed).await;
    let second = Duration::from_secs(1);
    assert!(
        (grace - 2 * second..grace + 5 * second).contains(&took),
        "{took:?}"
    );
    until("no sequence is left", || running() == 0).await;
    for path in &paths {
        assert_eq!(ask(&server, "GET", path, &[]).await.summary().0, 404);
    }
}

/// Including the methods of the stream's path and of generate_stream.
#[tokio::test]
async fn tr_1303_a_stream_belongs_to_its_key() {
    let (server, engine) = hanging(Config::default(), &["anna", "ben"]).await;
    let [anna, ben] = ["anna", "ben"].map(|key| format!("authorization: Bearer {key}"));
    let (mut older, head) = begin(&server, &[&anna]).await;
    let first = chunk(&mut older).await;
    let path = path(&head);
    for (method, path, key, status) in [
        ("GET", &*path, &ben, 404),
        ("HEAD", &path, &ben, 404),
        ("DELETE", &path, &ben, 404),
        ("GET", "/v2/streams/nobody", &anna, 404),
        ("DELETE", "/v2/streams/nobody", &anna, 404),
        ("POST", &path, &anna, 405),
        ("GET", STREAM, &anna, 405),
        ("DELETE", STREAM, &anna, 405),
    ] {
        let mut wire = Wire::connect(server.address).await;
        wire.send(head_of(method, path, key)).await;
        assert_eq!(wire.head().await.status, status, "{method} {path}");
    }
    for (header, status) in [
        ("last-event-id: x", 400),
        ("last-event-id: -1", 400),
        ("last-event-id: 99999999999999999999", 400),
        ("last-event-id: 7", 400),
        ("sapwood-keepalive: never", 400),
    ] {
        let refused = ask(&server, "GET", &path, &[&anna, header]).await;
        assert_eq!(refused.summary().0, status, "{header}");
        error(&refused);
    }
    // HEAD, or a refused request, does not replace the reader.
    let mut wire = Wire::connect(server.address).await;
    wire.send(head_of("HEAD", &path, &anna)).await;
    assert_eq!(wire.head().await.status, 200);
    assert!(!older.answered().await);
    let mut newer = Wire::connect(server.address).await;
    newer.send(head_of("GET", &path, &anna)).await;
    assert_eq!(newer.head().await.status, 200);
    assert_eq!(chunk(&mut newer).await, first);
    assert_eq!(older.chunk().await, None, "it is cut, and has no end");
    let open = server.shared.metrics.streams_open.clone();
    assert_eq!(open.with_label_values(&["generate"]).get(), 1);
    let deleted = ask(&server, "DELETE", &path, &[&anna]).await;
    assert_eq!(deleted.summary().0, 204);
    let last = "id: 2\ndata: {\"error\":\"Request was cancelled\"}\n\n";
    assert_eq!(chunk(&mut newer).await, last);
    assert_eq!(chunk(&mut newer).await, "", "the stream ends well");
    until("the sequence is gone", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
    let cancelled = &server.shared.metrics.cancelled;
    let counted = ["delete", "client"].map(|why| cancelled.with_label_values(&[why]).get());
    assert_eq!(counted, [1, 0]);
    let deleted = ask(&server, "DELETE", &path, &[&anna]).await;
    assert_eq!(deleted.summary().0, 404);
}

/// Without room, a stream is not resumable; a client that is too far behind gets 410.
#[tokio::test]
async fn tr_1303_the_number_and_bytes_of_resumable_streams_are_limited() {
    let config = Config {
        resumable_streams_each: 1,
        resume_bytes: 300,
        ..Config::default()
    };
    let (server, _engine) = hanging(config.clone(), &[]).await;
    let (_wire, first) = begin(&server, &[]).await;
    let (mut second, without) = begin(&server, &[]).await;
    assert_eq!(without.header("sapwood-stream-id"), None);
    assert!(chunk(&mut second).await.starts_with("data: "));
    assert!(first.header("sapwood-stream-id").is_some());
    let kernel = kernel(&[("m", steps(words()))]);
    let server = Running::generating(kernel, config).await;
    let (mut wire, first) = begin(&server, &[]).await;
    let path = path(&first);
    let mut events = 0;
    while !chunk(&mut wire).await.is_empty() {
        events += 1;
    }
    let far = ask(&server, "GET", &path, &["last-event-id: 1"]).await;
    assert_eq!(far.summary().0, 410);
    assert_eq!(error(&far), "event 2 of this stream is no longer kept");
    let code = far.head.header("sapwood-error");
    assert_eq!(code.as_deref(), Some("failed-precondition"));
    let rest = back(&server, &path, events - 1).await.answer().await;
    assert!(rest.complete && rest.text().starts_with(&format!("id: {events}\n")));
    // A stream that was read to its end makes room.
    let (_, third) = begin(&server, &[]).await;
    assert!(third.header("sapwood-stream-id").is_some());
    assert_eq!(ask(&server, "GET", &path, &[]).await.summary().0, 404);
}

/// TR-1304: the keepalive is set by each reader, and pings have no number.
#[tokio::test]
async fn tr_1303_pings_of_a_resumable_stream_have_no_number() {
    let (server, _engine) = hanging(Config::default(), &[]).await;
    let (mut wire, first) = begin(&server, &["sapwood-keepalive: 1"]).await;
    assert!(chunk(&mut wire).await.starts_with("id: 1\n"));
    assert_eq!(chunk(&mut wire).await, ": ping\n\n");
    let deleted = ask(&server, "DELETE", &path(&first), &[]).await;
    assert_eq!(deleted.summary().0, 204);
}

#[tokio::test]
async fn tr_1303_a_request_that_fails_at_once_is_not_resumable() {
    let failing = playing(vec![ScriptStep::Error(scripted::ScriptedFailure {
        code: "internal".into(),
        message: "tired".into(),
    })])
    .await;
    let mut wire = Wire::connect(failing.address).await;
    let failed = wire.ask(post(STREAM, &[RESUME], BODY.as_bytes())).await;
    assert_eq!(failed.text(), "data: {\"error\":\"tired\"}\n\n");
    assert_eq!(failed.head.header("sapwood-stream-id"), None);
}

/// A head with this key.
fn head_of(method: &str, path: &str, key: &str) -> String {
    head(method, path, &[key])
}
