//! Detects cycles of nodes, within a budget.

use super::{Graph, NodeProducer};
use crate::evergreen::{Reason, SessionLimits, Status};
use crate::session::port::{ActionKey, NodeKey};
use crate::session::readers::budget::ReadBudget;

/// The search for cycles: its marks, and what this message may still spend on it.
#[derive(Debug, Default)]
pub(in crate::session) struct Search {
    /// For each node, the epoch of the search that visited it last. Only grows when there is something to search.
    marks: Vec<u32>,
    epoch: u32,
    stack: Vec<NodeKey>,
    pub(in crate::session) edges_left: u32,
    /// Edges that this message was granted.
    granted: u32,
    /// Whether a search was cut short, so that readers have to detect cycles themselves.
    pub(in crate::session) incomplete: bool,
}

impl Search {
    /// Grants the budget of a new message, as far as the session's budget allows.
    pub(in crate::session) fn refill(&mut self, limits: &SessionLimits, work: &mut ReadBudget) {
        // What was used since the last message, as when an action ended.
        self.settle(work);
        self.granted = limits.cycle_edges_per_message.min(work.left());
        self.edges_left = self.granted;
    }

    /// Charges the edges followed for this message to the session's budget.
    pub(in crate::session) fn settle(&mut self, work: &mut ReadBudget) {
        work.charge(self.granted - self.edges_left);
        // What is left is not charged now: drops between two messages, as when an action ends, search with it.
        self.granted = self.edges_left;
    }

    /// Searches for a cycle through the new edges from `parent` to `children`. Returns the actions of the peer whose
    /// outputs are below the new edges: their inputs may reach these outputs now (EV-308).
    pub(in crate::session) fn edges(
        &mut self,
        parent: NodeKey,
        children: &[NodeKey],
        graph: &mut Graph,
    ) -> Result<Vec<ActionKey>, Status> {
        // Found without a search, and so also with no budget left.
        if children.contains(&parent) {
            return Err(cycle(graph, parent));
        }
        let mut producers = Vec::new();
        // An unreferenced node cannot be below one of its own children.
        if graph.get(parent).referenced {
            let below: Vec<NodeKey> = children
                .iter()
                .copied()
                .filter(|&child| needs_search(graph, child))
                .collect();
            let found = self.walk(&below, graph, |graph, node| {
                // A parent that nothing references is not below an input either, so only this search can meet such
                // outputs.
                if let NodeProducer::Local(Some(action)) = graph.get(node).owner {
                    producers.push(action);
                }
                node == parent
            });
            if found {
                return Err(cycle(graph, parent));
            }
        }
        for &child in children {
            graph.get_mut(child).referenced = true;
        }
        producers.sort_unstable();
        producers.dedup();
        Ok(producers)
    }

    /// The first of `outputs` that is in the closure of `inputs`, as far as the budget allows (EV-308).
    pub(in crate::session) fn reached(
        &mut self,
        inputs: &[NodeKey],
        outputs: &[NodeKey],
        graph: &Graph,
    ) -> Option<NodeKey> {
        // Charged as edges are: one new edge may cause searches from the inputs of many actions.
        let count = u32::try_from(inputs.len()).unwrap_or(u32::MAX);
        let Some(left) = self.edges_left.checked_sub(count) else {
            self.incomplete = true;
            return None;
        };
        self.edges_left = left;
        let mut output = None;
        self.walk(inputs, graph, |_, node| {
            output = outputs.contains(&node).then_some(node);
            output.is_some()
        });
        output
    }

    /// Whether `wanted` holds for a node in the closure of `roots`, as far as the budget allows.
    fn walk(
        &mut self,
        roots: &[NodeKey],
        graph: &Graph,
        mut wanted: impl FnMut(&Graph, NodeKey) -> bool,
    ) -> bool {
        if roots.is_empty() {
            return false;
        }
        self.begin(graph.capacity());
        self.stack.clear();
        self.stack.extend_from_slice(roots);
        let mut visits = graph.limits().cycle_visits;
        while let Some(node) = self.stack.pop() {
            let mark = &mut self.marks[node.index as usize];
            if std::mem::replace(mark, self.epoch) == self.epoch {
                continue;
            }
            if wanted(graph, node) {
                return true;
            }
            // Two bounds: `visits` on one search (EV-217), `edges_left` on all searches of the message (D-27).
            let Some(left) = visits.checked_sub(1) else {
                self.incomplete = true;
                return false;
            };
            visits = left;
            for child in graph.get(node).edges() {
                let Some(left) = self.edges_left.checked_sub(1) else {
                    self.incomplete = true;
                    return false;
                };
                self.edges_left = left;
                self.stack.extend(child);
            }
        }
        false
    }

    fn begin(&mut self, nodes: usize) {
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 {
            // After 2^32 searches the epoch wraps, and old marks would look like new ones.
            self.marks.fill(0);
            self.epoch = 1;
        }
        self.marks.resize(nodes, 0);
    }
}

/// Whether there can be nodes below this one, or it is an output itself.
fn needs_search(graph: &Graph, node: NodeKey) -> bool {
    let node = graph.get(node);
    node.kind.lists() || matches!(node.owner, NodeProducer::Local(Some(_)))
}

fn cycle(graph: &Graph, node: NodeKey) -> Status {
    let id = &graph.get(node).id;
    Status::new(Reason::Cycle, format!("node {id:?} contains itself")).with("node", id)
}
