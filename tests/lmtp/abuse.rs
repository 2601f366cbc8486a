//! Invalid messages, floods, and abandoned connections.

use sapwood_proto::lmtp::ConnectionLimits;
use sapwood_server::faces::lmtp;
use sapwood_tests::socket::{SocketReply, frame};
use sapwood_tests::{spawned, until};
use serde_json::json;

use super::{
    chatter, client, kernel, message, of_parrot, parrot, stream, tokens_and_end, with_config,
};

/// LM-201, LM-505
#[tokio::test]
async fn lm_202_a_flood_of_malformed_messages_ends_only_its_connection() {
    let server = of_parrot().await;
    let mut other = client(&server).await;
    let mut flooding = client(&server).await;
    for bad in [
        "",
        "GENERATE",
        "GENERATE\t{}",
        "GENERATE {",
        "GENERATE []",
        "{}",
    ] {
        flooding.send_text(bad).await;
        let (word, items) = message(&mut flooding).await;
        assert_eq!(
            (word.as_str(), &items[0]["code"]),
            ("MSG", &json!("malformed")),
            "{bad}"
        );
        assert_eq!(items[0]["stream_id"], json!(null));
        flooding.send_text("FOO {}").await;
        assert_eq!(
            message(&mut flooding).await.1[0]["code"],
            json!("unknown_command")
        );
    }
    for _ in 0..1000 {
        flooding.send_text("no json").await;
    }
    let (reply, close) = flooding.rest().await;
    assert_eq!((reply.len(), close.map(|(code, _)| code)), (16, Some(1008)));
    other
        .send_text(r#"GENERATE {"model":"parrot","prompt":[7],"stream_id":1}"#)
        .await;
    assert_eq!(tokens_and_end(&stream(&mut other, 1).await).1, "stop");
    let ignored = &server.shared.metrics.lmtp.ignored;
    assert_eq!(ignored.with_label_values(&["malformed"]).get(), 6 + 16);
}

#[tokio::test]
async fn lm_201_malformed_messages_can_be_configured_to_close_the_connection() {
    let config = lmtp::Config {
        close_on_malformed: true,
        ..lmtp::Config::default()
    };
    let server = with_config(kernel("parrot", spawned(parrot())), config).await;
    let mut socket = client(&server).await;
    socket.send_text("nothing").await;
    assert_eq!(socket.rest().await.1.map(|(code, _)| code), Some(1000));
}

/// LM-106, LM-505, LM-1201: open streams get an error item first.
#[tokio::test]
async fn lm_1201_too_large_and_invalid_frames_close_the_connection_after_an_error() {
    for (path, message, code, reason) in [
        (
            "/lmtp",
            frame(0x81, &[b'x'; 1025]),
            1009,
            "message_too_large",
        ),
        ("/lmtp", frame(0x81, b"X {\xff}"), 1007, "malformed"),
        ("/lmtp", frame(0xf1, b"X {}"), 1002, "malformed"),
        ("/", frame(0x81, &[b'x'; 1025]), 1009, "message_too_large"),
    ] {
        let config = lmtp::Config {
            limits: std::sync::Arc::new(ConnectionLimits {
                max_message_in: 1024,
                ..ConnectionLimits::default()
            }),
            ..lmtp::Config::default()
        };
        let (_owner, engine) = sapwood_tests::by_hand(parrot());
        let server = with_config(kernel("parrot", engine), config).await;
        let mut socket = sapwood_tests::socket::Socket::open(&server, path, &[])
            .await
            .unwrap();
        let fits = r#"GENERATE {"model":"parrot","prompt":[7],"stream_id":1}"#;
        socket.send_text(&format!("{fits:1024}")).await;
        socket.raw(&message).await;
        let (reply, close) = socket.rest().await;
        let Some(SocketReply::Text(last)) = reply.last() else {
            panic!("no last message: {reply:?}");
        };
        assert!(last.contains(&format!(r#""code":"{reason}""#)), "{last}");
        assert_eq!(close.map(|(code, _)| code), Some(code));
    }
}

/// LM-106, LM-207
#[tokio::test]
async fn lm_106_binary_messages_are_ignored_and_frames_are_joined() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    socket.send(&b"\x0a\x00"[..]).await;
    let text = r#"GENERATE {"model":"parrot","prompt":[7],"stream_id":1,"x":1,"y":2}"#;
    let pieces: Vec<&[u8]> = text.as_bytes().chunks(3).collect();
    for (index, piece) in pieces.iter().enumerate() {
        let kind = if index == 0 { 0x01 } else { 0x00 };
        let last = if index + 1 == pieces.len() {
            0x80
        } else {
            0x00
        };
        socket.raw(&frame(kind | last, piece)).await;
    }
    assert_eq!(tokens_and_end(&stream(&mut socket, 1).await).1, "stop");
    let numbers = &server.shared.metrics.lmtp;
    assert_eq!(numbers.ignored.with_label_values(&["binary"]).get(), 1);
    assert_eq!(numbers.unknown_parameters.get(), 2);
}

#[tokio::test]
async fn lm_601_a_thousand_streams_of_one_connection_end_once_each() {
    let engine = spawned(chatter());
    let server = with_config(kernel("m", engine.clone()), lmtp::Config::default()).await;
    let mut socket = client(&server).await;
    for id in 0..1000 {
        let text = format!(
            r#"GENERATE {{"model":"m","prompt":[{id}],"stream_id":{id},"max_tokens":{},"top_logprobs":0}}"#,
            1 + id % 20
        );
        socket.send_text(&text).await;
    }
    let (mut counts, mut ends) = (vec![0_usize; 1000], 0);
    while ends < 1000 {
        for item in message(&mut socket).await.1 {
            let id = usize::try_from(item["stream_id"].as_u64().unwrap()).unwrap();
            counts[id] += 1;
            assert!(counts[id] <= 1 + id % 20, "no item after the end");
            ends += usize::from(item["finish_reason"] == json!("length"));
        }
    }
    for (id, count) in counts.iter().enumerate() {
        assert_eq!(*count, 1 + id % 20);
    }
    let numbers = &server.shared.metrics.lmtp;
    assert_eq!(numbers.items.get(), counts.iter().sum::<usize>() as u64);
    assert!(
        numbers.messages.get() < numbers.items.get() / 2,
        "{}",
        numbers.messages.get()
    );
}

/// LM-610
#[tokio::test]
async fn lm_506_abandoned_streams_leave_no_state() {
    let engine = spawned(chatter());
    let server = with_config(kernel("m", engine.clone()), lmtp::Config::default()).await;
    for round in 0..50 {
        let mut socket = client(&server).await;
        for id in 0..8 {
            let text = format!(
                r#"GENERATE {{"model":"m","prompt":[{id}],"stream_id":{id},"max_tokens":4000}}"#
            );
            socket.send_text(&text).await;
        }
        if round % 2 == 0 {
            message(&mut socket).await;
        }
    }
    let numbers = &server.shared.metrics;
    let open = numbers.streams_open.with_label_values(&["lmtp"]);
    until("all connections are gone", || {
        numbers.connections_open.get() == 0
    })
    .await;
    assert_eq!((open.get(), numbers.lmtp.connections_open.get()), (0, 0));
    until("the engine is idle", || {
        let stats = engine.stats();
        stats.requests_running.get() + stats.requests_waiting.get() == 0
    })
    .await;
}
