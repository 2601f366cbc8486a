//! [`KvSlots`]: the model's slots. Every change of a slot is made here, in the model and in the prefix cache together.
//!
//! Invariants, on which the batch depends:
//! - A slot that the prefix cache counts as taken or cached is open in the model and holds the same tokens there.
//! - A running sequence's slot holds exactly the first `computed` of its tokens.
//! - The model is never asked to truncate or fork to a length from which it cannot resume (D-48).
//!
//! A cached prefix that loses its cells is saved in memory ([`crate::prefix_store`]), and from there on a disk ([`disk`]):
//!
//! ```text
//!   running ── retain ──► cached in KV cells ── evict: save ──► saved in memory ── acquire: restore ──► running
//!      ▲                        │                                 │          ▲
//!      └──── acquire: fork ─────┘                                 └── disk ──┘
//! ```
//!
//! Where the model cannot shorten a slot as far as a prompt needs, the copy is rewound by a checkpoint
//! ([`super::checkpoints`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::checkpoints::{Checkpoint, Checkpoints, PromptSpan};
use super::fenced;
use super::sequence::RunningSequence;
use crate::adapters::{AdapterSet, DEFAULT_ADAPTERS, default_scales};
use crate::api::{EngineError, ModelInfo};
use crate::config::Config;
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow, SlotId, SlotPurpose};
use crate::prefix_cache::{EvictedPrefix, PrefixCache, PrefixMatch};
use crate::prefix_entry::EntryKind;
use crate::prefix_store::{PrefixStore, SavedId, SavedMatch, SavedPrefix};
use crate::stats::Counter;
use disk::SlotDisk;

pub(super) mod disk;

/// Shorter prefixes are not saved: to compute so few tokens takes one step, as it does to compute a single one.
const SAVED_TOKENS_MIN: usize = 32;

/// A saved prefix is restored if it gives so many tokens more than one in KV cells.
const RESTORED_TOKENS_MIN: usize = 32;

/// A saved prefix is restored if at least one in so many of its tokens are in common: all are copied, which is hundreds of times
/// faster than computing them, but streams wait meanwhile.
const RESTORED_SHARE: usize = 8;

/// No more is saved in a step that has saved so many bytes: streams wait meanwhile. The same for what forks copy and what is
/// restored.
const SAVED_BYTES_STEP: usize = 128 << 20;

/// A prefix that a sequence can begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FoundPrefix {
    /// In the KV cells of a slot.
    Slot(PrefixMatch),
    /// Saved in memory.
    Saved(SavedMatch),
}

/// The model, and what each of its slots holds.
pub(super) struct KvSlots {
    model: Box<dyn Model>,
    cache: PrefixCache,
    store: PrefixStore,
    checkpoints: Checkpoints,
    /// `None`: what the memory evicts is lost.
    disk: Option<SlotDisk>,
    /// The cells that cached prefixes may keep when another sequence gets a slot.
    idle_cells_max: usize,
    /// Whether a sequence got its slot since [`KvSlots::finish_admissions`].
    has_admitted: bool,
    /// Bytes that were saved in this step.
    saved_in_step: usize,
    /// Bytes that were copied for new sequences in this step: by forks, and from saved prefixes.
    copied_in_step: usize,
    /// Whether the model can shorten a slot.
    truncates: bool,
    /// Whether it can shorten a restored slot to any number of tokens.
    restores_in_part: bool,
    /// Shorter prefixes are neither looked up nor cached.
    prefix_min: usize,
    /// The scales of the adapters that the model applies by default.
    default_scales: Vec<f32>,
    /// The key of the adapters with which the model computes; `None` if that is not known.
    adapters: Option<u64>,
}

