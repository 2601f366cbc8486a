//! After the peer's last word: what can no longer come, and who waits for whom (EV-109, EV-110, D-3).
//!
//! Owns: judging cursors that can never go on, and the end of a session that has nothing left to do. Refuses to know:
//! why a function reads what it reads.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

use super::port::{ActionKey, CursorId, NodeKey, Output, Side};
use super::store::{Kind, Owner};
use super::{Phase, Session};
use crate::evergreen::{Reason, Status};

impl Session {
    pub(super) fn half_close(&mut self) {
        self.phase = Phase::HalfClosed;
        if self.side == Side::Client {
            // A server that has ended answers nothing more.
            let asked: Vec<ActionKey> = self
                .actions
                .iter()
                .filter(|(_, entry)| !entry.served)
                .map(|(key, _)| key)
                .collect();
            for key in asked {
                self.actions.remove(key);
            }
        }
        let parked = |cursor: &super::Cursor| cursor.parked;
        let stuck: Vec<(CursorId, NodeKey, NodeKey)> = self
            .cursors
            .iter()
            .filter_map(|(key, cursor)| Some((CursorId(key), parked(cursor)?, cursor.root)))
            .filter(|(_, node, _)| self.can_never_grow(*node))
            .collect();
        for (id, node, root) in stuck {
            let status = self.incomplete(root);
            self.fail_parked(id, node, status);
        }
        self.look_for_deadlock();
        self.close_if_finished();
    }

    /// Whether a node will stay as it is for ever.
    pub(super) fn can_never_grow(&self, node: NodeKey) -> bool {
        let ours = self.store.get(node).owner.is_local();
        self.phase != Phase::Open && !(self.phase == Phase::HalfClosed && ours)
    }

    /// The error of a reader of `root` that can never go on, naming what is missing.
    pub(super) fn incomplete(&self, root: NodeKey) -> Arc<Status> {
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
        let status = Status::new(reason, message);
        let first = missing.into_iter().next().unwrap_or_default();
        Arc::new(
            status
                .with("node", &self.store.get(root).id)
                .with("value", first),
        )
    }

    /// Up to 16 missing `id` or `id@seq` below a node, in reading order as far as it is known.
    fn missing(&self, root: NodeKey) -> Vec<String> {
        let mut seen = HashSet::with_hasher(self.store.hasher());
        let mut stack = vec![root];
        let mut missing = Vec::new();
        while let Some(key) = stack.pop() {
            if missing.len() >= MISSING_NAMED || seen.len() >= MISSING_VISITS {
                break;
            }
            if !seen.insert(key) {
                continue;
            }
            let node = self.store.get(key);
            if !node.is_complete() && !node.owner.is_local() {
                let known = node.kind != Kind::Unknown || node.highest().is_some();
                missing.push(if known {
                    format!("{}@{}", node.id, node.next_seq())
                } else {
                    node.id.to_string()
                });
            }
            let children: Vec<NodeKey> = node.children().take(MISSING_VISITS).collect();
            stack.extend(children.into_iter().rev());
        }
        missing
    }

    /// Fails the cursors of actions that wait for nothing but each other's outputs (D-3).
    pub(super) fn look_for_deadlock(&mut self) {
        if self.phase != Phase::HalfClosed || self.parked == 0 {
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

    /// The largest set of actions each of which waits only for outputs of others in the set.
    fn stuck_actions(&self) -> HashSet<ActionKey> {
        let mut waits: Vec<(ActionKey, ActionKey)> = Vec::new();
        let mut free: HashSet<ActionKey> = HashSet::new();
        for (_, cursor) in self.cursors.iter() {
            let (Some(reader), Some(node)) = (cursor.reader, cursor.parked) else {
                continue;
            };
            match self.store.get(node).owner {
                Owner::Local(Some(producer)) => waits.push((reader, producer)),
                _ => {
                    free.insert(reader);
                }
            }
        }
        let mut stuck: HashSet<ActionKey> = waits.iter().map(|(reader, _)| *reader).collect();
        stuck.retain(|key| {
            !free.contains(key) && self.actions.get(*key).is_some_and(|entry| entry.waiting)
        });
        loop {
            let before = stuck.len();
            for (reader, producer) in &waits {
                if !stuck.contains(producer) {
                    stuck.remove(reader);
                }
            }
            if stuck.len() == before {
                return stuck;
            }
        }
    }

    fn fail_parked(&mut self, id: CursorId, node: NodeKey, status: Arc<Status>) {
        self.fail_read(id, status);
        self.store
            .get_mut(node)
            .waiters
            .retain(|waiter| *waiter != id);
        self.ready(id);
    }

    /// EV-109: every action finished, every output sent.
    pub(super) fn close_if_finished(&mut self) {
        if self.phase != Phase::HalfClosed {
            return;
        }
        let done = match self.side {
            Side::Server => self.actions.len() == 0 && self.outbound.is_empty(),
            // Nobody is left to send to.
            Side::Client => true,
        };
        if done {
            self.phase = Phase::Finished;
            self.events.push_back(Output::Close(None));
        }
    }
}

/// How many missing items an error names (EV-110).
const MISSING_NAMED: usize = 16;
/// How many nodes the search for them visits.
const MISSING_VISITS: usize = 10_000;
