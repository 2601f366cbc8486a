//! Streams that are cut, of servers with a replay buffer and of others.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const FIRST: &[u8] = b"id: 1\ndata: {\"text_output\":\"a\"}\n\n";
const SECOND: &[u8] = b"id: 2\ndata: {\"text_output\":\"b\"}\n\n";

/// A stream of this name.
fn named(name: &str, chunks: &[&[u8]], ended: bool) -> Script {
    let mut script = events(chunks, ended);
    let head = String::from_utf8(script.writes.remove(0)).unwrap();
    let head = head.replacen("\r\n", &format!("\r\nsapwood-stream-id: {name}\r\n"), 1);
    script.writes.insert(0, head.into_bytes());
    script
}

/// A server that cuts a stream after its first event and within its second, and then sends these answers, one after the
/// other.
async fn cutting(name: &'static str, then: Vec<Script>) -> (Server, TritonClient) {
    let at = AtomicUsize::new(0);
    let server = Server::start(move |line| {
        if line.starts_with("POST") {
            named(name, &[FIRST, &SECOND[..9]], false)
        } else if line.starts_with("GET /v2/streams/") {
            then[at.fetch_add(1, Ordering::Relaxed)].clone()
        } else {
            ok("text/plain", "")
        }
    });
    let mut server = server.await;
    let client = TritonClient::connect(&server.address).await.unwrap();
    server.received.recv().await.unwrap();
    (server, client)
}

/// Returns the first lines of its requests, and the event ids after which they resume.
fn received(server: &mut Server) -> Vec<String> {
    let mut all = Vec::new();
    while let Ok(request) = server.received.try_recv() {
        let line = request.lines().next().unwrap_or_default();
        let line = line.strip_suffix(" HTTP/1.1").unwrap_or(line);
        let last = request
            .lines()
            .find_map(|line| line.strip_prefix("last-event-id: "));
        all.push(last.map_or_else(|| line.to_owned(), |last| format!("{line} {last}")));
    }
    all
}

const POST: &str = "POST /v2/models/demo/generate_stream";

#[tokio::test]
async fn tr_1303_the_client_resumes_a_stream_that_was_cut() {
    let nothing = || answer("204 No Content", "", "");
    let third: &[u8] = b"id: 3\ndata: {\"error\":\"the parrot is tired\"}\n\n";
    for (then, expect, ended, asked_for) in [
        (
            vec![named("st_1", &[SECOND], true)],
            "ab",
            Ok(()),
            &["1"][..],
        ),
        // Cut again, after another event and without one.
        (
            vec![
                named("st_1", &[SECOND], false),
                named("st_1", &[], false),
                nothing(),
            ],
            "ab",
            Ok(()),
            &["1", "2", "2"],
        ),
        // A server that is busy is retried.
        (
            vec![
                answer("503 Service Unavailable", "", "{}"),
                named("st_1", &[SECOND, third], true),
            ],
            "ab",
            Err(Code::UpstreamFailed),
            &["1", "1"],
        ),
        (
            vec![answer("410 Gone", "", "{}")],
            "a",
            Err(Code::Truncated),
            &["1"],
        ),
        (
            vec![answer("404 Not Found", "", "{}")],
            "a",
            Err(Code::Truncated),
            &["1"],
        ),
        (
            vec![ok("application/json", "{}")],
            "a",
            Err(Code::Truncated),
            &["1"],
        ),
    ] {
        let (mut server, client) = cutting("st_1", then).await;
        let (found, end) = asked(&client, two_words()).await;
        assert_eq!(found.concat(), expect);
        assert_eq!(end.map_err(|error| error.code()), ended);
        let mut expect = vec![POST.to_owned()];
        expect.extend(
            asked_for
                .iter()
                .map(|last| format!("GET /v2/streams/st_1 {last}")),
        );
        let incoming = received(&mut server);
        assert_eq!(incoming[..expect.len()], expect, "{incoming:?}");
    }
}

/// D-11: a client that finds the same cut each time gives up, and leaves nothing at the server.
#[tokio::test]
async fn tr_1303_a_stream_that_is_cut_after_each_reconnection_is_truncated() {
    let cut = || named("st_1", &[], false);
    let (mut server, client) = cutting("st_1", vec![cut(), cut()]).await;
    let (found, end) = asked(&client, two_words()).await;
    assert_eq!((found.concat(), end), ("a".into(), Err(Error::Truncated)));
    let back = "GET /v2/streams/st_1 1";
    assert_eq!(received(&mut server), [POST, back, back]);
    let request = server.received.recv().await.unwrap();
    assert!(request.starts_with("DELETE /v2/streams/st_1 "), "{request}");
}

/// No resumption is requested from a server without resumable streams, or with an invalid stream name.
#[tokio::test]
async fn tr_1303_a_stream_without_a_replay_buffer_is_truncated_at_once() {
    let (mut server, client) = Server::saying(events(&[FIRST], false)).await;
    assert_eq!(asked(&client, two_words()).await.1, Err(Error::Truncated));
    let request = server.received.recv().await.unwrap();
    assert!(request.contains("sapwood-resume: 1\r\n"), "{request}");
    assert_eq!(received(&mut server), [""; 0]);
    let (mut server, client) = cutting("../other", Vec::new()).await;
    assert_eq!(asked(&client, two_words()).await.1, Err(Error::Truncated));
    assert_eq!(received(&mut server), [POST]);
}

#[tokio::test]
async fn tr_608_dropping_a_resumable_stream_cancels_it() {
    let mut script = named("st_1", &[FIRST], false);
    script.close = false;
    let (mut server, client) = Server::saying(script).await;
    let mut responses = client.generate(two_words()).await.unwrap();
    assert!(responses.next().await.unwrap().is_ok());
    assert!(server.received.recv().await.unwrap().starts_with("POST"));
    drop(responses);
    let mut incoming = [String::new(), String::new()];
    for one in &mut incoming {
        *one = server.received.recv().await.unwrap();
    }
    incoming.sort();
    assert_eq!(incoming[0], "", "the connection was closed");
    assert!(incoming[1].starts_with("DELETE /v2/streams/st_1 "));
}
