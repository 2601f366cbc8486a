//! Section 3 of the Evergreen page: nodes and fragments.

use super::harness::*;
use crate::evergreen::{Fragment, Reason};
use crate::session::WriteError;

/// Feeds `list` in every order and expects the same outcome in each.
fn in_every_order(list: &[Fragment], expect: Result<(), Reason>) {
    for order in orders(list) {
        assert_eq!(feed(&mut server(), order.clone()), expect, "{order:?}");
    }
}

#[test]
fn ev_201_ids_are_1_to_256_bytes_of_utf_8() {
    let most = "é".repeat(128);
    for (id, expect) in [
        ("", Err(Reason::BadId)),
        ("a", Ok(())),
        (most.as_str(), Ok(())),
        (&format!("{most}a"), Err(Reason::BadId)),
    ] {
        assert_eq!(
            feed(&mut server(), [leaf(id, 0, "x")]),
            expect,
            "{} bytes",
            id.len()
        );
        assert_eq!(
            feed(&mut server(), [tree("t", 0, &[id])]),
            expect,
            "as a child"
        );
        let bound = crate::evergreen::Param::new("in", id);
        let mut call = action("f", "", "out=o");
        call.inputs.push(bound);
        assert_eq!(act(&mut server(), call), expect, "as an input");
    }
}

#[test]
fn ev_204_the_second_fragment_of_a_seq_is_ignored_before_anything_else_is_checked() {
    let first = [more("p", 0, "a"), leaf("p", 1, "b")];
    let seconds = [
        leaf("p", 0, "other"),
        tree("p", 0, &["q"]),
        chunk("p", 0, None, Some("no metadata")),
        Fragment {
            last: false,
            ..leaf("p", 1, "b")
        },
        leaf("p", 1, "b"),
        chunk("p", 1, of("image/png", "USER"), Some("c")),
    ];
    for second in seconds {
        let mut session = server();
        feed(&mut session, first.clone()).unwrap();
        assert_eq!(feed(&mut session, [second.clone()]), Ok(()), "{second:?}");
        assert_eq!(texts(&mut session, "p"), ["ab"], "the first wins");
        assert_eq!(session.stats().duplicates, 1);
    }
}

#[test]
fn ev_206_a_fragment_past_the_final_aborts_in_any_order() {
    let past = Err(Reason::SeqPastFinal);
    in_every_order(&[leaf("p", 0, "a"), leaf("p", 1, "b")], past);
    in_every_order(
        &[more("p", 0, "a"), leaf("p", 1, "b"), more("p", 2, "c")],
        past,
    );
    in_every_order(&[empty("p", 3, true), empty("p", 9, false)], past);
    in_every_order(
        &[more("p", 0, "a"), more("p", 1, "b"), leaf("p", 2, "c")],
        Ok(()),
    );
}

#[test]
fn ev_203_seq_is_0_based_and_the_whole_range_is_usable() {
    assert_eq!(
        feed(&mut server(), [leaf("p", -1, "x")]),
        Err(Reason::BadSeq)
    );
    assert_eq!(
        feed(&mut server(), [leaf("p", i32::MIN, "x")]),
        Err(Reason::BadSeq)
    );
    assert_eq!(
        feed(
            &mut server(),
            [empty("p", i32::MAX, true), more("p", 0, "x")]
        ),
        Ok(())
    );

    // A producer of ours fails instead of wrapping.
    let mut session = server_with(|_, limits| limits.max_seq = 1);
    act(&mut session, action("f", "", "out=o")).unwrap();
    let start = start(&mut session);
    let (node, text) = (start.outputs[0].1, of("text/plain", "").unwrap());
    assert_eq!(session.nodes().write(node, &text, "a".into()), Ok(()));
    assert_eq!(session.nodes().write(node, &text, "b".into()), Ok(()));
    assert_eq!(
        session.nodes().write(node, &text, "c".into()),
        Err(WriteError::Exhausted)
    );
}

#[test]
fn ev_205_ev_208_a_node_is_complete_when_all_up_to_the_final_are_present() {
    let list = [more("p", 0, "a"), more("p", 1, "b"), leaf("p", 2, "c")];
    for order in orders(&list) {
        let mut session = server();
        for (at, fragment) in order.iter().enumerate() {
            let node = session.nodes().node("p").unwrap();
            assert!(!session.is_complete(node), "{at} of {order:?}");
            feed(&mut session, [fragment.clone()]).unwrap();
        }
        let node = session.nodes().node("p").unwrap();
        assert!(session.is_complete(node));
    }
}

