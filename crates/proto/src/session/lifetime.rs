//! Removes nodes before the session ends: DROP (EV-911) and expiry of their time to live (EV-912).
//!
//! Nodes that go together are a batch, with counts of its holders: the readers that may still reach one of its nodes,
//! and its nodes of ours that are not wholly sent. The content is freed when the last holder has released the batch, and
//! never before: a reader that began before the DROP reads to the end, and the peer gets the end of every node.
//!
//! The id of a dropped node stays known: fragments that arrive for it are ignored. (Where the graph removes ids, that
//! holds for the most recent ones only.)
//!
//! ```text
//!   retained ──DROP, TTL──► dropped ──no holder is left──► removed
//! ```

mod ttl;

use std::time::Duration;

use self::ttl::Ttls;
use super::graph::Graph;
use super::graph::closure::Closure;
use super::port::NodeKey;
use super::readers::cursor::TreeCursor;
use super::readers::{HeldBatches, Readers};
use super::slab::{Slab, SlabKey};
use crate::evergreen::Status;
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
    /// Number of readers that may still reach one of its nodes.
    readers: usize,
    /// Number of its nodes of ours that are not wholly sent.
    unsent: usize,
}

/// The dropped nodes that are still held, and the nodes that will expire.
#[derive(Debug, Default)]
pub(super) struct Lifetime {
    batches: Slab<DropBatch>,
    /// The last batch, if the budget was used up when its readers were searched.
    unsearched: Option<SlabKey>,
    /// Most sessions never set a TTL.
    ttls: Option<Box<Ttls>>,
}

impl Lifetime {
    /// Number of batches that are still held.
    #[cfg(test)]
    pub(super) const fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Marks nodes as dropped; where the flag is set, also every node below that no other live node lists. Returns
    /// their batch, the nodes and their quota bytes. Nothing is freed before [`Self::hold`] has counted the holders.
    pub(super) fn mark(
        &mut self,
        named: &[(NodeKey, bool)],
        graph: &mut Graph,
        edges_left: u32,
    ) -> (SlabKey, Vec<NodeKey>, u64) {
        // Without a budget every reader is taken for a holder. One batch for all such nodes, or each DROP would add an
        // entry to each reader.
        let last = self.unsearched.filter(|_| edges_left == 0);
        let last = last.filter(|batch| self.batches.get(*batch).is_some());
        let batch = last.unwrap_or_else(|| self.batches.insert(DropBatch::default()));
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
            if let Some(ttls) = &mut self.ttls
                // It does not protect what is below it any more.
                && ttls.remove(key).is_some()
            {
                graph.quota.give_back(TTL_BYTES);
            }
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
        (batch, nodes, bytes)
    }

    /// Adds nodes that were marked to their batch, and counts its holders: the cursors that may still reach one of
    /// them, and the unsent ones. The searches of one message share a budget (D-27); once `edges_left` is used up, a
    /// cursor is assumed to reach them.
    pub(super) fn hold(
        &mut self,
        batch: SlabKey,
        nodes: &[NodeKey],
        readers: &mut Readers,
        graph: &mut Graph,
        edges_left: &mut u32,
    ) {
        let Some(known) = self.batches.get_mut(batch) else {
            return;
        };
        known.nodes.extend_from_slice(nodes);
        // Each unsent node is one holder, and `wholly_sent` counts it down once.
        known.unsent += unsent(nodes, graph);
        // A DROP of nodes that are dropped already could be repeated without end, so it searches nothing; nor is there
        // anything to search for where all readers hold the batch.
        if !nodes.is_empty() && known.readers < readers.len() {
            for cursor in readers.iter_mut() {
                // No batch is newer, so that this one is the last that the cursor holds, if it does.
                let holds = cursor.holds.last() == Some(&batch);
                if !holds && reaches(cursor, batch, graph, edges_left) {
                    cursor.holds.push(batch);
                    known.readers += 1;
                }
            }
            self.unsearched = (*edges_left == 0).then_some(batch);
        }
        // A batch that nobody holds is freed now: no later event would do it.
        self.change(batch, graph, |_, _| {});
    }

    /// A reader has ended that held these batches.
    pub(super) fn reader_ended(&mut self, held: HeldBatches, graph: &mut Graph) {
        for batch in held {
            self.change(batch, graph, |known, _| {
                known.readers = known.readers.saturating_sub(1)
            });
        }
    }

    /// The last fragment of a node was handed to the transport.
    pub(super) fn wholly_sent(&mut self, key: NodeKey, graph: &mut Graph) {
        if let NodeFate::Dropped(batch) = graph.get(key).fate {
            self.change(batch, graph, |known, _| {
                known.unsent = known.unsent.saturating_sub(1)
            });
        }
    }

