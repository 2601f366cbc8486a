//! EV-911 and EV-924: nodes that are dropped before the session ends, and half-close by FINISH.

use std::sync::Arc;

use bytes::Bytes;

use super::harness::*;
use crate::evergreen::{Fragment, Reason};
use crate::session::lifetime::NodeFate;
use crate::session::{
    CursorRead, NodeKey, PeerAdapter, RetentionPolicy, SessionMachine, SessionOutput, WriteError,
};

/// A tree over two leaves, one of which another tree lists as well.
fn family() -> SessionMachine {
    let mut session = server_with(|config, _| config.partial_failure = true);
    let list = [
        tree("t", 0, &["a", "b"]),
        tree("other", 0, &["b"]),
        leaf("a", 0, "A"),
        leaf("b", 0, "B"),
    ];
    feed(&mut session, list).unwrap();
    session
}

/// Sends DROP; returns the numbers of its result.
fn dropped(session: &mut SessionMachine, inputs: &str) -> String {
    act(session, action("DROP", inputs, "result=~res")).unwrap();
    let result = texts(session, "~res").concat();
    assert!(sent(session).iter().any(|fragment| &*fragment.id == "~res"));
    result
}

const LEAF: u64 = 64 + 10 + 1;
const TREE: u64 = 64;
const CHILD: u64 = 8;

#[test]
fn ev_911_node_drops_one_node_and_tree_also_what_no_other_node_lists() {
    let removed = Stop::Failed(Reason::NodeReleased);
    let table = [
        ("node=a", 1, LEAF, vec!["a"], vec!["b"]),
        ("node=t", 1, TREE + 2 * CHILD, vec!["t"], vec!["a", "b"]),
        (
            "tree=t",
            2,
            TREE + 2 * CHILD + LEAF,
            vec!["t", "a"],
            vec!["b", "other"],
        ),
        (
            "tree=t tree.1=other",
            4,
            2 * TREE + 3 * CHILD + 2 * LEAF,
            vec!["t", "other", "a", "b"],
            vec![],
        ),
        (
            "node=t node.1=t node.22=other",
            2,
            2 * TREE + 3 * CHILD,
            vec!["t", "other"],
            vec!["a", "b"],
        ),
        ("node=nobody", 0, 0, vec![], vec!["t", "a", "b"]),
    ];
    for (inputs, count, bytes, away, retained) in table {
        let mut session = family();
        let before = session.retained_bytes();
        let result = dropped(&mut session, inputs);
        assert_eq!(
            result,
            format!("{{\"dropped\":{count},\"bytes\":{bytes}}}"),
            "{inputs}"
        );
        let answer = 4 + 64 + "application/json".len() + result.len();
        assert_eq!(
            session.retained_bytes(),
            before - bytes + answer as u64,
            "{inputs}"
        );
        for id in away {
            assert_eq!(content(&mut session, id).1, removed, "{inputs}: {id}");
        }
        for id in retained {
            assert_eq!(content(&mut session, id).1, Stop::End, "{inputs}: {id}");
        }
    }
}

#[test]
fn ev_911_fragments_for_a_dropped_id_are_ignored_and_the_id_stays_taken() {
    let mut session = family();
    feed(&mut session, [more("p", 0, "half"), more("p", 3, "early")]).unwrap();
    dropped(&mut session, "node=p");
    // Even what would abort for an ordinary node.
    feed(
        &mut session,
        [
            leaf("p", 1, "more"),
            leaf("p", 0, "x"),
            tree("p", 9, &["a"]),
        ],
    )
    .unwrap();
    assert_eq!(
        (session.stats().discarded, session.stats().duplicates),
        (3, 0)
    );
    assert_eq!(
        content(&mut session, "p").1,
        Stop::Failed(Reason::NodeReleased)
    );
    assert_eq!(dropped_again(&mut session), "{\"dropped\":0,\"bytes\":0}");
    // A node that was only mentioned and then dropped cannot be an output any more.
    session.nodes().node("m").unwrap();
    act(&mut session, action("DROP", "node=m", "")).unwrap();
    assert_eq!(
        act(&mut session, action("f", "", "o=m")),
        Err(Reason::OutputNotNew)
    );
}

