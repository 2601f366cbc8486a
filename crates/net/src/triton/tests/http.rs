//! HTTP, byte for byte.

mod resumable;

use sapwood_proto::code::Code;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::*;

/// The answer to a request, in these writes; then the connection is closed, or left to the client to close.
#[derive(Clone)]
struct Script {
    writes: Vec<Vec<u8>>,
    close: bool,
}

/// A server that selects its answer by the request line.
struct Server {
    address: ServerAddress,
    /// Received requests, and an empty one when the client has closed a connection that was left to it.
    received: mpsc::Receiver<String>,
    _task: AbortOnDropHandle<()>,
}

impl Server {
    async fn start(answer: impl Fn(&str) -> Script + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address =
            ServerAddress::new(format!("triton+http://{}", listener.local_addr().unwrap()));
        let (notify, incoming) = mpsc::channel(64);
        let answer = Arc::new(answer);
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                tokio::spawn(serve(tcp, Arc::clone(&answer), notify.clone()));
            }
        });
        Self {
            address,
            received: incoming,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// A server that is ready and answers all other requests with this script.
    async fn saying(script: Script) -> (Self, TritonClient) {
        let server = Self::start(move |line| match line {
            "GET /v2/health/ready HTTP/1.1" => ok("text/plain", ""),
            _ => script.clone(),
        });
        let mut server = server.await;
        let client = TritonClient::connect(&server.address).await.unwrap();
        server.received.recv().await.unwrap();
        (server, client)
    }
}

async fn serve(
    mut tcp: TcpStream,
    answer: Arc<impl Fn(&str) -> Script>,
    notify: mpsc::Sender<String>,
) {
    let mut request = Vec::new();
    while !is_whole(&request) {
        if tcp.read_buf(&mut request).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let request = String::from_utf8(request).unwrap();
    let script = answer(request.lines().next().unwrap());
    notify.send(request).await.unwrap();
    for write in script.writes {
        tcp.write_all(&write).await.unwrap();
        tcp.flush().await.unwrap();
    }
    if !script.close {
        let mut more = [0];
        let left = tcp.read(&mut more).await;
        assert!(matches!(left, Ok(0) | Err(_)));
        // The test may have ended.
        let _ = notify.send(String::new()).await;
    }
}

fn is_whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.parse().unwrap());
    body.len() >= length
}

fn answer(status: &str, headers: &str, body: &str) -> Script {
    let length = body.len();
    let text = format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n{body}");
    Script {
        writes: vec![text.into_bytes()],
        close: true,
    }
}

fn ok(mime: &str, body: &str) -> Script {
    answer("200 OK", &format!("content-type: {mime}\r\n"), body)
}

/// An event stream in chunks, each a write of its own; ended or cut.
fn events(chunks: &[&[u8]], ended: bool) -> Script {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut writes = vec![head.as_bytes().to_vec()];
    for chunk in chunks {
        let mut write = format!("{:x}\r\n", chunk.len()).into_bytes();
        write.extend_from_slice(chunk);
        write.extend_from_slice(b"\r\n");
        writes.push(write);
    }
    if ended {
        writes.push(b"0\r\n\r\n".to_vec());
    }
    Script {
        writes,
        close: true,
    }
}

const GREEN: &[u8] =
    b"data: {\"model_name\":\"demo\",\"model_version\":\"1\",\"text_output\":\"green\"}\n\n";

#[tokio::test]
async fn tr_601_a_request_and_its_events() {
    let tea = "data: {\"text_output\":[\" caf\u{e9}\"],\"score\":0.5,\"odd\":7}\n\n".as_bytes();
    let script = events(&[GREEN, &tea[..28], &tea[28..]], true);
    let (mut server, client) = Server::saying(script).await;
    let mut responses = client.generate(two_words()).await.unwrap();
    let first = responses.next().await.unwrap().unwrap();
    assert_eq!(first.outputs, [(0, texts(&["green"]))]);
    assert!(
        first.parameters.is_empty(),
        "names of the model are no parameters"
    );
    let second = responses.next().await.unwrap().unwrap();
    let expect = [
        (0, texts(&[" caf\u{e9}"])),
        (1, TensorData::Float(vec![0.5])),
    ];
    assert_eq!(second.outputs, expect);
    assert_eq!(second.parameters, [("odd".to_owned(), json!(7))]);
    assert!(responses.next().await.is_none());

    let request = server.received.recv().await.unwrap();
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    assert!(
        head.starts_with("POST /v2/models/demo/generate_stream HTTP/1.1\r\n"),
        "{head}"
    );
    for header in [
        "content-type: application/json",
        "accept-encoding: identity",
        "host: 127.0.0.1:",
    ] {
        assert!(head.contains(header), "{head}");
    }
    let expect = r#"{"text_input":"Say two words","max_tokens":16,"stream":true,"parameters":{"top_k":5,"timeout":1500000}}"#;
    assert_eq!(body, expect);
}

