//! Sessions resumed by hand: in another dialect, over another transport, after any end of a connection.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use sapwood_kernel::Kernel;
use sapwood_kernel::session::test_functions;
use sapwood_proto::evergreen::wire::SessionMessage;
use sapwood_proto::evergreen::{Dialect, Payload, WireMessage, json as text, protobuf};
use sapwood_proto::session::Side;
use sapwood_server::faces::evergreen::Config;
use sapwood_tests::raw::{action, call, end, fragments, json, leaf, piece};
use sapwood_tests::socket::{Socket, SocketReply, frame};
use sapwood_tests::{Running, key, until};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{RESUME, TOKEN, closed_in_time};

const DIALECTS: [Dialect; 3] = [Dialect::Grpc, Dialect::Json, Dialect::Protobuf];

/// A client of any dialect.
struct Peer {
    wire: Wire,
    /// The content received of each node, and whether it has ended.
    seen: BTreeMap<String, (String, bool)>,
}

enum Wire {
    Call(mpsc::Sender<SessionMessage>, Box<Streaming<SessionMessage>>),
    Socket(Box<Socket>, Dialect),
}

impl Peer {
    async fn with(server: &Running, dialect: Dialect, headers: &[(&'static str, &str)]) -> Self {
        let wire = if dialect == Dialect::Grpc {
            let (send, messages) = mpsc::channel(8);
            let answers = call(server, ReceiverStream::new(messages), headers).await;
            Wire::Call(send, Box::new(answers.unwrap()))
        } else {
            let mut headers = headers.to_vec();
            let name = dialect.subprotocol().unwrap();
            headers.push(("sec-websocket-protocol", name));
            let socket = Socket::open(server, "/evergreen", &headers).await.unwrap();
            Wire::Socket(Box::new(socket), dialect)
        };
        Self {
            wire,
            seen: BTreeMap::new(),
        }
    }

    /// A new session, and its token.
    async fn new(server: &Running, dialect: Dialect) -> (Self, String) {
        let mut peer = Self::with(server, dialect, &[RESUME]).await;
        peer.send(action("SESSION_INFO", &[], &[("info", "i")]))
            .await;
        let info: Value = serde_json::from_str(&peer.content("i").await).unwrap();
        assert_eq!(info["dialect"], dialect.name());
        let token = info["session_token"].as_str().unwrap().to_owned();
        if let Wire::Socket(socket, _) = &peer.wire {
            assert_eq!(socket.headers[TOKEN], token.as_str());
            let extensions = socket.headers["evergreen-extensions"].to_str().unwrap();
            assert!(extensions.contains("resume"));
        }
        (peer, token)
    }

    async fn back(server: &Running, dialect: Dialect, token: &str) -> Self {
        Self::with(server, dialect, &[(TOKEN, token)]).await
    }

    async fn send(&mut self, message: SessionMessage) {
        match &mut self.wire {
            Wire::Call(send, _) => send.send(message).await.unwrap(),
            Wire::Socket(socket, Dialect::Json) => {
                let message = protobuf::decode(Bytes::from(message.encode_to_vec())).unwrap();
                let mut out = BytesMut::new();
                text::encode(&message, Side::Client, &mut out);
                socket.send_text(std::str::from_utf8(&out).unwrap()).await;
            }
            Wire::Socket(socket, _) => socket.send(message.encode_to_vec()).await,
        }
    }

    /// The next message, or how the connection ended.
    async fn next(&mut self) -> Result<WireMessage, String> {
        match &mut self.wire {
            Wire::Call(_, answers) => match answers.message().await {
                Ok(Some(message)) => {
                    Ok(protobuf::decode(Bytes::from(message.encode_to_vec())).unwrap())
                }
                Ok(None) => Err("1000 ".into()),
                Err(status) => {
                    let status = sapwood_net::evergreen::grpc::from_grpc(&status);
                    Err(format!(
                        "1008 {}: {}",
                        status.code.grpc_name(),
                        status.reason
                    ))
                }
            },
            Wire::Socket(socket, _) => match socket.received().await {
                SocketReply::Text(reply) => Ok(text::decode(reply.as_bytes(), Side::Client)
                    .unwrap()
                    .message),
                SocketReply::Binary(reply) => Ok(protobuf::decode(reply).unwrap()),
                SocketReply::Close(close) => {
                    let (code, reason) = close.unwrap_or_default();
                    Err(format!("{code} {reason}"))
                }
            },
        }
    }

    /// The content of a node until its final fragment, or until there are `most` bytes of it.
    async fn read(&mut self, node: &str, most: usize) -> String {
        loop {
            let (data, last) = self.seen.entry(node.to_owned()).or_default();
            if *last || data.len() >= most {
                return std::mem::take(data);
            }
            let message = self.next().await.unwrap();
            for fragment in message.fragments {
                let (data, last) = self.seen.entry(fragment.id.to_string()).or_default();
                *last = fragment.last;
                if let Some(Payload::Data(more)) = fragment.chunk.and_then(|chunk| chunk.payload) {
                    data.push_str(std::str::from_utf8(&more).unwrap());
                }
            }
        }
    }

    async fn content(&mut self, node: &str) -> String {
        self.read(node, usize::MAX).await
    }

    /// Sends RESUME with `have`; returns what the server has.
    async fn resume(&mut self, name: &str, have: &str) -> Value {
        let answer = format!("answer to {name}");
        let mut hello = action("RESUME", &[("have", name)], &[("have", &answer)]);
        hello.node_fragments.push(json(name, have));
        self.send(hello).await;
        serde_json::from_str(&self.content(&answer).await).unwrap()
    }

    /// How the connection ended.
    async fn end(mut self) -> String {
        loop {
            if let Err(end) = self.next().await {
                return end;
            }
        }
    }

    /// Half-closes, and waits for the end of the session.
    async fn leave(self) {
        match self.wire {
            Wire::Call(send, answers) => {
                drop(send);
                assert_eq!(end(*answers).await, None);
            }
            Wire::Socket(socket, _) => socket.close().await,
        }
    }
}

async fn no_session_left(server: &Running) {
    let open = &server.shared.metrics.evergreen.sessions_open;
    until("no session is left", || open.get() == 0).await;
}

/// EV-940, EV-942
#[tokio::test]
async fn ev_941_a_session_resumes_in_any_other_dialect_and_transport() {
    let server = Running::with_test_functions().await;
    let pairs = DIALECTS
        .iter()
        .flat_map(|one| DIALECTS.iter().map(move |two| (*one, *two)));
    for (one, two) in pairs {
        let (mut first, token) = Peer::new(&server, one).await;
        let echo = action("echo", &[("text", "p")], &[("response", "r")]);
        first.send(echo).await;
        first.send(fragments(vec![piece("p", 0, 3)])).await;
        assert_eq!(first.read("r", 3).await, "xxx");
        let mut second = Peer::back(&server, two, &token).await;
        assert_eq!(
            first.end().await,
            "1008 ABORTED: SUPERSEDED",
            "{one:?} {two:?}"
        );
        let theirs = second
            .resume("h", "{\"nodes\":{\"r\":1,\"i\":1},\"actions\":0}")
            .await;
        assert_eq!(theirs["nodes"]["p"], 1);
        assert_eq!(theirs["actions"], 2, "RESUME itself is not counted");
        second.send(fragments(vec![piece("p", 1, 4)])).await;
        assert_eq!(
            second.read("r", 4).await,
            "xxxx",
            "and not what had been received before"
        );
        // And back, with nothing received.
        let mut third = Peer::back(&server, one, &token).await;
        assert_eq!(
            second.end().await,
            "1008 ABORTED: SUPERSEDED",
            "{one:?} {two:?}"
        );
        let theirs = third.resume("g", "{}").await;
        assert_eq!(theirs["nodes"]["p"], 2);
        third.send(fragments(vec![leaf("p", 2, 1)])).await;
        assert_eq!(third.content("r").await, "xxxxxxxx");
        let ask = action("SESSION_INFO", &[], &[("info", "j")]);
        third.send(ask).await;
        let info: Value = serde_json::from_str(&third.content("j").await).unwrap();
        assert_eq!(info["dialect"], one.name());
        third.leave().await;
        no_session_left(&server).await;
    }
}

/// EV-109
#[tokio::test]
async fn ev_940_a_normal_close_ends_the_session_and_any_other_end_detaches_it() {
    let server = Running::with_test_functions().await;
    let close = |code: u16| frame(0x88, &code.to_be_bytes());
    for dialect in [Dialect::Json, Dialect::Protobuf] {
        for (last, retained) in [
            (Some(close(1000)), false),
            (Some(frame(0x88, b"")), false),
            (Some(close(1001)), true),
            (Some(close(1011)), true),
            (Some(close(4000)), true),
            // In the middle of a message.
            (Some(vec![0x82, 0x85, 0, 0, 0, 0, b'x']), true),
            (None, true),
        ] {
            for half_closed in [false, true] {
                let (mut peer, token) = Peer::new(&server, dialect).await;
                peer.send(action("slow", &[], &[("response", "s")])).await;
                if half_closed {
                    peer.send(action("FINISH", &[], &[("__status__", "f")]))
                        .await;
                    peer.content("f").await;
                }
                let numbers = &server.shared.metrics.evergreen;
                until("it runs", || numbers.actions_open.get() == 1).await;
                let Wire::Socket(mut socket, _) = peer.wire else {
                    unreachable!("it is one");
                };
                if let Some(last) = &last {
                    socket.raw(last).await;
                }
                drop(socket);
                let what = format!("{dialect:?} {last:?} {half_closed}");
                if !retained {
                    no_session_left(&server).await;
                    let end = Peer::back(&server, dialect, &token).await.end().await;
                    assert_eq!(end, "1008 NOT_FOUND: NO_SESSION", "{what}");
                    continue;
                }
                let mut peer = Peer::back(&server, dialect, &token).await;
                let theirs = peer.resume("h", "{}").await;
                assert_eq!(theirs["actions"], 2 + i32::from(half_closed), "{what}");
                if half_closed {
                    // The server accepts nothing more, and waits for what is running.
                    drop(peer);
                    let mut other = Peer::back(&server, Dialect::Grpc, &token).await;
                    other.resume("g", "{}").await;
                    let Wire::Call(send, answers) = other.wire else {
                        unreachable!("it is one");
                    };
                    drop((send, answers));
                } else {
                    peer.leave().await;
                }
                no_session_left(&server).await;
            }
        }
    }
}

#[tokio::test]
async fn ev_941_unknown_and_foreign_tokens_over_a_socket_get_the_same_answer() {
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    let config = Config {
        resumable_sessions: 1,
        ..Config::default()
    };
    let keys = vec![key("mine", "one"), key("theirs", "two")];
    let server = Running::start(kernel, config, keys).await;
    let (mine, theirs) = (
        ("authorization", "Bearer one"),
        ("authorization", "Bearer two"),
    );
    let json = ("sec-websocket-protocol", "evergreen.v2.json");
    let retained = Socket::open(&server, "/", &[mine, json, RESUME])
        .await
        .unwrap();
    let token = retained.headers[TOKEN].to_str().unwrap().to_owned();
    assert_eq!(token.len(), 43, "32 bytes in base64url");
    // There is room for one session; a client that does not ask for a token gets none.
    for headers in [vec![mine, json, RESUME], vec![mine, json]] {
        let other = Socket::open(&server, "/", &headers).await.unwrap();
        assert_eq!(other.headers.get(TOKEN), None);
    }
    let removed = Some((1008, "NOT_FOUND: NO_SESSION".to_owned()));
    let query = format!("/?evergreen-session-token={token}");
    let msgpack = ("sec-websocket-protocol", "actionengine.msgpack");
    for (path, headers) in [
        ("/", vec![theirs, json, (TOKEN, token.as_str())]),
        (query.as_str(), vec![theirs, json]),
        ("/", vec![mine, json, (TOKEN, "")]),
        ("/", vec![mine, json, (TOKEN, "AAAA")]),
        ("/?evergreen-session-token=", vec![mine, json]),
        ("/", vec![mine, json, (TOKEN, &token[1..])]),
    ] {
        let mut socket = Socket::open(&server, path, &headers).await.unwrap();
        let (reply, close) = socket.rest().await;
        assert_eq!(close, removed, "{path} {headers:?}");
        assert_eq!(reply.len(), 1, "its last message, {path} {headers:?}");
    }
    // msgpack cannot resume, and has one close code (EV-739).
    let headers = [mine, msgpack, (TOKEN, token.as_str())];
    let mut socket = Socket::open(&server, "/", &headers).await.unwrap();
    let close = socket.rest().await.1;
    assert_eq!(close, Some((1011, "NOT_FOUND: NO_SESSION".to_owned())));
    // An unknown token closes the connection before its first message, whichever dialect it would be in.
    let nobodys = format!("/?evergreen-session-token={}", "A".repeat(43));
    for (path, caller) in [(&nobodys, mine), (&query, theirs)] {
        let mut socket = Socket::open(&server, path, &[caller]).await.unwrap();
        assert_eq!(socket.rest().await, (Vec::new(), removed.clone()), "{path}");
    }
    // A browser can set only the URL, and its first message selects the dialect.
    let mut back = Socket::open(&server, &query, &[mine]).await.unwrap();
    back.send_text(r#"{"actions":[{"name":"RESUME","inputs":[{"name":"have","id":"h"}],"outputs":[{"name":"have","id":"m"}]}],"nodeFragments":[{"id":"h","chunkFragment":{"metadata":{"mimetype":"application/json"},"data":"e30="}}]}"#).await;
    assert!(matches!(back.received().await, SocketReply::Text(text) if text.contains("\"m\"")));
    drop(retained);
}

#[tokio::test]
async fn ev_940_msgpack_sessions_cannot_be_resumed() {
    let server = Running::with_test_functions().await;
    let msgpack = ("sec-websocket-protocol", "actionengine.msgpack");
    let chosen = Socket::open(&server, "/", &[msgpack, RESUME])
        .await
        .unwrap();
    assert_eq!(chosen.headers.get(TOKEN), None);
    let extensions = chosen.headers["evergreen-extensions"].to_str().unwrap();
    assert!(!extensions.contains("resume"));
    chosen.close().await;
    // Nor are any if resuming is turned off.
    let config = Config {
        resumable_sessions: 0,
        ..Config::default()
    };
    let off = Running::start(Kernel::new(), config, Vec::new()).await;
    let socket = Socket::open(&off, "/", &[RESUME]).await.unwrap();
    assert_eq!(socket.headers.get(TOKEN), None);
    let extensions = socket.headers["evergreen-extensions"].to_str().unwrap();
    assert!(!extensions.contains("resume"));
    // If the first message selects the dialect, it is too late for the headers.
    let mut shown = Socket::open(&server, "/", &[RESUME]).await.unwrap();
    let token = shown.headers[TOKEN].to_str().unwrap().to_owned();
    let open = &server.shared.metrics.evergreen.sessions_open;
    let ping = b"\xc4\x13\x90\x91\xc4\x0e\xa1A\xa8__ping__\x90\x90\x00\x00";
    shown.send(&ping[..]).await;
    assert!(matches!(shown.received().await, SocketReply::Binary(_)));
    assert_eq!(open.get(), 1);
    drop(shown);
    no_session_left(&server).await;
    let end = Peer::back(&server, Dialect::Json, &token).await.end().await;
    assert_eq!(end, "1008 NOT_FOUND: NO_SESSION");
}

#[tokio::test]
async fn ev_960_a_drain_lets_detached_sessions_finish_and_refuses_reconnects() {
    let server = Running::that_drains_at_once().await;
    let (mut busy, token) = Peer::new(&server, Dialect::Json).await;
    let (idle, _) = Peer::new(&server, Dialect::Protobuf).await;
    busy.send(action("slow", &[], &[("response", "s")])).await;
    let numbers = &server.shared.metrics.evergreen;
    until("it runs", || numbers.actions_open.get() == 1).await;
    drop((busy, idle));
    let drain = server.shared.drain.clone();
    tokio::spawn(async move { drain.run().await });
    // The drain does not wait for a detached session with nothing running.
    until("one session has ended", || numbers.sessions_open.get() == 1).await;
    let json = ("sec-websocket-protocol", "evergreen.v2.json");
    let back = Socket::open(&server, "/", &[json, (TOKEN, &token)]).await;
    assert_eq!(back.err().unwrap().as_u16(), 503);
    closed_in_time(&server, Duration::from_secs(30)).await;
}
