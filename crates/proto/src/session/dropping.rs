//! DROP: removes nodes before the session ends (EV-911).
//!
//! The id of a dropped node stays known: fragments that arrive for it are ignored. (Where the store removes ids, that
//! holds for the most recent ones only.)
//!
//! ```text
//!   retained ──DROP──► dropped ──last reader closed, wholly sent──► removed
//! ```

use std::collections::HashSet;

use super::SessionMachine;
use super::cursor::TreeCursor;
use super::port::{CursorId, NodeKey};
use super::release::released;
use super::slab::SlabKey;
use super::store::Store;

/// The retention state of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum NodeFate {
    /// An ordinary node.
    #[default]
    Retained,
    /// Dropped: it accepts nothing more, and readers inside may finish.
    Dropped(SlabKey),
    /// Only its id is left.
    Removed,
}

/// Nodes that were dropped together, with the readers that still use them.
#[derive(Debug, Default)]
pub(super) struct DropBatch {
    nodes: Vec<NodeKey>,
    readers: Vec<CursorId>,
    /// Number of its nodes that are ours and not wholly sent.
    unsent: usize,
}

impl SessionMachine {
    /// Drops nodes; where the flag is set, also every node below that no other live node lists. Returns the number of
    /// nodes and of bytes dropped.
    pub(super) fn drop_nodes(&mut self, named: &[(NodeKey, bool)]) -> (usize, u64) {
        let (batch, bytes) = self.store.mark_for_removal(named);
        let nodes = self.store.batch_nodes(batch).to_vec();
        if nodes.is_empty() {
            self.store.keep_for(batch, Vec::new());
            return (0, 0);
        }
        for &node in &nodes {
            if self.is_closed() {
                return (nodes.len(), bytes);
            }
            let known = self.store.get(node);
            if known.owner.is_local() && !known.is_complete() {
                // Ends with a status, so that the peer neither waits for the rest nor takes the part it has for the
                // whole.
                let status = released(&self.store, node);
                let _ = self.seal(node, Some(status));
            }
        }
        if self.is_closed() {
            return (nodes.len(), bytes);
        }
        let readers = self.readers_of(batch);
        for reader in &readers {
            if let Some(cursor) = self.cursors.get_mut(reader.0) {
                cursor.holds = true;
            }
        }
        self.store.keep_for(batch, readers);
        for node in &nodes {
            self.wake(*node);
        }
        self.inbound.closures_changed();
        self.bytes_were_read();
        (nodes.len(), bytes)
    }

    /// The cursors that may still reach one of these nodes. The searches of one message share a budget (D-27); once it
    /// is used up, a cursor is assumed to reach them.
    fn readers_of(&mut self, batch: SlabKey) -> Vec<CursorId> {
        let mut readers = Vec::new();
        for (key, cursor) in self.cursors.iter() {
            let edges = &mut self.search.edges_left;
            if reaches(cursor, batch, &self.store, edges) {
                readers.push(CursorId(key));
            }
        }
        readers
    }

    /// Removes a closed reader from its nodes and from the drop batches that wait for it.
    pub(super) fn reader_closed(&mut self, id: CursorId) {
        let Some(cursor) = self.cursors.get_mut(id.0) else {
            return;
        };
        cursor.abandon(&mut self.store);
        if std::mem::take(&mut cursor.holds) {
            self.store.stop_keeping_for(id);
        }
    }
}

/// Whether a cursor is inside a node of the batch, or may still reach one.
fn reaches(cursor: &TreeCursor, batch: SlabKey, store: &Store, edges: &mut u32) -> bool {
    let marked = |node: NodeKey| store.get(node).fate == NodeFate::Dropped(batch);
    if cursor.inside().any(marked) {
        return true;
    }
    if *edges == 0 {
        return true;
    }
    let mut stack = cursor.ahead(store);
    // Every node looked at is charged, leaves too: many readers times many children would be quadratic.
    *edges = edges.saturating_sub(u32::try_from(stack.len()).unwrap_or(u32::MAX));
    let mut seen = HashSet::with_hasher(store.hasher());
    while let Some(node) = stack.pop() {
        if marked(node) {
            return true;
        }
        if !seen.insert(node) {
            continue;
        }
        for child in store.get(node).edges() {
            let Some(left) = edges.checked_sub(1) else {
                return true;
            };
            *edges = left;
            stack.extend(child);
        }
    }
    false
}