impl KvSlots {
    pub(super) fn new(model: Box<dyn Model>, config: &Config) -> Self {
        let truncates = model.info().truncates;
        let saved = config.prefix_ram_bytes.unwrap_or(usize::MAX);
        // A model that cannot save recommends 0, which stays 0.
        let saved = match model.saved_bytes_max() {
            0 => 0,
            recommended if saved == usize::MAX => recommended,
            _ => saved,
        };
        let terms = model.checkpoint_terms();
        // One half for each: a checkpoint is of use only beside a prefix that goes on from there.
        let (saved, checkpoints) = match terms {
            Some(_) => (saved - saved / 2, saved / 2),
            None => (saved, 0),
        };
        let checkpoints = Checkpoints::new(terms, checkpoints);
        let partial = model.restores_in_part() || checkpoints.is_on();
        Self {
            cache: PrefixCache::new(model.capacity(), truncates),
            store: PrefixStore::new(saved, partial),
            restores_in_part: model.restores_in_part(),
            checkpoints,
            disk: None,
            idle_cells_max: model.idle_cells_max(),
            has_admitted: false,
            saved_in_step: 0,
            copied_in_step: 0,
            truncates,
            prefix_min: config.prefix_tokens_min as usize,
            default_scales: default_scales(&model.info().adapters),
            adapters: Some(DEFAULT_ADAPTERS),
            model,
        }
    }

    pub(super) fn info(&self) -> ModelInfo {
        self.model.info()
    }

    /// Starts a step.
    pub(super) fn begin_step(&mut self) {
        self.saved_in_step = 0;
        self.copied_in_step = 0;
    }

    /// Returns whether a sequence that begins with this prefix may get its slot in this step, or others have copied so much that
    /// streams would wait for it too long.
    pub(super) fn may_copy(&self, prefix: Option<FoundPrefix>) -> bool {
        self.copied_in_step < SAVED_BYTES_STEP
            || match prefix {
                Some(FoundPrefix::Slot(shared)) => self.model.fork_bytes(shared.slot) == 0,
                Some(FoundPrefix::Saved(_)) => false,
                None => true,
            }
    }

    /// Returns the KV cells that are free or can be evicted.
    pub(super) fn room(&self) -> usize {
        self.cache.room()
    }

    /// Returns the KV cells that are free without evicting anything.
    pub(super) fn free_cells(&self) -> usize {
        self.cache.free_cells()
    }

    /// Returns the number of tokens that a slot holds.
    pub(super) fn len(&self, slot: SlotId) -> usize {
        self.cache.len(slot)
    }

    /// Returns the KV cells in use.
    pub(super) fn used(&self) -> usize {
        self.cache.used()
    }

    /// Finds the longest usable prefix of `tokens` in the same scope: running, cached or saved.
    pub(super) fn find(&self, scope: u64, tokens: &[Token]) -> Option<FoundPrefix> {
        let in_slot = self.find_in_cells(scope, tokens);
        let in_cells = in_slot.map_or(0, |found| found.tokens);
        // The last token is always computed, as in `PrefixCache::find`.
        let usable = tokens.split_last().map_or(tokens, |(_, rest)| rest);
        let saved = self.store.find(scope, usable);
        let saved = saved.map(|saved| self.rewound(scope, saved));
        let saved = saved.filter(|saved| {
            saved.tokens >= in_cells + RESTORED_TOKENS_MIN
                && saved.tokens >= self.prefix_min
                && saved.tokens >= saved.saved / RESTORED_SHARE
                // All of it comes back before it is truncated.
                && saved.saved <= self.cache.room()
        });
        match saved {
            Some(saved) => Some(FoundPrefix::Saved(saved)),
            None => in_slot.map(FoundPrefix::Slot),
        }
    }

    /// Shortens a saved prefix that cannot be restored in part to a length at which there is a checkpoint.
    fn rewound(&self, scope: u64, saved: SavedMatch) -> SavedMatch {
        if self.restores_in_part || saved.tokens == saved.saved {
            return saved;
        }
        let tokens = self.store.tokens(saved.id).unwrap_or_default();
        let tokens = self.checkpoints.reach(scope, tokens, saved.tokens);
        SavedMatch { tokens, ..saved }
    }