fn dropped_again(session: &mut SessionMachine) -> String {
    act(session, action("DROP", "tree=p", "result=~again")).unwrap();
    texts(session, "~again").concat()
}

#[test]
fn ev_911_a_running_reader_finishes_on_its_snapshot_and_its_end_frees_the_bytes() {
    let mut session = family();
    let root = session.nodes().node("t").unwrap();
    let (reader, ended, fresh) = (
        session.nodes().open(root, None),
        session.nodes().open(root, None),
        session.nodes().open(root, None),
    );
    assert!(matches!(session.nodes().read(reader), CursorRead::Piece(_)));
    let mut items = Vec::new();
    assert_eq!(drain(&mut session, ended, &mut items), Stop::End);
    let before = session.retained_bytes();
    act(&mut session, action("DROP", "tree=t tree.1=other", "")).unwrap();
    assert_eq!(session.retained_bytes(), before, "two are still reading");
    // One reader was inside a dropped leaf with another ahead, one had not begun.
    let mut rest = vec![item("text/plain", "", "A")];
    assert_eq!(drain(&mut session, reader, &mut rest), Stop::End);
    assert_eq!(rest.len(), 2);
    session.nodes().close(reader);
    assert_eq!(session.retained_bytes(), before);
    let mut all = Vec::new();
    assert_eq!(
        (drain(&mut session, fresh, &mut all), all.len()),
        (Stop::End, 2)
    );
    session.nodes().close(fresh);
    let freed = 2 * TREE + 3 * CHILD + 2 * LEAF;
    assert_eq!(
        session.retained_bytes(),
        before - freed,
        "a reader that has ended holds nothing"
    );
    // A parked reader is notified, or it would wait for ever.
    let mut session = family();
    feed(&mut session, [more("p", 0, "half")]).unwrap();
    let node = session.nodes().node("p").unwrap();
    let cursor = session.nodes().open(node, None);
    assert_eq!(drain(&mut session, cursor, &mut Vec::new()), Stop::Pending);
    act(&mut session, action("DROP", "node=p", "")).unwrap();
    let received = outputs(&mut session);
    assert!(
        matches!(received[..], [SessionOutput::Ready(id)] if id == cursor),
        "{received:?}"
    );
    let stop = drain(&mut session, cursor, &mut Vec::new());
    assert_eq!(stop, Stop::Failed(Reason::NodeReleased));
}

#[test]
fn ev_911_a_reader_does_not_hold_nodes_that_it_has_passed() {
    let mut session = family();
    feed(
        &mut session,
        [
            branch("s", 0, &["x", "y"]),
            leaf("x", 0, "X"),
            leaf("y", 0, "Y"),
        ],
    )
    .unwrap();
    let root = session.nodes().node("s").unwrap();
    let cursor = session.nodes().open(root, None);
    assert_eq!(drain(&mut session, cursor, &mut Vec::new()), Stop::Pending);
    let before = session.retained_bytes();
    act(&mut session, action("DROP", "node=x", "")).unwrap();
    assert_eq!(session.retained_bytes(), before - LEAF);
    feed(&mut session, [tree("s", 1, &["y"])]).unwrap();
    let step = session.nodes().read(cursor);
    assert!(
        matches!(&step, CursorRead::Piece(piece) if piece.data == "Y"),
        "{step:?}"
    );
    assert!(matches!(session.nodes().read(cursor), CursorRead::End));
}

