//! Sections 7 and 8.1 of the Evergreen page: joining, queues, quotas and pauses.

use std::sync::Arc;

use bytes::Bytes;

use super::harness::*;
use crate::evergreen::{Chunk, Fragment, Metadata, Payload, Reason, WireMessage};
use crate::session::{NodeKey, SessionMachine, SessionOutput, WriteError};
use crate::time::Time;

/// A server session with one action, and the nodes of its outputs.
fn producer(session: &mut SessionMachine, outputs: &str) -> Vec<NodeKey> {
    act(session, action("f", "", outputs)).unwrap();
    start(session)
        .outputs
        .iter()
        .map(|(_, node)| *node)
        .collect()
}

fn text() -> Arc<Metadata> {
    of("text/plain", "").unwrap()
}

fn zeros(bytes: usize) -> Bytes {
    Bytes::from(vec![0; bytes])
}

fn payload_bytes(message: &WireMessage) -> usize {
    let payloads = message
        .fragments
        .iter()
        .filter_map(|fragment| fragment.chunk.as_ref()?.payload.as_ref());
    payloads.map(Payload::len).sum()
}

#[test]
fn ev_706_ready_fragments_are_joined_up_to_64_kib_and_a_larger_one_goes_alone() {
    let mut session = server();
    let nodes = producer(&mut session, "a=a b=b");
    for _ in 0..100 {
        session
            .nodes()
            .write(nodes[0], &text(), zeros(1_000))
            .unwrap();
    }
    session
        .nodes()
        .write(nodes[1], &text(), zeros(300_000))
        .unwrap();
    let messages: Vec<WireMessage> = std::iter::from_fn(|| session.next_message(T0)).collect();
    for message in &messages {
        let bytes = payload_bytes(message);
        assert!(
            bytes <= 64 * 1024 || message.fragments.len() == 1,
            "{bytes} in {}",
            message.fragments.len()
        );
    }
    assert_eq!(messages.iter().map(payload_bytes).sum::<usize>(), 400_000);
    assert!(messages.len() <= 4, "joined: {}", messages.len());
    assert!(
        session.next_message(T0).is_none(),
        "flushed when nothing is ready, never later"
    );
}

#[test]
fn ev_706_nodes_share_the_connection_by_bytes_and_keep_their_own_order() {
    let mut session = server();
    let nodes = producer(&mut session, "video=v tokens=t");
    for _ in 0..20 {
        session
            .nodes()
            .write(nodes[0], &text(), zeros(30_000))
            .unwrap();
    }
    for at in 0..20 {
        session
            .nodes()
            .write(nodes[1], &text(), Bytes::from(format!("{at} ")))
            .unwrap();
    }
    let all = sent(&mut session);
    let first_token = all
        .iter()
        .position(|fragment| &*fragment.id == "t")
        .unwrap();
    assert!(
        first_token <= 2,
        "the token output is not starved by the video output: {first_token}"
    );
    for id in ["v", "t"] {
        let seqs: Vec<i32> = all
            .iter()
            .filter(|fragment| &*fragment.id == id)
            .map(|fragment| fragment.seq)
            .collect();
        assert_eq!(seqs, (0..20).collect::<Vec<i32>>());
    }
}

#[test]
fn coalescing_off_gives_one_fragment_per_message() {
    // D-33
    let mut session = server_with(|config, _| config.coalesce = false);
    let nodes = producer(&mut session, "a=a b=b");
    for node in nodes {
        session.nodes().write(node, &text(), "x".into()).unwrap();
        session.nodes().write(node, &text(), "y".into()).unwrap();
    }
    let messages: Vec<WireMessage> = std::iter::from_fn(|| session.next_message(T0)).collect();
    assert!(messages.iter().all(|message| message.fragments.len() == 1));
    assert_eq!(messages.len(), 4);
}

#[test]
fn ev_801_payload_64_per_fragment_and_ids_are_counted_and_limited() {
    // ids: t, aa, bb; fragments: 3; children: 2 of 8 bytes; payload 3; metadata twice 10.
    let list = || {
        [
            tree("t", 0, &["aa", "bb"]),
            leaf("aa", 0, "xyz"),
            leaf("bb", 0, ""),
        ]
    };
    let wanted = 5 + 3 * 64 + 2 * 8 + 3 + 2 * 10;
    for (quota, expect) in [(wanted, Ok(())), (wanted - 1, Err(Reason::RetainedLimit))] {
        let mut session = server_with(|_, limits| limits.retained_bytes = quota);
        assert_eq!(feed(&mut session, list()), expect, "{quota}");
        if expect.is_ok() {
            assert_eq!(session.retained_bytes(), wanted);
            feed(&mut session, list()).unwrap();
            assert_eq!(
                session.retained_bytes(),
                wanted,
                "duplicates are not charged"
            );
        }
    }
    // Nodes that we produce are charged as well.
    let mut session = server_with(|_, limits| limits.retained_bytes = 200);
    let nodes = producer(&mut session, "o=o");
    session
        .nodes()
        .write(nodes[0], &text(), zeros(100))
        .unwrap();
    assert_eq!(
        session.nodes().write(nodes[0], &text(), zeros(100)),
        Err(WriteError::Closed)
    );
    assert_eq!(reason(session.aborted().unwrap()), Reason::RetainedLimit);
}

