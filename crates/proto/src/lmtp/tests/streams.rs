//! Accepted and refused messages and their answers, one by one.

use std::time::Duration;

use super::*;

const GENERATE: &str = r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1}"#;

fn generate(id: u32) -> String {
    format!(r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":{id}}}"#)
}

/// The code of the only error in an answer, and which type it came in.
fn code(answer: &str) -> (&str, &str) {
    let (word, payload) = answer.split_once(' ').expect(answer);
    let code = payload.split_once(r#""code":""#).expect(answer).1;
    (word, code.split('"').next().unwrap())
}

#[test]
fn lm_201_a_malformed_message_is_answered_and_nothing_else_happens() {
    for text in [
        "",
        " ",
        "GENERATE",
        "GENERATE\t{}",
        " GENERATE {}",
        "GENERATE {",
        "GENERATE []",
        "GENERATE 1",
        "GENERATE null",
        r#"GENERATE {"a":01}"#,
        r#"GENERATE {"a":"\x"}"#,
        r#"GENERATE {"a":1}x"#,
        r#"GENERATE {"a":1} {"a":1}"#,
        "GENERATE {\"a\":\"\n\"}",
        r#"GENERATE {"stream_id":3,}"#,
        r#"GENERATE {"a":nan}"#,
        r#"GENERATE {'a':1}"#,
    ] {
        let mut server = Server::new();
        let stream = server.open(GENERATE);
        let answer = server.ask(text);
        assert!(
            answer.starts_with(r#"MSG [{"stream_id":null,"error":"malformed message: "#),
            "{text}: {answer}"
        );
        assert!(answer.ends_with(r#","code":"malformed"}]"#), "{answer}");
        assert_eq!(server.outputs().len(), 0);
        assert_eq!(
            server.step(vec![(stream, piece(1))]).len(),
            1,
            "it lives on"
        );
        assert_eq!(server.session.stats().malformed, 1);
    }
}

/// LM-505, LM-1201
#[test]
fn lm_202_sixteen_malformed_messages_in_a_row_close_the_connection() {
    let mut server = Server::new();
    server.open(GENERATE);
    for _ in 0..15 {
        server.ask("x");
    }
    assert!(server.ask("FROB {}").contains("unknown_command"));
    for _ in 0..15 {
        server.ask("x");
    }
    assert!(!server.session.is_closed(), "fifteen are allowed");
    server.send("x");
    let incoming = server.received();
    assert_eq!(code(&incoming[0]), ("MSG", "malformed"));
    assert_eq!(code(&incoming[1]), ("TOKEN", "malformed"));
    assert_eq!(server.outputs(), ["cancel 0", "close 1008"]);
}

#[test]
fn lm_201_a_malformed_message_can_close_as_at_the_reference_server() {
    let mut server = Server::with(Config {
        close_on_malformed: true,
        ..Config::default()
    });
    server.open(GENERATE);
    server.send("x");
    let incoming = server.received();
    assert_eq!(code(&incoming[1]), ("TOKEN", "malformed"));
    assert_eq!(server.outputs(), ["cancel 0", "close 1000"]);
}

#[test]
fn lm_203_unknown_types_are_named_and_need_no_model() {
    let long = "A".repeat(65);
    for (text, id, word) in [
        (r#"FROB {"stream_id":5}"#, "5", "FROB"),
        ("FROB {}", "null", "FROB"),
        (r#"generate {"stream_id":"x"}"#, "\"x\"", "generate"),
        (r#"TOKEN {"stream_id":1}"#, "1", "TOKEN"),
        (r#"MSG {"stream_id":1}"#, "1", "MSG"),
        (r#"STATUS {"stream_id":1}"#, "1", "STATUS"),
        ("\"\\ {}", "null", "\\\"\\\\"),
        (&format!("{long} {{}}"), "null", &long[..64]),
    ] {
        let answer = Server::new().ask(text);
        let expected = format!(
            r#"MSG [{{"stream_id":{id},"error":"Unknown command: {word}","code":"unknown_command"}}]"#
        );
        assert_eq!(answer, expected);
    }
}

#[test]
fn lm_204_several_messages_in_a_frame_are_handled_in_order() {
    let mut server = Server::new();
    server.send("FROB {\n \"stream_id\":\n1 } \r\n\n A {\"stream_id\":2}\nx\nB {\"stream_id\":3}");
    let incoming = server.received();
    assert!(incoming[0].contains(r#""stream_id":1,"error":"Unknown command: FROB""#));
    assert!(incoming[1].contains(r#""stream_id":2,"error":"Unknown command: A""#));
    assert_eq!(code(&incoming[2]), ("MSG", "malformed"));
    assert_eq!(incoming.len(), 3, "what follows is discarded");
}

#[test]
fn lm_206_ids_are_echoed_byte_for_byte() {
    let long = format!("\"{}\"", "x".repeat(254));
    for id in [
        "1",
        "1.0",
        "-0",
        "1e3",
        "\"abc\"",
        "\"\"",
        "\"\\u00e9\"",
        "true",
        "[1, 2]",
        "{\"a\": {}}",
        "12345678901234567890123",
        "\"\u{e9}\"",
        &long,
    ] {
        let mut server = Server::new();
        let text = format!(r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id": {id} }}"#);
        let stream = server.open(&text);
        let received = server.step(vec![(stream, piece(1))]);
        assert!(
            received[0].contains(&format!(r#""stream_id":{id},"logprob""#)),
            "{received:?}"
        );
    }
    let mut server = Server::new();
    let first = server.open(r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1}"#);
    let other = server.open(r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1.0}"#);
    assert_ne!(first, other, "other bytes are another id");
}

/// LM-1201: an id at the limit is accepted, a longer one is refused.
#[test]
fn lm_206_an_invalid_id_is_answered_with_a_null_id() {
    let long = format!("\"{}\"", "x".repeat(255));
    for (id, expected) in [
        ("null", "missing_required_parameter"),
        (long.as_str(), "invalid_value"),
        ("NaN", "invalid_value"),
        ("[1,-Infinity]", "invalid_value"),
        ("[\n1]", "invalid_value"),
    ] {
        let text =
            format!(r#"SCORE {{"stream_id":{id},"model":"tiny","prompt":[1],"scored":[1]}}"#);
        let answer = Server::new().ask(&text);
        assert!(answer.starts_with(r#"MSG [{"stream_id":null,"#), "{answer}");
        assert_eq!(code(&answer), ("MSG", expected));
    }
    assert_eq!(
        Server::new().ask("MODEL_INFO {}"),
        r#"MSG [{"stream_id":null,"error":"'stream_id'","code":"missing_required_parameter"}]"#
    );
}

/// LM-303, LM-304, LM-306, LM-313, LM-510: each message breaks every later rule as well.
#[test]
fn lm_302_the_first_rule_broken_is_the_answer() {
    let mut server = Server::limited(ConnectionLimits {
        max_streams: 1,
        ..ConnectionLimits::default()
    });
    server.open(GENERATE);
    let long = vec!["1"; 4_096].join(",");
    for (members, word, expected) in [
        (
            r#""stream_id":1,"model":"nope""#.to_owned(),
            "MSG",
            "duplicate_stream",
        ),
        (
            r#""stream_id":2,"model":"nope","prompt":"x""#.to_owned(),
            "TOKEN",
            "model_not_found",
        ),
        (
            r#""stream_id":2,"model":5,"prompt":"x""#.to_owned(),
            "TOKEN",
            "invalid_type",
        ),
        (
            r#""stream_id":2,"prompt":"x""#.to_owned(),
            "TOKEN",
            "missing_required_parameter",
        ),
        (
            r#""stream_id":2,"model":"secret","prompt":"x""#.to_owned(),
            "TOKEN",
            "insufficient_scope",
        ),
        (
            r#""stream_id":2,"model":"tiny","prompt":"x","max_tokens":0"#.to_owned(),
            "TOKEN",
            "invalid_type",
        ),
        (
            format!(r#""stream_id":2,"model":"tiny","max_tokens":0,"prompt":[{long}]"#),
            "TOKEN",
            "invalid_value",
        ),
        (
            format!(r#""stream_id":2,"model":"tiny","prompt":[{long}]"#),
            "TOKEN",
            "context_length_exceeded",
        ),
        (
            r#""stream_id":2,"model":"tiny","prompt":[1]"#.to_owned(),
            "TOKEN",
            "server_overloaded",
        ),
    ] {
        let answer = server.ask(&format!("GENERATE {{{members}}}"));
        assert_eq!(code(&answer), (word, expected), "{answer}");
    }
}

/// LM-321
#[test]
fn lm_302_a_default_model_stands_for_a_missing_name() {
    let mut server = Server::with(Config {
        default_model: Some("tiny".into()),
        ..Config::default()
    });
    server.open(r#"GENERATE {"prompt":[1],"stream_id":1}"#);
    assert_eq!(&*server.started[0].name, "tiny");
    let name = "x".repeat(513);
    let answer = server.ask(&format!(
        r#"GENERATE {{"prompt":[1],"stream_id":2,"model":"{name}"}}"#
    ));
    assert_eq!(code(&answer), ("TOKEN", "model_not_found"));
    for name in ["Tiny", "tiny ", "tin"] {
        let answer = server.ask(&format!(r#"SCORE {{"stream_id":2,"model":"{name}"}}"#));
        assert_eq!(code(&answer).1, "model_not_found", "names are exact");
    }
}

/// LM-602: whatever the engine does.
#[test]
fn lm_405_a_stream_has_one_end_and_nothing_after_it() {
    let mut server = Server::new();
    let stream =
        server.open(r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1,"max_tokens":2}"#);
    let incoming = server.step(vec![
        (stream, piece(1)),
        (stream, piece(2)),
        (stream, piece(3)),
    ]);
    assert_eq!(
        incoming,
        [concat!(
            r#"TOKEN [{"token":1,"stream_id":1,"logprob":-0.5,"finish_reason":null,"top_logprobs":{"1":-0.5}},"#,
            r#"{"token":2,"stream_id":1,"logprob":-0.5,"finish_reason":"length","top_logprobs":{"2":-0.5}}]"#
        )]
    );
    assert_eq!(
        server.outputs(),
        ["cancel 0"],
        "an engine that goes on is told"
    );
    assert!(server.step(vec![(stream, piece(4))]).is_empty());
    server.session.finished(stream, server.now);
    assert!(server.received().is_empty());
}

#[test]
fn lm_404_eos_as_the_last_token_allowed_is_a_stop() {
    let mut server = Server::new();
    let stream =
        server.open(r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1,"max_tokens":1}"#);
    let end = StreamPiece::Item(item(257, -0.5, Some(StreamFinish::Stop)));
    let received = server.step(vec![(stream, end)]);
    assert!(
        received[0].contains(r#""token":257,"stream_id":1,"logprob":-0.5,"finish_reason":"stop""#)
    );
    assert!(server.outputs().is_empty());
}

/// LM-403
#[test]
fn lm_311_a_score_has_one_item_for_each_token_and_no_alternatives() {
    let mut server = Server::new();
    let stream = server.open(r#"SCORE {"model":"tiny","prompt":[1],"scored":[7,8],"stream_id":1}"#);
    // A finish reason that the engine gives early is ignored.
    let early = StreamPiece::Item(item(7, -0.5, Some(StreamFinish::Stop)));
    let received = server.step(vec![(stream, early), (stream, piece(8))]);
    assert_eq!(
        received,
        [concat!(
            r#"TOKEN [{"token":7,"stream_id":1,"logprob":-0.5,"finish_reason":null},"#,
            r#"{"token":8,"stream_id":1,"logprob":-0.5,"finish_reason":"stop"}]"#
        )]
    );
}

/// LM-208, LM-411: above 0 by rounding is 0.
#[test]
fn lm_412_probabilities_are_short_finite_numbers() {
    for (value, expected) in [
        (0.0_f32, "0.0"),
        (-0.0, "0.0"),
        (1e-6, "0.0"),
        (-0.1, "-0.1"),
        (-1.0, "-1.0"),
        (-1e-7, "-1e-7"),
        (-12.345_678, "-12.345678"),
        (f32::MIN, "-3.4028235e38"),
        (f32::NEG_INFINITY, "-3.4028235e38"),
    ] {
        let mut server = Server::new();
        let stream = server.open(GENERATE);
        let received = server.step(vec![(stream, StreamPiece::Item(item(1, value, None)))]);
        let (_, rest) = received[0].split_once(r#""logprob":"#).unwrap();
        assert_eq!(rest.split(',').next(), Some(expected));
        assert!(rest.contains(&format!(r#"{{"1":{expected}}}"#)));
        assert!(expected.contains(['.', 'e']));
        assert_eq!(expected.parse::<f32>().unwrap(), value.clamp(f32::MIN, 0.0));
    }
}

/// LM-412
#[test]
fn lm_503_a_nan_ends_its_stream_only() {
    let mut server = Server::new();
    let (bad, good) = (server.open(&generate(1)), server.open(&generate(2)));
    let received = server.step(vec![
        (bad, StreamPiece::Item(item(1, f32::NAN, None))),
        (good, piece(5)),
    ]);
    assert_eq!(code(&received[0]), ("TOKEN", "engine_error"));
    assert!(received[0].contains(r#""retryable":true"#));
    assert!(received[0].contains(r#"{"token":5,"stream_id":2"#));
    assert_eq!(server.outputs(), ["cancel 0"]);
    assert_eq!(server.session.live(), 1);
}

#[test]
fn lm_413_the_sampled_token_comes_first_and_once() {
    let top = vec![(5, -0.25), (6, -0.5), (7, -1.0)];
    for (k, token, expected) in [
        (0, 6, r#"{"6":-0.5}"#),
        (1, 5, r#"{"5":-0.25}"#),
        (1, 6, r#"{"6":-0.5,"5":-0.25}"#),
        (2, 6, r#"{"6":-0.5,"5":-0.25}"#),
        (2, 9, r#"{"9":-0.5,"5":-0.25,"6":-0.5}"#),
        (3, 5, r#"{"5":-0.25,"6":-0.5,"7":-1.0}"#),
    ] {
        let mut server = Server::new();
        let stream = server.open(&format!(
            r#"GENERATE {{"model":"tiny","prompt":[1],"stream_id":1,"top_logprobs":{k}}}"#
        ));
        let item = TokenItem {
            token,
            logprob: if token == 5 { -0.25 } else { -0.5 },
            top: top.clone(),
            finish: None,
            ..TokenItem::default()
        };
        let received = server.step(vec![(stream, StreamPiece::Item(item))]);
        let shown = received[0].split_once(r#""top_logprobs":"#).unwrap().1;
        assert_eq!(shown.strip_suffix("}]"), Some(expected), "{k} {token}");
    }
}

/// LM-502: the tokens before it are sent before it.
#[test]
fn lm_501_a_failure_is_one_item_without_token() {
    let mut server = Server::new();
    let stream = server.open(GENERATE);
    let error = LmtpError {
        retry_after: Some(Duration::from_millis(1_500)),
        ..LmtpError::new(LmtpReason::QueueTimeout, "waited \"too\" long\n")
    };
    let pieces = vec![
        (stream, piece(1)),
        (stream, StreamPiece::Failed(error)),
        (stream, piece(2)),
    ];
    let received = server.step(pieces);
    assert_eq!(
        received,
        [concat!(
            r#"TOKEN [{"token":1,"stream_id":1,"logprob":-0.5,"finish_reason":null,"top_logprobs":{"1":-0.5}},"#,
            r#"{"stream_id":1,"error":"waited \"too\" long\n","code":"queue_timeout","retryable":true,"retry_after_ms":1500}]"#
        )]
    );
}

#[test]
fn lm_501_work_that_ends_without_an_end_is_a_failure() {
    let mut server = Server::new();
    let stream = server.open(GENERATE);
    server.session.finished(stream, server.now);
    assert_eq!(code(&server.received()[0]), ("TOKEN", "engine_error"));
}

#[test]
fn lm_502_long_errors_are_cut_between_characters() {
    let mut server = Server::limited(ConnectionLimits {
        max_error_bytes: 4,
        ..ConnectionLimits::default()
    });
    let stream = server.open(GENERATE);
    let error = LmtpError::new(LmtpReason::EngineError, "ab\u{e9}\u{e9}");
    let received = server.step(vec![(stream, StreamPiece::Failed(error))]);
    assert!(received[0].contains("\"error\":\"ab\u{e9}\","));
}

/// LM-504
#[test]
fn lm_508_an_id_in_use_leaves_the_live_stream_alone() {
    let mut server = Server::new();
    let stream = server.open(GENERATE);
    assert_eq!(code(&server.ask(GENERATE)), ("MSG", "duplicate_stream"));
    let info = server.ask(r#"MODEL_INFO {"stream_id":1,"model":"tiny"}"#);
    assert!(info.starts_with(r#"MSG [{"stream_id":1,"model_info":{"model":"tiny""#));
    let end = StreamPiece::Item(item(1, -0.5, Some(StreamFinish::Stop)));
    assert_eq!(server.step(vec![(stream, end)]).len(), 1);
    assert_ne!(server.open(GENERATE), stream, "it may be used again");
}

/// Without negotiation no message of version 2 is accepted.
#[test]
fn lm_904_messages_of_version_2_are_not_negotiated() {
    let mut server = Server::new();
    let info = server.ask(r#"MODEL_INFO {"stream_id":1,"model":"tiny","data":{"x":{}}}"#);
    assert!(!info.contains(r#""lmtp""#), "as an old server answers");
    for word in [
        "CANCEL",
        "TOKENIZE",
        "DETOKENIZE",
        "BUFFER",
        "MASK",
        "RESUME",
        "ACK",
    ] {
        let answer = server.ask(&format!(r#"{word} {{"stream_id":3,"model":"tiny"}}"#));
        assert!(answer.starts_with(r#"MSG [{"stream_id":3,"#));
        assert_eq!(code(&answer).1, "not_negotiated");
    }
}

#[test]
fn lm_331_model_info_reports_a_missing_tokenizer() {
    let answer = Server::new().ask(r#"MODEL_INFO {"stream_id":1,"model":"bare","data":[1]}"#);
    assert!(answer.contains(r#""bos":null,"eos":[],"tokenizer":null,"version":"0.1.0""#));
}

/// LM-1201: a stream at the limit is accepted, the next one is refused with a retry delay.
#[test]
fn lm_510_more_streams_than_allowed_are_refused() {
    let mut server = Server::limited(ConnectionLimits {
        max_streams: 2,
        ..ConnectionLimits::default()
    });
    let first = server.open(&generate(1));
    server.open(&generate(2));
    let answer = server.ask(&generate(3));
    assert_eq!(code(&answer), ("TOKEN", "server_overloaded"));
    assert!(answer.ends_with(r#""retryable":true,"retry_after_ms":1000}]"#));
    server.step(vec![(
        first,
        StreamPiece::Item(item(1, -0.5, Some(StreamFinish::Stop))),
    )]);
    server.open(&generate(3));
}

/// LM-207
#[test]
fn lm_207_unknown_members_are_counted_or_refused() {
    let text = r#"GENERATE {"model":"tiny","prompt":[1],"stream_id":1,"prompt_text":"x","n":2,"length_penalty":"y"}"#;
    let mut server = Server::new();
    server.open(text);
    assert_eq!(server.session.stats().unknown_parameters, 2);
    let score =
        r#"SCORE {"model":"tiny","prompt":[1],"scored":[1],"stream_id":2,"zzz":1,"logit_bias":7}"#;
    server.open(score);
    assert_eq!(server.session.stats().unknown_parameters, 2);
    let mut strict = Server::with(Config {
        strict_parameters: true,
        ..Config::default()
    });
    let answer = strict.ask(text);
    assert_eq!(code(&answer), ("TOKEN", "unknown_parameter"));
    assert!(answer.contains("'prompt_text'"));
    strict.open(score);
}