#[test]
fn ev_911_an_output_that_is_dropped_ends_for_the_client_and_its_action_goes_on() {
    let mut session = family();
    act(&mut session, action("f", "", "one=o1 many=o2")).unwrap();
    let running = start(&mut session);
    let text = of("text/plain", "").unwrap();
    let (one, many) = (running.outputs[0].1, running.outputs[1].1);
    session
        .nodes()
        .write(one, &text, Bytes::from_static(b"sent "))
        .unwrap();
    assert_eq!(sent(&mut session).len(), 1);
    session
        .nodes()
        .write(one, &text, Bytes::from_static(b"unsent"))
        .unwrap();
    let child = session.nodes().make(Some(running.action)).unwrap();
    session.nodes().list(many, &[child]).unwrap();
    session
        .nodes()
        .write(child, &text, Bytes::from_static(b"below"))
        .unwrap();
    act(&mut session, action("DROP", "tree=o1 tree.1=o2", "")).unwrap();
    let is_end = |fragment: &&Fragment| fragment.last;
    let rest = sent(&mut session);
    // Both outputs and the child end with a status, and the tree's status is in a child of its own.
    assert_eq!(rest.iter().filter(is_end).count(), 4, "{rest:?}");
    // What the function still writes is discarded without an error.
    assert_eq!(
        session
            .nodes()
            .write(one, &text, Bytes::from_static(b"late")),
        Ok(())
    );
    assert_eq!(
        session
            .nodes()
            .write(child, &text, Bytes::from_static(b"late")),
        Ok(())
    );
    let another = session.nodes().make(Some(running.action)).unwrap();
    assert_eq!(session.nodes().list(many, &[another]), Ok(()));
    assert_eq!(
        session
            .nodes()
            .write(another, &text, Bytes::from_static(b"late")),
        Ok(())
    );
    assert_eq!(session.nodes().end(another, &text), Ok(()));
    session.calls().finish(running.action);
    assert!(sent(&mut session).is_empty());
    assert_eq!(session.calls().unfinished(), 0);
    assert_eq!(session.nodes().write(one, &text, Bytes::new()), Ok(()));
    assert_ne!(session.nodes().end(child, &text), Err(WriteError::Closed));
    for node in [one, many, child] {
        assert_eq!(
            read_node(&mut session, node, None).1,
            Stop::Failed(Reason::NodeReleased)
        );
    }
}

/// EV-504
#[test]
fn ev_911_invalid_drop_actions_are_refused() {
    for (inputs, outputs, expect) in [
        ("", "", Reason::MissingInput),
        ("nodes=a", "", Reason::UnknownParam),
        ("node.=a", "", Reason::UnknownParam),
        ("node.x=a", "", Reason::UnknownParam),
        ("node=a", "res=r", Reason::UnknownParam),
        ("node=a node=b", "", Reason::DuplicateParam),
    ] {
        let mut session = server();
        let refused = act(&mut session, action("DROP", inputs, outputs));
        assert_eq!(refused, Err(expect), "{inputs} {outputs}");
    }
}

/// EV-109
#[test]
fn ev_924_finish_is_a_half_close() {
    let mut session = server();
    let message = actions([
        action("FINISH", "", "__status__=s"),
        action("f", "a=p", "o=x"),
    ]);
    session.handle(message, T0).unwrap();
    let running = start(&mut session);
    // Missing content fails its reader, as after any half-close.
    let read = read_node(&mut session, running.inputs[0].1, Some(running.action));
    assert_eq!(read.1, Stop::Failed(Reason::IncompleteInput));
    // Later messages are ignored.
    session
        .handle(actions([action("g", "", "o=y")]), T0)
        .unwrap();
    assert!(starts(&mut session).is_empty());
    assert!(!session.is_closed(), "one action runs");
    session.calls().finish(running.action);
    assert_eq!(
        sent(&mut session).len(),
        2,
        "the status of FINISH and the output of f"
    );
    assert!(matches!(
        outputs(&mut session)[..],
        [SessionOutput::Close(None)]
    ));
    // Without running actions the session ends at once.
    let mut session = server();
    act(&mut session, action("FINISH", "", "")).unwrap();
    assert!(matches!(
        outputs(&mut session)[..],
        [SessionOutput::Close(None)]
    ));
    assert_eq!(
        act(&mut server(), action("FINISH", "x=p", "")),
        Err(Reason::UnknownParam)
    );
}