/// In addition to the specified form, servers send comments, CRLF, no space, several lines, an end mark; some send
/// plain JSON.
#[tokio::test]
async fn tr_603_every_form_of_stream_end_is_accepted() {
    let lines = b": ping\r\n\r\ndata:{\"text_output\":\r\ndata:\"a\"}\r\n\r\ndata: [DONE]\n\ndata: nothing\n\n";
    for (script, expect) in [
        (events(&[], true), &[][..]),
        (ok("text/event-stream", ""), &[]),
        (events(&[lines], true), &["a"]),
        (
            ok("text/event-stream", "data: {\"text_output\":\"b\"}\n\n"),
            &["b"],
        ),
        (ok("application/json", "{\"text_output\":\"c\"}"), &["c"]),
        (events(&[b"data: {\"text_output\":[]}\n\n"], true), &[""]),
    ] {
        let (_server, client) = Server::saying(script).await;
        let (found, end) = asked(&client, two_words()).await;
        assert_eq!(found, expect);
        assert_eq!(end, Ok(()));
    }
}

/// KE-313: a cut stream ends with that error, after the responses before it.
#[tokio::test]
async fn tr_604_a_stream_without_its_end_is_truncated() {
    let close = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let until_close = |rest: &[u8]| Script {
        writes: vec![close.as_bytes().to_vec(), GREEN.to_vec(), rest.to_vec()],
        close: true,
    };
    let mut short = ok("text/event-stream", &String::from_utf8_lossy(GREEN));
    let missing = short.writes[0].len() - 2;
    short.writes[0].truncate(missing);
    for (script, count, end) in [
        (events(&[GREEN], false), 1, Err(Error::Truncated)),
        (
            events(&[GREEN, b"data: {\"text_ou"], true),
            1,
            Err(Error::Truncated),
        ),
        (
            events(&[GREEN, b"data: {\"text_output\":\"x\"}\n"], true),
            1,
            Err(Error::Truncated),
        ),
        (short, 0, Err(Error::Truncated)),
        (until_close(b""), 1, Err(Error::Truncated)),
        (until_close(b"data: [DONE]\n\n"), 1, Ok(())),
    ] {
        let (_server, client) = Server::saying(script).await;
        let (found, ended) = asked(&client, two_words()).await;
        assert_eq!(found.len(), count);
        assert_eq!(ended, end);
    }
}

