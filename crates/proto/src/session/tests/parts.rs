//! EV-740: nodes of chunks and children, and byte ranges of children.

use std::ops::Range;

use super::harness::*;
use crate::evergreen::{Fragment, MetadataMode, Payload, Reason, SessionLimits};
use crate::session::{
    Config, CursorRead, PeerAdapter, RetentionPolicy, SessionMachine, SliceOverlap,
};

/// A session that accepts nodes of chunks and children.
fn mixing() -> SessionMachine {
    mixing_with(|_, _| {})
}

fn mixing_with(change: impl FnOnce(&mut Config, &mut SessionLimits)) -> SessionMachine {
    server_with(|config, limits| {
        config.adapter = PeerAdapter::ActionEngine;
        config.metadata = MetadataMode::PerChunk;
        change(config, limits);
    })
}

/// A fragment, not the last, with a byte range of `child`.
fn part(id: &str, seq: i32, child: &str, range: Range<u64>) -> Fragment {
    Fragment {
        range: Some(Box::new(range)),
        ..branch(id, seq, &[child])
    }
}

/// A fragment of text with metadata.
fn text(id: &str, seq: i32, data: &str) -> Fragment {
    chunk(id, seq, of("text/plain", ""), Some(data))
}

/// EV-209
#[test]
fn ev_740_chunks_and_children_are_read_in_seq_order_in_any_order_of_arrival() {
    let list = [
        text("m", 0, "one "),
        branch("m", 1, &["whole"]),
        part("m", 2, "whole", 2..4),
        text("m", 3, "two"),
        leaf("whole", 0, "0123456"),
        empty("m", 4, true),
    ];
    for joins in [false, true] {
        for order in orders(&list) {
            let mut session = mixing_with(|config, _| {
                if joins {
                    config.metadata = MetadataMode::PerItem;
                }
            });
            feed(&mut session, order).unwrap();
            assert_eq!(texts(&mut session, "m"), ["one ", "0123456", "23", "two"]);
        }
    }
    for order in [[0, 1], [1, 0]] {
        let mut session = server();
        let list = order.map(|at: usize| list[at].clone());
        assert_eq!(feed(&mut session, list), Err(Reason::NodeKind));
    }
}

/// EV-304
#[test]
fn ev_740_a_range_counts_bytes_of_the_flattened_child() {
    let nodes = |session: &mut SessionMachine| {
        let eot = chunk("eot", 0, of("x/end", ""), None);
        let eot = Fragment { last: true, ..eot };
        let list = [
            more("a", 0, "01"),
            leaf("a", 1, "23"),
            eot,
            leaf("b", 0, "4567"),
            tree("t", 0, &["a", "eot", "b"]),
        ];
        feed(session, list).unwrap();
    };
    let end = || item("x/end", "", "");
    let plain = |data| item("text/plain", "", data);
    for (range, expect) in [
        (0..u64::MAX, vec![plain("0123"), end(), plain("4567")]),
        (1..3, vec![plain("12")]),
        (0..4, vec![plain("0123")]),
        (2..6, vec![plain("23"), end(), plain("45")]),
        (4..5, vec![end(), plain("4")]),
        (5..u64::MAX, vec![plain("567")]),
        (7..1_000, vec![plain("7")]),
        (8..u64::MAX, vec![]),
        (4..4, vec![]),
    ] {
        let mut session = mixing();
        nodes(&mut session);
        let list = [part("m", 0, "t", range.clone()), empty("m", 1, true)];
        feed(&mut session, list).unwrap();
        assert_eq!(content(&mut session, "m"), (expect, Stop::End), "{range:?}");
    }
}

/// EV-303
#[test]
fn ev_740_a_range_is_read_as_it_arrives_and_the_rest_is_not_waited_for() {
    let mut session = mixing();
    let list = [part("m", 0, "slow", 1..3), text("m", 1, "after")];
    feed(&mut session, list).unwrap();
    feed(&mut session, [empty("m", 2, true)]).unwrap();
    let node = session.nodes().node("m").unwrap();
    let cursor = session.nodes().open(node, None);
    let mut items = Vec::new();
    for (data, stop) in [("ab", Stop::Pending), ("cd", Stop::End)] {
        let seq = i32::from(data == "cd");
        feed(&mut session, [text("slow", seq, data)]).unwrap();
        assert_eq!(drain(&mut session, cursor, &mut items), stop);
    }
    let texts: Vec<_> = items.iter().map(|item| &*item.data).collect();
    assert_eq!(texts, [b"b".as_slice(), b"c", b"after"]);
}

