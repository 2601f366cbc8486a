//! Removes nodes before the session ends: DROP (EV-911) and expiry of their time to live (EV-912).
//!
//! Nodes that go together are a batch with ONE count of holders: the readers that may still reach one of its nodes, and
//! its nodes of ours that are not wholly sent. The content is freed when the last holder has released the batch, and
//! never before: a reader that began before the DROP reads to the end, and the peer gets the end of every node.
//!
//! The id of a dropped node stays known: fragments that arrive for it are ignored. (Where the graph removes ids, that
//! holds for the most recent ones only.)
//!
//! ```text
//!   retained ──DROP, TTL──► dropped ──no holder is left──► removed
//! ```

mod ttl;

use std::collections::HashSet;
use std::time::Duration;

use self::ttl::Ttls;
use super::graph::Graph;
use super::port::NodeKey;
use super::readers::cursor::TreeCursor;
use super::readers::{HeldBatches, Readers};
use super::slab::{Slab, SlabKey};
use crate::evergreen::SessionLimits;
use crate::time::Time;

/// Whether a node is retained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum NodeFate {
    /// An ordinary node.
    #[default]
    Retained,
    /// Dropped with this batch: it accepts nothing more, and readers inside may finish.
    Dropped(SlabKey),
    /// Only its id is left.
    Removed,
}

/// Nodes that were dropped together.
#[derive(Debug, Default)]
struct DropBatch {
    nodes: Vec<NodeKey>,
    /// Readers that may still reach one of its nodes, and nodes of ours that are not wholly sent.
    holders: usize,
}

/// The dropped nodes that are still held, and the nodes that will expire.
#[derive(Debug, Default)]
pub(super) struct Lifetime {
    batches: Slab<DropBatch>,
    /// Most sessions never set a TTL.
    ttls: Option<Box<Ttls>>,
}

