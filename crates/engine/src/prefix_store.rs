//! [`PrefixStore`]: the second tier of the prefix cache. It holds the state of evicted slots as bytes in memory, from
//! which the model can fill a slot again. What entries have in common is held once ([`crate::saved_state`]). The index of
//! the third tier, which is on a disk, is a store too ([`crate::prefix_disk`]).
//!
//! Cached prefixes in KV cells are free to use, but they are few, and where all slots share the cells, every token that
//! is decoded scans them. Bytes in memory cost nothing until they are copied back, which is hundreds of times faster
//! than computing them.
//!
//! Entries are ordered by their tokens: the entry with the longest common prefix is then next to where a prompt would
//! be, before or behind it, as in a radix tree.

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};
use std::ops::Bound;
use std::sync::Arc;

use sapwood_proto::steer::Token;

use crate::prefix_cache::common_prefix;
use crate::saved_state::{BLOCK_TOKENS, SavedState, StateBlock};
use held_bytes::HeldBytes;

mod held_bytes;

/// What an entry needs beside its tokens and its state, rounded up.
const ENTRY_BYTES: usize = 512;

/// A scope that has more than one in so many bytes of the limit makes room for its entries itself.
const SCOPE_SHARE: usize = 2;

/// The maximum of entries that a search for a whole entry looks at: it is made for every slot that a waiting prompt could share,
/// in each step.
const ROUNDS_MAX: usize = 8;

/// Identifies an entry while it exists.
pub(crate) type SavedId = u64;

/// What is kept of a slot beside its tokens.
pub(crate) trait PrefixState {
    /// Returns its bytes, the shared ones included.
    fn bytes(&self) -> usize;

    /// Returns the bytes of the store's limit that it needs besides its blocks.
    fn own_bytes(&self) -> usize {
        self.bytes()
    }

    /// Returns what it may have in common with other entries.
    fn blocks(&self) -> &[StateBlock] {
        &[]
    }
}

/// In memory.
impl PrefixState for SavedState {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn own_bytes(&self) -> usize {
        Self::own_bytes(self)
    }

    fn blocks(&self) -> &[StateBlock] {
        Self::blocks(self)
    }
}

/// Saved slots, by scope and tokens. It is pure: it does not call the model.
#[derive(Debug)]
pub(crate) struct PrefixStore<S = SavedState> {
    /// The maximum of [`PrefixStore::bytes`].
    limit: usize,
    /// Whether an entry serves prompts that share only a part of it. If not, they must begin with the whole entry.
    partial: bool,
    entries: HashMap<SavedId, StoredPrefix<S>>,
    /// Without empty ones.
    scopes: HashMap<u64, ScopeIndex>,
    /// The first is evicted first.
    by_value: BTreeSet<(EntryValue, SavedId)>,
    /// The value of the entry that was evicted last: what was used since counts for more than what was not.
    age: u64,
    uses: u64,
    next: SavedId,
    held: HeldBytes,
    /// Those that were not taken yet.
    evicted: Vec<EvictedEntry<S>>,
}

/// The entries of a scope.
#[derive(Debug, Default)]
struct ScopeIndex {
    by_tokens: BTreeMap<Arc<[Token]>, SavedId>,
    /// The first is evicted first. A scope that makes room for its own entries finds them here: among those of all others, each
    /// eviction would look at every entry of less value.
    by_value: BTreeSet<(EntryValue, SavedId)>,
}

impl ScopeIndex {
    /// Returns the entries whose tokens are in a range, in the order of those.
    fn range<'a>(
        &'a self,
        from: Bound<&[Token]>,
        until: Bound<&[Token]>,
    ) -> btree_map::Range<'a, Arc<[Token]>, SavedId> {
        self.by_tokens.range::<[Token], _>((from, until))
    }
}

/// What an entry saves for each byte, and when it was last used. Greedy dual: as least recently used if all entries have
/// as many bytes for a token, and for longer prefixes where the state of a slot has the same size whatever it holds.
type EntryValue = (u64, u64);

/// The state of a slot, and the tokens that it held.
#[derive(Debug)]
pub(crate) struct SavedPrefix<S = SavedState> {
    pub(crate) tokens: Arc<[Token]>,
    pub(crate) state: S,
}

/// A saved prefix with its scope.
pub(crate) type ScopedPrefix<S = SavedState> = (u64, Arc<SavedPrefix<S>>);

