//! Handles a panic of the session's own code: the session ends with `FUNCTION`, all waiting tasks are woken, and the
//! panic is counted. A panic of a function is caught where it is polled (`run::flow`) and ends one action.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sapwood_proto::evergreen::Status;

use super::failure;
use super::link::SessionLink;
use crate::node::panic_text;

/// Wraps everything that polls one session. Clones guard the same session. Dropping the guard of the session's task
/// ends the session if nothing else did, so that neither its transport nor its readers wait for ever.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    link: SessionLink,
    /// Counter of panics (OA-913).
    panics: Arc<AtomicU64>,
}

impl Guard {
    pub(super) const fn new(link: SessionLink, panics: Arc<AtomicU64>) -> Self {
        Self { link, panics }
    }

    /// Runs `act` and returns its result; `None` if it panicked, and the session is over by then.
    pub(super) fn run<R>(&self, act: impl FnOnce() -> R) -> Option<R> {
        // Unwind safe: after a panic the session is ended, and nothing of what `act` changed is used for anything but
        // its end.
        catch_unwind(AssertUnwindSafe(act))
            .map_err(|payload| self.panicked(payload))
            .ok()
    }

    fn panicked(&self, payload: Box<dyn Any + Send>) {
        let panic = panic_text(payload);
        self.panics.fetch_add(1, Ordering::Relaxed);
        tracing::error!(panic, "the task of a session panicked");
        self.end();
    }

    /// The status with which the session was aborted, if it was.
    pub(super) fn aborted(&self) -> Option<Arc<Status>> {
        self.link.with(|live| live.machine().aborted().cloned())
    }

    /// Aborts the session, unless it is over.
    pub(super) fn end(&self) {
        self.link.with(|live| {
            if live.closed().is_none() {
                live.machine().abort(failure::lost());
            }
        });
        // Ending alone wakes no transport, and it has to send the status.
        self.link.flush();
    }
}
