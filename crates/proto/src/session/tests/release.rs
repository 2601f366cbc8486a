//! EV-955: content that every reader has passed is released, and later readers fail with NODE_RELEASED.

use bytes::Bytes;

use super::harness::*;
use crate::evergreen::{MetadataMode, Reason};
use crate::session::{ActionStart, CursorRead, PeerAdapter, RetentionPolicy, SessionMachine};

fn unread() -> SessionMachine {
    server_with(|config, _| config.retain = RetentionPolicy::Unread)
}

/// Copies the content of its input to its output, as the function echo does; `true` at the end.
fn echo(
    session: &mut SessionMachine,
    start: &ActionStart,
    cursor: crate::session::CursorId,
) -> bool {
    loop {
        match session.nodes().read(cursor) {
            CursorRead::Piece(piece) => {
                let output = start.outputs[0].1;
                session
                    .nodes()
                    .write(output, &piece.metadata, piece.data)
                    .unwrap();
            }
            CursorRead::End => {
                session.nodes().close(cursor);
                session.calls().finish(start.action);
                return true;
            }
            CursorRead::Pending => return false,
            CursorRead::Busy => session.nodes().begin_turn(),
            CursorRead::Reference(_) => unreachable!("there are no references"),
            CursorRead::Failed(status) => panic!("{status:?}"),
        }
    }
}

/// EV-801, EV-984
#[test]
fn ev_955_an_endless_echo_retains_constant_bytes() {
    let mut session = server_with(|config, limits| {
        config.retain = RetentionPolicy::Unread;
        limits.retained_bytes = 10_000;
    });
    act(&mut session, action("echo", "text=in", "response=out")).unwrap();
    let start = start(&mut session);
    let cursor = session.nodes().open(start.inputs[0].1, Some(start.action));
    let most = 4_000;
    let mut echoed = 0;
    for seq in 0..2_000 {
        feed(&mut session, [more("in", seq, "x".repeat(1_000).as_str())]).unwrap();
        assert!(session.retained_bytes() < most, "{seq}");
        assert!(!echo(&mut session, &start, cursor));
        assert!(session.retained_bytes() < most, "{seq}");
        echoed += sent(&mut session).len();
        // Two ids, and nothing else.
        assert_eq!(session.retained_bytes(), 5, "{seq}");
    }
    feed(&mut session, [empty("in", 2_000, true)]).unwrap();
    assert!(echo(&mut session, &start, cursor));
    let end = sent(&mut session);
    assert!(end.last().is_some_and(|fragment| fragment.last));
    assert_eq!((echoed, session.retained_bytes()), (2_000, 5));
    // A fragment that was accepted once is a duplicate for ever.
    feed(&mut session, [more("in", 7, "again")]).unwrap();
    assert_eq!(
        (session.stats().duplicates, session.retained_bytes()),
        (1, 5)
    );
}

/// Each case: fragments and actions, then what remains of some nodes after others were read.
#[test]
fn ev_955_content_is_retained_until_every_reader_has_passed_it() {
    // Two actions on one input, in one message: the second has not begun.
    let mut session = unread();
    feed(&mut session, [leaf("p", 0, "both")]).unwrap();
    let message = actions([action("f", "a=p", "o=x"), action("g", "a=p", "o=y")]);
    session.handle(message, T0).unwrap();
    let both = starts(&mut session);
    let first = read_node(&mut session, both[0].inputs[0].1, Some(both[0].action));
    assert_eq!(first.1, Stop::End);
    session.calls().finish(both[0].action);
    let second = read_node(&mut session, both[1].inputs[0].1, Some(both[1].action));
    assert_eq!(second, (vec![item("text/plain", "", "both")], Stop::End));
    assert_eq!(
        content(&mut session, "p").1,
        Stop::Failed(Reason::NodeReleased)
    );
    // An unread tree retains its children; one that was read has released them.
    let mut session = unread();
    let list = [
        tree("t", 0, &["a", "b"]),
        leaf("a", 0, "A"),
        leaf("b", 0, "B"),
    ];
    feed(&mut session, list).unwrap();
    assert_eq!(texts(&mut session, "a"), ["A"]);
    assert_eq!(
        texts(&mut session, "a"),
        ["A"],
        "the tree is still to be read"
    );
    assert_eq!(texts(&mut session, "t"), ["A", "B"]);
    for id in ["t", "a", "b"] {
        assert_eq!(
            content(&mut session, id).1,
            Stop::Failed(Reason::NodeReleased),
            "{id}"
        );
    }
    // A slow reader retains what a faster one has passed; when it is closed, that is released.
    let mut session = unread();
    feed(&mut session, [more("p", 0, "one"), more("p", 1, "two")]).unwrap();
    let node = session.nodes().node("p").unwrap();
    let (fast, slow) = (
        session.nodes().open(node, None),
        session.nodes().open(node, None),
    );
    let before = session.retained_bytes();
    let mut items = Vec::new();
    assert_eq!(drain(&mut session, fast, &mut items), Stop::Pending);
    assert_eq!(session.retained_bytes(), before);
    assert!(matches!(session.nodes().read(slow), CursorRead::Piece(_)));
    assert_eq!(before - session.retained_bytes(), 64 + 3 + 10);
    session.nodes().close(slow);
    assert_eq!(session.retained_bytes(), 1, "the id");
    // Without a reader nothing is released.
    let mut session = unread();
    feed(&mut session, [leaf("p", 0, "kept")]).unwrap();
    let message = actions([action("f", "a=p", "o=x")]);
    session.handle(message, T0).unwrap();
    let only = start(&mut session);
    session.calls().finish(only.action);
    assert_eq!(texts(&mut session, "p"), ["kept"]);
}

