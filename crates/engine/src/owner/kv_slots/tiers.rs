//! [`SavedTiers`]: what is saved of slots that lose their cells, in memory ([`crate::prefix_store`]) and behind that on a disk
//! ([`super::disk`]).
//!
//! What the memory evicts is offered to the disk, and what a prompt begins with is read back to the memory before the prompt gets
//! its slot. The model is not called here.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::disk::{DiskGain, DiskRead, SlotDisk};
use crate::config::{Config, PrefixDiskConfig};
use crate::model::{Model, RowFinder, StateRows};
use crate::owner::checkpoints::{Checkpoint, Checkpoints, PromptSpan};
use crate::prefix_disk::{DiskMove, DiskWait, SavedEntry};
use crate::prefix_entry::EntryKind;
use crate::prefix_store::{PrefixStore, SavedId, SavedMatch, SavedPrefix, ScopedPrefix};
use crate::saved_state::{BLOCK_TOKENS, SavedState};
use crate::stats::EngineStats;

/// Shorter prefixes are not saved: to compute so few tokens takes one step, as it does to compute a single one.
const SAVED_TOKENS_MIN: usize = 32;

/// A saved prefix is restored if at least one in so many of its tokens are in common: all are copied, which is hundreds of times
/// faster than computing them, but streams wait meanwhile.
pub(super) const RESTORED_SHARE: usize = 8;

/// A state is cut if it takes at most one in so many bytes of the limit: while it is, there are two of it.
const CUT_SHARE: usize = 8;

/// How long the end of an engine may wait for the disk. `docker stop` kills the process after 10 s.
const END_MAX: Duration = Duration::from_secs(8);

/// Saved prefixes and checkpoints.
#[derive(Debug)]
pub(in crate::owner) struct SavedTiers {
    pub(super) store: PrefixStore,
    pub(super) checkpoints: Checkpoints,
    /// `None`: what the memory evicts is lost.
    pub(super) disk: Option<SlotDisk>,
    /// What leaves the memory for another model.
    moving: Option<DiskMove>,
    /// Whether the model can shorten a restored slot to any number of tokens.
    pub(super) restores_in_part: bool,
    /// Finds what saved prefixes may have in common.
    row_finder: Option<RowFinder>,
}

impl SavedTiers {
    pub(super) fn new(model: &dyn Model, config: &Config) -> Self {
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
        let restores_in_part = model.restores_in_part();
        Self {
            store: PrefixStore::new(saved, restores_in_part || checkpoints.is_on()),
            checkpoints,
            disk: None,
            moving: None,
            restores_in_part,
            row_finder: model.row_finder(),
        }
    }

    /// Returns whether a prefix of so many tokens would be saved.
    pub(super) fn saves(&self, tokens: usize) -> bool {
        tokens >= SAVED_TOKENS_MIN && !self.store.is_off()
    }

    /// Returns whether checkpoints are made.
    pub(in crate::owner) fn makes_checkpoints(&self) -> bool {
        self.checkpoints.is_on()
    }

    /// Returns the next length at which the prefill of a prompt stops, so that a checkpoint is made there.
    pub(in crate::owner) fn next_stop(&self, span: PromptSpan) -> Option<usize> {
        let stop = self.checkpoints.next_stop(span);
        stop.filter(|&stop| self.saves(stop))
    }

    /// Returns the bytes of saved prefixes and checkpoints in memory, those included that are about to be
    /// written, or are read.
    pub(in crate::owner) fn bytes(&self) -> usize {
        let queued = self
            .disk
            .as_ref()
            .map_or(0, |disk| disk.tier.queued_bytes());
        self.store.bytes() + self.checkpoints.bytes() + queued
    }

    /// Finds the longest saved prefix of these tokens that can be restored and shortened to the common ones.
    pub(super) fn find(&self, scope: u64, tokens: &[Token]) -> Option<SavedMatch> {
        let saved = self.store.find(scope, tokens)?;
        if self.restores_in_part || saved.tokens == saved.saved {
            return Some(saved);
        }
        // Where there is a checkpoint.
        let tokens = self.store.tokens(saved.id).unwrap_or_default();
        let tokens = self.checkpoints.reach(scope, tokens, saved.tokens);
        Some(SavedMatch { tokens, ..saved })
    }

    /// Returns whether an entry serves all prompts that one of these tokens could serve, and marks it as used.
    pub(super) fn covers(&mut self, kind: EntryKind, scope: u64, tokens: &[Token]) -> bool {
        self.memory_mut(kind).covers(scope, tokens)
    }

