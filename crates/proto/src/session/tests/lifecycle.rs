//! Section 2 of the Evergreen page: the life cycle of a session.

use std::sync::Arc;

use super::harness::*;
use crate::code::Code;
use crate::evergreen::{Fragment, MetadataMode, Reason, Status, WireMessage};
use crate::session::{
    ActionStart, CancelledBy, Config, CursorId, CursorRead, SessionMachine, SessionOutput, Side,
};
use crate::time::Time;

fn closed(session: &mut SessionMachine) -> Option<Option<Arc<Status>>> {
    outputs(session)
        .into_iter()
        .find_map(|output| match output {
            SessionOutput::Close(status) => Some(status),
            _ => None,
        })
}

#[test]
fn ev_101_ev_106_one_machine_is_one_session_and_either_side_may_abort_it() {
    for side in [Side::Client, Side::Server] {
        let mut session = SessionMachine::new(side, Config::default(), T0);
        feed(&mut session, [leaf("p", 0, "x")]).unwrap();
        session.abort(Status::new(Reason::Cancelled, "enough"));
        let status = closed(&mut session).unwrap().unwrap();
        assert_eq!(reason(&status), Reason::Cancelled);
        assert_eq!(session.retained_bytes(), 0, "all nodes are dropped");
        assert_eq!(
            feed(&mut session, [leaf("", 0, "x")]),
            Ok(()),
            "nothing is checked any more"
        );
        assert!(outputs(&mut session).is_empty() && session.next_message(T0).is_none());
    }
}

#[test]
fn ev_102_order_inside_a_message_has_no_meaning_and_an_empty_one_is_legal() {
    let list = [
        tree("t", 0, &["a", "o1"]),
        more("a", 0, "1"),
        leaf("a", 1, "2"),
    ];
    let calls = [
        action("f", "in=t", "out=o2"),
        action("g", "in=a", "out=o1"),
        action("LIST_ACTIONS", "", "actions=l"),
    ];
    let mut seen = Vec::new();
    for order in orders(&list) {
        for actions in orders(&calls) {
            let mut session = server();
            session.handle(WireMessage::default(), T0).unwrap();
            session
                .handle(
                    WireMessage {
                        fragments: order.clone().into(),
                        actions,
                        wire_bytes: 0,
                    },
                    T0,
                )
                .unwrap();
            let mut names: Vec<String> = starts(&mut session)
                .iter()
                .map(|start| start.name.to_string())
                .collect();
            names.sort();
            seen.push((names, texts(&mut session, "a"), content(&mut session, "t")));
        }
    }
    seen.dedup();
    assert_eq!(seen.len(), 1);
}

#[test]
fn ev_104_ev_105_sessions_share_nothing_and_ids_are_free_again() {
    let (mut one, mut other) = (server(), server());
    feed(&mut one, [leaf("p", 0, "one")]).unwrap();
    feed(&mut other, [leaf("p", 0, "other")]).unwrap();
    assert_eq!(
        (texts(&mut one, "p"), texts(&mut other, "p")),
        (vec!["one".into()], vec!["other".into()])
    );
    one.abort(Status::new(Reason::Cancelled, "enough"));
    assert_eq!(one.retained_bytes(), 0);
    assert_eq!(texts(&mut other, "p"), ["other"]);
    let mut next = server();
    feed(&mut next, [leaf("p", 0, "next")]).unwrap();
    assert_eq!(texts(&mut next, "p"), ["next"]);
}

/// EV-901
#[test]
fn ev_107_a_failing_action_aborts_the_session_and_all_others() {
    let mut session = server();
    session
        .handle(
            actions([action("f", "", "out=a"), action("g", "in=p", "out=b")]),
            T0,
        )
        .unwrap();
    let all = starts(&mut session);
    let text = of("text/plain", "").unwrap();
    session
        .nodes()
        .write(all[1].outputs[0].1, &text, "not sent".into())
        .unwrap();
    let cursor = session
        .nodes()
        .open(all[1].inputs[0].1, Some(all[1].action));
    assert!(matches!(session.nodes().read(cursor), CursorRead::Pending));
    session
        .calls()
        .fail(all[0].action, Status::new(Reason::BadConfig, "no"));
    let status = closed(&mut session).unwrap().unwrap();
    assert_eq!(
        (reason(&status), status.detail("action")),
        (Reason::BadConfig, Some("f"))
    );
    assert!(
        session.next_message(T0).is_none(),
        "queued output is dropped"
    );
    assert!(matches!(session.nodes().read(cursor), CursorRead::Failed(found) if found == status));
    // The first abort wins.
    session
        .calls()
        .fail(all[1].action, Status::new(Reason::Function, "late"));
    assert!(outputs(&mut session).is_empty());
    assert_eq!(session.abort(Status::new(Reason::Function, "late")), status);
}

