//! The state after the peer's half-close: which content can no longer arrive, and which readers would wait for ever
//! (EV-109, EV-110, D-3).

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;

use super::ask::unanswered;
use super::closure::Closure;
use super::port::{ActionKey, CursorId, NodeKey, SessionOutput, Side};
use super::resume::LinkState;
use super::store::NodeProducer;
use super::{SessionMachine, SessionPhase};
use crate::evergreen::{Reason, Status};

impl SessionMachine {
    pub(super) fn half_close(&mut self) {
        self.phase = SessionPhase::HalfClosed;
        self.stop_asking();
        self.fail_stuck_readers();
        self.look_for_deadlock();
        self.close_if_finished();
    }

    /// Fails every reader that waits for content that can no longer arrive.
    fn fail_stuck_readers(&mut self) {
        let stuck: Vec<(CursorId, NodeKey, NodeKey)> = self
            .cursors
            .iter()
            .filter_map(|(key, cursor)| Some((CursorId(key), cursor.parked?, cursor.root)))
            .filter(|(_, node, _)| self.can_never_grow(*node))
            .collect();
        // Readers of the same root get the same status, so it is computed once per root.
        let mut known: HashMap<NodeKey, Arc<Status>> = HashMap::new();
        for (id, node, root) in stuck {
            let status = known.entry(root).or_insert_with(|| self.incomplete(root));
            let status = Arc::clone(status);
            self.fail_parked(id, node, status);
        }
    }

    /// Whether a node can receive no more content.
    pub(super) fn can_never_grow(&self, node: NodeKey) -> bool {
        self.phase != SessionPhase::Open && (self.ending || !self.store.get(node).owner.is_local())
    }

    /// The error of a reader of `root` that cannot continue, with the missing nodes.
    pub(super) fn incomplete(&self, root: NodeKey) -> Arc<Status> {
        if let Some(status) = &self.close_status {
            return Arc::clone(status);
        }
        if self.is_expected(root) {
            return Arc::new(unanswered());
        }
        let missing = self.missing(root);
        let (reason, mut message) = match self.side {
            Side::Server => (
                Reason::IncompleteInput,
                "the input ended and is incomplete; missing:".to_owned(),
            ),
            Side::Client => (
                Reason::Truncated,
                "the stream ended without its final fragment; missing:".to_owned(),
            ),
        };
        for item in &missing {
            let _ = write!(message, " {item}");
        }
        if let Some((node, seq)) = self.repeated(root) {
            let _ = write!(
                message,
                "; of two different fragments of node {node:?} with seq {seq} the first counts: number them 0, 1, 2 …"
            );
        }
        let status = Status::new(reason, message);
        let first = missing.into_iter().next().unwrap_or_default();
        Arc::new(
            status
                .with("node", &self.store.get(root).id)
                .with("value", first),
        )
    }

    /// The first node below `root` for which two different fragments had the same seq.
    fn repeated(&self, root: NodeKey) -> Option<(&str, u32)> {
        let mut nodes = Closure::new(&self.store, [root]).take(MISSING_VISITS);
        nodes.find_map(|key| {
            let node = self.store.get(key);
            Some((&*node.id, node.repeated?))
        })
    }

    /// Up to 16 missing `id` or `id@seq` below a node, in reading order as far as that is known.
    fn missing(&self, root: NodeKey) -> Vec<String> {
        let nodes = Closure::new(&self.store, [root]).take(MISSING_VISITS);
        let open = nodes
            .map(|key| self.store.get(key))
            .filter(|node| !node.is_complete() && !node.owner.is_local());
        let named = open.map(|node| match node.highest() {
            Some(_) => format!("{}@{}", node.id, node.next_seq()),
            None => node.id.to_string(),
        });
        named.take(MISSING_NAMED).collect()
    }

    /// Fails the cursors of actions that only wait for each other's outputs (D-3).
    pub(super) fn look_for_deadlock(&mut self) {
        if self.phase != SessionPhase::HalfClosed || self.parked == 0 {
            return;
        }
        let stuck = self.stuck_actions();
        let cursors: Vec<(CursorId, NodeKey)> = self
            .cursors
            .iter()
            .filter(|(_, cursor)| cursor.reader.is_some_and(|reader| stuck.contains(&reader)))
            .filter_map(|(key, cursor)| Some((CursorId(key), cursor.parked?)))
            .collect();
        for (id, node) in cursors {
            let message = format!(
                "actions wait for one another's outputs, here for node {:?}; nothing more can come",
                self.store.get(node).id
            );
            let status =
                Status::new(Reason::Deadlock, message).with("node", &self.store.get(node).id);
            self.fail_parked(id, node, Arc::new(status));
        }
    }

    /// The largest set of actions that each wait only for outputs of others in the set.
    fn stuck_actions(&self) -> HashSet<ActionKey> {
        let mut readers_of: HashMap<ActionKey, Vec<ActionKey>> = HashMap::new();
        let mut stuck: HashSet<ActionKey> = HashSet::new();
        let mut live: Vec<ActionKey> = Vec::new();
        for (_, cursor) in self.cursors.iter() {
            let (Some(reader), Some(node)) = (cursor.reader, cursor.parked) else {
                continue;
            };
            match self.store.get(node).owner {
                NodeProducer::Local(Some(producer)) => {
                    readers_of.entry(producer).or_default().push(reader);
                    stuck.insert(reader);
                }
                _ => live.push(reader),
            }
        }
        let waits = |key: &ActionKey| self.actions.get(*key).is_some_and(|entry| entry.waiting);
        live.extend(
            readers_of
                .keys()
                .chain(&stuck)
                .filter(|&key| !waits(key) || !stuck.contains(key)),
        );
        // An action that waits for a live action is live.
        while let Some(key) = live.pop() {
            stuck.remove(&key);
            live.extend(readers_of.remove(&key).unwrap_or_default());
        }
        stuck
    }

    pub(super) fn fail_parked(&mut self, id: CursorId, node: NodeKey, status: Arc<Status>) {
        self.fail_read(id, status);
        self.store
            .get_mut(node)
            .waiters
            .retain(|waiter| *waiter != id);
        self.ready(id);
    }

    /// EV-109: closes the session once every action is finished and every output is sent.
    pub(super) fn close_if_finished(&mut self) {
        if self.phase != SessionPhase::HalfClosed {
            return;
        }
        let done = match self.side {
            Side::Server => {
                self.actions.len() == 0 && self.outbound.is_empty() && self.line() == LinkState::Up
            }
            // The server has ended, so a client has no peer to send to.
            Side::Client => true,
        };
        if done {
            self.ending = true;
            self.fail_stuck_readers();
            self.emit(SessionOutput::Close(None));
            self.phase = SessionPhase::Finished;
        }
    }
}

/// Number of missing items that an error names (EV-110).
const MISSING_NAMED: usize = 16;
/// Number of nodes that the search for them visits.
const MISSING_VISITS: usize = 10_000;
