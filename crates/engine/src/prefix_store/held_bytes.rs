//! [`HeldBytes`]: what the entries of a store need, what they have in common once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::{PrefixState, SavedPrefix, bytes_of};
use crate::saved_state::StateBlock;

/// The bytes of a store's entries.
#[derive(Debug, Default)]
pub(super) struct HeldBytes {
    all: usize,
    /// Those of each scope. Entries of two scopes have nothing in common, so they add up to all.
    scopes: HashMap<u64, usize>,
    /// How many entries have a block, by its address: a store holds it until no entry has it.
    holders: HashMap<usize, usize>,
}

impl HeldBytes {
    pub(super) fn all(&self) -> usize {
        self.all
    }

    pub(super) fn of_scope(&self, scope: u64) -> usize {
        self.scopes.get(&scope).copied().unwrap_or(0)
    }

    /// Returns what an entry would add.
    pub(super) fn added_by<S: PrefixState>(&self, prefix: &SavedPrefix<S>) -> usize {
        self.bytes_with(prefix, 0)
    }

    /// Counts an entry.
    pub(super) fn add<S: PrefixState>(&mut self, scope: u64, prefix: &SavedPrefix<S>) {
        let bytes = self.bytes_with(prefix, 0);
        for block in prefix.state.blocks() {
            *self.holders.entry(address(block)).or_default() += 1;
        }
        self.all += bytes;
        *self.scopes.entry(scope).or_default() += bytes;
    }

    /// Counts an entry no more.
    pub(super) fn remove<S: PrefixState>(&mut self, scope: u64, prefix: &SavedPrefix<S>) {
        let bytes = self.bytes_with(prefix, 1);
        for block in prefix.state.blocks() {
            if let Entry::Occupied(mut held) = self.holders.entry(address(block)) {
                *held.get_mut() -= 1;
                if *held.get() == 0 {
                    held.remove();
                }
            }
        }
        self.all -= bytes;
        if let Entry::Occupied(mut held) = self.scopes.entry(scope) {
            *held.get_mut() -= bytes;
            if *held.get() == 0 {
                held.remove();
            }
        }
    }

    /// Returns the bytes of an entry, and of those of its blocks that so many entries have.
    fn bytes_with<S: PrefixState>(&self, prefix: &SavedPrefix<S>, holders: usize) -> usize {
        let counts = |block: &&StateBlock| {
            let held = self.holders.get(&address(block)).copied().unwrap_or(0);
            held == holders
        };
        let blocks = prefix.state.blocks().iter().filter(counts);
        let blocks = blocks.map(|block| block.len()).sum::<usize>();
        bytes_of(prefix.tokens.len(), prefix.state.own_bytes()) + blocks
    }

    /// Returns the sum of the scopes, their number, and that of all blocks.
    #[cfg(test)]
    pub(super) fn parts(&self) -> (usize, usize, usize) {
        (
            self.scopes.values().sum(),
            self.scopes.len(),
            self.holders.len(),
        )
    }

    /// Returns how many blocks all entries have, the common ones several times.
    #[cfg(test)]
    pub(super) fn block_uses(&self) -> usize {
        self.holders.values().sum()
    }
}

pub(super) fn address(block: &StateBlock) -> usize {
    Arc::as_ptr(block).addr()
}