/// EV-801
#[test]
fn ev_803_the_overhead_of_fragments_fills_the_queue_as_well() {
    let mut session = server_with(|_, limits| limits.outbound_queue_bytes = 6_900);
    let nodes = producer(&mut session, "a=a");
    let before = session.retained_bytes();
    let mut tokens = 0;
    while session.nodes().write(nodes[0], &text(), zeros(5)).is_ok() {
        tokens += 1;
    }
    assert_eq!(tokens, 100, "64 and 5 bytes each");
    let retained = session.retained_bytes() - before;
    assert_eq!(retained, 6_900 + 10, "the queue's bytes, and the mimetype");
}

#[test]
fn ev_803_producers_wait_for_room_and_the_excess_is_one_fragment() {
    let mut session = server_with(|_, limits| limits.outbound_queue_bytes = 1_000);
    let nodes = producer(&mut session, "a=a b=b");
    session
        .nodes()
        .write(nodes[0], &text(), zeros(900))
        .unwrap();
    assert!(session.nodes().has_room());
    session
        .nodes()
        .write(nodes[0], &text(), zeros(5_000))
        .unwrap();
    assert!(!session.nodes().has_room());
    assert_eq!(
        session.nodes().write(nodes[1], &text(), zeros(1)),
        Err(WriteError::Full)
    );
    assert!(
        session.nodes().end(nodes[0], &text()).is_ok(),
        "an end never waits"
    );
    assert!(outputs(&mut session).is_empty());
    while session.next_message(T0).is_some() {}
    let events = outputs(&mut session);
    assert!(
        matches!(events[..], [SessionOutput::Writable]),
        "{events:?}"
    );
    assert!(session.nodes().has_room());
    session.nodes().write(nodes[1], &text(), zeros(1)).unwrap();
}

#[test]
fn ev_803_a_peer_that_does_not_read_for_60_seconds_is_a_slow_reader() {
    let at = Time::from_millis;
    let mut session = server();
    let nodes = producer(&mut session, "a=a");
    // An empty queue is no stall, however long it lasts.
    assert_eq!(session.wake_at(at(0)), None);
    session.tick(at(500_000));
    session.nodes().write(nodes[0], &text(), zeros(10)).unwrap();
    assert_eq!(session.wake_at(at(500_000)), Some(at(560_000)));
    session.next_message(at(530_000)).unwrap();
    session.nodes().write(nodes[0], &text(), zeros(10)).unwrap();
    assert_eq!(
        session.wake_at(at(530_000)),
        Some(at(590_000)),
        "progress restarts the timer"
    );
    session.tick(at(589_999));
    assert!(session.aborted().is_none());
    session.tick(at(590_000));
    assert_eq!(reason(session.aborted().unwrap()), Reason::SlowReader);
}

#[test]
fn ev_804_early_fragments_are_held_up_to_4096_per_node() {
    let early = |count: i32| (1..=count).map(|seq| more("p", seq, "x"));
    let mut session = server();
    feed(&mut session, early(4_096)).unwrap();
    feed(&mut session, [more("q", 4_097, "another node has its own")]).unwrap();
    feed(&mut session, [more("p", 0, "x")]).unwrap();
    feed(&mut session, [leaf("p", 4_097, "x")]).unwrap();
    assert_eq!(texts(&mut session, "p")[0].len(), 4_098);
    assert_eq!(feed(&mut server(), early(4_097)), Err(Reason::ReorderLimit));
}

/// Feeds KiB pieces of `id` until the machine asks for a pause; returns how many it accepted.
fn flood(session: &mut SessionMachine, id: &str, most: i32) -> i32 {
    for seq in 0..most {
        if session.inbound_paused() {
            return seq;
        }
        let metadata = (seq == 0).then(text);
        let payload = Some(Payload::Data(zeros(1_024)));
        let chunk = Some(Chunk { metadata, payload });
        let fragment = Fragment {
            id: id.into(),
            seq,
            chunk,
            ..Fragment::default()
        };
        session.handle(fragments([fragment]), T0).unwrap();
    }
    most
}

