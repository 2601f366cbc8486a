//! When messages are sent: steps, bounds, parking, and ends of connections.

use std::time::Duration;

use super::*;

fn generate(id: u32) -> String {
    format!(r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":{id},"max_tokens":9999}}"#)
}

fn ids(message: &str) -> Vec<&str> {
    let ids = message.split(r#""stream_id":"#).skip(1);
    ids.map(|rest| rest.split([',', '}']).next().unwrap())
        .collect()
}

#[test]
fn lm_601_one_step_is_one_message_in_order_of_admission() {
    let mut server = Server::new();
    let streams: Vec<_> = [30, 10, 20].map(|id| server.open(&generate(id))).into();
    let pieces = [(2, 1), (0, 2), (1, 3), (0, 4)];
    let pieces = pieces.map(|(at, token): (usize, u32)| (streams[at], piece(token)));
    let received = server.step(pieces.into());
    assert_eq!(received.len(), 1);
    assert_eq!(ids(&received[0]), ["30", "30", "10", "20"]);
    assert!(received[0].find(r#""token":2"#) < received[0].find(r#""token":4"#));
}

#[test]
fn lm_601_off_gives_one_item_per_message() {
    let mut server = Server::with(Config {
        coalesce: false,
        ..Config::default()
    });
    let stream = server.open(&generate(1));
    assert_eq!(
        server
            .step(vec![(stream, piece(1)), (stream, piece(2))])
            .len(),
        2
    );
}

/// LM-607: a message fills its limit, and exceeds it only with a single item.
#[test]
fn lm_1202_messages_are_split_between_items() {
    let mut whole = Server::new();
    let stream = whole.open(&generate(1));
    let two = whole.step(vec![(stream, piece(1)), (stream, piece(2))]);
    let size = two[0].len();
    for (max, messages) in [(size + 1, 1), (size, 2), (1, 2)] {
        let mut server = Server::limited(ConnectionLimits {
            max_frame_out: max,
            ..ConnectionLimits::default()
        });
        let stream = server.open(&generate(1));
        let received = server.step(vec![(stream, piece(1)), (stream, piece(2))]);
        assert_eq!(received.len(), messages, "{max}");
        assert_eq!(server.session.unsent_bytes(), 0);
        assert!(received.iter().all(|message| message.ends_with("}]")));
    }
}

/// LM-503: other streams of the step are not affected.
#[test]
fn lm_1202_an_item_above_the_hard_cap_ends_its_stream_with_an_error() {
    for features in [r#"["text"]"#, r#"["text","resume"]"#] {
        let mut server = Server::agreed(features);
        let open = |server: &mut Server, id: u32| {
            server.open(&format!(
                r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":{id},"text":true}}"#
            ))
        };
        let long = |stream: StreamKey, bytes: usize| {
            let text = "x".repeat(bytes).into();
            let item = TokenItem {
                text,
                ..item(7, -0.5, None)
            };
            (stream, StreamPiece::Item(item))
        };
        let (stream, other) = (open(&mut server, 1), open(&mut server, 2));
        // The first item of a stream has the prompt's length; the next ones are of equal size.
        server.step(vec![(stream, piece(1)), (other, piece(1))]);
        let rest = server.step(vec![long(stream, 0)]).concat().len();
        let most = 4_194_303 - "\n".len() - rest;
        let largest = server.step(vec![long(stream, most)]);
        assert_eq!(largest.concat().len(), 4_194_302);
        server.outputs();
        let received = server.step(vec![long(stream, most + 1), (other, piece(1))]);
        let received = received.concat();
        assert!(received.len() < 1_000, "{}", received.len());
        assert!(received.contains(r#"{"stream_id":1,"error":"#));
        assert!(received.contains(r#""code":"engine_error""#), "{received}");
        assert!(received.contains(r#"{"token":1,"stream_id":2,"#));
        assert_eq!(server.outputs(), ["cancel 0"]);
        assert_eq!(
            (server.session.live(), server.session.unsent_bytes()),
            (1, 0)
        );
    }
}

/// LM-406: a MSG is a message of its own, in order with the items around it.
#[test]
fn lm_607_steps_join_while_nothing_is_taken() {
    let mut server = Server::new();
    let stream = server.open(&generate(1));
    server.session.step(vec![(stream, piece(1))], server.now);
    server.session.step(vec![(stream, piece(2))], server.now);
    server.send(r#"FROB {"stream_id":9}"#);
    server.session.step(vec![(stream, piece(3))], server.now);
    let incoming = server.received();
    let all: Vec<_> = incoming.iter().map(|message| ids(message)).collect();
    assert_eq!(all, [vec!["1", "1"], vec!["9"], vec!["1"]]);
}

fn narrow() -> Server {
    let mut server = Server::limited(ConnectionLimits {
        outbox_bytes: 300,
        outbox_low_bytes: 200,
        max_frame_out: 100,
        ..ConnectionLimits::default()
    });
    server.open(&generate(1));
    server
}

fn fill(server: &mut Server) {
    let stream = server.started[0].stream;
    while server.session.unsent_bytes() <= 300 {
        assert!(server.session.wants_input());
        server.session.step(vec![(stream, piece(1))], server.now);
    }
    server.poll();
}

#[test]
fn lm_607_a_full_outbox_parks_the_streams_and_an_emptied_one_unparks_them() {
    let mut server = narrow();
    fill(&mut server);
    assert_eq!(server.outputs(), ["park"]);
    assert!(!server.session.wants_input());
    while server.session.unsent_bytes() >= 200 {
        server.poll();
        assert!(server.outputs().is_empty());
        server.session.next_message(server.now);
    }
    server.poll();
    assert_eq!(server.outputs(), ["unpark"]);
    assert!(server.session.wants_input());
}

#[test]
fn lm_607_a_client_that_reads_nothing_for_60_seconds_is_reset() {
    let mut server = narrow();
    server.now = Time::from_millis(5_000);
    fill(&mut server);
    let at = server.session.wake_at();
    assert_eq!(at, Some(Time::from_millis(65_000)));
    server.now = Time::from_millis(64_000);
    server.session.next_message(server.now);
    server.session.tick(Time::from_millis(65_000));
    server.poll();
    assert_eq!(server.outputs(), ["park"], "one message is progress");
    server.session.tick(Time::from_millis(124_000));
    server.poll();
    assert_eq!(server.outputs(), ["cancel 0", "reset"]);
    assert!(server.session.is_closed() && server.session.next_message(server.now).is_none());
}

/// Many small requests in one frame cannot fill the memory with answers (LM-607).
#[test]
fn lm_607_answers_wait_for_room_too() {
    let mut server = Server::limited(ConnectionLimits {
        outbox_bytes: 300,
        outbox_low_bytes: 200,
        ..ConnectionLimits::default()
    });
    let mut rest = server.send(&"A {}\n".repeat(50));
    let mut answers = 0;
    while let Some(text) = rest {
        assert!(server.session.unsent_bytes() < 500);
        assert_eq!(
            server.send(&text),
            Some(text.clone()),
            "nothing is taken while parked"
        );
        answers += server.received().len();
        rest = server.send(&text);
    }
    assert_eq!(answers + server.received().len(), 50);
}

#[test]
fn lm_402_the_server_sends_nothing_first() {
    let mut server = Server::new();
    assert!(server.received().is_empty());
    assert_eq!(server.session.wake_at(), None);
}

/// LM-1201: each cause, its error items and its close code.
#[test]
fn lm_505_every_stream_gets_its_error_before_a_close() {
    for (close, code, expected) in [
        (LmtpClose::SHUTDOWN, "draining", "close 1001"),
        (LmtpClose::BAD_TEXT, "malformed", "close 1007"),
        (LmtpClose::REVOKED, "insufficient_scope", "close 1008"),
        (LmtpClose::TOO_LARGE, "message_too_large", "close 1009"),
        (LmtpClose::INTERNAL, "engine_error", "close 1011"),
    ] {
        let mut server = Server::new();
        let stream = server.open(&generate(1));
        server.open(&generate(2));
        server.session.step(vec![(stream, piece(1))], server.now);
        server.session.close(close, server.now);
        server.poll();
        assert_eq!(
            server.outputs(),
            ["cancel 0", "cancel 1"],
            "not before it is taken"
        );
        let incoming = server.received();
        assert_eq!(ids(&incoming[0]), ["1", "1", "2"]);
        assert_eq!(
            incoming[0].matches(&format!(r#""code":"{code}""#)).count(),
            2
        );
        assert_eq!(server.outputs(), [expected]);
        server.send("FROB {}");
        server.session.step(vec![(stream, piece(1))], server.now);
        assert!(server.received().is_empty(), "nothing follows");
    }
}

#[test]
fn lm_505_the_last_messages_have_two_seconds_to_drain() {
    let mut server = Server::new();
    server.open(&generate(1));
    server.session.close(LmtpClose::SHUTDOWN, server.now);
    assert_eq!(server.session.wake_at(), Some(Time::from_millis(2_000)));
    server.session.tick(Time::from_millis(1_999));
    assert!(!server.session.is_closed());
    server.session.tick(Time::from_millis(2_000));
    server.poll();
    assert_eq!(server.outputs(), ["cancel 0", "close 1001"]);
    assert_eq!(server.session.unsent_bytes(), 0);
}

#[test]
fn lm_505_an_idle_connection_is_closed_at_once() {
    let mut server = Server::new();
    server.session.close(LmtpClose::SHUTDOWN, server.now);
    server.poll();
    assert_eq!(server.outputs(), ["close 1001"]);
}

#[test]
fn lm_506_a_hang_up_cancels_all_streams() {
    let mut server = narrow();
    fill(&mut server);
    server.outputs();
    server.session.hang_up();
    server.poll();
    assert_eq!(server.outputs(), ["cancel 0"]);
    assert_eq!(
        (server.session.live(), server.session.unsent_bytes()),
        (0, 0)
    );
    assert_eq!(server.session.wake_at(), None);
}

/// A half-close is not a hang-up.
#[test]
fn lm_110_streams_finish_after_the_last_line() {
    let mut server = Server::lines();
    let stream = server.open(&generate(1));
    server.session.end_of_input();
    server.poll();
    assert!(server.outputs().is_empty());
    let received = server.step(vec![(stream, piece(1))]);
    assert!(received[0].ends_with("]\n"));
    let end = StreamPiece::Item(item(1, -0.5, Some(StreamFinish::Stop)));
    assert_eq!(server.step(vec![(stream, end)]).len(), 1);
    assert_eq!(server.outputs(), ["close 1000"]);
}

#[test]
fn lm_509_a_draining_server_takes_no_new_streams() {
    let mut server = Server::new();
    let stream = server.open(&generate(1));
    server.session.drain();
    let answer = server.ask(&generate(2));
    assert!(answer.contains(r#""code":"draining","retryable":true"#));
    assert!(
        server
            .ask(r#"MODEL_INFO {"stream_id":2,"model":"tiny"}"#)
            .contains("model_info")
    );
    assert_eq!(
        server.step(vec![(stream, piece(1))]).len(),
        1,
        "what runs goes on"
    );
    server.session.close(LmtpClose::SHUTDOWN, server.now);
    assert!(server.received()[0].contains(r#""code":"draining""#));
    assert_eq!(server.outputs(), ["cancel 0", "close 1001"]);
}

/// LM-1201: over the limit a frame ends the connection, a line is skipped.
#[test]
fn lm_112_an_unreadable_line_is_answered_and_an_unreadable_frame_closes() {
    let mut lines = Server::lines();
    lines.open(&generate(1));
    lines
        .session
        .handle_unreadable(Unreadable::TooLarge, lines.now);
    lines
        .session
        .handle_unreadable(Unreadable::BadText, lines.now);
    let incoming = lines.received();
    assert!(incoming[0].starts_with(r#"MSG [{"stream_id":null,"error":"a line has more than 16777216 bytes","code":"message_too_large"}]"#));
    assert!(incoming[1].contains(r#""code":"malformed""#));
    assert!(lines.outputs().is_empty() && lines.session.live() == 1);

    for (what, close) in [
        (Unreadable::TooLarge, "close 1009"),
        (Unreadable::BadText, "close 1007"),
    ] {
        let mut frames = Server::new();
        frames.open(&generate(1));
        frames.session.handle_unreadable(what, frames.now);
        assert_eq!(ids(&frames.received()[0]), ["1"]);
        assert_eq!(frames.outputs(), ["cancel 0", close]);
    }
}

#[test]
fn lm_610_ended_streams_leave_no_state() {
    let mut server = Server::new();
    for _ in 0..10_000 {
        let stream = server.open(&generate(1));
        let end = StreamPiece::Item(item(1, -0.5, Some(StreamFinish::Stop)));
        server.step(vec![(stream, end)]);
        server.started.clear();
    }
    assert_eq!(
        (server.session.live(), server.session.unsent_bytes()),
        (0, 0)
    );
    assert_eq!(server.session.stats().items_out, 10_000);
    let rest = Duration::from_secs(3_600);
    server.session.tick(Time::ZERO + rest);
    assert!(
        !server.session.is_closed(),
        "an idle connection lives for ever"
    );
}

#[test]
fn lm_114_an_item_may_be_a_message_of_its_own_and_no_list() {
    let mut server = Server::with(Config {
        bare: true,
        ..Config::default()
    });
    let stream = server.open(r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1}"#);
    let reply = server.step(vec![(stream, piece(7)), (stream, piece(8))]);
    assert_eq!(reply.len(), 2);
    assert!(
        reply[0].starts_with(r#"TOKEN {"token":7,"#) && reply[0].ends_with('}'),
        "{reply:?}"
    );
    assert_eq!(
        server.ask("X {}"),
        r#"MSG {"stream_id":null,"error":"Unknown command: X","code":"unknown_command"}"#
    );
}
