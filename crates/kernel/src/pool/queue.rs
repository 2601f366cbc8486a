//! The queue of the pool, fair between callers.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Instant;

/// One piece of work.
pub(super) struct QueuedJob {
    pub(super) id: u64,
    pub(super) entered: Instant,
    pub(super) run: Box<dyn FnOnce() + Send>,
}

impl fmt::Debug for QueuedJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuedJob")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// FIFO for the work of one caller; round robin among callers.
///
/// Invariant: `order` names each caller with an entry in `jobs` once, and no entry is empty.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    order: VecDeque<u64>,
    jobs: HashMap<u64, VecDeque<QueuedJob>>,
    len: usize,
}

impl FairQueue {
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn len_of(&self, turn: u64) -> usize {
        self.jobs.get(&turn).map_or(0, VecDeque::len)
    }

    pub(super) fn push(&mut self, turn: u64, job: QueuedJob) {
        let jobs = self.jobs.entry(turn).or_default();
        if jobs.is_empty() {
            self.order.push_back(turn);
        }
        jobs.push_back(job);
        self.len += 1;
    }

    /// Takes the next piece of work of a caller that may have one done now, with its turn.
    pub(super) fn pop(&mut self, may: impl Fn(u64) -> bool) -> Option<(u64, QueuedJob)> {
        // A caller with more work goes to the back, so a long backlog delays only itself (D-54).
        let position = self.order.iter().position(|turn| may(*turn))?;
        let turn = self.order.remove(position)?;
        let jobs = self.jobs.get_mut(&turn)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.jobs.remove(&turn);
        } else {
            self.order.push_back(turn);
        }
        self.len -= usize::from(job.is_some());
        Some((turn, job?))
    }

    /// Removes a piece of work whose future was dropped, if it still waits.
    pub(super) fn remove(&mut self, turn: u64, id: u64) -> Option<QueuedJob> {
        let jobs = self.jobs.get_mut(&turn)?;
        let at = jobs.iter().position(|job| job.id == id)?;
        let job = jobs.remove(at);
        if jobs.is_empty() {
            self.jobs.remove(&turn);
            self.order.retain(|other| *other != turn);
        }
        self.len -= 1;
        job
    }
}
