//! Sections 9 and 10 of the Evergreen page: failed actions, statuses, cancelling, draining.

use std::sync::Arc;

use prost_types::Any;

use super::harness::*;
use crate::code::Code;
use crate::evergreen::{
    Action, ErrorScope, Fragment, MetadataMode, Payload, Reason, Status, WireMessage,
};
use crate::session::{CancelledBy, Config, SessionMachine, SessionOutput, Side};

fn partial() -> SessionMachine {
    server_with(|config, _| config.partial_failure = true)
}

fn no(reason: Reason) -> Status {
    Status::new(reason, "no")
}

/// Everything that a server session sends now, as its client sees it.
fn through(server: &mut SessionMachine, client: &mut SessionMachine) {
    while let Some(message) = server.next_message(T0) {
        let mut bytes = Vec::new();
        crate::evergreen::protobuf::encode(&message, &mut bytes);
        client
            .handle(crate::evergreen::protobuf::decode(&*bytes).unwrap(), T0)
            .unwrap();
    }
}

/// EV-921
#[test]
fn ev_930_a_failed_action_ends_its_outputs_and_leaves_the_others_alone() {
    let mut session = partial();
    let list = [
        action("f", "", "a=fresh b=begun c=done __status__=s"),
        action("g", "", "out=o"),
    ];
    session.handle(actions(list), T0).unwrap();
    let all = starts(&mut session);
    let names: Vec<&str> = all[0].outputs.iter().map(|(name, _)| &**name).collect();
    assert_eq!(
        names,
        ["a", "b", "c"],
        "__status__ is written by the machine"
    );
    let text = of("text/plain", "").unwrap();
    session
        .nodes()
        .write(all[0].outputs[1].1, &text, "half".into())
        .unwrap();
    session
        .nodes()
        .write(all[0].outputs[2].1, &text, "whole".into())
        .unwrap();
    session.nodes().end(all[0].outputs[2].1, &text).unwrap();
    session.calls().fail(all[0].action, no(Reason::BadConfig));
    assert!(session.aborted().is_none());
    session
        .nodes()
        .write(all[1].outputs[0].1, &text, "fine".into())
        .unwrap();
    session.calls().finish(all[1].action);
    let mut client = SessionMachine::new(Side::Client, Config::default(), T0);
    through(&mut session, &mut client);
    let failed = Stop::Failed(Reason::BadConfig);
    assert_eq!(content(&mut client, "fresh"), (vec![], failed.clone()));
    assert_eq!(
        content(&mut client, "begun"),
        (vec![item("text/plain", "", "half")], failed.clone())
    );
    assert_eq!(content(&mut client, "s"), (vec![], failed));
    assert_eq!(
        (texts(&mut client, "done"), texts(&mut client, "o")),
        (vec!["whole".into()], vec!["fine".into()])
    );
}

#[test]
fn ev_930_a_reader_of_a_failed_node_fails_with_its_status_at_that_point() {
    let mut session = partial();
    let message = WireMessage {
        fragments: vec![tree("t", 0, &["p", "o"]), leaf("p", 0, "before")].into(),
        actions: vec![action("f", "", "out=o"), action("g", "in=t", "out=o2")],
        wire_bytes: 0,
    };
    session.handle(message, T0).unwrap();
    let all = starts(&mut session);
    let cursor = session
        .nodes()
        .open(all[1].inputs[0].1, Some(all[1].action));
    let mut items = Vec::new();
    drain(&mut session, cursor, &mut items);
    assert_eq!(items.len(), 1, "content before the failed node is read");
    session
        .calls()
        .fail(all[0].action, no(Reason::PromptTooLong));
    let crate::session::CursorRead::Failed(status) = session.nodes().read(cursor) else {
        panic!("it fails")
    };
    assert_eq!(
        (reason(&status), status.detail("upstream")),
        (Reason::PromptTooLong, Some("o"))
    );
}

#[test]
fn ev_930_errors_of_session_scope_still_abort() {
    let long = "x".repeat(257);
    let wrong = action("SET_TTL", &format!("node=n ttl={long}"), "");
    assert_eq!(act(&mut partial(), wrong), Err(Reason::BadId));
    // What a function reports is about its action, also where the words are those of another session's end.
    for found in [Reason::BadConfig, Reason::Function, Reason::GoingAway] {
        let mut session = partial();
        act(&mut session, action("f", "", "out=o")).unwrap();
        let start = start(&mut session);
        session.calls().fail(start.action, no(found));
        assert!(session.aborted().is_none(), "{found:?}");
        assert_eq!(content(&mut session, "o").1, Stop::Failed(found));
    }
}