/// EV-805
#[test]
fn ev_802_ev_805_an_action_that_never_reads_stops_the_connection_at_the_high_water_mark() {
    let mut session = server();
    act(&mut session, action("f", "in=p", "out=o")).unwrap();
    let start = start(&mut session);
    let taken = flood(&mut session, "p", 65_536);
    assert!(
        (4_096..4_096 + 128).contains(&taken),
        "{taken} KiB of 64 MiB"
    );
    assert!(outputs(&mut session).is_empty());
    // Reading down to the low-water mark resumes the connection.
    let cursor = session.nodes().open(start.inputs[0].1, Some(start.action));
    let mut resumed_at = None;
    for read in 0..taken {
        session.nodes().read(cursor);
        if outputs(&mut session)
            .iter()
            .any(|output| matches!(output, SessionOutput::Resume))
        {
            resumed_at = Some(taken - read);
            break;
        }
    }
    assert!(
        (900..=1_025).contains(&resumed_at.unwrap()),
        "{resumed_at:?} KiB were left"
    );
    assert!(!session.inbound_paused());
}

#[test]
fn ev_802_ev_805_no_pause_while_a_reader_waits_or_before_an_action_claims_the_bytes() {
    // The wanted node is sent last, behind far more than the mark.
    let mut session = server();
    act(&mut session, action("f", "big=p wanted=w", "out=o")).unwrap();
    let start = start(&mut session);
    let cursor = session.nodes().open(start.inputs[1].1, Some(start.action));
    drain(&mut session, cursor, &mut Vec::new());
    assert_eq!(flood(&mut session, "p", 8_192), 8_192);
    feed(&mut session, [leaf("w", 0, "at last")]).unwrap();
    assert_eq!(drain(&mut session, cursor, &mut Vec::new()), Stop::End);
    assert!(session.inbound_paused(), "no reader is parked any more");
    session.calls().finish(start.action);
    let events = outputs(&mut session);
    assert!(
        events
            .iter()
            .any(|output| matches!(output, SessionOutput::Resume)),
        "{events:?}"
    );

    // Forward references: no reader could read these yet.
    let mut session = server();
    assert_eq!(flood(&mut session, "p", 8_192), 8_192);
    act(&mut session, action("f", "in=t", "out=o")).unwrap();
    assert!(!session.inbound_paused());
    feed(&mut session, [tree("t", 0, &["u"]), tree("u", 0, &["p"])]).unwrap();
    assert!(session.inbound_paused(), "claimed through two trees");
    let node = session.nodes().node("missing").unwrap();
    let cursor = session.nodes().open(node, None);
    session.nodes().read(cursor);
    let events = outputs(&mut session);
    assert!(
        events
            .iter()
            .any(|output| matches!(output, SessionOutput::Resume)),
        "a reader parks: {events:?}"
    );
}

#[test]
fn ev_805_small_payloads_do_not_pin_the_receive_buffer() {
    let retained_from = |payload: Bytes, wire_bytes: usize| {
        let range = payload.as_ptr_range();
        let chunk = Some(Chunk {
            metadata: Some(text()),
            payload: Some(Payload::Data(payload)),
        });
        let fragment = Fragment {
            id: "p".into(),
            last: true,
            chunk,
            ..Fragment::default()
        };
        let mut session = server();
        session
            .handle(
                WireMessage {
                    fragments: vec![fragment].into(),
                    actions: Vec::new(),
                    wire_bytes,
                },
                T0,
            )
            .unwrap();
        let node = session.nodes().node("p").unwrap();
        let cursor = session.nodes().open(node, None);
        let crate::session::CursorRead::Piece(piece) = session.nodes().read(cursor) else {
            panic!("there is one")
        };
        range.contains(&piece.data.as_ptr())
    };
    let buffer = zeros(1 << 20);
    assert!(!retained_from(buffer.slice(..1_000), 1_010), "small");
    assert!(
        !retained_from(buffer.slice(..100_000), 1 << 20),
        "a small part of its message"
    );
    assert!(
        retained_from(buffer.slice(..900_000), 1 << 20),
        "most of its message: not copied"
    );
}

#[test]
fn an_idle_session_is_small() {
    // EV-982: the machine's own share of 20 KiB.
    assert!(
        size_of::<SessionMachine>() <= 1_024,
        "{}",
        size_of::<SessionMachine>()
    );
}
