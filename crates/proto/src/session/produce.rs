//! Writes our own nodes.
//!
//! What is written can be read here at once, like any other node (EV-307).

use std::sync::Arc;

use bytes::Bytes;

use super::dropping::NodeFate;
use super::port::{ActionKey, LeafEnd, NodeKey, WriteError};
use super::resume::LinkState;
use super::store::{LogPiece, NodeKind, NodeProducer};
use super::{SessionMachine, SessionPhase};
use crate::evergreen::{Metadata, Status};

impl SessionMachine {
    /// Whether a producer may write. After `false`, [`super::SessionOutput::Writable`] reports when it may (EV-803).
    pub fn has_room(&mut self) -> bool {
        let room = self.outbound.bytes < self.config.limits.outbound_queue_bytes;
        self.outbound.refused |= !room;
        room
    }

    /// Creates a node of ours under a generated id, below the outputs of `action`, or for an input of a call of ours.
    ///
    /// # Errors
    /// `NODE_LIMIT` or `RETAINED_LIMIT`; nothing is aborted.
    pub fn make(&mut self, action: Option<ActionKey>) -> Result<NodeKey, Status> {
        if let SessionPhase::Aborted(status) = &self.phase {
            return Err(Status::clone(status));
        }
        let limits = Arc::clone(&self.config.limits);
        let node = self.store.make(&limits)?;
        self.store.get_mut(node).owner = NodeProducer::Local(action);
        if let Some(entry) = action.and_then(|action| self.actions.get_mut(action)) {
            entry.made.push(node);
        }
        Ok(node)
    }

    /// Claims a known node as one that we produce.
    ///
    /// # Errors
    /// [`WriteError::Refused`] if the node has a producer already.
    pub fn produce(&mut self, node: NodeKey) -> Result<(), WriteError> {
        if matches!(self.phase, SessionPhase::Aborted(_)) {
            return Err(WriteError::Closed);
        }
        let node = self.store.get_mut(node);
        if node.owner != NodeProducer::Unclaimed {
            return Err(WriteError::Refused);
        }
        node.owner = NodeProducer::Local(None);
        Ok(())
    }

    /// Appends bytes to a leaf. The first write sets its metadata; the metadata of later writes is ignored, unless the
    /// dialect has metadata per chunk ([`crate::evergreen::DialectCapabilities::flat`]). Payloads above
    /// `max_fragment_bytes` are split, which has no effect on the content (EV-211).
    ///
    /// # Errors
    /// [`WriteError::Full`] if [`Self::has_room`] returns `false`, and nothing is written; otherwise the node or the
    /// session cannot accept the write.
    pub fn write(
        &mut self,
        node: NodeKey,
        metadata: &Arc<Metadata>,
        data: Bytes,
    ) -> Result<(), WriteError> {
        if !self.has_room() && !self.is_dropped(node) {
            self.check_writable(node, NodeKind::Leaf)?;
            return Err(WriteError::Full);
        }
        self.put(node, metadata, data)
    }

    /// Writes the last bytes of a leaf and ends it. Needs no room, like an end: for content that is only known at the
    /// end.
    ///
    /// # Errors
    /// The node or the session cannot take it.
    pub fn end_with_data(
        &mut self,
        node: NodeKey,
        metadata: &Arc<Metadata>,
        data: Bytes,
    ) -> Result<(), WriteError> {
        self.put(node, metadata, data)?;
        self.end(node, metadata)
    }