    /// Finds the longest usable running or cached prefix, which needs fewer cells than a saved one.
    pub(super) fn find_in_cells(&self, scope: u64, tokens: &[Token]) -> Option<PrefixMatch> {
        let resumes = |slot, tokens| can_resume(&*self.model, slot, tokens);
        let reach = |tokens: &[Token], common| self.checkpoints.reach(scope, tokens, common);
        let min = self.prefix_min;
        self.cache.find(scope, tokens, min, resumes, reach)
    }

    /// Returns whether there is a slot and `cells` KV cells for a sequence that begins with the given prefix.
    pub(super) fn fits(&self, cells: usize, prefix: Option<FoundPrefix>) -> bool {
        // Cached cells of the prefix that nothing pins count as room, but this sequence pins them.
        let shared = match prefix {
            Some(FoundPrefix::Slot(shared)) => {
                shared.tokens - self.cache.unpinned(shared.slot, shared.tokens)
            }
            Some(FoundPrefix::Saved(_)) | None => 0,
        };
        self.cache.room() + shared >= cells && self.cache.has_slot()
    }

    /// Opens a slot that begins with a prefix, and returns it with the number of tokens that it holds. The caller has
    /// checked [`KvSlots::fits`]; `None` if no slot is left nevertheless.
    pub(super) fn acquire(
        &mut self,
        scope: u64,
        prefix: Option<FoundPrefix>,
        purpose: &SlotPurpose<'_>,
    ) -> Option<(SlotId, usize)> {
        let wanted = match prefix {
            Some(FoundPrefix::Slot(shared)) => Some(shared),
            _ => None,
        };
        // Held: what is evicted below is saved, for which this one may go.
        let mut saved = match prefix {
            Some(FoundPrefix::Saved(found)) => self
                .store
                .get(found.id)
                .map(|prefix| (prefix, found.id, found.tokens)),
            _ => None,
        };
        if !self.cache.has_free_slot() {
            let spare = wanted.map(|shared| shared.slot);
            // Evicts another cached prefix before the one that this sequence needs, unless only one slot is left.
            if let Some(evicted) = self.cache.evict(spare) {
                self.save(evicted);
            } else if let Some(evicted) = self.cache.evict(None) {
                saved = self.save_wanted(evicted, wanted);
            }
        }
        // Before `acquire`, which takes the first free slot: that is then the one which the move has emptied. The
        // wanted prefix does not move, because `shared` names its slot.
        let spare = wanted.map(|shared| shared.slot);
        if let Some((cached, free)) = self.cache.misplaced_prefix(spare) {
            self.move_cached(cached, free);
        }
        let slot = self.cache.acquire(scope)?;
        // `fork` and `restore` expect an open, empty slot.
        self.model.open(slot, purpose);
        let computed = match (saved, wanted) {
            (Some(saved), _) => self.restore(saved, slot, purpose),
            (None, Some(shared)) => self.share(shared, slot, purpose),
            (None, None) => 0,
        };
        // After the prefix is shared: its cells are then in use, and are not evicted. Later if possible: what is evicted is
        // copied, and this sequence would wait for it with its first token.
        if self.has_admitted {
            self.evict_idle();
        }
        self.has_admitted = true;
        Some((slot, computed))
    }

    /// Saves the only prefix that could be evicted. If that is the wanted one, it is restored into its own slot, which the
    /// model opens for another request; returns it with the number of common tokens.
    fn save_wanted(
        &mut self,
        evicted: EvictedPrefix,
        wanted: Option<PrefixMatch>,
    ) -> Option<(Arc<SavedPrefix>, SavedId, usize)> {
        let wanted = wanted.filter(|shared| shared.slot == evicted.slot);
        let (scope, tokens) = (evicted.scope, evicted.tokens.clone());
        self.save(EvictedPrefix {
            superseded: evicted.superseded && wanted.is_none(),
            ..evicted
        });
        let common = wanted?.tokens;
        let found = self.store.find(scope, &tokens)?;
        let usable = found.tokens >= common;
        let prefix = self.store.get(found.id).filter(|_| usable)?;
        Some((prefix, found.id, common))
    }

