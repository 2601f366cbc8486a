//! Inputs of reserved actions that the session reads itself.
//!
//! They are nodes like any other: they may arrive after the action, or be another action's output.

use super::SessionMachine;
use super::port::{ActionKey, CursorId, CursorRead, NodeKey};
use crate::evergreen::{Reason, Status};
use crate::time::Time;

/// The purpose for which an input is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReadPurpose {
    /// The TTL of this node (EV-912).
    Ttl(Option<NodeKey>),
    /// What a resuming client has received (EV-942).
    Have,
    /// What the server has received, in its answer to our RESUME.
    Answer,
}

/// An input that is being read by the session.
#[derive(Debug)]
pub(super) struct InputLeaf {
    /// The action that it is an input of; `None` for the answer to our RESUME.
    action: Option<ActionKey>,
    cursor: CursorId,
    text: Vec<u8>,
    wanted: ReadPurpose,
    since: Time,
}

impl InputLeaf {
    /// Whether it is an input of this action.
    pub(super) fn is_of(&self, action: ActionKey) -> bool {
        self.action == Some(action)
    }

    /// Whether it reports what the peer has received.
    pub(super) const fn is_of_resume(&self) -> bool {
        !matches!(self.wanted, ReadPurpose::Ttl(_))
    }

    /// Bytes of the text, which the quota counts until the input is read.
    pub(super) const fn text_bytes(&self) -> u64 {
        self.text.len() as u64
    }
}

impl SessionMachine {
    /// Starts to read the input `id` of a reserved action; returns the action's answer if that could be read at once.
    pub(super) fn read_leaf(
        &mut self,
        action: Option<ActionKey>,
        id: &str,
        wanted: ReadPurpose,
        since: Time,
    ) -> Option<Result<String, Status>> {
        let limits = std::sync::Arc::clone(&self.config.limits);
        let node = match self.store.mention(id, &limits) {
            Ok(node) => node,
            // The quota or the node limit was exceeded: both end the session.
            Err(status) => return Some(Err(status)),
        };
        let known = self.store.get_mut(node);
        known.referenced = true;
        known.transient |= !matches!(wanted, ReadPurpose::Ttl(_));
        if let Some(entry) = action.and_then(|action| self.actions.get_mut(action)) {
            entry.inputs.push(node);
        }
        self.inbound.closures_changed();
        let cursor = self.open(node, action);
        if let Some(cursor) = self.cursors.get_mut(cursor.0) {
            cursor.ours = true;
        }
        let leaf = InputLeaf {
            action,
            cursor,
            text: Vec::new(),
            wanted,
            since,
        };
        self.read_on(leaf)
    }

    /// Continues the reads that can make progress.
    pub(super) fn read_leaves(&mut self) {
        self.leaves_ready = false;
        for leaf in std::mem::take(&mut self.leaves) {
            let action = leaf.action;
            match (action, self.read_on(leaf)) {
                (Some(action), Some(answer)) => self.answer(action, answer),
                // The answer to our RESUME is either read, or cannot be read.
                (None, Some(Err(status))) => {
                    self.abort(status);
                }
                (None, Some(Ok(_))) => {
                    self.hello_is_answered();
                    self.send_again(None);
                }
                (_, None) => {}
            }
        }
    }

    /// Stops reading for an action that ends in another way.
    pub(super) fn stop_reading(&mut self, action: ActionKey) {
        let at = self.leaves.iter().position(|leaf| leaf.is_of(action));
        if let Some(leaf) = at.map(|at| self.leaves.swap_remove(at)) {
            self.leaf_is_done(&leaf);
        }
    }

    /// Stops reading reports of received seqs: the connection is lost, with a client that was resuming.
    pub(super) fn stop_resuming(&mut self) {
        while let Some(at) = self.leaves.iter().position(InputLeaf::is_of_resume) {
            let leaf = self.leaves.swap_remove(at);
            self.leaf_is_done(&leaf);
            if let Some(action) = leaf.action {
                self.finish(action);
            }
        }
    }

    fn read_on(&mut self, mut leaf: InputLeaf) -> Option<Result<String, Status>> {
        let most = match leaf.wanted {
            ReadPurpose::Ttl(_) => TEXT_BYTES,
            ReadPurpose::Have | ReadPurpose::Answer => self.config.limits.max_message_bytes,
        };
        let answer = loop {
            match self.read(leaf.cursor) {
                CursorRead::Piece(piece) if leaf.text.len() + piece.data.len() > most => {
                    let message = format!("an input has more than {most} bytes");
                    break Err(Status::new(Reason::BadConfig, message));
                }
                CursorRead::Piece(piece) => {
                    let bytes = piece.data.len() as u64;
                    if let Err(status) = self.store.retain(bytes, &self.config.limits) {
                        break Err(status);
                    }
                    leaf.text.extend_from_slice(&piece.data);
                }
                CursorRead::Busy => {
                    self.leaves.push(leaf);
                    self.pause_leaves();
                    return None;
                }
                CursorRead::Pending => {
                    let action = leaf.action;
                    self.leaves.push(leaf);
                    if let Some(action) = action {
                        self.waiting(action, true);
                    }
                    return None;
                }
                CursorRead::Reference(_) => {
                    let message = "inputs of reserved actions are sent inline";
                    break Err(Status::new(Reason::RefDenied, message));
                }
                CursorRead::Failed(status) => break Err(Status::clone(&status)),
                CursorRead::End => {
                    break match leaf.wanted {
                        ReadPurpose::Ttl(node) => self.ttl_was_read(node, &leaf.text, leaf.since),
                        ReadPurpose::Have | ReadPurpose::Answer => self.have_was_read(&leaf.text),
                    };
                }
            }
        };
        self.leaf_is_done(&leaf);
        if let (true, Err(status)) = (leaf.is_of_resume(), &answer) {
            // A client that cannot report what it has received does not resume, and does not retry for ever.
            self.abort(status.clone());
        }
        Some(answer)
    }

    /// Ends a read; the quota bytes of its text are refunded.
    fn leaf_is_done(&mut self, leaf: &InputLeaf) {
        let root = self.cursors.get(leaf.cursor.0).map(|cursor| cursor.root);
        self.close(leaf.cursor);
        self.store.give_back(leaf.text_bytes());
        if let Some(root) = root.filter(|_| leaf.is_of_resume()) {
            // A report of received seqs is used once, so its node is dropped.
            self.drop_nodes(&[(root, false)]);
        }
    }
}

/// Maximum size of a short text input.
const TEXT_BYTES: usize = 1024;
