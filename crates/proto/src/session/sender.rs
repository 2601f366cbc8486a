//! Chooses what is sent next: actions first, then the nodes of ours that have something to send, in turns.
//!
//! Content is not queued twice: a node's log is the queue, and the transport is one more cursor on it. `bytes` is what
//! the queue counts: everything that nodes in their turn have appended and the transport has not taken.

mod produce;
mod rewind;

use std::collections::VecDeque;

use super::graph::{FRAGMENT_BYTES, Graph, LogPiece, NodeKind};
use super::lifetime::NodeFate;
use super::port::{LeafOrder, NodeKey, SessionStats};
use crate::evergreen::{Action, Chunk, Fragment, Payload, SessionLimits, WireMessage};

pub(super) use self::produce::{ItemStart, Unwritten, writable};
pub(super) use self::rewind::rewind;

/// The queue to the transport; see the module documentation.
#[derive(Debug, Default)]
pub(super) struct Sender {
    order: LeafOrder,
    /// Nodes with something to send, in order of their turns.
    turns: VecDeque<NodeKey>,
    /// Actions are sent before fragments, so that the peer can start (EV-215).
    actions: Vec<Action>,
    /// Queued bytes.
    bytes: usize,
    /// Whether a producer was refused because the queue was full.
    refused: bool,
    /// Dropped nodes that were wholly sent since [`Sender::take_dropped`] was called last.
    dropped: Vec<NodeKey>,
}

impl Sender {
    pub(super) fn new(order: LeafOrder) -> Self {
        Self {
            order,
            ..Self::default()
        }
    }

    /// The order in which leaves are sent from now on; what is lined up already stays so until [`Self::refill`].
    pub(super) const fn set_leaf_order(&mut self, order: LeafOrder) {
        self.order = order;
    }

    /// Whether nothing is queued, including tree ends that wait for their children.
    pub(super) const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether producers may write. After `false`, [`Self::has_room_again`] holds once.
    pub(super) const fn has_room(&mut self, limits: &SessionLimits) -> bool {
        let room = self.bytes < limits.outbound_queue_bytes;
        // Remembered, so that the wake-up is sent only where a producer waits for it.
        self.refused |= !room;
        room
    }

    /// Whether a producer that was refused may write again: once half of the queue is empty, so that producers are not
    /// woken for every message.
    pub(super) const fn has_room_again(&mut self, limits: &SessionLimits) -> bool {
        let again = self.refused && self.bytes <= limits.outbound_queue_bytes / 2;
        if again {
            self.refused = false;
        }
        again
    }

    /// Takes the dropped nodes that were wholly sent.
    pub(super) fn take_dropped(&mut self) -> Vec<NodeKey> {
        std::mem::take(&mut self.dropped)
    }

    /// Queued bytes.
    #[cfg(test)]
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a message can be taken now.
    pub(super) fn is_sendable(&self) -> bool {
        !self.turns.is_empty() || !self.actions.is_empty()
    }

    pub(super) fn push_action(&mut self, action: Action) {
        // Counted but never refused: an action has no producer that could wait.
        self.bytes += action_bytes(&action);
        self.actions.push(action);
    }

    /// Queues a piece that was appended to a node of ours.
    fn push(&mut self, key: NodeKey, bytes: usize, graph: &mut Graph) {
        let bytes = bytes + FRAGMENT_BYTES;
        let sending = graph.get_mut(key).sending.get_or_insert_default();
        match &mut sending.pending_at {
            // Bytes of a node whose turn has not come are not counted in the queue: only the end of another node would
            // make room for them, so producers must not wait for that. The quota alone bounds them.
            Some(retained) => *retained += bytes,
            None => {
                self.bytes += bytes;
                self.queue(key, graph);
            }
        }
    }