#[test]
fn ev_955_a_sent_output_is_released_unless_it_has_still_to_be_read() {
    let mut session = unread();
    let message = actions([action("f", "", "o=x"), action("g", "a=x", "o=y")]);
    session.handle(message, T0).unwrap();
    let both = starts(&mut session);
    let text = of("text/plain", "").unwrap();
    session
        .nodes()
        .write(both[0].outputs[0].1, &text, Bytes::from_static(b"hi"))
        .unwrap();
    session.calls().finish(both[0].action);
    assert_eq!(sent(&mut session).len(), 1);
    let read = read_node(&mut session, both[1].inputs[0].1, Some(both[1].action));
    assert_eq!(read, (vec![item("text/plain", "", "hi")], Stop::End));
    assert_eq!(
        content(&mut session, "x").1,
        Stop::Failed(Reason::NodeReleased)
    );
    // A tree of ours: the children are read through it until it is sent.
    let root = both[1].outputs[0].1;
    let child = session.nodes().make(Some(both[1].action)).unwrap();
    session.nodes().list(root, &[child]).unwrap();
    session
        .nodes()
        .write(child, &text, Bytes::from_static(b"below"))
        .unwrap();
    session.calls().finish(both[1].action);
    let cursor = session.nodes().open(root, None);
    let mut items = Vec::new();
    assert_eq!(
        sent(&mut session)
            .iter()
            .filter(|fragment| fragment.last)
            .count(),
        2
    );
    assert_eq!(drain(&mut session, cursor, &mut items), Stop::End);
    assert_eq!(items, [item("text/plain", "", "below")]);
    assert_eq!(
        content(&mut session, "y").1,
        Stop::Failed(Reason::NodeReleased)
    );
}

#[test]
fn ev_955_the_count_of_retained_bytes_does_not_drift() {
    for mode in [
        MetadataMode::Strict,
        MetadataMode::Lenient,
        MetadataMode::PerChunk,
    ] {
        let mut session = server_with(|config, _| {
            (config.retain, config.metadata) = (RetentionPolicy::Unread, mode);
        });
        let again = (mode != MetadataMode::Strict)
            .then(|| of("text/plain", ""))
            .flatten();
        let list = [
            chunk("p", 2, again.clone(), Some("c")),
            chunk("p", 1, again, Some("b")),
            more("p", 0, "a"),
            empty("p", 3, true),
        ];
        feed(&mut session, list).unwrap();
        assert_eq!(texts(&mut session, "p").concat(), "abc", "{mode:?}");
        assert_eq!(session.retained_bytes(), 1, "{mode:?}");
    }
}

/// EV-740
#[test]
fn ev_955_children_listed_past_a_final_fragment_are_unlisted() {
    let mut session = server_with(|config, _| {
        config.retain = RetentionPolicy::Unread;
        config.adapter = PeerAdapter::ActionEngine;
    });
    feed(&mut session, [branch("t", 5, &["c"]), leaf("c", 0, "C")]).unwrap();
    assert_eq!(texts(&mut session, "c"), ["C"]);
    assert!(session.retained_bytes() > 2, "the tree still lists it");
    feed(&mut session, [empty("t", 2, true)]).unwrap();
    assert_eq!(session.retained_bytes(), 2 + 64);
}
