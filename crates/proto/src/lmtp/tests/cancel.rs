//! Streams that end early, and the members of their last item.

use super::*;

const GENERATE: &str = r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1,2],"top_logprobs":0"#;

/// LM-950: the example of the specification.
#[test]
fn lm_961_streams_end_without_a_token_and_then_the_request_is_answered() {
    let mut server = Server::agreed(r#"["cancel","usage"]"#);
    let stream = server.open(&format!("{GENERATE}}}"));
    server.step(vec![(stream, piece(7)), (stream, piece(8))]);
    let message = r#"CANCEL {"stream_id":9,"model":"tiny","streams":[3,77,3]}"#;
    server.send(message);
    let incoming = server.received();
    let usage = r#""usage":{"prompt_tokens":2,"cached_tokens":0,"completion_tokens":2}"#;
    assert_eq!(
        incoming,
        [
            format!(r#"TOKEN [{{"stream_id":3,"finish_reason":"cancelled",{usage}}}]"#),
            r#"MSG [{"stream_id":9,"cancelled":[3],"unknown":[77,3]}]"#.to_owned(),
        ]
    );
    assert_eq!(server.outputs(), ["cancel 0"]);
    assert!(
        server.step(vec![(stream, piece(9))]).is_empty(),
        "nothing follows"
    );
    server.open(&format!("{GENERATE}}}"));
}

#[test]
fn lm_961_all_cancels_every_stream_in_order_of_admission() {
    let mut server = Server::agreed(r#"["cancel"]"#);
    for id in ["30", "\"b\"", "2"] {
        let text = format!(r#"GENERATE {{"stream_id":{id},"model":"tiny","prompt":[1]}}"#);
        server.open(&text);
    }
    let answer = server.ask(r#"CANCEL {"stream_id":9,"model":"tiny","streams":"all"}"#);
    assert!(answer.ends_with(r#"MSG [{"stream_id":9,"cancelled":[30,"b",2],"unknown":[]}]"#));
    assert_eq!(server.session.live(), 0);
}

#[test]
fn lm_961_bad_requests_end_nothing() {
    let mut server = Server::agreed(r#"["cancel"]"#);
    server.open(&format!("{GENERATE}}}"));
    let many = vec!["1"; 1_025].join(",");
    for (streams, code) in [
        (String::new(), "missing_required_parameter"),
        (r#","streams":3"#.to_owned(), "invalid_type"),
        (r#","streams":[NaN]"#.to_owned(), "invalid_value"),
        (format!(r#","streams":[{many}]"#), "invalid_value"),
    ] {
        let answer = server.ask(&format!(
            r#"CANCEL {{"stream_id":9,"model":"tiny"{streams}}}"#
        ));
        assert!(answer.contains(code), "{answer}");
    }
    assert_eq!(server.session.live(), 1);
    let most = vec!["1"; 1_024].join(",");
    let text = format!(r#"CANCEL {{"stream_id":9,"model":"tiny","streams":[{most}]}}"#);
    assert!(server.ask(&text).contains("unknown"));
}

#[test]
fn lm_962_a_deadline_ends_the_stream_and_the_items_sent_stand() {
    let mut server = Server::agreed(r#"["cancel"]"#);
    let stream = server.open(&format!(r#"{GENERATE},"deadline_ms":500}}"#));
    assert_eq!(server.session.wake_at(), Some(Time::from_millis(500)));
    server.step(vec![(stream, piece(7))]);
    server.now = Time::from_millis(499);
    server.session.tick(server.now);
    assert!(server.received().is_empty());
    server.now = Time::from_millis(500);
    server.session.tick(server.now);
    assert_eq!(
        server.received(),
        [r#"TOKEN [{"stream_id":3,"finish_reason":"deadline"}]"#]
    );
    assert_eq!(server.outputs(), ["cancel 0"]);
    assert_eq!(server.session.wake_at(), None);
}

#[test]
fn lm_962_no_token_in_time_is_a_timeout_and_one_token_is_enough() {
    let mut server = Server::agreed(r#"["cancel"]"#);
    server.open(&format!(r#"{GENERATE},"ttft_ms":50}}"#));
    server.now = Time::from_millis(50);
    server.session.tick(server.now);
    let incoming = server.received().join("");
    assert!(
        incoming.contains(r#""code":"timeout","retryable":true"#),
        "{incoming}"
    );
    let stream = server.open(&format!(r#"{GENERATE},"ttft_ms":50}}"#));
    server.step(vec![(stream, piece(7))]);
    assert_eq!(server.session.wake_at(), None);
}

#[test]
fn lm_962_times_and_priorities_have_a_range() {
    let refused = |members: &str| {
        let mut server = Server::agreed(r#"["cancel"]"#);
        server
            .ask(&format!("{GENERATE},{members}}}"))
            .contains("invalid_value")
    };
    for (at_limit, past_it) in [
        (r#""deadline_ms":1"#, r#""deadline_ms":0"#),
        (r#""deadline_ms":86400000"#, r#""deadline_ms":86400001"#),
        (r#""ttft_ms":86400000"#, r#""ttft_ms":86400001"#),
        (r#""priority":10"#, r#""priority":11"#),
        (r#""priority":-10"#, r#""priority":-11"#),
    ] {
        assert!(!refused(at_limit) && refused(past_it), "{at_limit}");
    }
    let mut server = Server::agreed(r#"["cancel"]"#);
    server.open(&format!(r#"{GENERATE},"priority":-3}}"#));
    let StreamDemand::Generate(wanted) = &server.started[0].work else {
        panic!("work");
    };
    assert_eq!(wanted.params.priority, Some(-3));
}

#[test]
fn lm_950_the_last_item_has_the_usage_whatever_it_is() {
    let usage = |sent: u32, cached: u32| {
        format!(
            r#""usage":{{"prompt_tokens":2,"cached_tokens":{cached},"completion_tokens":{sent}}}"#
        )
    };
    let mut server = Server::agreed(r#"["usage"]"#);
    let stream = server.open(&format!("{GENERATE}}}"));
    let mut last = item(8, -0.5, Some(StreamFinish::Stop));
    last.cached_tokens = 1;
    let received = server.step(vec![(stream, piece(7)), (stream, StreamPiece::Item(last))]);
    assert_eq!(received[0].matches("usage").count(), 1);
    assert!(
        received[0].ends_with(&format!("{}}}]", usage(2, 1))),
        "{}",
        received[0]
    );
    let stream = server.open(&format!("{GENERATE}}}"));
    let error = LmtpError::new(LmtpReason::EngineError, "no");
    let received = server.step(vec![
        (stream, piece(7)),
        (stream, StreamPiece::Failed(error)),
    ]);
    assert!(received[0].ends_with(&format!(r#""retryable":true,{}}}]"#, usage(1, 0))));
}
