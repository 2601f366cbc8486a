//! [`DiskMove`]: memory is freed for another model, and what it held is written before.
//!
//! No more waits to be written than at other times, so that the memory becomes free little by little; until then an entry serves
//! prompts. What is on the disk already, and what it has no room for, is dropped at once, and the rest when the time is over or the
//! disk takes nothing more.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::SystemTime;

use super::{DiskPhase, DiskTier, RANK_STEP, SavedEntry};
use crate::prefix_entry::EntryKind;
use crate::prefix_store::{PrefixStore, SavedId};
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

/// What leaves the memory.
#[derive(Debug)]
pub(crate) struct DiskMove {
    /// What is still in memory, the most valuable last. Prompts may have evicted some of it.
    left: Vec<(EntryKind, SavedId)>,
    /// All that is on the disk in the end, the most valuable first.
    ranked: Vec<(EntryKind, u64, Arc<[Token]>)>,
    /// The time of the next file.
    used: SystemTime,
    until: Time,
}

impl DiskMove {
    /// Drops what need not be written. The rest stays until it is, or until this time.
    pub(crate) fn begin(memory: [&mut PrefixStore; 2], tier: &mut DiskTier, until: Time) -> Self {
        let mut moving = Self {
            left: Vec::new(),
            ranked: Vec::new(),
            used: SystemTime::now(),
            until,
        };
        moving.begin_again(memory, tier, until);
        moving
    }

    /// Adds what has come to the memory since it began, for which it takes no longer than until this time. What was moved first stays
    /// the most valuable.
    pub(crate) fn begin_again(
        &mut self,
        memory: [&mut PrefixStore; 2],
        tier: &mut DiskTier,
        until: Time,
    ) {
        self.until = self.until.min(until);
        self.left.clear();
        for (kind, id) in tier.ranked([&*memory[0], &*memory[1]]) {
            if let Some((scope, prefix)) = memory[kind as usize].entry(id) {
                let tokens = &prefix.tokens;
                self.ranked.push((kind, scope, Arc::clone(tokens)));
                if tier.index.file_for(kind, scope, tokens).is_none() {
                    self.left.push((kind, id));
                }
            }
        }
        let unwritten: HashSet<_> = self.left.iter().copied().collect();
        for (kind, store) in EntryKind::ALL.into_iter().zip(memory) {
            let ids: Vec<_> = store.ids_by_value().collect();
            for id in ids {
                if !unwritten.contains(&(kind, id)) {
                    store.remove(id);
                }
            }
        }
        self.left.reverse();
        // What is written next makes room on the disk, and must not take that of what is there and more valuable: it may have
        // been used in memory alone since it was read.
        tier.rank(&self.ranked);
    }

    /// Returns until when memory is kept.
    pub(crate) fn until(&self) -> Time {
        self.until
    }

    /// Returns the time of the file that is written next: those before it are more valuable.
    pub(crate) fn used(&self) -> SystemTime {
        self.used
    }

    /// Hands to the disk what it has room for. Returns whether nothing is left.
    pub(crate) fn advance(
        &mut self,
        memory: [&mut PrefixStore; 2],
        tier: &mut DiskTier,
        now: Time,
    ) -> bool {
        // The memory is needed otherwise, and the files may have been listed just now.
        tier.ahead.clear();
        let is_over = now >= self.until || tier.takes_nothing();
        let mut dropped = 0;
        while let Some(&(kind, id)) = self.left.last() {
            let store = &mut *memory[kind as usize];
            if let Some((scope, prefix)) = store.entry(id) {
                let has_room = tier.has_room(prefix.state.len());
                if !has_room && !is_over {
                    return false;
                }
                if has_room && !is_over {
                    let entry = SavedEntry {
                        kind,
                        scope,
                        prefix,
                    };
                    tier.write(entry, Some(self.used));
                    // The order in which they are of use is kept by the files' times.
                    self.used = self.used.checked_sub(RANK_STEP).unwrap_or(self.used);
                } else {
                    dropped += 1;
                }
                store.remove(id);
            }
            self.left.pop();
        }
        if dropped > 0 {
            tracing::info!(
                dropped,
                "cached prefixes were dropped for another model before they could be written"
            );
        }
        tier.rank(&self.ranked);
        true
    }
}

impl DiskTier {
    fn takes_nothing(&self) -> bool {
        matches!(self.phase, DiskPhase::ReadOnly | DiskPhase::Off)
    }

    /// Marks entries as used, the first one last: the one that was written last is not the most valuable.
    fn rank(&mut self, entries: &[(EntryKind, u64, Arc<[Token]>)]) {
        for (kind, scope, tokens) in entries.iter().rev() {
            self.index.of_mut(*kind).covers(*scope, tokens);
        }
    }
}