    /// The same as [`Self::write`], without the check for room.
    pub(super) fn put(
        &mut self,
        node: NodeKey,
        metadata: &Arc<Metadata>,
        data: Bytes,
    ) -> Result<(), WriteError> {
        if self.is_dropped(node) {
            return Ok(());
        }
        self.check_writable(node, NodeKind::Leaf)?;
        let most = self.config.limits.max_fragment_bytes.max(1);
        let mut rest = data;
        loop {
            let part = rest.split_to(rest.len().min(most));
            let known = self.store.get_mut(node);
            let first = known.metadata.is_none();
            let piece = if first || (self.config.capabilities.flat && !part.is_empty()) {
                known.metadata = Some(Arc::clone(metadata));
                LogPiece::Begin(Arc::clone(metadata), part)
            } else if part.is_empty() {
                return Ok(());
            } else {
                LogPiece::Data(part)
            };
            self.append(node, piece)?;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Appends children to a tree. Children that we produce end before the tree does (EV-508).
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn list(&mut self, node: NodeKey, children: &[NodeKey]) -> Result<(), WriteError> {
        if self.is_dropped(node) {
            for &child in children {
                if self.is_new(child) {
                    // It was created below a dropped tree, and the peer does not know it.
                    self.store.mark_removed(child);
                }
            }
            return Ok(());
        }
        self.check_writable(node, NodeKind::Tree)?;
        if !self.has_room() {
            return Err(WriteError::Full);
        }
        let most = self.config.limits.max_children_per_fragment.max(1);
        for part in children.chunks(most) {
            self.adopt(node, part);
            self.append(node, LogPiece::Children(part.into()))?;
        }
        Ok(())
    }

    /// Creates `count` children of a tree, below the outputs of `action`, and announces them in one fragment. If they
    /// cannot be announced now, none is created.
    ///
    /// # Errors
    /// As [`Self::write`]; [`WriteError::Refused`] if the session has no room for that many nodes.
    pub fn grow(
        &mut self,
        tree: NodeKey,
        count: usize,
        action: ActionKey,
    ) -> Result<Vec<NodeKey>, WriteError> {
        if !self.is_dropped(tree) {
            self.check_writable(tree, NodeKind::Tree)?;
            if !self.has_room() {
                return Err(WriteError::Full);
            }
        }
        if !self.store.has_room_for(count, &self.config.limits) {
            return Err(WriteError::Refused);
        }
        // Creation can only stop halfway if the quota has no room for the bytes of ids; this action cannot continue
        // then.
        let made = (0..count).map(|_| self.make(Some(action)).map_err(|_| WriteError::Refused));
        let made = made.collect::<Result<Vec<_>, _>>()?;
        self.list(tree, &made)?;
        Ok(made)
    }

    /// Ends a node. A leaf that was never written is sent as one empty fragment with `metadata` (EV-404). Needs no
    /// room: an end must never wait.
    ///
    /// # Errors
    /// The node or the session cannot take it.
    pub fn end(&mut self, node: NodeKey, metadata: &Arc<Metadata>) -> Result<(), WriteError> {
        if self.is_dropped(node) {
            return Ok(());
        }
        let kind = match self.store_kind(node) {
            Some(NodeKind::Tree) => NodeKind::Tree,
            _ => NodeKind::Leaf,
        };
        self.check_writable(node, kind)?;
        let known = self.store.get_mut(node);
        let unsent = known
            .producer
            .as_ref()
            .is_some_and(|producer| producer.sent < known.next_seq());
        if kind == NodeKind::Leaf && unsent {
            // The last piece was not sent yet, so it becomes the final one.
            known.last = known.next_seq().checked_sub(1);
            let _ = known.log.end(());
            self.node_ended(node);
            return Ok(());
        }
        let piece = if kind == NodeKind::Leaf && known.metadata.is_none() {
            known.metadata = Some(Arc::clone(metadata));
            LogPiece::Begin(Arc::clone(metadata), Bytes::new())
        } else {
            LogPiece::Empty
        };
        self.append_last(node, piece)
    }

    /// Ends a node with the status of its producer (EV-931); `None` means success.
    pub(super) fn end_with(
        &mut self,
        node: NodeKey,
        status: Option<Arc<Status>>,
    ) -> Result<(), WriteError> {
        if self.is_dropped(node) {
            return Ok(());
        }
        self.seal(node, status)
    }

    /// The same, also for a node that is being dropped.
    pub(super) fn seal(
        &mut self,
        node: NodeKey,
        status: Option<Arc<Status>>,
    ) -> Result<(), WriteError> {
        match self.store_kind(node) {
            Some(NodeKind::Tree) => {
                // A tree gets a last child that carries the status.
                let action = match self.store.get(node).owner {
                    NodeProducer::Local(action) => action,
                    _ => None,
                };
                let child = match self.make(action) {
                    Ok(child) => child,
                    Err(status) => {
                        // Without a status at its end, the peer would wait for this tree for ever.
                        self.abort(status);
                        return Err(WriteError::Closed);
                    }
                };
                self.store.get_mut(child).kind = NodeKind::Leaf;
                self.adopt(node, &[child]);
                self.append(node, LogPiece::Children([child].into()))?;
                if let NodeFate::Dropped(batch) = self.store.get(node).fate {
                    // It is dropped with its tree: no other node lists it.
                    self.store.drop_with(batch, child);
                }
                self.append_last(child, LogPiece::Status(status))?;
                self.append_last(node, LogPiece::Empty)
            }
            _ => {
                self.check_writable(node, NodeKind::Leaf)?;
                self.append_last(node, LogPiece::Status(status))
            }
        }
    }

    /// Marks a leaf as stopped at a limit: it may be continued (D-51). Call it before the leaf ends.
    pub fn note_cut(&mut self, node: NodeKey) {
        if self.store.has(node) {
            self.store.get_mut(node).cut = true;
        }
    }

    /// How an action ended a leaf that it wrote; `None` for a leaf that its sender wrote itself.
    #[must_use]
    pub fn written(&self, node: NodeKey) -> Option<LeafEnd> {
        let known = self.store.get(node);
        match known.owner {
            NodeProducer::Local(Some(_)) | NodeProducer::Peer(Some(_)) if known.cut => {
                Some(LeafEnd::Cut)
            }
            NodeProducer::Local(Some(_)) | NodeProducer::Peer(Some(_)) => Some(LeafEnd::Whole),
            NodeProducer::Local(None) | NodeProducer::Peer(None) | NodeProducer::Unclaimed => None,
        }
    }

    /// Ends a node of ours whose writer has stopped with this status, unless it has ended (EV-931).
    pub fn abandon_node(&mut self, node: NodeKey, status: Arc<Status>) {
        if !self.is_closed() && self.store.has(node) && !self.store.get(node).is_complete() {
            // A node that cannot be ended here has ended already, or is the peer's.
            let _ = self.end_with(node, Some(status));
        }
    }

    /// Marks our side as finished: no new nodes, no new actions. When the queue is empty,
    /// [`super::SessionOutput::HalfClose`] follows.
    pub fn finish_sending(&mut self) {
        self.sending_finished = true;
        self.after_sending();
    }

    /// Whether the peer has dropped a node: writes to it are discarded, which is no error (EV-911).
    fn is_dropped(&self, node: NodeKey) -> bool {
        self.aborted().is_none() && self.store.get(node).fate != NodeFate::Retained
    }

    /// Whether a node of ours has no content and is listed by no other node.
    fn is_new(&self, node: NodeKey) -> bool {
        let node = self.store.get(node);
        node.owner.is_local() && node.listed == 0 && node.log.is_empty()
    }

    fn store_kind(&self, node: NodeKey) -> Option<NodeKind> {
        let over = self.aborted().is_some();
        (!over).then(|| self.store.get(node).kind)
    }

    fn check_writable(&mut self, node: NodeKey, kind: NodeKind) -> Result<(), WriteError> {
        if self.is_closed() || self.store_kind(node).is_none() {
            return Err(WriteError::Closed);
        }
        let max_seq = self.config.limits.max_seq;
        let node = self.store.get_mut(node);
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

    /// Records which of our children must be sent before the tree may end.
    pub(super) fn adopt(&mut self, tree: NodeKey, children: &[NodeKey]) {
        let in_line =
            self.config.capabilities.in_order && self.store.get(tree).kind == NodeKind::Tree;
        let mut open = 0;
        let mut line = Vec::new();
        for &child in children {
            let node = self.store.get_mut(child);
            node.referenced = true;
            let wholly_sent = node.is_complete()
                && node
                    .producer
                    .as_ref()
                    .is_none_or(|producer| producer.sent >= node.next_seq());
            if !node.owner.is_local() || wholly_sent || child == tree {
                continue;
            }
            let unwritten = node.next_seq() == 0;
            let producer = node.producer.get_or_insert_default();
            if producer.parent.is_none() {
                (producer.parent, producer.awaited) = (Some(tree), true);
                open += 1;
                if in_line && unwritten {
                    producer.pending_at = Some(0);
                    line.push(child);
                }
            }
        }
        let producer = self.store.get_mut(tree).producer.get_or_insert_default();
        producer.open_children += open;
        producer.line.extend(line);
    }

    fn append_last(&mut self, node: NodeKey, piece: LogPiece) -> Result<(), WriteError> {
        let known = self.store.get_mut(node);
        known.last = Some(known.next_seq());
        self.append(node, piece)?;
        let _ = self.store.get_mut(node).log.end(());
        self.node_ended(node);
        Ok(())
    }

    fn append(&mut self, node: NodeKey, piece: LogPiece) -> Result<(), WriteError> {
        let bytes = piece.len();
        let limits = &self.config.limits;
        let seq = self.store.get(node).next_seq();
        if seq > limits.max_seq {
            return Err(WriteError::Exhausted);
        }
        if let Err(status) = self.store.hold(seq, &piece, limits) {
            self.abort(status);
            return Err(WriteError::Closed);
        }
        // This cannot fail: the log has not ended, as was checked above.
        let _ = self.store.get_mut(node).log.append(piece);
        self.outbound.push(node, bytes, &mut self.store);
        self.wake(node);
        Ok(())
    }

    fn node_ended(&mut self, node: NodeKey) {
        self.wake(node);
    }

    /// Runs after a message was taken or our side was finished.
    pub(super) fn after_sending(&mut self) {
        let half = self.config.limits.outbound_queue_bytes / 2;
        if self.outbound.refused && self.outbound.bytes <= half {
            self.outbound.refused = false;
            self.emit(super::SessionOutput::Writable);
        }
        let sent = self.outbound.is_empty() && self.line() == LinkState::Up;
        if self.sending_finished && sent && !self.is_closed() {
            self.sending_finished = false;
            if let Some(resume) = &mut self.resume {
                resume.half_closed = true;
            }
            self.emit(super::SessionOutput::HalfClose);
        }
        self.close_if_finished();
    }
}