/// EV-930
#[test]
fn ev_924_a_finish_that_is_refused_closes_nothing() {
    let mut session = server_with(|config, _| config.partial_failure = true);
    act(&mut session, action("FINISH", "x=p", "__status__=s")).unwrap();
    assert_eq!(
        content(&mut session, "s").1,
        Stop::Failed(Reason::UnknownParam)
    );
    assert!(!session.is_half_closed());
    outputs(&mut session);
    act(&mut session, action("f", "", "o=x")).unwrap();
    start(&mut session);
}

/// EV-801
#[test]
fn ev_911_the_search_for_readers_has_a_budget_and_is_skipped_for_an_empty_drop() {
    let mut session = server_with(|_, limits| limits.cycle_edges_per_message = 250);
    let ids: Vec<String> = (0..100).map(|at| format!("c{at}")).collect();
    let children: Vec<&str> = ids.iter().map(String::as_str).collect();
    let all = [branch("t", 0, &children), leaf("z", 0, "Z")];
    feed(&mut session, all).unwrap();
    let root = session.nodes().node("t").unwrap();
    for _ in 0..10 {
        let cursor = session.nodes().open(root, None);
        assert!(matches!(session.nodes().read(cursor), CursorRead::Pending));
    }
    act(&mut session, action("DROP", "node=nobody", "")).unwrap();
    assert_eq!(session.calls.nodes.search.edges_left, 250);
    assert_eq!(session.calls.nodes.lifetime.batches(), 0);
    act(&mut session, action("DROP", "node=z", "")).unwrap();
    assert!(session.calls.nodes.search.edges_left < 100);
}

/// EV-911
#[test]
fn d_27_a_drop_is_charged_for_each_reader_and_its_path() {
    let mut session = server();
    let chain = (0..100).map(|at| tree(&format!("n{at}"), 0, &[&format!("n{}", at + 1)]));
    feed(&mut session, chain).unwrap();
    // A leaf has no nodes below it, however many pieces are ahead of its reader.
    let pieces = (0..1_000).map(|seq| more("n100", seq, "x"));
    feed(&mut session, pieces.chain([leaf("z", 0, "Z")])).unwrap();
    let root = session.nodes().node("n0").unwrap();
    for _ in 0..5 {
        let cursor = session.nodes().open(root, None);
        assert!(matches!(session.nodes().read(cursor), CursorRead::Piece(_)));
    }
    let before = session.calls.nodes.readers.budget.left();
    act(&mut session, action("DROP", "node=z", "")).unwrap();
    let charged = before - session.calls.nodes.readers.budget.left();
    assert!((5 * 100..2_000).contains(&charged), "{charged}");
    // Between two messages as well.
    let z = session.nodes().node("c").unwrap();
    session.calls.nodes.drop_nodes(&[(z, false)]);
    let before = session.calls.nodes.readers.budget.left();
    feed(&mut session, [leaf("y", 0, "Y")]).unwrap();
    let charged = before - session.calls.nodes.readers.budget.left();
    assert!((5 * 100..2_000).contains(&charged), "{charged}");
}