    /// Evicts others for an entry of this size; returns false if it never fits.
    pub(super) fn make_room(
        &mut self,
        kind: EntryKind,
        scope: u64,
        tokens: &[Token],
        bytes: usize,
    ) -> bool {
        let has_room = self.memory_mut(kind).make_room(scope, tokens, bytes);
        // Freed before as much is allocated.
        self.offer_evicted();
        has_room
    }

    /// Saves the state of a slot that holds these tokens. Returns the bytes that were copied for that.
    pub(super) fn insert(
        &mut self,
        kind: EntryKind,
        scope: u64,
        tokens: &[Token],
        state: Vec<u8>,
    ) -> usize {
        let bytes = state.len();
        let prefix = SavedPrefix {
            tokens: tokens.into(),
            state: state.into(),
        };
        let copied = self.keep_one(SavedEntry {
            kind,
            scope,
            prefix: Arc::new(prefix),
        });
        self.offer_evicted();
        bytes + copied
    }

    /// Adds an entry to the memory, where it shares what it has in common with another one. Returns the bytes that were copied
    /// for that.
    fn keep_one(&mut self, entry: SavedEntry) -> usize {
        let SavedEntry {
            kind,
            scope,
            mut prefix,
        } = entry;
        let mut copied = 0;
        // A checkpoint has nothing of each token.
        if kind == EntryKind::Prefix
            && let Some(state) = self.shared(scope, &prefix, &mut copied)
        {
            let tokens = Arc::clone(&prefix.tokens);
            prefix = Arc::new(SavedPrefix { tokens, state });
        }
        self.memory_mut(kind).insert_shared(scope, prefix);
        copied
    }

    /// Returns the state of a prefix in blocks which it shares with the nearest saved one; `None` if it stays as it is.
    fn shared(
        &mut self,
        scope: u64,
        prefix: &SavedPrefix,
        copied: &mut usize,
    ) -> Option<SavedState> {
        let find = self.row_finder?;
        let most = self.store.limit() / CUT_SHARE;
        let uncut = |prefix: &SavedPrefix| prefix.state.as_uncut().map(<[u8]>::len);
        uncut(prefix).filter(|&bytes| bytes <= most)?;
        let near = self.store.nearest(scope, &prefix.tokens)?;
        let tokens = near.tokens;
        // It is not added if another has all of it.
        if tokens < BLOCK_TOKENS || tokens == prefix.tokens.len() {
            return None;
        }
        let (_, held) = self.store.entry(near.id)?;
        if let Some(bytes) = uncut(&held) {
            // One that the new entry replaces is not worth it.
            let stays = tokens < near.saved || !self.store.is_partial();
            if !stays || bytes > most {
                return None;
            }
            let state = cut(find, &held, None)?;
            *copied += bytes;
            self.store.replace_state(near.id, state);
        }
        let like = self.store.state(near.id)?;
        *copied += prefix.state.len();
        cut(find, prefix, Some((like, tokens)))
    }

    /// Removes a prefix that the model could not restore. It would take the place of one that can be restored.
    pub(super) fn forget_prefix(&mut self, id: SavedId) {
        let removed = self.store.remove(id);
        self.forget_on_disk(EntryKind::Prefix, removed);
    }

    /// Removes a checkpoint that does not serve. It may lack what its slot had lost already when it was made. Prompts would choose
    /// it again and again.
    pub(super) fn forget_checkpoint(&mut self, checkpoint: &Checkpoint) {
        let removed = self.checkpoints.remove(checkpoint);
        self.forget_on_disk(EntryKind::Checkpoint, removed);
    }

    fn forget_on_disk(&mut self, kind: EntryKind, removed: Option<ScopedPrefix>) {
        if let (Some(disk), Some((scope, prefix))) = (&mut self.disk, removed) {
            disk.tier.forget(kind, scope, &prefix.tokens);
        }
    }

    /// Drops what is in memory; with a disk, as it is written in the next steps, for so long as
    /// [`PrefixDiskConfig::MOVE_MAX`] says.
    pub(in crate::owner) fn move_to_disk(&mut self, now: Time) {
        let Some(disk) = &mut self.disk else {
            return self.clear();
        };
        let until = now + PrefixDiskConfig::MOVE_MAX;
        let memory = [&mut self.store, self.checkpoints.store_mut()];
        match &mut self.moving {
            // Whoever asked first gets the memory in time.
            Some(moving) => moving.begin_again(memory, &mut disk.tier, until),
            None => self.moving = Some(DiskMove::begin(memory, &mut disk.tier, until)),
        }
    }

