//! The same protocol over every transport, and what is specific to each.

use std::time::Duration;

use sapwood_engine::EngineOwner;
use sapwood_kernel::Kernel;
use sapwood_net::lmtp::{BridgeEnd, ConnectOptions, PeerAddress, bridge};
use sapwood_proto::evergreen::wire::SessionMessage;
use sapwood_server::faces::lmtp;
use sapwood_server::faces::lmtp::LinesEnd;
use sapwood_server::http::body_budget;
use sapwood_server::listener::socket as listening;
use sapwood_server::server;
use sapwood_tests::raw::action;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Faces, Running, by_hand, in_time, key, spawned, until};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::net::{TcpStream, UnixStream};

use super::{
    chatter, client, kernel, message, of_parrot, parrot, parsed, stream, tokens_and_end,
    with_config,
};

/// A session with everything in the base protocol.
const SESSION: [&str; 9] = [
    r#"MODEL_INFO {"stream_id": 1, "model": "parrot", "data": {"model": "parrot"}}"#,
    r#"GENERATE {"model":"parrot","prompt":[256,72,105],"max_tokens":2,"top_logprobs":2,"stream_id":2}"#,
    r#"GENERATE {"model":"parrot","prompt":[256,72],"logit_bias":{"257":100},"stream_id":"b"}"#,
    r#"SCORE {"model":"parrot","prompt":[256,72],"scored":[105,33],"stream_id":3}"#,
    r#"GENERATE {"model":"nope","prompt":[1],"stream_id":4}"#,
    r#"FROB {"stream_id":5,"model":"parrot"}"#,
    r#"GENERATE {"model":"#,
    r#"CANCEL {"stream_id":6,"model":"parrot","streams":"all"}"#,
    r#"GENERATE {"model":"parrot","prompt":[],"stream_id":7}"#,
];
/// The number of items in its responses.
const ITEMS: usize = 1 + 2 + 1 + 2 + 5;

/// LM-105
#[tokio::test]
async fn lm_105_compression_is_declined_and_a_compressed_message_ends_the_connection() {
    let server = of_parrot().await;
    let offer = [("sec-websocket-extensions", "permessage-deflate")];
    let mut socket = Socket::open(&server, "/lmtp", &offer).await.unwrap();
    assert!(!socket.headers.contains_key("sec-websocket-extensions"));
    socket
        .send_text(r#"GENERATE {"model":"parrot","prompt":[72],"stream_id":1}"#)
        .await;
    let (tokens, why) = tokens_and_end(&stream(&mut socket, 1).await);
    assert_eq!((tokens, why.as_str()), (vec![72, 257], "stop"));
    // A text message whose RSV1 bit says that it is compressed.
    let mut masked = vec![0b1100_0001, 0x80 | 2];
    masked.extend([0; 4]);
    masked.extend(*b"{}");
    socket.raw(&masked).await;
    let (_, close) = socket.rest().await;
    assert_eq!(close.map(|(code, _)| code), Some(1002));
}

/// The same as a JSON array, which cannot hold lines that are not JSON.
fn array() -> String {
    let pairs = SESSION.iter().filter(|line| line.ends_with('}'));
    let pairs: Vec<String> = pairs
        .map(|line| line.split_once(' ').unwrap())
        .map(|(word, payload)| format!("[{word:?}, {payload}]"))
        .collect();
    format!("[{}]", pairs.join(",\n "))
}

/// Sorts items by stream id, because the order between streams depends on timing.
fn sorted(messages: impl IntoIterator<Item = String>) -> Vec<Value> {
    let messages = messages.into_iter().map(|text| parsed(&text));
    let mut items: Vec<Value> = messages.flat_map(|(_, items)| items).collect();
    items.sort_by_key(|item| item["stream_id"].to_string());
    items
}

async fn over_socket(server: &Running, path: &str) -> Vec<Value> {
    let mut socket = Socket::open(server, path, &[]).await.unwrap();
    for line in SESSION {
        socket.send_text(line).await;
    }
    let mut texts = Vec::new();
    let mut items = 0;
    while items < ITEMS {
        let SocketReply::Text(text) = socket.received().await else {
            panic!("cut");
        };
        items += parsed(&text).1.len();
        texts.push(text);
    }
    socket.close().await;
    sorted(texts)
}

fn lines(text: &str) -> Vec<Value> {
    sorted(text.lines().map(str::to_owned))
}

async fn over_unix(server: &Running) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l");
    let socket = listening::ListeningSocket::unix(&path).unwrap();
    let lmtp = server.lmtp.clone();
    let listening = tokio::spawn(async move { lmtp.listen(socket).await });
    let mut stream = UnixStream::connect(&path).await.unwrap();
    let text = SESSION.join("\r\n\n") + "\n";
    stream.write_all(text.as_bytes()).await.unwrap();
    // LM-111: a half-close; running streams finish.
    stream.shutdown().await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    listening.abort();
    lines(&reply)
}

