//! Section 6 of the Evergreen page: actions, without running functions.

use prost::Message as _;
use prost_types::{Any, Duration};

use super::harness::*;
use crate::evergreen::{Action, Fragment, Param, Reason, WireMessage};
use crate::generated::sapwood::v1::ActionOptions;
use crate::session::{ActionRequest, CancelledBy, Config, SessionMachine, SessionOutput, Side};

fn config(url: &str, value: Vec<u8>) -> Any {
    Any {
        type_url: url.into(),
        value,
    }
}

#[test]
fn ev_501_an_action_starts_as_sent_and_any_output_id_names_it() {
    let mut session = server();
    let sent = Action {
        target: "evergreen://demo".into(),
        configs: vec![config("x/y.Z", vec![1])],
        ..action("GENERATE", "prompt=p config=c", "response=r meta=m")
    };
    act(&mut session, sent).unwrap();
    let start = start(&mut session);
    assert_eq!(
        (&*start.name, &*start.target, start.configs.len()),
        ("GENERATE", "evergreen://demo", 1)
    );
    let ids = |list: &[(bytestring::ByteString, _)]| -> Vec<String> {
        list.iter()
            .map(|(name, node)| format!("{name}={}", session.id(*node).unwrap()))
            .collect()
    };
    assert_eq!(ids(&start.inputs), ["prompt=p", "config=c"]);
    assert_eq!(ids(&start.outputs), ["response=r", "meta=m"]);
    for id in ["m", "r"] {
        act(&mut session, action("CANCEL", &format!("action={id}"), "")).unwrap();
    }
    let cancels: Vec<SessionOutput> = outputs(&mut session);
    assert!(
        matches!(cancels[..], [SessionOutput::Cancel { action, by: CancelledBy::Peer }] if action == start.action),
        "one cancel, by either id: {cancels:?}"
    );
}

#[test]
fn ev_504_names_are_bound_once_and_are_not_empty() {
    for (inputs, outputs, expect) in [
        ("a=1 b=2", "a=3 b=4", Ok(())),
        ("a=1 b=1", "", Ok(())),
        ("a=1 a=2", "", Err(Reason::DuplicateParam)),
        ("a=1 a=1", "", Err(Reason::DuplicateParam)),
        ("", "o=1 o=2", Err(Reason::DuplicateParam)),
        ("=1", "", Err(Reason::BadName)),
        ("", "=1", Err(Reason::BadName)),
        ("a=", "", Err(Reason::BadId)),
        ("", "o=", Err(Reason::BadId)),
    ] {
        assert_eq!(
            act(&mut server(), action("f", inputs, outputs)),
            expect,
            "{inputs} -> {outputs}"
        );
    }
    assert_eq!(
        act(&mut server(), action("", "a=1", "")),
        Err(Reason::BadName)
    );
}

#[test]
fn ev_505_an_output_id_is_new_but_may_have_been_mentioned() {
    let not_new = Err(Reason::OutputNotNew);
    assert_eq!(act(&mut server(), action("f", "", "a=o b=o")), not_new);
    let mut session = server();
    act(&mut session, action("f", "", "a=o")).unwrap();
    assert_eq!(
        act(&mut session, action("f", "", "a=o")),
        not_new,
        "a repeated action is an error"
    );
    let mut session = server();
    feed(&mut session, [tree("t", 0, &["o"])]).unwrap();
    act(&mut session, action("g", "in=o", "out=x")).unwrap();
    assert_eq!(
        act(&mut session, action("f", "", "a=o")),
        Ok(()),
        "mentioned as child and input"
    );
}

/// EV-506, EV-508
#[test]
fn ev_506_ev_508_every_listed_output_ends_once_under_its_own_id() {
    let mut session = server();
    act(&mut session, action("f", "", "a=o1 b=o2 c=o3")).unwrap();
    let start = start(&mut session);
    let text = of("text/plain", "").unwrap();
    session
        .nodes()
        .write(start.outputs[0].1, &text, "x".into())
        .unwrap();
    session
        .nodes()
        .write(start.outputs[1].1, &text, "y".into())
        .unwrap();
    session.nodes().end(start.outputs[1].1, &text).unwrap();
    session.calls().finish(start.action);
    let all = sent(&mut session);
    for id in ["o1", "o2", "o3"] {
        let finals = all
            .iter()
            .filter(|fragment| &*fragment.id == id && fragment.last)
            .count();
        assert_eq!(finals, 1, "{id}");
    }
    assert_eq!(all.len(), 3, "and nothing else is sent: {all:?}");
}