/// EV-206, EV-303
#[test]
fn ev_207_fragments_before_the_final_may_come_after_it_and_nodes_may_interleave() {
    let p = [more("p", 0, "a"), more("p", 1, "b"), leaf("p", 2, "c")];
    let q = [more("q", 0, "x"), leaf("q", 1, "y")];
    let all: Vec<Fragment> = p.into_iter().chain(q).collect();
    for order in orders(&all) {
        let mut session = server();
        feed(&mut session, order).unwrap();
        assert_eq!(texts(&mut session, "p"), ["abc"]);
        assert_eq!(texts(&mut session, "q"), ["xy"]);
    }
}

#[test]
fn ev_209_a_node_is_leaf_or_tree_in_either_order() {
    let kind = Err(Reason::NodeKind);
    in_every_order(&[more("p", 0, "a"), tree("p", 1, &["q"])], kind);
    in_every_order(
        &[
            branch("p", 0, &["q"]),
            chunk("p", 1, of("text/plain", ""), None),
        ],
        kind,
    );
    in_every_order(
        &[
            empty("p", 0, false),
            branch("p", 1, &["q"]),
            chunk("p", 2, of("", ""), None),
        ],
        kind,
    );
    let both = Fragment {
        children: vec!["q".into()],
        ..leaf("p", 0, "a")
    };
    in_every_order(&[both], kind);
    in_every_order(&[branch("p", 0, &["q"]), tree("p", 1, &["r"])], Ok(()));
}

/// EV-208
#[test]
fn ev_210_an_empty_fragment_is_legal_anywhere_and_adds_nothing() {
    let hollow = |seq| Fragment {
        last: true,
        ..chunk("p", seq, None, None)
    };
    for (list, expect) in [
        (vec![empty("p", 0, true)], vec![]),
        (vec![hollow(0)], vec![]),
        (
            vec![empty("p", 0, false), empty("p", 1, false), hollow(2)],
            vec![],
        ),
        (
            vec![
                more("p", 0, "a"),
                empty("p", 1, false),
                more("p", 2, "b"),
                hollow(3),
            ],
            vec!["ab"],
        ),
        (
            vec![
                empty("p", 0, false),
                branch("p", 1, &["q"]),
                empty("p", 2, true),
                leaf("q", 0, "x"),
            ],
            vec!["x"],
        ),
    ] {
        for order in orders(&list) {
            let mut session = server();
            feed(&mut session, order).unwrap();
            assert_eq!(texts(&mut session, "p"), expect, "{list:?}");
        }
    }
}

#[test]
fn ev_212_a_trees_content_is_its_lists_in_seq_order() {
    let list = [
        branch("t", 0, &["a", "b"]),
        branch("t", 1, &["c"]),
        tree("t", 2, &["a", "c"]),
        leaf("a", 0, "A"),
        leaf("b", 0, "B"),
        leaf("c", 0, "C"),
    ];
    for order in orders(&list) {
        let mut session = server();
        feed(&mut session, order).unwrap();
        assert_eq!(texts(&mut session, "t"), ["A", "B", "C", "A", "C"]);
    }
}

/// EV-215, EV-302
#[test]
fn ev_213_a_node_may_be_mentioned_first_and_shared_by_everything() {
    let mut session = server();
    act(&mut session, action("f", "x=p y=p", "out=o1")).unwrap();
    act(&mut session, action("f", "x=t", "out=o2")).unwrap();
    feed(
        &mut session,
        [tree("t", 0, &["p", "p", "u"]), tree("u", 0, &["p"])],
    )
    .unwrap();
    let all = starts(&mut session);
    feed(&mut session, [leaf("p", 0, "once")]).unwrap();
    for (start, expect) in all.iter().zip([1, 3]) {
        for (_, node) in &start.inputs {
            let (items, stop) = read_node(&mut session, *node, Some(start.action));
            assert_eq!((items.len(), stop), (expect, Stop::End));
            assert!(items.iter().all(|item| item.data == b"once"));
        }
    }
}

/// EV-302
#[test]
fn ev_214_a_node_is_kept_however_often_it_was_read_and_outputs_are_ordinary_nodes() {
    let mut session = server();
    act(&mut session, action("f", "", "out=r")).unwrap();
    let first = start(&mut session);
    let text = of("text/plain", "ASSISTANT").unwrap();
    session
        .nodes()
        .write(first.outputs[0].1, &text, "made here".into())
        .unwrap();
    session.calls().finish(first.action);
    sent(&mut session);
    feed(
        &mut session,
        [tree("t", 0, &["q", "r"]), leaf("q", 0, "sent")],
    )
    .unwrap();
    act(&mut session, action("f", "in=t", "out=o")).unwrap();
    let second = start(&mut session);
    for _ in 0..3 {
        let (items, stop) = read_node(&mut session, second.inputs[0].1, Some(second.action));
        assert_eq!(stop, Stop::End);
        let expect = [
            item("text/plain", "", "sent"),
            item("text/plain", "ASSISTANT", "made here"),
        ];
        assert_eq!(items, expect, "not re-sent, and read again and again");
    }
}

