//! The owner of a model: takes requests from the inbox, steps a batch of sequences, and publishes their events.
//!
//! What is decided without a model is pure and has its own modules: the order of sequences in [`crate::scheduler`],
//! slots and KV cells in [`crate::prefix_cache`], the choice of tokens in [`crate::sampling`].
//!
//! ```text
//!   step:  receive ─► cancellations and deadlines ─► resume, park ─► admit ─► pre ─► plan (preempt) ─► mid begins
//!            ─► decode ─► output rows: collect mid, sample, post ─► publish everything, then wake readers once
//!
//!   step:  receive ─► cancellations, deadlines ─► resume, park ─► admit ─► pre ─► plan (preempt) ─► mid begins
//!                 ▲ └── preempt ◄──┤   ▲
//!                 │                └─ park ─► parked (its reader is slow) ─ unpark ─► waiting
//! ```
//!
//! A full outbox parks its sequence; nothing here waits for a reader, a lock or a steerer. A panic in the model ends
//! the requests of the call in which it occurred; any other panic ends all running and waiting requests, and the owner
//! starts again with empty state ([`recovery`]).

mod admission;
mod ending;
mod output;
mod prefix_followers;
mod recovery;
mod report;
mod sampling;
mod scoring;
mod sequence;
mod steering;
mod step;
mod thread;

use std::panic::{AssertUnwindSafe, catch_unwind};

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use slab::Slab;

use crate::api::{EngineError, EngineEvent, ModelInfo, SharedVocabulary};
use crate::config::Config;
use crate::inbox::OwnerInbox;
use crate::model::{BatchEntry, Model};
use crate::prefix_cache::PrefixCache;
use crate::queue::QueuePace;
use crate::sampling::Sampler;
use crate::scheduler::{Runnable, Scheduler, SequenceKey, StepShare};
use recovery::fenced;
use sequence::{RequestJob, RunningSequence};

pub use report::{SequenceId, StepReport};
pub(crate) use thread::run;

/// Owns a model and steps its sequences.
pub struct EngineOwner {
    model: Box<dyn Model>,
    info: ModelInfo,
    batch_tokens: usize,
    /// Output rows of a batch beyond one for each running sequence.
    spare_rows: usize,
    vocabulary: SharedVocabulary,
    /// The EOG tokens.
    ends: Vec<Token>,
    config: Config,
    inbox: OwnerInbox,
    jobs: Slab<RequestJob>,
    sequences: Slab<RunningSequence>,
    scheduler: Scheduler,
    cache: PrefixCache,
    sampler: Sampler,
    /// Measures how fast requests leave the queue.
    pace: QueuePace,
    /// The earliest deadline of any job.
    next_deadline: Option<Time>,
    /// When followers are notified next, if there are any.
    phases_due: Option<Time>,
    /// Why the model is lost, if it is.
    dead: Option<EngineError>,
    numbers: SequenceId,
    /// The current time of this step; later after the decode call than before it.
    now: Time,
    report: StepReport,
    /// Events of this step, in order, with the index of their job.
    outgoing: Vec<(usize, EngineEvent)>,
    /// Reads the time after the decode call. `None` if stepped by hand: time then stands still during a step.
    clock: Option<Box<dyn Fn() -> Time + Send>>,
    scratch: Scratch,
}

/// Buffers that are refilled in every step and retain their allocations.
#[derive(Default)]
struct Scratch {
    order: Vec<SequenceKey>,
    work: Vec<Runnable>,
    shares: Vec<StepShare>,
    batch: Vec<BatchEntry>,
    /// Sequences with an output row in this batch, and the row's index in the batch.
    rows: Vec<(SequenceKey, usize)>,
    awake: Vec<usize>,
}

impl EngineOwner {
    pub(crate) fn new(model: Box<dyn Model>, config: Config, inbox: OwnerInbox) -> Self {
        let info = model.info();
        let capacity = model.capacity();
        let vocabulary = model.vocabulary();
        let ends = (0..info.vocabulary_tokens)
            .filter(|&token| vocabulary.is_end(token))
            .collect();
        inbox.stats.cells_total.set(u64::from(capacity.cells));
        inbox.stats.idle.set(1);
        Self {
            scheduler: Scheduler::new(info.parallel as usize, config.ageing_turns),
            cache: PrefixCache::new(capacity, info.truncates),
            batch_tokens: capacity.batch_tokens as usize,
            spare_rows: capacity.rows.saturating_sub(info.parallel) as usize,
            model,
            info,
            vocabulary,
            ends,
            config,
            inbox,
            jobs: Slab::new(),
            sequences: Slab::new(),
            sampler: Sampler::default(),
            pace: QueuePace::default(),
            next_deadline: None,
            phases_due: None,
            dead: None,
            numbers: 0,
            now: Time::ZERO,
            report: StepReport::default(),
            outgoing: Vec::new(),
            clock: None,
            scratch: Scratch::default(),
        }
    }

