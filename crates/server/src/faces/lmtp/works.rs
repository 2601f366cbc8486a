//! The works of all streams of one connection, polled together.
//!
//! An engine shows a step to all its readers and then wakes them one by one. The first wakes the connection's task, the
//! others find the flag set; a look at every work then gives the whole step, which becomes one message (D-6, LM-601).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use futures::task::AtomicWaker;
use sapwood_proto::lmtp::{StreamKey, StreamPiece, StreamUpdate};

use super::work::{StreamWork, WorkUpdate};
use crate::ops::open_streams::OpenStreamGuard;

/// Rung by whatever some work waits for.
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
        // One wake-up is enough until the owner has looked.
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.task.wake();
        }
    }
}

/// Work of one stream, counted as long as it lasts.
struct CountedWork {
    stream: StreamKey,
    work: StreamWork,
    /// Nobody looks at it for now (LM-952, LM-964).
    stands: bool,
    _open: OpenStreamGuard,
}

/// What a look at all work has shown.
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
    /// Nobody looks while too much waits to be sent (LM-607): engines park what is not read.
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

    /// Whom to wake.
    pub(super) fn belong_to(&self, cx: &Context<'_>) {
        self.bell.task.register(cx.waker());
    }

    pub(super) fn begin(&mut self, stream: StreamKey, work: StreamWork, open: OpenStreamGuard) {
        self.running.push(CountedWork {
            stream,
            work,
            stands: false,
            _open: open,
        });
        self.bell.rung.store(true, Ordering::Release);
    }

    /// Drops the work of a stream, and with it what an engine does for it (D-7).
    pub(super) fn cancel(&mut self, stream: StreamKey) {
        let found = self
            .running
            .binary_search_by_key(&stream, |running| running.stream);
        if let Ok(index) = found {
            self.running.remove(index);
        }
    }

    pub(super) fn park(&mut self) {
        self.parked = true;
    }

    pub(super) fn unpark(&mut self) {
        self.parked = false;
        self.bell.rung.store(true, Ordering::Release);
    }

    /// One stream stands still, or goes on.
    pub(super) fn stand(&mut self, stream: StreamKey, stands: bool) {
        let found = self
            .running
            .binary_search_by_key(&stream, |running| running.stream);
        if let Ok(index) = found {
            self.running[index].stands = stands;
            self.bell.rung.fetch_or(!stands, Ordering::AcqRel);
        }
    }

    /// Takes over what goes on here, under keys of this connection; the rest is dropped.
    pub(super) fn take_over(&mut self, other: Self, moved: &[(StreamKey, StreamKey)]) {
        for running in other.running {
            let found = moved.iter().find(|(old, _)| *old == running.stream);
            if let Some((_, stream)) = found.copied() {
                self.running.push(CountedWork { stream, ..running });
            }
        }
        self.running.sort_by_key(|running| running.stream);
        self.bell.rung.store(true, Ordering::Release);
    }

    /// How much work there is.
    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    /// Takes what one step has for any stream, the streams whose work is over, and updates of those without items.
    pub(super) fn look(&mut self, client_info: &mut WorkUpdates) {
        if self.parked || !self.bell.rung.swap(false, Ordering::AcqRel) {
            return;
        }
        let mut context = Context::from_waker(&self.waker);
        let mut more = false;
        self.running.retain_mut(|running| {
            if running.stands {
                return true;
            }
            let stream = running.stream;
            let seen = running.work.look(&mut context, |piece| {
                client_info.pieces.push((stream, piece))
            });
            more |= seen == WorkUpdate::More;
            match seen {
                WorkUpdate::Over => client_info.over.push(stream),
                WorkUpdate::Waiting => {
                    let updates = running.work.updates();
                    client_info
                        .updates
                        .extend(updates.map(|updates| (stream, updates)));
                }
                WorkUpdate::More => {}
            }
            seen != WorkUpdate::Over
        });
        if more {
            self.bell.rung.store(true, Ordering::Release);
        }
    }
}
