//! The takeover of a node's source between readers, under a model checker (KE-123).
//!
//! The very file that runs, `src/node/relay.rs`, is compiled here once more over loom's mutex; loom then tries every
//! interleaving of readers, of a reader that goes away and of the source's wake-up. A lost wake-up is a deadlock, which
//! loom reports. An ordinary test: `cargo test -p sapwood-kernel --test takeover_loom --release`.

#[path = "../src/node/relay.rs"]
mod relay;

/// What `src/sync.rs` is in the library.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use loom::thread::ThreadId;

    pub(crate) fn current_thread() -> ThreadId {
        loom::thread::current().id()
    }
}

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::Stream;
use futures::stream::FusedStream;
use loom::future::block_on;
use loom::sync::Mutex;
use loom::thread;
use relay::{ReaderPosition, Relay, RelayPoll, RelayRetention};

/// Gives one item once the gate is open.
struct Source {
    gate: Arc<Gate>,
    given: bool,
    /// Wakes inside its own poll before it waits, as a source that yields does.
    restless: bool,
}

struct Gate(Mutex<(bool, Option<Waker>)>);

impl Gate {
    fn open(&self) {
        let waker = {
            let mut gate = self.0.lock().expect("nobody panics with it");
            gate.0 = true;
            gate.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Stream for Source {
    type Item = u8;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<u8>> {
        if self.given {
            return Poll::Ready(None);
        }
        if std::mem::take(&mut self.restless) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let gate = self.gate.clone();
        let mut gate = gate.0.lock().expect("nobody panics with it");
        if gate.0 {
            self.given = true;
            return Poll::Ready(Some(7));
        }
        gate.1 = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl FusedStream for Source {
    fn is_terminated(&self) -> bool {
        self.given
    }
}

type Shared = Arc<Relay<Source>>;

fn made(restless: bool) -> (Shared, Arc<Gate>) {
    let gate = Arc::new(Gate(Mutex::new((false, None))));
    let source = Source {
        gate: gate.clone(),
        given: false,
        restless,
    };
    let retain = RelayRetention {
        window: None,
        weight_of: |_| 1,
    };
    (Arc::new(Relay::new(source, retain)), gate)
}

/// Reads to the end, as a task does.
fn read_all(relay: &Shared) -> Vec<u8> {
    let mut position = relay.open();
    let mut out = Vec::new();
    loop {
        let step = block_on(poll_fn(|cx| relay.poll(&mut position, cx.waker())));
        match step {
            RelayPoll::Item(item) => out.push(item),
            RelayPoll::End => break,
            RelayPoll::Released | RelayPoll::Reentered => panic!("neither happened"),
        }
    }
    relay.close(&position);
    out
}

/// Polls once and ignores the result.
fn poll_once(relay: &Shared) -> ReaderPosition {
    let mut position = relay.open();
    let _whatever = relay.poll(&mut position, Waker::noop());
    position
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    // Three threads with up to this many preemptions: every lost wake-up known needs two.
    checker.preemption_bound = Some(2);
    checker.check(model);
}

#[test]
fn ke_123_another_reader_takes_over_when_the_polling_one_is_dropped() {
    check(|| {
        let (relay, gate) = made(false);
        let departing = {
            let relay = relay.clone();
            thread::spawn(move || {
                let position = poll_once(&relay);
                relay.close(&position);
            })
        };
        let opening = thread::spawn(move || gate.open());
        assert_eq!(read_all(&relay), [7]);
        departing.join().unwrap();
        opening.join().unwrap();
        assert!(relay.is_ended());
    });
}

#[test]
fn ke_123_a_reader_that_is_never_polled_again_blocks_no_other() {
    check(|| {
        let (relay, gate) = made(true);
        let idle = {
            let relay = relay.clone();
            thread::spawn(move || poll_once(&relay))
        };
        let opening = thread::spawn(move || gate.open());
        assert_eq!(read_all(&relay), [7]);
        let position = idle.join().unwrap();
        opening.join().unwrap();
        relay.close(&position);
    });
}

#[test]
fn ke_123_every_waiting_reader_is_woken() {
    check(|| {
        let (relay, gate) = made(false);
        let other = {
            let relay = relay.clone();
            thread::spawn(move || read_all(&relay))
        };
        let opening = thread::spawn(move || gate.open());
        assert_eq!(read_all(&relay), [7]);
        assert_eq!(other.join().unwrap(), [7]);
        opening.join().unwrap();
    });
}
