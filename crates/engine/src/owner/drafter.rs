//! [`Drafter`]: the draft model of an engine, and what its slots hold.
//!
//! ```text
//!   task ─► slot: its own, or a copy of the longest common prefix ─► truncate behind what the sequence has in common
//!        ─► a few tokens behind: draft ─► decode: the tokens it lacks, a row ─► the best token, if it is likely ─┐
//!        │                                   ▲                                                                   │
//!        │                                   └──────────────── until the draft is as long as planned ◄───────────┘
//!        └► many tokens behind: catch up, a part of them in each step
//! ```
//!
//! Nothing tells the drafter what becomes of a sequence. Before each draft its slot is compared with the known tokens, and
//! what differs is dropped: rejected tokens, and the rest of another sequence.
//!
//! Its failures end no request: the draft model is dropped, and the engine goes on without it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::draft_pace::DraftCalls;
use super::recovery::fenced;
use super::report::SequenceId;
use super::requests::Requests;
use super::step_clock::StepClock;
use crate::api::EngineError;
use crate::draft_model::DraftModel;
use crate::model::{BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};
use crate::scheduler::SequenceKey;

/// A sequence that is more tokens behind catches up first.
const BEHIND_MAX: usize = 8;
/// The least number of tokens that catch up in one call: a call has a cost of its own.
const CATCH_UP_MIN: usize = 32;
/// Fewer tokens of another sequence are not worth a copy.
const SHARED_MIN: usize = 16;
/// Logits so far below the largest add nothing to the sum of probabilities.
const NEGLIGIBLE: f32 = 16.0;

/// A draft that is to be made.
#[derive(Debug)]
pub(super) struct DraftTask {
    pub(super) key: SequenceKey,
    /// The maximum of its tokens.
    pub(super) planned: usize,
    pub(super) draft: Vec<Token>,
    /// The draft model was asked; otherwise the sequence is catching up, or there is no room for it.
    pub(super) is_asked: bool,
    /// The draft model was too unsure for another token.
    pub(super) is_cut: bool,
    slot: SlotId,
}

impl DraftTask {
    /// A draft of at most so many tokens; `draft` is an empty buffer for them.
    pub(super) fn new(key: SequenceKey, planned: usize, draft: Vec<Token>) -> Self {
        Self {
            key,
            planned,
            draft,
            is_asked: false,
            is_cut: false,
            slot: 0,
        }
    }
}

/// What the drafts of a step may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct CatchUpBudget {
    /// Seconds that this step adds to the time for sequences to catch up beside others.
    pub(super) beside: f64,
    /// The same if all sequences of the step catch up.
    pub(super) alone: f64,
    /// Otherwise time stands still, and each step has the least number of tokens.
    pub(super) is_timed: bool,
}

/// A draft model and its slots.
pub(super) struct Drafter {
    /// `None` after a failure.
    model: Option<Box<dyn Model>>,
    name: String,
    p_min: f32,
    common_tokens: Token,
    context: usize,
    capacity: Capacity,
    slots: Vec<DraftSlot>,
    /// The number of the last call; tells which slots are in use in it.
    call: u64,
    /// Seconds that sequences may take to catch up; below 0 after a call that took longer.
    credit: f64,
    calls: DraftCalls,
    /// Buffers that retain their allocations.
    batch: Vec<BatchEntry>,
    rows: Vec<(usize, usize)>,
}

/// What a slot of the draft model holds.
#[derive(Debug, Default)]
struct DraftSlot {
    tokens: Vec<Token>,
    /// Whose tokens they are, or were. Numbers are not reused, unlike keys.
    owner: Option<(SequenceKey, SequenceId)>,
    /// Tokens are copied within a scope only, as those of the other model.
    scope: u64,
    used: u64,
}