#[test]
fn ev_109_after_half_close_running_actions_finish_and_the_session_ends_ok() {
    let mut session = server();
    feed(&mut session, [leaf("p", 0, "x")]).unwrap();
    act(&mut session, action("f", "in=p", "out=o")).unwrap();
    let start = start(&mut session);
    session.end_of_input(T0);
    assert_eq!(closed(&mut session), None, "an action runs");
    feed(&mut session, [leaf("", 0, "x")]).unwrap();
    assert_eq!(
        read_node(&mut session, start.inputs[0].1, Some(start.action)).1,
        Stop::End
    );
    let text = of("text/plain", "").unwrap();
    session
        .nodes()
        .write(start.outputs[0].1, &text, "y".into())
        .unwrap();
    session.calls().finish(start.action);
    assert_eq!(closed(&mut session), None, "an output is not sent");
    assert_eq!(sent(&mut session).len(), 1);
    assert_eq!(closed(&mut session), Some(None));
    let mut idle = server();
    idle.end_of_input(T0);
    assert_eq!(closed(&mut idle), Some(None), "nothing to do: over at once");
}

/// Handles `message`, opens the inputs of each action, and reports that all of them wait.
fn parked(session: &mut SessionMachine, message: WireMessage) -> Vec<(ActionStart, Vec<CursorId>)> {
    session.handle(message, T0).unwrap();
    let mut all = Vec::new();
    for start in starts(session) {
        let cursors: Vec<CursorId> = start
            .inputs
            .iter()
            .map(|(_, node)| session.nodes().open(*node, Some(start.action)))
            .collect();
        for cursor in &cursors {
            drain(session, *cursor, &mut Vec::new());
        }
        session.calls().waiting(start.action, true);
        all.push((start, cursors));
    }
    all
}

#[test]
fn ev_110_content_that_can_no_longer_arrive_fails_its_reader_and_is_named() {
    for (list, missing) in [
        (vec![], "p"),
        (vec![more("p", 0, "a")], "p@1"),
        (vec![more("p", 0, "a"), leaf("p", 2, "c")], "p@1"),
        (vec![tree("p", 0, &["c1", "c2"]), leaf("c1", 0, "x")], "c2"),
        (vec![branch("p", 0, &["c1"]), leaf("c1", 0, "x")], "p@1"),
    ] {
        for parks_first in [true, false] {
            let mut session = server();
            let message = WireMessage {
                fragments: list.clone().into(),
                actions: vec![action("f", "in=p", "out=o")],
                wire_bytes: 0,
            };
            let all = if parks_first {
                parked(&mut session, message)
            } else {
                session.handle(message, T0).unwrap();
                Vec::new()
            };
            session.end_of_input(T0);
            let events = outputs(&mut session);
            let cursor = if let Some((_, cursors)) = all.first() {
                assert!(
                    matches!(events[..], [SessionOutput::Ready(id)] if id == cursors[0]),
                    "{events:?}"
                );
                cursors[0]
            } else {
                let node = session.nodes().node("p").unwrap();
                session.nodes().open(node, None)
            };
            let mut items = Vec::new();
            let read = loop {
                match session.nodes().read(cursor) {
                    CursorRead::Piece(piece) => items.push(piece),
                    other => break other,
                }
            };
            let CursorRead::Failed(status) = read else {
                panic!("{missing}: {read:?}")
            };
            assert_eq!(
                (status.code, reason(&status)),
                (Code::FailedPrecondition, Reason::IncompleteInput)
            );
            assert!(
                status.message.contains(missing),
                "{} names {missing}",
                status.message
            );
        }
    }
}