/// EV-217, EV-306
#[test]
fn ev_740_an_excerpt_is_an_edge_and_skipped_content_costs_visits() {
    let mut session = mixing();
    let circle = [part("a", 0, "b", 5..9), part("b", 0, "a", 0..1)];
    assert_eq!(feed(&mut session, circle), Err(Reason::Cycle));
    let mut session = mixing();
    assert_eq!(
        feed(&mut session, [part("a", 0, "a", 1..2)]),
        Err(Reason::Cycle)
    );
    // One byte is selected, and ten are read to reach it.
    for (bytes, stop) in [(10, Stop::End), (9, Stop::Failed(Reason::FlattenLimit))] {
        let mut session = mixing_with(|_, limits| limits.max_read_bytes = bytes);
        let list = [leaf("a", 0, "0123456789"), part("m", 0, "a", 9..10)];
        feed(&mut session, list).unwrap();
        feed(&mut session, [empty("m", 1, true)]).unwrap();
        assert_eq!(content(&mut session, "m").1, stop);
    }
    // Two nodes, and two pieces of which nothing is selected.
    for (visits, stop) in [(4, Stop::End), (3, Stop::Failed(Reason::FlattenLimit))] {
        let mut session = mixing_with(|_, limits| limits.max_visits = visits);
        let list = [
            more("a", 0, "0"),
            more("a", 1, "1"),
            leaf("a", 2, "2"),
            Fragment {
                last: true,
                ..part("m", 0, "a", 2..3)
            },
        ];
        feed(&mut session, list).unwrap();
        assert_eq!(content(&mut session, "m").1, stop);
    }
}

#[test]
fn ev_306_empty_fragments_count_as_visits() {
    for (visits, stop) in [(4, Stop::End), (3, Stop::Failed(Reason::FlattenLimit))] {
        let mut session = server_with(|_, limits| limits.max_visits = visits);
        let list = [0, 1, 2].map(|seq| empty("p", seq, seq == 2));
        feed(&mut session, list).unwrap();
        assert_eq!(content(&mut session, "p").1, stop);
    }
}

/// EV-741
#[test]
fn ev_740_children_of_excerpts_are_released_with_the_rest() {
    let mut session = mixing_with(|config, _| config.retain = RetentionPolicy::Unread);
    let last = Fragment {
        last: true,
        ..part("m", 0, "a", 1..2)
    };
    feed(&mut session, [last, leaf("a", 0, "0123")]).unwrap();
    assert_eq!(texts(&mut session, "m"), ["1"]);
    for id in ["m", "a"] {
        let stop = content(&mut session, id).1;
        assert_eq!(stop, Stop::Failed(Reason::NodeReleased), "{id}");
    }
    assert_eq!(session.retained_bytes(), 2, "two ids");
}

/// EV-410
#[test]
fn ev_740_a_range_applies_to_referenced_content() {
    let refers = |id: &str| {
        let uri = Payload::Ref("file:///1".into());
        let mut fragment = chunk(id, 0, of("text/plain", ""), None);
        fragment.chunk.as_mut().unwrap().payload = Some(uri);
        Fragment {
            last: true,
            ..fragment
        }
    };
    let mut session = mixing_with(|config, _| config.references = true);
    let list = [part("m", 0, "a", 3..8), text("m", 1, "after"), refers("a")];
    feed(&mut session, list).unwrap();
    let node = session.nodes().node("m").unwrap();
    let cursor = session.nodes().open(node, None);
    assert!(matches!(
        session.nodes().read(cursor),
        CursorRead::Reference(_)
    ));
    let meant = |range, more| SliceOverlap { range, more };
    assert_eq!(
        session.nodes().count_reference(cursor, 2),
        Ok(meant(0..0, true))
    );
    assert_eq!(
        session.nodes().count_reference(cursor, 4),
        Ok(meant(1..4, true))
    );
    assert_eq!(
        session.nodes().count_reference(cursor, 9),
        Ok(meant(0..2, false))
    );
    session.nodes().end_reference(cursor);
    let mut items = vec![item("text/plain", "", "")];
    assert_eq!(drain(&mut session, cursor, &mut items), Stop::Pending);
    assert_eq!(items[1..], [item("text/plain", "", "after")]);
}
