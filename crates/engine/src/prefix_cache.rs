//! Prefix cache: tracks the tokens and KV cells of every slot, and decides which finished sequences stay cached and
//! which are evicted.
//!
//! ```text
//!   free ── acquire ──► live ── retain ──► cached     fork: from live or cached into live
//!    ▲                │                │
//!    └──── release ───┴──── evict ─────┘
//! ```
//!
//! Which cells the slots hold is counted in [`cells`].

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use sapwood_proto::steer::Token;

use crate::model::{Capacity, SlotId};
use cells::KvCells;

pub(crate) mod cells;

/// The state of all slots and KV cells. It is pure: it does not call the model.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    slots: Vec<CachedSlot>,
    cells: KvCells,
    /// Counts uses; a cached slot stores the count of its last use, by which it is evicted.
    uses: u64,
    truncates: bool,
}

#[derive(Debug)]
struct CachedSlot {
    usage: SlotUse,
    /// Only lookups in the same scope find these tokens (LM-609).
    scope: u64,
    tokens: Vec<Token>,
    cells: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotUse {
    Free,
    Live,
    Cached(CachedPrefix),
}

/// What is known of a cached slot, in which no sequence runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CachedPrefix {
    /// The value of [`PrefixCache::uses`] at its last use.
    used: u64,
    key: Option<u64>,
    /// A hash of the prompt that its tokens begin with: equal for all answers to one prompt.
    prompt: u64,
}

/// A cached prefix that lost its slot. The model still holds it there until the caller releases the slot.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EvictedPrefix {
    pub(crate) slot: SlotId,
    pub(crate) scope: u64,
    pub(crate) tokens: Vec<Token>,
    /// Another cached slot holds the same prompt and was used later: this one is another answer to it.
    pub(crate) superseded: bool,
}

/// A slot whose tokens begin as a prompt does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixMatch {
    pub(crate) slot: SlotId,
    /// Number of common tokens that may be used; fewer than the prompt has, because its last token must be computed.
    pub(crate) tokens: usize,
    /// The slot is cached, not live.
    pub(crate) cached: bool,
    /// The slot holds no tokens beyond the common ones.
    pub(crate) whole: bool,
    /// A copy of the slot has to be rewound to the common tokens by a checkpoint.
    pub(crate) rewinds: bool,
}

impl PrefixCache {
    pub(crate) fn new(capacity: Capacity, truncates: bool) -> Self {
        let cached_slot = || CachedSlot {
            usage: SlotUse::Free,
            scope: 0,
            tokens: Vec::new(),
            cells: Vec::new(),
        };
        Self {
            slots: (0..capacity.slots).map(|_| cached_slot()).collect(),
            cells: KvCells::new(capacity.cells),
            uses: 0,
            truncates,
        }
    }

    /// Returns the KV cells.
    pub(crate) fn cells(&self) -> &KvCells {
        &self.cells
    }

    /// Returns the scope and the tokens of a slot.
    pub(crate) fn contents(&self, slot: SlotId) -> (u64, &[Token]) {
        let slot = self.cached_slot(slot);
        (slot.scope, &slot.tokens)
    }

    /// Returns the number of tokens in a slot.
    pub(crate) fn len(&self, slot: SlotId) -> usize {
        self.cached_slot(slot).tokens.len()
    }

    /// Returns the slot of this scope with the longest usable common prefix of at least `min` tokens. `resumes` tells
    /// whether the model can continue after this many tokens of a slot (D-48), and `reach` how many of a slot's first tokens,
    /// given with the number of common ones, it can be rewound to.
    pub(crate) fn find(
        &self,
        scope: u64,
        prompt: &[Token],
        min: usize,
        resumes: impl Fn(SlotId, usize) -> bool,
        reach: impl Fn(&[Token], usize) -> usize,
    ) -> Option<PrefixMatch> {
        let min = min.max(1);
        // The last token is always computed: its output row gives the first token of the output.
        let limit = prompt.len().saturating_sub(1);
        let mut best: Option<PrefixMatch> = None;
        // A scan instead of a radix tree: slots are few (llama.cpp has at most 256), and comparing tokens costs nothing
        // beside decoding one.
        for (slot, cached_slot) in (0..).zip(&self.slots) {
            if cached_slot.usage == SlotUse::Free || cached_slot.scope != scope {
                continue;
            }
            let common = common_prefix(&cached_slot.tokens, &prompt[..limit]);
            let longer = |tokens| tokens >= min && best.is_none_or(|best| tokens > best.tokens);
            // The model is asked last, and only about a slot that would win.
            if !longer(common) {
                continue;
            }
            let whole = common == cached_slot.tokens.len();
            // A model that cannot truncate a sequence can only continue at the end of one.
            let direct = (whole || self.truncates) && resumes(slot, common);
            let tokens = match direct {
                true => common,
                false => reach(&cached_slot.tokens, common),
            };
            if longer(tokens) {
                best = Some(PrefixMatch {
                    slot,
                    tokens,
                    cached: cached_slot.usage != SlotUse::Live,
                    whole: direct && whole,
                    rewinds: !direct,
                });
            }
        }
        best
    }

