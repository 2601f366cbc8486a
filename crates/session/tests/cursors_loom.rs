//! Cursors and wakers of a session, under a model checker (EV-503, EV-803).
//!
//! The very file that runs, `src/shared.rs`, is compiled here once more over loom's mutex, with the machine as it
//! is; loom then tries every interleaving of readers, a producer and the connection. A lost wake-up is a deadlock, which
//! loom reports. An ordinary test: `cargo test -p sapwood-session --test cursors_loom --release`.

#[path = "../src/shared.rs"]
#[expect(
    dead_code,
    unreachable_pub,
    reason = "it is a library's, and not all of it is checked here"
)]
mod shared;

/// What `src/live.rs` is in the library.
mod live {
    pub(crate) use sapwood_session::Live;
}

/// What `src/sync.rs` is in the library.
mod sync {
    pub(crate) use loom::sync::Mutex;
}

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Waker;

use bytes::Bytes;
use loom::future::block_on;
use loom::thread;
use sapwood_proto::evergreen::{Chunk, Fragment, Metadata, Payload, WireMessage};
use sapwood_proto::session::{
    Config, CursorId, CursorRead, NodeKey, SessionLimits, SessionMachine, Side,
};
use sapwood_proto::time::Time;
use shared::SharedSession;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    // Three threads with up to this many preemptions: every lost wake-up known needs two.
    checker.preemption_bound = Some(2);
    checker.check(model);
}

fn session(limits: SessionLimits) -> SharedSession {
    let config = Config {
        limits: Arc::new(limits),
        ..Config::default()
    };
    SharedSession::new(SessionMachine::new(Side::Server, config, Time::ZERO))
}

/// One byte of the node `n`.
fn fragment(seq: i32, last: bool) -> WireMessage {
    let metadata = (seq == 0).then(|| Arc::new(Metadata::of("text/plain")));
    let chunk = Chunk {
        metadata,
        payload: Some(Payload::Data(Bytes::from_static(b"x"))),
    };
    let fragment = Fragment {
        id: "n".into(),
        seq,
        last,
        chunk: Some(chunk),
        ..Fragment::default()
    };
    WireMessage {
        fragments: [fragment].into_iter().collect(),
        ..WireMessage::default()
    }
}

/// Bytes up to the end, read as a task reads; closes the cursor.
fn read_all(shared: &SharedSession, cursor: CursorId) -> usize {
    let mut bytes = 0;
    loop {
        let read = block_on(poll_fn(|cx| shared.with(|live| live.poll_read(cursor, cx))));
        match read {
            CursorRead::Piece(piece) => bytes += piece.data.len(),
            CursorRead::End => break,
            other => panic!("{other:?}"),
        }
    }
    shared.with(|live| live.close_cursor(cursor));
    bytes
}

fn node(shared: &SharedSession) -> NodeKey {
    shared
        .with(|live| live.machine().nodes().node("n"))
        .expect("an empty session takes a node")
}

#[test]
fn ev_503_every_reader_of_a_node_is_woken_by_new_fragments() {
    check(|| {
        let shared = session(SessionLimits::default());
        let key = node(&shared);
        let [one, other] =
            [(); 2].map(|()| shared.with(|live| live.machine().nodes().open(key, None)));
        let connection = {
            let shared = shared.clone();
            thread::spawn(move || {
                for message in [fragment(0, false), fragment(1, true)] {
                    shared
                        .with(|live| live.machine().handle(message, Time::ZERO))
                        .unwrap();
                }
            })
        };
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || read_all(&shared, other))
        };
        assert_eq!(read_all(&shared, one), 2);
        assert_eq!(reader.join().unwrap(), 2);
        connection.join().unwrap();
    });
}

#[test]
fn ev_503_dropping_a_waiting_reader_loses_no_other_wake_up() {
    check(|| {
        let shared = session(SessionLimits::default());
        let key = node(&shared);
        let [one, departing] =
            [(); 2].map(|()| shared.with(|live| live.machine().nodes().open(key, None)));
        let left = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut cx = std::task::Context::from_waker(Waker::noop());
                let _whatever = shared.with(|live| live.poll_read(departing, &mut cx));
                shared.with(|live| live.close_cursor(departing));
            })
        };
        let connection = {
            let shared = shared.clone();
            thread::spawn(move || {
                let arrived =
                    shared.with(|live| live.machine().handle(fragment(0, true), Time::ZERO));
                arrived.unwrap();
            })
        };
        assert_eq!(read_all(&shared, one), 1);
        left.join().unwrap();
        connection.join().unwrap();
    });
}

#[test]
fn ev_803_a_producer_without_room_is_woken_when_the_transport_takes_a_message() {
    check(|| {
        let limits = SessionLimits {
            outbound_queue_bytes: 1,
            ..SessionLimits::default()
        };
        let shared = session(limits);
        let key = node(&shared);
        shared
            .with(|live| live.machine().nodes().produce(key))
            .unwrap();
        let transport = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut bytes = 0;
                while bytes < 2 {
                    let message = block_on(poll_fn(|cx| {
                        shared.with(|live| live.poll_message(Time::ZERO, cx))
                    }));
                    bytes += message.unwrap().payload_bytes();
                }
            })
        };
        let metadata = Arc::new(Metadata::of("text/plain"));
        for _ in 0..2 {
            block_on(poll_fn(|cx| shared.with(|live| live.poll_room(cx))));
            let byte = Bytes::from_static(b"x");
            let written =
                shared.with_flushed(|live| live.machine().nodes().write(key, &metadata, byte));
            written.unwrap();
        }
        transport.join().unwrap();
    });
}