/// An entry that was evicted.
#[derive(Debug)]
pub(crate) struct EvictedEntry<S = SavedState> {
    pub(crate) scope: u64,
    pub(crate) prefix: Arc<SavedPrefix<S>>,
    /// A longer one serves all prompts that it could serve.
    pub(crate) superseded: bool,
}

#[derive(Debug)]
struct StoredPrefix<S> {
    scope: u64,
    prefix: Arc<SavedPrefix<S>>,
    value: EntryValue,
}

/// An entry that begins as a prompt does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedMatch {
    pub(crate) id: SavedId,
    /// The number of common tokens.
    pub(crate) tokens: usize,
    /// The number of tokens of the entry: all of them come back.
    pub(crate) saved: usize,
}

impl<S: PrefixState> PrefixStore<S> {
    pub(crate) fn new(limit: usize, partial: bool) -> Self {
        Self {
            limit,
            partial,
            entries: HashMap::new(),
            scopes: HashMap::new(),
            by_value: BTreeSet::new(),
            age: 0,
            uses: 0,
            next: 0,
            held: HeldBytes::default(),
            evicted: Vec::new(),
        }
    }

    /// Returns an empty store with the same limit.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(self.limit, self.partial)
    }

    /// Returns the bytes in use.
    pub(crate) fn bytes(&self) -> usize {
        self.held.all()
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the maximum of bytes.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the entries with their scopes, the most valuable last.
    #[cfg(test)]
    pub(crate) fn by_value(&self) -> impl DoubleEndedIterator<Item = ScopedPrefix<S>> + '_ {
        self.ids_by_value().filter_map(|id| self.entry(id))
    }

    /// Returns an entry with its scope, if it still exists, without marking it as used.
    pub(crate) fn entry(&self, id: SavedId) -> Option<ScopedPrefix<S>> {
        let entry = self.entries.get(&id)?;
        Some((entry.scope, Arc::clone(&entry.prefix)))
    }

    /// Takes the entries that were evicted since the last call.
    pub(crate) fn take_evicted(&mut self) -> Vec<EvictedEntry<S>> {
        std::mem::take(&mut self.evicted)
    }

    /// Returns the entries, the most valuable last.
    pub(crate) fn ids_by_value(&self) -> impl DoubleEndedIterator<Item = SavedId> + '_ {
        self.by_value.iter().map(|&(_, id)| id)
    }

    /// Returns whether an entry serves prompts that share only a part of it.
    pub(crate) fn is_partial(&self) -> bool {
        self.partial
    }

    /// Returns whether nothing would be stored.
    pub(crate) fn is_off(&self) -> bool {
        self.limit == 0
    }

    fn covering(&self, scope: u64, tokens: &[Token]) -> Option<SavedId> {
        let of_scope = self.scopes.get(&scope)?;
        let (other, &id) = of_scope
            .range(Bound::Included(tokens), Bound::Unbounded)
            .next()?;
        let covers = other.starts_with(tokens) && (self.partial || other.len() == tokens.len());
        covers.then_some(id)
    }

    /// Marks an entry that serves all prompts which these tokens could serve as used; returns false if there is none.
    pub(crate) fn covers(&mut self, scope: u64, tokens: &[Token]) -> bool {
        let covering = self.covering(scope, tokens);
        if let Some(id) = covering {
            self.touch(id);
        }
        covering.is_some()
    }

    /// Evicts entries until one of this scope and size fits; returns false if it never would. A scope that has more than its
    /// share loses its own, so that one caller does not evict the prefixes of all others.
    ///
    /// What the entry will have in common with others is not known before it is there: it is taken to be all blocks of common
    /// tokens. If it is less, [`PrefixStore::insert`] evicts more.
    pub(crate) fn make_room(&mut self, scope: u64, tokens: &[Token], state: usize) -> bool {
        let bytes = bytes_of(tokens.len(), state);
        if bytes > self.limit {
            return false;
        }
        let mut near = self.nearest(scope, tokens);
        loop {
            let added = bytes.saturating_sub(near.map_or(0, |near| self.common_bytes(near)));
            let Some(evicted) = self.evict_for(scope, added) else {
                return true;
            };
            // Searched again only if it has gone: among many entries that takes longer than to evict one.
            if near.is_some_and(|near| near.id == evicted) {
                near = self.nearest(scope, tokens);
            }
        }
    }

    /// Evicts and returns an entry if one of this scope that adds so many bytes does not fit.
    fn evict_for(&mut self, scope: u64, added: usize) -> Option<SavedId> {
        if self.held.all().saturating_add(added) <= self.limit {
            return None;
        }
        let id = self.next_evicted(scope, added)?;
        self.evict(id);
        Some(id)
    }

    /// Returns the bytes of the blocks that are of common tokens.
    fn common_bytes(&self, near: SavedMatch) -> usize {
        let blocks = self.state(near.id).map_or(&[][..], PrefixState::blocks);
        let common = blocks.iter().take(near.tokens / BLOCK_TOKENS);
        common.map(|block| block.len()).sum()
    }

    /// Returns what makes room for an entry of so many bytes. Others keep what is in use: their entries that a turnover of the
    /// store has passed by go first.
    fn next_evicted(&self, scope: u64, bytes: usize) -> Option<SavedId> {
        let has_share = self.held.of_scope(scope).saturating_add(bytes) > self.limit / SCOPE_SHARE;
        let mut ids = self.ids_by_value();
        let least = self.by_value.first();
        let is_passed_by = least.is_some_and(|((value, _), _)| *value < self.age);
        let own = self
            .scopes
            .get(&scope)
            .filter(|_| has_share && !is_passed_by);
        let own = own.and_then(|own| own.by_value.first());
        own.map(|&(_, id)| id).or_else(|| ids.next())
    }

    /// Adds an entry and evicts others until all fit. Returns false if it does not fit alone, or is covered already.
    pub(crate) fn insert(&mut self, scope: u64, tokens: &[Token], state: impl Into<S>) -> bool {
        let (tokens, state) = (tokens.into(), state.into());
        self.insert_shared(scope, Arc::new(SavedPrefix { tokens, state }))
    }

    /// The same for an entry that others hold too.
    pub(crate) fn insert_shared(&mut self, scope: u64, prefix: Arc<SavedPrefix<S>>) -> bool {
        let (tokens, state) = (Arc::clone(&prefix.tokens), prefix.state.bytes());
        let blocks = prefix.state.blocks().iter().map(|block| block.len());
        let alone = bytes_of(tokens.len(), prefix.state.own_bytes()) + blocks.sum::<usize>();
        if tokens.is_empty() || alone > self.limit || self.covers(scope, &tokens) {
            return false;
        }
        // No entry is the beginning of another, so the one that these tokens make redundant comes directly before them.
        while self.partial
            && let Some(id) = self.beginning_of(scope, &tokens)
        {
            self.take_out(id, true);
        }
        while self.evict_for(scope, self.held.added_by(&prefix)).is_some() {}
        self.held.add(scope, &prefix);
        let id = self.next;
        self.next += 1;
        let value = self.value(tokens.len(), state);
        let of_scope = self.scopes.entry(scope).or_default();
        of_scope.by_tokens.insert(tokens, id);
        of_scope.by_value.insert((value, id));
        self.by_value.insert((value, id));
        let entry = StoredPrefix {
            scope,
            prefix,
            value,
        };
        self.entries.insert(id, entry);
        true
    }

    /// Returns the entry that shares most of its first tokens with these.
    pub(crate) fn find(&self, scope: u64, tokens: &[Token]) -> Option<SavedMatch> {
        if self.partial {
            self.nearest(scope, tokens)
        } else {
            self.longest_whole(scope, tokens)
        }
    }

    /// Puts an equal state in the place of that of an entry.
    pub(crate) fn replace_state(&mut self, id: SavedId, state: S) {
        if let Some(entry) = self.entries.get_mut(&id) {
            self.held.remove(entry.scope, &entry.prefix);
            let tokens = Arc::clone(&entry.prefix.tokens);
            entry.prefix = Arc::new(SavedPrefix { tokens, state });
            self.held.add(entry.scope, &entry.prefix);
        }
    }

    /// Returns how many of these tokens an entry begins with.
    pub(crate) fn common_tokens(&self, scope: u64, tokens: &[Token]) -> usize {
        let longest = self.nearest(scope, tokens);
        longest.map_or(0, |found| found.tokens)
    }

    /// Returns the entry that shares most of its first tokens with these, whether or not it can be used for them.
    pub(crate) fn nearest(&self, scope: u64, tokens: &[Token]) -> Option<SavedMatch> {
        let of_scope = self.scopes.get(&scope)?;
        let before = of_scope
            .range(Bound::Unbounded, Bound::Excluded(tokens))
            .next_back();
        let behind = of_scope
            .range(Bound::Included(tokens), Bound::Unbounded)
            .next();
        let matches = before
            .into_iter()
            .chain(behind)
            .map(|(saved, &id)| SavedMatch {
                id,
                tokens: common_prefix(saved, tokens),
                saved: saved.len(),
            });
        let common = matches.filter(|found| found.tokens > 0);
        // Of equally long ones the shorter entry: less is copied.
        common.max_by_key(|found| (found.tokens, std::cmp::Reverse(found.saved)))
    }

    fn longest_whole(&self, scope: u64, tokens: &[Token]) -> Option<SavedMatch> {
        let id = self.beginning_of(scope, tokens)?;
        let saved = self.entries.get(&id)?.prefix.tokens.len();
        Some(SavedMatch {
            id,
            tokens: saved,
            saved,
        })
    }

    /// Returns the longest entry with which these tokens begin.
    fn beginning_of(&self, scope: u64, tokens: &[Token]) -> Option<SavedId> {
        let of_scope = self.scopes.get(&scope)?;
        let mut until = tokens;
        // Each round is shorter: whatever lies between a beginning and these tokens shares the beginning with them. With many
        // entries that differ from these tokens one after another, a shorter beginning is not worth the search.
        for _ in 0..ROUNDS_MAX {
            let before = of_scope
                .range(Bound::Unbounded, Bound::Included(until))
                .next_back();
            let (saved, &id) = before?;
            let common = common_prefix(saved, until);
            if common == saved.len() {
                return Some(id);
            }
            until = &until[..common];
        }
        None
    }

    /// Returns the tokens of an entry.
    pub(crate) fn tokens(&self, id: SavedId) -> Option<&[Token]> {
        self.entries.get(&id).map(|stored| &*stored.prefix.tokens)
    }

    /// Returns the state of an entry.
    pub(crate) fn state(&self, id: SavedId) -> Option<&S> {
        self.entries.get(&id).map(|stored| &stored.prefix.state)
    }

    /// Returns an entry that still exists, and marks it as used.
    pub(crate) fn get(&mut self, id: SavedId) -> Option<Arc<SavedPrefix<S>>> {
        self.touch(id);
        self.entries
            .get(&id)
            .map(|stored| Arc::clone(&stored.prefix))
    }

    /// Removes an entry, and returns it.
    pub(crate) fn remove(&mut self, id: SavedId) -> Option<ScopedPrefix<S>> {
        let entry = self.entries.remove(&id)?;
        self.by_value.remove(&(entry.value, id));
        self.held.remove(entry.scope, &entry.prefix);
        if let Some(of_scope) = self.scopes.get_mut(&entry.scope) {
            of_scope.by_tokens.remove(&entry.prefix.tokens);
            of_scope.by_value.remove(&(entry.value, id));
            if of_scope.by_tokens.is_empty() {
                self.scopes.remove(&entry.scope);
            }
        }
        Some((entry.scope, entry.prefix))
    }

    fn evict(&mut self, id: SavedId) {
        if let Some(entry) = self.entries.get(&id) {
            self.age = entry.value.0.max(self.age);
        }
        self.take_out(id, false);
    }

    fn take_out(&mut self, id: SavedId, superseded: bool) {
        let removed = self.remove(id);
        self.evicted
            .extend(removed.map(|(scope, prefix)| EvictedEntry {
                scope,
                prefix,
                superseded,
            }));
    }

    fn touch(&mut self, id: SavedId) {
        let Some(entry) = self.entries.get(&id) else {
            return;
        };
        let prefix = Arc::clone(&entry.prefix);
        let value = self.value(prefix.tokens.len(), prefix.state.bytes());
        if let Some(entry) = self.entries.get_mut(&id) {
            let of_scope = self.scopes.get_mut(&entry.scope);
            let of_scope = of_scope.map(|it| &mut it.by_value);
            for by_value in of_scope.into_iter().chain([&mut self.by_value]) {
                by_value.remove(&(entry.value, id));
                by_value.insert((value, id));
            }
            entry.value = value;
        }
    }

    fn value(&mut self, tokens: usize, state: usize) -> EntryValue {
        self.uses += 1;
        // Tokens for each MiB; the age keeps what was valuable long ago from staying for ever.
        let saves = (tokens as u64).saturating_mul(1 << 20) / (state as u64).max(1);
        (self.age.saturating_add(saves), self.uses)
    }
}

/// Returns what an entry takes of the limit of its store.
pub(crate) fn bytes_of(tokens: usize, state: usize) -> usize {
    state + tokens * size_of::<Token>() + ENTRY_BYTES
}

#[cfg(test)]
mod tests;
