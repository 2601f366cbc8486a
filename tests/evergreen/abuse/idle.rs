//! Connections that are opened and left idle, and those that send too slowly.
//!
//! The clock is virtual wherever a test would have to wait.

use std::time::Duration;

use futures::{FutureExt, stream};
use http::StatusCode;
use prost::Message;
use sapwood_proto::evergreen::wire::SessionMessage;
use sapwood_tests::raw::{action, call, code_and_reason, end, head, open, outcome, request};
use sapwood_tests::socket::{Socket, frame};
use sapwood_tests::{Running, in_time, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{honest, unharmed};

async fn connected(server: &Running, bytes: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    socket.write_all(bytes).await.unwrap();
    socket
}

const MINUTE: Duration = Duration::from_secs(60);

/// What is sent on a connection before it goes idle, and after how many seconds it is dropped.
const BEGINNINGS: [(&str, &[u8], u64); 8] = [
    ("nothing", b"", 10),
    ("a first byte", b"G", 10),
    // May be one of a preface, to which the timeout of a head does not apply.
    ("the first byte of a preface", b"P", 75),
    ("half a head", b"GET / HTTP/1.1\r\nhost: x\r\nx-", 10),
    (
        "half an upgrade",
        b"GET /evergreen HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgr",
        10,
    ),
    ("half a preface", b"PRI * HT", 75),
    ("a preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 75),
    // HEADERS of stream 1, without END_HEADERS.
    (
        "half the headers of a call",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0\x01\x01\0\0\0\0\x01\x83",
        75,
    ),
];

/// OA-911, D-31
#[tokio::test]
async fn ev_705_connections_with_an_incomplete_start_are_dropped_and_delay_nobody() {
    let server = Running::with_test_functions().await;
    let open = &server.shared.metrics.connections_open;
    for (what, bytes, seconds) in BEGINNINGS {
        let mut left = Vec::new();
        for _ in 0..20 {
            left.push(connected(&server, bytes).await);
        }
        until("they are open", || open.get() == 20).await;
        honest(&server).await;
        until("the well-behaved clients have left", || open.get() == 20).await;
        let limit = Duration::from_secs(seconds);
        let took = in_time(what, limit + 5 * MINUTE, || open.get() == 0).await;
        let most = limit + Duration::from_secs(3);
        assert!((limit / 2..most).contains(&took), "{what}: {took:?}");
        for mut socket in left {
            let mut answer = Vec::new();
            let _ = socket.read_to_end(&mut answer).await;
            let refused = answer.starts_with(b"HTTP/1.1 4");
            let frames = bytes.starts_with(b"PRI");
            assert!(answer.is_empty() || refused || frames, "{what}: {answer:?}");
        }
    }
    unharmed(&server).await;
}

/// OA-911: one byte each second, so that no single pause is long.
#[tokio::test]
async fn ev_705_a_trickling_request_head_has_ten_seconds_in_all() {
    let server = Running::with_test_functions().await;
    let open = &server.shared.metrics.connections_open;
    let begun: &[u8] = b"GET /evergreen HTTP/1.1\r\nhost: x\r\nx: ";
    let socket = connected(&server, begun).await;
    until("it is open", || open.get() == 1).await;
    let took = in_time("an endless head", MINUTE, || {
        let _ = socket.try_write(b"a");
        open.get() == 0
    });
    let took = took.await;
    assert!(took <= Duration::from_secs(12), "{took:?}");
    drop(socket);
    unharmed(&server).await;
}

/// EV-111, D-32
#[tokio::test]
async fn ev_705_a_socket_that_answers_no_ping_is_dropped() {
    let server = Running::with_test_functions().await;
    let numbers = &server.shared.metrics;
    for (path, subprotocol, seconds) in [
        ("/evergreen", None, 60),
        ("/evergreen", Some("evergreen.v2.proto"), 60),
        ("/", None, 90),
    ] {
        let chosen = subprotocol.map(|name| ("sec-websocket-protocol", name));
        let headers: Vec<_> = chosen.into_iter().collect();
        let mut mute = Socket::open(&server, path, &headers).await.unwrap();
        // Half a message: an incomplete message does not count as one.
        mute.raw(&frame(0x02, b"\x0a")).await;
        honest(&server).await;
        until("it is alone", || numbers.connections_open.get() == 1).await;
        let what = "a socket that answers no ping";
        let took = in_time(what, 5 * MINUTE, || numbers.connections_open.get() == 0).await;
        let limit = Duration::from_secs(seconds);
        assert!((limit / 2..limit + MINUTE / 2).contains(&took), "{took:?}");
        drop(mute);
    }
    // A client that answers every ping has thirty minutes to send its first message.
    for headers in [
        vec![],
        vec![("sec-websocket-protocol", "evergreen.v2.json")],
    ] {
        let mut socket = Socket::open(&server, "/evergreen", &headers).await.unwrap();
        until("it is open", || numbers.connections_open.get() == 1).await;
        let mut received = Box::pin(async move { socket.rest().await });
        let mut close = None;
        let took = in_time("a socket that sends nothing", 40 * MINUTE, || {
            close = received.as_mut().now_or_never();
            close.is_some()
        });
        let took = took.await;
        assert!((29 * MINUTE..31 * MINUTE).contains(&took), "{took:?}");
        let (_, close) = close.unwrap();
        let output = "DEADLINE_EXCEEDED: IDLE_TIMEOUT".to_owned();
        assert_eq!(close, Some((1001, output)));
    }
    unharmed(&server).await;
}

/// EV-702: the response headers are sent at once, before any message.
#[tokio::test]
async fn ev_111_a_call_without_a_message_ends_after_thirty_minutes() {
    let server = Running::with_test_functions().await;
    let sessions = &server.shared.metrics.evergreen.sessions_open;
    let (_kept, nothing) = open(Vec::<SessionMessage>::new());
    let silent = call(&server, nothing, &[]).await.unwrap();
    // The first byte of a message of 16 MiB, and a message with an incomplete length prefix.
    let half = [0, 1, 0, 0, 0, 0x0a];
    let half = request(&server, head(), half.to_vec(), true).await;
    assert_eq!(half.0.status(), StatusCode::OK);
    let prefix = request(&server, head(), vec![0, 0], true).await;
    until("they are open", || sessions.get() == 3).await;
    honest(&server).await;
    until("the well-behaved clients have left", || sessions.get() == 3).await;
    let took = in_time("sessions without a message", 40 * MINUTE, || {
        sessions.get() == 0
    })
    .await;
    assert!((29 * MINUTE..31 * MINUTE).contains(&took), "{took:?}");
    let expect = (4, "IDLE_TIMEOUT".to_owned());
    assert_eq!(code_and_reason(end(silent).await), expect);
    assert_eq!(outcome(half).await, expect);
    assert_eq!(outcome(prefix).await, expect);
    unharmed(&server).await;
}

#[tokio::test]
async fn ev_111_a_socket_that_only_answers_pings_ends_after_thirty_minutes() {
    let server = Running::with_test_functions().await;
    let mut socket = Socket::open(&server, "/", &[]).await.unwrap();
    let silent = tokio::spawn(async move { socket.rest().await.1 });
    let ended = || silent.is_finished();
    let took = in_time("a socket without a message", 40 * MINUTE, ended).await;
    assert!((29 * MINUTE..31 * MINUTE).contains(&took), "{took:?}");
    let close = (1001, "DEADLINE_EXCEEDED: IDLE_TIMEOUT".to_owned());
    assert_eq!(silent.await.unwrap(), Some(close));
    unharmed(&server).await;
}

/// EV-104, EV-109
#[tokio::test]
async fn ev_109_abandoned_connections_and_sessions_leave_no_state() {
    let server = Running::with_test_functions().await;
    let numbers = &server.shared.metrics;
    let slow = action("slow", &[], &[("response", "r")]).encode_to_vec();
    let (mut raw, mut sockets, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..100 {
        for (_, bytes, _) in BEGINNINGS {
            raw.push(connected(&server, bytes).await);
        }
        sockets.push(Socket::open(&server, "/", &[]).await.unwrap());
        let mut working = Socket::open(&server, "/", &[]).await.unwrap();
        working.send(slow.clone()).await;
        // Half of another message.
        working.raw(&frame(0x02, &slow[..5])).await;
        sockets.push(working);
        let (retained, working) = open([action("slow", &[], &[("response", "r")])]);
        calls.push((call(&server, working, &[]).await.unwrap(), retained));
    }
    until("they are at work", || {
        numbers.evergreen.actions_open.get() == 200
    })
    .await;
    honest(&server).await;
    drop((raw, sockets, calls));
    unharmed(&server).await;
}

/// EV-941: an unknown token is refused however often it is sent, and leaves no state.
#[tokio::test]
async fn ev_941_every_unknown_token_gets_not_found() {
    let server = Running::with_test_functions().await;
    for count in 0..300 {
        let token = format!("{count:A>43}");
        let header = [("evergreen-session-token", &*token)];
        if count % 2 == 0 {
            let nothing = stream::iter(Vec::<SessionMessage>::new());
            let refused = call(&server, nothing, &header).await.unwrap_err();
            assert_eq!(refused.code(), tonic::Code::NotFound);
        } else {
            let mut socket = Socket::open(&server, "/", &header).await.unwrap();
            // The token is checked before the first message: no dialect is known, so there is only the close.
            let close = Some((1008, "NOT_FOUND: NO_SESSION".to_owned()));
            assert_eq!(socket.rest().await, (Vec::new(), close));
        }
    }
    unharmed(&server).await;
}
