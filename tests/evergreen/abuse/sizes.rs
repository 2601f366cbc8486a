//! Messages that are too large, and lengths that announce more than arrives.

use futures::stream;
use prost::Message;
use sapwood_proto::evergreen::wire::{Chunk, ChunkMetadata, NodeFragment, SessionMessage};
use sapwood_tests::raw::{
    action, call, code_and_reason, end, fragments, head, leaf, outcome, request, tree,
};
use sapwood_tests::socket::{Socket, SocketReply, frame};
use sapwood_tests::{Running, until};

use super::unharmed;

const MIB: usize = 1 << 20;

fn typed(id: &str, mimetype: String, role: String) -> NodeFragment {
    NodeFragment {
        id: id.into(),
        chunk_fragment: Some(Chunk {
            metadata: Some(ChunkMetadata {
                mimetype,
                role,
                ..ChunkMetadata::default()
            }),
            payload: None,
        }),
        ..NodeFragment::default()
    }
}

/// EV-201, EV-406, EV-802
#[tokio::test]
async fn ev_201_ids_and_names_above_their_limit_are_refused_and_not_retained() {
    let server = Running::with_test_functions().await;
    let long = |bytes: usize| "x".repeat(bytes);
    for bytes in [257, MIB, 12 * MIB] {
        let name = long(bytes);
        for (what, message, reason) in [
            ("an id", fragments(vec![leaf(&name, 0, 1)]), "BAD_ID"),
            ("a child", fragments(vec![tree("a", &[&name])]), "BAD_ID"),
            (
                "an output",
                action("echo", &[], &[("response", &name)]),
                "BAD_ID",
            ),
            (
                "a parameter",
                action("echo", &[(&name, "p")], &[]),
                "BAD_NAME",
            ),
            ("an action", action(&name, &[], &[]), "BAD_NAME"),
            (
                "a mimetype",
                fragments(vec![typed("p", name.clone(), String::new())]),
                "BAD_NAME",
            ),
            (
                "a role",
                fragments(vec![typed("p", "text/plain".into(), name.clone())]),
                "BAD_NAME",
            ),
        ] {
            let ended = end(call(&server, stream::iter([message]), &[]).await.unwrap()).await;
            let text = ended.as_ref().map_or(0, |status| status.message.len());
            assert!(text < 1_000, "{what}: a message of {text} bytes");
            assert_eq!(
                code_and_reason(ended),
                (3, reason.into()),
                "{what} of {bytes} bytes"
            );
        }
    }
    unharmed(&server).await;
}

/// EV-703: 4 GiB, one byte more than allowed, and false lengths within a message.
#[tokio::test]
async fn ev_703_too_large_lengths_over_grpc_are_refused_before_the_bytes_arrive() {
    let server = Running::with_test_functions().await;
    let prefixed = |length: usize, bytes: &[u8]| {
        let length = u32::try_from(length).unwrap().to_be_bytes();
        [&[0][..], &length, bytes].concat()
    };
    let within = |bytes: &[u8]| prefixed(bytes.len(), bytes);
    // A fragment and an id whose length says 1 GiB: field, wire type 2, length.
    let gigabyte = [0x80, 0x80, 0x80, 0x80, 0x04];
    let id = [&[0x0a][..], &gigabyte, b"x"].concat();
    let inner = [&[0x0a, 7, 0x0a][..], &gigabyte, b"x"].concat();
    for (what, body, expect) in [
        (
            "4 GiB",
            prefixed(u32::MAX as usize, b"\x0a"),
            (8, "MESSAGE_TOO_LARGE"),
        ),
        (
            "past the limit",
            prefixed(16 * MIB + 1, b"\x0a"),
            (8, "MESSAGE_TOO_LARGE"),
        ),
        ("a fragment of 1 GiB", within(&id), (3, "BAD_MESSAGE")),
        ("an id of 1 GiB", within(&inner), (3, "BAD_MESSAGE")),
    ] {
        // Nothing more arrives and the call stays open: the response must not wait for the body.
        let answer = request(&server, head(), body, true).await;
        assert_eq!(outcome(answer).await, (expect.0, expect.1.into()), "{what}");
    }
    unharmed(&server).await;
}

/// A gzip stream of `mib` MiB of zeros, built by hand so that it stays small: one literal, then matches of length 258.
fn zeros(mib: usize) -> Vec<u8> {
    let mut bytes = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let (mut bit, mut retained) = (0, 0_u64);
    let mut put = |value: u64, count: u32| {
        retained |= value << bit;
        bit += count;
        while bit >= 8 {
            bytes.push((retained & 0xff) as u8);
            retained >>= 8;
            bit -= 8;
        }
    };
    // A final block with the fixed codes, and a literal 0 (00110000).
    put(0b011, 3);
    put(0b0000_1100, 8);
    // Length 258 is symbol 285 (11000101), distance 1 is symbol 0.
    for _ in 0..mib * MIB / 258 {
        put(0b1010_0011, 8);
        put(0, 5);
    }
    put(0, 7 + 8);
    bytes
}

/// EV-703
#[tokio::test]
async fn ev_703_a_gzip_bomb_is_decompressed_only_up_to_the_message_limit() {
    let server = Running::with_test_functions().await;
    let packed = zeros(1_024);
    assert!(packed.len() < 8 * MIB, "{}", packed.len());
    let length = u32::try_from(packed.len()).unwrap().to_be_bytes();
    let body = [&[1][..], &length, &packed].concat();
    let answer = request(&server, head().header("grpc-encoding", "gzip"), body, true).await;
    assert_eq!(outcome(answer).await, (8, "MESSAGE_TOO_LARGE".into()));
    unharmed(&server).await;
}