impl std::fmt::Debug for Drafter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drafter")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Drafter {
    /// Drafts with a model, for an engine of this name.
    pub(super) fn new(draft: DraftModel, name: &str) -> Self {
        let capacity = draft.model.capacity();
        let slots = (0..capacity.slots).map(|_| DraftSlot::default());
        Self {
            name: name.to_owned(),
            p_min: draft.p_min,
            common_tokens: draft.common_tokens,
            context: draft.model.info().context_tokens as usize,
            capacity,
            slots: slots.collect(),
            call: 0,
            credit: 0.0,
            calls: DraftCalls::default(),
            batch: Vec::new(),
            rows: Vec::new(),
            model: Some(draft.model),
        }
    }

    /// Returns whether the draft model can be asked.
    pub(super) fn is_on(&self) -> bool {
        self.model.is_some()
    }

    /// What its calls take.
    pub(super) fn calls(&self) -> &DraftCalls {
        &self.calls
    }

    /// Drafts for the sequences of these tasks. A failure switches the drafter off.
    pub(super) fn draft(
        &mut self,
        tasks: &mut [DraftTask],
        requests: &Requests,
        budget: CatchUpBudget,
        clock: &StepClock,
        now: Time,
    ) {
        let Some(mut model) = self.model.take() else {
            return;
        };
        let mut step = DraftStep {
            drafter: self,
            model: &mut *model,
            requests,
            clock,
            now,
        };
        // The drafter is not used again after a panic.
        let made = catch_unwind(AssertUnwindSafe(|| step.draft(tasks, budget)));
        let why = match made {
            Ok(Ok(())) => {
                self.model = Some(model);
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_panic) => {
                requests.stats.panics.add(1);
                "it panicked".to_owned()
            }
        };
        tasks.iter_mut().for_each(|task| task.draft.clear());
        self.slots.clear();
        // Dropping it frees its memory, and may panic again.
        fenced(move || drop(model));
        tracing::error!(
            model = self.name,
            why,
            "the draft model failed: nothing is drafted by it any more, and the model goes on without"
        );
    }
}

/// The drafts of one step.
struct DraftStep<'a> {
    drafter: &'a mut Drafter,
    model: &'a mut dyn Model,
    requests: &'a Requests,
    clock: &'a StepClock,
    now: Time,
}