    /// Queues everything of a node that was not sent; with the node itself, if its turn has not come.
    fn queue_rest(&mut self, key: NodeKey, graph: &mut Graph) {
        let node = graph.get_mut(key);
        // Summed from the log and not added up: after a rewind nothing of the queue's earlier count holds.
        let sent = node.sending.as_ref().map_or(0, |sending| sending.sent);
        let pieces = (sent..node.next_seq()).filter_map(|seq| node.piece(seq));
        let bytes: usize = pieces.map(|piece| piece.len() + FRAGMENT_BYTES).sum();
        let sending = node.sending.get_or_insert_default();
        match &mut sending.pending_at {
            Some(retained) => *retained = bytes,
            None if bytes > 0 => {
                self.bytes += bytes;
                self.queue(key, graph);
            }
            None => {}
        }
    }

    /// Adds a node to the turns.
    fn queue(&mut self, key: NodeKey, graph: &mut Graph) {
        let sending = graph.get_mut(key).sending.get_or_insert_default();
        // At most one place in the turns: a second one would give the node twice its share (EV-706).
        if !sending.queued && sending.pending_at.is_none() {
            sending.queued = true;
            self.turns.push_back(key);
        }
    }

    /// The next message, if anything can be sent. Nodes take turns by bytes; the fragments of a node keep their order.
    pub(super) fn message(
        &mut self,
        graph: &mut Graph,
        limits: &SessionLimits,
        coalesce: bool,
        stats: &mut SessionStats,
    ) -> Option<WireMessage> {
        // With a budget of 0 each fragment fills its message.
        let budget = if coalesce { limits.coalesce_bytes } else { 0 };
        let mut message = WireMessage {
            actions: std::mem::take(&mut self.actions),
            ..WireMessage::default()
        };
        let mut used = message.actions.iter().map(action_bytes).sum::<usize>();
        self.bytes -= used;
        while let Some(key) = self.turns.pop_front() {
            let mut turn = 0;
            while let Some(bytes) = next_bytes(key, graph) {
                // The first fragment of a message is taken whatever its size: a larger one goes alone (EV-706).
                let full = used + bytes > budget
                    && !(message.fragments.is_empty() && message.actions.is_empty());
                if full {
                    // This node's turn continues in the next message.
                    self.turns.push_front(key);
                    return Some(message);
                }
                // Checked after the fragment, so that a fragment larger than a turn is sent all the same.
                if turn >= TURN_BYTES {
                    break;
                }
                message.fragments.push(self.take(key, graph));
                stats.fragments_out += 1;
                stats.bytes_out += (bytes - FRAGMENT_BYTES) as u64;
                self.bytes -= bytes;
                used += bytes;
                turn += bytes;
            }
            if next_bytes(key, graph).is_some() {
                self.turns.push_back(key);
            } else if let Some(sending) = &mut graph.get_mut(key).sending {
                sending.queued = false;
            }
        }
        (!message.fragments.is_empty() || !message.actions.is_empty()).then_some(message)
    }

    /// Takes the next fragment of a node; the caller knows that there is one.
    fn take(&mut self, key: NodeKey, graph: &mut Graph) -> Fragment {
        let node = graph.get_mut(key);
        let sent = node.sending.as_mut().map_or(0, |sending| {
            sending.sent += 1;
            sending.sent - 1
        });
        let last = node.last == Some(sent);
        let mut fragment = Fragment {
            id: node.id.clone(),
            seq: i32::try_from(sent).unwrap_or(i32::MAX),
            last,
            ..Fragment::default()
        };
        let node = graph.get(key);
        // On every fragment of a leaf, its end included: which of them carry metadata on the wire is the codec's decision
        // (EV-404, EV-721).
        let metadata = node.metadata.clone();
        let (metadata, payload) = match node.piece(sent) {
            // No payload instead of an empty one: metadata alone is a chunk (EV-403).
            Some(LogPiece::Begin(metadata, data)) if data.is_empty() => {
                (Some(metadata.clone()), None)
            }
            Some(LogPiece::Begin(metadata, data)) => {
                (Some(metadata.clone()), Some(Payload::Data(data.clone())))
            }
            Some(LogPiece::Data(data)) => (metadata, Some(Payload::Data(data.clone()))),
            Some(LogPiece::Status(status)) => (None, Some(Payload::Status(status.clone()))),
            Some(LogPiece::Empty) if node.kind == NodeKind::Leaf => (metadata, None),
            Some(LogPiece::Children(children)) => {
                let ids = children.iter().map(|&child| graph.get(child).id.clone());
                fragment.children = ids.collect();
                // Cloned, because announcing them changes the graph that lends them.
                let children = children.clone();
                self.announced(key, &children, graph);
                (None, None)
            }
            // We never write references or slices.
            Some(LogPiece::Empty | LogPiece::Ref(_) | LogPiece::Slice(_)) | None => (None, None),
        };
        let is_chunk = metadata.is_some() || payload.is_some();
        fragment.chunk = is_chunk.then_some(Chunk { metadata, payload });
        if last {
            self.wholly_sent(key, graph);
        }
        // The transport is a reader too: what it has passed may be released (EV-955).
        graph.release(key);
        fragment
    }