impl Lifetime {
    /// Number of batches that are still held.
    #[cfg(test)]
    pub(super) const fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Marks nodes as dropped; where the flag is set, also every node below that no other live node lists. Returns the
    /// batch, and the quota bytes of its nodes. Nothing is freed before [`Self::hold`] has counted the holders.
    pub(super) fn mark(&mut self, named: &[(NodeKey, bool)], graph: &mut Graph) -> (SlabKey, u64) {
        let batch = self.batches.insert(DropBatch::default());
        let (mut nodes, mut orphans, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut stack: Vec<(NodeKey, bool)> = named.iter().rev().copied().collect();
        while let Some((key, whole)) = stack.pop() {
            if graph.get(key).fate != NodeFate::Retained {
                continue;
            }
            // Collected first: `drop_unread` drops the early pieces, and their children have to be unlisted as well.
            let children: Vec<NodeKey> = graph.get(key).children().collect();
            bytes += graph.drop_unread(key);
            graph.get_mut(key).fate = NodeFate::Dropped(batch);
            nodes.push(key);
            for child in children {
                if graph.unlist(child) {
                    if whole {
                        stack.push((child, true));
                    } else {
                        orphans.push(child);
                    }
                }
            }
        }
        // Last: an orphan that this call names as well has to be counted with the content that it still has.
        for orphan in orphans {
            graph.release(orphan);
        }
        if let Some(known) = self.batches.get_mut(batch) {
            known.nodes = nodes;
        }
        (batch, bytes)
    }

    /// Adds a node that only a dropped node lists.
    pub(super) fn add(&mut self, batch: SlabKey, node: NodeKey, graph: &mut Graph) {
        graph.unlist(node);
        if let Some(known) = self.batches.get_mut(batch) {
            known.nodes.push(node);
            graph.get_mut(node).fate = NodeFate::Dropped(batch);
        }
    }

    /// The nodes of a batch.
    pub(super) fn nodes(&self, batch: SlabKey) -> &[NodeKey] {
        self.batches.get(batch).map_or(&[], |batch| &batch.nodes)
    }

    /// Counts the holders of a batch: the cursors that may still reach one of its nodes, and its unsent nodes. The
    /// searches of one message share a budget (D-27); once `edges_left` is used up, a cursor is assumed to reach them.
    pub(super) fn hold(
        &mut self,
        batch: SlabKey,
        readers: &mut Readers,
        graph: &mut Graph,
        edges_left: &mut u32,
    ) {
        let mut holders = Vec::new();
        // A DROP of nodes that are dropped already could be repeated without end, so it searches nothing.
        if !self.nodes(batch).is_empty() {
            let reaching = readers.iter();
            let reaching = reaching.filter(|(_, cursor)| reaches(cursor, batch, graph, edges_left));
            holders = reaching.map(|(id, _)| id).collect();
        }
        for id in &holders {
            if let Some(cursor) = readers.get_mut(*id) {
                cursor.holds.push(batch);
            }
        }
        // Each unsent node is one holder, and `wholly_sent` counts it down once.
        let unsent = self.unsent(batch, graph);
        if let Some(known) = self.batches.get_mut(batch) {
            known.holders = holders.len() + unsent;
        }
        // A batch that nobody holds is freed now: no later event would do it.
        self.let_go(batch, 0, graph);
    }

    /// A reader has ended that held these batches.
    pub(super) fn reader_ended(&mut self, held: HeldBatches, graph: &mut Graph) {
        for batch in held {
            self.let_go(batch, 1, graph);
        }
    }

    /// The last fragment of a node was handed to the transport.
    pub(super) fn wholly_sent(&mut self, key: NodeKey, graph: &mut Graph) {
        if let NodeFate::Dropped(batch) = graph.get(key).fate {
            self.let_go(batch, 1, graph);
        }
    }

    /// Runs `resume`, which changes how much of each node is sent, and counts the unsent nodes anew.
    pub(super) fn recount<R>(
        &mut self,
        graph: &mut Graph,
        resume: impl FnOnce(&mut Graph) -> R,
    ) -> R {
        let batches: Vec<SlabKey> = self.batches.iter().map(|(key, _)| key).collect();
        for &batch in &batches {
            let before = self.unsent(batch, graph);
            if let Some(known) = self.batches.get_mut(batch) {
                known.holders = known.holders.saturating_sub(before);
            }
        }
        // Between the two counts nothing is freed: a batch without a holder here may have one again after the rewind.
        let result = resume(graph);
        for &batch in &batches {
            let after = self.unsent(batch, graph);
            if let Some(known) = self.batches.get_mut(batch) {
                known.holders += after;
            }
            self.let_go(batch, 0, graph);
        }
        result
    }

    /// Sets the time to live of a node from `since` on. An unknown or removed node is not an error.
    pub(super) fn set_ttl(
        &mut self,
        node: Option<NodeKey>,
        ttl: Duration,
        since: Time,
        limits: &SessionLimits,
        graph: &Graph,
    ) -> bool {
        let Some(node) = node.filter(|node| graph.get(*node).fate == NodeFate::Retained) else {
            return false;
        };
        let ttls = self.ttls.get_or_insert_default();
        ttls.set(node, ttl.min(limits.max_ttl), since);
        // Removed nodes keep their entries until they expire, and may be followed by any number of others.
        // At most half of the entries can be of live nodes then, so that each sweep removes the other half.
        if ttls.len() > 2 * limits.max_nodes {
            ttls.retain(|node| graph.get(node).fate == NodeFate::Retained);
        }
        true
    }

    /// When the next node expires.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.ttls.as_ref()?.next()
    }

    /// The nodes that have expired: those whose time has come, and what is below them and below no node with time left.
    pub(super) fn expired(&mut self, now: Time, graph: &Graph) -> Vec<(NodeKey, bool)> {
        let ttls = self.ttls.as_mut();
        let expired = ttls.map_or_else(Vec::new, |ttls| ttls.expired(now, graph));
        expired.into_iter().map(|node| (node, false)).collect()
    }

