//! Prefix affinity: which upstream has recently seen the start of a prompt (LM-802).

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hasher};

use ahash::RandomState;

use super::PoolMember;
use crate::steer::Token;

/// The affinity table, bounded by a number of blocks.
#[derive(Debug)]
pub(super) struct AffinityTable {
    max: usize,
    hasher: RandomState,
    blocks: HashMap<u64, CachedPrefixEntry, RandomState>,
    /// The blocks by when they were last used.
    order: BTreeMap<u64, u64>,
    entered: u64,
}

#[derive(Debug)]
struct CachedPrefixEntry {
    member: PoolMember,
    entered: u64,
}

impl AffinityTable {
    pub(super) fn new(max: usize) -> Self {
        // Fixed seeds: hash collisions must not depend on the run, and the machine has no randomness (D-4).
        let hasher = RandomState::with_seeds(1, 2, 3, 4);
        Self {
            max,
            blocks: HashMap::with_hasher(hasher.clone()),
            hasher,
            order: BTreeMap::new(),
            entered: 0,
        }
    }

    /// The upstream, among the `usable` ones, that has seen the longest prefix of the prompt.
    pub(super) fn longest(
        &self,
        prompt: &[Token],
        usable: impl Fn(PoolMember) -> bool,
    ) -> Option<PoolMember> {
        if self.blocks.is_empty() {
            return None;
        }
        let hashes = self.hashes(prompt);
        // Longest prefix first. If its upstream cannot be used, one that knows a shorter prefix is still better than
        // none.
        let known = hashes.iter().rev().filter_map(|hash| self.blocks.get(hash));
        known
            .map(|known| known.member)
            .find(|member| usable(*member))
    }

    /// Records that an upstream has seen these tokens. The first blocks are the last to be evicted: later blocks are
    /// useless without them.
    pub(super) fn enter(&mut self, tokens: &[Token], member: PoolMember) {
        for hash in self.hashes(tokens).into_iter().rev() {
            self.entered += 1;
            let known = CachedPrefixEntry {
                member,
                entered: self.entered,
            };
            // A known block moves to the end of the order, or a prefix in use would be evicted by its age.
            if let Some(before) = self.blocks.insert(hash, known) {
                self.order.remove(&before.entered);
            }
            self.order.insert(self.entered, hash);
        }
        while self.blocks.len() > self.max
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.blocks.remove(&oldest);
        }
    }

    /// h(i) = H(h(i-1), block i), for complete blocks.
    fn hashes(&self, tokens: &[Token]) -> Vec<u64> {
        // The incomplete last block is left out: it changes with the next token. A collision only misroutes a stream,
        // so blocks are not compared.
        let (blocks, _) = tokens.as_chunks::<BLOCK_TOKENS>();
        let chain = blocks.iter().scan(0, |before, block| {
            let mut hasher = self.hasher.build_hasher();
            hasher.write_u64(*before);
            block.iter().for_each(|token| hasher.write_u32(*token));
            *before = hasher.finish();
            Some(*before)
        });
        chain.collect()
    }
}

const BLOCK_TOKENS: usize = 16;
