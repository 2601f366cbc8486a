//! The nodes of a session, as their writers and readers use them.
//!
//! Orchestrates the machines of content: the [`Graph`], its [`Readers`], the [`Sender`] that hands our nodes to the
//! transport, and the [`Lifetime`] of dropped nodes. It knows actions only as keys. Whatever appends to a node wakes
//! the node's readers in the same call; a write for which the quota has no room aborts the session.

mod read;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use super::graph::accept::{Acceptance, AcceptanceRules};
use super::graph::release::released;
use super::graph::search::Search;
use super::graph::{Graph, NodeKind, NodeProducer};
use super::lifecycle::{Lifecycle, SessionPhase};
use super::lifetime::{Lifetime, NodeFate};
use super::port::{ActionKey, Config, NodeKey, SessionOutput, SessionStats, Side, WriteError};
use super::readers::Readers;
use super::sender::{self, ItemStart, Sender, Unwritten};
use crate::evergreen::{Fragment, Metadata, Status, WireMessage};
use crate::time::Time;

/// The nodes of a session; see the module documentation.
#[derive(Debug)]
pub struct Nodes {
    pub(super) side: Side,
    pub(super) config: Config,
    pub(super) graph: Graph,
    pub(super) search: Search,
    pub(super) readers: Readers,
    pub(super) sender: Sender,
    pub(super) lifetime: Lifetime,
    pub(super) lifecycle: Lifecycle,
    pub(super) stats: SessionStats,
    /// Changes that back-pressure has to take into account.
    pub(super) flow: FlowChanges,
    /// The nodes created below the outputs of each running action of the peer, which end with it.
    made: BTreeMap<ActionKey, Vec<NodeKey>>,
}

/// What has changed since back-pressure was decided last.
#[derive(Debug, Default)]
pub(super) struct FlowChanges {
    /// The set of nodes that running actions can read.
    pub(super) closures: bool,
    /// The number of unread bytes, or of parked readers.
    pub(super) reads: bool,
}

/// What a fragment of the peer has changed.
#[derive(Debug)]
pub(super) struct Accepted {
    /// The action of ours whose output it belongs to.
    pub(super) answers: Option<ActionKey>,
    /// Whether that output is complete now.
    pub(super) complete: bool,
    /// Actions of the peer whose inputs may contain their own outputs now.
    pub(super) may_cycle: Vec<ActionKey>,
}

impl Nodes {
    pub(super) fn new(side: Side, config: Config, now: Time) -> Self {
        Self {
            side,
            graph: Graph::new(&config),
            search: Search::default(),
            readers: Readers::new(&config.limits, now),
            sender: Sender::new(config.leaf_order),
            lifetime: Lifetime::default(),
            lifecycle: Lifecycle::default(),
            stats: SessionStats::default(),
            flow: FlowChanges::default(),
            made: BTreeMap::new(),
            config,
        }
    }

    /// Returns the node with this id; creates it if the id is not known yet.
    ///
    /// # Errors
    /// `BAD_ID`, `NODE_LIMIT` or `RETAINED_LIMIT`, without aborting the session; or the status of an aborted session.
    pub fn node(&mut self, id: &str) -> Result<NodeKey, Status> {
        self.lifecycle.check_alive()?;
        self.graph.mention(id)
    }

    /// Whether a node is complete (EV-208).
    pub(super) fn is_complete(&self, node: NodeKey) -> bool {
        self.graph.get(node).is_complete()
    }

    /// Creates a node of ours under a generated id, below the outputs of `action`, or for an input of a call of ours.
    ///
    /// # Errors
    /// `NODE_LIMIT` or `RETAINED_LIMIT`; nothing is aborted.
    pub fn make(&mut self, action: Option<ActionKey>) -> Result<NodeKey, Status> {
        self.lifecycle.check_alive()?;
        let node = self.graph.make()?;
        self.graph.get_mut(node).owner = NodeProducer::Local(action);
        // An action that has ended is not in the table: nothing would take what is recorded for it.
        if let Some(made) = action.and_then(|action| self.made.get_mut(&action)) {
            made.push(node);
        }
        Ok(node)
    }