    /// Shares the cells of a prefix with an empty slot; returns the number of tokens.
    fn share(&mut self, shared: PrefixMatch, slot: SlotId, purpose: &SlotPurpose<'_>) -> usize {
        // An eviction may have taken the shared prefix, and its slot may be the one that was opened.
        if !self.cache.holds(shared.slot, shared.tokens) || shared.slot == slot {
            return 0;
        }
        let released = shared.cached && shared.whole;
        if released && self.checkpoints.are_needed(tokens_max(purpose)) {
            // The new slot goes on from where this one ends.
            self.checkpoint(shared.slot);
        }
        // A copy rather than the cached slot itself: the model has opened the new slot for this request's purpose, and
        // the cached tokens may go on beyond the shared ones.
        let copied = match shared.rewinds {
            true => self.fork_rewound(shared, slot),
            false => self.fork(shared.slot, slot, shared.tokens),
        };
        self.copied_in_step += self.model.fork_bytes(shared.slot);
        if !copied {
            self.reopen(slot, purpose);
            return 0;
        }
        self.cache.fork(shared.slot, slot, shared.tokens);
        if released {
            // A prompt with this prefix can use the new slot instead.
            self.cache.discard(shared.slot);
            self.model.release(shared.slot);
        }
        shared.tokens
    }

    /// Copies the first tokens of a slot in the model. Returns false if the copy cannot be used.
    fn fork(&mut self, from: SlotId, to: SlotId, tokens: usize) -> bool {
        self.model.fork(from, to, length(tokens));
        self.model.finish_fork(to, length(tokens))
    }

    /// Copies a slot and rewinds the copy to the shared tokens. Returns false if the copy cannot be used.
    fn fork_rewound(&mut self, shared: PrefixMatch, slot: SlotId) -> bool {
        let (scope, tokens) = self.cache.contents(shared.slot);
        let held = length(tokens.len());
        let Some(checkpoint) = self.checkpoints.get(scope, tokens, shared.tokens) else {
            return false;
        };
        self.model.fork(shared.slot, slot, held);
        self.rewind(slot, &checkpoint, shared.tokens)
    }

    /// Rewinds a slot to a checkpoint, and then to `tokens` tokens, in the model alone.
    fn rewind(&mut self, slot: SlotId, checkpoint: &Checkpoint, tokens: usize) -> bool {
        let (at, tokens) = (length(checkpoint.tokens), length(tokens));
        let rewound = self.model.rewind(slot, &checkpoint.prefix.state, at)
            && (at == tokens || self.model.can_resume(slot, tokens));
        if !rewound {
            // It may lack what its slot had lost already when it was made. Prompts would choose it again and again.
            if let Some((scope, removed)) = self.checkpoints.remove(checkpoint) {
                self.forget_on_disk(EntryKind::Checkpoint, scope, &removed.tokens);
            }
            return false;
        }
        if at > tokens {
            self.model.truncate(slot, tokens);
        }
        true
    }

    /// Empties a slot whose contents cannot be used.
    fn reopen(&mut self, slot: SlotId, purpose: &SlotPurpose<'_>) {
        self.cache.truncate(slot, 0);
        self.model.release(slot);
        self.model.open(slot, purpose);
    }