#[test]
fn ev_931_a_status_is_the_first_fragment_or_the_last_or_a_trees_last_child() {
    let mut session = partial();
    act(&mut session, action("f", "", "fresh=a begun=b tree=t")).unwrap();
    let start = start(&mut session);
    let [fresh, begun, root] = [0, 1, 2].map(|at| start.outputs[at].1);
    let text = of("text/plain", "").unwrap();
    session.nodes().write(begun, &text, "half".into()).unwrap();
    let child = session.nodes().make(Some(start.action)).unwrap();
    let open_child = session.id(child).unwrap().clone();
    session.nodes().list(root, &[child]).unwrap();
    session.nodes().write(child, &text, "part".into()).unwrap();
    sent(&mut session);
    session.calls().fail(start.action, no(Reason::Function));
    let all = sent(&mut session);
    let status = |fragment: &Fragment| {
        matches!(
            fragment
                .chunk
                .as_ref()
                .and_then(|chunk| chunk.payload.as_ref()),
            Some(Payload::Status(Some(_)))
        )
    };
    let of_id = |id: &str| -> Vec<&Fragment> {
        all.iter().filter(|fragment| &*fragment.id == id).collect()
    };
    let a = of_id("a");
    assert!(matches!(a[..], [only] if only.seq == 0 && only.last && status(only)));
    let b = of_id("b");
    assert!(matches!(b[..], [only] if only.seq == 1 && only.last && status(only)));
    let t = of_id("t");
    let [lists, end] = t[..] else { panic!("{t:?}") };
    assert!(!lists.last && end.last && end.chunk.is_none() && lists.children.len() == 1);
    let retained = of_id(&lists.children[0]);
    assert!(matches!(retained[..], [only] if only.seq == 0 && only.last && status(only)));
    let c = of_id(&open_child);
    assert!(
        matches!(c[..], [only] if only.last && status(only)),
        "its children end as well"
    );
    assert_eq!(
        all.last().map(|fragment| &*fragment.id),
        Some("t"),
        "the root ends last"
    );
    let _ = fresh;

    // On the wire it is metadata and an encoded google.rpc.Status.
    let mut bytes = Vec::new();
    crate::evergreen::protobuf::encode(&fragments([b[0].clone()]), &mut bytes);
    let wire: crate::evergreen::wire::SessionMessage = prost::Message::decode(&*bytes).unwrap();
    let chunk = wire.node_fragments[0].chunk_fragment.clone().unwrap();
    assert_eq!(
        chunk.metadata.unwrap().mimetype,
        "application/x-protobuf; type=google.rpc.Status"
    );
    let Some(crate::evergreen::wire::Payload::Data(data)) = chunk.payload else {
        panic!("data")
    };
    let read = Status::decode(&data).unwrap().unwrap();
    assert_eq!(
        (reason(&read), read.detail("action")),
        (Reason::Function, Some("f"))
    );
}

/// EV-812
#[test]
fn ev_931_a_clients_status_is_accepted_in_every_mode() {
    for mode_of in [
        MetadataMode::Strict,
        MetadataMode::Lenient,
        MetadataMode::PerChunk,
    ] {
        let mut session = mode(mode_of);
        let mut failed = leaf("p", 1, "");
        failed.chunk.as_mut().unwrap().payload =
            Some(Payload::Status(Some(Arc::new(no(Reason::RefFetch)))));
        feed(&mut session, [failed, more("p", 0, "a")]).unwrap();
        assert_eq!(
            content(&mut session, "p"),
            (
                vec![item("text/plain", "", "a")],
                Stop::Failed(Reason::RefFetch)
            )
        );
    }
}

/// EV-801
#[test]
fn ev_931_a_clients_status_counts_against_the_quota() {
    let mut session = server_with(|_, limits| limits.retained_bytes = 2_000);
    let mut status = no(Reason::Function);
    status.message = "x".repeat(3_000);
    let mut failed = leaf("p", 0, "");
    failed.chunk.as_mut().unwrap().payload = Some(Payload::Status(Some(Arc::new(status))));
    assert_eq!(feed(&mut session, [failed]), Err(Reason::RetainedLimit));
}