impl Store {
    /// Marks nodes as dropped. Returns the batch, and the quota bytes of its nodes.
    fn mark_for_removal(&mut self, named: &[(NodeKey, bool)]) -> (SlabKey, u64) {
        let batch = self.drops.insert(DropBatch::default());
        let (mut nodes, mut orphans, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut stack: Vec<(NodeKey, bool)> = named.iter().rev().copied().collect();
        while let Some((key, whole)) = stack.pop() {
            if self.get(key).fate != NodeFate::Retained {
                continue;
            }
            let children: Vec<NodeKey> = self.get(key).children().collect();
            let node = self.get_mut(key);
            node.fate = NodeFate::Dropped(batch);
            bytes += node.content_cost();
            let unread = std::mem::take(&mut node.unread);
            // Fragments buffered ahead of a gap will never be read.
            let early = std::mem::take(&mut node.early);
            let early: u64 = early.iter().map(|(seq, piece)| piece.cost(*seq)).sum();
            self.unread -= unread;
            self.give_back(early);
            nodes.push(key);
            for child in children {
                if self.unlist(child) {
                    if whole {
                        stack.push((child, true));
                    } else {
                        orphans.push(child);
                    }
                }
            }
        }
        for orphan in orphans {
            self.release(orphan);
        }
        if let Some(known) = self.drops.get_mut(batch) {
            known.nodes = nodes;
        }
        (batch, bytes)
    }

    /// Drops a node that only a dropped node lists.
    pub(super) fn drop_with(&mut self, batch: SlabKey, node: NodeKey) {
        self.unlist(node);
        if let Some(known) = self.drops.get_mut(batch) {
            known.nodes.push(node);
            self.get_mut(node).fate = NodeFate::Dropped(batch);
        }
    }

    fn batch_nodes(&self, batch: SlabKey) -> &[NodeKey] {
        self.drops.get(batch).map_or(&[], |batch| &batch.nodes)
    }

    /// Whether this reader may still read nodes of the batch.
    pub(super) fn keeps_for(&self, batch: SlabKey, reader: CursorId) -> bool {
        let batch = self.drops.get(batch);
        batch.is_some_and(|batch| batch.readers.contains(&reader))
    }

    fn keep_for(&mut self, batch: SlabKey, readers: Vec<CursorId>) {
        let unsent = self
            .batch_nodes(batch)
            .iter()
            .filter(|node| self.get(**node).is_unsent())
            .count();
        if let Some(known) = self.drops.get_mut(batch) {
            (known.readers, known.unsent) = (readers, unsent);
        }
        self.free_if_done(batch);
    }

    fn stop_keeping_for(&mut self, reader: CursorId) {
        let retained: Vec<SlabKey> = self
            .drops
            .iter()
            .filter(|(_, batch)| batch.readers.contains(&reader))
            .map(|(key, _)| key)
            .collect();
        for batch in retained {
            if let Some(known) = self.drops.get_mut(batch) {
                known.readers.retain(|other| *other != reader);
            }
            self.free_if_done(batch);
        }
    }

    /// The last fragment of a node was handed to the transport.
    pub(super) fn was_wholly_sent(&mut self, key: NodeKey) {
        if let NodeFate::Dropped(batch) = self.get(key).fate {
            if let Some(known) = self.drops.get_mut(batch) {
                known.unsent = known.unsent.saturating_sub(1);
            }
            self.free_if_done(batch);
        }
    }

    /// Recounts the unsent nodes of all batches, after a resume has changed what is sent.
    pub(super) fn recount_unsent(&mut self) {
        let batches: Vec<SlabKey> = self.drops.iter().map(|(key, _)| key).collect();
        for batch in batches {
            let nodes = self.batch_nodes(batch).iter();
            let unsent = nodes.filter(|node| self.get(**node).is_unsent()).count();
            if let Some(known) = self.drops.get_mut(batch) {
                known.unsent = unsent;
            }
            self.free_if_done(batch);
        }
    }

    fn free_if_done(&mut self, batch: SlabKey) {
        let done = |batch: &DropBatch| batch.readers.is_empty() && batch.unsent == 0;
        if !self.drops.get(batch).is_some_and(done) {
            return;
        }
        let nodes = self.drops.remove(batch).map_or(Vec::new(), |it| it.nodes);
        for key in nodes {
            let node = self.get_mut(key);
            let bytes = node.content_cost();
            node.log.clear();
            node.metadata = None;
            node.readers = None;
            self.give_back(bytes);
            self.mark_removed(key);
        }
    }
}