    /// Claims a known node as one that we produce.
    ///
    /// # Errors
    /// [`WriteError::Refused`] if the node has a producer already.
    pub fn produce(&mut self, node: NodeKey) -> Result<(), WriteError> {
        if self.lifecycle.aborted().is_some() {
            return Err(WriteError::Closed);
        }
        let node = self.graph.get_mut(node);
        if node.owner != NodeProducer::Unclaimed {
            return Err(WriteError::Refused);
        }
        node.owner = NodeProducer::Local(None);
        Ok(())
    }

    /// Whether a producer may write. After `false`, [`SessionOutput::Writable`] reports when it may (EV-803).
    pub fn has_room(&mut self) -> bool {
        self.sender.has_room(&self.config.limits)
    }

    /// Appends bytes to a leaf. The first write sets its metadata; the metadata of later writes is ignored. Payloads above
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
        // Room is checked here and not in `put`, which ends and results of reserved actions share: they never wait
        // (EV-803).
        self.check_room(node)?;
        self.put(node, metadata, data, ItemStart::First)
    }

    /// Appends an item of its own to a leaf, with its own metadata: for clients that see each chunk by itself (EV-733).
    /// The peer must read metadata per chunk ([`crate::evergreen::MetadataMode`]).
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_item(
        &mut self,
        node: NodeKey,
        metadata: &Arc<Metadata>,
        data: Bytes,
    ) -> Result<(), WriteError> {
        self.check_room(node)?;
        self.put(node, metadata, data, ItemStart::EachFragment)
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
        self.put(node, metadata, data, ItemStart::First)?;
        self.end(node, metadata)
    }

    /// Fails a write for which there is no room. A node that cannot be written at all is reported first: waiting for room
    /// would not help.
    fn check_room(&mut self, node: NodeKey) -> Result<(), WriteError> {
        if self.takes(node)? && !self.has_room() {
            sender::writable(&mut self.graph, node, NodeKind::Leaf)?;
            return Err(WriteError::Full);
        }
        Ok(())
    }

    /// Appends bytes to a leaf, without the check for room.
    pub(super) fn put(
        &mut self,
        node: NodeKey,
        metadata: &Arc<Metadata>,
        data: Bytes,
        start: ItemStart,
    ) -> Result<(), WriteError> {
        if !self.takes(node)? {
            return Ok(());
        }
        let written = self
            .sender
            .put(&mut self.graph, node, metadata, data, start);
        self.written_to(node, written)
    }

    /// Appends children to a tree. Children that we produce end before the tree does (EV-508).
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn list(&mut self, node: NodeKey, children: &[NodeKey]) -> Result<(), WriteError> {
        if !self.takes(node)? {
            for &child in children {
                let known = self.graph.get(child);
                if known.owner.is_local() && known.listed == 0 && known.log.is_empty() {
                    // It was created below a dropped tree, and the peer does not know it.
                    self.graph.mark_removed(child);
                }
            }
            return Ok(());
        }
        // Before the room: a node that can never be a tree must not look as if it were full.
        sender::writable(&mut self.graph, node, NodeKind::Tree)?;
        if !self.has_room() {
            return Err(WriteError::Full);
        }
        let mut fragments = children.chunks(self.config.children_max());
        let written = fragments.try_for_each(|part| self.sender.list(&mut self.graph, node, part));
        self.written_to(node, written)
    }

    /// Creates `count` children of a tree, below the outputs of `action`, and announces them. If they cannot be announced
    /// now, none is created.
    ///
    /// # Errors
    /// As [`Self::write`]; [`WriteError::Refused`] if the session has no room for that many nodes.
    pub fn grow(
        &mut self,
        tree: NodeKey,
        count: usize,
        action: ActionKey,
    ) -> Result<Vec<NodeKey>, WriteError> {
        if self.takes(tree)? {
            sender::writable(&mut self.graph, tree, NodeKind::Tree)?;
            if !self.has_room() {
                return Err(WriteError::Full);
            }
        }
        if self.graph.live().saturating_add(count) > self.config.limits.max_nodes {
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
        if !self.takes(node)? {
            return Ok(());
        }
        let written = self.sender.end(&mut self.graph, node, metadata);
        self.written_to(node, written)
    }

    /// Ends a node with the status of its producer (EV-931); `None` means success. Does nothing for a node that cannot
    /// be ended: it has ended already, is the peer's, or was dropped.
    pub fn end_with_status(&mut self, node: NodeKey, status: Option<Arc<Status>>) {
        if !self.is_complete(node) && self.takes(node) == Ok(true) {
            self.seal(node, status);
        }
    }

    /// Marks a leaf as stopped at a limit: it may be continued (D-51). Call it before the leaf ends.
    pub fn note_cut(&mut self, node: NodeKey) {
        if self.graph.has(node) {
            self.graph.get_mut(node).cut = true;
        }
    }

    /// Records from now on which nodes are created below the outputs of an action.
    pub(super) fn action_begins(&mut self, action: ActionKey) {
        self.made.insert(action, Vec::new());
    }

    /// Returns the nodes created below the outputs of an action that ends.
    pub(super) fn action_ends(&mut self, action: ActionKey) -> Vec<NodeKey> {
        self.readers.set_waiting(action, false);
        self.made.remove(&action).unwrap_or_default()
    }

    /// Accepts a fragment of the peer; `None` if it changes nothing.
    pub(super) fn accept(
        &mut self,
        fragment: Fragment,
        copy_below: usize,
    ) -> Result<Option<Accepted>, Status> {
        // Kept, because `accept` takes the fragment. A negative seq is refused there.
        let seq = u32::try_from(fragment.seq).unwrap_or_default();
        let lists = !fragment.children.is_empty();
        let rules = AcceptanceRules {
            mode: self.config.metadata,
            references: self.config.references,
            copy_below,
        };
        let accepted = self.graph.accept(fragment, rules)?;
        let key = match accepted {
            Acceptance::Duplicate => {
                self.stats.duplicates += 1;
                return Ok(None);
            }
            Acceptance::Discarded => {
                self.stats.discarded += 1;
                return Ok(None);
            }
            Acceptance::Buffered(key) | Acceptance::Grown(key) | Acceptance::Complete(key) => key,
        };
        let mut may_cycle = Vec::new();
        // Also for a buffered fragment: a cycle aborts in either order of arrival (EV-217).
        if lists && let Some(piece) = self.graph.get(key).piece(seq) {
            let children = piece.children().to_vec();
            may_cycle = self.search.edges(key, &children, &mut self.graph)?;
            self.flow.closures = true;
        }
        // A reader waits at the end of the contiguous prefix, and that has not moved.
        if !matches!(accepted, Acceptance::Buffered(_)) {
            self.readers.wake(key, &mut self.graph, &mut self.lifecycle);
        }
        let answers = match self.graph.get(key).owner {
            NodeProducer::Peer(action) => action,
            _ => None,
        };
        Ok(Some(Accepted {
            answers,
            complete: matches!(accepted, Acceptance::Complete(_)),
            may_cycle,
        }))
    }

    /// Drops nodes; where the flag is set, also every node below that no other live node lists (EV-911). Returns the
    /// number of nodes and of bytes dropped.
    pub(super) fn drop_nodes(&mut self, named: &[(NodeKey, bool)]) -> (usize, u64) {
        let edges_left = self.search.edges_left;
        let (batch, mut nodes, bytes) = self.lifetime.mark(named, &mut self.graph, edges_left);
        let count = nodes.len();
        for at in 0..count {
            let node = nodes[at];
            let known = self.graph.get(node);
            if !self.lifecycle.is_closed() && known.owner.is_local() && !known.is_complete() {
                // Ends with a status, so that the peer neither waits for the rest nor takes the part it has for the
                // whole.
                let status = released(&self.graph, node);
                // Only the dropped tree lists it, so that it goes with that.
                if let Some(child) = self.seal(node, Some(status)) {
                    self.graph.unlist(child);
                    self.graph.get_mut(child).fate = NodeFate::Dropped(batch);
                    nodes.push(child);
                }
            }
        }
        // An end may have had no room: the session was aborted then, and the batch is gone with the old graph.
        if self.lifecycle.is_closed() && count > 0 {
            return (count, bytes);
        }
        // Counted last: the nodes must have their ends, or they would look as if they were sent.
        self.lifetime.hold(
            batch,
            &nodes,
            &mut self.readers,
            &mut self.graph,
            &mut self.search.edges_left,
        );
        // Readers that are parked in the batch can only fail now, and must not wait for that.
        for &node in &nodes {
            self.readers
                .wake(node, &mut self.graph, &mut self.lifecycle);
        }
        self.flow.closures |= count > 0;
        self.flow.reads |= count > 0;
        (count, bytes)
    }

    /// Drops the nodes that have expired (EV-912).
    pub(super) fn expire(&mut self, now: Time) {
        let due = self.lifetime.next_expiry().is_some_and(|at| at <= now);
        if due && !self.lifecycle.is_closed() {
            let (lifetime, graph) = (&mut self.lifetime, &mut self.graph);
            let budget = &mut self.readers.budget;
            let expired = budget.spend(|visits| lifetime.expired(now, graph, visits));
            self.drop_nodes(&expired);
        }
    }

    /// Takes the next message for the transport.
    pub(super) fn next_message(&mut self) -> Option<WireMessage> {
        let (limits, coalesce) = (&self.config.limits, self.config.coalesce);
        let message = self
            .sender
            .message(&mut self.graph, limits, coalesce, &mut self.stats);
        // The sender does not know batches, so their holders are counted down here.
        for node in self.sender.take_dropped() {
            self.lifetime.wholly_sent(node, &mut self.graph);
        }
        if self.sender.has_room_again(limits) {
            self.lifecycle.emit(SessionOutput::Writable);
        }
        message
    }

    /// Ends the session with `status`; the first abort wins and its status is returned. All content is dropped.
    pub(super) fn abort(&mut self, status: impl Into<Arc<Status>>) -> Arc<Status> {
        match &self.lifecycle.phase {
            SessionPhase::Aborted(first) => return Arc::clone(first),
            SessionPhase::Finished => return status.into(),
            SessionPhase::Open | SessionPhase::HalfClosed => {}
        }
        let status = status.into();
        self.lifecycle.abort(Arc::clone(&status));
        self.graph = Graph::new(&self.config);
        self.search = Search::default();
        // Nothing is read in an aborted session, so the time of the budget does not matter.
        self.readers = Readers::new(&self.config.limits, Time::ZERO);
        self.sender = Sender::new(self.config.leaf_order);
        self.lifetime = Lifetime::default();
        self.made = BTreeMap::new();
        status
    }

    /// Seals a node, also one that is being dropped; the caller has checked that it can end. Returns the child that
    /// carries the status, if the node is a tree.
    fn seal(&mut self, node: NodeKey, status: Option<Arc<Status>>) -> Option<NodeKey> {
        let sealed = self.sender.seal(&mut self.graph, node, status);
        let child = sealed.as_ref().ok().copied().flatten();
        // A node that is not of this kind any more, or the peer's, keeps what it has.
        let _ = self.written_to(node, sealed.map(|_| ()));
        child
    }

    /// Wakes the readers of a node that was written to; a write without room in the quota aborts the session.
    fn written_to(
        &mut self,
        node: NodeKey,
        written: Result<(), Unwritten>,
    ) -> Result<(), WriteError> {
        self.readers
            .wake(node, &mut self.graph, &mut self.lifecycle);
        written.map_err(|unwritten| match unwritten {
            Unwritten::Node(error) => error,
            Unwritten::Quota(status) => {
                self.abort(status);
                WriteError::Closed
            }
        })
    }

    /// Whether writes to a node are taken: those to a dropped node are discarded, which is no error (EV-911).
    fn takes(&self, node: NodeKey) -> Result<bool, WriteError> {
        let retained = self.graph.get(node).fate == NodeFate::Retained;
        match self.lifecycle.phase {
            SessionPhase::Aborted(_) => Err(WriteError::Closed),
            SessionPhase::Finished if retained => Err(WriteError::Closed),
            _ => Ok(retained),
        }
    }
}