async fn over_pipes(server: &Running) -> Vec<Value> {
    let (ours, theirs) = duplex(100);
    let (mut reader, mut writer) = tokio::io::split(ours);
    let lmtp = server.lmtp.clone();
    let dialect = tokio::spawn(async move {
        let (reader, writer) = tokio::io::split(theirs);
        lmtp.serve_connection(reader, writer, false).await
    });
    let states = tokio::spawn(async move {
        // The last line has no line end.
        writer
            .write_all(SESSION.join("\n").as_bytes())
            .await
            .unwrap();
        writer.shutdown().await.unwrap();
    });
    let mut reply = String::new();
    reader.read_to_string(&mut reply).await.unwrap();
    states.await.unwrap();
    assert_eq!(dialect.await.unwrap(), LinesEnd::Finished);
    lines(&reply)
}

async fn over_a_bridge(server: &Running) -> Vec<Value> {
    let (ours, theirs) = duplex(1000);
    let (mut reader, mut writer) = tokio::io::split(ours);
    let address = PeerAddress::parse(&server.address.to_string()).unwrap();
    let bridged = tokio::spawn(async move {
        let (reader, writer) = tokio::io::split(theirs);
        bridge(&address, &ConnectOptions::default(), reader, writer, false).await
    });
    let states = tokio::spawn(async move {
        // Errors without a stream are not waited for, so they must not be last.
        writer
            .write_all(SESSION.join("\n").as_bytes())
            .await
            .unwrap();
        writer.shutdown().await.unwrap();
    });
    let mut reply = String::new();
    reader.read_to_string(&mut reply).await.unwrap();
    states.await.unwrap();
    assert_eq!(bridged.await.unwrap(), Ok(BridgeEnd::Finished));
    lines(&reply)
}

/// Sends a request on a connection of its own; returns head and body of the response.
pub(super) async fn http(server: &Running, head: &str, body: &str) -> (String, String) {
    let mut tcp = TcpStream::connect(server.address).await.unwrap();
    let length = body.len();
    let text = format!(
        "{head} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}",
        server.address
    );
    // Additional headers follow the path.
    let text = match head.split_once('\n') {
        Some((line, headers)) => text.replacen(
            &format!("{head} HTTP/1.1"),
            &format!("{line} HTTP/1.1\r\n{headers}"),
            1,
        ),
        None => text,
    };
    tcp.write_all(text.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tcp.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), unchunked(head, body))
}

fn unchunked(head: &str, mut body: &str) -> String {
    if !head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked")
    {
        return body.to_owned();
    }
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        whole.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
    whole
}

