//! Messages of another dialect or protocol than the one of the connection.

use http::{Request, StatusCode};
use prost::Message;
use sapwood_kernel::pool::{BlockingPool, LARGE_BYTES};
use sapwood_tests::raw::{action, call, fragments, head, leaf, open, outcome, request};
use sapwood_tests::socket::{Socket, SocketReply, frame};
use sapwood_tests::{Running, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{honest, unharmed};

const PROTOBUF: &str = "evergreen.v2.proto";
const JSON: &str = "evergreen.v2.json";
const MSGPACK: &str = "actionengine.msgpack";

/// A valid message of each dialect.
fn message(dialect: &str) -> Vec<u8> {
    match dialect {
        PROTOBUF => action("LIST_ACTIONS", &[], &[("actions", "a")]).encode_to_vec(),
        JSON => br#"{"actions":[{"name":"LIST_ACTIONS","outputs":[{"name":"actions","id":"a"}]}]}"#
            .to_vec(),
        // An action `A1` without ports: `__ping__`.
        _ => [
            &[0xc4, 20, 0x90, 0x91, 0xc4, 15][..],
            b"\xa2A1\xa8__ping__\x90\x90\0\0",
        ]
        .concat(),
    }
}

async fn send(socket: &mut Socket, bytes: &[u8], is_text: bool) {
    socket
        .raw(&frame(if is_text { 0x81 } else { 0x82 }, bytes))
        .await;
}

/// EV-720, EV-731, EV-903
#[tokio::test]
async fn ev_701_a_message_of_another_dialect_is_refused_in_the_dialect_of_the_socket() {
    let server = Running::with_test_functions().await;
    for (dialect, sent, is_text, code) in [
        (PROTOBUF, JSON, true, 1003),
        (PROTOBUF, JSON, false, 1007),
        (PROTOBUF, MSGPACK, false, 1007),
        (PROTOBUF, PROTOBUF, true, 1003),
        (JSON, PROTOBUF, false, 1007),
        (JSON, MSGPACK, false, 1007),
        (MSGPACK, JSON, true, 1003),
        (MSGPACK, JSON, false, 1007),
        (MSGPACK, PROTOBUF, false, 1007),
    ] {
        // As the first message, and after a valid one.
        for before in [false, true] {
            let what = format!("{sent} as text: {is_text}, on {dialect}, after one: {before}");
            let mut socket = Socket::speaking(&server, dialect).await;
            if before {
                send(&mut socket, &message(dialect), dialect == JSON).await;
                assert!(
                    !matches!(socket.received().await, SocketReply::Close(_)),
                    "{what}"
                );
            }
            send(&mut socket, &message(sent), is_text).await;
            let (reply, close) = socket.rest().await;
            let last = reply
                .last()
                .unwrap_or_else(|| panic!("a last message: {what}"));
            assert_eq!(
                matches!(last, SocketReply::Text(_)),
                dialect == JSON,
                "{what}"
            );
            let reason = "INVALID_ARGUMENT: BAD_MESSAGE".to_owned();
            assert_eq!(close, Some((code, reason)), "{what}");
        }
    }
    unharmed(&server).await;
}

/// RFC 6455: frames that a client must not send.
#[tokio::test]
async fn ev_705_invalid_websocket_frames_close_the_connection() {
    let server = Running::with_test_functions().await;
    let list = message(PROTOBUF);
    let unmasked = [&[0x82, u8::try_from(list.len()).unwrap()], &list[..]].concat();
    for (what, bytes, expect) in [
        ("not masked", unmasked, 1002),
        ("reserved bits", frame(0xf2, &list), 1002),
        ("a reserved kind", frame(0x83, &list), 1002),
        ("more of nothing", frame(0x80, &list), 1002),
        ("a ping in pieces", frame(0x09, b"x"), 1002),
        ("HTTP", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), 1002),
        ("no UTF-8", frame(0x81, b"\xff\xfe"), 1007),
    ] {
        // Before the dialect is known, and in each dialect.
        for dialect in [None, Some(PROTOBUF), Some(JSON), Some(MSGPACK)] {
            let mut socket = match dialect {
                None => Socket::open(&server, "/evergreen", &[]).await.unwrap(),
                Some(dialect) => {
                    let mut socket = Socket::speaking(&server, dialect).await;
                    send(&mut socket, &message(dialect), dialect == JSON).await;
                    socket
                }
            };
            socket.raw(&bytes).await;
            let (_, close) = socket.rest().await;
            let code = close.map(|(code, _)| code);
            assert_eq!(code, Some(expect), "{what} in {dialect:?}");
        }
        honest(&server).await;
    }
    unharmed(&server).await;
}