    /// Counts the unsent nodes anew, after a change of how much of each node is sent.
    pub(super) fn recount(&mut self, graph: &mut Graph) {
        let batches: Vec<SlabKey> = self.batches.iter().map(|(key, _)| key).collect();
        for batch in batches {
            self.change(batch, graph, |known, graph| {
                known.unsent = unsent(&known.nodes, graph);
            });
        }
    }

    /// Sets the time to live of a node from `since` on. An unknown or removed node is not an error.
    ///
    /// # Errors
    /// The quota has no room for one more node with a time to live.
    pub(super) fn set_ttl(
        &mut self,
        node: Option<NodeKey>,
        ttl: Duration,
        since: Time,
        graph: &mut Graph,
    ) -> Result<bool, Status> {
        let Some(node) = node.filter(|node| graph.get(*node).fate == NodeFate::Retained) else {
            return Ok(false);
        };
        let ttls = self.ttls.get_or_insert_default();
        if !ttls.has(node) {
            graph.quota.retain(TTL_BYTES)?;
        }
        ttls.set(node, ttl.min(graph.limits().max_ttl), since);
        Ok(true)
    }

    /// Quota bytes of the nodes with a time to live of their own.
    #[cfg(any(test, fuzzing))]
    pub(super) fn ttl_bytes(&self) -> u64 {
        let ttls = self.ttls.as_ref().map_or(0, |ttls| ttls.len());
        ttls as u64 * TTL_BYTES
    }

    /// When the next node expires.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.ttls.as_ref()?.next()
    }

    /// The nodes that have expired. What a budget of `visits` leaves undecided is retained, and checked again later.
    pub(super) fn expired(
        &mut self,
        now: Time,
        graph: &mut Graph,
        visits: &mut u32,
    ) -> Vec<(NodeKey, bool)> {
        let Some(ttls) = &mut self.ttls else {
            return Vec::new();
        };
        let before = ttls.len();
        let expired = ttls.expired(now, graph, visits);
        // Before the nodes are marked, which refunds only what is still entered.
        let taken = (before - ttls.len()) as u64;
        graph.quota.give_back(taken * TTL_BYTES);
        expired
    }

    /// Changes the holders of a batch. The content of a batch without holders is freed.
    fn change(
        &mut self,
        batch: SlabKey,
        graph: &mut Graph,
        change: impl FnOnce(&mut DropBatch, &Graph),
    ) {
        let Some(known) = self.batches.get_mut(batch) else {
            return;
        };
        change(known, graph);
        if known.readers + known.unsent > 0 {
            return;
        }
        for key in std::mem::take(&mut known.nodes) {
            graph.clear(key);
            graph.mark_removed(key);
        }
        self.batches.remove(batch);
    }
}

/// Number of these nodes of which the transport has not taken everything.
fn unsent(nodes: &[NodeKey], graph: &Graph) -> usize {
    let unsent = nodes.iter().filter(|node| graph.get(**node).is_unsent());
    unsent.count()
}

/// Whether a cursor is inside a node of the batch, or may still reach one. Where `edges_left` does not suffice to tell,
/// it is assumed to: that retains content for too long, the opposite would take it from a reader.
fn reaches(cursor: &TreeCursor, batch: SlabKey, graph: &Graph, edges_left: &mut u32) -> bool {
    let marked = |node: NodeKey| graph.get(node).fate == NodeFate::Dropped(batch);
    // The reader and its path are charged as well: many deep readers times many drops would be quadratic.
    let around = u32::try_from(cursor.depth()).unwrap_or(u32::MAX);
    let enough = *edges_left > around;
    *edges_left = edges_left.saturating_sub(around.saturating_add(1));
    if !enough || cursor.inside().any(marked) {
        return true;
    }
    // What lies behind the reader is not held: it reads each position once.
    Closure::new(graph, cursor.ahead(graph), edges_left).may_reach(marked)
}

/// Bytes that the quota counts for a node with a time to live: its entries in two trees.
const TTL_BYTES: u64 = 64;

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
        let (batch, nodes, bytes) = lifetime.mark(&[(node, false)], &mut graph, 100);
        assert!(bytes > 0);
        lifetime.hold(batch, &nodes, &mut readers, &mut graph, &mut 100);
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
            let (batch, nodes, bytes) = lifetime.mark(&[(node, false)], &mut graph, 100);
            assert_eq!(bytes > 0, dropped);
            lifetime.hold(batch, &nodes, &mut readers, &mut graph, &mut 100);
            assert_eq!(lifetime.batches(), 0);
        }
    }
}