/// EV-505
#[test]
fn ev_216_only_the_producer_writes_a_node_whichever_came_first() {
    let call = || action("f", "", "out=o");
    let mut session = server();
    act(&mut session, call()).unwrap();
    assert_eq!(
        feed(&mut session, [leaf("o", 0, "x")]),
        Err(Reason::NodeOwner)
    );
    let mut session = server();
    feed(&mut session, [leaf("o", 0, "x")]).unwrap();
    assert_eq!(act(&mut session, call()), Err(Reason::NodeOwner));
    let mut session = server();
    let both = crate::evergreen::WireMessage {
        fragments: vec![leaf("o", 0, "x")].into(),
        actions: vec![call()],
        wire_bytes: 0,
    };
    assert_eq!(
        session.handle(both, T0).map_err(|status| reason(&status)),
        Err(Reason::NodeOwner)
    );

    // A child that we created is ours as well.
    let mut session = server();
    act(&mut session, call()).unwrap();
    let start = start(&mut session);
    let child = session.nodes().make(Some(start.action)).unwrap();
    let id = session.id(child).unwrap().to_string();
    assert!(id.starts_with('~'), "{id}");
    assert_eq!(
        feed(&mut session, [leaf(&id, 0, "x")]),
        Err(Reason::NodeOwner)
    );
}

#[test]
fn ev_216_generated_ids_differ_between_sessions_and_skip_ids_in_use() {
    let made = |entropy| {
        let mut session = server_with(|config, _| config.entropy = entropy);
        let node = session.nodes().make(None).unwrap();
        session.id(node).unwrap().to_string()
    };
    assert_ne!(made(1 << 40), made(2 << 40));
    let taken = made(7);
    let mut session = server_with(|config, _| config.entropy = 7);
    feed(&mut session, [leaf(&taken, 0, "guessed")]).unwrap();
    let node = session.nodes().make(None).unwrap();
    assert_ne!(session.id(node).unwrap().to_string(), taken);
}

#[test]
fn ev_217_a_cycle_is_found_when_its_last_edge_arrives_even_if_unread() {
    let cycle = Err(Reason::Cycle);
    in_every_order(&[tree("a", 0, &["a"])], cycle);
    in_every_order(
        &[
            branch("a", 0, &["b"]),
            branch("b", 0, &["x"]),
            branch("b", 1, &["a"]),
        ],
        cycle,
    );
    in_every_order(
        &[
            tree("a", 0, &["b"]),
            tree("b", 0, &["c"]),
            tree("c", 0, &["d", "a"]),
        ],
        cycle,
    );
    // An edge in a buffered fragment counts as well.
    in_every_order(&[tree("a", 7, &["b"]), tree("b", 3, &["a"])], cycle);
    in_every_order(
        &[
            tree("a", 0, &["b", "c"]),
            tree("b", 0, &["c"]),
            tree("c", 0, &["d"]),
        ],
        Ok(()),
    );
}

#[test]
fn ev_217_a_reader_finds_a_cycle_that_a_cut_search_has_missed() {
    let list = [
        tree("a", 0, &["b"]),
        tree("b", 0, &["c"]),
        tree("c", 0, &["x", "a"]),
        leaf("x", 0, "x"),
    ];
    for order in orders(&list) {
        let mut session = server_with(|_, limits| limits.cycle_visits = 1);
        if feed(&mut session, order).is_err() {
            continue;
        }
        let (_, stop) = content(&mut session, "a");
        assert_eq!(stop, Stop::Failed(Reason::Cycle));
        assert!(session.aborted().is_some(), "a cycle ends the session");
    }
}

/// EV-308
#[test]
fn ev_217_the_searches_of_one_message_share_a_budget() {
    // D-27: with no edge to follow nothing is found before it is read, with two edges it is.
    for (edges, found) in [(0, false), (2, true)] {
        let mut session = server_with(|_, limits| limits.cycle_edges_per_message = edges);
        let list = [
            tree("a", 0, &["b"]),
            tree("b", 0, &["c"]),
            tree("c", 0, &["a"]),
        ];
        assert_eq!(feed(&mut session, list).is_err(), found);
        if !found {
            assert_eq!(content(&mut session, "a").1, Stop::Failed(Reason::Cycle));
        }
    }
}