/// EV-801, EV-911
#[test]
fn d_27_nodes_that_are_dropped_without_a_budget_are_held_together() {
    let mut session = server_with(|_, limits| limits.cycle_edges_per_message = 0);
    let ids: Vec<String> = (0..100).map(|at| format!("n{at}")).collect();
    feed(&mut session, ids.iter().map(|id| leaf(id, 0, "N"))).unwrap();
    let node = session.nodes().node("open").unwrap();
    let mut readers: Vec<_> = (0..3).map(|_| session.nodes().open(node, None)).collect();
    let drops = |ids: &[String]| {
        let list = ids
            .iter()
            .map(|id| action("DROP", &format!("node={id}"), ""));
        actions(list.collect::<Vec<_>>())
    };
    let before = session.retained_bytes();
    session.handle(drops(&ids[..50]), T0).unwrap();
    // A reader that begins in between holds what is dropped later.
    let late = session.nodes().node("n70").unwrap();
    let late = session.nodes().open(late, None);
    session.handle(drops(&ids[50..]), T0).unwrap();
    assert_eq!(session.retained_bytes(), before);
    assert_eq!(session.calls.nodes.lifetime.batches(), 1);
    readers.push(late);
    for &reader in &readers {
        let holds = &session.calls.nodes.readers.get(reader).unwrap().holds;
        assert_eq!(holds.len(), 1);
    }
    let mut items = Vec::new();
    assert_eq!(drain(&mut session, late, &mut items), Stop::End);
    assert_eq!(items, [item("text/plain", "", "N")]);
    for reader in readers {
        assert_eq!(session.calls.nodes.lifetime.batches(), 1);
        session.nodes().close(reader);
    }
    assert_eq!(session.calls.nodes.lifetime.batches(), 0);
    assert_eq!(session.retained_bytes(), before - 100 * LEAF);
}

/// EV-801
#[test]
fn ev_911_released_and_dropped_nodes_keep_no_metadata() {
    for retain in [RetentionPolicy::Session, RetentionPolicy::Unread] {
        let mut session = server_with(|config, _| config.retain = retain);
        act(&mut session, action("f", "", "o=o")).unwrap();
        let running = start(&mut session);
        let text = of("text/plain", "").unwrap();
        let node = running.outputs[0].1;
        session
            .nodes()
            .write(node, &text, Bytes::from_static(b"some"))
            .unwrap();
        session.calls().finish(running.action);
        sent(&mut session);
        if retain == RetentionPolicy::Session {
            assert!(Arc::strong_count(&text) > 1);
            act(&mut session, action("DROP", "node=o", "")).unwrap();
        }
        assert_eq!(Arc::strong_count(&text), 1, "{retain:?}");
    }
}

/// EV-741
#[test]
fn ev_911_an_action_that_ends_keeps_nodes_that_another_still_writes() {
    let mut session = server_with(|config, _| config.forgets_actions = true);
    act(&mut session, action("f", "", "o=x")).unwrap();
    let writer = start(&mut session);
    act(&mut session, action("g", "i=x", "o=y")).unwrap();
    let reader = start(&mut session);
    session.calls().finish(reader.action);
    sent(&mut session);
    let text = of("text/plain", "").unwrap();
    session
        .nodes()
        .write(writer.outputs[0].1, &text, Bytes::from_static(b"late"))
        .unwrap();
    assert_eq!(
        sent(&mut session).len(),
        1,
        "the client still receives what is written"
    );
    session.calls().finish(writer.action);
    sent(&mut session);
    let removed = Stop::Failed(Reason::NodeReleased);
    assert_eq!(
        content(&mut session, "x").1,
        removed,
        "its writer was the last"
    );
}