    /// Returns how many of a slot's first `tokens` cells a fork would newly pin.
    pub(crate) fn unpinned(&self, slot: SlotId, tokens: usize) -> usize {
        // `tokens` is at most what the slot holds: it comes from a `PrefixMatch` of this slot.
        let cells = &self.cached_slot(slot).cells[..tokens];
        cells
            .iter()
            .filter(|&&cell| !self.cells.is_pinned(cell))
            .count()
    }

    /// Takes a free slot for tokens of this scope and makes it live and empty.
    pub(crate) fn acquire(&mut self, scope: u64) -> Option<SlotId> {
        // The lowest free slot, so that live slots stay adjacent; see `misplaced_prefix`.
        let slot = self.first(|usage| usage == SlotUse::Free)?;
        let cached_slot = self.cached_slot_mut(slot);
        cached_slot.usage = SlotUse::Live;
        cached_slot.scope = scope;
        Some(slot)
    }

    /// If the first cached slot lies before the first free one, returns both (cached, free), so that the caller can
    /// move the prefix with [`PrefixCache::swap_slots`]. Live slots then stay adjacent, and a model may compute adjacent
    /// slots in one decode call. `None` if no slot is live; `spare` is never chosen.
    pub(crate) fn misplaced_prefix(&self, spare: Option<SlotId>) -> Option<(SlotId, SlotId)> {
        self.first(|usage| usage == SlotUse::Live)?;
        let free = self.first(|usage| usage == SlotUse::Free)?;
        let is_cached = |slot| matches!(self.cached_slot(slot).usage, SlotUse::Cached(_));
        let cached = (0..free).find(|&slot| is_cached(slot) && Some(slot) != spare)?;
        Some((cached, free))
    }

    /// Swaps a cached slot with a free one. The caller moves the contents in the model.
    pub(crate) fn swap_slots(&mut self, cached: SlotId, free: SlotId) {
        self.slots.swap(cached as usize, free as usize);
    }

    /// Whether a slot is free.
    pub(crate) fn has_free_slot(&self) -> bool {
        self.first(|usage| usage == SlotUse::Free).is_some()
    }

    /// Returns whether a slot is in use and holds at least this many tokens.
    pub(crate) fn holds(&self, slot: SlotId, tokens: usize) -> bool {
        self.cached_slot(slot).usage != SlotUse::Free && self.len(slot) >= tokens
    }

    /// Returns whether a slot is free or cached, so that it can be given to a sequence.
    pub(crate) fn has_slot(&self) -> bool {
        self.first(|usage| usage != SlotUse::Live).is_some()
    }

    /// Shares the first `tokens` tokens of `from` with the live, empty slot `to`.
    pub(crate) fn fork(&mut self, from: SlotId, to: SlotId, tokens: usize) {
        let source = self.cached_slot(from);
        let shared = source.cells[..tokens].to_vec();
        let text = source.tokens[..tokens].to_vec();
        for &cell in &shared {
            self.cells.share(cell);
        }
        let target = self.cached_slot_mut(to);
        target.cells = shared;
        target.tokens = text;
        // A cached prefix that was just used is evicted last.
        self.touch(from);
    }

    /// Appends tokens to a live slot. The caller has freed enough cells by evicting.
    #[inline]
    pub(crate) fn append(&mut self, slot: SlotId, tokens: &[Token]) {
        for &token in tokens {
            // Does not happen after enough was evicted. If it did, the cache would know fewer tokens than the slot holds, and
            // a lookup would share less.
            let Some(cell) = self.cells.take() else {
                return;
            };
            let cached_slot = self.cached_slot_mut(slot);
            cached_slot.cells.push(cell);
            cached_slot.tokens.push(token);
        }
    }

