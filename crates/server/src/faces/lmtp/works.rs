//! The works of all streams of one connection, polled together.
//!
//! An engine publishes a step to all its readers and then wakes them one by one. The first wakes the connection's task,
//! the others find the flag set; polling every work then gives the whole step, which becomes one message (D-6, LM-601).
//!
//! Invariants: `running` is sorted by stream, which is the order of admission; the flag is set whenever a work may be
//! ready that nothing will wake for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use futures::task::AtomicWaker;
use sapwood_proto::lmtp::{StreamKey, StreamPiece, StreamUpdate};

use super::work::{StreamWork, WorkUpdate};
use crate::ops::open_streams::OpenStreamGuard;

/// One waker for all works of a connection: a flag, and the connection's task.
#[derive(Default)]
struct WorksWaker {
    rung: AtomicBool,
    task: AtomicWaker,
}

impl Wake for WorksWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // One wake-up is enough until the connection has polled. `look` clears the flag before it polls any work, so an
        // event that comes while it polls sets it again.
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.task.wake();
        }
    }
}

/// The work of one stream, which counts as an open stream until it is dropped.
struct CountedWork {
    stream: StreamKey,
    work: StreamWork,
    /// It is parked, and not polled for now (LM-952, LM-964).
    stands: bool,
    _open: OpenStreamGuard,
}

/// The results of polling all works.
#[derive(Default)]
pub(super) struct WorkUpdates {
    pub(super) pieces: Vec<(StreamKey, StreamPiece)>,
    pub(super) over: Vec<StreamKey>,
    pub(super) updates: Vec<(StreamKey, StreamUpdate)>,
}

/// All work of a connection, in order of admission.
pub(super) struct StreamWorks {
    running: Vec<CountedWork>,
    bell: Arc<WorksWaker>,
    waker: Waker,
    /// Nothing is polled while too much waits to be sent (LM-607). The engine parks what is not read.
    parked: bool,
}

impl StreamWorks {
    pub(super) fn new() -> Self {
        let bell = Arc::new(WorksWaker::default());
        Self {
            running: Vec::new(),
            waker: Waker::from(Arc::clone(&bell)),
            bell,
            parked: false,
        }
    }

    /// Sets the task to wake: that of the connection that has the works now.
    pub(super) fn belong_to(&self, cx: &Context<'_>) {
        self.bell.task.register(cx.waker());
    }

    pub(super) fn begin(&mut self, stream: StreamKey, work: StreamWork, open: OpenStreamGuard) {
        // Keys grow, so the list stays sorted.
        self.running.push(CountedWork {
            stream,
            work,
            stands: false,
            _open: open,
        });
        // A work starts with its first poll, and nothing wakes for it before.
        self.bell.rung.store(true, Ordering::Release);
    }

    /// Drops the work of a stream, and with it what an engine does for it (D-7).
    pub(super) fn cancel(&mut self, stream: StreamKey) {
        // Not found where its work has ended by itself, in this very turn.
        if let Some(index) = self.position(stream) {
            self.running.remove(index);
        }
    }

    fn position(&self, stream: StreamKey) -> Option<usize> {
        let found = self
            .running
            .binary_search_by_key(&stream, |running| running.stream);
        found.ok()
    }

    pub(super) fn park(&mut self) {
        self.parked = true;
    }

    pub(super) fn unpark(&mut self) {
        self.parked = false;
        self.bell.rung.store(true, Ordering::Release);
    }

    /// Parks one stream, or lets it continue.
    pub(super) fn stand(&mut self, stream: StreamKey, stands: bool) {
        if let Some(index) = self.position(stream) {
            self.running[index].stands = stands;
            self.bell.rung.fetch_or(!stands, Ordering::AcqRel);
        }
    }

    /// Takes over the works that continue here, under keys of this connection. The others are dropped.
    pub(super) fn take_over(&mut self, other: Self, moved: &[(StreamKey, StreamKey)]) {
        for running in other.running {
            let found = moved.iter().find(|(old, _)| *old == running.stream);
            if let Some((_, stream)) = found.copied() {
                self.running.push(CountedWork { stream, ..running });
            }
        }
        // The keys were given in the order in which the client named its streams, and `cancel` searches by key.
        self.running.sort_by_key(|running| running.stream);
        // The works have the waker of the former connection until they are polled here.
        self.bell.rung.store(true, Ordering::Release);
    }

    /// The number of works.
    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    /// Whether a work is to be polled for which nothing wakes.
    pub(super) fn are_due(&self) -> bool {
        !self.parked && self.bell.rung.load(Ordering::Acquire)
    }

    /// Takes the items of one step of each stream, the streams whose work is over, and the updates of those that wait.
    pub(super) fn look(&mut self) -> WorkUpdates {
        let mut seen = WorkUpdates::default();
        // In this order: a parked connection must leave the flag as it is.
        if self.parked || !self.bell.rung.swap(false, Ordering::AcqRel) {
            return seen;
        }
        let mut context = Context::from_waker(&self.waker);
        let mut more = false;
        self.running.retain_mut(|running| {
            // `stand` sets the flag when it may continue.
            if running.stands {
                return true;
            }
            let stream = running.stream;
            let progress = running
                .work
                .look(&mut context, |piece| seen.pieces.push((stream, piece)));
            match progress {
                WorkUpdate::Over => seen.over.push(stream),
                WorkUpdate::Waiting => {
                    let update = running.work.update();
                    seen.updates.extend(update.map(|update| (stream, update)));
                }
                WorkUpdate::More => more = true,
            }
            progress != WorkUpdate::Over
        });
        // Only the flag, and no wake-up: the driver does not rest while works are due.
        if more {
            self.bell.rung.store(true, Ordering::Release);
        }
        seen
    }
}
