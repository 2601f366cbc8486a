use futures::task::{ArcWake, waker};

use sapwood_proto::steer::{StepReport, VariableWrite};

use super::*;
use crate::api::{ChoiceEnd, FinishReason, TokenUsage, Tokens};

#[derive(Default)]
struct Count(AtomicU32);

impl ArcWake for Count {
    fn wake_by_ref(count: &Arc<Self>) {
        count.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn tokens(choice: u32) -> EngineEvent {
    EngineEvent {
        step: 1,
        choice,
        kind: EventKind::Tokens(Tokens::default()),
    }
}

#[test]
fn the_quota_is_per_choice_and_the_owner_is_woken_when_half_is_free() {
    let waker = Arc::new(OwnerWaker::default());
    let (mut sender, mut handle) = outbox(2, 4, Arc::clone(&waker));
    for _ in 0..4 {
        assert!(sender.has_room(0));
        sender.publish(tokens(0));
    }
    assert_eq!(handle.try_next(), None, "an incomplete step is not visible");
    sender.wake();
    assert!(!sender.has_room(0) && sender.has_room(1));
    assert!(!sender.has_room(2), "there is no third choice");
    sender.park();
    handle.try_next();
    assert!(
        sender.has_room(0) && !waker.is_observed(),
        "the owner is not woken for a single place"
    );
    handle.try_next();
    assert!(waker.is_observed());
    handle.try_next();
    assert!(!waker.is_observed(), "the owner is woken once");
}

/// A large report counts as several events, and the owner is woken once there is room for its choice.
#[test]
fn reports_weigh_by_their_bytes() {
    let waker = Arc::new(OwnerWaker::default());
    let (mut sender, mut handle) = outbox(2, 4, Arc::clone(&waker));
    let report = |bytes: usize| EngineEvent {
        step: 1,
        choice: 0,
        kind: EventKind::Report(StepReport {
            logs: "x".repeat(bytes),
            ..StepReport::default()
        }),
    };
    for (bytes, has_room) in [(4095, true), (4096, true), (4095, false)] {
        sender.publish(report(bytes));
        assert_eq!(sender.has_room(0), has_room, "{bytes}");
    }
    assert!(sender.has_room(1), "the quota is per choice");
    sender.publish(report(9 << 20));
    sender.wake();
    sender.park();
    for _ in 0..3 {
        handle.try_next();
        assert!(!waker.is_observed() && !sender.has_room(0));
    }
    handle.try_next();
    assert!(sender.has_room(0) && waker.is_observed());
}

/// Many small writes take the memory of a large report.
#[test]
fn reports_weigh_by_the_number_of_their_writes() {
    let (mut sender, _handle) = outbox(1, 10, Arc::default());
    let write = VariableWrite {
        name: "n".to_owned(),
        value: vec![0],
        append: false,
        when_version_is: None,
    };
    let report = |writes: usize| EngineEvent {
        step: 1,
        choice: 0,
        kind: EventKind::Report(StepReport {
            storage: vec![write.clone(); writes],
            ..StepReport::default()
        }),
    };
    // Each takes 130 bytes.
    for (writes, has_room) in [(31, true), (126, true), (127, false)] {
        sender.publish(report(writes));
        assert_eq!(sender.has_room(0), has_room, "{writes}");
    }
}

/// The events that end other choices may follow the tokens of a parked one.
#[test]
fn a_reader_that_has_read_everything_has_woken_the_owner() {
    let waker = Arc::new(OwnerWaker::default());
    let (mut sender, mut handle) = outbox(4, 2, Arc::clone(&waker));
    (0..2).for_each(|_| sender.publish(tokens(0)));
    sender.wake();
    sender.park();
    for choice in 1..4 {
        let (reason, stop) = (FinishReason::Controller, None);
        sender.publish(EngineEvent {
            step: 2,
            choice,
            kind: EventKind::Finish(ChoiceEnd { reason, stop }),
        });
    }
    sender.wake();
    while handle.try_next().is_some() {}
    assert!(sender.has_room(0) && waker.is_observed());
}

#[test]
fn readers_are_woken_once_per_step_and_the_end_is_last() {
    let (mut sender, mut handle) = outbox(1, 4, Arc::default());
    let count = Arc::new(Count::default());
    let waker = waker(Arc::clone(&count));
    let mut context = Context::from_waker(&waker);
    let mut poll = || Pin::new(&mut handle).poll_next(&mut context);
    assert_eq!(poll(), Poll::Pending);
    sender.publish(tokens(0));
    sender.publish(tokens(0));
    assert_eq!(
        count.0.load(Ordering::SeqCst),
        0,
        "no reader is woken within a step"
    );
    sender.wake();
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert_eq!(poll(), Poll::Ready(Some(tokens(0))));
    let last = EngineEvent {
        step: 2,
        choice: 0,
        kind: EventKind::Usage(TokenUsage::default()),
    };
    sender.publish(last.clone());
    sender.end();
    drop(sender);
    assert_eq!(
        [poll(), poll(), poll()],
        [
            Poll::Ready(Some(tokens(0))),
            Poll::Ready(Some(last)),
            Poll::Ready(None)
        ]
    );
}

#[test]
fn reader_requests_reach_the_owner_and_closing_is_final() {
    let waker = Arc::new(OwnerWaker::default());
    let (sender, handle) = outbox(1, 4, Arc::clone(&waker));
    assert_eq!(
        (sender.reader_request(), waker.is_observed()),
        (ReaderRequest::Continue, false)
    );
    handle.stop();
    assert_eq!(
        (
            sender.reader_request(),
            waker.is_observed(),
            waker.is_observed()
        ),
        (ReaderRequest::Stop, true, false)
    );
    drop(handle);
    assert_eq!(
        (sender.reader_request(), waker.is_observed()),
        (ReaderRequest::Closed, true)
    );
}

#[test]
fn a_sender_dropped_before_its_end_sends_an_error() {
    let (sender, mut handle) = outbox(1, 4, Arc::default());
    drop(sender);
    let Some(EngineEvent {
        kind: EventKind::Error(error),
        ..
    }) = handle.try_next()
    else {
        panic!("no error")
    };
    assert_eq!(
        (error.code, error.reason.name()),
        (Code::Unavailable, "engine_dead")
    );
    let (sender, mut handle) = outbox(1, 4, Arc::default());
    sender.end();
    drop(sender);
    assert_eq!(handle.try_next(), None);
}
