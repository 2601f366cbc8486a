//! Walks the nodes below some nodes, each once, within a budget.
//!
//! A peer may list the same children a million times, so edges are counted, not nodes alone.

use std::collections::HashSet;

use ahash::RandomState;

use super::port::NodeKey;
use super::store::Store;

/// The walk. It ends early when the budget is used up.
pub(super) struct Closure<'a> {
    store: &'a Store,
    seen: HashSet<NodeKey, RandomState>,
    stack: Vec<NodeKey>,
    edges_left: usize,
    /// Whether something was left out.
    cut: bool,
}

impl<'a> Closure<'a> {
    pub(super) fn new(store: &'a Store, roots: impl IntoIterator<Item = NodeKey>) -> Self {
        Self {
            store,
            seen: HashSet::with_hasher(store.hasher()),
            stack: roots.into_iter().collect(),
            edges_left: EDGES,
            cut: false,
        }
    }

    /// All that lies below `roots` and not in `covered`, without a budget: for what can be done to each edge only once.
    pub(super) fn beside(
        store: &'a Store,
        roots: impl IntoIterator<Item = NodeKey>,
        covered: HashSet<NodeKey, RandomState>,
    ) -> Self {
        Self {
            seen: covered,
            edges_left: usize::MAX,
            ..Self::new(store, roots)
        }
    }

    /// Every node of the walk; `None` if it has left something out.
    pub(super) fn into_all(mut self) -> Option<HashSet<NodeKey, RandomState>> {
        while self.next().is_some() {}
        (!self.cut).then_some(self.seen)
    }
}

impl Iterator for Closure<'_> {
    type Item = NodeKey;

    fn next(&mut self) -> Option<NodeKey> {
        loop {
            let key = self.stack.pop()?;
            if !self.seen.insert(key) {
                continue;
            }
            let first = self.stack.len();
            let (seen, edges_left) = (&self.seen, &mut self.edges_left);
            let edges = self.store.get(key).edges().take(*edges_left);
            self.stack.extend(
                edges
                    .inspect(|_| *edges_left -= 1)
                    .flatten()
                    .filter(|child| !seen.contains(child)),
            );
            self.cut |= self.edges_left == 0;
            // The leftmost child is visited first.
            self.stack[first..].reverse();
            return Some(key);
        }
    }
}

/// Edges that one walk follows.
const EDGES: usize = 262_144;