    /// Handles a node that was wholly sent: the tree that lists it may end, if it waited for that.
    fn wholly_sent(&mut self, key: NodeKey, graph: &mut Graph) {
        let parent = graph.get_mut(key).sending.as_mut().and_then(|sending| {
            let awaited = std::mem::take(&mut sending.awaited);
            sending.parent.filter(|_| awaited)
        });
        if graph.get(key).fate != NodeFate::Retained {
            self.dropped.push(key);
        }
        let Some(parent) = parent else { return };
        if let Some(sending) = &mut graph.get_mut(parent).sending {
            sending.open_children -= 1;
        }
        // The end of the tree may be all that is left, and only this child has held it back.
        if next_bytes(parent, graph).is_some() {
            self.queue(parent, graph);
        }
        self.next_turn(parent, Some(key), graph);
    }

    /// These children of a tree were announced to the peer: the first of them may be sent.
    fn announced(&mut self, tree: NodeKey, children: &[NodeKey], graph: &mut Graph) {
        let mut count = 0;
        for &child in children {
            let Some(sending) = &mut graph.get_mut(child).sending else {
                continue;
            };
            let waits = sending.parent == Some(tree) && sending.pending_at.is_some();
            // Once, however often it is listed: it stands in the line once.
            count += usize::from(waits && !std::mem::replace(&mut sending.known, true));
        }
        if let Some(sending) = &mut graph.get_mut(tree).sending {
            sending.announced += count;
        }
        self.next_turn(tree, None, graph);
    }

    /// Starts the next leaf of a tree, where the peer needs leaves one after the other (EV-722).
    fn next_turn(&mut self, tree: NodeKey, ended: Option<NodeKey>, graph: &mut Graph) {
        let Some(sending) = &mut graph.get_mut(tree).sending else {
            return;
        };
        // Another leaf still has the turn, or no leaf may follow yet: a client loses what comes before it is announced
        // (EV-722).
        if sending.turn != ended || sending.announced == 0 {
            sending.turn = sending.turn.filter(|turn| Some(*turn) != ended);
            return;
        }
        sending.announced -= 1;
        sending.turn = sending.line.pop_front();
        let Some(next) = sending.turn else { return };
        let retained = graph.get_mut(next).sending.as_mut();
        self.bytes += retained
            .and_then(|sending| sending.pending_at.take())
            .unwrap_or_default();
        if next_bytes(next, graph).is_some() {
            self.queue(next, graph);
        }
    }
}

/// The size of the next fragment of a node, or `None` if none may be sent now.
fn next_bytes(key: NodeKey, graph: &Graph) -> Option<usize> {
    let node = graph.get(key);
    let sending = node.sending.as_ref()?;
    let piece = node.piece(sending.sent)?;
    // A tree ends after everything below it (EV-508), and so does the status of an action (EV-735).
    // A piece that is not sendable yet stays in the log; `wholly_sent` queues its node again.
    let retained = node.last == Some(sending.sent) && sending.open_children > 0;
    (!retained).then_some(piece.len() + FRAGMENT_BYTES)
}

