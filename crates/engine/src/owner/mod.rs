//! The owner of a model: takes requests in, steps a batch of sequences, and emits their events.
//!
//! What is decided without a model is pure and stands elsewhere: the order among sequences in [`crate::scheduler`],
//! slots and cells in [`crate::prefix_cache`], tokens in [`crate::sampling`].
//!
//! ```text
//!   step:  receive ─► flags and deadlines ─► resume, park ─► admit ─► pre ─► plan (preempt) ─► mid begins
//!            ─► forward pass ─► rows: mid gathered, sample, post ─► publish everything, then wake readers once
//!
//!   sequence:  waiting ── admit ──► running ── finish ──► gone        cancelled from anywhere, before the batch forms
//!                 ▲ └── preempt ◄──┤   ▲
//!                 │                └─ park ─► parked (its reader is slow) ─ unpark ─► waiting
//! ```
//!
//! A full outbox parks its sequence; nothing here waits for a reader, a lock or a steerer. A panic in the model ends
//! the sequences of the call it happened in; any other panic ends what runs and waits, and the owner begins anew
//! ([`recovery`]).

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
    /// Rows of a batch beside one for everybody who runs.
    spare_rows: usize,
    vocabulary: SharedVocabulary,
    /// The tokens that end a generation.
    ends: Vec<Token>,
    config: Config,
    inbox: OwnerInbox,
    jobs: Slab<RequestJob>,
    sequences: Slab<RunningSequence>,
    scheduler: Scheduler,
    cache: PrefixCache,
    sampler: Sampler,
    /// How fast requests leave the queue.
    pace: QueuePace,
    /// The earliest deadline of any job.
    next_deadline: Option<Time>,
    /// When followers are notified next, if there are any.
    phases_due: Option<Time>,
    /// The model is lost; why.
    dead: Option<EngineError>,
    numbers: SequenceId,
    /// The time of this step, as far as it has come.
    now: Time,
    report: StepReport,
    /// Events of this step, in order, with their jobs.
    outgoing: Vec<(usize, EngineEvent)>,
    /// Reads the time after the forward pass; by hand it stands still during a step.
    clock: Option<Box<dyn Fn() -> Time + Send>>,
    scratch: Scratch,
}

/// Lists that are rebuilt in every step and keep their space.
#[derive(Default)]
struct Scratch {
    order: Vec<SequenceKey>,
    work: Vec<Runnable>,
    shares: Vec<StepShare>,
    batch: Vec<BatchEntry>,
    /// Sequences whose row is wanted, and where in the batch it is.
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

    /// Does everything that can be done now, with at most one forward pass, and returns without waiting. A panic on the way,
    /// where nothing narrower catches it, ends every request and leaves an owner that goes on.
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
            // A fork is cheapest while its branches end where their parent does.
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

    /// Nothing is in progress and nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.sequences.is_empty() && self.outgoing.is_empty()
    }

    /// Gives every event of the step to its reader, and only then wakes the readers (D-6).
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
            // Wakers and what a request holds are others' code: its panics are not ours.
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

    /// When there is something to do again without a message from outside.
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
                // Nobody tells us when a steerer is ready, so it is asked again soon.
                None if sequence.is_suspended() || sequence.cached_row.is_some() => {
                    now + steering::MIN_WAIT
                }
                None => now,
            };
            earliest = Some(earliest.map_or(due, |earliest| earliest.min(due)));
        }
        // The end of time is no appointment: a hanging script waits for its cancel.
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
