//! Flow control by the client (LM-952).

use std::time::Duration;

use super::*;

fn agreed(window: u32) -> (Server, StreamKey) {
    let mut server = Server::agreed(r#"["window","cancel"]"#);
    let stream = server.open(&format!(
        r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":1,"window":{window}}}"#
    ));
    (server, stream)
}

fn ack(server: &mut Server, seq: i64) -> String {
    server.ask(&format!(
        r#"ACK {{"stream_id":1,"model":"tiny","seq":{seq}}}"#
    ))
}

fn pieces(stream: StreamKey, tokens: std::ops::Range<u32>) -> Vec<(StreamKey, StreamPiece)> {
    tokens.map(|token| (stream, piece(token))).collect()
}

#[test]
fn lm_952_unacknowledged_items_are_limited_by_the_window() {
    let (mut server, stream) = agreed(2);
    let other = server.open(r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":2}"#);
    assert_eq!(server.step(pieces(stream, 0..1)).len(), 1);
    assert_eq!(server.outputs(), Vec::<String>::new());
    // A step may have more items than the window allows; the rest waits.
    let reply = server.step(pieces(stream, 1..4)).concat();
    assert!(
        reply.contains(r#""token":1,"#) && !reply.contains(r#""token":2,"#),
        "{reply}"
    );
    assert_eq!(server.outputs(), ["park 0"]);
    assert_eq!(
        server.step(pieces(other, 9..10)).len(),
        1,
        "it alone stands still"
    );
    // Stale, impossible and malformed acknowledgements change nothing and get no answer.
    for seq in [-1, 2, 9_000] {
        assert_eq!(ack(&mut server, seq), "");
    }
    assert_eq!(
        server.ask(r#"ACK {"stream_id":7,"model":"tiny","seq":1}"#),
        ""
    );
    let reply = ack(&mut server, 0);
    assert!(
        reply.contains(r#""token":2,"#) && !reply.contains("seq"),
        "{reply}"
    );
    assert_eq!(ack(&mut server, 0), "");
    let reply = ack(&mut server, 2);
    assert!(reply.contains(r#""token":3,"#), "{reply}");
    assert_eq!(server.outputs(), ["unpark 0"]);
}

#[test]
fn lm_952_the_end_waits_for_the_window_and_keeps_the_id_in_use() {
    let (mut server, stream) = agreed(1);
    let end = StreamPiece::Item(item(8, -0.5, Some(StreamFinish::Stop)));
    let mut both = pieces(stream, 7..8);
    both.push((stream, end));
    assert!(!server.step(both).concat().contains("stop"));
    assert_eq!(server.session.live(), 0);
    let again = r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1}"#;
    assert!(server.ask(again).contains("duplicate_stream"));
    assert!(ack(&mut server, 0).contains(r#""finish_reason":"stop""#));
    server.open(again);
    // No timer waits for the last acknowledgement or for the expiry of the first stream.
    assert_eq!(server.session.wake_at(), None);
}

#[test]
fn lm_952_a_client_that_acknowledges_nothing_loses_only_that_stream() {
    for ended in [false, true] {
        let (mut server, stream) = agreed(1);
        server.step(pieces(stream, 0..1));
        if ended {
            let end = StreamPiece::Item(item(8, -0.5, Some(StreamFinish::Stop)));
            server.step(vec![(stream, end)]);
        }
        let at = server.session.wake_at().unwrap();
        assert_eq!(
            at,
            Time::ZERO + Duration::from_secs(if ended { 30 } else { 60 })
        );
        for seconds in [30, 59, 60] {
            server.now = Time::ZERO + Duration::from_secs(seconds);
            server.session.tick(server.now);
            assert_eq!(server.session.has_message(), seconds == 60);
        }
        let reply = server.received().concat();
        assert!(
            reply.contains(r#""code":"stalled","retryable":false"#),
            "{reply}"
        );
        assert!(!reply.contains("stop") && server.session.live() == 0);
    }
}

#[test]
fn lm_952_a_window_has_a_range_and_early_ends_do_not_wait() {
    for (window, accepted) in [
        ("0", false),
        ("1", true),
        ("65536", true),
        ("65537", false),
        ("\"x\"", false),
    ] {
        let mut server = Server::agreed(r#"["window"]"#);
        let reply = server.ask(&format!(
            r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":1,"window":{window}}}"#
        ));
        assert_eq!(reply.is_empty(), accepted, "{window}: {reply}");
    }
    let (mut server, stream) = agreed(1);
    server.step(pieces(stream, 0..2));
    let reply = server.ask(r#"CANCEL {"model":"tiny","stream_id":2,"streams":[1]}"#);
    assert!(
        reply.contains(r#"{"stream_id":1,"finish_reason":"cancelled"}"#),
        "{reply}"
    );
    // A close by the server does not wait for acknowledgements.
    let (mut server, stream) = agreed(1);
    server.step(pieces(stream, 0..2));
    server.session.close(LmtpClose::SHUTDOWN, server.now);
    let reply = server.received().concat();
    assert!(reply.contains(r#""code":"draining""#), "{reply}");
}

/// LM-510: a stream whose end was not sent is still open to its client, so it still counts.
#[test]
fn lm_952_ended_streams_that_wait_for_the_window_count_as_streams() {
    let mut server = Server::limited(ConnectionLimits {
        max_streams: 2,
        ..ConnectionLimits::default()
    });
    server.ask(
        r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":["window"]}}}"#,
    );
    let generate = |id: u32| {
        format!(
            r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":{id},"window":1,"max_tokens":2}}"#
        )
    };
    for id in 1..=2 {
        let stream = server.open(&generate(id));
        server.step(pieces(stream, 0..2));
    }
    assert_eq!(server.session.live(), 0);
    assert!(server.ask(&generate(3)).contains("server_overloaded"));
    assert!(ack(&mut server, 0).contains(r#""finish_reason":"length""#));
    server.open(&generate(3));
}
