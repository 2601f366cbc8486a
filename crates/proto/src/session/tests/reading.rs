//! Section 4 of the Evergreen page: reading a node.

use super::harness::*;
use crate::evergreen::{Fragment, Reason};
use crate::session::{CursorRead, SessionOutput};

#[test]
fn ev_301_content_is_leaves_depth_first_left_to_right() {
    let mut session = server();
    let eot = Fragment {
        last: true,
        ..chunk(
            "eot",
            0,
            of("application/x-protobuf; type=EndOfTurn", ""),
            None,
        )
    };
    feed(
        &mut session,
        [
            tree("root", 0, &["left", "void", "mid", "left"]),
            tree("left", 0, &["a", "b"]),
            empty("void", 0, true),
            tree("mid", 0, &["eot"]),
            leaf("a", 0, "A"),
            leaf("b", 0, "B"),
            eot,
        ],
    )
    .unwrap();
    let (items, stop) = content(&mut session, "root");
    let [a, b] = ["A", "B"].map(|text| item("text/plain", "", text));
    let eot = item("application/x-protobuf; type=EndOfTurn", "", "");
    assert_eq!(
        items,
        [a.clone(), b.clone(), eot, a, b],
        "twice reached, twice there; empty with metadata counts"
    );
    assert_eq!(stop, Stop::End);
}

#[test]
fn ev_302_cursors_are_independent_and_late_ones_see_all() {
    let mut session = server();
    feed(&mut session, [more("p", 0, "a")]).unwrap();
    let node = session.nodes().node("p").unwrap();
    let early = session.nodes().open(node, None);
    let (mut seen_early, mut seen_late) = (Vec::new(), Vec::new());
    assert_eq!(drain(&mut session, early, &mut seen_early), Stop::Pending);
    feed(&mut session, [leaf("p", 1, "b")]).unwrap();
    assert_eq!(drain(&mut session, early, &mut seen_early), Stop::End);
    let late = session.nodes().open(node, None);
    assert_eq!(drain(&mut session, late, &mut seen_late), Stop::End);
    assert_eq!(seen_early, seen_late);
    assert!(
        matches!(session.nodes().read(early), CursorRead::End),
        "the end stays the end"
    );
}

#[test]
fn ev_303_a_cursor_parks_at_the_first_gap_and_wakes_when_it_is_filled() {
    // Each step: what arrives, what is readable then, and whether the cursor was woken for it.
    let steps = [
        (leaf("b", 0, "B"), "", false),
        (tree("t", 1, &["b"]), "", false),
        (branch("t", 0, &["a"]), "", true),
        (leaf("a", 2, "3"), "", false),
        (more("a", 0, "1"), "1", true),
        (more("a", 1, "2"), "123|B", true),
    ];
    let mut session = server();
    let node = session.nodes().node("t").unwrap();
    let cursor = session.nodes().open(node, None);
    let mut items = Vec::new();
    assert_eq!(drain(&mut session, cursor, &mut items), Stop::Pending);
    for (fragment, readable, wakes) in steps {
        feed(&mut session, [fragment.clone()]).unwrap();
        let woken = outputs(&mut session)
            .iter()
            .any(|output| matches!(output, SessionOutput::Ready(id) if *id == cursor));
        assert_eq!(woken, wakes, "{fragment:?}");
        drain(&mut session, cursor, &mut items);
        let texts: Vec<&str> = items
            .iter()
            .map(|item| std::str::from_utf8(&item.data).unwrap())
            .collect();
        assert_eq!(texts.join("|"), readable, "{fragment:?}");
    }
    assert!(matches!(session.nodes().read(cursor), CursorRead::End));
}

/// EV-211
#[test]
fn ev_304_leaves_do_not_merge_and_fragments_do() {
    let mut session = server();
    feed(
        &mut session,
        [
            tree("t", 0, &["a", "b"]),
            more("a", 0, "1"),
            leaf("a", 1, "2"),
            leaf("b", 0, "3"),
        ],
    )
    .unwrap();
    assert_eq!(texts(&mut session, "t"), ["12", "3"]);
}