    /// Truncates a live slot to its first `tokens` tokens; it holds at least as many.
    pub(crate) fn truncate(&mut self, slot: SlotId, tokens: usize) {
        while self.len(slot) > tokens {
            let cached_slot = self.cached_slot_mut(slot);
            cached_slot.tokens.pop();
            if let Some(cell) = cached_slot.cells.pop() {
                // A live slot pins each of its cells; a cached one does not, so `discard` only drops them.
                self.cells.unpin(cell);
                self.cells.release(cell);
            }
        }
    }

    /// Ends the use of a live slot and caches its tokens, the first `prompt` of which are the prompt, as a prefix for
    /// later requests. Duplicates are freed: of equal slots the new one, and of a slot whose tokens are the beginning
    /// of another, if the model can continue from within (`resumes`), the shorter one. Returns the freed slots, which
    /// the caller releases in the model.
    pub(crate) fn retain(
        &mut self,
        slot: SlotId,
        prompt: usize,
        key: Option<u64>,
        resumes: impl Fn(SlotId, usize) -> bool,
    ) -> Vec<SlotId> {
        self.uses += 1;
        let used = self.uses;
        if let Some(holder) = self.holder_of(slot, &resumes) {
            if let SlotUse::Cached(cached) = &mut self.cached_slot_mut(holder).usage {
                cached.used = used;
                cached.key = cached.key.or(key);
            }
            self.release(slot);
            return vec![slot];
        }
        let entry = self.cached_slot(slot);
        // A slot may hold less than the prompt, if the sequence ended during its prefill.
        let prompt = hash_of(&entry.tokens[..prompt.min(entry.tokens.len())]);
        // The cells stay in use but are no longer pinned, so they count as room from here on.
        for index in 0..self.len(slot) {
            let cell = self.cached_slot(slot).cells[index];
            self.cells.unpin(cell);
        }
        self.cached_slot_mut(slot).usage = SlotUse::Cached(CachedPrefix { used, key, prompt });
        // After the slot became cached, so that `covers` compares cached slots only.
        let beginnings = self.shorter_copies_of(slot, &resumes);
        for &beginning in &beginnings {
            self.discard(beginning);
        }
        beginnings
    }

    /// Returns a cached slot from which every request can continue that could continue from `slot`.
    fn holder_of(&self, slot: SlotId, resumes: &impl Fn(SlotId, usize) -> bool) -> Option<SlotId> {
        let ended = self.cached_slot(slot);
        let holds = |(holder, entry): &(SlotId, &CachedSlot)| {
            matches!(entry.usage, SlotUse::Cached(_)) && self.covers(*holder, ended, resumes)
        };
        let mut slots = (0..).zip(&self.slots);
        slots.find(holds).map(|(holder, _)| holder)
    }

    /// Returns the cached slots that `slot` makes redundant because it holds all their tokens.
    fn shorter_copies_of(
        &self,
        slot: SlotId,
        resumes: &impl Fn(SlotId, usize) -> bool,
    ) -> Vec<SlotId> {
        let covered = |(other, cached_slot): &(SlotId, &CachedSlot)| {
            *other != slot
                && matches!(cached_slot.usage, SlotUse::Cached(_))
                && self.covers(slot, cached_slot, resumes)
        };
        let slots = (0..).zip(&self.slots);
        slots.filter(covered).map(|(other, _)| other).collect()
    }

    /// Returns whether every request that could continue from all of `entry` can also continue from `holder`.
    fn covers(
        &self,
        holder: SlotId,
        entry: &CachedSlot,
        resumes: &impl Fn(SlotId, usize) -> bool,
    ) -> bool {
        let longer = self.cached_slot(holder);
        let tokens = entry.tokens.len();
        let whole = tokens == longer.tokens.len();
        longer.scope == entry.scope
            && longer.tokens.starts_with(&entry.tokens)
            && (whole || self.truncates)
            // With a sliding window the longer slot may have lost positions that the shorter one still has (D-48); then
            // both stay.
            && resumes(holder, tokens)
    }

    /// Frees a live slot and the cells that no other slot holds.
    pub(crate) fn release(&mut self, slot: SlotId) {
        // Unpins the cells too, because the slot is live.
        self.truncate(slot, 0);
        self.cached_slot_mut(slot).usage = SlotUse::Free;
    }

    /// Frees a cached slot other than `spare`. Evicts first those whose prompt is also that of a slot used later, so
    /// that many answers to one prompt do not evict another conversation; then the least recently used. The caller
    /// releases the slot in the model.
    pub(crate) fn evict(&mut self, spare: Option<SlotId>) -> Option<EvictedPrefix> {
        let (slot, last) = self.next_evicted(|slot| Some(slot) != spare)?;
        Some(self.take_cached(slot, last))
    }

