//! [`KvSlots`]: the model's slots. Every change of a slot is made here, in the model and in the prefix cache together.
//!
//! Invariants, on which the batch depends:
//! - A slot that the prefix cache counts as taken or cached is open in the model and holds the same tokens there.
//! - A running sequence's slot holds exactly the first `computed` of its tokens.
//! - The model is never asked to truncate or fork to a length from which it cannot resume (D-48).
//!
//! A cached prefix that loses its cells is saved in memory, and from there on a disk ([`tiers`]):
//!
//! ```text
//!   running ── retain ──► cached in KV cells ── evict: save ──► saved in memory ── acquire: restore ──► running
//!      ▲                        │                                 │          ▲
//!      └──── acquire: fork ─────┘                                 └── disk ──┘
//! ```
//!
//! A new slot begins with one of these ([`start`]). Where the model cannot shorten a slot as far as a prompt needs, the copy is
//! rewound by a checkpoint ([`super::checkpoints`]).

use std::sync::Arc;

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::fenced;
use crate::config::{Config, PrefixDiskConfig};
use crate::model::{Model, SlotId, SlotPurpose};
use crate::outbox::OwnerWaker;
use crate::prefix_cache::cells::KvCells;
use crate::prefix_cache::{EvictedPrefix, PrefixCache, PrefixMatch};
use crate::prefix_disk::DiskTerms;
use crate::prefix_entry::EntryKind;
use crate::prefix_folder::{PrefixDisk, PrefixFolder};
use crate::prefix_store::SavedMatch;
use crate::stats::EngineStats;
use disk::{DiskGain, DiskRead, SlotDisk};
use disk_search::DiskSearch;
use slot_model::SlotModel;
use start::SlotStart;
use tiers::SavedTiers;

pub(super) mod disk;
mod disk_search;
mod slot_model;
mod start;
mod tiers;

/// A saved prefix is restored if it gives so many tokens more than one in KV cells.
const RESTORED_TOKENS_MIN: usize = 32;

/// No more is saved in a step that has saved so many bytes: streams wait meanwhile.
const SAVED_BYTES_STEP: usize = 128 << 20;

/// A sequence that needs a copy gets its slot in a later step than one in which so many bytes were copied, saved or restored: new
/// memory takes about a millisecond for each of them, and eight conversations that go on at once would add up to a tenth of a second.
const COPIED_BYTES_STEP: usize = 32 << 20;

/// A prefix that a sequence can begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FoundPrefix {
    /// In the KV cells of a slot.
    Slot(PrefixMatch),
    /// Saved in memory.
    Saved(SavedMatch),
}

impl FoundPrefix {
    pub(super) fn tokens(self) -> usize {
        match self {
            Self::Slot(found) => found.tokens,
            Self::Saved(found) => found.tokens,
        }
    }
}

/// Bytes that were copied in this step, for which streams have waited.
#[derive(Clone, Copy, Debug, Default)]
struct StepCopies {
    /// Of what was saved.
    saved: usize,
    /// For new sequences: by forks, and from saved prefixes.
    copied: usize,
}

/// The model, and what each of its slots holds.
pub(super) struct KvSlots {
    model: SlotModel,
    cache: PrefixCache,
    tiers: SavedTiers,
    copies: StepCopies,
    /// The cells that cached prefixes may keep when another sequence gets a slot.
    idle_cells_max: usize,
    /// Whether a sequence got its slot since [`KvSlots::finish_admissions`].
    has_admitted: bool,
    /// Shorter prefixes are neither looked up nor cached.
    prefix_min: usize,
}

impl KvSlots {
    pub(super) fn new(model: Box<dyn Model>, config: &Config) -> Self {
        let model = SlotModel::new(model);
        let facts = model.facts();
        Self {
            cache: PrefixCache::new(facts.capacity(), model.truncates()),
            tiers: SavedTiers::new(facts, config),
            copies: StepCopies::default(),
            idle_cells_max: facts.idle_cells_max(),
            has_admitted: false,
            prefix_min: config.prefix_tokens_min as usize,
            model,
        }
    }