#[test]
fn ev_110_at_most_16_missing_items_are_named_and_unread_ones_are_no_error() {
    let ids: Vec<String> = (0..40).map(|at| format!("missing{at}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let mut session = server();
    feed(&mut session, [tree("p", 0, &ids), leaf("read", 0, "x")]).unwrap();
    act(&mut session, action("f", "in=read other=p", "out=o")).unwrap();
    let start = start(&mut session);
    session.end_of_input(T0);
    assert_eq!(
        read_node(&mut session, start.inputs[0].1, Some(start.action)).1,
        Stop::End
    );
    let cursor = session.nodes().open(start.inputs[1].1, Some(start.action));
    let CursorRead::Failed(status) = session.nodes().read(cursor) else {
        panic!("it can never come")
    };
    assert_eq!(
        status.message.matches("missing").count(),
        16 + 1,
        "{}",
        status.message
    );
}

/// What is missing is searched within one budget for all readers that fail together: many readers of one large graph would
/// each search all of it.
#[test]
fn ev_110_many_readers_that_fail_together_search_the_graph_once() {
    const ROOTS: usize = 20;
    let children: Vec<String> = (0..1_000).map(|at| format!("c{at}")).collect();
    let mut session = server();
    // The parents share their children, of which only the last one is missing.
    for at in 0..ROOTS {
        let ids: Vec<&str> = children.iter().map(String::as_str).collect();
        feed(&mut session, [tree(&format!("p{at}"), 0, &ids)]).unwrap();
    }
    for id in &children[..children.len() - 1] {
        feed(&mut session, [leaf(id, 0, "x")]).unwrap();
    }
    let cursors: Vec<_> = (0..ROOTS)
        .map(|at| {
            let node = session.nodes().node(&format!("p{at}")).unwrap();
            let cursor = session.nodes().open(node, None);
            session.nodes().begin_turn();
            while let CursorRead::Piece(_) = session.nodes().read(cursor) {}
            cursor
        })
        .collect();
    session.end_of_input(T0);
    let mut named = 0;
    for cursor in cursors {
        let CursorRead::Failed(status) = session.nodes().read(cursor) else {
            panic!("it can never come")
        };
        assert_eq!(reason(&status), Reason::IncompleteInput);
        named += usize::from(status.message.contains("c999"));
        let unsearched = status.message.contains("more than could be searched");
        assert_ne!(status.message.contains("c999"), unsearched);
    }
    // Each search of one parent visits itself and its thousand children.
    assert_eq!(named, 9);
}

#[test]
fn ev_110_actions_that_wait_for_one_another_are_ended() {
    let replay = || actions([action("f", "in=b", "out=a"), action("g", "in=a", "out=b")]);
    let mut session = server();
    let all = parked(&mut session, replay());
    assert!(
        outputs(&mut session).is_empty(),
        "before half-close the client could still cancel"
    );
    session.end_of_input(T0);
    for (_, cursors) in &all {
        assert!(
            matches!(session.nodes().read(cursors[0]), CursorRead::Failed(status) if reason(&status) == Reason::Deadlock)
        );
    }

    // An action with other work may still resolve the deadlock; once it waits too, none of them can.
    let mut session = server();
    let all = parked(&mut session, replay());
    session.calls().waiting(all[0].0.action, false);
    session.end_of_input(T0);
    assert!(
        all.iter()
            .all(|(_, cursors)| matches!(session.nodes().read(cursors[0]), CursorRead::Pending))
    );
    session.calls().waiting(all[0].0.action, true);
    assert!(
        all.iter()
            .all(|(_, cursors)| matches!(session.nodes().read(cursors[0]), CursorRead::Failed(_)))
    );
}

#[test]
fn ev_110_an_action_that_waits_for_a_running_one_is_not_deadlocked() {
    let mut session = server();
    let chain = actions([
        action("f", "in=b", "out=a"),
        action("g", "in=c", "out=b"),
        action("h", "", "out=c"),
    ]);
    let all = parked(&mut session, chain);
    // The third action runs: it has no input, and its shell reports that it does not wait.
    session.calls().waiting(all[2].0.action, false);
    session.end_of_input(T0);
    assert!(
        all[..2]
            .iter()
            .all(|(_, cursors)| matches!(session.nodes().read(cursors[0]), CursorRead::Pending))
    );
    let text = of("text/plain", "").unwrap();
    session
        .nodes()
        .write(all[2].0.outputs[0].1, &text, "x".into())
        .unwrap();
    session.calls().finish(all[2].0.action);
    let mut items = Vec::new();
    assert_eq!(drain(&mut session, all[1].1[0], &mut items), Stop::End);
}

#[test]
fn ev_111_messages_and_running_actions_postpone_the_idle_timeout() {
    let half_hour = 30 * 60 * 1_000;
    let at = Time::from_millis;
    let idle_at = |session: &mut SessionMachine, now: u64| session.wake_at(at(now));
    let mut session = server();
    assert_eq!(idle_at(&mut session, 0), Some(at(half_hour)));
    session.handle(WireMessage::default(), at(1_000)).unwrap();
    assert_eq!(idle_at(&mut session, 1_000), Some(at(half_hour + 1_000)));
    session
        .handle(actions([action("f", "in=p", "out=o")]), at(2_000))
        .unwrap();
    let start = start(&mut session);
    assert_eq!(idle_at(&mut session, 2_000), None, "an action runs");
    session.tick(at(half_hour * 5));
    assert!(session.aborted().is_none());
    // An action that only waits is not running.
    let cursor = session.nodes().open(start.inputs[0].1, Some(start.action));
    assert!(matches!(session.nodes().read(cursor), CursorRead::Pending));
    session.calls().waiting(start.action, true);
    let now = half_hour * 5 + 10;
    assert_eq!(idle_at(&mut session, now), Some(at(now + half_hour)));
    session.tick(at(now + half_hour - 1));
    assert!(session.aborted().is_none());
    session.tick(at(now + half_hour));
    assert_eq!(reason(session.aborted().unwrap()), Reason::IdleTimeout);
}

#[test]
fn ev_950_deadlines_bound_the_session_and_an_action() {
    let at = Time::from_millis;
    let mut session = server_with(|config, _| config.deadline = Some(at(500)));
    act(&mut session, action("f", "", "out=o")).unwrap();
    assert_eq!(
        start(&mut session).deadline,
        Some(at(500)),
        "reaches the function"
    );
    assert_eq!(session.wake_at(T0), Some(at(500)));
    session.tick(at(499));
    assert!(session.aborted().is_none());
    session.tick(at(500));
    let status = session.aborted().unwrap();
    assert_eq!(
        (status.code, reason(status)),
        (Code::DeadlineExceeded, Reason::Deadline)
    );

    let options = crate::generated::sapwood::v1::ActionOptions {
        timeout: Some(prost_types::Duration {
            seconds: 0,
            nanos: 100_000_000,
        }),
    };
    let any = prost_types::Any {
        type_url: "type.googleapis.com/sapwood.v1.ActionOptions".into(),
        value: prost::Message::encode_to_vec(&options),
    };
    let timed = crate::evergreen::Action {
        configs: vec![any],
        ..action("f", "in=p", "out=o")
    };
    let mut session = server_with(|config, _| config.partial_failure = true);
    session
        .handle(actions([timed, action("g", "", "out=o2")]), at(50))
        .unwrap();
    let all = starts(&mut session);
    assert_eq!(
        (all[0].deadline, all[1].deadline),
        (Some(at(150)), None),
        "from its receipt, waiting included"
    );
    assert_eq!(session.wake_at(at(50)), Some(at(150)));
    session.tick(at(150));
    let events = outputs(&mut session);
    let late = |output: &SessionOutput| matches!(output, SessionOutput::Cancel { by: CancelledBy::Deadline, action } if *action == all[0].action);
    assert!(events.iter().any(late), "{events:?}");
    assert_eq!(content(&mut session, "o").1, Stop::Failed(Reason::Deadline));
    assert!(
        session.aborted().is_none() && session.calls().unfinished() == 1,
        "others go on"
    );
}

/// EV-972
#[test]
fn ev_972_a_client_reads_with_the_same_limits_and_an_early_end_is_truncation() {
    let mut client = SessionMachine::new(Side::Client, Config::default(), T0);
    let node = client.nodes().node("r").unwrap();
    let call = crate::session::ActionRequest {
        name: "f".into(),
        outputs: vec![("out".into(), node)],
        ..Default::default()
    };
    client.calls().call(call).unwrap();
    let cursor = client.nodes().open(node, None);
    assert!(matches!(client.nodes().read(cursor), CursorRead::Pending));
    feed(&mut client, [more("r", 0, "half of an ")]).unwrap();
    let mut items = Vec::new();
    drain(&mut client, cursor, &mut items);
    outputs(&mut client);
    client.end_of_input(T0);
    let events = outputs(&mut client);
    assert!(
        matches!(
            events[..],
            [SessionOutput::Ready(_), SessionOutput::Close(None)]
        ),
        "{events:?}"
    );
    let CursorRead::Failed(status) = client.nodes().read(cursor) else {
        panic!("never a normal end")
    };
    assert_eq!(
        (status.code, reason(&status)),
        (Code::Truncated, Reason::Truncated)
    );
    assert_eq!(
        content(&mut client, "r").0.len(),
        1,
        "received content can be read again"
    );

    let mut client = SessionMachine::new(Side::Client, Config::default(), T0);
    assert_eq!(
        feed(&mut client, [leaf("p", 0, "a"), leaf("p", 1, "b")]),
        Err(Reason::SeqPastFinal),
        "a server is not trusted"
    );
}

/// EV-303, EV-405
#[test]
fn ev_972_a_fragment_with_the_metadata_of_the_one_before_continues_its_item() {
    let (one, two) = (of("text/plain", ""), of("text/html", ""));
    let list = [
        chunk("p", 0, one.clone(), Some("a")),
        chunk("p", 1, one.clone(), Some("b")),
        chunk("p", 2, two.clone(), Some("c")),
        chunk("p", 3, two, Some("d")),
        Fragment {
            last: true,
            ..chunk("p", 4, one, Some("e"))
        },
    ];
    for order in orders(&list) {
        let config = Config {
            metadata: MetadataMode::PerItem,
            ..Config::default()
        };
        let mut client = SessionMachine::new(Side::Client, config, T0);
        feed(&mut client, order).unwrap();
        let expect = vec![
            item("text/plain", "", "ab"),
            item("text/html", "", "cd"),
            item("text/plain", "", "e"),
        ];
        assert_eq!(content(&mut client, "p"), (expect, Stop::End));
        // Metadata that is not retained is not charged.
        let again = 2 * (128 + "text/html".len() as u64) + 1;
        let retained = 5 * 64 + 5 + "text/plain".len() as u64 + 1;
        assert_eq!(client.retained_bytes(), retained + again);
    }
}

/// EV-110, EV-204
#[test]
fn ev_204_different_fragments_with_one_seq_are_named_in_the_readers_error() {
    let ended = |list: Vec<Fragment>| {
        let mut session = server();
        feed(&mut session, list).unwrap();
        let node = session.nodes().node("p").unwrap();
        let cursor = session.nodes().open(node, None);
        let mut items = Vec::new();
        assert_eq!(drain(&mut session, cursor, &mut items), Stop::Pending);
        session.end_of_input(T0);
        match session.nodes().read(cursor) {
            CursorRead::Failed(status) => status.message.clone(),
            other => panic!("{other:?}"),
        }
    };
    // A client that does not number its fragments: the second was to be the last.
    let message = ended(vec![more("p", 0, "one"), leaf("p", 0, "two")]);
    assert!(message.contains("missing: p@1"), "{message}");
    assert!(
        message.contains("two different fragments of node \"p\" with seq 0"),
        "{message}"
    );
    let message = ended(vec![more("p", 0, "one"), more("p", 0, "three")]);
    assert!(message.contains("with seq 0"), "{message}");
    // An equal retry is not reported as a different fragment.
    let message = ended(vec![more("p", 0, "one"), more("p", 0, "one")]);
    assert!(!message.contains("different"), "{message}");
}
