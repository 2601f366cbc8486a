//! Writes nodes of ours: validates, appends to the node's log, and queues.
//!
//! What is written can be read here at once, like any other node (EV-307). The callers have checked that the session is
//! open and that the node is not dropped.

use std::sync::Arc;

use bytes::Bytes;

use super::Sender;
use crate::evergreen::{Metadata, Status};
use crate::session::graph::{Graph, LogPiece, NodeKind};
use crate::session::port::{LeafOrder, NodeKey, WriteError};

/// Which fragments of a leaf begin an item, with the metadata that the writer gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::session) enum ItemStart {
    /// The first of the leaf; the others continue it.
    First,
    /// Each one that is not empty: a part of a large payload is an item as well.
    EachFragment,
}

/// Why nothing was written.
#[derive(Debug)]
pub(in crate::session) enum Unwritten {
    /// The node cannot take it.
    Node(WriteError),
    /// The quota has no room for it: the session must be aborted.
    Quota(Status),
}

impl From<WriteError> for Unwritten {
    fn from(error: WriteError) -> Self {
        Self::Node(error)
    }
}

impl Sender {
    /// Appends bytes to a leaf, split at `max_fragment_bytes`.
    pub(in crate::session) fn put(
        &mut self,
        graph: &mut Graph,
        node: NodeKey,
        metadata: &Arc<Metadata>,
        data: Bytes,
        start: ItemStart,
    ) -> Result<(), Unwritten> {
        writable(graph, node, NodeKind::Leaf)?;
        let most = graph.limits().max_fragment_bytes.max(1);
        let mut rest = data;
        let each = start == ItemStart::EachFragment;
        loop {
            let part = rest.split_to(rest.len().min(most));
            let known = graph.get_mut(node);
            // The first write begins the item even if it is empty: a chunk of metadata alone is content (EV-301).
            let piece = if known.metadata.is_none() || (each && !part.is_empty()) {
                known.metadata = Some(Arc::clone(metadata));
                LogPiece::Begin(Arc::clone(metadata), part)
            } else if part.is_empty() {
                return Ok(());
            } else {
                LogPiece::Data(part)
            };
            self.append(graph, node, piece)?;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Appends children to a tree, in one fragment.
    pub(in crate::session) fn list(
        &mut self,
        graph: &mut Graph,
        node: NodeKey,
        children: &[NodeKey],
    ) -> Result<(), Unwritten> {
        // Before the piece can be sent, so that leaves that have to wait for their turn are marked when they are
        // announced.
        self.adopt(graph, node, children);
        self.append(graph, node, LogPiece::Children(children.into()))
    }

    /// Ends a node. A leaf that was never written is sent as one empty fragment with `metadata` (EV-404).
    pub(in crate::session) fn end(
        &mut self,
        graph: &mut Graph,
        node: NodeKey,
        metadata: &Arc<Metadata>,
    ) -> Result<(), Unwritten> {
        let kind = match graph.get(node).kind {
            NodeKind::Tree => NodeKind::Tree,
            _ => NodeKind::Leaf,
        };
        writable(graph, node, kind)?;
        let known = graph.get_mut(node);
        // Not for a tree: its last list is announced at once, while its end waits for the children (EV-508).
        if kind == NodeKind::Leaf && known.is_unsent() {
            // The last piece was not sent yet, so it becomes the final one.
            known.last = known.next_seq().checked_sub(1);
            let _ = known.log.end(());
            return Ok(());
        }
        let piece = if kind == NodeKind::Leaf && known.metadata.is_none() {
            known.metadata = Some(Arc::clone(metadata));
            LogPiece::Begin(Arc::clone(metadata), Bytes::new())
        } else {
            LogPiece::Empty
        };
        self.append_last(graph, node, piece)
    }

    /// Ends a node with the status of its producer (EV-931); `None` means success. A tree gets a last child that
    /// carries the status, which is returned.
    pub(in crate::session) fn seal(
        &mut self,
        graph: &mut Graph,
        node: NodeKey,
        status: Option<Arc<Status>>,
    ) -> Result<Option<NodeKey>, Unwritten> {
        if graph.get(node).kind != NodeKind::Tree {
            writable(graph, node, NodeKind::Leaf)?;
            self.append_last(graph, node, LogPiece::Status(status))?;
            return Ok(None);
        }
        // Without a status at its end, the peer would wait for this tree for ever: no room for it is no room for the
        // session.
        // Claimed for the tree's producer before `adopt`, which makes a tree wait for children of ours only.
        let child = graph.make().map_err(Unwritten::Quota)?;
        let producer = graph.get(node).owner;
        let known = graph.get_mut(child);
        (known.kind, known.owner) = (NodeKind::Leaf, producer);
        self.list(graph, node, &[child])?;
        self.append_last(graph, child, LogPiece::Status(status))?;
        self.append_last(graph, node, LogPiece::Empty)?;
        Ok(Some(child))
    }

    /// Records which of our children must be sent before `parent` may end: those of a tree (EV-508), and for a status the
    /// outputs of its action (EV-735). The first parent of a child waits for it; a second one does not.
    pub(in crate::session) fn adopt(
        &self,
        graph: &mut Graph,
        parent: NodeKey,
        children: &[NodeKey],
    ) {
        let in_line = self.order == LeafOrder::Reading && graph.get(parent).kind == NodeKind::Tree;
        let mut open = 0;
        let mut line = Vec::new();
        for &child in children {
            let node = graph.get_mut(child);
            node.referenced = true;
            // A child that the peer has already, or that the peer writes, holds nothing back; nor may a tree wait for
            // itself.
            let wholly_sent = node.is_complete()
                && node
                    .sending
                    .as_ref()
                    .is_none_or(|sending| sending.sent >= node.next_seq());
            if !node.owner.is_local() || wholly_sent || child == parent {
                continue;
            }
            let unwritten = node.next_seq() == 0;
            let sending = node.sending.get_or_insert_default();
            if sending.parent.is_none() {
                (sending.parent, sending.awaited) = (Some(parent), true);
                open += 1;
                // A leaf with content may be partly sent: it cannot wait for its turn any more.
                if in_line && unwritten {
                    sending.pending_at = Some(0);
                    line.push(child);
                }
            }
        }
        let sending = graph.get_mut(parent).sending.get_or_insert_default();
        sending.open_children += open;
        sending.line.extend(line);
    }

    fn append_last(
        &mut self,
        graph: &mut Graph,
        node: NodeKey,
        piece: LogPiece,
    ) -> Result<(), Unwritten> {
        let known = graph.get_mut(node);
        known.last = Some(known.next_seq());
        self.append(graph, node, piece)?;
        let _ = graph.get_mut(node).log.end(());
        Ok(())
    }

    fn append(
        &mut self,
        graph: &mut Graph,
        node: NodeKey,
        piece: LogPiece,
    ) -> Result<(), Unwritten> {
        let bytes = piece.len();
        let seq = graph.get(node).next_seq();
        if seq > graph.limits().max_seq {
            return Err(WriteError::Exhausted.into());
        }
        // Charged before it is stored; the caller aborts the session if there is no room (EV-801).
        graph.hold(seq, &piece).map_err(Unwritten::Quota)?;
        // This cannot fail: the log has not ended, as was checked before.
        let _ = graph.get_mut(node).log.append(piece);
        self.push(node, bytes, graph);
        Ok(())
    }
}

/// Whether a node of ours can take content of this kind; it is of this kind from now on.
pub(in crate::session) fn writable(
    graph: &mut Graph,
    node: NodeKey,
    kind: NodeKind,
) -> Result<(), WriteError> {
    let max_seq = graph.limits().max_seq;
    let node = graph.get_mut(node);
    if !node.owner.is_local() || (node.kind != NodeKind::Unknown && node.kind != kind) {
        return Err(WriteError::Refused);
    }
    if node.is_complete() {
        return Err(WriteError::Ended);
    }
    if node.next_seq() > max_seq {
        return Err(WriteError::Exhausted);
    }
    node.kind = kind;
    Ok(())
}
