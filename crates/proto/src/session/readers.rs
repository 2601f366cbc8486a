//! The readers of a session: their cursors, what each waits for, and the budget of visits that they share.
//!
//! A visit is one step of a walk through the graph: from a node to a child of it. Content of a few bytes can reference
//! itself into billions of visits, so the session has a budget of them per second (EV-306), from which reads and searches
//! are paid alike.
//!
//! A reader that waits is parked at a node until that grows, or starved until the budget of visits is refilled; never
//! both. Each parked cursor is listed by exactly one node (`waiters`), so that a node that grows wakes its
//! readers without a search.
//!
//! ```text
//!   open ──read──► reading ──no content yet──► parked ──the node grows──► ready (the shell is notified)
//!                     └────budget used up──► starved ──refill──► ready
//! ```

pub(super) mod budget;
pub(super) mod cursor;
pub(super) mod slice;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use smallvec::SmallVec;

use self::budget::ReadBudget;
use self::cursor::{CursorStep, TreeCursor};
use super::graph::{Graph, NodeProducer};
use super::lifecycle::Lifecycle;
use super::port::{ActionKey, CursorId, NodeKey, SessionOutput};
use super::slab::{Slab, SlabKey};
use crate::evergreen::{SessionLimits, Status};
use crate::time::Time;

/// The batches of dropped nodes that a reader held.
pub(super) type HeldBatches = SmallVec<[SlabKey; 1]>;

/// All readers; see the module documentation.
#[derive(Debug)]
pub(super) struct Readers {
    cursors: Slab<TreeCursor>,
    /// Number of parked cursors.
    parked: usize,
    /// The visits that readers and searches may still make; see the module documentation.
    pub(super) budget: ReadBudget,
    /// Readers that wait for that budget to refill.
    starved: Vec<CursorId>,
    /// Actions that wait for nothing but their cursors, as the shell reports (D-3).
    waiting: BTreeSet<ActionKey>,
    /// Whether the session can go on with an input that it reads itself: that of a reserved action (`InputLeaf`).
    own_ready: bool,
    /// Whether it has used up the visits of this turn, and continues such an input in the next one.
    own_paused: bool,
}

impl Readers {
    pub(super) fn new(limits: &SessionLimits, now: Time) -> Self {
        Self {
            cursors: Slab::default(),
            parked: 0,
            budget: ReadBudget::new(limits, now),
            starved: Vec::new(),
            waiting: BTreeSet::new(),
            own_ready: false,
            own_paused: false,
        }
    }

    /// Opens a cursor at the first item of `root`.
    pub(super) fn open(&mut self, root: NodeKey, reader: Option<ActionKey>) -> CursorId {
        CursorId(self.cursors.insert(TreeCursor::new(root, reader)))
    }

    pub(super) fn get(&self, id: CursorId) -> Option<&TreeCursor> {
        self.cursors.get(id.0)
    }

    pub(super) fn get_mut(&mut self, id: CursorId) -> Option<&mut TreeCursor> {
        self.cursors.get_mut(id.0)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (CursorId, &TreeCursor)> + Clone {
        let cursors = self.cursors.iter();
        cursors.map(|(key, cursor)| (CursorId(key), cursor))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut TreeCursor> {
        self.cursors.iter_mut()
    }

    pub(super) const fn len(&self) -> usize {
        self.cursors.len()
    }

    /// Number of parked cursors.
    pub(super) const fn parked(&self) -> usize {
        self.parked
    }

    /// Advances a cursor by one step; `None` while it waits. `cycles`: some edges were not searched for
    /// cycles. `over`: the session is finished.
    pub(super) fn step(
        &mut self,
        id: CursorId,
        graph: &mut Graph,
        cycles: bool,
        over: bool,
    ) -> Option<CursorStep> {
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return Some(CursorStep::End);
        };
        // A failure is final: what the reader has missed is not read later (`CursorRead::Failed`).
        if let Some(status) = &cursor.failed {
            return Some(CursorStep::Fail(Arc::clone(status)));
        }
        if cursor.parked.is_some() || cursor.starved && !over {
            return None;
        }
        if over {
            // No more time passes for a closed session, so its budget would never refill.
            self.budget.lift();
        }
        Some(cursor.step(graph, cycles, &mut self.budget))
    }

    /// Makes a cursor wait until this node grows.
    pub(super) fn park(&mut self, id: CursorId, node: NodeKey, graph: &mut Graph) {
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.parked = Some(node);
            self.parked += 1;
            graph.get_mut(node).waiters.push(id);
        }
    }