    /// Fills an empty slot from memory and truncates it to the common tokens; returns their number.
    fn restore(
        &mut self,
        (saved, id, common): (Arc<SavedPrefix>, SavedId, usize),
        slot: SlotId,
        purpose: &SlotPurpose<'_>,
    ) -> usize {
        let tokens = &saved.tokens;
        self.evict_for(tokens.len());
        // A longer prefix than was evicted may cover it.
        if !self.cache.has_free_cells(tokens.len()) {
            return 0;
        }
        self.copied_in_step += saved.state.len();
        if !self.model.restore(slot, &saved.state, length(tokens.len())) {
            // There are cells, so it would fail again, and meanwhile it would take the place of one that can be restored.
            if let Some((scope, removed)) = self.store.remove(id) {
                self.forget_on_disk(EntryKind::Prefix, scope, &removed.tokens);
            }
            return 0;
        }
        self.cache.append(slot, tokens);
        if common < tokens.len() && !self.truncate(slot, common) && !self.go_back(slot, common) {
            // Nothing of it can be used, so the slot begins anew.
            self.reopen(slot, purpose);
            return 0;
        }
        if common == tokens.len() && self.checkpoints.are_needed(tokens_max(purpose)) {
            // A longer prefix replaces the saved one when this slot is saved again.
            self.checkpoint(slot);
        }
        common
    }

    /// Shortens a live slot by a checkpoint. If it returns false, the slot can only be emptied.
    fn go_back(&mut self, slot: SlotId, tokens: usize) -> bool {
        let (scope, held) = self.cache.contents(slot);
        let Some(checkpoint) = self.checkpoints.get(scope, held, tokens) else {
            return false;
        };
        let rewound = self.rewind(slot, &checkpoint, tokens);
        if rewound {
            self.cache.truncate(slot, tokens);
        }
        rewound
    }

    /// Does what admissions have left for the time when no prompt waits: evicts what every decoded token would scan, and saves the
    /// prefix that would lose its slot next, so that whoever takes it does not wait for that.
    pub(super) fn finish_admissions(&mut self) {
        if !std::mem::take(&mut self.has_admitted) {
            return;
        }
        self.evict_idle();
        if !self.cache.has_free_slot()
            && let Some(slot) = self.cache.next_lost()
        {
            let (scope, tokens) = self.cache.contents(slot);
            let tokens = tokens.to_vec();
            self.save_state(slot, scope, &tokens);
        }
    }

    /// Evicts cached prefixes from cells that every decoded token would scan.
    fn evict_idle(&mut self) {
        while self.cache.idle_cells() > self.idle_cells_max
            && let Some(evicted) = self.cache.evict_idle()
        {
            self.save(evicted);
        }
    }

    /// Returns whether a prefix of so many tokens would be saved.
    pub(super) fn saves(&self, tokens: usize) -> bool {
        tokens >= SAVED_TOKENS_MIN && !self.store.is_off()
    }

    /// Returns whether checkpoints are made.
    pub(super) fn makes_checkpoints(&self) -> bool {
        self.checkpoints.is_on()
    }

    /// Returns the next length at which the prefill of a prompt stops, so that a checkpoint is made there.
    pub(super) fn next_stop(&self, span: PromptSpan) -> Option<usize> {
        let stop = self.checkpoints.next_stop(span);
        stop.filter(|&stop| self.saves(stop))
    }

    /// Saves what a slot loses as it goes on, so that a copy of it can return to this length.
    pub(super) fn checkpoint(&mut self, slot: SlotId) {
        let (scope, tokens) = self.cache.contents(slot);
        if !self.saves(tokens.len()) || self.saved_in_step >= SAVED_BYTES_STEP {
            return;
        }
        let tokens = tokens.to_vec();
        // Asked before it is copied, as in `save_state`.
        let bytes = self.model.checkpoint_size(slot);
        if self.checkpoints.make_room(scope, &tokens, bytes)
            && let Some(state) = self.model.checkpoint(slot)
        {
            self.saved_in_step += state.len();
            self.checkpoints.insert(scope, &tokens, state);
        }
        self.offer_evicted();
    }

    /// Frees an evicted slot in the model, after its state was saved if that is worth it.
    fn save(&mut self, evicted: EvictedPrefix) {
        // Of many answers to one prompt, one is enough: each would be a copy of the prompt.
        if !evicted.superseded {
            self.save_state(evicted.slot, evicted.scope, &evicted.tokens);
        }
        self.model.release(evicted.slot);
    }