/// EV-215
#[test]
fn ev_508_the_root_of_a_tree_is_announced_first_and_ends_last() {
    let mut session = server_with(|config, _| config.coalesce = false);
    act(&mut session, action("f", "", "out=root")).unwrap();
    let start = start(&mut session);
    let (root, text) = (start.outputs[0].1, of("text/plain", "").unwrap());
    let (first, second) = (
        session.nodes().make(Some(start.action)).unwrap(),
        session.nodes().make(Some(start.action)).unwrap(),
    );
    session.nodes().list(root, &[first]).unwrap();
    session
        .nodes()
        .write(first, &text, "a".repeat(40_000).into())
        .unwrap();
    session
        .nodes()
        .write(first, &text, "b".repeat(40_000).into())
        .unwrap();
    session.nodes().list(root, &[second]).unwrap();
    session.nodes().write(second, &text, "c".into()).unwrap();
    // It ends before its children, but its end is still sent last.
    session.nodes().end(root, &text).unwrap();
    let mut order: Vec<Fragment> = sent(&mut session);
    assert!(
        !order
            .iter()
            .any(|fragment| &*fragment.id == "root" && fragment.last),
        "held back"
    );
    session.calls().finish(start.action);
    order.extend(sent(&mut session));
    let of_root: Vec<usize> = (0..order.len())
        .filter(|&at| &*order[at].id == "root")
        .collect();
    assert_eq!(of_root.first(), Some(&0));
    assert_eq!(
        of_root.last(),
        Some(&(order.len() - 1)),
        "after every descendant is final"
    );
    assert_eq!(order.iter().filter(|fragment| fragment.last).count(), 3);
}

#[test]
fn ev_507_an_action_that_we_asked_for_is_done_when_its_outputs_are_final() {
    let mut client = SessionMachine::new(Side::Client, Config::default(), T0);
    let outputs_of =
        |client: &mut SessionMachine, ids: &[&str]| -> Vec<(bytestring::ByteString, _)> {
            ids.iter()
                .map(|&id| (id.into(), client.nodes().node(id).unwrap()))
                .collect()
        };
    let outputs_two = outputs_of(&mut client, &["a", "b"]);
    let call = ActionRequest {
        name: "f".into(),
        outputs: outputs_two,
        ..ActionRequest::default()
    };
    let key = client.calls().call(call).unwrap();
    client
        .calls()
        .call(ActionRequest {
            name: "g".into(),
            ..ActionRequest::default()
        })
        .unwrap();
    assert_eq!(
        client.calls().unfinished(),
        1,
        "without outputs there is no visible end"
    );
    feed(&mut client, [leaf("a", 0, "x"), leaf("b", 1, "z")]).unwrap();
    assert!(outputs(&mut client).is_empty());
    feed(&mut client, [more("b", 0, "y")]).unwrap();
    let done = outputs(&mut client);
    assert!(
        matches!(done[..], [SessionOutput::Done(action)] if action == key),
        "{done:?}"
    );
}

#[test]
fn ev_509_configs_have_one_type_each_and_our_own_is_read() {
    let with = |configs: Vec<Any>| Action {
        configs,
        ..action("f", "", "out=o")
    };
    let ours = "type.googleapis.com/sapwood.v1.ActionOptions";
    let twice = vec![config("a/x.Y", vec![]), config("b/c/x.Y", vec![])];
    assert_eq!(
        act(&mut server(), with(twice)),
        Err(Reason::DuplicateConfig),
        "what follows the last slash counts"
    );
    let two = vec![config("a/x.Y", vec![]), config("a/x.Z", vec![])];
    assert_eq!(act(&mut server(), with(two)), Ok(()));
    let broken = vec![config(ours, vec![0xff])];
    assert_eq!(act(&mut server(), with(broken)), Err(Reason::BadConfig));
    let negative = ActionOptions {
        timeout: Some(Duration {
            seconds: -1,
            nanos: 0,
        }),
    };
    assert_eq!(
        act(
            &mut server(),
            with(vec![config(ours, negative.encode_to_vec())])
        ),
        Err(Reason::BadConfig)
    );
    let mut session = server();
    let options = ActionOptions {
        timeout: Some(Duration {
            seconds: 2,
            nanos: 0,
        }),
    };
    act(
        &mut session,
        with(vec![
            config(ours, options.encode_to_vec()),
            config("x.Y", vec![]),
        ]),
    )
    .unwrap();
    let start = start(&mut session);
    assert_eq!(start.deadline, Some(crate::time::Time::from_millis(2_000)));
    assert_eq!(
        start.configs.len(),
        1,
        "only the function's own configs are passed to it"
    );
}