/// The answer, the number of responses, and the error.
fn failures() -> [(Script, usize, Code, &'static str, bool); 7] {
    let later = [GREEN, b"data: {\"error\":\"the parrot is tired\"}\n\n"].concat();
    [
        (
            answer(
                "400 Bad Request",
                "content-type: application/json\r\n",
                r#"{"error":"bad 'x'"}"#,
            ),
            0,
            Code::InvalidRequest,
            "bad 'x'",
            false,
        ),
        (
            answer(
                "500 Internal Server Error",
                "content-type: text/event-stream; charset=utf-8\r\n",
                "data: {\"error\":\"the parrot is tired\"}\n\n",
            ),
            0,
            Code::UpstreamFailed,
            "the parrot is tired",
            false,
        ),
        (
            answer("502 Bad Gateway", "content-type: text/html\r\n", "<p>"),
            0,
            Code::UpstreamFailed,
            "Bad Gateway",
            false,
        ),
        (
            answer(
                "503 Service Unavailable",
                "sapwood-error: overloaded\r\nretry-after: 3\r\n",
                r#"{"error":"full"}"#,
            ),
            0,
            Code::Overloaded,
            "full",
            false,
        ),
        (
            ok("application/json", r#"{"error":"several responses"}"#),
            0,
            Code::UpstreamFailed,
            "several responses",
            false,
        ),
        (
            events(&[b"data: {\"error\":\"first\"}\n\n"], true),
            0,
            Code::UpstreamFailed,
            "first",
            false,
        ),
        (
            events(&[&later], true),
            1,
            Code::UpstreamFailed,
            "the parrot is tired",
            true,
        ),
    ]
}

/// Refused before any response, failed at the first one, failed later.
#[tokio::test]
async fn tr_605_errors_report_whether_responses_were_received() {
    for (script, count, code, message, started) in failures() {
        let (_server, client) = Server::saying(script).await;
        let (found, end) = asked(&client, two_words()).await;
        assert_eq!(found.len(), count, "{message}");
        let received = reply(end.unwrap_err());
        assert_eq!(
            (received.code, &*received.message, received.started),
            (code, message, started)
        );
        let after = (code == Code::Overloaded).then_some(Duration::from_secs(3));
        assert_eq!(received.retry_after, after);
    }
}

#[tokio::test]
async fn tr_606_invalid_answers_are_protocol_errors() {
    let long = format!("data: {}\n\n", "x".repeat(9 << 20));
    // Each of these values takes sixteen times as much memory once it is parsed (D-47).
    let many = format!(
        r#"{{"text_output":"x","more":[{}0]}}"#,
        "0,".repeat(1 << 20)
    );
    for (script, limit) in [
        (ok("text/html", "<p>hello</p>"), false),
        (events(&[b"data: hello\n\n"], true), false),
        (events(&[b"data: []\n\n"], true), false),
        (events(&[b"data: {\"text_output\":7}\n\n"], true), false),
        (
            answer(
                "200 OK",
                "content-type: text/event-stream\r\ncontent-encoding: gzip\r\n",
                "",
            ),
            false,
        ),
        (
            Script {
                writes: vec![b"SSH-2.0-odd\r\n".to_vec()],
                close: true,
            },
            false,
        ),
        (ok("text/event-stream", &long), true),
        (ok("application/json", &many), true),
    ] {
        let (_server, client) = Server::saying(script).await;
        let (found, end) = asked(&client, two_words()).await;
        assert!(found.is_empty());
        let error = end.unwrap_err();
        assert_eq!(matches!(error, Error::Limit { .. }), limit, "{error}");
        assert!(limit || matches!(error, Error::Protocol(_)), "{error}");
        assert_eq!(error.code(), Code::UpstreamFailed);
    }
}

/// In the body of an answer in one piece as well as within a stream.
#[tokio::test]
async fn tr_604_a_server_that_falls_silent_within_an_answer_has_cut_it() {
    let head =
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{\"text";
    for writes in [vec![head.to_vec()], events(&[GREEN], false).writes] {
        let script = Script {
            writes,
            close: false,
        };
        let (mut server, client) = Server::saying(script).await;
        let asking = tokio::spawn(async move { asked(&client, two_words()).await });
        assert!(server.received.recv().await.unwrap().starts_with("POST"));
        // All that the server sends is read before the time passes.
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        tokio::time::pause();
        // Far more than the limit: a client without one would wait for ever.
        let (_, end) = tokio::time::timeout(3 * IDLE_TIMEOUT, asking)
            .await
            .unwrap()
            .unwrap();
        assert!(matches!(end, Err(Error::Truncated)), "{end:?}");
        tokio::time::resume();
    }
}

/// Before the first response, and in the middle of the stream.
#[tokio::test]
async fn tr_608_dropping_the_responses_closes_the_connection() {
    for first in [&[][..], &[GREEN]] {
        let mut script = events(first, false);
        script.close = false;
        let (mut server, client) = Server::saying(script).await;
        let mut responses = client.generate(two_words()).await.unwrap();
        if !first.is_empty() {
            assert!(responses.next().await.unwrap().is_ok());
        }
        assert!(server.received.recv().await.unwrap().starts_with("POST"));
        drop(responses);
        assert_eq!(
            server.received.recv().await.unwrap(),
            "",
            "the connection was closed"
        );
    }
}

/// A server with models of every kind.
fn library(line: &str) -> Script {
    match line {
        "GET /v2/health/ready HTTP/1.1" => ok("text/plain", ""),
        "POST /v2/repository/index HTTP/1.1" => ok(
            "application/json",
            r#"[{"name":"a","version":"1","state":"READY"},{"name":"a","version":"2","state":"READY","reason":""},
                {"name":"b","version":"1","state":"UNAVAILABLE","reason":"x"},{"name":"org/c"}]"#,
        ),
        "GET /v2/models/org%2Fc HTTP/1.1" => ok(
            "application/json",
            r#"{"name":"org/c","versions":["1"],"platform":"p","inputs":[{"name":"text_input","datatype":"BYTES","shape":[-1,1]},
                {"name":"n","datatype":"INT32","shape":["1"]}],"outputs":[{"name":"text_output","datatype":"BYTES","shape":[-1]}]}"#,
        ),
        "GET /v2/models/org%2Fc/config HTTP/1.1" => ok(
            "application/json",
            r#"{"input":[{"name":"n","optional":true},{"name":"text_input"}],"model_transaction_policy":{"decoupled":false}}"#,
        ),
        "GET /v2/models/odd HTTP/1.1" => ok(
            "application/json",
            r#"{"name":"odd","inputs":[{"name":"x","datatype":"QUAD","shape":[1]}],"outputs":[]}"#,
        ),
        "GET /v2/models/none HTTP/1.1" => answer(
            "400 Bad Request",
            "",
            r#"{"error":"Request for unknown model: 'none' is not found"}"#,
        ),
        "GET /v2/models/bare HTTP/1.1" => ok(
            "application/json",
            r#"{"name":"bare","inputs":[],"outputs":[]}"#,
        ),
        _ => answer("404 Not Found", "", ""),
    }
}

