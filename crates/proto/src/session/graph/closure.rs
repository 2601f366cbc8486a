//! Walks all nodes below a set of roots, each once, within a budget.
//!
//! A peer may list the same children a million times, so the budget counts edges, not only nodes.

use std::collections::HashSet;

use ahash::RandomState;

use super::Graph;
use crate::session::port::NodeKey;

/// The walk. It ends early when its budget is used up.
pub(in crate::session) struct Closure<'a> {
    graph: &'a Graph,
    seen: HashSet<NodeKey, RandomState>,
    stack: Vec<NodeKey>,
    edges_left: usize,
    /// Whether the walk has skipped something for lack of budget.
    cut: bool,
}

impl<'a> Closure<'a> {
    pub(in crate::session) fn new(
        graph: &'a Graph,
        roots: impl IntoIterator<Item = NodeKey>,
    ) -> Self {
        Self {
            graph,
            seen: HashSet::with_hasher(graph.hasher()),
            stack: roots.into_iter().collect(),
            edges_left: EDGES,
            cut: false,
        }
    }

    /// All nodes below `roots` that are not in `covered`, without a budget: for callers that follow each edge only once
    /// in its lifetime.
    pub(in crate::session) fn beside(
        graph: &'a Graph,
        roots: impl IntoIterator<Item = NodeKey>,
        covered: HashSet<NodeKey, RandomState>,
    ) -> Self {
        Self {
            seen: covered,
            edges_left: usize::MAX,
            ..Self::new(graph, roots)
        }
    }

    /// Collects every node of the walk; `None` if something was skipped.
    pub(in crate::session) fn into_all(mut self) -> Option<HashSet<NodeKey, RandomState>> {
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
            // Charged before the filter: an edge to a node that was seen costs a look-up too.
            let (seen, edges_left) = (&self.seen, &mut self.edges_left);
            let edges = self.graph.get(key).edges().take(*edges_left);
            self.stack.extend(
                edges
                    .inspect(|_| *edges_left -= 1)
                    .flatten()
                    .filter(|child| !seen.contains(child)),
            );
            // Also when the last edge used up the budget exactly: a caller may take a whole walk for a cut one, not the
            // reverse.
            self.cut |= self.edges_left == 0;
            // The leftmost child is visited first.
            self.stack[first..].reverse();
            return Some(key);
        }
    }
}

/// Number of edges that one walk follows.
const EDGES: usize = 262_144;
