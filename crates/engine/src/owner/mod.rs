//! The owner of a model: takes requests from the inbox, steps a batch of sequences, and publishes their events.
//!
//! ```text
//!   step:  receive ─► cancellations, deadlines ─► open ─► resume, park ─► admit ─► pre ─► plan (preempt) ─► mid begins
//!            ─► decode ─► output rows: collect mid, sample, post ─► publish everything, then wake readers once
//!
//!   request:  waiting ── admit ──► running ── its last token, stop, error, cancel ──► ended
//!                 ▲ └── preempt ◄──┤   ▲
//!                 │                └─ park ─► parked (its reader is slow) ─ unpark ─► waiting
//! ```
//!
//! Each machine owns its state; the upper ones work on [`requests::Requests`], which knows none of them:
//!
//! | machine | owns | decides |
//! |---|---|---|
//! | [`admission::Admission`] | the inbox, deadlines, the pace of the queue | who gets a slot, who waits, who has run out of time |
//! | [`steer_rounds::SteerRounds`] | | when steerers are called; one steerer's state is a [`steering::Steering`] |
//! | [`batch::Batch`] | the plan and entries of a batch | what is computed in this step |
//! | [`adapter_turns::AdapterTurns`] | | whose LoRA adapters compute in this step |
//! | [`sampling::RowSampling`] | the samplers, one for each thread | which token a row gives |
//! | [`step_clock::StepClock`] | the time of a step | how long a step waits for steerers |
//! | [`step_pace::StepPace`] | the measured cost of tokens | how many prompt tokens a step computes |
//! | [`speculation::Speculation`] | the measured cost of drafts | which tokens are drafted |
//! | [`drafter::Drafter`] | the draft model and its slots | what the draft model gives |
//! | [`progress::ProgressReports`] | a timer | when followers are notified |
//! | [`requests::Requests`] | requests, sequences, the scheduler | nothing: appends tokens, ends and preempts sequences |
//! | [`kv_slots::KvSlots`] | the model and its prefix cache | which cached prefix is evicted |
//! | [`output::StepOutput`] | the events of a step | when a reader is woken |
//!
//! What is decided without a model is pure and has its own modules: the order of sequences in [`crate::scheduler`],
//! slots and KV cells in [`crate::prefix_cache`], the choice of tokens in [`crate::sampling`].
//!
//! A full outbox parks its sequence; nothing here waits for a reader, a lock or a steerer. A panic in the model ends
//! the requests of the call in which it occurred; any other panic ends all running and waiting requests, and the owner
//! starts again with empty state ([`recovery`]).

mod adapter_turns;
mod admission;
mod batch;
mod checkpoints;
mod detokenizer;
mod draft_pace;
mod drafter;
mod fuel;
mod kv_slots;
mod opening;
mod output;
mod progress;
mod recovery;
mod report;
mod requests;
mod sampling;
mod scoring;
mod sequence;
mod speculation;
mod steer_rounds;
mod steered_output;
mod steering;
mod step_clock;
mod step_pace;
mod thread;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::time::Time;

use crate::api::ModelInfo;
use crate::config::{Config, PrefixDiskConfig, SpeculationMode};
use crate::draft_model::DraftModel;
use crate::inbox::OwnerInbox;
use crate::model::Model;
#[cfg(all(test, feature = "embedded"))]
use crate::prefix_folder::PrefixDisk;
use crate::scheduler::Scheduler;
use admission::Admission;
use batch::{Batch, Decoded};
use drafter::Drafter;
use kv_slots::KvSlots;
use progress::ProgressReports;
use recovery::fenced;
use requests::Requests;
use sampling::RowSampling;
use speculation::Speculation;
use steer_rounds::SteerRounds;
use steering::SteerRules;
use step_clock::StepClock;
use step_pace::StepPace;

pub use report::{SequenceId, StepReport};
pub(crate) use thread::run;

/// Owns a model and steps its sequences.
pub struct EngineOwner {
    info: ModelInfo,
    admission: Admission,
    steering: SteerRounds,
    batch: Batch,
    sampling: RowSampling,
    progress: ProgressReports,
    requests: Requests,
    clock: StepClock,
    prefix_disk: Option<PrefixDiskConfig>,
}

