//! Which tokens each slot of the model holds, which cells that takes, and which finished sequences are worth keeping.
//!
//! Owns: the bookkeeping of slots and cells ([`PrefixCache`]): exact prefix match across requests and sessions of one scope,
//! sharing by reference count, one slot for what several hold, eviction of the least recently used. Refuses to know: the model (its owner repeats each change
//! there), requests, time, and whose a scope is.
//!
//! ```text
//!   free ── take ──► live ── keep ──► kept       fork: from live or kept into live
//!    ▲                │                │
//!    └──── release ───┴──── evict ─────┘
//! ```
//!
//! A cell is one token of one or more slots. It is *pinned* while a live slot holds it; every other cell can be had by
//! evicting what is kept, so [`PrefixCache::room`] is what a step may use.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use sapwood_proto::steer::Token;

use crate::model::{Capacity, Slot};

/// Slots and cells. Plain data: every method is a function of what was called before.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    places: Vec<Place>,
    cells: Vec<Cell>,
    free: Vec<u32>,
    pinned: usize,
    /// Grows with every use; the order of eviction.
    uses: u64,
    truncates: bool,
}

#[derive(Debug)]
struct Place {
    held: Held,
    /// Whoever looks for its tokens in another scope does not find them (LM-609).
    scope: u64,
    tokens: Vec<Token>,
    cells: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Free,
    Live,
    Kept(Kept),
}

/// What is remembered of a slot that nobody runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    /// When it was last used, as a number that grows.
    used: u64,
    key: Option<u64>,
    /// A hash of the prompt that its tokens begin with: equal for answers to one and the same request.
    prompt: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// Slots that hold it.
    held: u32,
    /// Live slots that hold it.
    pins: u32,
}

/// A slot that begins as a prompt does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) slot: Slot,
    /// Tokens in common that may be used; fewer than the prompt has, because its last token must be computed.
    pub(crate) tokens: usize,
    /// Nobody runs in the slot.
    pub(crate) kept: bool,
    /// The slot holds no more than that.
    pub(crate) whole: bool,
}

impl PrefixCache {
    pub(crate) fn new(capacity: Capacity, truncates: bool) -> Self {
        let place = || Place {
            held: Held::Free,
            scope: 0,
            tokens: Vec::new(),
            cells: Vec::new(),
        };
        Self {
            places: (0..capacity.slots).map(|_| place()).collect(),
            cells: vec![Cell::default(); capacity.cells as usize],
            free: (0..capacity.cells).rev().collect(),
            pinned: 0,
            uses: 0,
            truncates,
        }
    }

    /// Cells that are free or can be freed by evicting.
    pub(crate) fn room(&self) -> usize {
        self.cells.len() - self.pinned
    }

    /// Cells that hold something.
    pub(crate) fn used(&self) -> usize {
        self.cells.len() - self.free.len()
    }

    /// How many tokens a slot holds.
    pub(crate) fn len(&self, slot: Slot) -> usize {
        self.place(slot).tokens.len()
    }

    /// The slot of this scope with the longest usable common prefix, if any has one of at least `min` tokens. `resumes`
    /// says whether the model can go on after so many tokens of a slot (D-48).
    pub(crate) fn find(
        &self,
        scope: u64,
        prompt: &[Token],
        min: usize,
        resumes: impl Fn(Slot, usize) -> bool,
    ) -> Option<Match> {
        let min = min.max(1);
        let limit = prompt.len().saturating_sub(1);
        let mut best: Option<Match> = None;
        for (slot, place) in (0..).zip(&self.places) {
            if place.held == Held::Free || place.scope != scope {
                continue;
            }
            let common = common_prefix(&place.tokens, &prompt[..limit]);
            let whole = common == place.tokens.len();
            // A model that cannot cut a sequence back can only go on where one ends.
            let usable = common >= min && (whole || self.truncates);
            let longer = best.is_none_or(|best| common > best.tokens);
            if usable && longer && resumes(slot, common) {
                let kept = place.held != Held::Live;
                best = Some(Match {
                    slot,
                    tokens: common,
                    kept,
                    whole,
                });
            }
        }
        best
    }

    /// How many of a slot's first `tokens` cells would become pinned by forking it.
    pub(crate) fn unpinned(&self, slot: Slot, tokens: usize) -> usize {
        let cells = &self.place(slot).cells[..tokens];
        cells
            .iter()
            .filter(|&&cell| self.cells[cell as usize].pins == 0)
            .count()
    }

    /// A free slot, made live and empty, for tokens of this scope.
    pub(crate) fn take(&mut self, scope: u64) -> Option<Slot> {
        let slot = (0..)
            .zip(&self.places)
            .find(|(_, place)| place.held == Held::Free)?
            .0;
        let place = self.place_mut(slot);
        place.held = Held::Live;
        place.scope = scope;
        Some(slot)
    }