    fn go_on_moving(&mut self, now: Time) {
        if let (Some(moving), Some(disk)) = (&mut self.moving, &mut self.disk) {
            let memory = [&mut self.store, self.checkpoints.store_mut()];
            if moving.advance(memory, &mut disk.tier, now) {
                self.moving = None;
            }
        }
    }

    /// Drops what is in memory.
    pub(super) fn clear(&mut self) {
        self.store = self.store.emptied();
        self.checkpoints.clear();
        self.moving = None;
    }

    /// Takes what was read since the last step, and hands to the disk what leaves the memory. `token_time`: what a prompt token
    /// takes.
    pub(in crate::owner) fn poll_disk(
        &mut self,
        stats: &EngineStats,
        token_time: Option<Duration>,
        now: Time,
    ) {
        if let Some(disk) = &mut self.disk {
            let arrived = disk.poll(stats, token_time, now);
            self.keep(arrived);
            self.go_on_moving(now);
        }
    }

    /// Adds entries of the disk to the memory.
    pub(super) fn keep(&mut self, arrived: Vec<SavedEntry>) {
        for entry in arrived {
            let _copied = self.keep_one(entry);
        }
        self.offer_evicted();
    }

    fn memory_mut(&mut self, kind: EntryKind) -> &mut PrefixStore {
        match kind {
            EntryKind::Prefix => &mut self.store,
            EntryKind::Checkpoint => self.checkpoints.store_mut(),
        }
    }

    /// Offers what was evicted from memory to the disk.
    fn offer_evicted(&mut self) {
        for kind in EntryKind::ALL {
            let evicted = self.memory_mut(kind).take_evicted();
            let evicted = evicted.into_iter().filter(|it| !it.superseded);
            self.offer(kind, evicted.map(|it| (it.scope, it.prefix)));
        }
    }

    fn offer(&mut self, kind: EntryKind, entries: impl IntoIterator<Item = ScopedPrefix>) {
        let Some(disk) = &mut self.disk else { return };
        for (scope, prefix) in entries {
            disk.tier.offer(SavedEntry {
                kind,
                scope,
                prefix,
            });
        }
    }

    /// Returns whether a sequence still waits for the disk.
    pub(in crate::owner) fn is_reading(&self, wait: DiskWait) -> bool {
        self.disk
            .as_ref()
            .is_some_and(|disk| disk.tier.is_pending(wait))
    }

    /// Returns when the next sequence stops to wait for the disk, or the memory does.
    pub(in crate::owner) fn disk_deadline(&mut self, now: Time) -> Option<Time> {
        let moved = self.moving.as_ref().map(DiskMove::until);
        let read = self.disk.as_mut()?.deadline(now);
        moved.into_iter().chain(read).min()
    }

    /// Has the disk read nothing before a prompt asks for it.
    #[cfg(all(test, feature = "embedded"))]
    pub(in crate::owner) fn read_nothing_ahead(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.tier.read_nothing_ahead();
        }
    }

    /// Waits until the disk has done all.
    #[cfg(test)]
    pub(in crate::owner) fn settle_disk(&mut self, stats: &EngineStats) {
        if let Some(disk) = &mut self.disk {
            disk.tier.settle(stats);
        }
    }

    /// Starts to read from the disk ([`SlotDisk::read`]).
    pub(super) fn read_from_disk(
        &mut self,
        gain: DiskGain,
        spared: usize,
        now: Time,
        limit: Option<Time>,
    ) -> Option<DiskRead> {
        let disk = self.disk.as_mut()?;
        let read = disk.read(gain, spared, now, limit);
        // What was not written yet is there at once.
        let arrived = disk.tier.take_arrived();
        self.keep(arrived);
        read
    }

    /// Writes what is in memory for the next engine of this model. Waits for the disk.
    pub(super) fn write_all(&self, disk: SlotDisk, stats: &EngineStats) {
        let memory = [&self.store, self.checkpoints.store()];
        // A move has written the most valuable ones already.
        let used = self
            .moving
            .as_ref()
            .map_or_else(SystemTime::now, DiskMove::used);
        let entries = disk.tier.finish(memory, used, END_MAX, stats);
        tracing::info!(entries, "cached prefixes were written to the disk");
    }
}

/// Returns a state in blocks, of which the first tokens may be those of another one.
fn cut(
    find: RowFinder,
    prefix: &SavedPrefix,
    like: Option<(&SavedState, usize)>,
) -> Option<SavedState> {
    let (state, tokens) = (prefix.state.as_uncut()?, prefix.tokens.len());
    let StateRows { state, areas } = find(state, tokens)?;
    SavedState::cut(&state, areas, tokens, like)
}