/// A chain `n0 -> n1 -> ... -> n(len-1)`, the last one a leaf.
fn chain(session: &mut crate::session::SessionMachine, len: usize, up: bool) {
    let link = |at: usize| {
        if at + 1 == len {
            leaf(&format!("n{at}"), 0, "end")
        } else {
            tree(&format!("n{at}"), 0, &[&format!("n{}", at + 1)])
        }
    };
    let order: Box<dyn Iterator<Item = usize>> = if up {
        Box::new((0..len).rev())
    } else {
        Box::new(0..len)
    };
    for at in order {
        session.handle(fragments([link(at)]), T0).unwrap();
    }
}

#[test]
fn ev_305_depth_1024_works_and_1025_aborts_whatever_the_order_of_arrival() {
    for up in [false, true] {
        for (len, stop) in [
            (1_024, Stop::End),
            (1_025, Stop::Failed(Reason::DepthLimit)),
        ] {
            let mut session = server();
            chain(&mut session, len, up);
            assert_eq!(content(&mut session, "n0").1, stop, "{len}");
            assert_eq!(session.aborted().is_some(), stop != Stop::End);
        }
        let mut session = server();
        chain(&mut session, 1_025, up);
        assert_eq!(
            content(&mut session, "n1").1,
            Stop::End,
            "what is not read is no error"
        );
    }
}

#[test]
fn ev_305_a_chain_of_a_million_nodes_is_read_and_freed_without_recursion() {
    const LEN: usize = 1_000_000;
    // Recursion would overflow this small stack.
    let small = std::thread::Builder::new().stack_size(256 * 1024);
    let run = small.spawn(|| {
        let mut session = server_with(|_, limits| {
            limits.max_depth = LEN;
            limits.max_nodes = LEN;
            limits.max_visits = u32::MAX;
            limits.session_visits = u32::MAX;
        });
        chain(&mut session, LEN, false);
        assert_eq!(texts(&mut session, "n0"), ["end"]);
        session.abort(crate::evergreen::Status::new(Reason::Cancelled, "enough"));
    });
    run.unwrap().join().unwrap();
}

/// `levels` trees that list the next one twice, over `bottom`.
pub(super) fn bomb(session: &mut crate::session::SessionMachine, levels: usize, bottom: Fragment) {
    for level in 0..levels {
        let below = if level + 1 == levels {
            "bottom".to_owned()
        } else {
            format!("n{}", level + 1)
        };
        session
            .handle(
                fragments([tree(&format!("n{level}"), 0, &[&below, &below])]),
                T0,
            )
            .unwrap();
    }
    session.handle(fragments([bottom]), T0).unwrap();
}

#[test]
fn ev_306_dag_bombs_of_chunks_and_of_empty_nodes_fail_the_read_alone() {
    for bottom in [leaf("bottom", 0, "x"), empty("bottom", 0, true)] {
        let mut session = server_with(|_, limits| limits.session_visits = u32::MAX);
        bomb(&mut session, 64, bottom);
        assert_eq!(
            content(&mut session, "n0").1,
            Stop::Failed(Reason::FlattenLimit)
        );
        assert!(
            session.aborted().is_none(),
            "the reader's action decides (EV-107)"
        );
        assert_eq!(content(&mut session, "n60").1, Stop::End, "others read on");
    }
}

#[test]
fn ev_306_visits_and_bytes_of_a_read_are_limited_exactly() {
    // A tree of two trees of two leaves each: 7 visits, 4 bytes.
    for (visits, bytes, stop) in [
        (7, 4, Stop::End),
        (6, 4, Stop::Failed(Reason::FlattenLimit)),
        (7, 3, Stop::Failed(Reason::FlattenLimit)),
    ] {
        let mut session = server_with(|_, limits| {
            limits.max_visits = visits;
            limits.max_read_bytes = bytes;
        });
        bomb(&mut session, 2, leaf("bottom", 0, "x"));
        assert_eq!(
            content(&mut session, "n0").1,
            stop,
            "{visits} visits, {bytes} bytes"
        );
    }
}

