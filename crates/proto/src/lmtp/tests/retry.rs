//! Requests that are sent again (LM-963).

use std::time::Duration;

use super::*;

const ASK: &str = r#""model":"tiny","prompt":[1,2],"temperature":0.5"#;

fn agreed() -> Server {
    Server::agreed(r#"["resume","cancel","usage"]"#)
}

fn begin(server: &mut Server) -> StreamKey {
    server.open(&format!(r#"GENERATE {{"stream_id":3,{ASK}}}"#))
}

fn again(members: &str) -> String {
    format!(r#"GENERATE {{"stream_id":8,"retry_of":3,{members}}}"#)
}

#[test]
fn lm_963_items_bear_numbers_the_last_and_errors_included() {
    let mut server = agreed();
    let stream = begin(&mut server);
    for seq in 0..3 {
        let reply = server.step(vec![(stream, piece(seq))]);
        assert!(
            reply[0].ends_with(&format!(r#","seq":{seq}}}]"#)),
            "{reply:?}"
        );
    }
    let error = LmtpError::new(LmtpReason::EngineError, "x");
    let reply = server.step(vec![(stream, StreamPiece::Failed(error))]);
    assert!(
        reply[0].contains(r#""retryable":true,"seq":3,"usage""#),
        "{reply:?}"
    );
    let refused = server.ask(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[900]}"#);
    assert!(
        refused.ends_with(r#""retryable":false,"seq":0}]"#),
        "{refused}"
    );
    begin(&mut server);
    let cancelled = server.ask(r#"CANCEL {"stream_id":1,"model":"tiny","streams":[3]}"#);
    assert!(
        cancelled.contains(r#""finish_reason":"cancelled","seq":0,"#),
        "{cancelled}"
    );
    // And nobody else's do.
    let mut other = Server::agreed(r#"["usage"]"#);
    let stream = begin(&mut other);
    assert!(!other.step(vec![(stream, piece(1))])[0].contains("seq"));
}

#[test]
fn lm_963_a_live_stream_is_taken_over_and_told_from_its_beginning() {
    let mut server = agreed();
    let stream = begin(&mut server);
    server.step(vec![(stream, piece(65))]);
    server.step(vec![(stream, piece(66))]);
    // White space and times may differ.
    let reply = server.ask(&again(
        r#""prompt":[1, 2],"model":"tiny" , "deadline_ms":50,"temperature":0.5"#,
    ));
    let (first, rest) = reply.split_once("},{").unwrap();
    assert_eq!(
        first,
        r#"TOKEN [{"stream_id":3,"finish_reason":"superseded","seq":2,"usage":{"prompt_tokens":2,"cached_tokens":0,"completion_tokens":2}"#
    );
    assert!(rest.starts_with(r#""token":65,"stream_id":8,"#), "{rest}");
    assert!(rest.contains(r#""token":66,"stream_id":8,"#) && rest.ends_with(r#""seq":1}]"#));
    assert_eq!(
        (server.started.len(), server.session.live()),
        (1, 1),
        "one work"
    );
    let reply = server.step(vec![(stream, piece(67))]);
    assert!(reply[0].starts_with(r#"TOKEN [{"token":67,"stream_id":8,"#));
    assert!(reply[0].ends_with(r#""seq":2}]"#));
    // The id is free, and the deadline is the new one.
    begin(&mut server);
    assert_eq!(server.session.wake_at(), Some(Time::from_millis(50)));
    server.now = Time::from_millis(50);
    server.session.tick(server.now);
    assert!(server.received()[0].contains(r#""stream_id":8,"finish_reason":"deadline","seq":3"#));
}

#[test]
fn lm_963_an_ended_stream_is_told_again_as_long_as_it_is_kept() {
    for (wait, known) in [(29, true), (30, false)] {
        let mut server = agreed();
        let stream = begin(&mut server);
        server.step(vec![(
            stream,
            StreamPiece::Item(item(65, -0.5, Some(StreamFinish::Stop))),
        )]);
        server.now = Time::ZERO + Duration::from_secs(wait);
        server.session.tick(server.now);
        let reply = server.ask(&again(ASK));
        assert_eq!(server.started.len(), if known { 1 } else { 2 }, "{wait}");
        let received =
            reply.contains(r#""token":65,"stream_id":8,"logprob":-0.5,"finish_reason":"stop""#);
        assert_eq!(received, known, "{reply}");
    }
}

#[test]
fn lm_963_another_request_is_no_retry_and_an_unknown_stream_begins_afresh() {
    let mut server = agreed();
    begin(&mut server);
    for other in [
        r#""model":"tiny","prompt":[1,2]"#,
        r#""model":"tiny","prompt":[1,3],"temperature":0.5"#,
        r#""model":"tiny","prompt":[1,2],"temperature":0.5,"seed":1"#,
    ] {
        let reply = server.ask(&again(other));
        assert!(
            reply.contains(r#""code":"invalid_value""#),
            "{other}: {reply}"
        );
    }
    assert_eq!(server.session.live(), 1, "the stream lives on");
    let unknown = format!(r#"GENERATE {{"stream_id":9,"retry_of":77,{ASK}}}"#);
    server.open(&unknown);
    let own = format!(r#"GENERATE {{"stream_id":3,"retry_of":3,{ASK}}}"#);
    assert!(server.ask(&own).contains("duplicate_stream"));
    // Without the feature it is an unknown member.
    let mut other = Server::agreed(r#"["usage"]"#);
    begin(&mut other);
    other.open(&again(ASK));
    assert_eq!(other.session.stats().unknown_parameters, 1);
}

/// Where the beginning is not kept any more, the work begins again, and only once.
#[test]
fn lm_963_a_stream_whose_beginning_is_gone_is_replaced() {
    let limits = ConnectionLimits {
        resume_items: 2,
        ..ConnectionLimits::default()
    };
    let mut server = Server::limited(limits);
    server.ask(r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":"all"}}}"#);
    let stream = begin(&mut server);
    for token in 0..3 {
        server.step(vec![(stream, piece(token))]);
    }
    let reply = server.ask(&again(ASK));
    assert!(
        reply.contains(r#""stream_id":3,"finish_reason":"superseded","seq":3"#),
        "{reply}"
    );
    assert_eq!(server.outputs(), ["cancel 0"]);
    assert_eq!((server.started.len(), server.session.live()), (2, 1));
}

/// An id whose stream is kept may begin a stream that keeps nothing, after features were given up: nobody who asks for that
/// one is given the other.
#[test]
fn lm_963_a_stream_without_numbers_is_not_mistaken_for_the_one_that_is_kept_under_its_id() {
    let negotiate = |server: &mut Server, features: &str| {
        let answer = server.ask(&format!(
            r#"MODEL_INFO {{"stream_id":0,"model":"tiny","data":{{"lmtp":{{"version":2,"features":{features}}}}}}}"#
        ));
        assert!(answer.contains(r#""lmtp":"#), "{answer}");
    };
    for features in ["[]", r#"["usage"]"#] {
        let mut server = agreed();
        let stream = begin(&mut server);
        server.step(vec![(
            stream,
            StreamPiece::Item(item(65, -0.5, Some(StreamFinish::Stop))),
        )]);
        negotiate(&mut server, features);
        let stream = server.open(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[7]}"#);
        negotiate(&mut server, r#"["resume"]"#);
        let retry = server.open(&again(ASK));
        assert_eq!(
            server.session.live(),
            2,
            "both run, and nothing is told again"
        );
        let reply = server.step(vec![(stream, piece(66)), (retry, piece(67))]);
        let reply = reply.join("\n");
        assert!(reply.contains(r#""token":66,"stream_id":3,"#), "{reply}");
        assert!(reply.contains(r#""token":67,"stream_id":8,"#), "{reply}");
    }
}
