//! The budget of a session for flattening and searching (EV-306, EV-217, D-27).

use std::time::Duration;

use super::harness::*;
use super::reading::bomb;
use crate::evergreen::Reason;
use crate::session::{CursorId, CursorRead, SessionMachine, SessionOutput};
use crate::time::Time;

fn at(millis: u64) -> Time {
    T0 + Duration::from_millis(millis)
}

/// A session with a DAG bomb of empty nodes, and `count` readers of it.
fn readers(count: usize, visits: u32) -> (SessionMachine, Vec<CursorId>) {
    let mut session = server_with(|_, limits| {
        (limits.session_visits, limits.session_visits_per_second) = (visits, visits);
    });
    bomb(&mut session, 64, empty("bottom", 0, true));
    let node = session.nodes().node("n0").unwrap();
    let readers = (0..count)
        .map(|_| session.nodes().open(node, None))
        .collect();
    (session, readers)
}

/// Reads with each reader until the budget is used up.
fn exhaust(session: &mut SessionMachine, readers: &[CursorId]) {
    for &reader in readers {
        let mut items = Vec::new();
        assert_eq!(drain(session, reader, &mut items), Stop::Pending);
    }
}

fn woken(session: &mut SessionMachine) -> Vec<CursorId> {
    let ready = outputs(session)
        .into_iter()
        .filter_map(|output| match output {
            SessionOutput::Ready(cursor) => Some(cursor),
            _ => None,
        });
    ready.collect()
}

#[test]
fn d_27_all_readers_of_a_session_share_one_budget_that_refills_over_time() {
    let (mut session, readers) = readers(20, 5_000);
    exhaust(&mut session, &readers);
    assert_eq!(session.calls.nodes.readers.budget.left(), 0);
    assert!(session.aborted().is_none());
    let wakes = session.wake_at(T0).unwrap();
    assert_eq!(wakes, T0 + Duration::from_micros(819_200), "4,096 visits");
    outputs(&mut session);
    session.tick(at(819));
    assert_eq!(woken(&mut session), [], "one before");
    for second in 1..30 {
        session.tick(at(1_000 * second));
        let mut awake = woken(&mut session);
        awake.sort();
        assert_eq!(awake, readers, "every reader is asked");
        assert!(session.calls.nodes.readers.budget.left() <= 5_000);
        exhaust(&mut session, &awake);
        assert_eq!(session.calls.nodes.readers.budget.left(), 0);
    }
    // A node that is no tree needs no visits, so it is read without a budget.
    session
        .handle(fragments([leaf("plain", 0, "text")]), at(30_000))
        .unwrap();
    session.calls.nodes.readers.budget.charge(u32::MAX);
    assert_eq!(texts(&mut session, "plain"), ["text"]);
    for reader in readers {
        session.nodes().close(reader);
    }
    assert!(session.calls.nodes.readers.starved() == 0);
}

#[test]
fn d_27_visits_of_one_turn_are_limited_and_the_next_turn_continues() {
    let (mut session, readers) = readers(1, u32::MAX);
    let before = session.calls.nodes.readers.budget.left();
    let mut turns = 0;
    loop {
        match session.nodes().read(readers[0]) {
            CursorRead::Busy => {
                turns += 1;
                assert!(
                    matches!(session.nodes().read(readers[0]), CursorRead::Busy),
                    "not before"
                );
                assert_eq!(
                    before - session.calls.nodes.readers.budget.left(),
                    turns * 16_384
                );
                session.nodes().begin_turn();
            }
            CursorRead::Failed(status) => {
                assert_eq!(reason(&status), Reason::FlattenLimit);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        turns, 63,
        "the read may make 64 turns' visits, and fails in the last"
    );
}

#[test]
fn d_27_a_reader_finds_a_cycle_for_which_the_search_had_no_budget() {
    let mut session = server();
    session.calls.nodes.readers.budget.charge(u32::MAX);
    feed(&mut session, [tree("a", 0, &["b"]), tree("b", 0, &["a"])]).unwrap();
    assert_eq!(content(&mut session, "a").1, Stop::Pending);
    let node = session.nodes().node("a").unwrap();
    let cursor = session.nodes().open(node, None);
    session.tick(at(1_000));
    let mut items = Vec::new();
    let stop = drain(&mut session, cursor, &mut items);
    assert_eq!(stop, Stop::Failed(Reason::Cycle));
    // With a budget the cycle is found at once.
    let mut session = server();
    let eager = feed(&mut session, [tree("a", 0, &["b"]), tree("b", 0, &["a"])]);
    assert_eq!(eager, Err(Reason::Cycle));
    // A finished session is read without a budget.
    let (mut session, readers) = readers(1, 5_000);
    exhaust(&mut session, &readers);
    session.end_of_input(T0);
    assert!(session.is_closed());
    let mut items = Vec::new();
    let stop = drain(&mut session, readers[0], &mut items);
    assert_eq!(stop, Stop::Failed(Reason::FlattenLimit));
}

/// EV-802
#[test]
fn d_27_a_count_of_unread_bytes_is_charged() {
    let mut session = server_with(|_, limits| {
        limits.session_visits_per_second = 1;
        (limits.inbound_high_bytes, limits.inbound_low_bytes) = (100, 50);
    });
    act(&mut session, action("f", "in=t", "out=o")).unwrap();
    let ids: Vec<String> = (0..1_000).map(|at| format!("c{at}")).collect();
    let children: Vec<&str> = ids.iter().map(String::as_str).collect();
    feed(&mut session, [branch("t", 0, &children)]).unwrap();
    // No action claims these bytes, so they do not pause the connection.
    feed(&mut session, [leaf("free", 0, &"x".repeat(200))]).unwrap();
    for seq in 1..5 {
        let before = session.calls.nodes.readers.budget.left();
        feed(&mut session, [branch("t", seq, &[&format!("new{seq}")])]).unwrap();
        assert!(!session.inbound_paused());
        let charged = before - session.calls.nodes.readers.budget.left();
        assert!(charged >= 1_000, "{charged}");
    }
    session.calls.nodes.readers.budget.charge(u32::MAX);
    feed(&mut session, [branch("t", 5, &["new"])]).unwrap();
    assert!(!session.inbound_paused());
}

/// EV-308
#[test]
fn d_27_a_search_is_charged_for_the_inputs_that_it_begins_with() {
    let mut session = server();
    let inputs: Vec<String> = (0..60).map(|at| format!("i{at}=n{at}")).collect();
    act(&mut session, action("f", &inputs.join(" "), "out=o")).unwrap();
    feed(&mut session, [branch("above", 0, &["t"])]).unwrap();
    for seq in 0..5 {
        let before = session.calls.nodes.readers.budget.left();
        feed(&mut session, [branch("t", seq, &["o"])]).unwrap();
        let charged = before - session.calls.nodes.readers.budget.left();
        assert!(charged >= 60, "{charged}");
    }
}