/// The head of a frame with this payload length.
fn announced(first: u8, length: u64) -> Vec<u8> {
    let mut head = vec![first, 0xff];
    head.extend(length.to_be_bytes());
    head.extend([0; 4]);
    head
}

/// EV-705, EV-902
#[tokio::test]
async fn ev_705_too_large_frame_lengths_are_refused_before_the_bytes_arrive() {
    let server = Running::with_test_functions().await;
    let whole = u64::try_from(16 * MIB).unwrap();
    let half = frame(0x02, &vec![b'x'; 8 * MIB]);
    // A fragment counts together with those before it.
    let rest = announced(0x80, whole / 2 + 1);
    let two_halves = [half, rest].concat();
    for subprotocol in [
        "evergreen.v2.proto",
        "evergreen.v2.json",
        "actionengine.msgpack",
    ] {
        for (what, bytes) in [
            ("1 GiB", announced(0x82, 1 << 30)),
            ("all there is", announced(0x82, i64::MAX as u64)),
            ("past the limit", announced(0x82, whole + 1)),
            ("past it in pieces", two_halves.clone()),
        ] {
            let mut socket = Socket::speaking(&server, subprotocol).await;
            socket.raw(&bytes).await;
            let (reply, close) = socket.rest().await;
            let close = close.map(|(code, _)| code);
            assert_eq!(close, Some(1009), "{subprotocol}: {what}");
            assert!(!reply.is_empty(), "a last message");
        }
    }
    // A control frame may have at most 125 bytes.
    let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
    socket.raw(&frame(0x89, &[0; 126])).await;
    let (_, close) = socket.rest().await;
    assert_eq!(close.map(|(code, _)| code), Some(1002));
    unharmed(&server).await;
}

/// EV-731: lengths within a message that exceed its bytes, in each dialect.
#[tokio::test]
async fn ev_701_false_lengths_within_a_message_are_refused() {
    let server = Running::with_test_functions().await;
    let deep = "[".repeat(MIB);
    for (subprotocol, bytes, code) in [
        (
            "evergreen.v2.proto",
            vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f, 1],
            1007,
        ),
        // A bin, an array and a string of 4 GiB; the array has more children than a fragment may have.
        (
            "actionengine.msgpack",
            vec![0xc6, 0xff, 0xff, 0xff, 0xff, 0x90],
            1007,
        ),
        (
            "actionengine.msgpack",
            vec![0xc4, 6, 0xdd, 0xff, 0xff, 0xff, 0xff, 0x90],
            1011,
        ),
        (
            "actionengine.msgpack",
            vec![0xc4, 9, 0x91, 0xc4, 6, 0xdb, 0xff, 0xff, 0xff, 0xff, 0x78],
            1007,
        ),
        (
            "evergreen.v2.json",
            format!("{{\"actions\":{deep}").into_bytes(),
            1007,
        ),
        (
            "evergreen.v2.json",
            b"{\"nodeFragments\":[{\"seq\":1e999}]}".to_vec(),
            1007,
        ),
    ] {
        let mut socket = Socket::speaking(&server, subprotocol).await;
        match std::str::from_utf8(&bytes) {
            Ok(text) if subprotocol.ends_with("json") => socket.send_text(text).await,
            _ => socket.send(bytes.clone()).await,
        }
        let (reply, close) = socket.rest().await;
        let start = &bytes[..bytes.len().min(16)];
        assert_eq!(
            close.map(|(code, _)| code),
            Some(code),
            "{subprotocol} {start:x?}"
        );
        let last = match reply.last() {
            Some(SocketReply::Text(text)) => text.len(),
            Some(SocketReply::Binary(bytes)) => bytes.len(),
            _ => panic!("no last message: {reply:?}"),
        };
        assert!(last < 2_000, "{last}");
    }
    unharmed(&server).await;
}

/// EV-805: announced bytes within the limit are not allocated before they arrive.
#[tokio::test]
async fn ev_805_announced_bytes_are_not_allocated_before_they_arrive() {
    let server = Running::with_test_functions().await;
    let sessions = &server.shared.metrics.evergreen.sessions_open;
    let before = resident();
    let (mut sockets, mut calls) = (Vec::new(), Vec::new());
    for _ in 0..100 {
        let mut socket = Socket::speaking(&server, "evergreen.v2.proto").await;
        socket
            .raw(&announced(0x82, u64::try_from(16 * MIB).unwrap()))
            .await;
        socket.raw(b"\x0a").await;
        sockets.push(socket);
        let body = [&[0, 1, 0, 0, 0][..], b"\x0a"].concat();
        calls.push(request(&server, head(), body, true).await);
    }
    until("all are open", || sessions.get() == 200).await;
    super::honest(&server).await;
    let grown = resident().saturating_sub(before);
    assert!(grown < 128 << 20, "{} MiB", grown >> 20);
    drop((sockets, calls));
    unharmed(&server).await;
}

/// Peak resident memory of this process, in bytes; 0 without `/proc`.
pub(super) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// EV-804, EV-209: duplicate fragments.
#[tokio::test]
async fn ev_204_duplicate_fragments_are_retained_once() {
    let server = Running::with_test_functions().await;
    let numbers = &server.shared.metrics.evergreen;
    let again: Vec<SessionMessage> = (0..200)
        .map(|_| fragments(vec![leaf("p", 0, 1_000); 200]))
        .collect();
    let size = again[0].encoded_len();
    assert!(size > 200_000);
    let (code, reason) =
        code_and_reason(end(call(&server, stream::iter(again), &[]).await.unwrap()).await);
    assert_eq!((code, &*reason), (0, ""));
    let ignored = numbers.ignored.with_label_values(&["duplicate"]).get();
    assert_eq!(ignored, 200 * 200 - 1);
    unharmed(&server).await;
}
