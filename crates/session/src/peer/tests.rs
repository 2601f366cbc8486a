//! Handles of a session: what dropping them does, and which tasks are woken.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;

use sapwood_proto::evergreen::{Fragment, Metadata, Payload, Reason, Status};
use sapwood_proto::session::{Config, SessionMachine, Side};
use sapwood_proto::time::Time;

use super::{PeerHandle, PeerNodeWriter};
use crate::{Live, SharedSession};

fn client() -> (SharedSession, PeerHandle) {
    let config = Config {
        partial_failure: true,
        ..Config::default()
    };
    let shared = SharedSession::new(SessionMachine::new(Side::Client, config, Time::ZERO));
    (shared.clone(), PeerHandle::new(shared, None))
}

fn sent_fragments(shared: &SharedSession) -> Vec<Fragment> {
    shared.with(|live| {
        let messages = std::iter::from_fn(|| live.machine().next_message(Time::ZERO));
        messages.flat_map(|message| message.fragments).collect()
    })
}

/// Writes to a node, for which there is room.
fn write(writer: &mut PeerNodeWriter, metadata: &Arc<Metadata>) {
    let mut written = pin!(writer.write(metadata, Bytes::from_static(b"half")));
    let polled = written
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!(polled, Poll::Ready(Ok(())));
}

/// With which reason a fragment ends its node.
fn end(fragment: &Fragment) -> Option<Reason> {
    let payload = fragment.chunk.as_ref()?.payload.as_ref()?;
    match payload {
        Payload::Status(Some(status)) if fragment.last => status.known(),
        _ => None,
    }
}

#[test]
fn ev_931_a_writer_that_is_dropped_ends_its_node_as_cancelled() {
    let (shared, peer) = client();
    let text = Arc::new(Metadata::of("text/plain"));
    drop(peer.write().unwrap());
    let mut begun = peer.write().unwrap();
    write(&mut begun, &text);
    drop(begun);
    let ends: Vec<Option<Reason>> = sent_fragments(&shared).iter().map(end).collect();
    assert_eq!(
        ends,
        [Some(Reason::Cancelled), None, Some(Reason::Cancelled)],
        "one that was not begun, one that was"
    );
    let mut ended = peer.write().unwrap();
    write(&mut ended, &text);
    let node = ended.end(&text).unwrap();
    drop(node);
    assert!(
        sent_fragments(&shared)
            .iter()
            .all(|fragment| end(fragment).is_none())
    );
    let failed = peer.write().unwrap();
    failed.fail(Status::new(Reason::BadText, ""));
    assert_eq!(end(&sent_fragments(&shared)[0]), Some(Reason::BadText));
    // A node cannot be ended once the session is over.
    let late = peer.write().unwrap();
    shared.with(|live| live.machine().abort(status()));
    drop(late);
}

fn status() -> Status {
    Status::new(Reason::Cancelled, "over")
}

struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn ev_109_waiting_for_the_end_registers_one_waker_per_task() {
    let (shared, _) = client();
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&count));
    let mut cx = Context::from_waker(&waker);
    for _ in 0..1_000 {
        assert!(shared.with(|live| live.poll_closed(&mut cx)).is_pending());
    }
    assert_eq!(
        Arc::strong_count(&count),
        3,
        "ours, the context's and the session's"
    );
    shared.with(|live| live.machine().abort(status()));
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    let closed = shared.with(|live| live.poll_closed(&mut cx));
    assert!(matches!(closed, Poll::Ready(Some(_))));
    assert_eq!(Arc::strong_count(&count), 2);
}

#[test]
fn ev_901_a_machine_that_panics_ends_its_session_and_wakes_its_readers() {
    let (shared, peer) = client();
    let mut reader = peer.write().unwrap().node().read();
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&count));
    let mut cx = Context::from_waker(&waker);
    // Dropping the writer ends the node, so the reader has something to read.
    assert!(reader.poll_piece(&mut cx).is_ready());
    let writer = peer.write().unwrap();
    let mut reader = writer.node().read();
    assert!(reader.poll_piece(&mut cx).is_pending());
    let panicking = std::panic::AssertUnwindSafe(|| {
        shared.with(|_: &mut Live| panic!("on purpose"));
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    // The next caller of `with`, such as the panicking task on its way out, sees the poisoned lock and ends the
    // session.
    shared.with(|_| ());
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    let Poll::Ready(Some(Err(status))) = reader.poll_piece(&mut cx) else {
        panic!("the reader gets the status of the session");
    };
    assert_eq!(status.known(), Some(Reason::Function));
    assert!(peer.write().is_err());
}