/// Bytes that are not HTTP, and HTTP where another protocol is expected.
#[tokio::test]
async fn oa_911_bytes_of_other_protocols_get_a_close_or_a_400() {
    let server = Running::with_test_functions().await;
    let hello = [&[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3][..], &[0x5a; 194]].concat();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for (what, bytes) in [
        ("TLS", hello),
        (
            "mail",
            b"EHLO mail.example\r\nMAIL FROM:<a@b.example>\r\n\r\n".to_vec(),
        ),
        (
            "a frame without a handshake",
            frame(0x82, &message(PROTOBUF)),
        ),
        ("nulls", vec![0; 4_096]),
        (
            "noise behind a preface",
            [preface, &[0xff; 4_096][..]].concat(),
        ),
        (
            "HTTP/1 behind a preface",
            [&preface[..], b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"].concat(),
        ),
    ] {
        let mut socket = TcpStream::connect(server.address).await.unwrap();
        socket.write_all(&bytes).await.unwrap();
        let mut answer = Vec::new();
        let ended = socket.read_to_end(&mut answer);
        let ended = tokio::time::timeout(std::time::Duration::from_secs(8), ended).await;
        assert!(ended.is_ok(), "{what}: not before the limit of a handshake");
        let received = String::from_utf8_lossy(&answer);
        let http2 = bytes.starts_with(b"PRI");
        assert!(
            answer.is_empty() || http2 || received.starts_with("HTTP/1.1 400 "),
            "{what}: {received}"
        );
        honest(&server).await;
    }
    unharmed(&server).await;
}

/// EV-703: bytes that are not gRPC, on the path of gRPC.
#[tokio::test]
async fn ev_703_requests_that_are_not_grpc_get_an_error() {
    let server = Running::with_test_functions().await;
    let framed = |bytes: &[u8]| {
        let length = u32::try_from(bytes.len()).unwrap().to_be_bytes();
        [&[0][..], &length, bytes].concat()
    };
    let bad = (3, "BAD_MESSAGE".to_owned());
    for (what, body) in [
        ("JSON", message(JSON)),
        ("protobuf without a prefix", message(PROTOBUF)),
        ("JSON with a prefix", framed(&message(JSON))),
        ("msgpack with a prefix", framed(&message(MSGPACK))),
        ("HTTP", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()),
    ] {
        for more in [false, true] {
            let answer = request(&server, head(), body.clone(), more).await;
            assert_eq!(outcome(answer).await, bad, "{what}, {more}");
        }
    }
    let json = Request::post("/").header("content-type", "application/json");
    for (head, body, status) in [
        (json, message(JSON), StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (
            Request::get("/"),
            Vec::new(),
            StatusCode::METHOD_NOT_ALLOWED,
        ),
    ] {
        let (answer, _) = request(&server, head, body, false).await;
        assert_eq!(answer.status(), status);
    }
    unharmed(&server).await;
}

/// D-54: decoding a long message on a thread that serves connections would delay the others on it.
#[tokio::test]
async fn d_54_long_messages_are_decoded_on_slow_work_threads_in_every_dialect() {
    let server = Running::with_test_functions().await;
    let separate = |done: u64, what: &'static str| async move {
        let stats = || BlockingPool::global().stats();
        until(what, || stats().done > done).await;
        stats().done
    };
    let of = |bytes| fragments(vec![leaf("a", 0, bytes)]);
    let (retained, messages) = open([of(LARGE_BYTES)]);
    let answers = call(&server, messages, &[]).await.unwrap();
    let mut done = separate(0, "gRPC").await;
    drop((retained, answers));
    let numbers = format!(r#"{{"what":[{}0]}}"#, "0,".repeat(LARGE_BYTES));
    let nodes = of(LARGE_BYTES).encode_to_vec();
    let strange = [b"\xc6\x00\x00\x80\x00", &[0x80; 0x8000][..]].concat();
    for (dialect, long) in [
        (JSON, numbers.into_bytes()),
        (PROTOBUF, nodes),
        (MSGPACK, strange),
    ] {
        let mut socket = Socket::speaking(&server, dialect).await;
        match dialect {
            JSON => socket.send_text(std::str::from_utf8(&long).unwrap()).await,
            _ => socket.send(long.clone()).await,
        }
        done = separate(done, dialect).await;
        drop(socket);
        // The message that selects the dialect is decoded there as well.
        let mut socket = Socket::open(&server, "/evergreen", &[]).await.unwrap();
        match dialect {
            JSON => socket.send_text(std::str::from_utf8(&long).unwrap()).await,
            _ => socket.send(long).await,
        }
        done = separate(done, dialect).await;
        drop(socket);
    }
    // Short messages are decoded on the connection's own task.
    let mut socket = Socket::speaking(&server, PROTOBUF).await;
    socket.send(of(LARGE_BYTES / 2).encode_to_vec()).await;
    socket
        .send(action("no such function", &[], &[]).encode_to_vec())
        .await;
    socket.rest().await;
    assert_eq!(BlockingPool::global().stats().done, done);
    unharmed(&server).await;
}