impl DraftStep<'_> {
    fn draft(&mut self, tasks: &mut [DraftTask], budget: CatchUpBudget) -> Result<(), EngineError> {
        self.drafter.call += 1;
        let all = tasks.len();
        let has_slot: Vec<bool> = tasks.iter_mut().map(|task| self.prepare(task)).collect();
        let tasks = tasks.iter_mut().zip(has_slot);
        let tasks = tasks.filter_map(|(task, has_slot)| has_slot.then_some(task));
        let tasks = self.those_with_room(tasks.collect());
        let (mut ready, behind): (Vec<_>, Vec<_>) = tasks
            .into_iter()
            .partition(|task| self.behind(task) <= BEHIND_MAX);
        // Those that are ready after it draft in the next step: this one has taken its time.
        self.catch_up(&behind, behind.len() == all, budget)?;
        let most = self.drafter.capacity;
        let mut left = most.rows.min(most.batch_tokens) as usize;
        ready.retain(|task| {
            let behind = self.behind(task);
            let fits = behind <= left;
            left -= if fits { behind } else { 0 };
            fits
        });
        self.extend(&mut ready)
    }

    /// Returns the tasks for whose sequences there are cells, those first that lack the fewest tokens. The slots of the others are
    /// freed: all would wait for each other.
    fn those_with_room<'t>(&mut self, mut tasks: Vec<&'t mut DraftTask>) -> Vec<&'t mut DraftTask> {
        tasks.sort_by_key(|task| self.behind(task));
        loop {
            let lacking = tasks.iter().map(|task| self.behind(task) + task.planned);
            let lacking = lacking.sum();
            if self.room(lacking) >= lacking {
                return tasks;
            }
            let Some(last) = tasks.pop() else {
                return tasks;
            };
            self.release(last.slot as usize);
        }
    }

    /// Extends the drafts of these tasks, which have room, by a token with each call.
    fn extend(&mut self, tasks: &mut Vec<&mut DraftTask>) -> Result<(), EngineError> {
        while !tasks.is_empty() {
            let DraftStep {
                drafter, requests, ..
            } = self;
            drafter.batch.clear();
            drafter.rows.clear();
            for (index, task) in tasks.iter().enumerate() {
                let held = drafter.slots[task.slot as usize].tokens.len();
                let known = &requests.sequences[task.key].tokens;
                let tokens = known.iter().chain(&task.draft).skip(held);
                drafter.push(task.slot, tokens.copied());
                if let Some(last) = drafter.batch.last_mut() {
                    last.row = true;
                }
                drafter.rows.push((index, drafter.batch.len() - 1));
            }
            let Some(took) = self.decode()? else {
                return Ok(());
            };
            let drafter = &mut *self.drafter;
            if let Some(took) = took {
                drafter
                    .calls
                    .observe(tasks.len(), drafter.batch.len(), took);
            }
            let (p_min, common) = (drafter.p_min, drafter.common_tokens);
            for &(index, entry) in &drafter.rows {
                let task = &mut *tasks[index];
                task.is_asked = true;
                match best(self.model.row(entry, self.now), p_min) {
                    // A token that the other model does not have would be rejected.
                    Some(token) if token < common => task.draft.push(token),
                    _ => task.is_cut = true,
                }
            }
            let vocabulary = &self.requests.tokens.vocabulary;
            let ends = |token: &Token| vocabulary.is_end(*token);
            tasks.retain(|task| {
                let is_whole = task.draft.len() >= task.planned;
                !task.is_cut && !is_whole && !task.draft.last().is_some_and(ends)
            });
        }
        Ok(())
    }

    /// Computes tokens of sequences that are many tokens behind, in one call.
    fn catch_up(
        &mut self,
        tasks: &[&mut DraftTask],
        is_alone: bool,
        budget: CatchUpBudget,
    ) -> Result<(), EngineError> {
        let mut tokens = CATCH_UP_MIN;
        if budget.is_timed {
            let seconds = match is_alone {
                true => budget.alone,
                false => budget.beside,
            };
            let drafter = &mut *self.drafter;
            // Nothing is saved up for later: that would be a long call.
            drafter.credit = (drafter.credit + seconds).min(seconds);
            if drafter.credit <= 0.0 {
                return Ok(());
            }
            tokens = tokens.max(drafter.calls.tokens_in(drafter.credit));
        }
        let tokens = tokens.min(self.drafter.capacity.batch_tokens as usize);
        let left = tokens.min(self.room(tokens));
        self.fill_with_missing(tasks, left);
        if self.drafter.batch.is_empty() {
            return Ok(());
        }
        if let Some(Some(took)) = self.decode()? {
            let drafter = &mut *self.drafter;
            drafter.credit -= took.as_secs_f64();
            drafter.calls.observe_catch_up(drafter.batch.len(), took);
        }
        Ok(())
    }

    /// Fills the batch with tokens that these sequences lack.
    fn fill_with_missing(&mut self, tasks: &[&mut DraftTask], mut left: usize) {
        let (drafter, requests) = (&mut *self.drafter, self.requests);
        drafter.batch.clear();
        let mut computed: Vec<(u64, &[Token])> = Vec::new();
        for task in tasks {
            let sequence = &requests.sequences[task.key];
            let known = &*sequence.tokens;
            let scope = requests.jobs[sequence.job].submission.prefix_scope;
            let held = drafter.slots[task.slot as usize].tokens.len();
            // What another one computes now is copied in the next step.
            let is_shared = computed.iter().any(|&(of, tokens)| {
                of == scope && common_prefix(tokens, known) >= held + SHARED_MIN
            });
            // The last one is computed with the draft, for its row.
            let most = (known.len() - held).saturating_sub(1).min(left);
            if most > 0 && !is_shared {
                left -= most;
                computed.push((scope, known));
                let part = known[held..held + most].iter().copied();
                drafter.push(task.slot, part);
            }
        }
    }

    /// Decodes the batch. Returns the time that it took, if time passes; `None` if there was no room for it.
    fn decode(&mut self) -> Result<Option<Option<Duration>>, EngineError> {
        let before = self.clock.now_or(self.now);
        match self.model.decode(&self.drafter.batch, self.now) {
            Ok(()) => {}
            // The count of cells says otherwise, or the engine ends: without drafts.
            Err(DecodeStop::Full | DecodeStop::Aborted) => return Ok(None),
            Err(DecodeStop::Failed(error) | DecodeStop::Dead(error)) => return Err(error),
        }
        let took = self.clock.now_or(self.now).since(before);
        for entry in &self.drafter.batch {
            let slot = &mut self.drafter.slots[entry.slot as usize];
            slot.tokens.push(entry.token);
        }
        Ok(Some(self.clock.is_running().then_some(took)))
    }

    /// Returns how many known tokens the slot of a task lacks.
    fn behind(&self, task: &DraftTask) -> usize {
        let held = self.drafter.slots[task.slot as usize].tokens.len();
        self.requests.sequences[task.key].tokens.len() - held
    }

    /// Gives a task a slot that holds nothing but tokens of its sequence. Returns false if there is none, or the draft model
    /// cannot compute this sequence.
    fn prepare(&mut self, task: &mut DraftTask) -> bool {
        let requests = self.requests;
        let sequence = &requests.sequences[task.key];
        let room = self.drafter.context.saturating_sub(sequence.tokens.len());
        task.planned = task.planned.min(room);
        if task.planned == 0 {
            return false;
        }
        let owner = (task.key, sequence.number);
        let slots = &self.drafter.slots;
        let own = slots.iter().position(|slot| slot.owner == Some(owner));
        let Some(index) = own.or_else(|| self.acquire(task.key)) else {
            return false;
        };
        if sequence.tokens.len() > self.drafter.slots[index].tokens.len() + BEHIND_MAX {
            self.copy_longer(index, task.key);
        }
        let slot = &mut self.drafter.slots[index];
        slot.used = self.drafter.call;
        slot.owner = Some(owner);
        task.slot = slot_id(index);
        let same = common_prefix(&slot.tokens, &sequence.tokens);
        // At least the last token is computed, for its row.
        self.truncate(index, same.min(sequence.tokens.len() - 1));
        // One that is not in the vocabulary of the draft model; those that it has computed are.
        let held = self.drafter.slots[index].tokens.len();
        let is_known = |token: &Token| *token < self.drafter.common_tokens;
        sequence.tokens[held..].iter().all(is_known)
    }

    /// Returns a slot for a sequence that has none: that of an ended one of the same conversation, or an empty one.
    fn acquire(&mut self, key: SequenceKey) -> Option<usize> {
        let (shared, from) = self.longest(key);
        let slot = &self.drafter.slots[from];
        if shared >= SHARED_MIN && shared * 2 >= slot.tokens.len() && !self.is_live(slot) {
            return Some(from);
        }
        let to = self.victim(Some(from).filter(|_| shared >= SHARED_MIN))?;
        self.open(to, key);
        Some(to)
    }

    /// Copies what another slot holds of the tokens of a sequence, if that is much more than its own slot holds.
    fn copy_longer(&mut self, to: usize, key: SequenceKey) {
        let held = common_prefix(
            &self.drafter.slots[to].tokens,
            &self.requests.sequences[key].tokens,
        );
        let (shared, from) = self.longest(key);
        if from == to || shared < held + SHARED_MIN || self.room(shared) < shared {
            return;
        }
        // To make room, the slot may have been freed.
        let Some(tokens) = self.drafter.slots[from].tokens.get(..shared) else {
            return;
        };
        let tokens = tokens.to_vec();
        if self.model.can_resume(slot_id(from), length(shared)) {
            self.open(to, key);
            self.model.fork(slot_id(from), slot_id(to), length(shared));
            self.drafter.slots[to].tokens = tokens;
        }
    }

    /// Returns the length of the longest prefix of a sequence in its scope, and its slot.
    fn longest(&self, key: SequenceKey) -> (usize, usize) {
        let sequence = &self.requests.sequences[key];
        let scope = self.requests.jobs[sequence.job].submission.prefix_scope;
        let slots = self.drafter.slots.iter().enumerate();
        let shared = slots.map(|(index, slot)| match slot.scope == scope {
            true => (common_prefix(&slot.tokens, &sequence.tokens), index),
            false => (0, index),
        });
        shared.max().unwrap_or_default()
    }

    /// Returns a slot that can be given to another sequence, and is not `except`: that of a sequence that has ended, rather
    /// than that of one that has not drafted for long, but none of this step.
    fn victim(&self, except: Option<usize>) -> Option<usize> {
        let slots = &self.drafter.slots;
        let unused = (0..slots.len())
            .filter(|&index| Some(index) != except && slots[index].used < self.drafter.call);
        let unused = unused.min_by_key(|&index| (self.is_live(&slots[index]), slots[index].used));
        // With a single slot, that one.
        unused.or_else(|| except.filter(|&index| !self.is_live(&slots[index])))
    }

    fn is_live(&self, slot: &DraftSlot) -> bool {
        slot.owner.is_some_and(|(key, number)| {
            let sequence = self.requests.sequences.get(key);
            sequence.is_some_and(|sequence| sequence.number == number)
        })
    }

    /// Returns how many cells are free, after freeing those of ended sequences as long as they are fewer than `wanted`.
    fn room(&mut self, wanted: usize) -> usize {
        let cells = self.drafter.capacity.cells as usize;
        loop {
            // Cells that slots share count twice.
            let used: usize = self
                .drafter
                .slots
                .iter()
                .map(|slot| slot.tokens.len())
                .sum();
            let free = cells.saturating_sub(used);
            if free >= wanted {
                return free;
            }
            let slots = &self.drafter.slots;
            let ended = (0..slots.len()).filter(|&index| {
                !slots[index].tokens.is_empty()
                    && slots[index].used < self.drafter.call
                    && !self.is_live(&slots[index])
            });
            let Some(oldest) = ended.min_by_key(|&index| slots[index].used) else {
                return free;
            };
            self.release(oldest);
        }
    }

    /// Makes a slot an empty sequence, whatever it holds.
    fn open(&mut self, index: usize, key: SequenceKey) {
        self.release(index);
        let sequence = &self.requests.sequences[key];
        let submission = &self.requests.jobs[sequence.job].submission;
        let purpose = SlotPurpose {
            prompt: &submission.prompt,
            seed: submission.terms.seed,
            choice: sequence.choice,
            max_tokens: submission.terms.asked_max_tokens,
        };
        self.model.open(slot_id(index), &purpose);
        self.drafter.slots[index].scope = submission.prefix_scope;
    }

    /// Truncates a slot to its first tokens, or to none if the model cannot resume there.
    fn truncate(&mut self, index: usize, tokens: usize) {
        let slot = slot_id(index);
        let held = &mut self.drafter.slots[index].tokens;
        if tokens < held.len() {
            let resumes = self.model.can_resume(slot, length(tokens));
            let tokens = if resumes { tokens } else { 0 };
            self.model.truncate(slot, length(tokens));
            held.truncate(tokens);
        }
    }

    fn release(&mut self, index: usize) {
        self.model.release(slot_id(index));
        self.drafter.slots[index] = DraftSlot::default();
    }
}

