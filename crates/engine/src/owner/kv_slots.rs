//! [`KvSlots`]: the model's slots. Every change of a slot is made here, in the model and in the prefix cache together.
//!
//! Invariants, on which the batch depends:
//! - A slot that the prefix cache counts as taken or cached is open in the model and holds the same tokens there.
//! - A running sequence's slot holds exactly the first `computed` of its tokens.
//! - The model is never asked to truncate or fork to a length from which it cannot resume (D-48).

use std::panic::{AssertUnwindSafe, catch_unwind};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::fenced;
use super::sequence::RunningSequence;
use crate::api::{EngineError, ModelInfo};
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};
use crate::prefix_cache::{PrefixCache, PrefixMatch};
use crate::stats::Counter;

/// The model, and what each of its slots holds.
pub(super) struct KvSlots {
    model: Box<dyn Model>,
    cache: PrefixCache,
    /// Whether the model can shorten a slot.
    truncates: bool,
    /// Shorter prefixes are neither looked up nor cached.
    prefix_min: usize,
}

impl KvSlots {
    pub(super) fn new(model: Box<dyn Model>, prefix_min: u32) -> Self {
        let truncates = model.info().truncates;
        Self {
            cache: PrefixCache::new(model.capacity(), truncates),
            truncates,
            prefix_min: prefix_min as usize,
            model,
        }
    }

    pub(super) fn info(&self) -> ModelInfo {
        self.model.info()
    }

    /// Returns the KV cells that are free or can be evicted.
    pub(super) fn room(&self) -> usize {
        self.cache.room()
    }

    /// Returns the KV cells in use.
    pub(super) fn used(&self) -> usize {
        self.cache.used()
    }

    /// Finds the longest usable cached or running prefix of `tokens` in the same scope.
    pub(super) fn find(&self, scope: u64, tokens: &[Token]) -> Option<PrefixMatch> {
        self.cache
            .find(scope, tokens, self.prefix_min, |slot, tokens| {
                can_resume(&*self.model, slot, tokens)
            })
    }

    /// Returns whether there is a slot and `cells` KV cells for a sequence that shares the given prefix.
    pub(super) fn fits(&self, cells: usize, shared: Option<PrefixMatch>) -> bool {
        // Cached cells of the prefix that nothing pins count as room, but this sequence pins them.
        let saved = shared.map_or(0, |shared| {
            shared.tokens - self.cache.unpinned(shared.slot, shared.tokens)
        });
        self.cache.room() + saved >= cells && self.cache.has_slot()
    }

    /// Opens a slot that shares a prefix, and returns it with the number of tokens that it holds. The caller has
    /// checked [`KvSlots::fits`]; `None` if no slot is left nevertheless.
    pub(super) fn acquire(
        &mut self,
        scope: u64,
        shared: Option<PrefixMatch>,
        purpose: &SlotPurpose<'_>,
    ) -> Option<(SlotId, usize)> {
        let wanted = shared.map(|shared| shared.slot);
        if !self.cache.has_free_slot() {
            // Evicts another cached prefix before the one that this sequence needs, unless only one slot is left.
            let evicted = self.cache.evict(wanted).or_else(|| self.cache.evict(None));
            if let Some(slot) = evicted {
                self.model.release(slot);
            }
        }
        // Before `acquire`, which takes the first free slot: that is then the one which the move has emptied. The
        // wanted prefix does not move, because `shared` names its slot.
        if let Some((cached, free)) = self.cache.misplaced_prefix(wanted) {
            self.move_cached(cached, free);
        }
        let slot = self.cache.acquire(scope)?;
        // `fork` expects an open, empty target.
        self.model.open(slot, purpose);
        // The eviction may have taken the shared prefix, and its slot may be the one that was opened.
        let shared = shared
            .filter(|shared| self.cache.holds(shared.slot, shared.tokens) && shared.slot != slot);
        let Some(shared) = shared else {
            return Some((slot, 0));
        };
        // A copy rather than the cached slot itself: the model has opened the new slot for this request's purpose, and
        // the cached tokens may go on beyond the shared ones.
        self.model.fork(shared.slot, slot, length(shared.tokens));
        self.cache.fork(shared.slot, slot, shared.tokens);
        if shared.cached && shared.whole {
            // A prompt with this prefix can use the new slot instead.
            self.cache.discard(shared.slot);
            self.model.release(shared.slot);
        }
        Some((slot, shared.tokens))
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
        let tokens = length(self.cache.len(cached));
        self.model.open(free, &purpose);
        self.model.fork(cached, free, tokens);
        self.model.release(cached);
        self.cache.swap_slots(cached, free);
    }

