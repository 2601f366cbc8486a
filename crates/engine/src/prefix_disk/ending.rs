//! The end of a tier: what is in memory is written, as far as there is time.

use std::time::{Duration, Instant, SystemTime};

use super::{DiskTerms, DiskTier, RANK_STEP, SavedEntry};
use crate::prefix_entry::EntryKind;
use crate::prefix_store::{PrefixStore, SavedId, bytes_of};
use crate::saved_state::SavedState;
use crate::stats::EngineStats;

impl DiskTier {
    /// Writes what is in memory, as far as there is room, the most valuable first, and ends. Waits for the disk, for so long at
    /// most. Returns the number of entries that are on the disk then and were not before. `used`: the time of the most valuable one.
    pub(crate) fn finish(
        mut self,
        memory: [&PrefixStore; 2],
        mut used: SystemTime,
        time: Duration,
        stats: &EngineStats,
    ) -> usize {
        let until = Instant::now() + time;
        self.ahead.clear();
        while self.is_opening() && self.wait(until, stats) {}
        let first = self.next_file;
        // The order in which they are of use is kept by the files' times, whenever each is written.
        for (kind, id) in self.ranked(memory) {
            let Some((scope, prefix)) = memory[kind as usize].entry(id) else {
                continue;
            };
            let bytes = prefix.state.len();
            while self.is_busy(bytes) && self.wait(until, stats) {}
            if self.is_busy(bytes) {
                break;
            }
            let entry = SavedEntry {
                kind,
                scope,
                prefix,
            };
            self.write(entry, Some(used));
            used = used.checked_sub(RANK_STEP).unwrap_or(used);
        }
        while !self.writes.is_done() && self.wait(until, stats) {}
        let unwritten = self.writes.entries();
        if unwritten > 0 {
            tracing::warn!(
                unwritten,
                ?time,
                "the disk is too slow: the other cached prefixes are lost"
            );
        }
        let ordered = usize::try_from(self.next_file - first).unwrap_or(usize::MAX);
        ordered.saturating_sub(unwritten)
    }

    /// Returns whether an entry of so many bytes would have to wait.
    fn is_busy(&self, bytes: usize) -> bool {
        !self.writes.is_done() && !self.writes.has_room(bytes)
    }

    /// Returns the entries of the memory that the limits have room for, the most valuable first: a checkpoint is of use with its
    /// prefix alone, so they take turns.
    pub(super) fn ranked(&self, memory: [&PrefixStore; 2]) -> Vec<(EntryKind, SavedId)> {
        let mut ranked = Vec::new();
        for (kind, store) in EntryKind::ALL.into_iter().zip(memory) {
            let fitting = fitting(&self.terms, kind, store).into_iter();
            ranked.extend(fitting.map(|id| (kind, id)).zip(0_usize..));
        }
        // Stable: of one rank, the prefix comes first.
        ranked.sort_by_key(|(_, rank)| *rank);
        ranked.into_iter().map(|(entry, _)| entry).collect()
    }
}

/// Returns the most valuable entries of a store that the limit has room for, the most valuable first.
fn fitting(terms: &DiskTerms, kind: EntryKind, store: &PrefixStore) -> Vec<SavedId> {
    let mut left = terms.limits()[kind as usize];
    let mut fitting = Vec::new();
    for id in store.ids_by_value().rev() {
        let tokens = store.tokens(id).unwrap_or_default();
        let state = store.state(id).map_or(0, SavedState::len);
        let charge = terms.state_of(0, tokens, state).charge;
        // One that is too large is no reason to leave out those behind it.
        let Some(rest) = left.checked_sub(bytes_of(tokens.len(), charge)) else {
            continue;
        };
        left = rest;
        fitting.push(id);
    }
    fitting
}