    /// Does all work that is possible now, with at most one successful decode call, and returns without waiting. A
    /// panic that no narrower guard catches ends every request and leaves an owner that continues.
    pub fn step(&mut self, now: Time) -> StepReport {
        match catch_unwind(AssertUnwindSafe(|| self.try_step(now))) {
            Ok(report) => report,
            Err(_panic) => self.recover(now),
        }
    }

    fn try_step(&mut self, now: Time) -> StepReport {
        let step = self.report.step + 1;
        self.report = StepReport {
            step,
            ..StepReport::default()
        };
        self.now = now;
        self.receive(now);
        self.take_cancellations(now);
        self.park_and_resume(now);
        self.admit(now);
        if self.ask_pre(now) {
            // Admits new branches at once: a fork is cheapest while the parent's slot ends where the branch starts.
            self.admit(now);
        }
        let computed = self.pass(now);
        self.now = self.clock.as_ref().map_or(now, |clock| clock());
        self.gather(self.now);
        self.report_phases(self.now);
        self.publish();
        self.report.wake_at = self.wake_at(now);
        self.count(now, computed);
        self.report.clone()
    }

    /// Returns whether no request is in progress or waiting.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.sequences.is_empty() && self.outgoing.is_empty()
    }

    /// Publishes every event of the step to its reader, and only then wakes the readers (D-6).
    fn publish(&mut self) {
        let mut awake = std::mem::take(&mut self.scratch.awake);
        awake.clear();
        for (job, event) in self.outgoing.drain(..) {
            self.jobs[job].outbox.publish(event);
            awake.push(job);
        }
        awake.sort_unstable();
        awake.dedup();
        for &job in &awake {
            // Wakers and the values that a request holds are foreign code, so their panics are caught here.
            let woken = if self.jobs[job].ended {
                // Dropping the outbox wakes its reader.
                let job = self.jobs.remove(job);
                job.outbox.end();
                fenced(move || drop(job))
            } else {
                fenced(|| self.jobs[job].outbox.wake())
            };
            if !woken {
                self.inbox.stats.panics.add(1);
            }
        }
        self.scratch.awake = awake;
    }

    /// Returns when there is work again without a message from outside.
    fn wake_at(&self, now: Time) -> Option<Time> {
        let report = &self.report;
        let changed = !report.finished.is_empty() || !report.cancelled.is_empty();
        if self.scheduler.waiting() > 0
            && (changed || !report.parked.is_empty() || !report.preempted.is_empty())
        {
            return Some(now);
        }
        let mut earliest = self.next_deadline.into_iter().chain(self.phases_due).min();
        for key in self.scheduler.running() {
            let sequence = &self.sequences[key];
            let due = match sequence.asleep_until {
                Some(until) => until,
                // A steerer does not wake the owner when it is ready, so it is polled again soon.
                None if sequence.is_suspended() || sequence.cached_row.is_some() => {
                    now + steering::MIN_WAIT
                }
                None => now,
            };
            earliest = Some(earliest.map_or(due, |earliest| earliest.min(due)));
        }
        // `Time::MAX` is no timer: a script that hangs waits to be cancelled.
        earliest.filter(|&due| due < Time::MAX)
    }

    fn count(&self, now: Time, computed: usize) {
        let stats = &self.inbox.stats;
        let report = &self.report;
        let parked = self.scheduler.parked().count();
        stats.requests_running.set(
            self.jobs
                .iter()
                .filter(|(_, job)| job.started.is_some())
                .count() as u64,
        );
        stats.requests_waiting.set(
            self.jobs
                .iter()
                .filter(|(_, job)| job.started.is_none())
                .count() as u64,
        );
        stats.streams_parked.set(parked as u64);
        stats.cells_used.set(self.cache.used() as u64);
        stats.preemptions.add(report.preempted.len() as u64);
        stats.generation_tokens.add(u64::from(report.appended));
        if computed == 0 {
            return;
        }
        stats.steps.add(1);
        #[expect(clippy::cast_precision_loss, reason = "counts of a batch are small")]
        {
            stats.step_tokens.observe(computed as f64);
            stats
                .batch_size
                .observe((report.decoded.len() + report.prefilled.len()) as f64);
        }
        if let Some(clock) = &self.clock {
            stats.step_seconds.observe_span(clock().since(now));
        }
    }
}

impl std::fmt::Debug for EngineOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owner")
            .field("model", &self.info.name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
