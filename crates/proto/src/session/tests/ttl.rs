//! EV-912: nodes that expire.

use std::time::Duration;

use prost::Message as _;
use prost_types::Any;

use super::harness::*;
use crate::evergreen::{Action, Reason};
use crate::session::{SessionMachine, SessionOutput};
use crate::time::Time;

fn seconds(seconds: u64) -> Time {
    Time::new(Duration::from_secs(seconds))
}

/// SET_TTL of `node` with a config of so many seconds.
fn ttl(node: &str, seconds: i64) -> Action {
    let config = prost_types::Duration { seconds, nanos: 0 };
    Action {
        configs: vec![Any {
            type_url: "type.googleapis.com/google.protobuf.Duration".into(),
            value: config.encode_to_vec(),
        }],
        ..action("SET_TTL", &format!("node={node}"), "")
    }
}

/// Two trees that share a leaf.
fn family() -> SessionMachine {
    let mut session = server_with(|config, _| config.partial_failure = true);
    let list = [
        branch("t", 0, &["a", "b"]),
        tree("other", 0, &["b"]),
        leaf("a", 0, "A"),
        leaf("b", 0, "B"),
    ];
    feed(&mut session, list).unwrap();
    session
}

/// Which of these can still be read.
fn retained_ids(session: &mut SessionMachine, ids: &[&'static str]) -> Vec<&'static str> {
    let removed = Stop::Failed(Reason::NodeReleased);
    let retained = |id: &&&'static str| content(session, id).1 != removed;
    ids.iter().filter(retained).copied().collect()
}

#[test]
fn ev_912_a_node_and_what_is_below_it_live_until_the_latest_of_their_times() {
    let all = ["t", "other", "a", "b"];
    type Case = (
        &'static [(&'static str, i64)],
        &'static [(u64, &'static [&'static str])],
    );
    let table: [Case; 6] = [
        (
            &[("a", 5)],
            &[(4, &["t", "other", "a", "b"]), (5, &["other", "b"])],
        ),
        (&[("t", 5)], &[(4, &["t", "other", "a", "b"]), (5, &[])]),
        (&[("t", 5), ("other", 9)], &[(5, &["other", "b"]), (9, &[])]),
        (
            &[("t", 9), ("b", 5)],
            &[(5, &["t", "other", "a", "b"]), (9, &[])],
        ),
        (
            &[("a", 9), ("a", 5)],
            &[(5, &["t", "other", "a", "b"]), (9, &["other", "b"])],
        ),
        (&[("nobody", 5)], &[(9, &["t", "other", "a", "b"])]),
    ];
    for (sets, times) in table {
        let mut session = family();
        for (node, seconds) in sets {
            act(&mut session, ttl(node, *seconds)).unwrap();
        }
        for (at, expect) in times {
            session.tick(seconds(*at));
            // A tree with a dropped child cannot be read to its end any more.
            let expect: Vec<_> = all
                .iter()
                .filter(|id| expect.contains(id))
                .copied()
                .collect();
            assert_eq!(retained_ids(&mut session, &all), expect, "{sets:?} at {at}");
        }
    }
}

#[test]
fn ev_912_expiry_sets_a_timer_and_includes_nodes_added_later() {
    let mut session = family();
    act(&mut session, ttl("t", 5)).unwrap();
    assert_eq!(session.wake_at(T0), Some(seconds(5)));
    feed(&mut session, [tree("t", 1, &["c"]), leaf("c", 0, "C")]).unwrap();
    let node = session.nodes().node("c").unwrap();
    let cursor = session.nodes().open(node, None);
    session.tick(seconds(5));
    // A reader that was opened before the expiry finishes, and its end frees the bytes.
    let retained = session.retained_bytes();
    assert_eq!(drain(&mut session, cursor, &mut Vec::new()), Stop::End);
    session.nodes().close(cursor);
    assert!(session.retained_bytes() < retained);
    assert!(retained_ids(&mut session, &["t", "a", "b", "c"]).is_empty());
    assert_ne!(
        session.wake_at(seconds(5)),
        Some(seconds(5)),
        "nothing is due any more"
    );
    // A TTL of 0 expires at the end of its message; a fraction of a second is rounded up.
    let mut session = family();
    act(&mut session, ttl("other", 0)).unwrap();
    assert_eq!(retained_ids(&mut session, &["other", "b", "a"]), ["a"]);
    feed(&mut session, [leaf("l", 0, "\"1.25s\"")]).unwrap();
    act(&mut session, action("SET_TTL", "node=a ttl=l", "")).unwrap();
    session.tick(Time::from_millis(1_999));
    assert_eq!(retained_ids(&mut session, &["a"]), ["a"]);
    session.tick(seconds(2));
    assert!(retained_ids(&mut session, &["a"]).is_empty());
}

#[test]
fn ev_912_the_input_ttl_may_come_late_or_never() {
    let mut session = family();
    act(
        &mut session,
        action("SET_TTL", "node=a ttl=late", "result=r"),
    )
    .unwrap();
    assert_eq!(
        (outputs(&mut session).len(), session.calls().unfinished()),
        (0, 1)
    );
    feed(&mut session, [more("late", 0, "\"3")]).unwrap();
    feed(&mut session, [leaf("late", 1, "s\"")]).unwrap();
    assert!(
        outputs(&mut session).is_empty(),
        "the machine handles it without the shell"
    );
    assert_eq!(
        (
            texts(&mut session, "r").concat(),
            session.calls().unfinished()
        ),
        ("{\"set\":true}".into(), 0)
    );
    session.tick(seconds(3));
    assert!(retained_ids(&mut session, &["a"]).is_empty());
    // Cancelled by its output: the action ends without an error.
    let mut session = family();
    let never = action("SET_TTL", "node=a ttl=never", "result=r");
    act(&mut session, never.clone()).unwrap();
    act(&mut session, action("CANCEL", "action=r", "result=c")).unwrap();
    assert_eq!(texts(&mut session, "c"), ["{\"cancelled\":true}"]);
    assert_eq!(
        (session.calls().unfinished(), content(&mut session, "r").1),
        (0, Stop::End)
    );
    // The end of input fails this reader like any other.
    let mut session = family();
    act(&mut session, never).unwrap();
    session.end_of_input(T0);
    assert!(matches!(
        outputs(&mut session)[..],
        [SessionOutput::Refused(_)]
    ));
    assert_eq!(session.calls().unfinished(), 0);
    assert_eq!(
        content(&mut session, "r").1,
        Stop::Failed(Reason::IncompleteInput)
    );
    while session.next_message(T0).is_some() {}
    assert!(matches!(
        outputs(&mut session)[..],
        [SessionOutput::Close(None)]
    ));
}

/// EV-504
#[test]
fn ev_912_invalid_set_ttl_actions_are_refused() {
    let other = Action {
        configs: vec![Any {
            type_url: "t/Other".into(),
            value: Vec::new(),
        }],
        ..action("SET_TTL", "node=a", "")
    };
    let table = [
        (ttl("a", -1), Reason::BadConfig),
        (other, Reason::UnknownConfig),
        (action("SET_TTL", "node=a", ""), Reason::MissingInput),
        (action("SET_TTL", "ttl=l", ""), Reason::MissingInput),
        (action("SET_TTL", "tree=a ttl=l", ""), Reason::UnknownParam),
        (
            action("SET_TTL", "node=a ttl=l", "left=o"),
            Reason::UnknownParam,
        ),
    ];
    for (action, expect) in table {
        let refused = act(&mut server(), action.clone());
        assert_eq!(refused, Err(expect), "{action:?}");
    }
    for text in [
        "30",
        "\"30\"",
        "\"-1s\"",
        "\"1.s\"",
        "\"s\"",
        "\"1.0000000001s\"",
        "\"1e3s\"",
        "",
    ] {
        let mut session = family();
        feed(&mut session, [leaf("l", 0, text)]).unwrap();
        act(&mut session, action("SET_TTL", "node=a ttl=l", "result=r")).unwrap();
        assert_eq!(
            content(&mut session, "r").1,
            Stop::Failed(Reason::BadConfig),
            "{text}"
        );
    }
    let mut session = family();
    feed(&mut session, [leaf("l", 0, &" ".repeat(1_025))]).unwrap();
    act(&mut session, action("SET_TTL", "node=a ttl=l", "result=r")).unwrap();
    assert_eq!(
        content(&mut session, "r").1,
        Stop::Failed(Reason::BadConfig)
    );
}

/// EV-801
#[test]
fn ev_912_a_ttl_above_the_limit_is_clipped() {
    let mut session = server_with(|_, limits| limits.max_ttl = Duration::from_secs(7));
    feed(&mut session, [leaf("a", 0, "A")]).unwrap();
    act(&mut session, ttl("a", 1_000)).unwrap();
    assert_eq!(session.wake_at(T0), Some(seconds(7)));
}

#[test]
fn ev_912_a_ttl_of_zero_takes_effect_at_the_end_of_the_message_in_either_form() {
    for now in [ttl("a", 0), action("SET_TTL", "node=a ttl=l", "")] {
        let mut session = family();
        feed(&mut session, [leaf("l", 0, "\"0s\"")]).unwrap();
        let list = [now, action("DROP", "node=a", "result=r")];
        session.handle(actions(list), T0).unwrap();
        let result = texts(&mut session, "r").concat();
        assert_eq!(result, "{\"dropped\":1,\"bytes\":75}");
    }
}

/// EV-801
#[test]
fn ev_912_an_expiry_that_could_not_be_searched_is_tried_again() {
    let mut session = family();
    let children = ["x"; 1_000];
    for seq in 0..263 {
        feed(&mut session, [branch("huge", seq, &children)]).unwrap();
    }
    act(&mut session, ttl("huge", 1_000)).unwrap();
    act(&mut session, ttl("a", 5)).unwrap();
    session.tick(seconds(5));
    assert_eq!(retained_ids(&mut session, &["a"]), ["a"]);
    assert_eq!(
        session.calls.nodes.lifetime.next_expiry(),
        Some(seconds(65))
    );
    act(&mut session, action("DROP", "tree=huge", "")).unwrap();
    session.tick(seconds(65));
    assert!(retained_ids(&mut session, &["a"]).is_empty());
}

/// EV-912
#[test]
fn d_27_a_sweep_is_charged_and_waits_where_the_budget_is_used_up() {
    let mut session = server_with(|_, limits| {
        (limits.session_visits, limits.session_visits_per_second) = (5_000, 1);
    });
    let ids: Vec<String> = (0..1_000).map(|at| format!("c{at}")).collect();
    let children: Vec<&str> = ids.iter().map(String::as_str).collect();
    feed(&mut session, [branch("t", 0, &children)]).unwrap();
    act(&mut session, ttl("t", 3_600)).unwrap();
    let left = |session: &SessionMachine| session.calls.nodes.readers.budget.left();
    // Covered by `t`, so it is not dropped and can be named again and again.
    for _ in 0..4 {
        let before = left(&session);
        act(&mut session, ttl("c0", 0)).unwrap();
        assert!(before - left(&session) >= 1_000, "{before}");
    }
    act(&mut session, ttl("c0", 0)).unwrap();
    assert_eq!(left(&session), 0);
    assert_eq!(
        session.calls.nodes.lifetime.next_expiry(),
        Some(seconds(60)),
        "tried again later"
    );
    // As many nodes with times of their own as edges would be.
    let mut session = server_with(|_, limits| limits.session_visits = 5_000);
    let nodes = (0..1_000).map(|at| ttl(&format!("n{at}"), 3_600));
    feed(
        &mut session,
        (0..1_000).map(|at| leaf(&format!("n{at}"), 0, "")),
    )
    .unwrap();
    session.handle(actions(nodes), T0).unwrap();
    feed(&mut session, [leaf("x", 0, "")]).unwrap();
    act(&mut session, ttl("x", 0)).unwrap();
    assert_eq!(retained_ids(&mut session, &["x"]).len(), 0);
    assert!(left(&session) <= 4_000, "{}", left(&session));
}

#[test]
fn ev_912_a_node_that_is_dropped_before_its_time_needs_no_timer() {
    let mut session = family();
    act(&mut session, ttl("a", 5)).unwrap();
    act(&mut session, ttl("b", 9)).unwrap();
    act(&mut session, action("DROP", "node=a", "")).unwrap();
    assert_eq!(session.calls.nodes.lifetime.next_expiry(), Some(seconds(9)));
}

/// EV-509
#[test]
fn ev_912_the_duration_is_found_among_the_configs_and_others_are_refused() {
    let config = |name: &str| Any {
        type_url: format!("type.googleapis.com/{name}"),
        value: Vec::new(),
    };
    let options = || config("sapwood.v1.ActionOptions");
    let with = |action: Action, first: Any| Action {
        configs: [vec![first], action.configs].concat(),
        ..action
    };
    let input = || action("SET_TTL", "node=a ttl=l", "");
    let unknown = Err(Reason::UnknownConfig);
    let missing = Err(Reason::MissingInput);
    let table = [
        (with(ttl("a", 5), options()), Ok(())),
        (with(input(), options()), Ok(())),
        (with(ttl("a", 5), config("x.Y")), unknown),
        (with(input(), config("x.Y")), unknown),
        (with(action("SET_TTL", "node=a", ""), options()), missing),
    ];
    for (action, expect) in table {
        let mut session = server();
        feed(&mut session, [leaf("a", 0, "A"), leaf("l", 0, "\"5s\"")]).unwrap();
        assert_eq!(act(&mut session, action.clone()), expect, "{action:?}");
        assert!(expect.is_err() || session.wake_at(T0) == Some(seconds(5)));
    }
}

#[test]
fn ev_801_a_node_with_a_time_to_live_is_charged_once_until_it_expires_or_is_dropped() {
    let mut session = family();
    let before = session.retained_bytes();
    for seconds in [5, 6] {
        act(&mut session, ttl("a", seconds)).unwrap();
        assert_eq!(session.retained_bytes(), before + 64);
    }
    act(&mut session, action("DROP", "node=a", "")).unwrap();
    let dropped = session.retained_bytes();
    act(&mut session, ttl("other", 5)).unwrap();
    assert_eq!(session.retained_bytes(), dropped + 64);
    session.tick(seconds(5));
    assert_eq!(session.calls.nodes.lifetime.ttl_bytes(), 0);
    assert!(session.retained_bytes() < dropped);
    // One node more than there is room for.
    let mut session = server_with(|_, limits| limits.retained_bytes = 1 + 64 + 10 + 1 + 63);
    feed(&mut session, [leaf("n", 0, "x")]).unwrap();
    assert_eq!(
        act(&mut session, ttl("n", 5)),
        Err(Reason::RetainedLimit),
        "no room"
    );
}