impl Drafter {
    /// Adds the next tokens of a slot to the batch.
    fn push(&mut self, slot: SlotId, tokens: impl Iterator<Item = Token>) {
        let held = length(self.slots[slot as usize].tokens.len());
        for (position, token) in (held..).zip(tokens) {
            self.batch.push(BatchEntry {
                slot,
                position,
                token,
                row: false,
            });
        }
    }
}

/// Returns the best token of a row, if it has at least this probability.
fn best(row: OutputRow<'_>, p_min: f32) -> Option<Token> {
    match row {
        OutputRow::Ranked(row) => {
            let (token, logprob) = row.best(1).pop()?;
            (logprob.exp() >= p_min).then_some(token)
        }
        OutputRow::Logits(logits) => {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let token = logits.iter().position(|&logit| logit == most)?;
            let mut sum = 0.0_f32;
            for &logit in &*logits {
                if logit > most - NEGLIGIBLE {
                    sum += (logit - most).exp();
                    // Rarely all of a row has to be read.
                    if sum * p_min > 1.0 {
                        return None;
                    }
                }
            }
            Token::try_from(token).ok().filter(|_| most.is_finite())
        }
        OutputRow::NotBefore(_) | OutputRow::End(_) | OutputRow::Failed(_) => None,
    }
}

fn common_prefix(one: &[Token], other: &[Token]) -> usize {
    // Mostly the whole of it, which is compared at once.
    if other.starts_with(one) {
        return one.len();
    }
    let pairs = one.iter().zip(other);
    pairs.take_while(|(one, other)| one == other).count()
}

/// Slots are as many as a u32 says.
fn slot_id(index: usize) -> SlotId {
    length(index)
}

fn length(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