#[tokio::test]
async fn tr_702_models_are_listed_and_described() {
    let server = Server::start(library).await;
    let client = TritonClient::connect(&server.address).await.unwrap();
    let names: Vec<_> = client
        .models()
        .await
        .unwrap()
        .into_iter()
        .map(|it| (it.name, it.versions.len()))
        .collect();
    assert_eq!(names, [("a".to_owned(), 2), ("org/c".to_owned(), 1)]);
    let model = client.model("org/c").await.unwrap();
    let input = |name: &str, datatype, shape, optional| Declared {
        name: name.into(),
        datatype,
        shape,
        optional,
    };
    assert_eq!(
        model,
        ModelSignature {
            name: "org/c".into(),
            platform: "p".into(),
            inputs: vec![
                input("text_input", Datatype::Bytes, vec![-1, 1], false),
                input("n", Datatype::Int32, vec![1], true),
            ],
            outputs: vec![input("text_output", Datatype::Bytes, vec![-1], false)],
            decoupled: false,
        }
    );
    let bare = client.model("bare").await.unwrap();
    assert!(bare.decoupled, "without a configuration anything may come");
    assert!(matches!(client.model("odd").await, Err(Error::Protocol(_))));
    assert_eq!(
        client.model("none").await.unwrap_err().code(),
        Code::NotFound
    );

    let mut only = server.address.clone();
    only.url.push_str("/org%2Fc");
    let error = TritonClient::connect(&only).await.unwrap_err();
    assert_eq!(
        error.code(),
        Code::NotFound,
        "its readiness is asked for: {error}"
    );
}

#[tokio::test]
async fn tr_709_a_server_that_is_not_ready_or_not_there_is_unavailable() {
    let server = Server::start(|_| answer("400 Bad Request", "", "")).await;
    let error = TritonClient::connect(&server.address).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = ServerAddress::new(format!("triton+http://{}", free.local_addr().unwrap()));
    drop(free);
    let error = TritonClient::connect(&address).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable(_)), "{error}");
}

#[tokio::test]
async fn tr_210_the_key_is_a_bearer_and_absent_from_debug_output() {
    let mut server = Server::start(|_| answer("401 Unauthorized", "", r#"{"error":"no"}"#)).await;
    server.address.key = Some("s3cret".into());
    let error = TritonClient::connect(&server.address).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let request = server.received.recv().await.unwrap();
    assert!(
        request.contains("authorization: Bearer s3cret\r\n"),
        "{request}"
    );
    assert!(!format!("{:?}", server.address).contains("s3cret"));
}

/// TR-309: data that does not fit is not sent.
#[tokio::test]
async fn tr_310_a_request_that_cannot_be_json_is_refused_here() {
    let (_server, client) = Server::saying(events(&[], true)).await;
    for inputs in [
        vec![(0, TensorData::Bytes([&b"\xff"[..]].into_iter().collect()))],
        vec![(9, TensorData::Int(vec![1]))],
    ] {
        let mut request = InferRequest::new(demo());
        request.inputs = inputs;
        let error = client.generate(request).await.err().unwrap();
        assert_eq!(error.code(), Code::InvalidRequest);
    }
    let mut fixed = (*demo()).clone();
    fixed.inputs[1].shape = vec![2];
    let mut request = InferRequest::new(Arc::new(fixed));
    request.inputs.push((1, TensorData::Int(vec![1])));
    assert!(matches!(
        client.generate(request).await,
        Err(Error::Request(_))
    ));
}
