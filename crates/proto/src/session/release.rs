//! Releases content that every reader has passed (EV-955).
//!
//! ```text
//!   bound (input of an action, reader not begun) ──► inside, at piece n ──► closed
//!   listed by a retained piece of a tree  ─┐
//!   bound                                 ─┼─► nothing is released
//!   inside, at piece n                    ─┴─► everything before the least n, if it was sent as well
//! ```

use std::sync::Arc;

use smallvec::SmallVec;

use super::dropping::NodeFate;
use super::port::NodeKey;
use super::store::Store;
use crate::evergreen::{Reason, Status};

/// Which pieces a session retains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RetentionPolicy {
    /// All of them, until the session ends (EV-214).
    #[default]
    Session,
    /// Only content that a reader has still to pass; a later reader fails with `NODE_RELEASED` (EV-955).
    Unread,
}

/// Readers that have still to pass a node, without the transport.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// Positions of the readers inside. An action reads an input once or twice, so the list is short and is searched.
    positions: SmallVec<[u32; 4]>,
    /// Number of readers that are bound to the node and have not begun.
    bound: u32,
}

impl Store {
    /// Binds a reader that will read this node from its first item.
    pub(super) fn bind_reader(&mut self, key: NodeKey) {
        if self.releases() {
            self.get_mut(key).readers.get_or_insert_default().bound += 1;
        }
    }

    /// Unbinds a reader that has begun, or will not begin.
    pub(super) fn unbind_reader(&mut self, key: NodeKey) {
        if let Some(readers) = &mut self.get_mut(key).readers {
            readers.bound = readers.bound.saturating_sub(1);
            self.release(key);
        }
    }

    /// Adds a reader at the first piece.
    pub(super) fn enter(&mut self, key: NodeKey) {
        if self.releases() {
            let readers = self.get_mut(key).readers.get_or_insert_default();
            readers.positions.push(0);
        }
    }

    /// Moves a reader from piece `from` to the next one.
    pub(super) fn step_reader(&mut self, key: NodeKey, from: u32) {
        let Some(readers) = &mut self.get_mut(key).readers else {
            return;
        };
        if let Some(position) = readers
            .positions
            .iter_mut()
            .find(|position| **position == from)
        {
            *position += 1;
            self.release(key);
        }
    }

    /// Removes a reader at piece `slot`.
    pub(super) fn leave(&mut self, key: NodeKey, slot: u32) {
        let Some(readers) = &mut self.get_mut(key).readers else {
            return;
        };
        if let Some(at) = readers.positions.iter().position(|other| *other == slot) {
            readers.positions.swap_remove(at);
            self.release(key);
        }
    }

    /// Releases the pieces that every reader has passed, in this node and in the nodes that those pieces listed.
    pub(super) fn release(&mut self, key: NodeKey) {
        if !self.releases() {
            return;
        }
        let mut stack: SmallVec<[NodeKey; 4]> = SmallVec::new();
        stack.push(key);
        while let Some(key) = stack.pop() {
            let end = self.passed_by_all(key);
            while self.get(key).log.released() < end as usize {
                let Some(piece) = self.let_go(key) else {
                    break;
                };
                // The children of a dropped tree were unlisted when it was dropped.
                let retained = self.get(key).fate == NodeFate::Retained;
                if retained {
                    let children = piece.children().iter().copied();
                    stack.extend(children.filter(|&child| self.unlist(child)));
                }
            }
        }
    }

    /// Number of pieces of a node that every reader and the transport have passed.
    fn passed_by_all(&self, key: NodeKey) -> u32 {
        let node = self.get(key);
        let bound = node.readers.as_ref().map_or(0, |readers| readers.bound);
        if bound > 0 || node.listed > 0 {
            return 0;
        }
        let slowest = node
            .readers
            .as_ref()
            .and_then(|readers| readers.positions.iter().copied().min());
        let sent = node.producer.as_ref().map(|producer| producer.sent);
        match (slowest, sent) {
            (Some(slowest), Some(sent)) => slowest.min(sent),
            (Some(passed), None) | (None, Some(passed)) => passed,
            (None, None) => node.passed,
        }
    }
}

#[cfg(any(test, fuzzing))]
impl super::store::StoredNode {
    /// Number of readers inside.
    pub(super) fn inside(&self) -> usize {
        self.readers
            .as_ref()
            .map_or(0, |readers| readers.positions.len())
    }
}

/// The error of a reader whose node is no longer retained.
pub(super) fn released(store: &Store, node: NodeKey) -> Arc<Status> {
    let id = &store.get(node).id;
    let message = format!("node {id:?} was released: it was dropped, or read and sent before");
    Arc::new(Status::new(Reason::NodeReleased, message).with("node", id))
}