    /// Wakes the cursors that wait for this node, because it has grown.
    pub(super) fn wake(&mut self, node: NodeKey, graph: &mut Graph, lifecycle: &mut Lifecycle) {
        if graph.get(node).waiters.is_empty() {
            return;
        }
        // Taken, so that each is notified once; a reader that finds too little parks again.
        for cursor in std::mem::take(&mut graph.get_mut(node).waiters) {
            self.ready(cursor, lifecycle);
        }
    }

    /// Marks a waiting cursor as ready; its node lists it no more.
    fn ready(&mut self, id: CursorId, lifecycle: &mut Lifecycle) {
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return;
        };
        if cursor.parked.take().is_some() {
            self.parked -= 1;
        }
        if let Some(reader) = cursor.reader {
            // What the shell has reported is out of date: one of the action's cursors can go on.
            self.waiting.remove(&reader);
        }
        if cursor.ours {
            self.own_ready = true;
        } else {
            lifecycle.emit(SessionOutput::Ready(id));
        }
    }

    /// Makes a cursor wait until the budget of visits is refilled.
    pub(super) fn starve(&mut self, id: CursorId, lifecycle: &mut Lifecycle) {
        if let Some(cursor) = self.cursors.get_mut(id.0) {
            cursor.starved = true;
            self.starved.push(id);
            // The refill of the budget may be the earliest timer now.
            lifecycle.emit(SessionOutput::Timed);
        }
    }

    /// Fails a cursor for good. Returns the dropped nodes that it held.
    pub(super) fn fail(
        &mut self,
        id: CursorId,
        status: Arc<Status>,
        graph: &mut Graph,
    ) -> HeldBatches {
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return HeldBatches::new();
        };
        cursor.failed = Some(status);
        // It reads nothing more, so nodes and dropped batches are not retained for it any longer.
        cursor.abandon(graph);
        std::mem::take(&mut cursor.holds)
    }

    /// Wakes a parked cursor that has failed.
    pub(super) fn wake_failed(
        &mut self,
        id: CursorId,
        node: NodeKey,
        graph: &mut Graph,
        lifecycle: &mut Lifecycle,
    ) {
        let waiters = &mut graph.get_mut(node).waiters;
        waiters.retain(|waiter| *waiter != id);
        self.ready(id, lifecycle);
    }

    /// Closes a cursor. Returns the dropped nodes that it held. Closing twice does nothing.
    pub(super) fn close(&mut self, id: CursorId, graph: &mut Graph) -> HeldBatches {
        let Some(mut cursor) = self.cursors.remove(id.0) else {
            return HeldBatches::new();
        };
        cursor.abandon(graph);
        if cursor.starved {
            self.starved.retain(|starved| *starved != id);
        }
        if let Some(node) = cursor.parked {
            self.parked -= 1;
            let waiters = &mut graph.get_mut(node).waiters;
            waiters.retain(|waiter| *waiter != id);
        }
        cursor.holds
    }

    /// Whether the session can go on with an input of its own; resets the answer.
    pub(super) const fn take_own_ready(&mut self) -> bool {
        std::mem::replace(&mut self.own_ready, false)
    }

    /// Continues the session's own inputs in the next turn.
    pub(super) fn pause_own(&mut self, lifecycle: &mut Lifecycle) {
        self.own_paused = true;
        lifecycle.emit(SessionOutput::Timed);
    }

    /// When starved readers, or paused inputs of the session's own, can continue.
    pub(super) fn wake_at(&self, limits: &SessionLimits, now: Time) -> Option<Time> {
        if self.own_paused {
            return Some(now);
        }
        (!self.starved.is_empty()).then(|| self.budget.enough_at(limits))
    }

    /// Refills the budget, and wakes the starved readers if it has enough for them.
    pub(super) fn refill(&mut self, limits: &SessionLimits, now: Time, lifecycle: &mut Lifecycle) {
        self.budget.refill(limits, now);
        if std::mem::take(&mut self.own_paused) {
            self.own_ready = true;
            // A turn is begun by the task that reads; the session's own inputs have none.
            self.budget.begin_turn();
        }
        if self.starved.is_empty() || !self.budget.is_enough(limits) {
            return;
        }
        for id in std::mem::take(&mut self.starved) {
            if let Some(cursor) = self.cursors.get_mut(id.0) {
                cursor.starved = false;
                self.ready(id, lifecycle);
            }
        }
    }

    /// Number of starved readers.
    #[cfg(test)]
    pub(super) const fn starved(&self) -> usize {
        self.starved.len()
    }

    /// Records whether an action waits for nothing but its cursors. A cursor that becomes ready resets this by itself.
    pub(super) fn set_waiting(&mut self, action: ActionKey, waiting: bool) {
        if waiting {
            self.waiting.insert(action);
        } else {
            self.waiting.remove(&action);
        }
    }

    /// Number of actions that wait for nothing but their cursors.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The actions that wait for nothing but their cursors.
    #[cfg(any(test, fuzzing))]
    pub(super) fn waiting_actions(&self) -> impl Iterator<Item = ActionKey> {
        self.waiting.iter().copied()
    }

    /// The cursors of actions that wait only for one another's outputs, with the node that each is parked at (D-3).
    pub(super) fn deadlocked(&self, graph: &Graph) -> Vec<(CursorId, NodeKey)> {
        let stuck = self.stuck_actions(graph);
        let mut found = Vec::new();
        for (id, cursor) in self.iter() {
            if let (Some(reader), Some(node)) = (cursor.reader, cursor.parked)
                && stuck.contains(&reader)
            {
                found.push((id, node));
            }
        }
        found
    }

    /// The largest set of actions that each wait only for outputs of others in the set. It is what remains after every
    /// action that can go on, and every action that waits for one that can, has been taken out.
    fn stuck_actions(&self, graph: &Graph) -> HashSet<ActionKey> {
        let mut readers_of: HashMap<ActionKey, Vec<ActionKey>> = HashMap::new();
        let mut stuck: HashSet<ActionKey> = HashSet::new();
        let mut live: Vec<ActionKey> = Vec::new();
        for (_, cursor) in self.iter() {
            let Some(reader) = cursor.reader else {
                continue;
            };
            let Some(node) = cursor.parked else {
                // It goes on by itself, once the budget is refilled.
                live.extend(cursor.starved.then_some(reader));
                continue;
            };
            match graph.get(node).owner {
                NodeProducer::Local(Some(producer)) => {
                    readers_of.entry(producer).or_default().push(reader);
                    stuck.insert(reader);
                }
                // The peer, or a writer that is no action, may still write this node.
                _ => live.push(reader),
            }
        }
        // An action that is parked at a cursor but has other work can still write its outputs (D-3).
        let waits = |key: &ActionKey| self.waiting.contains(key);
        let producers = readers_of.keys().chain(&stuck);
        live.extend(producers.filter(|&key| !waits(key) || !stuck.contains(key)));
        // An action that waits for a live action is live.
        while let Some(key) = live.pop() {
            stuck.remove(&key);
            live.extend(readers_of.remove(&key).unwrap_or_default());
        }
        stuck
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evergreen::{Fragment, MetadataMode};
    use crate::session::graph::accept::AcceptanceRules;
    use crate::session::port::Config;
    use crate::session::tests::harness::{T0, leaf, more};

    fn machines() -> (Graph, Readers, Lifecycle) {
        let config = Config::default();
        let readers = Readers::new(&config.limits, T0);
        (Graph::new(&config), readers, Lifecycle::default())
    }

    fn receive(graph: &mut Graph, fragment: Fragment) {
        let rules = AcceptanceRules {
            mode: MetadataMode::Lenient,
            references: false,
            copy_below: 0,
        };
        graph.accept(fragment, rules).unwrap();
    }

    #[test]
    fn ev_303_a_parked_reader_is_notified_once_that_its_node_has_grown() {
        let (mut graph, mut readers, mut lifecycle) = machines();
        let node = graph.mention("n").unwrap();
        let reader = readers.open(node, None);
        let step =
            |readers: &mut Readers, graph: &mut Graph| readers.step(reader, graph, false, false);
        let Some(CursorStep::Park(at)) = step(&mut readers, &mut graph) else {
            panic!("there is nothing to read");
        };
        readers.park(reader, at, &mut graph);
        assert!(step(&mut readers, &mut graph).is_none(), "it waits");
        receive(&mut graph, more("n", 0, "a"));
        receive(&mut graph, leaf("n", 1, "b"));
        readers.wake(node, &mut graph, &mut lifecycle);
        readers.wake(node, &mut graph, &mut lifecycle);
        assert!(matches!(
            lifecycle.poll(),
            Some(SessionOutput::Ready(id)) if id == reader
        ));
        assert!(lifecycle.poll().is_none());
        assert_eq!(readers.parked(), 0);
        let piece = step(&mut readers, &mut graph);
        assert!(matches!(piece, Some(CursorStep::Piece(piece)) if &piece.data[..] == b"a"));
    }

    #[test]
    fn a_closed_reader_is_removed_from_the_node_that_it_waited_for() {
        let (mut graph, mut readers, mut lifecycle) = machines();
        let node = graph.mention("n").unwrap();
        let reader = readers.open(node, None);
        readers.park(reader, node, &mut graph);
        readers.close(reader, &mut graph);
        readers.close(reader, &mut graph);
        assert_eq!(readers.parked(), 0);
        assert!(graph.get(node).waiters.is_empty());
        readers.wake(node, &mut graph, &mut lifecycle);
        assert!(lifecycle.poll().is_none());
    }
}