#[test]
fn ev_510_unfinished_actions_are_limited_and_the_next_one_fails_at_once() {
    let call = |at: usize| action("f", "", &format!("out=o{at}"));
    let mut session = server_with(|config, _| config.partial_failure = true);
    for at in 0..256 {
        act(&mut session, call(at)).unwrap();
    }
    let running = starts(&mut session);
    assert_eq!(running.len(), 256, "they all run at once");
    act(&mut session, call(256)).unwrap();
    assert!(starts(&mut session).is_empty(), "not queued");
    assert_eq!(
        content(&mut session, "o256").1,
        Stop::Failed(Reason::ActionLimit)
    );
    act(&mut session, action("CANCEL", "action=o0", "result=c")).unwrap();
    assert!(session.aborted().is_none());
    assert_eq!(
        texts(&mut session, "c"),
        [r#"{"cancelled":true}"#],
        "there is always room to cancel"
    );
    session.calls().finish(running[0].action);
    act(&mut session, call(257)).unwrap();
    assert_eq!(starts(&mut session).len(), 1);
}

/// EV-102, EV-307, EV-605
#[test]
fn ev_612_the_example_is_one_message_in_any_order_and_reads_as_a_conversation() {
    let user = |id: &str, text: &str| Fragment {
        last: true,
        ..chunk(id, 0, of("text/plain", "USER"), Some(text))
    };
    let eot = Fragment {
        last: true,
        ..chunk(
            "eot",
            0,
            of("application/x-protobuf; type=EndOfTurn", ""),
            None,
        )
    };
    let list = [
        tree("p1", 0, &["q1"]),
        user("q1", "Name a river."),
        branch("p2", 0, &["p1", "r1", "q2"]),
        tree("p2", 1, &["eot"]),
        eot,
        user("q2", "How long is it?"),
    ];
    let calls = [
        action("GENERATE", "prompt=p1", "response=r1"),
        action("GENERATE", "prompt=p2", "response=r2 meta=m2"),
    ];
    for (turn, order) in orders(&list).into_iter().enumerate() {
        let mut session = server();
        let mut actions = calls.to_vec();
        if turn % 2 == 1 {
            actions.reverse();
        }
        session
            .handle(
                WireMessage {
                    fragments: order.into(),
                    actions,
                    wire_bytes: 0,
                },
                T0,
            )
            .unwrap();
        let all = starts(&mut session);
        let first = all.iter().find(|start| start.outputs.len() == 1).unwrap();
        let second = all.iter().find(|start| start.outputs.len() == 2).unwrap();
        let assistant = of("text/plain", "ASSISTANT").unwrap();
        session
            .nodes()
            .write(first.outputs[0].1, &assistant, "The Nile.".into())
            .unwrap();
        session.calls().finish(first.action);
        let (items, stop) = read_node(&mut session, second.inputs[0].1, Some(second.action));
        let roles: Vec<&str> = items.iter().map(|item| &*item.role).collect();
        assert_eq!(
            (roles, stop),
            (vec!["USER", "ASSISTANT", "USER", ""], Stop::End)
        );
    }
}

/// EV-811
#[test]
fn ev_103_both_sides_produce_nodes_and_actions() {
    let mut server = server();
    let mut client = SessionMachine::new(Side::Client, Config::default(), T0);
    let node = server.nodes().make(None).unwrap();
    let out = server.nodes().make(None).unwrap();
    let out_id = server.id(out).unwrap().clone();
    // `make` claims a node for us; an output that the peer is to write is only mentioned.
    let asked = server.nodes().node("answer").unwrap();
    let call = ActionRequest {
        name: "look".into(),
        inputs: vec![("q".into(), node)],
        outputs: vec![("a".into(), asked)],
        ..ActionRequest::default()
    };
    assert!(
        server
            .calls()
            .call(ActionRequest {
                outputs: vec![("a".into(), out)],
                ..call.clone()
            })
            .is_err(),
        "{out_id} is not new"
    );
    server.calls().call(call).unwrap();
    let text = of("text/plain", "").unwrap();
    server.nodes().write(node, &text, "where?".into()).unwrap();
    server.nodes().end(node, &text).unwrap();
    while let Some(message) = server.next_message(T0) {
        client.handle(message, T0).unwrap();
    }
    let start = start(&mut client);
    assert_eq!(
        read_node(&mut client, start.inputs[0].1, None).0,
        [item("text/plain", "", "where?")]
    );
    client
        .nodes()
        .write(start.outputs[0].1, &text, "here".into())
        .unwrap();
    client.calls().finish(start.action);
    while let Some(message) = client.next_message(T0) {
        server.handle(message, T0).unwrap();
    }
    assert_eq!(texts(&mut server, "answer"), ["here"]);
}

#[test]
fn reserved_actions_are_applied_last_and_offers_are_for_servers() {
    // D-26: CANCEL in front of the action that it names still finds it.
    let mut session = server();
    let list = [
        action("CANCEL", "action=o", "result=c"),
        action("f", "", "out=o"),
    ];
    session.handle(actions(list), T0).unwrap();
    assert_eq!(texts(&mut session, "c"), [r#"{"cancelled":true}"#]);
    let offer = action("OFFER_ACTIONS", "actions=n", "");
    let mut session = server();
    assert_eq!(act(&mut session, offer.clone()), Ok(()));
    assert_eq!(start(&mut session).name, "OFFER_ACTIONS", "the shell's");
    let mut client = SessionMachine::new(Side::Client, Config::default(), T0);
    assert_eq!(act(&mut client, offer), Err(Reason::Unimplemented));
    let call = Action {
        inputs: vec![Param::new("node", "n")],
        ..action("CANCEL", "", "")
    };
    assert_eq!(act(&mut server(), call), Err(Reason::UnknownParam));
    assert_eq!(
        act(&mut server(), action("CANCEL", "", "")),
        Err(Reason::MissingInput)
    );
    assert_eq!(
        act(&mut server(), action("CANCEL", "action=a", "x=y")),
        Err(Reason::UnknownParam)
    );
}