    /// Marks the prefixes of a cache key as recently used.
    pub(super) fn warm(&mut self, scope: u64, key: u64) {
        self.cache.warm(scope, key);
    }

    /// Records tokens that the model has computed in a slot.
    pub(super) fn append(&mut self, slot: SlotId, tokens: &[Token]) {
        self.cache.append(slot, tokens);
    }

    /// Truncates a slot. Returns false, with nothing changed, if the model cannot resume from there.
    #[must_use]
    pub(super) fn truncate(&mut self, slot: SlotId, tokens: usize) -> bool {
        // The caller preempts the sequence instead, which computes it anew from an empty slot.
        if !self.truncates || !self.model.can_resume(slot, length(tokens)) {
            return false;
        }
        self.cache.truncate(slot, tokens);
        self.model.truncate(slot, length(tokens));
        true
    }

    /// Frees a slot and its cells.
    pub(super) fn release(&mut self, slot: SlotId) {
        self.cache.release(slot);
        self.model.release(slot);
    }

    /// Keeps the tokens of an ended sequence in its slot as a cached prefix, if later prompts could use them.
    pub(super) fn retain(&mut self, slot: SlotId, prompt_tokens: usize, cache_key: Option<u64>) {
        // `find` never returns so short a prefix, so keeping it would only occupy a slot.
        if self.cache.len(slot) < self.prefix_min.max(1) {
            return self.release(slot);
        }
        let model = &*self.model;
        let resumes = |slot, tokens| can_resume(model, slot, tokens);
        // The cache chooses among equal and contained prefixes; what it drops is released in the model too, or the two
        // would disagree.
        for slot in self.cache.retain(slot, prompt_tokens, cache_key, resumes) {
            self.model.release(slot);
        }
    }

    /// Evicts cached prefixes until `cells` KV cells are free.
    pub(super) fn evict_for(&mut self, cells: usize) {
        for slot in self.cache.evict_for(cells) {
            self.model.release(slot);
        }
    }

    /// Evicts every cached prefix; returns whether there was one.
    pub(super) fn evict_all(&mut self) -> bool {
        let mut evicted = false;
        while let Some(slot) = self.cache.evict(None) {
            self.model.release(slot);
            evicted = true;
        }
        evicted
    }

    /// Decodes a batch. A panic of the model is a failure of the batch.
    pub(super) fn decode(
        &mut self,
        batch: &[BatchEntry],
        now: Time,
        panics: &Counter,
    ) -> Result<(), DecodeStop> {
        let message = "the model failed in this step";
        let decoded = guarded(panics, message, || self.model.decode(batch, now));
        decoded.unwrap_or_else(|error| Err(DecodeStop::Failed(error)))
    }

    /// Returns the output row of an entry of the last batch. A panic of the model is a failure of that request.
    #[inline]
    pub(super) fn row(&mut self, index: usize, now: Time, panics: &Counter) -> OutputRow<'_> {
        let message = "the model failed on this request";
        let row = guarded(panics, message, || self.model.row(index, now));
        row.unwrap_or_else(OutputRow::Failed)
    }

    /// Returns whether the next token of a sequence is reported in one event with the token that follows it
    /// ([`Model::joins`]).
    pub(super) fn joins(&self, sequence: &RunningSequence) -> bool {
        let output = sequence.tokens.len() - sequence.prompt_tokens;
        let slot = sequence.slot;
        slot.is_some_and(|slot| self.model.joins(slot, output))
    }

    /// Releases every slot after a panic. Returns false if the model cannot: then it is lost.
    #[must_use]
    pub(super) fn reset(&mut self) -> bool {
        let capacity = self.model.capacity();
        // The cache may be inconsistent after a panic in the middle of a change, so every slot is released, those that
        // were free as well.
        self.cache = PrefixCache::new(capacity, self.truncates);
        (0..capacity.slots).all(|slot| fenced(|| self.model.release(slot)))
    }
}