/// EV-201, EV-911
#[test]
fn ev_741_nodes_of_finished_actions_are_removed_in_long_sessions() {
    // Ids are removed because of the node limit, or because 1,024 later nodes were removed.
    for (max_nodes, most) in [(40, 40), (65_536, 1_024 + 8)] {
        let mut session = server_with(|config, limits| {
            (config.forgets_actions, config.adapter) = (true, PeerAdapter::ActionEngine);
            config.partial_failure = true;
            limits.max_nodes = max_nodes;
        });
        let text = of("text/plain", "").unwrap();
        let mut first = None;
        let mut retained = 0;
        for round in 0..5_000 {
            let id = |name: &str| format!("{round:04}#{name}");
            let outputs = format!("o={} __status__={}", id("o"), id("s"));
            let input = format!("i={}", id("i"));
            act(&mut session, action("f", &input, &outputs)).unwrap();
            let run = start(&mut session);
            feed(&mut session, [leaf(&id("i"), 0, "in")]).unwrap();
            let read = read_node(&mut session, run.inputs[0].1, Some(run.action));
            assert_eq!(read.1, Stop::End, "{round}");
            let data = Bytes::from_static(b"out");
            session
                .nodes()
                .write(run.outputs[0].1, &text, data)
                .unwrap();
            session.calls().finish(run.action);
            assert_eq!(sent(&mut session).len(), 2, "{round}");
            // Late fragments are discarded and create no node.
            let before = session.stats().discarded;
            feed(&mut session, [more(&id("i"), 1, "late")]).unwrap();
            assert_eq!(session.stats().discarded, before + 1, "{round}");
            if round == 3_000 {
                retained = session.retained_bytes();
            }
            first.get_or_insert(run);
        }
        assert!(
            session.calls.nodes.graph.capacity() <= most,
            "{}",
            session.calls.nodes.graph.capacity()
        );
        assert_eq!(session.retained_bytes(), retained);
        // Keys of the first action's nodes find a released node, not the next one at that index.
        let first = first.unwrap();
        let (input, output) = (first.inputs[0].1, first.outputs[0].1);
        let removed = Stop::Failed(Reason::NodeReleased);
        for node in [input, output] {
            assert_eq!(read_node(&mut session, node, None).1, removed);
            assert_eq!((session.id(node), session.is_complete(node)), (None, false));
            assert_eq!(session.nodes().produce(node), Err(WriteError::Refused));
        }
        let late = Bytes::from_static(b"late");
        assert_eq!(session.nodes().write(output, &text, late), Ok(()));
        assert_eq!(session.nodes().end(output, &text), Ok(()));
        assert!(sent(&mut session).is_empty() && session.retained_bytes() == retained);
        // Its id is free again.
        act(&mut session, action("g", "", "o=0000#o")).unwrap();
    }
}

/// EV-508, EV-931
#[test]
fn ev_911_the_status_child_of_a_dropped_open_tree_is_dropped_with_it() {
    let mut session = server_with(|config, _| config.partial_failure = true);
    act(&mut session, action("f", "", "o=o")).unwrap();
    let run = start(&mut session);
    let tree = run.outputs[0].1;
    let children = session.nodes().grow(tree, 2, run.action).unwrap();
    act(&mut session, action("DROP", "tree=o", "")).unwrap();
    let last = sent(&mut session);
    assert!(
        last.iter()
            .any(|fragment| &*fragment.id == "o" && fragment.last)
    );
    session.calls().finish(run.action);
    let retained: Vec<NodeKey> = session
        .calls
        .nodes
        .graph
        .keys()
        .filter(|key| session.calls.nodes.graph.get(*key).fate != NodeFate::Removed)
        .collect();
    assert!(retained.is_empty(), "{retained:?} besides {children:?}");
    assert_eq!(session.calls.nodes.lifetime.batches(), 0);
    let listed = session
        .calls
        .nodes
        .graph
        .keys()
        .map(|key| session.calls.nodes.graph.get(key).listed);
    assert_eq!(listed.sum::<u32>(), 0);
}

/// EV-741
#[test]
fn ev_741_a_node_is_removed_once_and_the_next_one_at_its_index_stays() {
    let mut session = server_with(|config, _| config.forgets_actions = true);
    let first = session.nodes().node("first").unwrap();
    session.calls.nodes.graph.mark_removed(first);
    session.calls.nodes.graph.mark_removed(first);
    // So many that the first id is removed and its index is reused.
    for count in 0..1_100 {
        let node = session.nodes().node(&format!("n{count}")).unwrap();
        session.calls.nodes.graph.mark_removed(node);
    }
    let before = session.calls.nodes.graph.live();
    session.calls.nodes.graph.vacate(first);
    assert_eq!(session.calls.nodes.graph.live(), before);
    for count in 100..1_100 {
        let id = format!("n{count}");
        let node = session.calls.nodes.graph.find(&id);
        let found = node.map(|node| session.calls.nodes.graph.get(node).id.to_string());
        assert_eq!(found.as_deref(), node.map(|_| id.as_str()));
    }
    assert_eq!(
        session.calls.nodes.graph.get(first).id,
        "",
        "its key is stale"
    );
}
