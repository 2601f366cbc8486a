//! [`Requests`]: the requests in progress, with their sequences, slots and unpublished events; and how each one ends.
//!
//! The other machines of the owner (admission, steering, batch, sampling) decide; what they decide is carried out
//! here, so that every end of a sequence passes one function that takes it out of each table.
//!
//! Invariants:
//! - A sequence is in `sequences`, in the scheduler and among its request's `members`, or in none of them.
//! - A sequence without a slot has `computed == 0`; a running one has a slot.
//! - A request without members is either in `opening`, because its steerer has not begun, or `ended`: its last event is
//!   in `output`, and publishing that removes it.
//! - A request that has not started is charged to the queue; `started` and the refund happen together.

mod append;
mod verify;

use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::time::Time;
use slab::Slab;

use super::checkpoints::PromptMarks;
use super::detokenizer::Detokenizer;
use super::fenced;
use super::fuel::Fuel;
use super::kv_slots::KvSlots;
use super::output::StepOutput;
use super::report::{SequenceId, StepReport};
use super::sequence::{AwaitedPrefix, DiskLookup, KnownTokens, RequestJob, RunningSequence};
use super::steering::Steering;
use crate::adapters::{AdapterSet, DEFAULT_ADAPTERS};
use crate::api::{
    ChoiceEnd, EngineError, EventKind, FinishReason, SharedVocabulary, StopCause, TokenUsage,
};
use crate::queue::AdmissionQueue;
use crate::scheduler::{Scheduler, SequenceKey};
use crate::stats::EngineStats;
use crate::submission::RequestTerms;
use crate::text::ChoiceText;
use verify::StepGap;

/// Every request in progress, and what its sequences occupy.
pub(super) struct Requests {
    pub(super) jobs: Slab<RequestJob>,
    pub(super) sequences: Slab<RunningSequence>,
    pub(super) scheduler: Scheduler,
    pub(super) slots: KvSlots,
    pub(super) output: StepOutput,
    pub(super) report: StepReport,
    pub(super) stats: Arc<EngineStats>,
    pub(super) queue: Arc<AdmissionQueue>,
    pub(super) tokens: Detokenizer,
    /// Requests whose steerer has not begun ([`super::opening`]).
    pub(super) opening: Vec<usize>,
    pub(super) fuel: Fuel,
    pub(super) context_tokens: usize,
    pub(super) vocabulary_tokens: u32,
    step_gap: StepGap,
    numbers: SequenceId,
    /// The time of this step; later after the decode call than before it.
    pub(super) now: Time,
}

