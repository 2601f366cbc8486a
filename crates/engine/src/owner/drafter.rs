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

mod slots;

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
use crate::model::{BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId};
use crate::scheduler::SequenceKey;

/// A sequence that is more tokens behind catches up first.
pub(super) const BEHIND_MAX: usize = 8;
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
    /// The sequence is many tokens behind: in this step it catches up, and nothing is drafted.
    catches_up: bool,
    /// The draft model was asked.
    pub(super) is_asked: bool,
    /// There is no room for the sequence.
    pub(super) is_refused: bool,
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
            catches_up: false,
            is_asked: false,
            is_refused: false,
            is_cut: false,
            slot: 0,
        }
    }

    /// Lets a sequence catch up.
    pub(super) fn catch_up(key: SequenceKey) -> Self {
        Self {
            catches_up: true,
            ..Self::new(key, 1, Vec::new())
        }
    }
}

/// What sequences that catch up may take of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct CatchUpBudget {
    /// Seconds that this step adds to the time for sequences to catch up.
    pub(super) seconds: f64,
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

    /// Returns how many known tokens of a sequence its slot lacks; `None` if the draft model cannot compute the sequence.
    pub(super) fn behind(&self, requests: &Requests, key: SequenceKey) -> Option<usize> {
        let sequence = &requests.sequences[key];
        let known = &*sequence.tokens;
        if known.is_empty() || known.len() >= self.context.min(self.capacity.cells as usize) {
            return None;
        }
        let owner = Some((key, sequence.number));
        let own = self.slots.iter().find(|slot| slot.owner == owner);
        let held = own.map_or(0, |slot| common_prefix(&slot.tokens, known));
        let lacking = &known[held.min(known.len() - 1)..];
        let is_known = |token: &Token| *token < self.common_tokens;
        lacking.iter().all(is_known).then_some(lacking.len())
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
        for task in &mut *tasks {
            task.is_refused = !self.prepare(task);
        }
        let tasks = tasks.iter_mut().filter(|task| !task.is_refused);
        let tasks = self.those_with_room(tasks.collect());
        let (mut ready, mut behind): (Vec<_>, Vec<_>) = tasks
            .into_iter()
            .partition(|task| !task.catches_up && self.behind(task) <= BEHIND_MAX);
        // Those that are ready after it draft in the next step: this one has taken its time.
        self.catch_up(&mut behind, budget)?;
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

    /// Returns the tasks for whose sequences there are cells, those first that lack the fewest tokens. The slots of others are
    /// freed where the cells are needed: all would wait for each other.
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
            last.is_refused = true;
            let lacking = tasks.iter().map(|task| self.behind(task) + task.planned);
            if self.room_at_most() < lacking.sum() {
                self.release(last.slot as usize);
            }
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
                for task in tasks {
                    task.is_refused = !task.is_asked;
                }
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
        tasks: &mut [&mut DraftTask],
        budget: CatchUpBudget,
    ) -> Result<(), EngineError> {
        let mut tokens = CATCH_UP_MIN;
        if budget.is_timed {
            let seconds = budget.seconds;
            let drafter = &mut *self.drafter;
            // Nothing is saved up for later: that would be a long call.
            drafter.credit = (drafter.credit + seconds).min(seconds);
            if drafter.credit <= 0.0 {
                return Ok(());
            }
            tokens = tokens.max(drafter.calls.tokens_in(drafter.credit));
        }
        let tokens = tokens.min(self.drafter.capacity.batch_tokens as usize);
        let lacking = tasks.iter().map(|task| self.behind(task)).sum();
        let tokens = tokens.min(lacking);
        let left = tokens.min(self.room(tokens));
        self.fill_with_missing(tasks, left);
        if self.drafter.batch.is_empty() {
            return Ok(());
        }
        match self.decode()? {
            Some(Some(took)) => {
                let drafter = &mut *self.drafter;
                drafter.credit -= took.as_secs_f64();
                drafter.calls.observe_catch_up(drafter.batch.len(), took);
            }
            Some(None) => {}
            None => tasks.iter_mut().for_each(|task| task.is_refused = true),
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
            Err(
                DecodeStop::Failed(error) | DecodeStop::SlotsLost(error) | DecodeStop::Dead(error),
            ) => return Err(error),
        }
        let took = self.clock.now_or(self.now).since(before);
        let took = took.saturating_sub(self.model.waited());
        for entry in &self.drafter.batch {
            let slot = &mut self.drafter.slots[entry.slot as usize];
            slot.tokens.push(entry.token);
        }
        Ok(Some(self.clock.is_running().then_some(took)))
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