fn can_resume(model: &dyn Model, slot: SlotId, tokens: usize) -> bool {
    u32::try_from(tokens).is_ok_and(|tokens| model.can_resume(slot, tokens))
}

/// A slot holds fewer tokens than the context, which is a u32.
fn length(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Calls the model. Its panic is counted and becomes an error.
fn guarded<R>(panics: &Counter, message: &str, call: impl FnOnce() -> R) -> Result<R, EngineError> {
    // The model is used again after a panic: the requests concerned fail and their slots are released, which `Model`
    // demands to work then. Nothing else of the owner is borrowed in the call.
    catch_unwind(AssertUnwindSafe(call)).map_err(|_panic| {
        panics.add(1);
        EngineError::internal(ErrorReason::MODEL_PANIC, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::{Config, Scripted};

    fn slots(truncates: bool) -> KvSlots {
        let script = Config {
            truncates,
            ..Config::default()
        };
        KvSlots::new(Box::new(Scripted::new(script).unwrap()), 4)
    }

    const PURPOSE: SlotPurpose<'static> = SlotPurpose {
        prompt: &[],
        seed: 0,
        choice: 0,
        max_tokens: None,
    };

    fn fill(slots: &mut KvSlots, slot: SlotId, tokens: &[Token]) {
        let batch: Vec<BatchEntry> = (0..)
            .zip(tokens)
            .map(|(position, &token)| BatchEntry {
                slot,
                position,
                token,
                row: false,
            })
            .collect();
        let decoded = slots.decode(&batch, Time::ZERO, &Counter::default());
        assert_eq!(decoded, Ok(()));
        slots.append(slot, tokens);
    }

    #[test]
    fn a_retained_prompt_is_shared_with_the_next_sequence_of_its_scope() {
        let mut slots = slots(true);
        let (first, shared) = slots.acquire(7, None, &PURPOSE).unwrap();
        assert_eq!(shared, 0);
        fill(&mut slots, first, &[1, 2, 3, 4, 5]);
        slots.retain(first, 5, None);
        assert!(
            slots.find(8, &[1, 2, 3, 4, 5, 6]).is_none(),
            "another scope"
        );
        let found = slots.find(7, &[1, 2, 3, 4, 9]);
        let (_, shared) = slots.acquire(7, found, &PURPOSE).unwrap();
        assert_eq!(shared, 4);
    }

    #[test]
    fn a_prefix_below_the_minimum_is_released_at_once() {
        let mut slots = slots(true);
        let (first, _) = slots.acquire(7, None, &PURPOSE).unwrap();
        fill(&mut slots, first, &[1, 2, 3]);
        slots.retain(first, 3, None);
        assert_eq!(slots.used(), 0);
        assert!(!slots.evict_all());
    }

    #[test]
    fn a_model_that_cannot_shorten_a_slot_is_not_asked_to() {
        for truncates in [true, false] {
            let mut slots = slots(truncates);
            let (first, _) = slots.acquire(0, None, &PURPOSE).unwrap();
            fill(&mut slots, first, &[1, 2, 3]);
            assert_eq!(slots.truncate(first, 2), truncates);
            assert_eq!(slots.used(), if truncates { 2 } else { 3 });
        }
    }

    #[test]
    fn eviction_frees_as_many_cells_as_a_batch_needs() {
        let mut slots = slots(true);
        let (first, _) = slots.acquire(0, None, &PURPOSE).unwrap();
        fill(&mut slots, first, &[1, 2, 3, 4, 5]);
        slots.retain(first, 5, None);
        let all = slots.room();
        slots.evict_for(all);
        assert_eq!((slots.used(), slots.room()), (0, all));
    }
}