impl Requests {
    pub(super) fn new(
        mut slots: KvSlots,
        vocabulary: SharedVocabulary,
        scheduler: Scheduler,
        stats: Arc<EngineStats>,
        queue: Arc<AdmissionQueue>,
        fuel_tokens: u64,
    ) -> Self {
        let info = slots.model().info();
        Self {
            jobs: Slab::new(),
            sequences: Slab::new(),
            scheduler,
            slots,
            output: StepOutput::default(),
            report: StepReport::default(),
            stats,
            queue,
            tokens: Detokenizer::new(vocabulary, info.vocabulary_tokens),
            opening: Vec::new(),
            fuel: Fuel::new(fuel_tokens),
            context_tokens: info.context_tokens as usize,
            vocabulary_tokens: info.vocabulary_tokens,
            step_gap: StepGap::default(),
            numbers: 0,
            now: Time::ZERO,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.sequences.is_empty() && self.output.is_empty()
    }

    /// Starts the report and the events of a new step.
    pub(super) fn begin_step(&mut self, now: Time) {
        let step = self.report.step + 1;
        self.report = StepReport {
            step,
            ..StepReport::default()
        };
        self.output.begin(step);
        self.slots.begin_step();
        self.now = now;
    }

    /// Returns whether a sequence waits for its slot, or computes its prompt.
    pub(super) fn awaits_first_token(&self) -> bool {
        let mut running = self.scheduler.running();
        self.scheduler.waiting() > 0 || running.any(|key| self.sequences[key].appended == 0)
    }

    /// Returns whether a running sequence has begun its output.
    pub(super) fn has_streams(&self) -> bool {
        let mut running = self.scheduler.running();
        running.any(|key| self.sequences[key].appended > 0)
    }

    /// Returns how many running sequences have begun their output, without those that rest.
    pub(super) fn streams(&self) -> usize {
        let streams = self.scheduler.running().filter(|&key| {
            let sequence = &self.sequences[key];
            sequence.appended > 0 && sequence.asleep_until.is_none() && !sequence.is_suspended()
        });
        streams.count()
    }

    /// Publishes the events of the step, wakes the readers, and removes the requests that have ended.
    pub(super) fn publish(&mut self) {
        self.output.publish(&mut self.jobs, &self.stats.panics);
    }

    /// The number of sequences ever added.
    pub(super) fn added(&self) -> SequenceId {
        self.numbers
    }

    /// The terms of a sequence's request.
    pub(super) fn terms(&self, key: SequenceKey) -> &RequestTerms {
        &self.jobs[self.sequences[key].job].submission.terms
    }

    /// Adds the sequences of a request, which are its choices, each with its steering. Returns them in order.
    pub(super) fn start(
        &mut self,
        job: usize,
        steerings: impl IntoIterator<Item = Steering>,
    ) -> Vec<SequenceKey> {
        let tokens = self.jobs[job].tokens();
        let mut steerings = steerings.into_iter();
        let mut keys: Vec<SequenceKey> = Vec::new();
        for _ in 0..self.jobs[job].submission.choices {
            // Every choice shares the prompt with the first one.
            let after = keys.first().map(|&first| self.prompt_of(first));
            keys.push(self.add_sequence(job, tokens.clone(), steerings.next(), after));
        }
        keys
    }

    /// Adds a new sequence to a request, with the tokens that are known.
    pub(super) fn add_sequence(
        &mut self,
        job: usize,
        tokens: KnownTokens,
        mut steering: Option<Steering>,
        after: Option<AwaitedPrefix>,
    ) -> SequenceKey {
        let request = &mut self.jobs[job];
        let choice = request.next_choice;
        request.next_choice += 1;
        let submission = &request.submission;
        if let Some(steering) = &mut steering {
            // From 1, because 0 means that it is not bound.
            steering.bind(choice + 1, &self.stats.panics);
        }
        let key = self.sequences.insert(RunningSequence {
            number: self.numbers,
            job,
            choice,
            tokens,
            // With an empty prompt the first scored token stands where the prompt would, but it is output (LM-312).
            prompt_tokens: submission.given_prompt().len(),
            scored: submission.terms.scored.is_some(),
            // All choices have the same prompt, so it is scored once.
            prompt_scores: (choice == 0 && submission.terms.prompt_logprobs).then(Vec::new),
            computed: 0,
            marks: PromptMarks::default(),
            slot: None,
            adapters: submission
                .adapters
                .as_ref()
                .map_or(DEFAULT_ADAPTERS, AdapterSet::key),
            due: None,
            after,
            disk: DiskLookup::Pending,
            asleep_until: None,
            cached_row: None,
            passed_over: 0,
            appended: 0,
            dropped: 0,
            charged: 0,
            text: ChoiceText::default(),
            history: submission.history.clone(),
            mirostat: submission.terms.sampling.first_mirostat(),
            steering,
            last_token_at: None,
            unreported: None,
            drafting: None,
        });
        self.numbers += 1;
        request.members.push(key);
        self.scheduler
            .submit(key, submission.priority, submission.turn);
        key
    }

    /// Returns what a new sequence of the request waits for: the prompt of the first one, which it shares.
    pub(super) fn prompt_of(&self, key: SequenceKey) -> AwaitedPrefix {
        let sequence = &self.sequences[key];
        AwaitedPrefix {
            key,
            number: sequence.number,
            // A prompt is never empty (`Submission::prompt`), and its last token is computed by every sharer itself.
            tokens: self.jobs[sequence.job].submission.prompt.len() - 1,
        }
    }

    /// Returns whether a waiting sequence may be admitted: one that shares a prefix waits until another has computed
    /// it.
    pub(super) fn is_eligible(&self, key: SequenceKey) -> bool {
        let sequence = &self.sequences[key];
        if let DiskLookup::Reads(read) = sequence.disk
            && self.now < read.until
            && self.slots.tiers().is_reading(read.wait)
        {
            return false;
        }
        let Some(after) = sequence.after else {
            return true;
        };
        let first = self.sequences.get(after.key);
        let Some(first) = first.filter(|first| first.number == after.number) else {
            return true;
        };
        // The choices of a request wait together: each of them alone would be found to share the prefix that the first
        // one waits for.
        if first.slot.is_none() && first.job == sequence.job {
            // The first one is before them in the order, so they need no turn before it has had one. No circle: a sequence
            // that others begin to wait for waits for none itself at that moment.
            return self.jobs[sequence.job].started.is_some() && self.is_eligible(after.key);
        }
        // If the awaited sequence has ended or was preempted, its prefix may be cached; if not, this one computes it
        // itself. One that keeps its slot while it is parked has computed every token before its next output row, and
        // with them the prefix. One that its steerer suspends computes nothing, and may wait for this very sequence.
        first.slot.is_none() || first.computed >= after.tokens || first.is_suspended()
    }

    /// Returns a sequence that can be preempted: it holds a slot, and it is not `except`.
    pub(super) fn victim(
        &self,
        running_too: bool,
        except: Option<SequenceKey>,
    ) -> Option<SequenceKey> {
        self.scheduler.victim(running_too, |key| {
            let sequence = &self.sequences[key];
            let holds = Some(key) != except && sequence.slot.is_some();
            holds.then_some(sequence.computed)
        })
    }

    /// Ends a sequence; its output so far stands. The last sequence of a request ends the request.
    pub(super) fn finish(
        &mut self,
        key: SequenceKey,
        reason: FinishReason,
        stop: Option<StopCause>,
    ) {
        // After a complete stop string the remaining text is dropped; after any other end no stop string can follow, so
        // it is sent.
        self.emit_rest(key, matches!(stop, Some(StopCause::Text(_))));
        self.stats.count_finish(reason);
        // Retained: the next prompt of a conversation begins with this prompt and its answer.
        self.end_choice(key, EventKind::Finish(ChoiceEnd { reason, stop }));
    }

    /// Ends a sequence with an error of its steerer; the others of its request go on (AI-915). If no other sequence of
    /// the request runs or has ended well, the request fails.
    pub(super) fn fail_choice(&mut self, key: SequenceKey, error: EngineError) {
        let request = &self.jobs[self.sequences[key].job];
        if request.members.len() == 1 && !request.has_finished {
            return self.fail_request_of(key, error);
        }
        self.stats.count_controller_failure(&error);
        self.emit_rest(key, false);
        self.end_choice(key, EventKind::Failed(error));
    }

    /// Emits the end of a sequence and removes it; its tokens stay cached. The last one concludes its request.
    fn end_choice(&mut self, key: SequenceKey, end: EventKind) {
        let sequence = &self.sequences[key];
        let (job, choice, number) = (sequence.job, sequence.choice, sequence.number);
        self.jobs[job].has_finished |= matches!(end, EventKind::Finish(_));
        self.output.emit(job, choice, end);
        self.report.finished.push(number);
        self.remove(key, true);
        if self.jobs[job].members.is_empty() {
            self.conclude(job);
        }
    }

    fn emit_rest(&mut self, key: SequenceKey, drop_held: bool) {
        let panics = &self.stats.panics;
        self.output
            .emit_rest(&mut self.sequences[key], drop_held, panics);
    }

    /// Ends every sequence of a request; the output so far stands.
    pub(super) fn finish_all(&mut self, job: usize, reason: FinishReason) {
        for key in self.jobs[job].members.clone() {
            self.finish(key, reason, None);
        }
        let request = &mut self.jobs[job];
        if request.opening.is_some() {
            // It has no sequences, but its reader expects the end of each choice.
            for choice in 0..request.submission.choices {
                self.stats.count_finish(reason);
                let end = ChoiceEnd { reason, stop: None };
                self.output.emit(job, choice, EventKind::Finish(end));
            }
            self.conclude(job);
        }
    }

    /// Ends a request with an error. `sound`: the contents of its slots are valid, so they can be cached as prefixes.
    pub(super) fn fail(&mut self, job: usize, error: EngineError, sound: bool) {
        for key in self.jobs[job].members.clone() {
            // The tokens of the held-back text have been reported, so the text is sent too.
            self.emit_rest(key, false);
            self.report.finished.push(self.sequences[key].number);
            self.remove(key, sound);
        }
        if let Some(opening) = &mut self.jobs[job].opening {
            let report = opening.take_report(&self.stats.panics);
            if let Some(report) = report {
                self.output.emit(job, 0, EventKind::Report(report));
            }
        }
        // One error for the whole request, however many choices it had.
        self.stats.failed.add(1);
        self.stats.count_controller_failure(&error);
        self.output.emit(job, 0, EventKind::Error(error));
        self.close(job);
    }

    /// Ends the request of a sequence with an error. After one of the engine its slots are not kept: where output is not a
    /// number, neither are the keys and values that it was computed from.
    pub(super) fn fail_request_of(&mut self, key: SequenceKey, error: EngineError) {
        let sound = error.code != Code::Internal;
        self.fail(self.sequences[key].job, error, sound);
    }

    /// Ends a request whose reader was dropped.
    pub(super) fn cancel(&mut self, job: usize) {
        for key in self.jobs[job].members.clone() {
            // No event and no text, because there is no reader. The tokens are valid, so the slot is retained for a
            // client that asks again.
            self.report.cancelled.push(self.sequences[key].number);
            self.remove(key, true);
        }
        self.stats.cancelled_client.add(1);
        self.close(job);
        // Also removed from the step's output: the next request may get the same key, and would receive these events.
        self.output.discard(job);
        let job = self.jobs.remove(job);
        // Without this, dropping the outbox would report an engine that stopped.
        job.outbox.end();
        self.drop_fenced(job);
    }

    /// Ends a request all of whose sequences have finished.
    fn conclude(&mut self, job: usize) {
        let request = &self.jobs[job];
        let usage = TokenUsage {
            prompt_tokens: u32::try_from(request.submission.given_prompt().len())
                .unwrap_or(u32::MAX),
            completion_tokens: request.completion_tokens,
            cached_tokens: request.cached_tokens,
            sampled_tokens: request.spent.sampled,
            processed_tokens: request.spent.processed,
            seed: request.submission.terms.seed,
            queued: request.started.unwrap_or(self.now).since(request.arrived),
            prefill: match (request.started, request.first_token) {
                (Some(started), Some(first)) => first.since(started),
                _ => Duration::ZERO,
            },
        };
        self.stats
            .request_generation_tokens
            .observe(f64::from(request.completion_tokens));
        self.output.emit(job, 0, EventKind::Usage(usage));
        self.close(job);
    }

    /// Marks a request as ended: its last event is emitted, and publishing it removes the request.
    fn close(&mut self, job: usize) {
        let request = &mut self.jobs[job];
        request.ended = true;
        // A request that ends while it is queued was never admitted, so its charge is refunded here.
        if request.started.is_none() {
            self.queue.refund(&request.submission);
        }
        request.observe_end(&self.stats, self.now);
        self.opening.retain(|&opening| opening != job);
    }

    /// Removes a sequence everywhere. `retain`: its tokens stay cached in its slot as a prefix for later prompts.
    fn remove(&mut self, key: SequenceKey, retain: bool) {
        let mut sequence = self.sequences.remove(key);
        self.scheduler.remove(key);
        self.drop_fenced(sequence.steering.take());
        if let Some(slot) = sequence.slot {
            self.drop_draft(slot, sequence.computed);
        }
        let job = &mut self.jobs[sequence.job];
        job.members.retain(|&member| member != key);
        match sequence.slot {
            Some(slot) if retain => {
                self.slots
                    .retain(slot, sequence.prompt_tokens, job.submission.cache_key);
            }
            Some(slot) => self.slots.release(slot),
            None => {}
        }
    }

    /// Drops foreign code, which may panic.
    fn drop_fenced<T>(&self, foreign: T) {
        if !fenced(move || drop(foreign)) {
            self.stats.panics.add(1);
        }
    }

    /// Preempts a sequence: its KV cells become those of a cached prefix, which others may evict. What is left of it when it
    /// is admitted again is not computed again.
    pub(super) fn preempt(&mut self, key: SequenceKey) {
        let sequence = &mut self.sequences[key];
        // The tokens stay: prompt and output are prefilled as one prompt, and no event is repeated.
        let computed = std::mem::take(&mut sequence.computed);
        sequence.cached_row = None;
        if let Some(drafting) = &mut sequence.drafting {
            drafting.release();
        }
        let prompt_tokens = sequence.prompt_tokens;
        if let Some(slot) = sequence.slot.take() {
            self.drop_draft(slot, computed);
            self.slots.retain(slot, prompt_tokens, None);
        }
        let sequence = &self.sequences[key];
        self.report.preempted.push(sequence.number);
        // Only a running sequence changes its stage; a parked or waiting one merely loses its slot.
        self.scheduler.preempt(key);
    }

    /// Truncates a sequence's slot to its first `tokens` tokens; later ones are computed again.
    pub(super) fn truncate(&mut self, key: SequenceKey, tokens: usize) {
        let sequence = &mut self.sequences[key];
        // The retained row follows the last computed token, which may be gone.
        sequence.cached_row = None;
        // Tokens that were never computed need no change of the slot.
        if sequence.computed <= tokens {
            return;
        }
        let Some(slot) = sequence.slot else { return };
        if self.slots.truncate(slot, tokens) {
            sequence.computed = tokens;
        } else {
            self.preempt(key);
        }
    }

    /// Ends a sequence that has as many tokens as it may have.
    pub(super) fn finish_if_full(&mut self, key: SequenceKey) {
        if self.is_full(key) {
            self.finish(key, FinishReason::Length, None);
        }
    }

    fn is_full(&self, key: SequenceKey) -> bool {
        let sequence = &self.sequences[key];
        sequence.appended >= self.terms(key).max_tokens
            || sequence.tokens.len() >= self.context_tokens
    }
}
