//! Inputs of reserved actions that the session reads itself.
//!
//! They are nodes like any other: they may arrive after the action, or be another action's output.

use crate::evergreen::{Reason, SessionLimits, Status};
use crate::session::nodes::Nodes;
use crate::session::port::{ActionKey, CursorId, CursorRead, NodeKey};
use crate::time::Time;

/// The purpose for which an input is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReadPurpose {
    /// The TTL of this node (EV-912).
    Ttl(Option<NodeKey>),
    /// What a resuming peer has received (EV-942).
    Report,
}

/// An input that is being read by the session.
#[derive(Debug)]
pub(in crate::session) struct InputLeaf {
    /// The action that it is an input of; `None` for the answer to our RESUME.
    pub(super) action: Option<ActionKey>,
    pub(super) cursor: CursorId,
    pub(super) node: NodeKey,
    /// What was read of it; the quota counts these bytes until the input is read.
    pub(super) text: Vec<u8>,
    pub(super) purpose: ReadPurpose,
    pub(super) since: Time,
}

/// How far an input was read.
#[derive(Debug)]
pub(super) enum LeafRead {
    /// It waits for content.
    Pending,
    /// It continues in the next turn.
    Paused,
    /// All of it was read.
    Whole,
}

impl InputLeaf {
    /// Whether it reports what the peer has received.
    pub(super) const fn is_of_resume(&self) -> bool {
        matches!(self.purpose, ReadPurpose::Report)
    }

    /// Bytes that the quota counts for what was read.
    pub(in crate::session) const fn text_bytes(&self) -> u64 {
        self.text.len() as u64
    }

    /// Reads on as far as there is content; or fails, if it cannot be read.
    pub(super) fn read(&mut self, nodes: &mut Nodes) -> Result<LeafRead, Status> {
        let most = self.max_bytes(&nodes.config.limits);
        loop {
            match nodes.read(self.cursor) {
                // Before the piece is copied: an input can be a tree that yields far more than it costs (EV-306).
                CursorRead::Piece(piece) if self.text.len() + piece.data.len() > most => {
                    let message =
                        format!("the input of a reserved action has more than {most} bytes");
                    return Err(Status::new(Reason::BadConfig, message));
                }
                CursorRead::Piece(piece) => {
                    // Charged beside the node itself: the text is a second copy.
                    nodes.graph.quota.retain(piece.data.len() as u64)?;
                    self.text.extend_from_slice(&piece.data);
                }
                CursorRead::Busy => return Ok(LeafRead::Paused),
                CursorRead::Pending => return Ok(LeafRead::Pending),
                CursorRead::Reference(_) => {
                    let message = "the input of a reserved action is a reference; send it inline";
                    return Err(Status::new(Reason::RefDenied, message));
                }
                CursorRead::Failed(status) => return Err(Status::clone(&status)),
                CursorRead::End => return Ok(LeafRead::Whole),
            }
        }
    }

    /// Ends the read; the quota bytes of its text are refunded.
    pub(super) fn close(&self, nodes: &mut Nodes) {
        nodes.close(self.cursor);
        // The text is not needed any more: it was parsed, or its action has ended.
        nodes.graph.quota.give_back(self.text_bytes());
        if self.is_of_resume() {
            // A report of received seqs is used once, so its node is dropped.
            nodes.drop_nodes(&[(self.node, false)]);
        }
    }

    const fn max_bytes(&self, limits: &SessionLimits) -> usize {
        match self.purpose {
            ReadPurpose::Ttl(_) => TEXT_BYTES,
            ReadPurpose::Report => limits.max_message_bytes,
        }
    }
}

/// Maximum size of a short text input.
const TEXT_BYTES: usize = 1024;
