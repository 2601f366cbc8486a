//! [`Batch`]: plans the batch of a step, decodes it, and handles failures of the model.

use std::collections::BTreeSet;
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::time::Time;

use super::adapter_turns::AdapterTurns;
use super::checkpoints::PromptSpan;
use super::requests::Requests;
use super::speculation::{DraftBudget, Speculation};
use super::steer_rounds::{begin_mid, flush};
use super::step_clock::StepClock;
use super::step_pace::{StepPace, StepStart, StepWaiting, StepWork};
use crate::api::{EngineError, ModelInfo};
use crate::model::{BatchEntry, Capacity, DecodeStop};
use crate::scheduler::{PASSED_OVER_MAX, Runnable, SequenceKey, StepBudget, StepShare, plan};

/// After a decode call that waited for other models, steps are short for so long: their next streams find them so.
const BESIDE_MODELS: Duration = Duration::from_secs(10);

/// The limits of a batch, and the batch of the last step.
pub(super) struct Batch {
    limits: BatchLimits,
    pace: StepPace,
    speculation: Speculation,
    /// Buffers that retain their allocations. `work` and `shares` are the plan, `entries` what is decoded.
    work: Vec<Runnable>,
    shares: Vec<StepShare>,
    entries: Vec<BatchEntry>,
    /// The turns of adapters; `None` for a model without, whose steps all compute alike.
    adapters: Option<AdapterTurns>,
    /// How many of `entries` are draft tokens.
    drafted: usize,
    /// Sequences with an output row in this batch, and the index of the row's entry.
    rows: Vec<(SequenceKey, usize)>,
    /// The time of the last decode call, until it is observed.
    took: Option<Duration>,
    /// The time of the last decode call, for the log.
    last: Duration,
    /// The oldest prompt of the plan.
    oldest: Option<SequenceKey>,
    /// Until then, streams of other models are taken to wait for steps of this one.
    beside_models: Time,
}

#[derive(Clone, Copy)]
struct BatchLimits {
    /// Entries of one batch of the model.
    batch: usize,
    /// Output rows beyond one for each running sequence.
    spare_rows: usize,
    /// Whether the model can shorten a slot.
    truncates: bool,
}

/// The result of a decode call.
pub(super) enum Decoded {
    /// Number of tokens computed; 0 if there was nothing to compute or nothing could be.
    Tokens(usize),
    /// The model is lost, and every request has failed.
    Lost(EngineError),
}

impl Batch {
    pub(super) fn new(
        pace: StepPace,
        speculation: Speculation,
        info: &ModelInfo,
        capacity: Capacity,
    ) -> Self {
        Self {
            pace,
            speculation,
            limits: BatchLimits {
                batch: capacity.batch_tokens as usize,
                // Each of at most `parallel` running sequences needs one row; only what is left can go to further rows
                // of scored tokens.
                spare_rows: capacity.rows.saturating_sub(info.parallel) as usize,
                truncates: info.truncates,
            },
            work: Vec::new(),
            shares: Vec::new(),
            entries: Vec::new(),
            adapters: (!info.adapters.is_empty()).then(AdapterTurns::default),
            drafted: 0,
            rows: Vec::new(),
            took: None,
            last: Duration::ZERO,
            oldest: None,
            beside_models: Time::default(),
        }
    }

    /// Returns what a prompt token takes; `None` before the first was measured.
    pub(super) fn token_time(&self) -> Option<Duration> {
        self.pace.token_time()
    }

    /// The output rows of the last decode call.
    pub(super) fn rows(&self) -> &[(SequenceKey, usize)] {
        &self.rows
    }

    /// Returns the time of the last decode call, if it was measured, and takes it into account.
    pub(super) fn observe(&mut self) -> Option<Duration> {
        let time = self.took.take()?;
        self.last = time;
        let decoding = self.shares.iter().filter(|share| share.tokens == 1).count();
        let others = self.entries.len() - decoding;
        if others == self.drafted {
            self.speculation.observe(decoding, self.drafted, time);
        }
        // A draft alone says little about prompts, which are many tokens.
        if others > self.drafted || self.drafted == 0 {
            let work = StepWork {
                decoding,
                prompts: self.shares.len() - decoding,
                prompt_tokens: others,
            };
            self.pace.observe(work, time);
        }
        Some(time)
    }

