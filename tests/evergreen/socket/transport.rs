//! What holds in every dialect: the upgrade, dialect detection, frames, limits, the close (EV-701, EV-704, EV-705).

use prost::Message;
use sapwood_kernel::Kernel;
use sapwood_kernel::session::test_functions;
use sapwood_proto::evergreen::SessionLimits;
use sapwood_server::faces::evergreen::Config;
use sapwood_server::http::origin;
use sapwood_server::server;
use sapwood_tests::raw::{action, fragments, leaf};
use sapwood_tests::socket::{Socket, SocketReply, frame};
use sapwood_tests::{Running, key, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn bytes(code: u16, reason: &str) -> Option<(u16, String)> {
    Some((code, reason.to_owned()))
}

#[tokio::test]
async fn ev_701_the_first_message_selects_the_dialect_on_both_paths() {
    let server = Running::with_test_functions().await;
    let list = action("LIST_ACTIONS", &[], &[("actions", "a")]).encode_to_vec();
    let json = r#" {"actions":[{"name":"LIST_ACTIONS","outputs":[{"name":"actions","id":"a"}]}]}"#;
    for path in ["/evergreen", "/", "/?x=1"] {
        let mut socket = Socket::open(&server, path, &[]).await.unwrap();
        socket.send(Vec::new()).await;
        socket.send(list.clone()).await;
        assert!(
            matches!(socket.received().await, SocketReply::Binary(_)),
            "{path}"
        );
        socket.close().await;
        let mut socket = Socket::open(&server, path, &[]).await.unwrap();
        socket.send_text(json).await;
        assert!(
            matches!(socket.received().await, SocketReply::Text(_)),
            "{path}"
        );
        // The dialect does not change.
        socket.send(list.clone()).await;
        let (reply, close) = socket.rest().await;
        assert!(
            matches!(reply.last(), Some(SocketReply::Text(_))),
            "{reply:?}"
        );
        assert_eq!(close, bytes(1007, "INVALID_ARGUMENT: BAD_MESSAGE"));
    }
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    socket.send_text("{}").await;
    let (_, close) = socket.rest().await;
    assert_eq!(close, bytes(1003, "INVALID_ARGUMENT: BAD_MESSAGE"));
}

#[tokio::test]
async fn ev_701_a_first_message_of_no_dialect_closes_the_connection() {
    let server = Running::with_test_functions().await;
    for (path, text, expect) in [
        (
            "/evergreen",
            "HELLO {}",
            (1007, "INVALID_ARGUMENT: BAD_MESSAGE"),
        ),
        ("/", "[]", (1007, "INVALID_ARGUMENT: BAD_MESSAGE")),
        ("/", "", (1007, "INVALID_ARGUMENT: BAD_MESSAGE")),
    ] {
        let mut socket = Socket::open(&server, path, &[]).await.unwrap();
        socket.send_text(text).await;
        let (reply, close) = socket.rest().await;
        assert_eq!(
            (reply, close),
            (vec![], bytes(expect.0, expect.1)),
            "{path} {text}"
        );
    }
}

#[tokio::test]
async fn ev_701_unknown_subprotocols_select_nothing_and_a_plain_get_is_426_or_the_page() {
    let server = Running::with_test_functions().await;
    let upgrade = "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n\
                   sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let offered = format!(
        "GET /evergreen HTTP/1.1\r\nhost: x\r\n{upgrade}sec-websocket-protocol: soap, evergreen.v3\r\n\r\n"
    );
    let mut tcp = TcpStream::connect(server.address).await.unwrap();
    tcp.write_all(offered.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(tcp.read_u8().await.unwrap());
    }
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(answer.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{answer}");
    assert!(!answer.contains("sec-websocket-protocol"), "{answer}");
    let several = [("sec-websocket-protocol", "soap, evergreen.v2.json")];
    let socket = Socket::open(&server, "/", &several).await.unwrap();
    assert_eq!(
        socket.headers["sec-websocket-protocol"],
        "evergreen.v2.json"
    );
    let with_body = format!("GET /evergreen HTTP/1.1\r\nhost: x\r\n{upgrade}content-length: 5\r\n");
    for (request, expect) in [
        (with_body.as_str(), "HTTP/1.1 400 "),
        ("GET /evergreen HTTP/1.1\r\nhost: x\r\n", "HTTP/1.1 426 "),
        ("GET / HTTP/1.1\r\nhost: x\r\n", "HTTP/1.1 200 "),
        (
            "GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nsec-websocket-version: 12\r\n",
            "HTTP/1.1 426 ",
        ),
        (
            "GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n",
            "HTTP/1.1 400 ",
        ),
        ("POST /evergreen HTTP/1.1\r\nhost: x\r\n", "HTTP/1.1 405 "),
    ] {
        let mut tcp = TcpStream::connect(server.address).await.unwrap();
        tcp.write_all(format!("{request}\r\n").as_bytes())
            .await
            .unwrap();
        let mut status = [0; 13];
        tcp.read_exact(&mut status).await.unwrap();
        assert_eq!(std::str::from_utf8(&status), Ok(expect), "{request}");
    }
}

/// A server with a key, and one allowed origin.
async fn guarded(query_key: bool) -> Running {
    let key = key("anna", "one");
    let config = server::Config {
        origin: origin::Config {
            origins: vec!["https://app.example".into()],
            ..origin::Config::default()
        },
        query_key,
        ..server::Config::default()
    };
    let kernel = Kernel::new();
    kernel.add_all(test_functions()).unwrap();
    Running::start_with(config, kernel, Config::default(), vec![key]).await
}

#[tokio::test]
async fn ev_704_keys_and_origins_are_checked_before_the_upgrade() {
    let (plain, query) = (guarded(false).await, guarded(true).await);
    let bearer = ("authorization", "Bearer one");
    for (server, path, headers, expect) in [
        (&plain, "/evergreen", vec![], Some(401)),
        (
            &plain,
            "/evergreen",
            vec![("authorization", "Bearer two")],
            Some(401),
        ),
        (&plain, "/", vec![bearer], None),
        (&plain, "/evergreen?key=one", vec![], Some(401)),
        (&query, "/evergreen?x=1&key=o%6ee", vec![], None),
        (&query, "/evergreen?key=two", vec![], Some(401)),
        (
            &query,
            "/evergreen?key=one",
            vec![("authorization", "Bearer two")],
            Some(401),
        ),
        (
            &plain,
            "/evergreen",
            vec![bearer, ("origin", "https://evil.example")],
            Some(403),
        ),
        (
            &plain,
            "/evergreen",
            vec![bearer, ("origin", "https://app.example")],
            None,
        ),
    ] {
        let opened = Socket::open(server, path, &headers).await;
        let status = opened.err().map(|status| status.as_u16());
        assert_eq!(status, expect, "{path} {headers:?}");
    }
}

#[tokio::test]
async fn malformed_options_and_sessions_above_the_limit_are_refused_before_the_upgrade() {
    let config = Config {
        sessions: 1,
        ..Config::default()
    };
    let server = Running::start(Kernel::new(), config, Vec::new()).await;
    let bad = Socket::open(&server, "/evergreen?evergreen-timeout-ms=0", &[]).await;
    assert_eq!(bad.err().unwrap().as_u16(), 400);
    let one = Socket::open(&server, "/evergreen", &[]).await.unwrap();
    let other = Socket::open(&server, "/evergreen", &[]).await;
    assert_eq!(other.err().unwrap().as_u16(), 503);
    one.close().await;
    // The session is released when its task has seen the end.
    while Socket::open(&server, "/evergreen", &[]).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn ev_705_messages_may_have_any_number_of_frames() {
    let server = Running::with_test_functions().await;
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    let mut all = action("echo", &[("text", "p")], &[("response", "r")]);
    all.node_fragments = vec![leaf("p", 0, 65_536)];
    all.actions
        .push(action("FINISH", &[], &[]).actions.remove(0));
    let bytes = all.encode_to_vec();
    socket.send_in_pieces(&bytes, 16).await;
    let (reply, close) = socket.rest().await;
    assert_eq!((reply.len(), close), (1, Some((1000, String::new()))));
    // One byte each, with empty frames and a ping between.
    let mut socket = Socket::open(&server, "/", &[]).await.unwrap();
    all.node_fragments = vec![leaf("p", 0, 100)];
    let bytes = all.encode_to_vec();
    for (index, byte) in bytes.iter().enumerate() {
        socket
            .raw(&frame(if index == 0 { 0x02 } else { 0x00 }, &[*byte]))
            .await;
        socket.raw(&frame(0x00, b"")).await;
    }
    socket.raw(&frame(0x89, b"there?")).await;
    socket.raw(&frame(0x80, b"")).await;
    let (reply, close) = socket.rest().await;
    assert_eq!((reply.len(), close), (1, Some((1000, String::new()))));
}

#[tokio::test]
async fn ev_705_messages_have_a_limit_and_compression_is_declined() {
    let limits = SessionLimits {
        max_message_bytes: 1000,
        ..SessionLimits::default()
    };
    let server = Running::limited(limits).await;
    let message = |len: usize| {
        let overhead = fragments(vec![leaf("p", 0, 900)]).encoded_len() - 900;
        fragments(vec![leaf("p", 0, len - overhead)]).encode_to_vec()
    };
    let deflate = [("sec-websocket-extensions", "permessage-deflate")];
    for (len, expect) in [
        (1000, (1000, "")),
        (1001, (1009, "RESOURCE_EXHAUSTED: MESSAGE_TOO_LARGE")),
    ] {
        let mut socket = Socket::open(&server, "/evergreen", &deflate).await.unwrap();
        assert!(!socket.headers.contains_key("sec-websocket-extensions"));
        assert_eq!(message(len).len(), len);
        socket
            .send(action("echo", &[("text", "q")], &[("response", "r")]).encode_to_vec())
            .await;
        socket.send(message(len)).await;
        if len == 1000 {
            let mut last = action("FINISH", &[], &[]);
            last.node_fragments = vec![leaf("q", 0, 1)];
            socket.send(last.encode_to_vec()).await;
        }
        let (reply, close) = socket.rest().await;
        assert_eq!(close, bytes(expect.0, expect.1));
        assert_eq!(reply.len(), 1, "the echo, or the last words");
    }
}

/// EV-611
#[tokio::test]
async fn ev_109_a_close_or_a_lost_connection_cancels_everything_at_once() {
    let server = Running::with_test_functions().await;
    let running = &server.shared.metrics.evergreen.actions_open;
    for gently in [true, false] {
        let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
        let slow = action("slow", &[], &[("response", "r")]);
        socket.send(slow.encode_to_vec()).await;
        until("it runs", || running.get() == 1).await;
        if gently {
            socket.close().await;
        } else {
            drop(socket);
        }
        until("it is cancelled", || running.get() == 0).await;
    }
    let open = &server.shared.metrics.evergreen.sessions_open;
    until("nothing is left", || open.get() == 0).await;
    assert_eq!(
        server
            .shared
            .metrics
            .cancelled
            .with_label_values(&["client"])
            .get(),
        2
    );
}

#[tokio::test]
async fn ev_960_a_drain_closes_sockets_with_going_away() {
    let server = Running::that_drains_at_once().await;
    let mut undecided = Socket::open(&server, "/", &[]).await.unwrap();
    let mut idle = Socket::speaking(&server, "evergreen.v2.proto").await;
    let open = &server.shared.metrics.evergreen.sessions_open;
    until("the session is open", || open.get() == 1).await;
    let drain = server.shared.drain.clone();
    tokio::spawn(async move { drain.run().await });
    assert_eq!(
        undecided.rest().await.1,
        bytes(1001, "UNAVAILABLE: GOING_AWAY")
    );
    assert_eq!(idle.rest().await.1, bytes(1001, "UNAVAILABLE: GOING_AWAY"));
}

#[tokio::test]
async fn d_45_a_revoked_key_closes_sockets_without_a_message() {
    let config = Config::default();
    let server = Running::start(Kernel::new(), config, vec![key("anna", "one")]).await;
    let headers = [("authorization", "Bearer one")];
    let mut sockets = Vec::new();
    for path in ["/", "/evergreen"] {
        sockets.push(Socket::open(&server, path, &headers).await.unwrap());
    }
    server.shared.auth.replace(vec![key("ben", "two")]);
    for mut socket in sockets {
        let (_, closed) = socket.rest().await;
        assert_eq!(closed, bytes(1008, "UNAUTHENTICATED: REVOKED"));
    }
}