/// LM-110, LM-111, LM-113, LM-114
#[tokio::test]
async fn lm_101_the_same_session_over_every_transport_gives_equal_items() {
    let server = of_parrot().await;
    let expect = over_socket(&server, "/lmtp").await;
    assert_eq!(expect.len(), ITEMS);
    assert_eq!(over_socket(&server, "/?a=b").await, expect);
    assert_eq!(over_unix(&server).await, expect);
    assert_eq!(over_pipes(&server).await, expect);
    assert_eq!(over_a_bridge(&server).await, expect);
    let body = SESSION.join("\n");
    for kind in [
        "",
        "content-type: text/plain; charset=utf-8",
        "content-type: application/x-lmtp",
    ] {
        let head = format!("POST /lmtp\n{kind}").trim_end().to_owned();
        let (head, reply) = http(&server, &head, &body).await;
        assert!(head.starts_with("http/1.1 200"), "{head}");
        for header in [
            "content-type: application/x-lmtp; charset=utf-8",
            "cache-control: no-store",
            "x-accel-buffering: no",
        ] {
            assert!(head.contains(header), "{head}");
        }
        assert_eq!(lines(&reply), expect);
    }
    let well_formed: Vec<Value> = expect
        .iter()
        .filter(|item| item["code"] != json!("malformed"))
        .cloned()
        .collect();
    let (_, reply) = http(
        &server,
        "POST /lmtp\ncontent-type: application/json",
        &array(),
    )
    .await;
    assert_eq!(lines(&reply), well_formed);
    let events = "POST /lmtp\naccept: text/event-stream";
    let (head, reply) = http(&server, events, &body).await;
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    let mut received: Vec<&str> = reply.split_terminator("\n\n").collect();
    assert_eq!(received.pop(), Some("event: done\ndata: {}"));
    let received = received
        .into_iter()
        .map(|event| event.strip_prefix("data: ").unwrap());
    assert_eq!(sorted(received.map(str::to_owned)), expect);
}

#[tokio::test]
async fn lm_102_other_requests_get_the_status_and_headers_that_say_what_to_send() {
    let server = of_parrot().await;
    for (head, status, header) in [
        ("GET /lmtp", 426, "upgrade: websocket"),
        ("HEAD /lmtp", 426, "upgrade: websocket"),
        ("PUT /lmtp", 405, "allow: "),
        ("POST /", 405, "allow: "),
        ("GET /lmtp/x", 404, ""),
        // D-32: the home page.
        ("GET /", 200, "text/html"),
    ] {
        let (answer, _) = http(&server, head, "").await;
        assert!(
            answer.starts_with(&format!("http/1.1 {status}")),
            "{head}: {answer}"
        );
        assert!(answer.contains(header), "{head}: {answer}");
    }
    let other = Socket::open(&server, "/lmtp/x", &[]).await;
    assert_eq!(other.err().map(|status| status.as_u16()), Some(404));
}