    /// Writes what the last step computed into the log, for those who look for what made a stream wait.
    pub(super) fn trace_step(&self, took: Duration) {
        if !tracing::enabled!(target: "sapwood_engine::steps", tracing::Level::TRACE) {
            return;
        }
        let decoding = self.shares.iter().filter(|share| share.tokens == 1).count();
        tracing::trace!(
            target: "sapwood_engine::steps",
            decoding,
            prompt_tokens = self.entries.len() - decoding - self.drafted,
            drafted = self.drafted,
            waiting = ?self.pace.waiting(),
            decode = ?self.last,
            ?took,
            "step"
        );
    }

    /// Plans a batch and decodes it.
    pub(super) fn decode(
        &mut self,
        requests: &mut Requests,
        clock: &StepClock,
        now: Time,
    ) -> Decoded {
        let decoded = self.try_decode(requests, clock, now);
        if !matches!(decoded, Decoded::Tokens(1..)) {
            // Nothing was computed, so there is no row to collect.
            self.rows.clear();
        }
        decoded
    }

    fn try_decode(&mut self, requests: &mut Requests, clock: &StepClock, now: Time) -> Decoded {
        let mut drafts = true;
        // Each round that fails drops the drafts, frees cached cells or takes those of one sequence, so the loop ends.
        loop {
            if !self.plan(requests, clock, now) {
                return Decoded::Tokens(0);
            }
            let rows = self.ration_rows(requests);
            for share in &self.shares {
                // Only the last known token gives an output row. `mid` starts before the decode call, so that the
                // steerer works meanwhile (AI-811).
                if requests.sequences[share.key].pending() == share.tokens {
                    begin_mid(requests, share.key, now);
                }
            }
            flush(requests, self.shares.iter().map(|share| share.key));
            // After `mid`: steerers work while the draft model does too.
            self.draft(requests, rows, drafts, clock, now);
            // Built anew in each round, because making room may have preempted a sequence of the plan.
            self.build(requests);
            let panics = &requests.stats.panics;
            // Around the call alone: copying prefixes before and after it says nothing about tokens.
            let before = clock.now_or(now);
            let adapters = self.shares.first().and_then(|share| {
                let job = requests.sequences[share.key].job;
                requests.jobs[job].submission.adapters.as_ref()
            });
            match requests
                .slots
                .model()
                .decode(&self.entries, adapters, now, panics)
            {
                Ok(()) => {
                    let took = clock.now_or(now).since(before);
                    let model = requests.slots.model();
                    let waited = model.waited();
                    if let Some(threads) = model.threads() {
                        requests.stats.set_threads(threads);
                    }
                    if !waited.is_zero() {
                        self.beside_models = clock.now_or(now) + BESIDE_MODELS;
                    }
                    let took = took.saturating_sub(waited);
                    self.took = clock.is_running().then_some(took);
                    return Decoded::Tokens(self.commit(requests));
                }
                // Nothing is freed for a draft.
                Err(DecodeStop::Full) if self.drafted > 0 => drafts = false,
                // The owner counts one cell per token, and the model's own count may differ. A full cache is an error
                // only when nothing is left to free.
                Err(DecodeStop::Full) => {
                    if !make_room(requests) {
                        let message = "the model's cache has no room for a single sequence";
                        let error =
                            EngineError::new(Code::LimitExceeded, ErrorReason::CACHE_FULL, message);
                        self.fail(requests, &error);
                        return Decoded::Tokens(0);
                    }
                }
                // Nothing changed, and the flag is raised only when the engine ends: the thread looks for that after
                // the step.
                Err(DecodeStop::Aborted) => return Decoded::Tokens(0),
                Err(DecodeStop::Failed(error)) => {
                    self.fail(requests, &error);
                    return Decoded::Tokens(0);
                }
                Err(DecodeStop::SlotsLost(error)) => {
                    fail_running(requests, &error);
                    requests.slots.discard_cached();
                    return Decoded::Tokens(0);
                }
                Err(DecodeStop::Dead(error)) => {
                    fail_all(requests, &error);
                    return Decoded::Lost(error);
                }
            }
        }
    }