    /// What is kept in the way of the next slot to be taken, and a free slot for it: those who run sit close together then, which a
    /// model may compute in one pass. Nothing if nobody runs; `spare` is in nobody's way.
    pub(crate) fn in_the_way(&self, spare: Option<Slot>) -> Option<(Slot, Slot)> {
        let first = |wanted: fn(Held) -> bool| {
            let mut slots = (0..).zip(&self.places);
            slots.find(|(slot, place)| wanted(place.held) && Some(*slot) != spare)
        };
        if !self.places.iter().any(|place| place.held == Held::Live) {
            return None;
        }
        let (free, _) = first(|held| held == Held::Free)?;
        let (kept, _) = first(|held| matches!(held, Held::Kept(_)))?;
        (kept < free).then_some((kept, free))
    }

    /// Takes what is kept in one slot to a free one. The caller does so in the model.
    pub(crate) fn shift(&mut self, kept: Slot, free: Slot) {
        self.places.swap(kept as usize, free as usize);
    }

    /// Whether a slot is free.
    pub(crate) fn has_free_slot(&self) -> bool {
        self.places.iter().any(|place| place.held == Held::Free)
    }

    /// Whether a slot is in use and holds at least so many tokens.
    pub(crate) fn holds(&self, slot: Slot, tokens: usize) -> bool {
        self.place(slot).held != Held::Free && self.len(slot) >= tokens
    }

    /// Whether a slot is free or kept, so that somebody could have it.
    pub(crate) fn has_slot(&self) -> bool {
        self.places.iter().any(|place| place.held != Held::Live)
    }

    /// Shares the first `tokens` tokens of `from` with the live, empty slot `to`.
    pub(crate) fn fork(&mut self, from: Slot, to: Slot, tokens: usize) {
        let source = self.place(from);
        let shared = source.cells[..tokens].to_vec();
        let text = source.tokens[..tokens].to_vec();
        for &cell in &shared {
            self.cells[cell as usize].held += 1;
            self.pin(cell as usize);
        }
        let target = self.place_mut(to);
        target.cells = shared;
        target.tokens = text;
        self.touch(from);
    }

    /// Adds tokens to a live slot. The caller has made sure of free cells with [`PrefixCache::evict_for`].
    pub(crate) fn append(&mut self, slot: Slot, tokens: &[Token]) {
        for &token in tokens {
            let Some(cell) = self.free.pop() else { return };
            self.cells[cell as usize] = Cell { held: 1, pins: 1 };
            self.pinned += 1;
            let place = self.place_mut(slot);
            place.cells.push(cell);
            place.tokens.push(token);
        }
    }

    /// Keeps the first `tokens` tokens of a live slot that holds at least as many.
    pub(crate) fn truncate(&mut self, slot: Slot, tokens: usize) {
        while self.len(slot) > tokens {
            let place = self.place_mut(slot);
            place.tokens.pop();
            if let Some(cell) = place.cells.pop() {
                self.unpin(cell as usize);
                self.drop_cell(cell);
            }
        }
    }

    /// Ends the life of a live slot and keeps its tokens, the first `prompt` of which were asked for, for whoever begins
    /// the same way. What is held twice is kept once: of equal slots the one that was there, and of a slot that is the
    /// beginning of another, where the model can go on from within (`resumes`), the longer one. Gives the slots that are
    /// free for that reason, which the caller releases in the model.
    pub(crate) fn keep(
        &mut self,
        slot: Slot,
        prompt: usize,
        key: Option<u64>,
        resumes: impl Fn(Slot, usize) -> bool,
    ) -> Vec<Slot> {
        self.uses += 1;
        let used = self.uses;
        if let Some(holder) = self.holder_of(slot, &resumes) {
            if let Held::Kept(kept) = &mut self.place_mut(holder).held {
                kept.used = used;
                kept.key = kept.key.or(key);
            }
            self.release(slot);
            return vec![slot];
        }
        let place = self.place(slot);
        let prompt = hash_of(&place.tokens[..prompt.min(place.tokens.len())]);
        for index in 0..self.len(slot) {
            let cell = self.place(slot).cells[index] as usize;
            self.unpin(cell);
        }
        self.place_mut(slot).held = Held::Kept(Kept { used, key, prompt });
        let beginnings = self.beginnings_of(slot, &resumes);
        for &beginning in &beginnings {
            self.discard(beginning);
        }
        beginnings
    }

    /// A kept slot that holds all tokens of another, at its end or where the model can go on.
    fn holder_of(&self, slot: Slot, resumes: &impl Fn(Slot, usize) -> bool) -> Option<Slot> {
        let ended = self.place(slot);
        let holds = |(holder, place): &(Slot, &Place)| {
            matches!(place.held, Held::Kept(_)) && self.covers(*holder, ended, resumes)
        };
        let mut places = (0..).zip(&self.places);
        places.find(holds).map(|(holder, _)| holder)
    }

