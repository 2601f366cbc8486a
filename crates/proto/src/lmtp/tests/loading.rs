//! Streams wait for models that are being loaded (LM-322).

use std::time::Duration;

use super::*;

/// The shelf, with one model more.
struct Coming(Result<(), Reason>);

impl Models for Coming {
    fn find(&self, name: &str) -> Result<Arc<Model>, Reason> {
        if name == "later" {
            self.0?;
            return Shelf.find("tiny");
        }
        Shelf.find(name)
    }

    fn vocabulary(&self, name: &str) -> Option<Arc<dyn Vocabulary>> {
        Shelf.vocabulary(name)
    }
}

const LOADING: Coming = Coming(Err(Reason::ModelLoading));

fn say(server: &mut Server, text: &str) -> String {
    assert_eq!(
        server.session.handle(text.into(), &LOADING, server.now),
        None
    );
    server.poll();
    server.heard().join("\n")
}

fn generate(id: u32, members: &str) -> String {
    format!(r#"GENERATE {{"model":"later","prompt":[1],"stream_id":{id}{members}}}"#)
}

fn at(server: &mut Server, ms: u64) -> String {
    server.now = Time::from_millis(ms);
    server.session.tick(server.now);
    server.poll();
    server.heard().join("\n")
}

/// What begins is what was asked for, as it was agreed on then.
#[test]
fn lm_322_streams_wait_for_their_model_and_begin_in_order() {
    let mut server = Server::agreed(r#"["samples","usage"]"#);
    assert_eq!(say(&mut server, &generate(1, r#","n":2"#)), "");
    say(
        &mut server,
        r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":[]}}}"#,
    );
    assert_eq!(say(&mut server, &generate(2, "")), "");
    assert_eq!(server.session.waiting(), 2);
    assert!(say(&mut server, &generate(2, "")).contains("duplicate_stream"));
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
    // Others ask for what is not there, and hear so.
    assert!(
        say(
            &mut server,
            r#"GENERATE {"model":"nope","prompt":[1],"stream_id":3}"#
        )
        .contains("model_not_found")
    );
}

#[test]
fn lm_322_a_model_that_does_not_come_ends_what_waits_for_it() {
    let mut server = Server::new();
    say(&mut server, &generate(1, ""));
    let end = Time::ZERO + Duration::from_secs(60);
    assert_eq!(server.session.wake_at(), Some(end));
    let said = at(&mut server, 60_000);
    assert!(
        said.contains(r#""code":"model_loading","retryable":true,"retry_after_ms":"#),
        "{said}"
    );
    say(&mut server, &generate(1, ""));
    server
        .session
        .models_changed(&Coming(Err(Reason::EngineError)), server.now);
    let said = server.heard().concat();
    assert!(
        said.contains(
            r#""stream_id":1,"error":"the model could not be loaded","code":"engine_error""#
        ),
        "{said}"
    );
    say(&mut server, &generate(1, ""));
    server.session.close(Close::SHUTDOWN, server.now);
    assert!(server.heard().concat().contains(r#""code":"draining""#));
    // Whoever goes waits no more.
    let mut gone = Server::new();
    say(&mut gone, &generate(1, ""));
    gone.session.hang_up();
    assert_eq!((gone.session.waiting(), gone.session.wake_at()), (0, None));
    // Input that has ended has not ended this.
    let mut half = Server::new();
    say(&mut half, &generate(1, ""));
    half.session.end_of_input();
    assert!(!half.session.is_closed());
}

/// LM-961, LM-962
#[test]
fn lm_322_deadlines_and_cancels_do_not_wait_for_models() {
    let mut server = Server::agreed(r#"["cancel"]"#);
    say(&mut server, &generate(1, r#","deadline_ms":50"#));
    say(&mut server, &generate(2, r#","ttft_ms":60"#));
    say(&mut server, &generate(3, ""));
    assert_eq!(
        at(&mut server, 50),
        r#"TOKEN [{"stream_id":1,"finish_reason":"deadline"}]"#
    );
    assert!(at(&mut server, 60).contains(r#""code":"timeout""#));
    let cancel = r#"CANCEL {"model":"tiny","stream_id":9,"streams":"all"}"#;
    assert_eq!(
        say(&mut server, cancel),
        "TOKEN [{\"stream_id\":3,\"finish_reason\":\"cancelled\"}]\nMSG [{\"stream_id\":9,\"cancelled\":[3],\"unknown\":[]}]"
    );
}

/// LM-922: after 100 ms, and `running` after it alone.
#[test]
fn lm_921_whoever_waits_for_a_model_is_told() {
    let mut server = Server::agreed(r#"["status"]"#);
    say(&mut server, &generate(1, ""));
    assert_eq!(at(&mut server, 99), "");
    let told = r#"STATUS [{"stream_id":1,"event":"loading"}]"#;
    assert_eq!(at(&mut server, 100), told);
    assert_eq!(at(&mut server, 900), "", "once");
    say(&mut server, &generate(2, ""));
    server.session.models_changed(&Coming(Ok(())), server.now);
    server.poll();
    let streams: Vec<_> = server.started.iter().map(|start| start.stream).collect();
    let said = server.step(vec![(streams[0], piece(7)), (streams[1], piece(8))]);
    assert_eq!(said[0], r#"STATUS [{"stream_id":1,"event":"running"}]"#);
    assert_eq!(said.len(), 2, "the other did not wait long: {said:?}");
    assert_eq!(server.step(vec![(streams[0], piece(7))]).len(), 1);
}

#[test]
fn lm_1201_what_waits_for_a_model_has_limits() {
    for (limits, waits) in [
        (
            Limits {
                max_streams: 2,
                ..Limits::default()
            },
            [true, true, false],
        ),
        (
            Limits {
                max_message_in: 95,
                ..Limits::default()
            },
            [true, true, false],
        ),
        (
            Limits {
                load_wait: Duration::ZERO,
                ..Limits::default()
            },
            [false; 3],
        ),
    ] {
        let mut server = Server::limited(limits);
        for (id, waits) in (1..).zip(waits) {
            let said = say(&mut server, &generate(id, ""));
            assert_eq!(said.is_empty(), waits, "{id}: {said}");
            assert!(waits || said.contains("model_loading"));
        }
    }
}