    /// Fills `shares`; preempts until the plan fits. Returns false if there is nothing to compute.
    fn plan(&mut self, requests: &mut Requests, clock: &StepClock, now: Time) -> bool {
        loop {
            self.work.clear();
            let running = requests.scheduler.running();
            self.work
                .extend(running.filter_map(|key| self.limits.work_of(requests, key)));
            let turns = match &mut self.adapters {
                Some(adapters) => adapters.keep_next(requests, &mut self.work),
                None => 1,
            };
            let decoding = self.work.iter().filter(|work| work.pending == 1).count();
            // One that waits for its steerer is a stream too.
            let beside = decoding.max(usize::from(requests.has_streams()));
            let beside_models = now < self.beside_models;
            let waiting = match requests.scheduler.is_alone() {
                _ if beside > 0 || beside_models => StepWaiting::Streams,
                true => StepWaiting::Nobody,
                false => StepWaiting::Prompts,
            };
            let prompts = || self.work.iter().filter(|work| work.pending > 1);
            self.oldest = prompts().next().map(|work| work.key);
            self.pace.begin_step(StepStart {
                waiting,
                turns,
                spent: clock.now_or(now).since(now),
                prompt_tokens: prompts().map(|work| work.pending).sum(),
            });
            let budget = StepBudget {
                batch: self.limits.batch,
                prefill: self.pace.prefill_tokens(beside),
                pass: self.pace.pass_tokens(),
                room: requests.slots.cells().room(),
                oldest_first: self
                    .oldest
                    .is_some_and(|key| requests.sequences[key].passed_over >= PASSED_OVER_MAX),
            };
            if plan(&self.work, &budget, &mut self.shares) || self.work.is_empty() {
                return !self.shares.is_empty();
            }
            // The last running sequence is never a victim. It fits alone, because the cells are at least the context.
            let Some(victim) = requests.victim(true, None) else {
                return !self.shares.is_empty();
            };
            requests.preempt(victim);
        }
    }

    /// Counts the steps in a row that leave out the oldest prompt: once for each step, whose plan may have been made anew.
    fn count_passed_over(&self, requests: &mut Requests) {
        let Some(oldest) = self.oldest else { return };
        let advances = self.shares.iter().any(|share| share.key == oldest);
        if let Some(sequence) = requests.sequences.get_mut(oldest) {
            sequence.passed_over = if advances {
                0
            } else {
                sequence.passed_over + 1
            };
        }
    }

    /// Drafts with what the plan leaves, and so many output rows.
    fn draft(
        &mut self,
        requests: &mut Requests,
        rows: usize,
        drafts: bool,
        clock: &StepClock,
        now: Time,
    ) {
        let total: usize = self.shares.iter().map(|share| share.tokens).sum();
        let decoding = self.shares.iter().filter(|share| share.tokens == 1).count();
        // Drafts take time as prompts do, and prompts come first.
        let prompts = self.pace.prefill_tokens(decoding);
        let prompt_tokens = total - decoding;
        let tokens = [
            rows,
            self.limits.batch.saturating_sub(total),
            requests.slots.cells().free().saturating_sub(total),
            prompts.saturating_sub(prompt_tokens),
        ];
        let drafts = drafts && !self.pace.measures_decode();
        let least = tokens.into_iter().min().filter(|_| drafts);
        let budget = DraftBudget {
            tokens: least.unwrap_or(0),
            prompt_tokens,
            time_max: self.pace.decode_seconds(decoding, prompt_tokens),
            others_wait: requests.streams() > decoding,
            timed: clock.is_running(),
        };
        self.speculation
            .draft(requests, &self.shares, budget, clock, now);
    }

    /// Shortens shares so that the batch needs no more output rows than the model has. One row is reserved for each
    /// running sequence. Returns the rows that are left.
    fn ration_rows(&mut self, requests: &Requests) -> usize {
        let mut spare = self.limits.spare_rows;
        for share in &mut self.shares {
            let sequence = &requests.sequences[share.key];
            let until = sequence.computed + share.tokens;
            let more = until.saturating_sub(sequence.first_row() + 1);
            let granted = more.min(spare);
            spare -= granted;
            share.tokens -= more - granted;
        }
        spare
    }

    /// Fills `entries` and `rows` from the plan.
    fn build(&mut self, requests: &mut Requests) {
        let total = self.shares.iter().map(|share| share.tokens).sum();
        // After the plan, which counted cached cells as room: only as many prefixes are evicted as this batch needs.
        requests.slots.evict_for(total);
        self.entries.clear();
        self.rows.clear();
        self.drafted = 0;
        for share in &self.shares {
            let sequence = &requests.sequences[share.key];
            let Some(slot) = sequence.slot else { continue };
            let until = sequence.computed + share.tokens;
            let known = sequence.tokens[sequence.computed..until].iter();
            let draft = sequence.draft();
            self.drafted += draft.len();
            // The row after each draft token is computed before it is known whether it is needed.
            for (index, &token) in (sequence.computed..).zip(known.chain(draft)) {
                let row = sequence.wants_row(index);
                if row {
                    self.rows.push((share.key, self.entries.len()));
                }
                self.entries.push(BatchEntry {
                    slot,
                    // A sequence is shorter than the context, which is a u32.
                    position: u32::try_from(index).unwrap_or(u32::MAX),
                    token,
                    row,
                });
            }
        }
    }

