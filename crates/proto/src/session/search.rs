//! Detects cycles of nodes, within a budget.

use super::actions::Actions;
use super::port::{ActionKey, NodeKey};
use super::store::{NodeKind, NodeProducer, Store};
use super::work::ReadBudget;
use crate::evergreen::{Reason, SessionLimits, Status};

#[derive(Debug, Default)]
pub(super) struct Search {
    /// For each node, the epoch of the search that visited it last. Only grows when there is something to search.
    marks: Vec<u32>,
    epoch: u32,
    stack: Vec<NodeKey>,
    pub(super) edges_left: u32,
    /// Edges that this message was granted.
    granted: u32,
    /// Whether a search was cut short, so that readers have to detect cycles themselves.
    pub(super) incomplete: bool,
}

impl Search {
    /// Grants the budget of a new message, as far as the session's budget allows.
    pub(super) fn refill(&mut self, limits: &SessionLimits, work: &ReadBudget) {
        self.granted = limits.cycle_edges_per_message.min(work.left());
        self.edges_left = self.granted;
    }

    /// Charges the edges followed for this message to the session's budget.
    pub(super) fn settle(&mut self, work: &mut ReadBudget) {
        work.charge(self.granted - self.edges_left);
        self.granted = self.edges_left;
    }

    /// Searches for a cycle through the new edges from `parent` to `children`.
    pub(super) fn edges(
        &mut self,
        parent: NodeKey,
        children: &[NodeKey],
        store: &mut Store,
        actions: &Actions,
        limits: &SessionLimits,
    ) -> Result<(), Status> {
        if children.contains(&parent) {
            return Err(cycle(store, parent));
        }
        let mut outputs = Vec::new();
        // An unreferenced node cannot be below one of its own children.
        if store.get(parent).referenced {
            let below: Vec<NodeKey> = children
                .iter()
                .copied()
                .filter(|&child| needs_search(store, child))
                .collect();
            let found = self.walk(&below, store, limits, |store, node| {
                if let NodeProducer::Local(Some(action)) = store.get(node).owner {
                    outputs.push(action);
                }
                node == parent
            });
            if found {
                return Err(cycle(store, parent));
            }
        }
        for &child in children {
            store.get_mut(child).referenced = true;
        }
        outputs.sort_unstable();
        outputs.dedup();
        outputs
            .into_iter()
            .try_for_each(|action| self.action(action, store, actions, limits))
    }

    /// Searches for an output of `action` in the closure of its inputs (EV-308).
    pub(super) fn action(
        &mut self,
        action: ActionKey,
        store: &Store,
        actions: &Actions,
        limits: &SessionLimits,
    ) -> Result<(), Status> {
        let Some(entry) = actions.get(action) else {
            return Ok(());
        };
        let mut output = None;
        let found = self.walk(&entry.inputs, store, limits, |_, node| {
            output = entry.outputs.contains(&node).then_some(node);
            output.is_some()
        });
        if !found {
            return Ok(());
        }
        let id = output
            .map(|node| store.get(node).id.clone())
            .unwrap_or_default();
        let message = format!("action {:?} reads its own output {id:?}", entry.name);
        Err(Status::new(Reason::ActionCycle, message).with("node", id))
    }

    /// Whether `wanted` holds for a node in the closure of `roots`, as far as the budget allows.
    fn walk(
        &mut self,
        roots: &[NodeKey],
        store: &Store,
        limits: &SessionLimits,
        mut wanted: impl FnMut(&Store, NodeKey) -> bool,
    ) -> bool {
        if roots.is_empty() {
            return false;
        }
        self.begin(store.capacity());
        self.stack.clear();
        self.stack.extend_from_slice(roots);
        let mut visits = limits.cycle_visits;
        while let Some(node) = self.stack.pop() {
            let mark = &mut self.marks[node.index as usize];
            if std::mem::replace(mark, self.epoch) == self.epoch {
                continue;
            }
            if wanted(store, node) {
                return true;
            }
            let Some(left) = visits.checked_sub(1) else {
                self.incomplete = true;
                return false;
            };
            visits = left;
            for child in store.get(node).edges() {
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
fn needs_search(store: &Store, node: NodeKey) -> bool {
    let node = store.get(node);
    node.kind == NodeKind::Tree || matches!(node.owner, NodeProducer::Local(Some(_)))
}

fn cycle(store: &Store, node: NodeKey) -> Status {
    let id = &store.get(node).id;
    Status::new(Reason::Cycle, format!("node {id:?} contains itself")).with("node", id)
}