/// The size of an action in the queue.
pub(super) fn action_bytes(action: &Action) -> usize {
    let params = action
        .inputs
        .iter()
        .chain(&action.outputs)
        .map(|param| param.name.len() + param.id.len());
    let configs = action
        .configs
        .iter()
        .map(|any| any.type_url.len() + any.value.len());
    FRAGMENT_BYTES + action.name.len() + params.chain(configs).sum::<usize>()
}

/// Bytes that a node may send before the next node has its turn.
const TURN_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::evergreen::Metadata;
    use crate::session::graph::NodeProducer;
    use crate::session::port::Config;

    /// A graph with two nodes of ours.
    fn machines() -> (Graph, Sender, [NodeKey; 2]) {
        let mut graph = Graph::new(&Config::default());
        let nodes = ["a", "b"].map(|id| {
            let node = graph.mention(id).unwrap();
            graph.get_mut(node).owner = NodeProducer::Local(None);
            node
        });
        (graph, Sender::new(LeafOrder::Free), nodes)
    }

    fn message(sender: &mut Sender, graph: &mut Graph) -> Option<WireMessage> {
        let limits = SessionLimits::default();
        sender.message(graph, &limits, true, &mut SessionStats::default())
    }

    #[test]
    fn ev_508_a_tree_ends_after_its_children() {
        let (mut graph, mut sender, [tree, child]) = machines();
        let metadata = Arc::new(Metadata::of("text/plain"));
        writable(&mut graph, tree, NodeKind::Tree).unwrap();
        sender.list(&mut graph, tree, &[child]).unwrap();
        sender.end(&mut graph, tree, &metadata).unwrap();
        let sent = message(&mut sender, &mut graph).unwrap();
        assert!(sent.fragments.iter().all(|fragment| !fragment.last));
        assert!(!sender.is_sendable() && !sender.is_empty(), "its end waits");
        sender
            .put(
                &mut graph,
                child,
                &metadata,
                Bytes::from_static(b"x"),
                ItemStart::First,
            )
            .unwrap();
        sender.end(&mut graph, child, &metadata).unwrap();
        let sent = message(&mut sender, &mut graph).unwrap();
        let ended = sent.fragments.iter().filter(|fragment| fragment.last);
        let ended: Vec<&str> = ended.map(|fragment| &*fragment.id).collect();
        assert_eq!(ended, ["b", "a"]);
        assert!(sender.is_empty());
    }

    #[test]
    fn ev_722_a_child_that_is_listed_twice_is_announced_once() {
        let (mut graph, _, [tree, child]) = machines();
        let mut sender = Sender::new(LeafOrder::Reading);
        let other = graph.make().unwrap();
        graph.get_mut(other).owner = NodeProducer::Local(None);
        writable(&mut graph, tree, NodeKind::Tree).unwrap();
        sender.list(&mut graph, tree, &[other]).unwrap();
        for _ in 0..2 {
            sender.list(&mut graph, tree, &[child, child]).unwrap();
        }
        message(&mut sender, &mut graph).unwrap();
        let sending = graph.get(tree).sending.as_deref().unwrap();
        assert_eq!((sending.turn, sending.announced), (Some(other), 1));
    }

    #[test]
    fn ev_803_a_refused_producer_is_notified_once_when_half_of_the_queue_is_empty() {
        let (mut graph, mut sender, [node, _]) = machines();
        let metadata = Arc::new(Metadata::of("text/plain"));
        let limits = SessionLimits {
            outbound_queue_bytes: 100,
            ..SessionLimits::default()
        };
        let data = Bytes::from_static(&[0; 80]);
        assert!(sender.has_room(&limits) && !sender.has_room_again(&limits));
        sender
            .put(&mut graph, node, &metadata, data, ItemStart::First)
            .unwrap();
        assert!(!sender.has_room(&limits) && !sender.has_room_again(&limits));
        message(&mut sender, &mut graph);
        assert!(sender.has_room_again(&limits) && !sender.has_room_again(&limits));
    }
}
