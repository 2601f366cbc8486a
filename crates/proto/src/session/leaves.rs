//! Small inputs of reserved actions that the machine reads itself.
//!
//! Owns: waiting for them, and their bounded text. Refuses to know: what they mean. They are nodes like any other and
//! may come after the action, or be somebody's output.

use super::Session;
use super::port::{ActionKey, CursorId, NodeKey, Read};
use crate::evergreen::{Reason, Status};
use crate::time::Time;

/// What an input is read for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    /// How long this node is to live (EV-912).
    Ttl(Option<NodeKey>),
}

/// An input that is being read.
#[derive(Debug)]
pub(super) struct Leaf {
    action: ActionKey,
    cursor: CursorId,
    text: Vec<u8>,
    wanted: Wanted,
    since: Time,
}

impl Leaf {
    /// Whether it is an input of this action.
    pub(super) fn is_of(&self, action: ActionKey) -> bool {
        self.action == action
    }
}

impl Session {
    /// Reads the input `id` of a reserved action; gives its answer if that could be done at once.
    pub(super) fn read_leaf(
        &mut self,
        action: ActionKey,
        id: &str,
        wanted: Wanted,
        since: Time,
    ) -> Option<Result<String, Status>> {
        let limits = std::sync::Arc::clone(&self.config.limits);
        let node = match self.store.mention(id, &limits) {
            Ok(node) => node,
            // The quota or the number of nodes: these end sessions.
            Err(status) => return Some(Err(status)),
        };
        self.store.get_mut(node).referenced = true;
        if let Some(entry) = self.actions.get_mut(action) {
            entry.inputs.push(node);
        }
        self.inbound.closures_changed();
        let cursor = self.open(node, Some(action));
        if let Some(cursor) = self.cursors.get_mut(cursor.0) {
            cursor.ours = true;
        }
        let leaf = Leaf {
            action,
            cursor,
            text: Vec::new(),
            wanted,
            since,
        };
        self.read_on(leaf)
    }

    /// Goes on with whatever may go on.
    pub(super) fn read_leaves(&mut self) {
        self.leaves_ready = false;
        for leaf in std::mem::take(&mut self.leaves) {
            let action = leaf.action;
            if let Some(answer) = self.read_on(leaf) {
                self.answer(action, answer);
            }
        }
    }

    /// An action ends otherwise: nothing is read for it any more.
    pub(super) fn stop_reading(&mut self, action: ActionKey) {
        let at = self.leaves.iter().position(|leaf| leaf.is_of(action));
        if let Some(leaf) = at.map(|at| self.leaves.swap_remove(at)) {
            self.close(leaf.cursor);
        }
    }

    fn read_on(&mut self, mut leaf: Leaf) -> Option<Result<String, Status>> {
        let answer = loop {
            match self.read(leaf.cursor) {
                Read::Piece(piece) if leaf.text.len() + piece.data.len() > TEXT_BYTES => {
                    let message = format!("an input has more than {TEXT_BYTES} bytes");
                    break Err(Status::new(Reason::BadConfig, message));
                }
                Read::Piece(piece) => leaf.text.extend_from_slice(&piece.data),
                Read::Pending => {
                    let action = leaf.action;
                    self.leaves.push(leaf);
                    self.waiting(action, true);
                    return None;
                }
                Read::Failed(status) => break Err(Status::clone(&status)),
                Read::End => {
                    break match leaf.wanted {
                        Wanted::Ttl(node) => self.ttl_was_read(node, &leaf.text, leaf.since),
                    };
                }
            }
        };
        self.close(leaf.cursor);
        self.expire(leaf.since);
        Some(answer)
    }
}

/// The most that such an input may have.
const TEXT_BYTES: usize = 1024;
