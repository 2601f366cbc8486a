//! The slots of the draft model: who has which, and what is freed for others.

use sapwood_proto::steer::Token;

use super::{
    BEHIND_MAX, DraftSlot, DraftStep, DraftTask, SHARED_MIN, common_prefix, length, slot_id,
};
use crate::model::SlotPurpose;
use crate::scheduler::SequenceKey;

impl DraftStep<'_> {
    /// Returns how many known tokens the slot of a task lacks.
    pub(super) fn behind(&self, task: &DraftTask) -> usize {
        let held = self.drafter.slots[task.slot as usize].tokens.len();
        self.requests.sequences[task.key].tokens.len() - held
    }

    /// Gives a task a slot that holds nothing but tokens of its sequence. Returns false if there is none, or the draft model
    /// cannot compute this sequence.
    pub(super) fn prepare(&mut self, task: &mut DraftTask) -> bool {
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

    /// Returns how many cells are free if those of ended sequences are freed.
    pub(super) fn room_at_most(&self) -> usize {
        let slots = self.drafter.slots.iter();
        let in_use = slots.filter(|slot| !self.can_be_freed(slot));
        let used = in_use.map(|slot| slot.tokens.len()).sum();
        (self.drafter.capacity.cells as usize).saturating_sub(used)
    }

    fn can_be_freed(&self, slot: &DraftSlot) -> bool {
        slot.used < self.drafter.call && !self.is_live(slot)
    }

    /// Returns how many cells are free, after freeing those of ended sequences as long as they are fewer than `wanted`: none if
    /// that would not be enough.
    pub(super) fn room(&mut self, wanted: usize) -> usize {
        let can_be_met = self.room_at_most() >= wanted;
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
            if free >= wanted || !can_be_met {
                return free;
            }
            let slots = &self.drafter.slots;
            let ended = (0..slots.len()).filter(|&index| {
                !slots[index].tokens.is_empty() && self.can_be_freed(&slots[index])
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

    pub(super) fn release(&mut self, index: usize) {
        self.model.release(slot_id(index));
        self.drafter.slots[index] = DraftSlot::default();
    }
}