    /// Records what was computed; returns the number of tokens.
    fn commit(&mut self, requests: &mut Requests) -> usize {
        self.count_passed_over(requests);
        for share in &self.shares {
            let sequence = &requests.sequences[share.key];
            let Some(slot) = sequence.slot else { continue };
            let until = sequence.computed + share.tokens;
            let tokens = &sequence.tokens[sequence.computed..until];
            // Only after the decode call succeeded: a failed batch leaves the slots as they were, and the cache has to
            // agree.
            requests.slots.append(slot, tokens);
            // Counted as computed when they are accepted.
            requests.slots.append(slot, sequence.draft());
            // A single token after a sampled one is a decode; all other tokens were known before.
            if share.tokens == 1 && sequence.appended > 0 && until == sequence.tokens.len() {
                requests.report.decoded.push(sequence.number);
            } else {
                let tokens = u32::try_from(share.tokens).unwrap_or(u32::MAX);
                requests.report.prefilled.push((sequence.number, tokens));
            }
            let stop = self.limits.prefill_stop(requests, share.key);
            let sequence = &mut requests.sequences[share.key];
            let request = &mut requests.jobs[sequence.job];
            requests.fuel.charge_processed(request, sequence, until);
            sequence.computed = until;
            if stop == Some(until) {
                requests.slots.checkpoint(slot);
            }
        }
        requests.stats.draft_tokens.add(self.drafted as u64);
        if let Some(adapters) = &mut self.adapters {
            adapters.end_turn(requests, &self.work);
        }
        self.entries.len()
    }

    /// Fails every request with a sequence in the batch. The contents of their slots are undefined, so the slots are
    /// freed.
    fn fail(&self, requests: &mut Requests, error: &EngineError) {
        for share in &self.shares {
            // Two choices of one request may be in the batch; the first has ended the request.
            if let Some(sequence) = requests.sequences.get(share.key) {
                requests.fail(sequence.job, error.clone(), false);
            }
        }
    }
}

impl BatchLimits {
    /// Returns the work that a running sequence has in this step.
    fn work_of(self, requests: &Requests, key: SequenceKey) -> Option<Runnable> {
        let sequence = &requests.sequences[key];
        let mut pending = sequence.pending();
        if pending == 0 || sequence.asleep_until.is_some() || sequence.skips_step() {
            return None;
        }
        if let Some(stop) = self.prefill_stop(requests, key) {
            pending = pending.min(stop - sequence.computed);
        }
        Some(Runnable { key, pending })
    }

    /// Returns the next length at which the prefill of a sequence stops, because its slot could not return to it.
    fn prefill_stop(self, requests: &Requests, key: SequenceKey) -> Option<usize> {
        let sequence = &requests.sequences[key];
        if sequence.computed >= sequence.prompt_tokens {
            return None;
        }
        let output = requests.terms(key).max_tokens as usize;
        let span = PromptSpan {
            tokens: sequence.prompt_tokens,
            tokens_max: sequence.prompt_tokens.saturating_add(output),
            computed: sequence.computed,
            marks: sequence.marks,
        };
        let stop = requests.slots.tiers().next_stop(span);
        // A model that cannot truncate can share a prompt with other choices only from a slot that ends there. Otherwise the
        // extra step would only delay its first token.
        let shared = sequence.prompt_tokens.saturating_sub(1);
        let shares = !self.truncates
            && sequence.computed < shared
            && requests.jobs[sequence.job].members.len() > 1;
        stop.or_else(|| shares.then_some(shared))
    }
}

/// The model has less room than was counted: evicts all cached prefixes, or else preempts a sequence. Returns false if
/// neither is possible.
fn make_room(requests: &mut Requests) -> bool {
    if requests.slots.evict_all() {
        return true;
    }
    let Some(victim) = requests.victim(true, None) else {
        return false;
    };
    requests.preempt(victim);
    true
}

/// Fails every request that has a slot, and frees the slots.
fn fail_running(requests: &mut Requests, error: &EngineError) {
    let holders = requests
        .sequences
        .iter()
        .filter(|(_, it)| it.slot.is_some());
    let jobs: BTreeSet<usize> = holders.map(|(_, holder)| holder.job).collect();
    for job in jobs {
        requests.fail(job, error.clone(), false);
    }
}

fn fail_all(requests: &mut Requests, error: &EngineError) {
    let open = requests.jobs.iter().filter(|(_, job)| !job.ended);
    // Collected first: `fail` changes the slab. Ended requests keep their own last event.
    let jobs: Vec<usize> = open.map(|(index, _)| index).collect();
    for job in jobs {
        requests.fail(job, error.clone(), false);
    }
}
