//! The end of a tier: what is in memory is written, as far as there is time.

use std::time::{Duration, Instant, SystemTime};

use super::{DiskTerms, DiskTier, SavedEntry};
use crate::prefix_entry::EntryKind;
use crate::prefix_store::{PrefixStore, ScopedPrefix, bytes_of};
use crate::stats::EngineStats;

/// How much older the file of an entry is than that of the next more valuable one.
const RANK_STEP: Duration = Duration::from_millis(1);

impl DiskTier {
    /// Writes what is in memory, as far as there is room, the most valuable first, and ends. Waits for the disk, for so long at
    /// most. Returns the number of entries that are on the disk then and were not before.
    pub(crate) fn finish(
        mut self,
        memory: [&PrefixStore; 2],
        time: Duration,
        stats: &EngineStats,
    ) -> usize {
        let until = Instant::now() + time;
        self.ahead.clear();
        while self.is_opening() && self.wait(until, stats) {}
        let first = self.next_file;
        // The order in which they are of use is kept by the files' times, whenever each is written.
        let mut used = SystemTime::now();
        for entry in by_rank(&self.terms, memory) {
            let bytes = entry.prefix.state.len();
            while self.is_busy(bytes) && self.wait(until, stats) {}
            if self.is_busy(bytes) {
                break;
            }
            self.write_last(entry, used);
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

    /// Writes an entry, or marks the one that serves the same prompts.
    fn write_last(&mut self, entry: SavedEntry, used: SystemTime) {
        let (kind, scope) = (entry.kind, entry.scope);
        let tokens = entry.prefix.tokens.clone();
        self.offer(entry);
        if let Some(file) = self.index.file_for(kind, scope, &tokens)
            && self.writes.has_order()
        {
            self.order(None, Some((file, used)));
        }
    }
}

/// Returns the entries of the memory that the limits have room for, the most valuable first: a checkpoint is of use with its
/// prefix alone, so they take turns.
fn by_rank(terms: &DiskTerms, memory: [&PrefixStore; 2]) -> Vec<SavedEntry> {
    let mut ranked = Vec::new();
    for (kind, store) in EntryKind::ALL.into_iter().zip(memory) {
        let fitting = fitting(terms, kind, store).into_iter();
        let entry = |(scope, prefix)| SavedEntry {
            kind,
            scope,
            prefix,
        };
        ranked.extend(fitting.map(entry).zip(0_usize..));
    }
    // Stable: of one rank, the prefix comes first.
    ranked.sort_by_key(|(_, rank)| *rank);
    ranked.into_iter().map(|(entry, _)| entry).collect()
}

/// Returns the most valuable entries of a store that the limit has room for, the most valuable first.
fn fitting(terms: &DiskTerms, kind: EntryKind, store: &PrefixStore) -> Vec<ScopedPrefix> {
    let mut left = terms.limits()[kind as usize];
    let mut fitting = Vec::new();
    for (scope, prefix) in store.by_value().rev() {
        let state = terms.state_of(0, &prefix.tokens, prefix.state.len());
        let Some(rest) = left.checked_sub(bytes_of(prefix.tokens.len(), state.charge)) else {
            break;
        };
        left = rest;
        fitting.push((scope, prefix));
    }
    fitting
}