impl EngineOwner {
    pub(crate) fn new(
        model: Box<dyn Model>,
        draft: Option<DraftModel>,
        config: &Config,
        inbox: OwnerInbox,
    ) -> Self {
        let (info, capacity) = (model.info(), model.capacity());
        let vocabulary = model.vocabulary();
        let (stats, queue) = (Arc::clone(&inbox.stats), Arc::clone(&inbox.queue));
        stats.cells_total.set(u64::from(capacity.cells));
        stats.set_threads(model.threads().unwrap_or_default());
        // An engine whose first step has not begun counts as idle, so that the watchdog does not report it as stalled
        // (OA-901).
        stats.idle.set(1);
        let step = Duration::from_millis(config.step_ms);
        let pace = StepPace::new(step, model.warm_times(), capacity.computes_together);
        let drafts = match config.speculation {
            // Of a slot that cannot be truncated, rejected tokens could not be taken back.
            SpeculationMode::Lookup | SpeculationMode::Draft if info.truncates => {
                config.draft_tokens_max as usize
            }
            _ => 0,
        };
        let draft = draft.filter(|_| config.speculation == SpeculationMode::Draft);
        let drafter = draft.map(|draft| Drafter::new(draft, &info.name));
        let speculation = Speculation::new(drafts, drafter);
        let slots = KvSlots::new(model, config);
        let scheduler = Scheduler::new(info.parallel as usize, config.ageing_turns);
        let rules = SteerRules {
            deadline_budget: Duration::from_millis(config.steer_ms),
            vocabulary: info.vocabulary_tokens,
        };
        let fuel = config
            .fuel_tokens
            .unwrap_or_else(|| 10 * u64::from(info.context_tokens));
        Self {
            admission: Admission::new(inbox, config, info.truncates),
            steering: SteerRounds::new(rules),
            batch: Batch::new(pace, speculation, &info, capacity),
            sampling: RowSampling::new(rules, config.sample_threads),
            progress: ProgressReports::default(),
            requests: Requests::new(slots, vocabulary, scheduler, stats, queue, fuel),
            info,
            clock: StepClock::default(),
            prefix_disk: config.prefix_disk.clone(),
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
        let requests = &mut self.requests;
        requests.begin_step(now);
        self.clock.begin_step();
        self.admission.begin_step();
        if self.admission.is_trimmed() {
            requests.slots.tiers_mut().move_to_disk(now);
        }
        // Before cancellations: a handle that was dropped while its command was in the inbox has set the wake flag,
        // which is read only once. If that flag were read first, the request would run without a reader.
        if self.admission.receive(requests, now) {
            self.progress.start(now);
        }
        // Before parking and admission, so that the slots and KV cells of cancelled requests go to waiting ones in this
        // step.
        self.admission.take_cancellations(requests, now);
        // After the wake-up flag was read: the disk's threads set it after each reply.
        requests
            .slots
            .tiers_mut()
            .poll_disk(&requests.stats, self.batch.token_time(), now);
        opening::poll_openings(requests);
        // Before admission: a sequence that parks leaves its place in the batch to a waiting one, and one that resumes
        // competes for it.
        self.admission.park_and_resume(requests, now);
        self.admission.admit(requests, now);
        if self.steering.call_pre(requests, &mut self.clock, now) {
            // Admits new branches at once: a fork is cheapest while the parent's slot ends where the branch starts.
            self.admission.admit(requests, now);
        }
        let computed = match self.batch.decode(requests, &self.clock, now) {
            Decoded::Tokens(computed) => computed,
            Decoded::Lost(error) => {
                self.admission.lose(error);
                0
            }
        };
        // A decode call takes most of the step, and the times of tokens are measured after it.
        let after = self.clock.now_or(now);
        if let Some(took) = self.batch.observe() {
            self.clock.decoded(took);
        }
        requests.now = after;
        self.sampling
            .collect(requests, self.batch.rows(), &mut self.clock, after);
        fuel::end_exhausted(requests);
        requests.emit_reports();
        // Reports come before `publish`. They wake readers, and a wake-up shows everything published so far: whole
        // steps only, because the events of this step are not in the outboxes yet.
        self.progress
            .publish(requests, self.admission.pace(), &self.clock, after);
        // Last of all, so that a reader on another core finds the whole step and does not compete with the owner
        // meanwhile (D-6).
        requests.publish();
        if !requests.awaits_first_token() {
            requests.slots.finish_admissions();
        }
        let wake_at = self.wake_at(now);
        self.requests.report.wake_at = wake_at;
        self.observe(now, computed);
        self.requests.report.clone()
    }

    /// Starts to look for the cached prefixes of an earlier engine of this model.
    fn begin(&mut self) {
        if let Some(disk) = &self.prefix_disk {
            self.requests.slots.open_disk(disk, self.admission.waker());
        }
    }

    /// Saves the cached prefixes for the next engine of this model.
    fn finish(&mut self) {
        if self.requests.stats.dead.get() == 0 {
            let requests = &mut self.requests;
            // The model may fail; the requests are ended all the same.
            fenced(|| requests.slots.close_disk(&requests.stats));
        }
    }

    /// Gives an owner that is stepped by hand a disk that reads what prompts ask for alone, and waits until its files are listed.
    #[cfg(all(test, feature = "embedded"))]
    pub(crate) fn open_disk(&mut self, disk: Arc<dyn PrefixDisk>) {
        let requests = &mut self.requests;
        let waker = self.admission.waker();
        requests.slots.start_disk(disk, 1 << 30, waker);
        requests.slots.tiers_mut().settle_disk(&requests.stats);
        requests.slots.tiers_mut().read_nothing_ahead();
    }

    /// Moves all cached prefixes to the disk, and waits until they are there.
    #[cfg(all(test, feature = "embedded"))]
    pub(crate) fn move_to_disk(&mut self) {
        let requests = &mut self.requests;
        requests.slots.begin_step();
        requests.slots.evict_all();
        let tiers = requests.slots.tiers_mut();
        tiers.move_to_disk(Time::ZERO);
        while tiers.bytes() > 0 {
            tiers.poll_disk(&requests.stats, None, Time::ZERO);
            tiers.settle_disk(&requests.stats);
        }
    }

    /// Ends the use of the disk.
    #[cfg(all(test, feature = "embedded"))]
    pub(crate) fn close_disk(&mut self) {
        let requests = &mut self.requests;
        requests.slots.close_disk(&requests.stats);
    }

    /// Returns whether no request is in progress or waiting.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns when there is work again without a message from outside.
    fn wake_at(&mut self, now: Time) -> Option<Time> {
        let disk = self.requests.slots.tiers_mut().disk_deadline(now);
        let requests = &self.requests;
        let report = &requests.report;
        // A step that waits for steerers takes the wake-ups of the inbox for theirs.
        if self.admission.is_woken() {
            return Some(now);
        }
        let changed = !report.finished.is_empty() || !report.cancelled.is_empty();
        // Slots or cells became free after this step's admission, so the next step can admit something even if nothing
        // else is due.
        if requests.scheduler.waiting() > 0
            && (changed || !report.parked.is_empty() || !report.preempted.is_empty())
        {
            return Some(now);
        }
        let timers = [self.admission.next_deadline(), self.progress.due(), disk];
        let mut earliest = timers.into_iter().flatten().min();
        for key in requests.scheduler.running() {
            let sequence = &requests.sequences[key];
            let due = match sequence.asleep_until {
                Some(until) => until,
                // A steerer wakes the owner when it is ready, but what it is suspended for may come without a wake-up.
                None if sequence.skips_step() || sequence.cached_row.is_some() => {
                    now + steer_rounds::MIN_WAIT
                }
                None => now,
            };
            // A parked sequence sets no timer: its reader wakes the owner when it has made room.
            earliest = Some(earliest.map_or(due, |earliest| earliest.min(due)));
        }
        // `Time::MAX` is no timer: a script that hangs waits to be cancelled.
        earliest.filter(|&due| due < Time::MAX)
    }

    /// Records the metrics of the step.
    fn observe(&self, now: Time, computed: usize) {
        let requests = &self.requests;
        let (stats, report) = (&requests.stats, &requests.report);
        let jobs = || requests.jobs.iter().map(|(_, job)| job);
        let running = jobs().filter(|job| job.started.is_some()).count();
        stats.requests_running.set(running as u64);
        stats
            .requests_waiting
            .set((requests.jobs.len() - running) as u64);
        let parked = requests.scheduler.parked().count();
        stats.streams_parked.set(parked as u64);
        stats.cells_used.set(requests.slots.cells().used() as u64);
        let saved = requests.slots.tiers().bytes() as u64;
        stats.prefix_saved_bytes.set(saved);
        stats.preemptions.add(report.preempted.len() as u64);
        stats.generation_tokens.add(u64::from(report.appended));
        // A step that only polled steerers or cancelled requests is not a decode step, and would distort the histograms
        // below.
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
        if self.clock.is_running() {
            let took = self.clock.now_or(now).since(now);
            stats.step_seconds.observe_span(took);
            self.batch.trace_step(took);
        }
    }
}

impl Drop for EngineOwner {
    /// Ends every request, those in the inbox included, each behind a fence of its own: a second panic of foreign code
    /// while a first one unwinds would end the process.
    fn drop(&mut self) {
        let now = self.requests.now;
        self.admission.receive(&mut self.requests, now);
        let error = self.admission.closed_error();
        recovery::end_all(&mut self.requests, &error);
    }
}

impl std::fmt::Debug for EngineOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineOwner")
            .field("model", &self.info.name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
