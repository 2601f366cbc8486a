//! [`Epoch`]: one runtime process, from its handshake to its end, as its threads and its sequences share it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use super::numbers::CountedMemory;
use super::options::{RemoteLimits, RemoteOptions};
use super::process::ProcessGroup;
use super::reply::ResultLimits;
use super::side::SideQueue;
use super::table::RemoteTable;
use crate::host::CallFailure;
use crate::steer::StepObserver;

/// One runtime process.
pub(super) struct Epoch {
    table: Mutex<RemoteTable>,
    asked: Condvar,
    pub(super) side: SideQueue,
    pub(super) limits: RemoteLimits,
    pub(super) results: ResultLimits,
    pub(super) step_observer: StepObserver,
    pub(super) memory: CountedMemory,
    /// It is this program's own runtime, which has ops that others do not.
    pub(super) own: bool,
    /// Modules that it has, by id.
    uploaded: Mutex<HashSet<String>>,
    uploading: Mutex<()>,
    group: ProcessGroup,
    dead: AtomicBool,
    origin: Instant,
}

impl Epoch {
    pub(super) fn new(
        table: RemoteTable,
        options: &RemoteOptions,
        results: ResultLimits,
        group: ProcessGroup,
    ) -> Self {
        Self {
            table: Mutex::new(table),
            asked: Condvar::new(),
            side: SideQueue::default(),
            limits: options.limits,
            results,
            step_observer: Arc::clone(&options.step_observer),
            memory: CountedMemory::new(Arc::clone(&options.numbers)),
            own: options.command.own,
            uploaded: Mutex::default(),
            uploading: Mutex::default(),
            group,
            dead: AtomicBool::new(false),
            origin: Instant::now(),
        }
    }

    pub(super) fn now(&self) -> Time {
        Time::new(self.origin.elapsed())
    }

    pub(super) fn table(&self) -> MutexGuard<'_, RemoteTable> {
        // Its operations leave nothing half done.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn uploaded(&self) -> MutexGuard<'_, HashSet<String>> {
        self.uploaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the right to upload a module.
    pub(super) fn upload_turn(&self) -> MutexGuard<'_, ()> {
        self.uploading
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the exchange thread look for something to send.
    pub(super) fn notify(&self) {
        self.asked.notify_one();
    }

    /// Waits until there may be something to send, but not longer than `time`.
    pub(super) fn wait<'t>(
        &self,
        table: MutexGuard<'t, RemoteTable>,
        time: Duration,
    ) -> MutexGuard<'t, RemoteTable> {
        let waited = self.asked.wait_timeout(table, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The process has ended, or is about to.
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Ends the process and everything that it started. What follows is the supervisor's.
    pub(super) fn kill(&self, why: &str) {
        if !self.is_dead() {
            tracing::error!(why, "the runtime of the controllers is ended");
        }
        self.group.kill();
    }

    /// Ends the process because nobody needs it any more.
    pub(super) fn stop(&self) {
        self.group.kill();
    }

    /// The process is gone: everything that waits for it ends (AI-852).
    pub(super) fn lose(&self) {
        self.dead.store(true, Ordering::Release);
        let failure = lost();
        let woken = self.table().lose(failure.clone());
        self.asked.notify_all();
        self.side.close(&failure);
        self.memory.set(0);
        for waker in woken {
            waker.wake();
        }
    }
}

/// Why a sequence ends whose runtime is gone.
pub(super) fn lost() -> CallFailure {
    CallFailure::new(
        ErrorReason::RUNTIME_LOST,
        "the runtime of the controllers has ended",
    )
}