    /// Returns the slot that [`PrefixCache::evict`] frees next, unless it is another answer to a prompt that is kept.
    pub(crate) fn next_lost(&self) -> Option<SlotId> {
        let (slot, last) = self.next_evicted(|_| true)?;
        last.then_some(slot)
    }

    /// As [`PrefixCache::evict`], but only a slot with cells that no live slot holds.
    pub(crate) fn evict_idle(&mut self) -> Option<EvictedPrefix> {
        let is_idle = |cell: &u32| !self.cells.is_pinned(*cell);
        let (slot, last) =
            self.next_evicted(|slot| self.cached_slot(slot).cells.iter().any(is_idle))?;
        Some(self.take_cached(slot, last))
    }

    /// Returns the first to be evicted of the cached slots for which `may` is true, and whether none with its prompt was
    /// used later.
    fn next_evicted(&self, may: impl Fn(SlotId) -> bool) -> Option<(SlotId, bool)> {
        let cached = |cached_slot: &CachedSlot| match cached_slot.usage {
            SlotUse::Cached(cached) => Some((cached_slot.scope, cached)),
            _ => None,
        };
        // The last use of each prompt in its scope.
        let mut latest: HashMap<(u64, u64), u64> = HashMap::new();
        for (scope, cached) in self.slots.iter().filter_map(cached) {
            let used = latest.entry((scope, cached.prompt)).or_default();
            *used = cached.used.max(*used);
        }
        let candidates = (0..).zip(&self.slots).filter_map(|(slot, cached_slot)| {
            let (scope, cached) = cached(cached_slot).filter(|_| may(slot))?;
            // `used` is unique for each use of a slot, except for slots that `warm` marks together. False sorts before
            // true.
            let last = latest.get(&(scope, cached.prompt)) == Some(&cached.used);
            Some((last, cached.used, slot))
        });
        let (last, _, slot) = candidates.min()?;
        Some((slot, last))
    }

    /// Frees a cached slot and returns what it held.
    fn take_cached(&mut self, slot: SlotId, last: bool) -> EvictedPrefix {
        let scope = self.cached_slot(slot).scope;
        let tokens = std::mem::take(&mut self.cached_slot_mut(slot).tokens);
        self.discard(slot);
        EvictedPrefix {
            slot,
            scope,
            tokens,
            superseded: !last,
        }
    }

    /// Frees a cached slot. The caller releases it in the model.
    pub(crate) fn discard(&mut self, slot: SlotId) {
        for cell in std::mem::take(&mut self.cached_slot_mut(slot).cells) {
            self.cells.release(cell);
        }
        let cached_slot = self.cached_slot_mut(slot);
        cached_slot.tokens.clear();
        cached_slot.usage = SlotUse::Free;
    }

    /// Marks every cached slot of this scope with this `key` as just used.
    pub(crate) fn warm(&mut self, scope: u64, key: u64) {
        self.uses += 1;
        for cached_slot in self.slots.iter_mut().filter(|it| it.scope == scope) {
            if let SlotUse::Cached(cached) = &mut cached_slot.usage
                && cached.key == Some(key)
            {
                cached.used = self.uses;
            }
        }
    }

    fn touch(&mut self, slot: SlotId) {
        self.uses += 1;
        let now = self.uses;
        if let SlotUse::Cached(cached) = &mut self.cached_slot_mut(slot).usage {
            cached.used = now;
        }
    }

    /// Returns the lowest slot whose state is wanted.
    fn first(&self, wanted: impl Fn(SlotUse) -> bool) -> Option<SlotId> {
        let mut slots = (0..).zip(&self.slots);
        let (slot, _) = slots.find(|(_, cached_slot)| wanted(cached_slot.usage))?;
        Some(slot)
    }

    fn cached_slot(&self, slot: SlotId) -> &CachedSlot {
        &self.slots[slot as usize]
    }

    fn cached_slot_mut(&mut self, slot: SlotId) -> &mut CachedSlot {
        &mut self.slots[slot as usize]
    }
}

fn hash_of(tokens: &[Token]) -> u64 {
    // A collision would only change which prefix is evicted first, so the tokens are not compared.
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}

/// Returns the length of the common prefix.
pub(crate) fn common_prefix(left: &[Token], right: &[Token]) -> usize {
    left.iter()
        .zip(right)
        .take_while(|(left, right)| left == right)
        .count()
}

#[cfg(test)]
mod tests;