    fn unsent(&self, batch: SlabKey, graph: &Graph) -> usize {
        let nodes = self.nodes(batch).iter();
        nodes.filter(|node| graph.get(**node).is_unsent()).count()
    }

    /// `holders` of a batch release it; the content of a batch without holders is freed.
    fn let_go(&mut self, batch: SlabKey, holders: usize, graph: &mut Graph) {
        let Some(known) = self.batches.get_mut(batch) else {
            return;
        };
        known.holders = known.holders.saturating_sub(holders);
        if known.holders > 0 {
            return;
        }
        let nodes = self.batches.remove(batch).map_or(Vec::new(), |it| it.nodes);
        for key in nodes {
            graph.clear(key);
            graph.mark_removed(key);
        }
    }
}

/// Whether a cursor is inside a node of the batch, or may still reach one.
fn reaches(cursor: &TreeCursor, batch: SlabKey, graph: &Graph, edges: &mut u32) -> bool {
    let marked = |node: NodeKey| graph.get(node).fate == NodeFate::Dropped(batch);
    if cursor.inside().any(marked) {
        return true;
    }
    // Assuming that it does retains content for too long; assuming the opposite would take it from a reader.
    if *edges == 0 {
        return true;
    }
    // What lies behind the reader is not held: it reads each position once.
    let mut stack = cursor.ahead(graph);
    // Every node looked at is charged, leaves too: many readers times many children would be quadratic.
    *edges = edges.saturating_sub(u32::try_from(stack.len()).unwrap_or(u32::MAX));
    let mut seen = HashSet::with_hasher(graph.hasher());
    while let Some(node) = stack.pop() {
        if marked(node) {
            return true;
        }
        if !seen.insert(node) {
            continue;
        }
        for child in graph.get(node).edges() {
            let Some(left) = edges.checked_sub(1) else {
                return true;
            };
            *edges = left;
            stack.extend(child);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::graph::LogPiece;
    use crate::session::port::Config;
    use crate::session::tests::harness::T0;

    /// A graph with one complete leaf, and readers.
    fn machines() -> (Graph, Readers, NodeKey) {
        let config = Config::default();
        let mut graph = Graph::new(&config);
        let node = graph.mention("n").unwrap();
        let piece = LogPiece::Data("content".into());
        graph.hold(0, &piece).unwrap();
        graph.get_mut(node).log.append(piece).unwrap();
        graph.get_mut(node).log.end(()).unwrap();
        (graph, Readers::new(&config.limits, T0), node)
    }

    #[test]
    fn ev_911_content_is_freed_with_its_last_holder() {
        let (mut graph, mut readers, node) = machines();
        let first = readers.open(node, None);
        let second = readers.open(node, None);
        let mut lifetime = Lifetime::default();
        let (batch, bytes) = lifetime.mark(&[(node, false)], &mut graph);
        assert!(bytes > 0);
        lifetime.hold(batch, &mut readers, &mut graph, &mut 100);
        for reader in [first, second] {
            assert_eq!(graph.get(node).fate, NodeFate::Dropped(batch));
            let held = readers.close(reader, &mut graph);
            lifetime.reader_ended(held, &mut graph);
        }
        assert_eq!(graph.get(node).fate, NodeFate::Removed);
        assert_eq!(lifetime.batches(), 0);
        assert_eq!(graph.quota.retained(), 1, "its id stays known");
    }

    #[test]
    fn ev_911_dropping_a_dropped_node_leaves_no_batch() {
        let (mut graph, mut readers, node) = machines();
        let mut lifetime = Lifetime::default();
        for dropped in [true, false] {
            let (batch, bytes) = lifetime.mark(&[(node, false)], &mut graph);
            assert_eq!(bytes > 0, dropped);
            lifetime.hold(batch, &mut readers, &mut graph, &mut 100);
            assert_eq!(lifetime.batches(), 0);
        }
    }
}