    /// The kept slots all of whose tokens this slot holds.
    fn beginnings_of(&self, slot: Slot, resumes: &impl Fn(Slot, usize) -> bool) -> Vec<Slot> {
        let covered = |(other, place): &(Slot, &Place)| {
            *other != slot
                && matches!(place.held, Held::Kept(_))
                && self.covers(slot, place, resumes)
        };
        let places = (0..).zip(&self.places);
        places.filter(covered).map(|(other, _)| other).collect()
    }

    /// Whether whoever could go on from all of `place` can do so from `holder`.
    fn covers(&self, holder: Slot, place: &Place, resumes: &impl Fn(Slot, usize) -> bool) -> bool {
        let longer = self.place(holder);
        let tokens = place.tokens.len();
        let whole = tokens == longer.tokens.len();
        longer.scope == place.scope
            && longer.tokens.starts_with(&place.tokens)
            && (whole || self.truncates)
            && resumes(holder, tokens)
    }

    /// Frees a live slot and the cells that only it holds.
    pub(crate) fn release(&mut self, slot: Slot) {
        self.truncate(slot, 0);
        self.place_mut(slot).held = Held::Free;
    }

    /// Frees a kept slot; `spare` is not it. First goes what repeats the prompt of a slot that was used later: many answers
    /// to one request do not drive out another conversation. Then what was used least recently. The caller releases it in
    /// the model.
    pub(crate) fn evict(&mut self, spare: Option<Slot>) -> Option<Slot> {
        let kept = |place: &Place| match place.held {
            Held::Kept(kept) => Some((place.scope, kept)),
            _ => None,
        };
        // The last use of each prompt.
        let mut latest: HashMap<(u64, u64), u64> = HashMap::new();
        for (scope, kept) in self.places.iter().filter_map(kept) {
            let used = latest.entry((scope, kept.prompt)).or_default();
            *used = kept.used.max(*used);
        }
        let candidates = (0..).zip(&self.places).filter_map(|(slot, place)| {
            let (scope, kept) = kept(place).filter(|_| Some(slot) != spare)?;
            let last = latest.get(&(scope, kept.prompt)) == Some(&kept.used);
            Some((last, kept.used, slot))
        });
        let (_, _, slot) = candidates.min()?;
        self.discard(slot);
        Some(slot)
    }

    /// Frees a kept slot. The caller releases it in the model.
    pub(crate) fn discard(&mut self, slot: Slot) {
        for cell in std::mem::take(&mut self.place_mut(slot).cells) {
            self.drop_cell(cell);
        }
        let place = self.place_mut(slot);
        place.tokens.clear();
        place.held = Held::Free;
    }

    /// Evicts until `cells` cells are free; gives the slots that the caller then releases in the model.
    pub(crate) fn evict_for(&mut self, cells: usize) -> Vec<Slot> {
        let mut evicted = Vec::new();
        while self.free.len() < cells {
            let Some(slot) = self.evict(None) else { break };
            evicted.push(slot);
        }
        evicted
    }

    /// Marks everything of this scope that was kept under `key` as just used.
    pub(crate) fn warm(&mut self, scope: u64, key: u64) {
        self.uses += 1;
        for place in self.places.iter_mut().filter(|it| it.scope == scope) {
            if let Held::Kept(kept) = &mut place.held
                && kept.key == Some(key)
            {
                kept.used = self.uses;
            }
        }
    }

    fn touch(&mut self, slot: Slot) {
        self.uses += 1;
        let now = self.uses;
        if let Held::Kept(kept) = &mut self.place_mut(slot).held {
            kept.used = now;
        }
    }

    fn pin(&mut self, cell: usize) {
        self.cells[cell].pins += 1;
        if self.cells[cell].pins == 1 {
            self.pinned += 1;
        }
    }

    fn unpin(&mut self, cell: usize) {
        self.cells[cell].pins -= 1;
        if self.cells[cell].pins == 0 {
            self.pinned -= 1;
        }
    }

    fn drop_cell(&mut self, cell: u32) {
        let held = &mut self.cells[cell as usize].held;
        *held -= 1;
        if *held == 0 {
            self.free.push(cell);
        }
    }

    fn place(&self, slot: Slot) -> &Place {
        &self.places[slot as usize]
    }

    fn place_mut(&mut self, slot: Slot) -> &mut Place {
        &mut self.places[slot as usize]
    }
}

fn hash_of(tokens: &[Token]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}

/// How many tokens both begin with.
pub(crate) fn common_prefix(left: &[Token], right: &[Token]) -> usize {
    left.iter()
        .zip(right)
        .take_while(|(left, right)| left == right)
        .count()
}

#[cfg(test)]
mod tests;