#[test]
fn ev_921_the_status_output_ends_with_the_action_and_cancels_it() {
    let mut session = server();
    act(&mut session, action("f", "", "__status__=s")).unwrap();
    let first = start(&mut session);
    assert!(first.outputs.is_empty());
    session.calls().finish(first.action);
    let all = sent(&mut session);
    let [only] = &all[..] else { panic!("{all:?}") };
    assert!(
        only.last
            && matches!(
                only.chunk.as_ref().unwrap().payload,
                Some(Payload::Status(None))
            ),
        "OK"
    );
    let (items, stop) = content(&mut session, "s");
    assert_eq!(
        (items[0].mimetype.as_str(), stop),
        ("application/x-protobuf; type=google.rpc.Status", Stop::End)
    );

    act(&mut session, action("f", "", "__status__=s2")).unwrap();
    let second = start(&mut session);
    act(&mut session, action("CANCEL", "action=s2", "")).unwrap();
    assert!(
        matches!(outputs(&mut session)[..], [SessionOutput::Cancel { action, .. }] if action == second.action)
    );
}

#[test]
fn ev_913_cancel_stops_one_action_and_nothing_else() {
    let mut session = server();
    session
        .handle(
            actions([action("f", "", "out=o meta=m"), action("g", "", "out=x")]),
            T0,
        )
        .unwrap();
    let all = starts(&mut session);
    act(&mut session, action("CANCEL", "action=o", "result=r1")).unwrap();
    let events = outputs(&mut session);
    assert!(
        matches!(events[..], [SessionOutput::Cancel { action, by: CancelledBy::Peer }] if action == all[0].action),
        "{events:?}"
    );
    // The shell writes the content of `meta` and finishes the action; the outputs end.
    let json = of("application/json", "").unwrap();
    session
        .nodes()
        .write(all[0].outputs[1].1, &json, "{}".into())
        .unwrap();
    session.calls().finish(all[0].action);
    assert!(session.aborted().is_none());
    assert_eq!(
        (texts(&mut session, "o"), texts(&mut session, "m")),
        (vec!["".to_owned()], vec!["{}".to_owned()])
    );
    assert_eq!(session.calls().unfinished(), 1);
    for (target, output) in [("o", "r2"), ("never-heard-of", "r3"), ("r1", "r4")] {
        act(
            &mut session,
            action(
                "CANCEL",
                &format!("action={target}"),
                &format!("result={output}"),
            ),
        )
        .unwrap();
        assert_eq!(
            texts(&mut session, output),
            [r#"{"cancelled":false}"#],
            "{target}: no-op"
        );
    }
    assert_eq!(texts(&mut session, "r1"), [r#"{"cancelled":true}"#]);
}

/// EV-974
#[test]
fn ev_913_a_client_cancels_by_an_output_id() {
    let mut client = SessionMachine::new(Side::Client, Config::default(), T0);
    let mut server = server();
    let node = client.nodes().node("o").unwrap();
    let call = crate::session::ActionRequest {
        name: "f".into(),
        outputs: vec![("out".into(), node)],
        ..Default::default()
    };
    let key = client.calls().call(call).unwrap();
    client.calls().cancel(key);
    through(&mut client, &mut server);
    let events = outputs(&mut server);
    assert!(
        matches!(
            events[..],
            [
                SessionOutput::Start(_),
                SessionOutput::Cancel {
                    by: CancelledBy::Peer,
                    ..
                }
            ]
        ),
        "{events:?}"
    );
}

/// EV-107
#[test]
fn ev_914_listings_are_answered_by_the_shell() {
    let mut session = server();
    act(&mut session, action("LIST_ACTIONS", "", "actions=l")).unwrap();
    let start = start(&mut session);
    assert_eq!((&*start.name, start.outputs.len()), ("LIST_ACTIONS", 1));
}

#[test]
fn ev_960_a_draining_session_refuses_new_actions_and_finishes_the_others() {
    let mut session = partial();
    act(&mut session, action("f", "", "out=o")).unwrap();
    let start = start(&mut session);
    session.calls().drain();
    act(&mut session, action("g", "", "out=late")).unwrap();
    assert_eq!(
        content(&mut session, "late").1,
        Stop::Failed(Reason::GoingAway)
    );
    assert_eq!(session.calls().unfinished(), 1);
    session.calls().finish(start.action);
    session.abort(no(Reason::GoingAway));
    let status = session.aborted().unwrap();
    assert_eq!((status.code, status.code.grpc()), (Code::Unavailable, 14));
    assert!(status.retry_after.is_some());
}

#[test]
fn ev_904_the_session_counts_fragments_bytes_and_actions() {
    let mut session = partial();
    feed(&mut session, [leaf("p", 0, "four"), leaf("p", 0, "four")]).unwrap();
    session
        .handle(
            actions([action("f", "", "out=o"), action("g", "", "out=x")]),
            T0,
        )
        .unwrap();
    let all = starts(&mut session);
    session
        .nodes()
        .write(
            all[0].outputs[0].1,
            &of("text/plain", "").unwrap(),
            "sixsix".into(),
        )
        .unwrap();
    session.calls().finish(all[0].action);
    session.calls().fail(all[1].action, no(Reason::Function));
    let fragments_out = sent(&mut session).len() as u64;
    let stats = session.stats();
    assert_eq!(
        (stats.fragments_in, stats.bytes_in, stats.duplicates),
        (2, 8, 1)
    );
    assert_eq!(
        (stats.fragments_out, stats.actions, stats.failures),
        (fragments_out, 2, 1)
    );
    assert!(stats.bytes_out >= 6);
}

/// EV-510, EV-960
#[test]
fn ev_904_actions_refused_before_they_ran_are_reported_to_the_shell() {
    for partial in [true, false] {
        for drains in [true, false] {
            let mut session = server_with(|config, limits| {
                config.partial_failure = partial;
                limits.max_actions = 1;
            });
            act(&mut session, action("f", "", "o=1")).unwrap();
            start(&mut session);
            if drains {
                session.calls().drain();
            }
            let refused = act(&mut session, action("g", "", "o=2"));
            assert_eq!(refused.is_ok(), partial);
            let received: Vec<SessionOutput> = outputs(&mut session);
            let expect = if drains {
                Reason::GoingAway
            } else {
                Reason::ActionLimit
            };
            assert!(
                matches!(&received[0], SessionOutput::Refused(status) if reason(status) == expect)
            );
            let closes = received
                .iter()
                .any(|output| matches!(output, SessionOutput::Close(_)));
            assert_eq!(
                (received.len(), closes),
                (1 + usize::from(!partial), !partial)
            );
        }
    }
    let mut session = partial();
    act(&mut session, action("DROP", "what=x", "result=r")).unwrap();
    let received = outputs(&mut session);
    assert!(
        matches!(&received[..], [SessionOutput::Refused(status)] if reason(status) == Reason::UnknownParam)
    );
}

/// EV-903
#[test]
fn ev_901_ev_902_the_table_of_reasons_matches_the_specification() {
    let mut named = 0;
    for (code, scope, close, names) in REASONS {
        for name in names.split(' ') {
            let reason = Reason::from_name(name).expect(name);
            assert_eq!(
                (reason.code().grpc(), reason.scope(), reason.close()),
                (*code, *scope, *close),
                "{name}"
            );
            named += 1;
        }
    }
    assert_eq!(named, Reason::ALL.len());
}

/// Code number, scope, close code, reasons: section 9.
const REASONS: &[(u8, ErrorScope, u16, &str)] = &[
    (
        3,
        ErrorScope::Session,
        1008,
        "BAD_ID BAD_SEQ SEQ_PAST_FINAL NODE_KIND NODE_OWNER CYCLE ACTION_CYCLE",
    ),
    (
        3,
        ErrorScope::Session,
        1008,
        "METADATA_MISSING METADATA_REPEATED METADATA_CONFLICT",
    ),
    (3, ErrorScope::Session, 1007, "BAD_MESSAGE"),
    (
        3,
        ErrorScope::Action,
        1008,
        "DUPLICATE_PARAM UNKNOWN_PARAM MISSING_INPUT PARAM_LIMIT BAD_NAME TARGET_REQUIRED",
    ),
    (
        3,
        ErrorScope::Action,
        1008,
        "UNKNOWN_CONFIG DUPLICATE_CONFIG BAD_CONFIG BAD_ROLE BAD_TEXT BAD_TOKENS",
    ),
    (
        3,
        ErrorScope::Action,
        1008,
        "UNSUPPORTED_MIMETYPE PROMPT_TOO_LONG REF_SCHEME",
    ),
    (
        5,
        ErrorScope::Action,
        1008,
        "UNKNOWN_ACTION UNKNOWN_TARGET UNKNOWN_CONTROLLER REF_NOT_FOUND",
    ),
    (5, ErrorScope::Connection, 1008, "NO_SESSION"),
    (6, ErrorScope::Session, 1008, "OUTPUT_NOT_NEW"),
    (7, ErrorScope::Action, 1008, "REF_DENIED"),
    (8, ErrorScope::Session, 1009, "MESSAGE_TOO_LARGE"),
    (
        8,
        ErrorScope::Session,
        1008,
        "RETAINED_LIMIT NODE_LIMIT CHILD_LIMIT FRAGMENT_LIMIT DEPTH_LIMIT REORDER_LIMIT",
    ),
    (8, ErrorScope::Session, 1008, "SLOW_READER"),
    (
        8,
        ErrorScope::Action,
        1008,
        "FLATTEN_LIMIT ACTION_LIMIT REF_LIMIT",
    ),
    (
        9,
        ErrorScope::Action,
        1008,
        "INCOMPLETE_INPUT DEADLOCK NO_TEMPLATE NODE_RELEASED",
    ),
    (1, ErrorScope::Action, 1008, "CANCELLED"),
    (4, ErrorScope::Action, 1011, "DEADLINE"),
    (4, ErrorScope::Session, 1001, "IDLE_TIMEOUT"),
    (10, ErrorScope::Connection, 1008, "SUPERSEDED"),
    (16, ErrorScope::Session, 1008, "REVOKED"),
    (13, ErrorScope::Action, 1011, "FUNCTION CONTROLLER"),
    // Not on the Evergreen page: limits of a key (OA-906).
    (8, ErrorScope::Action, 1013, "RATE_LIMITED"),
    (14, ErrorScope::Action, 1013, "REF_FETCH ENGINE_BUSY"),
    (14, ErrorScope::Session, 1001, "GOING_AWAY"),
    // Reasons of ours that are not on the page.
    (14, ErrorScope::Action, 1011, "TRUNCATED"),
    (12, ErrorScope::Action, 1008, "UNIMPLEMENTED"),
];

/// EV-913, EV-924
#[test]
fn ev_960_actions_that_end_work_are_accepted_while_draining_and_at_the_limit() {
    let full = |drained: bool| {
        let mut session = server_with(|_, limits| limits.max_actions = 1);
        feed(&mut session, [leaf("a", 0, "A"), leaf("l", 0, "\"5s\"")]).unwrap();
        act(&mut session, action("f", "", "out=o")).unwrap();
        if drained {
            session.calls().drain();
        }
        session
    };
    let duration = Any {
        type_url: "t/google.protobuf.Duration".into(),
        value: Vec::new(),
    };
    let short = Action {
        configs: vec![duration],
        ..action("SET_TTL", "node=a", "")
    };
    let later = || action("SET_TTL", "node=a ttl=l", "");
    for drained in [false, true] {
        for one in [
            action("CANCEL", "action=o", ""),
            action("DROP", "node=a", ""),
            action("FINISH", "", ""),
            short.clone(),
        ] {
            assert_eq!(act(&mut full(drained), one.clone()), Ok(()), "{one:?}");
        }
        let work = act(&mut full(drained), action("g", "", ""));
        let expect = if drained {
            Reason::GoingAway
        } else {
            Reason::ActionLimit
        };
        assert_eq!(work, Err(expect));
        // An action that may have to wait counts against the limit.
        let waits = act(&mut full(drained), later());
        assert_eq!(waits, Err(Reason::ActionLimit));
    }
    let mut session = server();
    session.calls().drain();
    feed(&mut session, [leaf("a", 0, "A"), leaf("l", 0, "\"5s\"")]).unwrap();
    assert_eq!(act(&mut session, later()), Ok(()));
}

/// EV-930
#[test]
fn ev_508_a_tree_without_room_for_its_status_aborts_the_session() {
    let mut session = server_with(|config, limits| {
        config.partial_failure = true;
        limits.max_nodes = 2;
    });
    act(&mut session, action("f", "", "out=o")).unwrap();
    let run = start(&mut session);
    let child = session.nodes().make(Some(run.action)).unwrap();
    session.nodes().list(run.outputs[0].1, &[child]).unwrap();
    session.calls().fail(run.action, no(Reason::BadConfig));
    assert_eq!(
        session.aborted().and_then(|status| status.known()),
        Some(Reason::NodeLimit)
    );
}
