//! [`SlotStart`]: gives a sequence a slot that begins with what is cached or saved of its prompt.

use std::sync::Arc;

use super::slot_model::length;
use super::{FoundPrefix, KvSlots};
use crate::model::{SlotId, SlotPurpose};
use crate::owner::checkpoints::Checkpoint;
use crate::prefix_cache::{EvictedPrefix, PrefixMatch};
use crate::prefix_store::{SavedId, SavedPrefix};

/// What a slot is opened for.
pub(super) struct SlotStart<'a> {
    pub(super) slots: &'a mut KvSlots,
    pub(super) scope: u64,
    pub(super) purpose: &'a SlotPurpose<'a>,
}

/// A saved prefix, its id, and how many of its tokens are wanted. Held: evictions may take it out of the memory.
type HeldPrefix = (Arc<SavedPrefix>, SavedId, usize);

impl SlotStart<'_> {
    /// Opens a slot, and returns it with the number of tokens that it begins with; `None` if no slot is left.
    pub(super) fn run(mut self, prefix: Option<FoundPrefix>) -> Option<(SlotId, usize)> {
        let wanted = match prefix {
            Some(FoundPrefix::Slot(shared)) => Some(shared),
            _ => None,
        };
        // Held: what is evicted below is saved, for which this one may go.
        let mut saved = match prefix {
            Some(FoundPrefix::Saved(found)) => {
                let prefix = self.slots.tiers.store.get(found.id);
                prefix.map(|prefix| (prefix, found.id, found.tokens))
            }
            _ => None,
        };
        let spare = wanted.map(|shared| shared.slot);
        if !self.slots.cache.has_free_slot() {
            // Evicts another cached prefix before the one that this sequence needs, unless only one slot is left.
            if let Some(evicted) = self.slots.cache.evict(spare) {
                self.slots.save(evicted);
            } else if let Some(evicted) = self.slots.cache.evict(None) {
                saved = self.save_wanted(evicted, wanted);
            }
        }
        // Before `acquire`, which takes the first free slot: that is then the one which the move has emptied. The
        // wanted prefix does not move, because `shared` names its slot. A saved one cannot be restored where something is
        // still to be copied from.
        let movable = saved.is_none() || !self.slots.model.facts().forks_later();
        if let Some((cached, free)) = self.slots.cache.misplaced_prefix(spare)
            && movable
        {
            self.move_cached(cached, free);
        }
        let slot = self.slots.cache.acquire(self.scope)?;
        // `fork` and `restore` expect an open, empty slot.
        self.slots.model.calls().open(slot, self.purpose);
        let computed = match (saved, wanted) {
            (Some(saved), _) => self.restore(saved, slot),
            (None, Some(shared)) => self.share(shared, slot),
            (None, None) => 0,
        };
        Some((slot, computed))
    }

    /// Saves the only prefix that could be evicted. If that is the wanted one, it is restored into its own slot, which the
    /// model opens for another request; returns it then.
    fn save_wanted(
        &mut self,
        evicted: EvictedPrefix,
        wanted: Option<PrefixMatch>,
    ) -> Option<HeldPrefix> {
        let wanted = wanted.filter(|shared| shared.slot == evicted.slot);
        let (scope, tokens) = (evicted.scope, evicted.tokens.clone());
        self.slots.save(EvictedPrefix {
            superseded: evicted.superseded && wanted.is_none(),
            ..evicted
        });
        let common = wanted?.tokens;
        let store = &mut self.slots.tiers.store;
        let found = store.find(scope, &tokens)?;
        let usable = found.tokens >= common;
        let prefix = store.get(found.id).filter(|_| usable)?;
        Some((prefix, found.id, common))
    }

    /// Moves a cached prefix behind the slots in use: a model may compute adjacent slots in one decode call.
    fn move_cached(&mut self, cached: SlotId, free: SlotId) {
        // The sequence of a cached slot has ended, so only its tokens matter.
        let purpose = SlotPurpose {
            prompt: &[],
            seed: 0,
            choice: 0,
            max_tokens: None,
        };
        let KvSlots {
            model,
            cache,
            copies,
            ..
        } = &mut *self.slots;
        copies.copied += model.facts().fork_bytes(cached);
        model.calls().open(free, &purpose);
        if model.fork(cached, free, cache.len(cached)) {
            model.calls().release(cached);
            cache.swap_slots(cached, free);
        } else {
            model.calls().release(free);
        }
    }

    /// Returns how many tokens the sequence can have at most, as far as its request says.
    fn tokens_max(&self) -> usize {
        let output = self.purpose.max_tokens;
        let output = output.map_or(usize::MAX, |max| max as usize);
        self.purpose.prompt.len().saturating_add(output)
    }

    /// Makes a checkpoint at the end of a slot, from where the new one goes on, if that would lose it.
    fn checkpoint(&mut self, slot: SlotId) {
        let checkpoints = &self.slots.tiers.checkpoints;
        if checkpoints.are_needed(self.tokens_max()) {
            self.slots.checkpoint(slot);
        }
    }

    /// Shares the cells of a prefix with an empty slot; returns the number of tokens.
    fn share(&mut self, shared: PrefixMatch, slot: SlotId) -> usize {
        // An eviction may have taken the shared prefix, and its slot may be the one that was opened.
        if !self.slots.cache.holds(shared.slot, shared.tokens) || shared.slot == slot {
            return 0;
        }
        let released = shared.cached && shared.whole;
        if released {
            self.checkpoint(shared.slot);
        }
        // A copy rather than the cached slot itself: the model has opened the new slot for this request's purpose, and
        // the cached tokens may go on beyond the shared ones.
        let model = &mut self.slots.model;
        let copied = match shared.rewinds {
            true => self.fork_rewound(shared, slot),
            false => model.fork(shared.slot, slot, shared.tokens),
        };
        let slots = &mut *self.slots;
        slots.copies.copied += slots.model.facts().fork_bytes(shared.slot);
        if !copied {
            self.reopen(slot);
            return 0;
        }
        slots.cache.fork(shared.slot, slot, shared.tokens);
        if released {
            // A prompt with this prefix can use the new slot instead.
            slots.cache.discard(shared.slot);
            slots.model.calls().release(shared.slot);
        }
        shared.tokens
    }

    /// Copies a slot and rewinds the copy to the shared tokens. Returns false if the copy cannot be used.
    fn fork_rewound(&mut self, shared: PrefixMatch, slot: SlotId) -> bool {
        let slots = &mut *self.slots;
        let (scope, tokens) = slots.cache.contents(shared.slot);
        let held = length(tokens.len());
        let checkpoints = &mut slots.tiers.checkpoints;
        let Some(checkpoint) = checkpoints.get(scope, tokens, shared.tokens) else {
            return false;
        };
        slots.model.calls().fork(shared.slot, slot, held);
        self.rewind(slot, &checkpoint, shared.tokens)
    }

    /// Rewinds a slot to a checkpoint, and then to `tokens` tokens, in the model alone.
    fn rewind(&mut self, slot: SlotId, checkpoint: &Checkpoint, tokens: usize) -> bool {
        let later = self.slots.model.facts().is_copied_later(slot);
        let rewound = self.slots.model.rewind(slot, checkpoint, tokens);
        if !rewound && !later {
            self.slots.tiers.forget_checkpoint(checkpoint);
        }
        rewound
    }

    /// Shortens a live slot by a checkpoint. If it returns false, the slot can only be emptied.
    fn go_back(&mut self, slot: SlotId, tokens: usize) -> bool {
        let slots = &mut *self.slots;
        let (scope, held) = slots.cache.contents(slot);
        let Some(checkpoint) = slots.tiers.checkpoints.get(scope, held, tokens) else {
            return false;
        };
        let rewound = self.rewind(slot, &checkpoint, tokens);
        if rewound {
            self.slots.cache.truncate(slot, tokens);
        }
        rewound
    }

    /// Empties a slot whose contents cannot be used.
    fn reopen(&mut self, slot: SlotId) {
        let KvSlots { model, cache, .. } = &mut *self.slots;
        cache.truncate(slot, 0);
        model.calls().release(slot);
        model.calls().open(slot, self.purpose);
    }

    /// Fills an empty slot from memory and truncates it to the common tokens; returns their number.
    fn restore(&mut self, (saved, id, common): HeldPrefix, slot: SlotId) -> usize {
        let tokens = &saved.tokens;
        self.slots.evict_for(tokens.len());
        let slots = &mut *self.slots;
        // A longer prefix than was evicted may cover it.
        if slots.cache.cells().free() < tokens.len() {
            return 0;
        }
        // Without memory for it, the prompt is computed.
        let Some(state) = saved.state.whole() else {
            return 0;
        };
        // One in blocks is put together before the model copies it.
        let copies = match saved.state.as_uncut() {
            Some(_) => 1,
            None => 2,
        };
        slots.copies.copied += copies * state.len();
        let calls = slots.model.calls();
        // A request before this one may have forked the prefix that was in the slot.
        let later = calls.is_copied_later(slot);
        if !calls.restore(slot, &state, length(tokens.len())) {
            if !later {
                // There are cells, so it would fail again.
                slots.tiers.forget_prefix(id);
            }
            return 0;
        }
        slots.cache.append(slot, tokens);
        if common < tokens.len() && !slots.truncate(slot, common) && !self.go_back(slot, common) {
            // Nothing of it can be used, so the slot begins anew.
            self.reopen(slot);
            return 0;
        }
        if common == tokens.len() {
            // A longer prefix replaces the saved one when this slot is saved again.
            self.checkpoint(slot);
        }
        common
    }
}
