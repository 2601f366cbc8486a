//! Streams wait for models that are being loaded (LM-322).

use std::time::Duration;

use super::*;

/// The usual models, and one named `later` whose lookup gives this result.
struct Coming(Result<(), LmtpReason>);

impl ModelLookup for Coming {
    fn find(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason> {
        if name == "later" {
            self.0?;
            return FuzzModels.find("tiny");
        }
        FuzzModels.find(name)
    }

    fn vocabulary(&self, name: &str) -> Option<Arc<dyn TextCodec>> {
        FuzzModels.vocabulary(name)
    }
}

const LOADING: Coming = Coming(Err(LmtpReason::ModelLoading));

fn send(server: &mut Server, text: &str) -> String {
    assert_eq!(
        server.session.handle(text.into(), &LOADING, server.now),
        None
    );
    server.poll();
    server.received().join("\n")
}

fn generate(id: u32, members: &str) -> String {
    format!(r#"GENERATE {{"model":"later","prompt":[1],"stream_id":{id}{members}}}"#)
}

fn at(server: &mut Server, ms: u64) -> String {
    server.now = Time::from_millis(ms);
    server.session.tick(server.now);
    server.poll();
    server.received().join("\n")
}

/// Deferred requests start in order, with the features negotiated when they were received.
#[test]
fn lm_322_streams_wait_for_their_model_and_begin_in_order() {
    let mut server = Server::agreed(r#"["samples","usage"]"#);
    assert_eq!(send(&mut server, &generate(1, r#","n":2"#)), "");
    send(
        &mut server,
        r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":[]}}}"#,
    );
    assert_eq!(send(&mut server, &generate(2, "")), "");
    assert_eq!(server.session.waiting(), 2);
    assert!(send(&mut server, &generate(2, "")).contains("duplicate_stream"));
    server.session.models_changed(&LOADING, server.now);
    assert_eq!(server.session.waiting(), 2, "another one has come");
    server.session.models_changed(&Coming(Ok(())), server.now);
    server.poll();
    assert_eq!((server.started.len(), server.session.waiting()), (3, 0));
    let ids: Vec<_> = server.started.iter().map(|start| start.stream).collect();
    let ids = ids
        .into_iter()
        .map(|stream| server.session.id(stream).unwrap().as_json());
    assert_eq!(ids.collect::<Vec<_>>(), ["1", "1", "2"]);
    // A request for a model that does not exist is refused at once.
    assert!(
        send(
            &mut server,
            r#"GENERATE {"model":"nope","prompt":[1],"stream_id":3}"#
        )
        .contains("model_not_found")
    );
}

#[test]
fn lm_322_a_model_that_is_not_loaded_ends_the_streams_that_wait_for_it() {
    let mut server = Server::new();
    send(&mut server, &generate(1, ""));
    let end = Time::ZERO + Duration::from_secs(60);
    assert_eq!(server.session.wake_at(), Some(end));
    let reply = at(&mut server, 60_000);
    assert!(
        reply.contains(r#""code":"model_loading","retryable":true,"retry_after_ms":"#),
        "{reply}"
    );
    send(&mut server, &generate(1, ""));
    server
        .session
        .models_changed(&Coming(Err(LmtpReason::EngineError)), server.now);
    let reply = server.received().concat();
    assert!(
        reply.contains(
            r#""stream_id":1,"error":"the model could not be loaded","code":"engine_error""#
        ),
        "{reply}"
    );
    send(&mut server, &generate(1, ""));
    server.session.close(LmtpClose::SHUTDOWN, server.now);
    assert!(server.received().concat().contains(r#""code":"draining""#));
    // After a hang-up nothing waits.
    let mut removed = Server::new();
    send(&mut removed, &generate(1, ""));
    removed.session.hang_up();
    assert_eq!(
        (removed.session.waiting(), removed.session.wake_at()),
        (0, None)
    );
    // A half-close does not end a request that waits.
    let mut half = Server::new();
    send(&mut half, &generate(1, ""));
    half.session.end_of_input();
    assert!(!half.session.is_closed());
}

/// LM-961, LM-962
#[test]
fn lm_322_deadlines_and_cancels_do_not_wait_for_models() {
    let mut server = Server::agreed(r#"["cancel"]"#);
    send(&mut server, &generate(1, r#","deadline_ms":50"#));
    send(&mut server, &generate(2, r#","ttft_ms":60"#));
    send(&mut server, &generate(3, ""));
    assert_eq!(
        at(&mut server, 50),
        r#"TOKEN [{"stream_id":1,"finish_reason":"deadline"}]"#
    );
    assert!(at(&mut server, 60).contains(r#""code":"timeout""#));
    let cancel = r#"CANCEL {"model":"tiny","stream_id":9,"streams":"all"}"#;
    assert_eq!(
        send(&mut server, cancel),
        "TOKEN [{\"stream_id\":3,\"finish_reason\":\"cancelled\"}]\nMSG [{\"stream_id\":9,\"cancelled\":[3],\"unknown\":[]}]"
    );
}

#[test]
fn lm_943_a_buffer_lives_on_from_its_use_by_a_stream_that_has_waited() {
    let mut server = Server::agreed(r#"["buffers","cancel"]"#);
    let ready = Coming(Ok(()));
    let ask = |server: &mut Server, text: &str| {
        assert_eq!(server.session.handle(text.into(), &ready, server.now), None);
        server.poll();
        server.received().join("\n")
    };
    let buffer = r#"BUFFER {"model":"later","stream_id":9,"buffer":"b","append":[1]}"#;
    assert!(ask(&mut server, buffer).contains(r#""expires_s":60"#));
    let prefix = r#","prefix":{"buffer":"b"},"deadline_ms":70000"#;
    assert_eq!(send(&mut server, &generate(1, prefix)), "");
    server.now = Time::from_millis(50_000);
    server.session.models_changed(&ready, server.now);
    server.poll();
    assert_eq!(server.started.len(), 1);
    // The deadline counts from the receipt all the same (LM-962).
    assert_eq!(server.session.wake_at(), Some(Time::from_millis(70_000)));
    server.now = Time::from_millis(109_999);
    let again = generate(2, r#","prefix":{"buffer":"b"}"#);
    assert_eq!(ask(&mut server, &again), "");
}

/// LM-961, LM-965: both are about streams, and these may wait for the very model that the message names.
#[test]
fn lm_322_cancel_and_resume_do_not_need_a_model_that_is_ready() {
    for state in [LmtpReason::ModelLoading, LmtpReason::EngineError] {
        let mut server = Server::agreed(r#"["cancel"]"#);
        send(&mut server, &generate(1, ""));
        let mut ask = |text: &str| {
            let models = Coming(Err(state));
            let rest = server.session.handle(text.into(), &models, server.now);
            assert_eq!(rest, None);
            server.received().join("\n")
        };
        assert_eq!(
            ask(r#"CANCEL {"model":"later","stream_id":9,"streams":[1]}"#),
            "TOKEN [{\"stream_id\":1,\"finish_reason\":\"cancelled\"}]\nMSG [{\"stream_id\":9,\"cancelled\":[1],\"unknown\":[]}]"
        );
        let refused = ask(r#"CANCEL {"model":"nope","stream_id":9,"streams":[1]}"#);
        assert!(refused.contains("model_not_found"), "{refused}");
        ask(
            r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":["resume"]}}}"#,
        );
        ask(r#"RESUME {"model":"later","stream_id":9,"session":"s_2","streams":[]}"#);
        assert_eq!(server.outputs(), ["resume s_2"]);
    }
}

/// LM-922: `loading` after 100 ms, and `running` only after `loading`.
#[test]
fn lm_921_a_stream_that_waits_for_a_model_gets_a_status() {
    let mut server = Server::agreed(r#"["status"]"#);
    send(&mut server, &generate(1, ""));
    assert_eq!(at(&mut server, 99), "");
    let received = r#"STATUS [{"stream_id":1,"event":"loading"}]"#;
    assert_eq!(at(&mut server, 100), received);
    assert_eq!(at(&mut server, 900), "", "once");
    send(&mut server, &generate(2, ""));
    server.session.models_changed(&Coming(Ok(())), server.now);
    server.poll();
    let streams: Vec<_> = server.started.iter().map(|start| start.stream).collect();
    let reply = server.step(vec![(streams[0], piece(7)), (streams[1], piece(8))]);
    assert_eq!(reply[0], r#"STATUS [{"stream_id":1,"event":"running"}]"#);
    assert_eq!(reply.len(), 2, "the other did not wait long: {reply:?}");
    assert_eq!(server.step(vec![(streams[0], piece(7))]).len(), 1);
}

#[test]
fn lm_1201_requests_that_wait_for_a_model_have_limits() {
    for (limits, waits) in [
        (
            ConnectionLimits {
                max_streams: 2,
                ..ConnectionLimits::default()
            },
            [true, true, false],
        ),
        (
            ConnectionLimits {
                max_message_in: 95,
                ..ConnectionLimits::default()
            },
            [true, true, false],
        ),
        (
            ConnectionLimits {
                load_wait: Duration::ZERO,
                ..ConnectionLimits::default()
            },
            [false; 3],
        ),
    ] {
        let mut server = Server::limited(limits);
        for (id, waits) in (1..).zip(waits) {
            let reply = send(&mut server, &generate(id, ""));
            assert_eq!(reply.is_empty(), waits, "{id}: {reply}");
            assert!(waits || reply.contains("model_loading"));
        }
    }
}