    /// Saves the state of a slot that holds these tokens, if that is worth it.
    fn save_state(&mut self, slot: SlotId, scope: u64, tokens: &[Token]) {
        if !self.saves(tokens.len()) || self.saved_in_step >= SAVED_BYTES_STEP {
            return;
        }
        if self.store.covers(scope, tokens) {
            return;
        }
        // Asked before it is copied: it may be larger than all that is saved.
        let size = self.model.saved_size(slot);
        if size == 0 || !self.store.make_room(scope, tokens.len(), size) {
            return;
        }
        // Freed before as much is allocated.
        self.offer_evicted();
        if let Some(state) = self.model.save(slot) {
            self.saved_in_step += state.len();
            self.store.insert(scope, tokens, state);
        }
        self.offer_evicted();
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
        let tokens = self.cache.len(cached);
        self.model.open(free, &purpose);
        if self.fork(cached, free, tokens) {
            self.model.release(cached);
            self.cache.swap_slots(cached, free);
        } else {
            self.model.release(free);
        }
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
        // One slot may free fewer cells than it holds: those that it shares with others stay in use.
        while !self.cache.has_free_cells(cells)
            && let Some(evicted) = self.cache.evict(None)
        {
            self.save(evicted);
        }
    }

    /// Evicts every cached prefix; returns whether there was one.
    pub(super) fn evict_all(&mut self) -> bool {
        let mut any = false;
        while let Some(evicted) = self.cache.evict(None) {
            self.save(evicted);
            any = true;
        }
        any
    }

    /// Drops the saved prefixes, after as many as it takes at once were offered to the disk; those in KV cells stay.
    pub(super) fn move_saved(&mut self) {
        self.offer_all();
        self.stop_reading_ahead();
        self.drop_saved();
    }

    fn drop_saved(&mut self) {
        self.store = self.store.emptied();
        self.checkpoints.clear();
    }

    /// Returns the bytes of saved prefixes and checkpoints in memory, those included that are about to be
    /// written, or are read.
    pub(super) fn saved_bytes(&self) -> usize {
        let queued = self
            .disk
            .as_ref()
            .map_or(0, |disk| disk.tier.queued_bytes());
        self.store.bytes() + self.checkpoints.bytes() + queued
    }

    /// Returns how much of the last decode call was waiting for other models.
    pub(super) fn waited(&self) -> Duration {
        self.model.waited()
    }

    /// Decodes a batch with these adapters; `None`: those that the model applies by default. A panic of the model is a
    /// failure of the batch.
    pub(super) fn decode(
        &mut self,
        batch: &[BatchEntry],
        adapters: Option<&AdapterSet>,
        now: Time,
        panics: &Counter,
    ) -> Result<(), DecodeStop> {
        let message = "the model failed in this step";
        let key = adapters.map_or(DEFAULT_ADAPTERS, AdapterSet::key);
        // Not known until a call has computed: llama.cpp may fail where it lays out the graph for them.
        let before = self.adapters.take();
        let decoded = guarded(panics, message, || {
            if before != Some(key) {
                let scales = adapters.map_or(&*self.default_scales, AdapterSet::scales);
                self.model.set_adapters(scales);
            }
            self.model.decode(batch, now)
        });
        if matches!(decoded, Ok(Ok(()))) {
            self.adapters = Some(key);
        }
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
        self.drop_saved();
        (0..capacity.slots).all(|slot| fenced(|| self.model.release(slot)))
    }
}

/// Returns how many tokens a sequence can have at most, as far as its request says.
fn tokens_max(purpose: &SlotPurpose<'_>) -> usize {
    let output = purpose.max_tokens.map_or(usize::MAX, |max| max as usize);
    purpose.prompt.len().saturating_add(output)
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
mod tests;