/// LM-102, LM-104
#[tokio::test]
async fn lm_103_the_first_message_on_the_root_path_selects_the_protocol() {
    let kernel = kernel("parrot", spawned(parrot()));
    let server = Running::over(kernel).await;
    let mut ours = Socket::open(&server, "/", &[]).await.unwrap();
    ours.send_text(r#"GENERATE {"model":"parrot","prompt":[7],"stream_id":1}"#)
        .await;
    assert_eq!(tokens_and_end(&stream(&mut ours, 1).await).1, "stop");
    // The protocol does not change.
    ours.send_text(r#"{"actions":[]}"#).await;
    assert_eq!(message(&mut ours).await.1[0]["code"], json!("malformed"));
    let mut theirs = Socket::open(&server, "/", &[]).await.unwrap();
    let list: SessionMessage = action("LIST_ACTIONS", &[], &[("actions", "a")]);
    theirs.send(prost::Message::encode_to_vec(&list)).await;
    assert!(matches!(theirs.received().await, SocketReply::Binary(_)));
    // On `/lmtp` there is no detection.
    let mut ours = client(&server).await;
    ours.send_text(r#"{"actions":[]}"#).await;
    assert_eq!(message(&mut ours).await.1[0]["code"], json!("malformed"));
}

#[tokio::test]
async fn lm_104_only_subprotocols_of_the_path_are_selected() {
    let server = of_parrot().await;
    let upgrade = "upgrade: websocket\nsec-websocket-version: 13\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==";
    for (path, offered, chosen) in [
        ("/", "lmtp", Some("lmtp")),
        ("/lmtp", "soap, lmtp", Some("lmtp")),
        ("/lmtp", "soap", None),
        ("/", "evergreen.v2.json", Some("evergreen.v2.json")),
        ("/lmtp", "evergreen.v2.json", None),
        (
            "/",
            "soap, lmtp, evergreen.v2.json",
            Some("evergreen.v2.json"),
        ),
    ] {
        let mut tcp = TcpStream::connect(server.address).await.unwrap();
        let text = format!(
            "GET {path} HTTP/1.1\nhost: x\nconnection: upgrade\n{upgrade}\nsec-websocket-protocol: {offered}\n\n"
        );
        tcp.write_all(text.replace('\n', "\r\n").as_bytes())
            .await
            .unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(tcp.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with("HTTP/1.1 101"), "{head}");
        let mut selected = head
            .lines()
            .filter_map(|line| line.strip_prefix("sec-websocket-protocol: "));
        assert_eq!(selected.next(), chosen, "{path} {offered}");
    }
    // With a subprotocol there is no detection: an unknown type is answered by LMTP.
    let headers = [("sec-websocket-protocol", "lmtp")];
    let mut socket = Socket::open(&server, "/", &headers).await.unwrap();
    socket.send_text("{}").await;
    assert_eq!(message(&mut socket).await.1[0]["code"], json!("malformed"));
}

#[tokio::test]
async fn lm_107_a_socket_that_answers_no_ping_is_dropped_after_90_seconds() {
    let server = of_parrot().await;
    let numbers = server.shared.metrics.clone();
    for path in ["/lmtp", "/"] {
        let mut mute = Socket::open(&server, path, &[]).await.unwrap();
        mute.send_text("X {}").await;
        assert_eq!(message(&mut mute).await.0, "MSG");
        let took = in_time("it is dropped", Duration::from_secs(300), || {
            numbers.connections_open.get() == 0
        })
        .await;
        assert!(
            (Duration::from_secs(60)..Duration::from_secs(120)).contains(&took),
            "{took:?}"
        );
        drop(mute);
    }
}

#[tokio::test]
async fn lm_108_keys_are_checked_before_the_upgrade() {
    for query_key in [false, true] {
        let config = server::Config {
            query_key,
            ..server::Config::default()
        };
        let kernel = kernel("parrot", spawned(parrot()));
        let keys = vec![key("anna", "secret")];
        let server = Running::start_faces(config, kernel, Faces::default(), keys).await;
        for path in ["/lmtp", "/"] {
            let refused = Socket::open(&server, path, &[]).await;
            assert_eq!(refused.err().map(|status| status.as_u16()), Some(401));
            let bearer = [("authorization", "Bearer secret")];
            assert!(Socket::open(&server, path, &bearer).await.is_ok());
            let named = Socket::open(&server, &format!("{path}?key=secret"), &[]).await;
            assert_eq!(named.is_ok(), query_key);
        }
        // A POST that claims to upgrade must not use the query key.
        let reply = "POST /lmtp?key=secret\nupgrade: websocket\nconnection: upgrade";
        for asked in ["POST /lmtp", reply] {
            let (head, _) = http(&server, asked, "X {}").await;
            assert!(head.starts_with("http/1.1 401"), "{head}");
        }
        let (head, _) = http(&server, "POST /lmtp\nauthorization: Bearer secret", "X {}").await;
        assert!(head.starts_with("http/1.1 200"), "{head}");
    }
}

/// LM-505: streams of the revoked key get an error, and those of other keys are not affected.
#[tokio::test]
async fn lm_108_revoking_a_key_ends_its_connections() {
    let (mut owner, engine) = by_hand(parrot());
    let (anna, ben) = (key("anna", "one"), key("ben", "two"));
    let kernel = kernel("parrot", engine);
    let keys = vec![anna, ben.clone()];
    let server = Running::start(kernel, Default::default(), keys).await;
    let mut cut = Socket::open(&server, "/lmtp", &[("authorization", "Bearer one")])
        .await
        .unwrap();
    let mut other = Socket::open(&server, "/lmtp", &[("authorization", "Bearer two")])
        .await
        .unwrap();
    let ask = r#"GENERATE {"model":"parrot","prompt":[7],"stream_id":1}"#;
    for socket in [&mut cut, &mut other] {
        socket.send_text(ask).await;
        socket.send_text("X {}").await;
        assert_eq!(message(socket).await.0, "MSG");
    }
    // The same name, with another secret.
    server.shared.auth.replace(vec![key("anna", "new"), ben]);
    let (reply, close) = cut.rest().await;
    let Some(SocketReply::Text(last)) = reply.last() else {
        panic!("no last message: {reply:?}");
    };
    assert!(last.contains(r#""code":"insufficient_scope""#), "{last}");
    assert_eq!(close.map(|(code, _)| code), Some(1008));
    owner.step(sapwood_proto::time::Time::ZERO);
    while !owner.is_empty() {
        owner.step(sapwood_proto::time::Time::ZERO);
    }
    assert_eq!(tokens_and_end(&stream(&mut other, 1).await).1, "stop");
}

/// LM-114: one message for each item, without a list.
#[tokio::test]
async fn lm_114_items_may_be_objects() {
    let server = of_parrot().await;
    let ask = r#"GENERATE {"model":"parrot","prompt":[7],"stream_id":1}"#;
    for (head, before) in [
        ("POST /lmtp?items=object", ""),
        (
            "POST /lmtp?a&items=object\naccept: text/event-stream",
            "data: ",
        ),
    ] {
        let (head, body) = http(&server, head, ask).await;
        assert!(head.starts_with("http/1.1 200"), "{head}");
        let items = body.lines().filter_map(|line| line.strip_prefix(before));
        let items = items.filter_map(|line| line.strip_prefix("TOKEN "));
        let items: Vec<Value> = items
            .map(|item| serde_json::from_str(item).unwrap())
            .collect();
        assert_eq!(
            tokens_and_end(&items),
            (vec![7, 257], "stop".to_owned()),
            "{body}"
        );
    }
}

/// Input that has ended while streams are open.
async fn pipes(server: &Running, cancel: bool, retained: bool) -> (LinesEnd, String) {
    let (ours, theirs) = duplex(1 << 20);
    let (mut reader, mut writer) = tokio::io::split(ours);
    let lmtp = server.lmtp.clone();
    let dialect = tokio::spawn(async move {
        let (reader, writer) = tokio::io::split(theirs);
        lmtp.serve_connection(reader, writer, cancel).await
    });
    let text =
        "\n \nGENERATE {\"model\":\"m\",\"prompt\":[1],\"stream_id\":1,\"max_tokens\":2000}\n";
    writer.write_all(text.as_bytes()).await.unwrap();
    let mut reply = String::new();
    if retained {
        writer.shutdown().await.unwrap();
        reader.read_to_string(&mut reply).await.unwrap();
    } else {
        let mut first = [0; 8];
        reader.read_exact(&mut first).await.unwrap();
        drop((reader, writer));
    }
    (dialect.await.unwrap(), reply)
}

#[tokio::test]
async fn lm_110_at_the_end_of_input_streams_finish_or_are_cancelled_as_configured() {
    let config = sapwood_engine::scripted::Config {
        tokens_per_s: 2_000.0,
        ..chatter()
    };
    let engine = spawned(config);
    let server = with_config(kernel("m", engine.clone()), lmtp::Config::default()).await;
    let (ended, reply) = pipes(&server, false, true).await;
    assert_eq!((ended, lines(&reply).len()), (LinesEnd::Finished, 2000));
    let (ended, reply) = pipes(&server, true, true).await;
    assert_eq!(ended, LinesEnd::Finished);
    assert!(lines(&reply).len() < 2000);
    // The reader of the output has gone.
    let (ended, _) = pipes(&server, false, false).await;
    assert_eq!(ended, LinesEnd::Cut);
    until("nothing runs", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
}

/// LM-112: a long line is skipped and the next is read.
#[tokio::test]
async fn lm_111_a_disconnect_of_a_unix_client_cancels_its_streams() {
    let (mut owner, engine) = by_hand(chatter());
    let server = with_config(kernel("m", engine), lmtp::Config::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l");
    let socket = listening::ListeningSocket::unix(&path).unwrap();
    let lmtp = server.lmtp.clone();
    let listening = tokio::spawn(async move { lmtp.listen(socket).await });
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    for half_closed in [false, true] {
        let mut stream = UnixStream::connect(&path).await.unwrap();
        let text = "GENERATE {\"model\":\"m\",\"prompt\":[1],\"stream_id\":1}\n";
        stream.write_all(text.as_bytes()).await.unwrap();
        if half_closed {
            stream.shutdown().await.unwrap();
        }
        until("it is open", || open.get() == 1).await;
        drop(stream);
        in_time("it is cancelled", Duration::from_secs(10), || {
            open.get() == 0
        })
        .await;
        owner.step(sapwood_proto::time::Time::ZERO);
        assert!(owner.is_empty());
    }
    listening.abort();
}

#[tokio::test]
async fn lm_113_a_json_body_that_is_not_a_list_of_messages_is_refused() {
    let server = of_parrot().await;
    for body in ["", "[]", "{}", "7", "[[\"X\"]]", "[[1,{}]]"] {
        let (head, reply) = http(&server, "POST /lmtp\ncontent-type: application/json", body).await;
        assert!(head.starts_with("http/1.1 400"), "{body}: {head}");
        let error: Value = serde_json::from_str(&reply).unwrap();
        assert_eq!(error["error"]["code"], json!("malformed"));
    }
    // An empty body of lines is valid.
    let (head, reply) = http(&server, "POST /lmtp", "").await;
    assert!(
        head.starts_with("http/1.1 200") && reply.is_empty(),
        "{head} {reply}"
    );
}

/// LM-113: lines are acted on as they arrive.
#[tokio::test]
async fn lm_115_closing_the_response_cancels_its_streams() {
    let engine = spawned(chatter());
    let server = with_config(kernel("m", engine.clone()), lmtp::Config::default()).await;
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    let mut tcp = TcpStream::connect(server.address).await.unwrap();
    let line = "GENERATE {\"model\":\"m\",\"prompt\":[1],\"stream_id\":1,\"max_tokens\":4000}\n";
    let text = format!(
        "POST /lmtp HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{line}\r\n",
        line.len()
    );
    tcp.write_all(text.as_bytes()).await.unwrap();
    // The response starts before the body has ended.
    let mut first = vec![0; 600];
    tcp.read_exact(&mut first).await.unwrap();
    assert!(String::from_utf8_lossy(&first).contains("TOKEN ["));
    drop(tcp);
    until("it is cancelled", || open.get() == 0).await;
    let numbers = &server.shared.metrics;
    assert_eq!(numbers.cancelled.with_label_values(&["client"]).get(), 1);
    until("nothing runs", || {
        engine.stats().requests_running.get() == 0
    })
    .await;
}

/// LM-302: messages without a model get the configured one.
#[tokio::test]
async fn lm_302_a_message_without_a_model_uses_the_default_model() {
    let config = lmtp::Config {
        default_model: Some("parrot".into()),
        ..lmtp::Config::default()
    };
    let kernel: Kernel = kernel("parrot", spawned(parrot()));
    let server = with_config(kernel, config).await;
    let mut socket = client(&server).await;
    socket
        .send_text(r#"GENERATE {"prompt":[7],"stream_id":1}"#)
        .await;
    assert_eq!(tokens_and_end(&stream(&mut socket, 1).await).1, "stop");
}

/// Steps the engine until the response shows the end of a stream.
async fn stepped_to_the_end(tcp: &mut TcpStream, owner: &mut EngineOwner) {
    let mut reply = Vec::new();
    while !String::from_utf8_lossy(&reply).contains("\"finish_reason\":\"length\"") {
        owner.step(sapwood_proto::time::Time::ZERO);
        // Both may be cancelled: nothing is read where nothing has come.
        tokio::select! {
            biased;
            read = tcp.read_buf(&mut reply) => assert_ne!(read.unwrap(), 0),
            () = tokio::task::yield_now() => {}
        }
    }
}

/// Charged beside the body that it was read from, an array would wait for room that only itself can give back.
#[tokio::test]
async fn d_47_an_array_is_charged_once_and_until_its_last_message_is_taken() {
    let (mut owner, engine) = by_hand(chatter());
    let config = server::Config {
        body_budget: body_budget::Config {
            each: 2 << 20,
            ..body_budget::Config::default()
        },
        ..server::Config::default()
    };
    let server =
        Running::start_faces(config, kernel("m", engine), Faces::default(), Vec::new()).await;
    let blank = " ".repeat(1_200_000);
    let array = format!(
        r#"[["GENERATE",{{"model":"m","prompt":[1],"stream_id":1,"max_tokens":3{blank}}}]]"#
    );
    let mut tcp = TcpStream::connect(server.address).await.unwrap();
    let head =
        "POST /lmtp HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close";
    let text = format!("{head}\r\ncontent-length: {}\r\n\r\n{array}", array.len());
    tcp.write_all(text.as_bytes()).await.unwrap();
    let metrics = &server.shared.metrics;
    let open = metrics.streams_open.with_label_values(&["lmtp"]);
    until("it is open", || open.get() == 1).await;
    until("nothing is charged", || metrics.body_bytes.get() == 0).await;
    assert_eq!(open.get(), 1, "it still runs");
    stepped_to_the_end(&mut tcp, &mut owner).await;
}

/// OA-911 is for bodies that are read before they are answered. A body that is read as a stream may be silent while its
/// streams run; if it times out later, the response is broken off instead of ended.
#[tokio::test]
async fn lm_113_a_body_may_be_silent_while_streams_run_and_a_timeout_breaks_off_the_response() {
    let (mut owner, engine) = by_hand(chatter());
    let server = with_config(kernel("m", engine), lmtp::Config::default()).await;
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    let mut tcp = TcpStream::connect(server.address).await.unwrap();
    let line = "GENERATE {\"model\":\"m\",\"prompt\":[1],\"stream_id\":1,\"max_tokens\":3}\n";
    let head = "POST /lmtp HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n";
    let text = format!("{head}{:x}\r\n{line}\r\n", line.len());
    tcp.write_all(text.as_bytes()).await.unwrap();
    until("it is open", || open.get() == 1).await;
    let mut seconds = 0;
    let idle_timeout = || {
        seconds += 1;
        seconds > 90
    };
    in_time("a long pause", Duration::from_secs(100), idle_timeout).await;
    assert_eq!(open.get(), 1, "it still runs");
    stepped_to_the_end(&mut tcp, &mut owner).await;
    // Nothing is running, and no more input arrives.
    let reading = tokio::spawn(async move {
        let mut rest = Vec::new();
        // The connection may end with a reset or with EOF.
        let _ = tcp.read_to_end(&mut rest).await;
        rest
    });
    let given_up = || reading.is_finished();
    in_time("it is given up", Duration::from_secs(40), given_up).await;
    let rest = String::from_utf8(reading.await.unwrap()).unwrap();
    assert!(!rest.contains("0\r\n\r\n"), "no end of the body: {rest:?}");
}
