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
    edges_left: &'a mut u32,
    /// Whether the walk has skipped something for lack of budget.
    cut: bool,
}

impl<'a> Closure<'a> {
    /// A walk that begins with the edges `roots`; `edges_left` is its budget.
    pub(in crate::session) fn new(
        graph: &'a Graph,
        roots: impl IntoIterator<Item = Option<NodeKey>>,
        edges_left: &'a mut u32,
    ) -> Self {
        let mut walk = Self {
            graph,
            seen: HashSet::with_hasher(graph.hasher()),
            stack: Vec::new(),
            edges_left,
            cut: false,
        };
        walk.follow(roots);
        walk
    }

    /// Skips the nodes in `covered`.
    pub(in crate::session) fn beside(mut self, covered: HashSet<NodeKey, RandomState>) -> Self {
        self.seen = covered;
        self
    }

    /// Collects every node of the walk; `None` if something was skipped.
    pub(in crate::session) fn into_all(mut self) -> Option<HashSet<NodeKey, RandomState>> {
        while self.next().is_some() {}
        (!self.cut).then_some(self.seen)
    }

    /// Whether one of the nodes is `wanted`, or may be: something was skipped.
    pub(in crate::session) fn may_reach(mut self, wanted: impl Fn(NodeKey) -> bool) -> bool {
        self.any(wanted) || self.cut
    }

    fn follow(&mut self, edges: impl IntoIterator<Item = Option<NodeKey>>) {
        let first = self.stack.len();
        for edge in edges {
            let Some(left) = self.edges_left.checked_sub(1) else {
                self.cut = true;
                break;
            };
            // Charged before the filter: an edge to a node that was seen costs a look-up too.
            *self.edges_left = left;
            self.stack
                .extend(edge.filter(|child| !self.seen.contains(child)));
        }
        // The leftmost child is visited first.
        self.stack[first..].reverse();
    }
}

impl Iterator for Closure<'_> {
    type Item = NodeKey;

    fn next(&mut self) -> Option<NodeKey> {
        while let Some(key) = self.stack.pop() {
            if self.seen.insert(key) {
                let graph = self.graph;
                self.follow(graph.get(key).edges());
                return Some(key);
            }
        }
        None
    }
}