    /// Returns the model, to compute with it.
    #[inline]
    pub(super) fn model(&mut self) -> &mut SlotModel {
        &mut self.model
    }

    /// Returns what is saved of slots.
    pub(super) fn tiers(&self) -> &SavedTiers {
        &self.tiers
    }

    pub(super) fn tiers_mut(&mut self) -> &mut SavedTiers {
        &mut self.tiers
    }

    /// Returns the KV cells.
    pub(super) fn cells(&self) -> &KvCells {
        self.cache.cells()
    }

    /// Starts a step.
    pub(super) fn begin_step(&mut self) {
        self.copies = StepCopies::default();
    }

    /// Returns whether a sequence that begins with this prefix may get its slot in this step, or others have copied so much that
    /// streams would wait for it too long.
    pub(super) fn may_copy(&self, prefix: Option<FoundPrefix>) -> bool {
        self.copies.copied + self.copies.saved < COPIED_BYTES_STEP
            || match prefix {
                Some(FoundPrefix::Slot(shared)) => self.model.facts().fork_bytes(shared.slot) == 0,
                Some(FoundPrefix::Saved(_)) => false,
                // Otherwise what a slot holds is saved or moved for it.
                None => self.cache.has_free_slot() && self.cache.misplaced_prefix(None).is_none(),
            }
    }

    /// Returns the number of tokens that a slot holds.
    pub(super) fn len(&self, slot: SlotId) -> usize {
        self.cache.len(slot)
    }

    /// Finds the longest usable prefix of `tokens` in the same scope: running, cached or saved.
    pub(super) fn find(&self, scope: u64, tokens: &[Token]) -> Option<FoundPrefix> {
        let in_slot = self.find_in_cells(scope, tokens);
        let in_cells = in_slot.map_or(0, |found| found.tokens);
        // The last token is always computed, as in `PrefixCache::find`.
        let usable = tokens.split_last().map_or(tokens, |(_, rest)| rest);
        let saved = self.tiers.find(scope, usable);
        let saved = saved.filter(|saved| {
            saved.tokens >= in_cells + RESTORED_TOKENS_MIN
                && saved.tokens >= self.prefix_min
                && saved.tokens >= saved.saved / tiers::RESTORED_SHARE
                // All of it comes back before it is truncated.
                && saved.saved <= self.cells().room()
        });
        match saved {
            Some(saved) => Some(FoundPrefix::Saved(saved)),
            None => in_slot.map(FoundPrefix::Slot),
        }
    }

    /// Finds the longest usable running or cached prefix, which needs fewer cells than a saved one.
    pub(super) fn find_in_cells(&self, scope: u64, tokens: &[Token]) -> Option<PrefixMatch> {
        let resumes = |slot, tokens| self.model.can_resume(slot, tokens);
        let reach = |tokens: &[Token], common| self.tiers.checkpoints.reach(scope, tokens, common);
        let min = self.prefix_min;
        self.cache.find(scope, tokens, min, resumes, reach)
    }

    /// Returns how many of a prompt's tokens one of the same scope begins with, in a slot or saved in memory, whether or not a
    /// sequence can begin there; 0 if so few are of no use.
    pub(super) fn common_tokens(&self, scope: u64, prompt: &[Token]) -> usize {
        let saved = self.tiers.store.common_tokens(scope, prompt);
        let common = self.cache.common_tokens(scope, prompt).max(saved);
        if common < self.prefix_min { 0 } else { common }
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
        self.cells().room() + shared >= cells && self.cache.has_slot()
    }

