//! Streams with controllers.

use super::*;
use crate::steer::{ControllerChoice, VariableWrite};

const STEERED: &str = r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"max_tokens":5,"controller":"yes-latest"}"#;

fn server() -> Server {
    Server::agreed(r#"["controllers","usage","status","cancel"]"#)
}

fn call(server: &mut Server, members: &str) -> Result<ControllerChoice, String> {
    let before = server.started.len();
    let answer = server.ask(&format!(
        r#"GENERATE {{"stream_id":{before},"model":"tiny","prompt":[1],{members}}}"#
    ));
    let Some(start) = server.started.get(before) else {
        return Err(answer);
    };
    match &start.work {
        StreamDemand::Generate(wanted) => Ok((**wanted.controller.as_ref().unwrap()).clone()),
        StreamDemand::Score(_) => panic!("work"),
    }
}

fn branch(key: StreamKey, branch: u32, event: BranchEvent) -> (StreamKey, StreamPiece) {
    (key, StreamPiece::Branch(branch, event))
}

fn token(key: StreamKey, branch: u32, token: u32) -> (StreamKey, StreamPiece) {
    let item = TokenItem {
        branch,
        ..item(token, -0.5, None)
    };
    (key, StreamPiece::Item(item))
}

fn forked(of: u32, inherited: u32) -> BranchEvent {
    BranchEvent::Forked { of, inherited }
}

fn ended(finish: StreamFinish) -> BranchEvent {
    BranchEvent::Ended {
        finish,
        cached_tokens: 0,
    }
}

fn log(key: StreamKey, branch: u32, message: &str) -> (StreamKey, StreamPiece) {
    let message = message.to_owned();
    (
        key,
        StreamPiece::Status(StreamUpdate::Log { branch, message }),
    )
}

#[test]
fn lm_971_a_controller_is_a_name_or_an_object_and_its_argument_any_json() {
    let mut server = server();
    for (members, id, arg) in [
        (r#""controller":"tag""#, "tag", ""),
        (
            r#""controller":"tag","controller_arg":" a \"b" "#,
            "tag",
            " a \"b",
        ),
        (
            r#""controller":"tag","controller_arg":{"b": [1.0, 2],"a" :null}"#,
            "tag",
            r#"{"b":[1.0,2],"a":null}"#,
        ),
        (r#""controller":"tag","controller_arg":null"#, "tag", ""),
        (
            r#""controller":{"id":"sapwood:regex","arg":"\\d"}"#,
            "sapwood:regex",
            "\\d",
        ),
        (
            r#""controller":{"id":"tag","arg":[ 1 ],"later":1}"#,
            "tag",
            "[1]",
        ),
    ] {
        let (id, arg) = (id.to_owned(), arg.to_owned());
        assert_eq!(call(&mut server, members), Ok(ControllerChoice { id, arg }));
    }
}

#[test]
fn lm_971_a_controller_of_the_wrong_shape_is_refused() {
    let mut server = server();
    for (members, reason) in [
        (r#""controller":7"#, "invalid_type"),
        (r#""controller":["tag"]"#, "invalid_type"),
        (r#""controller":{"id":7}"#, "invalid_type"),
        (r#""controller":{"arg":"x"}"#, "missing_required_parameter"),
        (r#""controller":{"id":null}"#, "missing_required_parameter"),
        (r#""controller":"""#, "invalid_value"),
        (r#""controller_arg":"x""#, "invalid_value"),
        (
            r#""controller":{"id":"tag"},"controller_arg":"x""#,
            "invalid_value",
        ),
        (
            r#""controller":"tag","controller_arg":[NaN]"#,
            "invalid_value",
        ),
    ] {
        let refused = call(&mut server, members).unwrap_err();
        assert!(
            refused.starts_with("TOKEN [") && refused.contains(reason),
            "{refused}"
        );
    }
}

#[test]
fn lm_1201_names_and_arguments_of_controllers_have_limits() {
    let mut server = server();
    let name = |length| format!(r#""controller":"{}""#, "x".repeat(length));
    assert!(call(&mut server, &name(256)).is_ok());
    assert!(
        call(&mut server, &name(257))
            .unwrap_err()
            .contains("invalid_value")
    );
    let arg = |length| {
        format!(
            r#""controller":"x","controller_arg":"{}""#,
            "x".repeat(length)
        )
    };
    assert!(call(&mut server, &arg(1 << 20)).is_ok());
    assert!(
        call(&mut server, &arg((1 << 20) + 1))
            .unwrap_err()
            .contains("invalid_value")
    );
}

/// LM-950: forced tokens are counted apart.
#[test]
fn lm_972_forced_tokens_backtracks_and_the_end_are_items() {
    let mut server = server();
    let key = server.open(STEERED);
    let forced = TokenItem {
        forced: true,
        logprob: 0.0,
        top: vec![(9, -0.5), (7, -1.0)],
        ..item(7, 0.0, None)
    };
    let received = server.step(vec![
        (key, piece(5)),
        branch(key, 0, BranchEvent::Backtrack(1)),
        (key, StreamPiece::Item(forced)),
    ]);
    let items = [
        r#"{"token":5,"stream_id":3,"logprob":-0.5,"finish_reason":null,"top_logprobs":{"5":-0.5}}"#,
        r#"{"stream_id":3,"backtrack":1}"#,
        r#"{"token":7,"stream_id":3,"logprob":0.0,"finish_reason":null,"top_logprobs":{"7":0.0},"forced":true}"#,
    ];
    assert_eq!(received, [format!("TOKEN [{}]", items.join(","))]);
    let end = ended(StreamFinish::Controller);
    let received = server.step(vec![branch(key, 0, end)]);
    let usage =
        r#""usage":{"prompt_tokens":1,"cached_tokens":0,"completion_tokens":2,"forced_tokens":1}"#;
    let expected = format!(
        r#"TOKEN [{{"stream_id":3,"finish_reason":"stop","stop_by":"controller",{usage}}}]"#
    );
    assert_eq!(received, [expected]);
    assert_eq!((server.session.live(), server.outputs().len()), (0, 0));
}

#[test]
fn lm_972_a_stop_with_a_token_says_who_stopped() {
    let mut server = Server::agreed(r#"["controllers"]"#);
    let key = server.open(STEERED);
    let last = item(5, -0.5, Some(StreamFinish::Controller));
    let received = server.step(vec![(key, StreamPiece::Item(last))]);
    assert!(
        received[0].contains(r#""finish_reason":"stop","#),
        "{received:?}"
    );
    assert!(
        received[0].ends_with(r#""stop_by":"controller"}]"#),
        "{received:?}"
    );
}

/// LM-602: voided tokens count.
#[test]
fn lm_972_max_tokens_counts_voided_tokens() {
    let mut server = Server::agreed(r#"["controllers"]"#);
    let key = server.open(STEERED);
    for round in 0..4 {
        let pieces = vec![
            (key, piece(round)),
            branch(key, 0, BranchEvent::Backtrack(1)),
        ];
        assert!(!server.step(pieces)[0].contains("length"));
    }
    assert!(server.step(vec![(key, piece(9))])[0].contains(r#""finish_reason":"length""#));
    assert_eq!(server.outputs(), ["cancel 0"]);
}

/// LM-972: what a controller prints and writes comes as STATUS, before the items of its step.
#[test]
fn lm_972_logs_and_storage_are_statuses_before_the_items_of_their_step() {
    let mut server = server();
    let key = server.open(STEERED);
    let write = VariableWrite {
        name: "n".into(),
        value: vec![0x0a, 0xff],
        append: false,
        when_version_is: Some(2),
    };
    let storage = StreamPiece::Status(StreamUpdate::Storage { branch: 0, write });
    let received = server.step(vec![(key, piece(5)), log(key, 0, "one\n"), (key, storage)]);
    assert_eq!(
        received[0],
        r#"STATUS [{"stream_id":3,"event":"log","message":"one\n"}]"#
    );
    assert_eq!(
        received[1],
        r#"STATUS [{"stream_id":3,"event":"storage","name":"n","value":"0aff","op":"Set","when_version_is":2}]"#
    );
    assert!(received[2].starts_with("TOKEN [") && received.len() == 3);
    // A moment later it waits, and is sent with what follows (LM-922).
    assert_eq!(server.step(vec![log(key, 0, "two,")]), [""; 0]);
    server.now = server.now + ConnectionLimits::default().status_interval;
    let received = server.step(vec![log(key, 0, "three")]);
    assert_eq!(
        received,
        [r#"STATUS [{"stream_id":3,"event":"log","message":"two,three"}]"#]
    );
    // The end of the stream waits for nothing, and no status follows it.
    let end = ended(StreamFinish::Controller);
    let received = server.step(vec![branch(key, 0, end), log(key, 0, "four")]);
    assert!(received[0].contains("four") && received[1].contains("stop_by"));
    assert_eq!(received.len(), 2);
    assert_eq!(server.step(vec![log(key, 0, "five")]), [""; 0]);
}

/// A cancel is an end as well: what was printed comes before it.
#[test]
fn lm_972_a_cancelled_stream_sends_what_was_printed_before_its_end() {
    let mut server = server();
    let key = server.open(STEERED);
    server.step(vec![log(key, 0, "one")]);
    server.step(vec![log(key, 0, "two")]);
    let received = server.ask(r#"CANCEL {"stream_id":9,"model":"tiny","streams":[3]}"#);
    let (log, end) = received.split_once('\n').unwrap();
    assert!(
        log.contains("two") && end.contains("cancelled"),
        "{received}"
    );
    assert_eq!(server.outputs(), ["cancel 0"]);
}

#[test]
fn lm_972_without_the_feature_status_nothing_is_reported() {
    let mut server = Server::agreed(r#"["controllers"]"#);
    let key = server.open(STEERED);
    assert_eq!(server.step(vec![log(key, 0, "one")]), [""; 0]);
}

#[test]
fn lm_973_a_fork_is_a_sample_that_its_first_item_announces() {
    let mut server = server();
    let key = server.open(STEERED);
    server.step(vec![token(key, 0, 5)]);
    let received = server.step(vec![
        branch(key, 1, forked(0, 1)),
        token(key, 1, 6),
        token(key, 0, 7),
    ]);
    let mut items = received[0].split("},{");
    assert_eq!(
        items.next(),
        Some(r#"TOKEN [{"stream_id":3,"sample":1,"fork_of":0,"inherited":1"#)
    );
    assert!(items.next().unwrap().ends_with(r#""6":-0.5},"sample":1"#));
    assert!(items.next().unwrap().ends_with(r#""7":-0.5},"sample":0}]"#));
    // The last of them to end is the end of the stream.
    let end = |one| branch(key, one, ended(StreamFinish::Controller));
    let received = server.step(vec![end(0), token(key, 0, 8)]);
    let expected = r#"TOKEN [{"stream_id":3,"finish_reason":null,"sample":0,"sample_end":"stop","stop_by":"controller"}]"#;
    assert_eq!(received, [expected]);
    assert_eq!(server.session.live(), 1);
    let received = server.step(vec![branch(key, 2, forked(1, 2)), end(1)]);
    assert!(received[0].contains(r#""sample":2,"fork_of":1,"inherited":2"#));
    let received = server.step(vec![end(2)]);
    assert!(received[0].contains(r#""finish_reason":"stop","sample":2,"sample_end":"stop""#));
    assert!(received[0].contains(r#""completion_tokens":3"#));
    assert_eq!((server.session.live(), server.outputs().len()), (0, 0));
}

#[test]
fn lm_973_forks_are_numbered_after_the_samples_that_were_asked_for() {
    let mut server = Server::agreed(r#"["controllers","samples"]"#);
    server.ask(&STEERED.replace("\"max", "\"n\":2,\"max"));
    let keys: Vec<_> = server.started.iter().map(|start| start.stream).collect();
    let received = server.step(vec![
        branch(keys[0], 1, forked(0, 0)),
        branch(keys[1], 1, forked(0, 0)),
        log(keys[1], 1, "x"),
    ]);
    assert!(
        received[0].contains(r#""sample":2,"fork_of":0"#),
        "{received:?}"
    );
    assert!(
        received[0].contains(r#""sample":3,"fork_of":1"#),
        "{received:?}"
    );
}

/// LM-501: a failing fork ends alone, and its stream once.
#[test]
fn lm_973_the_failure_of_a_fork_ends_that_sample_alone() {
    let mut server = server();
    let key = server.open(STEERED);
    server.step(vec![branch(key, 1, forked(0, 0))]);
    let error = || BranchEvent::Failed(LmtpError::new(LmtpReason::ControllerFailed, "it trapped"));
    let received = server.step(vec![branch(key, 1, error())]);
    let expected = r#"TOKEN [{"stream_id":3,"finish_reason":null,"sample":1,"sample_end":"error","sample_error":"it trapped","code":"controller_failed"}]"#;
    assert_eq!(received, [expected]);
    assert_eq!(server.step(vec![branch(key, 1, error())]), [""; 0]);
    let received = server.step(vec![branch(key, 0, error())]);
    assert!(
        received[0]
            .contains(r#""error":"it trapped","code":"controller_failed","retryable":false"#)
    );
    assert_eq!(server.session.live(), 0);
}

#[test]
fn lm_971_a_failing_controller_leaves_other_streams_alone() {
    let mut server = server();
    let key = server.open(STEERED);
    let other = server.open(r#"GENERATE {"stream_id":4,"model":"tiny","prompt":[1]}"#);
    let error = LmtpError::new(LmtpReason::ControllerFailed, "tag no not found");
    let received = server.step(vec![(key, StreamPiece::Failed(error)), (other, piece(5))]);
    assert!(received[0].contains(r#""error":"tag no not found","code":"controller_failed""#));
    assert!(received[0].contains(r#""token":5,"stream_id":4"#));
    assert_eq!(server.session.live(), 1);
}

/// Works of other streams do not report such things; if one did, nothing would happen.
#[test]
fn lm_972_events_of_streams_without_a_controller_are_ignored() {
    let mut server = server();
    for text in [
        r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1]}"#,
        r#"SCORE {"stream_id":4,"model":"tiny","prompt":[1],"scored":[1],"controller":"x"}"#,
    ] {
        let key = server.open(text);
        let end = ended(StreamFinish::Stop);
        for event in [forked(0, 0), BranchEvent::Backtrack(1), end] {
            assert_eq!(server.step(vec![branch(key, 0, event)]), [""; 0]);
        }
        assert_eq!(server.step(vec![token(key, 1, 5)]), [""; 0]);
    }
    assert_eq!(server.session.live(), 2);
}

/// LM-963, LM-965: items without a token are numbered and sent again as others are.
#[test]
fn lm_965_backtracks_and_forks_are_sent_again() {
    let mut server = Server::agreed(r#"["controllers","resume"]"#);
    let key = server.open(STEERED);
    server.step(vec![
        token(key, 0, 5),
        branch(key, 0, BranchEvent::Backtrack(1)),
        branch(key, 1, forked(0, 0)),
    ]);
    assert!(server.session.lose(server.now));
    server.poll();
    server.session.step(vec![token(key, 1, 6)], server.now);
    let mut next = Server::agreed(r#"["controllers","resume"]"#);
    assert_eq!(
        next.send(r#"RESUME {"stream_id":8,"model":"tiny","session":"s_0","streams":[{"stream_id":3,"after_seq":0}]}"#),
        None
    );
    let moved = next.session.resumed(Some(server.session), next.now);
    let received = next.received().join("\n");
    assert_eq!(moved.len(), 1);
    let expected = [
        r#"{"stream_id":3,"backtrack":1,"seq":1}"#,
        r#"{"stream_id":3,"sample":1,"fork_of":0,"inherited":0,"seq":2}"#,
        r#""sample":1,"seq":3}"#,
    ];
    for item in expected {
        assert!(received.contains(item), "{item} in {received}");
    }
    // The branches have moved with the stream.
    let key = moved[0].1;
    let end = |one| branch(key, one, ended(StreamFinish::Stop));
    let received = next.step(vec![end(1), end(0)]);
    assert!(
        received[0].contains(r#""finish_reason":"stop","sample":0,"sample_end":"stop","seq":5"#)
    );
    assert_eq!(next.session.live(), 0);
}

/// LM-942: a buffer has what is left of the first sample.
#[test]
fn lm_942_a_kept_output_has_no_void_tokens() {
    let mut server = Server::agreed(r#"["controllers","buffers"]"#);
    let key = server.open(&STEERED.replace("\"max", "\"keep\":\"b\",\"max"));
    let received = server.step(vec![
        token(key, 0, 5),
        token(key, 0, 6),
        branch(key, 0, BranchEvent::Backtrack(1)),
        branch(key, 1, forked(0, 1)),
        token(key, 1, 7),
        branch(key, 1, ended(StreamFinish::Stop)),
        branch(key, 0, ended(StreamFinish::Stop)),
    ]);
    assert!(
        received[0].contains(r#""buffer":{"id":"b","len":2}"#),
        "{received:?}"
    );
}
