//! What a session may have flattened and searched (EV-306, EV-217, D-27).

use std::time::Duration;

use super::harness::*;
use super::reading::bomb;
use crate::evergreen::Reason;
use crate::session::{CursorId, CursorRead, SessionMachine, SessionOutput};
use crate::time::Time;

fn at(millis: u64) -> Time {
    T0 + Duration::from_millis(millis)
}

/// A session with a bomb of nodes that give nothing, and so many readers of it.
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

/// Reads on as far as the budget reaches; who is to be woken.
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
fn d_27_all_readers_of_a_session_share_one_budget_which_fills_as_time_passes() {
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
    // What is no graph is read all the same, and by then there is a leaf to be read.
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
fn d_27_one_turn_makes_few_visits_and_the_next_goes_on() {
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
fn d_27_what_a_search_has_no_budget_for_is_found_by_the_reader() {
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
    // With a budget it is found at once.
    let mut session = server();
    let eager = feed(&mut session, [tree("a", 0, &["b"]), tree("b", 0, &["a"])]);
    assert_eq!(eager, Err(Reason::Cycle));
    // A session that is over takes no budget from anybody.
    let (mut session, readers) = readers(1, 5_000);
    exhaust(&mut session, &readers);
    session.end_of_input(T0);
    assert!(session.is_closed());
    let mut items = Vec::new();
    let stop = drain(&mut session, readers[0], &mut items);
    assert_eq!(stop, Stop::Failed(Reason::FlattenLimit));
}
