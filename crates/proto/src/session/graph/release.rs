//! Releases content that every reader has passed (EV-955).
//!
//! ```text
//!   bound (input of an action, reader not begun) ──► inside, at piece n ──► closed
//!   listed by a retained piece of a tree  ─┐
//!   bound                                 ─┼─► nothing is released
//!   inside, at piece n                    ─┴─► everything before the least n, if it was sent as well
//! ```
//!
//! A low-water mark, and not the count of holders of `session::lifetime`: a node that never ends must give up the pieces
//! that all have passed while it goes on, and a count cannot say which those are. The two never decide the same thing:
//! this frees pieces of retained nodes, and `lifetime` whole nodes that were dropped.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Graph, StoredNode};
use crate::evergreen::{Reason, Status};
use crate::session::lifetime::NodeFate;
use crate::session::port::{ActionKey, NodeKey};

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
pub(in crate::session) struct NodeReaders {
    /// Positions of the readers inside. An action reads an input once or twice, so the list is short and is searched.
    positions: SmallVec<[u32; 4]>,
    /// Number of readers that were opened and have not begun.
    bound: u32,
    /// Actions that have it as an input which they have not opened yet.
    inputs_of: SmallVec<[ActionKey; 1]>,
}

impl Graph {
    /// Retains an input until `action` has read it, or has ended.
    pub(in crate::session) fn bind_input(&mut self, key: NodeKey, action: ActionKey) {
        if let Some(readers) = self.tracked(key) {
            readers.inputs_of.push(action);
        }
    }

    /// Releases an input that `action` will not open any more.
    pub(in crate::session) fn unbind_input(&mut self, key: NodeKey, action: ActionKey) {
        self.move_readers(key, |readers| readers.opens(action));
    }

    /// Binds a reader that will read this node from its first item; `reader` is the action that reads, if any.
    pub(in crate::session) fn bind_reader(&mut self, key: NodeKey, reader: Option<ActionKey>) {
        if let Some(readers) = self.tracked(key) {
            readers.bound += 1;
            // From now on the reader keeps the content, not the input that it was opened for.
            // An action that opens an input a second time finds nothing to remove here.
            reader.map(|action| readers.opens(action));
        }
    }

    /// Unbinds a reader that has begun, or will not begin.
    pub(in crate::session) fn unbind_reader(&mut self, key: NodeKey) {
        self.move_readers(key, |readers| {
            readers.bound = readers.bound.saturating_sub(1);
            true
        });
    }

    /// Adds a reader at the first piece.
    pub(in crate::session) fn enter(&mut self, key: NodeKey) {
        if let Some(readers) = self.tracked(key) {
            // A cursor always begins at the first piece: it refuses a node of which pieces were released.
            readers.positions.push(0);
        }
    }

    /// Moves a reader from piece `from` to the next one.
    pub(in crate::session) fn step_reader(&mut self, key: NodeKey, from: u32) {
        self.move_readers(key, |readers| {
            // Readers at the same piece are interchangeable, so positions need no cursor ids.
            let mut positions = readers.positions.iter_mut();
            let position = positions.find(|position| **position == from);
            position.map(|position| *position += 1).is_some()
        });
    }

    /// Removes a reader at piece `slot`.
    pub(in crate::session) fn leave(&mut self, key: NodeKey, slot: u32) {
        self.move_readers(key, |readers| {
            let at = readers.positions.iter().position(|other| *other == slot);
            at.map(|at| readers.positions.swap_remove(at)).is_some()
        });
    }

    /// The readers of a node, where they decide what is retained.
    fn tracked(&mut self, key: NodeKey) -> Option<&mut NodeReaders> {
        let tracks = self.releases();
        tracks.then(|| &mut **self.get_mut(key).readers.get_or_insert_default())
    }

    /// Changes the readers of a node, if they are tracked; where that has moved one, pieces may be released.
    fn move_readers(&mut self, key: NodeKey, change: impl FnOnce(&mut NodeReaders) -> bool) {
        if self.get_mut(key).readers.as_deref_mut().is_some_and(change) {
            self.release(key);
        }
    }

    /// Releases the pieces that every reader has passed, in this node and in the nodes that those pieces listed.
    pub(in crate::session) fn release(&mut self, key: NodeKey) {
        if !self.releases() {
            return;
        }
        // Not recursive: one released tree may release a chain of a million nodes (EV-305).
        let mut stack: SmallVec<[NodeKey; 4]> = SmallVec::new();
        stack.push(key);
        while let Some(key) = stack.pop() {
            let end = self.get(key).passed_by_all();
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
}

impl StoredNode {
    /// Number of pieces of a node that every reader and the transport have passed.
    fn passed_by_all(&self) -> u32 {
        let is_bound = |readers: &NodeReaders| readers.bound > 0 || !readers.inputs_of.is_empty();
        // A tree that lists it, or a reader that has not begun, will read it from its first piece.
        if self.listed > 0 || self.readers.as_deref().is_some_and(is_bound) {
            return 0;
        }
        let slowest = self
            .readers
            .as_ref()
            .and_then(|readers| readers.positions.iter().copied().min());
        let sent = self.sending.as_ref().map(|sending| sending.sent);
        // With nobody inside and nothing to send, what no reader has passed stays for one that attaches later.
        match (slowest, sent) {
            (Some(slowest), Some(sent)) => slowest.min(sent),
            (Some(passed), None) | (None, Some(passed)) => passed,
            (None, None) => self.passed,
        }
    }
}

impl NodeReaders {
    /// Whether it is an input of `action` that was not open; from now on it is.
    fn opens(&mut self, action: ActionKey) -> bool {
        let at = self.inputs_of.iter().position(|input| *input == action);
        at.map(|at| self.inputs_of.swap_remove(at)).is_some()
    }
}

#[cfg(any(test, fuzzing))]
impl StoredNode {
    /// Number of readers inside.
    pub(in crate::session) fn inside(&self) -> usize {
        self.readers
            .as_ref()
            .map_or(0, |readers| readers.positions.len())
    }
}

/// The error of a reader whose node is no longer retained.
pub(in crate::session) fn released(graph: &Graph, node: NodeKey) -> Arc<Status> {
    let id = &graph.get(node).id;
    let message = format!("node {id:?} was released: it was dropped, or read and sent before");
    Arc::new(Status::new(Reason::NodeReleased, message).with("node", id))
}
