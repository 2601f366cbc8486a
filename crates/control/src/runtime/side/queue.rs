//! [`SideQueue`]: the open requests of the side channel, and what its workers do next.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::super::envelope::Envelope;

/// Requests that wait for a worker, and those that are being worked on.
#[derive(Debug, Default)]
pub(crate) struct SideQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    /// The requests that have no answer yet, by number.
    open: HashMap<u64, OpenRequest>,
    next: u64,
    closed: bool,
}

#[derive(Debug)]
struct OpenRequest {
    rid: Option<String>,
    /// It has its answer, but somebody still works on it.
    cancelled: bool,
}

/// What a worker does next.
#[derive(Debug)]
pub(super) enum Job {
    Request(Ticket, Envelope),
    /// The instance of this request has an outcome.
    Begun(u64),
    /// There was nothing to do for a while.
    Idle,
}

/// How long a job may keep its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Weight {
    /// The time of a few file operations.
    Quick,
    /// As long as a compilation, if the controller has to be compiled again.
    MayCompile,
    /// As long as a compilation.
    Compiles,
}

impl Job {
    fn weight(&self) -> Weight {
        match self {
            Self::Begun(_) | Self::Idle => Weight::Quick,
            Self::Request(_, envelope) => match envelope.op.as_str() {
                "mk_module" => Weight::Compiles,
                "instantiate" => Weight::MayCompile,
                _ => Weight::Quick,
            },
        }
    }
}

/// An open request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) number: u64,
    pub(crate) rid: Option<String>,
}

impl SideQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request; `false` if too many are open.
    pub(super) fn admit(&self, envelope: Envelope) -> bool {
        let mut state = self.lock();
        if state.open.len() >= SIDE_PENDING_MAX {
            return false;
        }
        let number = state.next;
        state.next += 1;
        let rid = envelope.rid.clone();
        let request = OpenRequest {
            rid: rid.clone(),
            cancelled: false,
        };
        state.open.insert(number, request);
        let ticket = Ticket { number, rid };
        state.jobs.push_back(Job::Request(ticket, envelope));
        // All: the one that is woken may be one that does not take this job.
        self.changed.notify_all();
        true
    }

    /// The instance of a request may have an outcome. Called by its waker, any number of times.
    pub(crate) fn begun(&self, number: u64) {
        let mut state = self.lock();
        let queued = |job: &Job| matches!(job, Job::Begun(other) if *other == number);
        if state.open.contains_key(&number) && !state.jobs.iter().any(queued) {
            // Before requests that nobody has begun: its engine waits already.
            state.jobs.push_front(Job::Begun(number));
            self.changed.notify_all();
        }
    }

    /// Returns the next job of at most this weight; `None` once the queue is closed. The worker of the quickest jobs gets
    /// [`Job::Idle`] when none has come for `idle`.
    pub(super) fn next(&self, most: Weight, idle: Duration) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let first = state.jobs.iter().position(|job| job.weight() <= most);
            if let Some(job) = first.and_then(|first| state.jobs.remove(first)) {
                return Some(job);
            }
            let waited = self.changed.wait_timeout(state, idle);
            let (locked, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            state = locked;
            if waited.timed_out() && most == Weight::Quick {
                return Some(Job::Idle);
            }
        }
    }

    /// Ends a request. `false`: it has its answer already.
    pub(super) fn finish(&self, ticket: &Ticket) -> bool {
        let request = self.lock().open.remove(&ticket.number);
        request.is_some_and(|request| !request.cancelled)
    }

    /// Cancels the open requests of this `$rid`, and returns them. Those that no worker has begun are gone.
    pub(super) fn cancel(&self, rid: &str) -> Vec<Ticket> {
        let mut state = self.lock();
        let QueueState { jobs, open, .. } = &mut *state;
        let mut tickets = Vec::new();
        for (number, request) in open.iter_mut() {
            if !request.cancelled && request.rid.as_deref() == Some(rid) {
                request.cancelled = true;
                tickets.push(Ticket {
                    number: *number,
                    rid: request.rid.clone(),
                });
            }
        }
        jobs.retain(|job| match job {
            Job::Request(ticket, _) if tickets.contains(ticket) => {
                open.remove(&ticket.number);
                false
            }
            _ => true,
        });
        tickets
    }

    /// Whether a request was cancelled, but is not finished yet.
    pub(super) fn is_cancelled(&self, number: u64) -> bool {
        let state = self.lock();
        state
            .open
            .get(&number)
            .is_some_and(|request| request.cancelled)
    }

    /// Returns how many requests are open.
    pub(super) fn open(&self) -> usize {
        self.lock().open.len()
    }

    #[cfg(test)]
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

/// Open requests of the side channel.
pub(crate) const SIDE_PENDING_MAX: usize = 256;