    /// Opens a slot that begins with a prefix, and returns it with the number of tokens that it holds. The caller has
    /// checked [`KvSlots::fits`]; `None` if no slot is left nevertheless.
    pub(super) fn acquire(
        &mut self,
        scope: u64,
        prefix: Option<FoundPrefix>,
        purpose: &SlotPurpose<'_>,
    ) -> Option<(SlotId, usize)> {
        let start = SlotStart {
            slots: &mut *self,
            scope,
            purpose,
        };
        let started = start.run(prefix)?;
        // After the prefix is shared: its cells are then in use, and are not evicted. Later if possible: what is evicted is
        // copied, and this sequence would wait for it with its first token.
        if self.has_admitted {
            self.evict_idle();
        }
        self.has_admitted = true;
        Some(started)
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
            self.save_as(EntryKind::Prefix, slot, scope, &tokens);
        }
    }

    /// Evicts cached prefixes from cells that every decoded token would scan.
    fn evict_idle(&mut self) {
        while self.cells().idle() > self.idle_cells_max
            && let Some(evicted) = self.cache.evict_idle()
        {
            self.save(evicted);
        }
    }

    /// Saves what a slot loses as it goes on, so that a copy of it can return to this length.
    pub(super) fn checkpoint(&mut self, slot: SlotId) {
        let (scope, tokens) = self.cache.contents(slot);
        let tokens = tokens.to_vec();
        self.save_as(EntryKind::Checkpoint, slot, scope, &tokens);
    }

    /// Frees an evicted slot in the model, after its state was saved if that is worth it.
    fn save(&mut self, evicted: EvictedPrefix) {
        // Of many answers to one prompt, one is enough: each would be a copy of the prompt.
        if !evicted.superseded {
            self.save_as(
                EntryKind::Prefix,
                evicted.slot,
                evicted.scope,
                &evicted.tokens,
            );
        }
        self.model.calls().release(evicted.slot);
    }

    /// Saves a slot that holds these tokens, as a whole or as a checkpoint, if that is worth it.
    fn save_as(&mut self, kind: EntryKind, slot: SlotId, scope: u64, tokens: &[Token]) {
        let saves = self.tiers.saves(tokens.len()) && self.copies.saved < SAVED_BYTES_STEP;
        if !saves || self.tiers.covers(kind, scope, tokens) {
            return;
        }
        let model = self.model.calls();
        // Asked before it is copied: it may be larger than all that is saved.
        let bytes = match kind {
            EntryKind::Prefix => model.saved_size(slot),
            EntryKind::Checkpoint => model.checkpoint_size(slot),
        };
        if bytes == 0 || !self.tiers.make_room(kind, scope, tokens, bytes) {
            return;
        }
        let state = match kind {
            EntryKind::Prefix => model.save(slot),
            EntryKind::Checkpoint => model.checkpoint(slot),
        };
        if let Some(state) = state {
            self.copies.saved += self.tiers.insert(kind, scope, tokens, state);
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
        if !self.model.truncate(slot, tokens) {
            return false;
        }
        self.cache.truncate(slot, tokens);
        true
    }

    /// Frees a slot and its cells.
    pub(super) fn release(&mut self, slot: SlotId) {
        self.cache.release(slot);
        self.model.calls().release(slot);
    }

    /// Keeps the tokens of an ended sequence in its slot as a cached prefix, if later prompts could use them.
    pub(super) fn retain(&mut self, slot: SlotId, prompt_tokens: usize, cache_key: Option<u64>) {
        // `find` never returns so short a prefix, so keeping it would only occupy a slot.
        if self.cache.len(slot) < self.prefix_min.max(1) {
            return self.release(slot);
        }
        let model = &self.model;
        let resumes = |slot, tokens| model.can_resume(slot, tokens);
        // The cache chooses among equal and contained prefixes; what it drops is released in the model too, or the two
        // would disagree.
        for slot in self.cache.retain(slot, prompt_tokens, cache_key, resumes) {
            self.model.calls().release(slot);
        }
    }

    /// Evicts cached prefixes until `cells` KV cells are free.
    pub(super) fn evict_for(&mut self, cells: usize) {
        // One slot may free fewer cells than it holds: those that it shares with others stay in use.
        while self.cells().free() < cells
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

    /// Drops every cached prefix of a slot without saving it, as what it holds is undefined.
    pub(super) fn discard_cached(&mut self) {
        while let Some(evicted) = self.cache.evict(None) {
            self.model.calls().release(evicted.slot);
        }
    }

    /// Releases every slot after a panic. Returns false if the model cannot: then it is lost.
    #[must_use]
    pub(super) fn reset(&mut self) -> bool {
        let capacity = self.model.facts().capacity();
        // The cache may be inconsistent after a panic in the middle of a change, so every slot is released, those that
        // were free as well.
        self.cache = PrefixCache::new(capacity, self.model.truncates());
        self.tiers.clear();
        (0..capacity.slots).all(|slot| fenced(|| self.model.calls().release(slot)))
    }

    /// Starts to look for what an earlier engine of this model has saved. Without an identity of the model, or if nothing is
    /// saved in memory, there is no disk.
    pub(super) fn open_disk(&mut self, config: &PrefixDiskConfig, waker: Arc<OwnerWaker>) {
        let folder = PrefixFolder::new(config.folder.clone());
        self.start_disk(Arc::new(folder), config.bytes, waker);
    }

    pub(super) fn start_disk(
        &mut self,
        disk: Arc<dyn PrefixDisk>,
        bytes: u64,
        waker: Arc<OwnerWaker>,
    ) {
        let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        if self.tiers.store.is_off() || limit == 0 {
            return;
        }
        let Some(identity) = self.model.facts().saved_identity() else {
            return;
        };
        let terms = DiskTerms {
            identity,
            limit,
            partial: self.tiers.store.is_partial(),
            checkpoints: self.tiers.checkpoints.is_on(),
            tokens_max: self.model.info().context_tokens as usize,
            state_max: self.tiers.store.limit(),
        };
        match SlotDisk::start(disk, terms, waker) {
            Ok(disk) => self.tiers.disk = Some(disk),
            Err(error) => tracing::warn!(%error, "cached prefixes are not kept on the disk"),
        }
    }

    /// Starts to read what a prompt begins with, if that is quicker than computing it and not in memory. Returns what to wait
    /// for; `None`: nothing. `limit`: until when it waits at most, if it has waited before.
    pub(super) fn read_from_disk(
        &mut self,
        scope: u64,
        tokens: &[Token],
        now: Time,
        limit: Option<Time>,
    ) -> Option<DiskRead> {
        let disk = self.tiers.disk.as_ref()?;
        if disk.opens_late(now) {
            return None;
        }
        let there = self.find(scope, tokens).map_or(0, FoundPrefix::tokens);
        let gain = match disk.tier.is_opening() {
            // As much as there could be.
            true => DiskGain {
                tokens: tokens.len().saturating_sub(1),
                ..DiskGain::default()
            },
            false => {
                let search = DiskSearch {
                    disk,
                    tiers: &self.tiers,
                    cache: &self.cache,
                    model: &self.model,
                    prefix_min: self.prefix_min,
                    scope,
                };
                search.gain(tokens)
            }
        };
        if gain.tokens < self.prefix_min.max(there + RESTORED_TOKENS_MIN) {
            return None;
        }
        self.tiers
            .read_from_disk(gain, gain.tokens - there, now, limit)
    }

    /// Saves all cached prefixes, and writes them and the checkpoints for the next engine of this model. Waits for the disk.
    pub(super) fn close_disk(&mut self, stats: &EngineStats) {
        let Some(disk) = self.tiers.disk.take() else {
            return;
        };
        while let Some(evicted) = self.cache.evict(None) {
            // No stream waits any more.
            self.copies.saved = 0;
            self.save(evicted);
        }
        self.tiers.write_all(disk, stats);
    }
}

#[cfg(test)]
mod tests;