/// EV-215, EV-309
#[test]
fn ev_307_an_output_is_read_while_it_is_produced_even_if_mentioned_before_its_action() {
    let mut session = server();
    act(&mut session, action("g", "in=t", "out=o2")).unwrap();
    let reader = start(&mut session);
    feed(
        &mut session,
        [tree("t", 0, &["p", "o1"]), leaf("p", 0, "said ")],
    )
    .unwrap();
    let cursor = session
        .nodes()
        .open(reader.inputs[0].1, Some(reader.action));
    let mut items = Vec::new();
    assert_eq!(drain(&mut session, cursor, &mut items), Stop::Pending);
    act(&mut session, action("f", "in=p", "out=o1")).unwrap();
    let producer = start(&mut session);
    let text = of("text/plain", "").unwrap();
    for part in ["by ", "whom?"] {
        session
            .nodes()
            .write(producer.outputs[0].1, &text, part.into())
            .unwrap();
        assert!(
            outputs(&mut session)
                .iter()
                .any(|output| matches!(output, SessionOutput::Ready(id) if *id == cursor))
        );
        assert_eq!(
            drain(&mut session, cursor, &mut items),
            Stop::Pending,
            "nothing is final yet"
        );
    }
    session.calls().finish(producer.action);
    assert_eq!(drain(&mut session, cursor, &mut items), Stop::End);
    assert_eq!(
        items,
        [
            item("text/plain", "", "said "),
            item("text/plain", "", "by whom?")
        ]
    );
}

#[test]
fn ev_307_a_whole_plan_is_one_message() {
    let mut session = server();
    let plan = crate::evergreen::WireMessage {
        fragments: vec![leaf("p", 0, "x")].into(),
        actions: vec![
            action("c", "in=o2", "out=o3"),
            action("b", "in=o1", "out=o2"),
            action("a", "in=p", "out=o1"),
        ],
        wire_bytes: 0,
    };
    session.handle(plan, T0).unwrap();
    let names: Vec<String> = starts(&mut session)
        .iter()
        .map(|start| start.name.to_string())
        .collect();
    assert_eq!(names, ["c", "b", "a"], "all run; data alone orders them");
}

#[test]
fn ev_308_an_action_that_reads_its_own_output_aborts_as_soon_as_it_is_visible() {
    let cycle = Err(Reason::ActionCycle);
    let call = || action("f", "in=t", "out=o other=o2");
    assert_eq!(act(&mut server(), action("f", "in=o", "out=o")), cycle);
    // Below the input, in every order of action and edges.
    let edges = [tree("t", 0, &["u"]), tree("u", 0, &["o2"])];
    for order in orders(&[0, 1, 2]) {
        let mut session = server();
        let outcome = order.iter().try_for_each(|&step| match edges.get(step) {
            Some(edge) => feed(&mut session, [edge.clone()]),
            None => act(&mut session, call()),
        });
        assert_eq!(outcome, cycle, "{order:?}");
    }
    // A loop over two actions is legal to send.
    let mut session = server();
    act(&mut session, action("f", "in=o2", "out=o1")).unwrap();
    assert_eq!(act(&mut session, action("g", "in=o1", "out=o2")), Ok(()));
}

#[test]
fn ev_308_a_reader_finds_an_action_cycle_that_a_cut_search_has_missed() {
    let mut session = server_with(|_, limits| limits.cycle_visits = 1);
    act(&mut session, action("f", "in=t", "out=o")).unwrap();
    let start = start(&mut session);
    feed(&mut session, [tree("t", 0, &["u"]), tree("u", 0, &["o"])]).unwrap();
    let (_, stop) = read_node(&mut session, start.inputs[0].1, Some(start.action));
    assert_eq!(stop, Stop::Failed(Reason::ActionCycle));
    assert!(session.aborted().is_some());
}

#[test]
fn ev_309_reading_during_arrival_gives_the_same_as_reading_afterwards() {
    let list = [
        tree("t", 0, &["a", "b"]),
        more("a", 0, "1"),
        leaf("a", 1, "2"),
        leaf("b", 0, "3"),
    ];
    for order in orders(&list) {
        let mut session = server();
        act(&mut session, action("f", "in=t", "out=o")).unwrap();
        let start = start(&mut session);
        let cursor = session.nodes().open(start.inputs[0].1, Some(start.action));
        let mut streamed = Vec::new();
        for fragment in order {
            drain(&mut session, cursor, &mut streamed);
            feed(&mut session, [fragment]).unwrap();
        }
        assert_eq!(drain(&mut session, cursor, &mut streamed), Stop::End);
        let (whole, _) = read_node(&mut session, start.inputs[0].1, Some(start.action));
        assert_eq!(streamed, whole);
    }
}
