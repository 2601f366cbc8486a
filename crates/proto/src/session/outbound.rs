//! The outgoing queue of a session: which node sends next, and how messages are composed.
//!
//! Content is not queued twice: a node's log is the queue, and the transport is one more cursor on it.

use std::collections::VecDeque;

use super::port::{NodeKey, SessionStats};
use super::store::{FRAGMENT_BYTES, LogPiece, NodeKind, Store};
use crate::evergreen::{Action, Chunk, Fragment, Payload, SessionLimits, WireMessage};

#[derive(Debug, Default)]
pub(super) struct SessionOutbound {
    /// Nodes with something to send, in order of their turns.
    turns: VecDeque<NodeKey>,
    /// Actions are sent before fragments, so that the peer can start (EV-215).
    actions: Vec<Action>,
    /// Queued bytes.
    pub(super) bytes: usize,
    /// Whether a producer was refused because the queue was full.
    pub(super) refused: bool,
}

impl SessionOutbound {
    /// Whether nothing is queued, including tree ends that wait for their children.
    pub(super) const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether a message can be taken now.
    pub(super) fn is_sendable(&self) -> bool {
        !self.turns.is_empty() || !self.actions.is_empty()
    }

    pub(super) fn push_action(&mut self, action: Action) {
        self.bytes += action_bytes(&action);
        self.actions.push(action);
    }

    /// Queues a piece that was appended to a node of ours.
    pub(super) fn push(&mut self, key: NodeKey, bytes: usize, store: &mut Store) {
        let bytes = bytes + FRAGMENT_BYTES;
        let producer = store.get_mut(key).producer.get_or_insert_default();
        match &mut producer.pending_at {
            // Bytes of a node whose turn has not come are not counted in the queue: only the end of another node would
            // make room for them, so producers must not wait for that. The quota alone bounds them.
            Some(retained) => *retained += bytes,
            None => {
                self.bytes += bytes;
                self.queue(key, store);
            }
        }
    }

    /// Clears the queue, to be filled anew.
    pub(super) fn clear(&mut self) {
        self.turns.clear();
        self.actions.clear();
        self.bytes = 0;
    }

    /// Queues everything of a node that was not sent; with the node itself, if its turn has not come.
    pub(super) fn queue_rest(&mut self, key: NodeKey, store: &mut Store) {
        let node = store.get_mut(key);
        let sent = node.producer.as_ref().map_or(0, |producer| producer.sent);
        let pieces = (sent..node.next_seq()).filter_map(|seq| node.piece(seq));
        let bytes: usize = pieces.map(|piece| piece.len() + FRAGMENT_BYTES).sum();
        let producer = node.producer.get_or_insert_default();
        match &mut producer.pending_at {
            Some(retained) => *retained = bytes,
            None if bytes > 0 => {
                self.bytes += bytes;
                self.queue(key, store);
            }
            None => {}
        }
    }

    /// Adds a node to the turns.
    pub(super) fn queue(&mut self, key: NodeKey, store: &mut Store) {
        let producer = store.get_mut(key).producer.get_or_insert_default();
        if !producer.queued && producer.pending_at.is_none() {
            producer.queued = true;
            self.turns.push_back(key);
        }
    }

    /// The next message, if anything can be sent. Nodes take turns by bytes; the fragments of a node keep their order.
    pub(super) fn message(
        &mut self,
        store: &mut Store,
        limits: &SessionLimits,
        coalesce: bool,
        stats: &mut SessionStats,
    ) -> Option<WireMessage> {
        let budget = if coalesce { limits.coalesce_bytes } else { 0 };
        let mut message = WireMessage {
            actions: std::mem::take(&mut self.actions),
            ..WireMessage::default()
        };
        let mut used = message.actions.iter().map(action_bytes).sum::<usize>();
        self.bytes -= used;
        while let Some(key) = self.turns.pop_front() {
            let mut turn = 0;
            while let Some(bytes) = next_bytes(key, store) {
                let full = used + bytes > budget
                    && !(message.fragments.is_empty() && message.actions.is_empty());
                if full {
                    // This node's turn continues in the next message.
                    self.turns.push_front(key);
                    return Some(message);
                }
                if turn >= TURN_BYTES {
                    break;
                }
                message.fragments.push(self.take(key, store));
                stats.fragments_out += 1;
                stats.bytes_out += (bytes - FRAGMENT_BYTES) as u64;
                self.bytes -= bytes;
                used += bytes;
                turn += bytes;
            }
            if next_bytes(key, store).is_some() {
                self.turns.push_back(key);
            } else if let Some(producer) = &mut store.get_mut(key).producer {
                producer.queued = false;
            }
        }
        (!message.fragments.is_empty() || !message.actions.is_empty()).then_some(message)
    }

    /// Takes the next fragment of a node; the caller knows that there is one.
    fn take(&mut self, key: NodeKey, store: &mut Store) -> Fragment {
        let node = store.get_mut(key);
        let sent = node.producer.as_mut().map_or(0, |producer| {
            producer.sent += 1;
            producer.sent - 1
        });
        let last = node.last == Some(sent);
        let mut fragment = Fragment {
            id: node.id.clone(),
            seq: i32::try_from(sent).unwrap_or(i32::MAX),
            last,
            ..Fragment::default()
        };
        let node = store.get(key);
        match node.piece(sent) {
            Some(LogPiece::Begin(metadata, data)) => {
                let payload = (!data.is_empty()).then(|| Payload::Data(data.clone()));
                fragment.chunk = Some(Chunk {
                    metadata: Some(metadata.clone()),
                    payload,
                });
            }
            Some(LogPiece::Data(data)) => {
                let payload = Some(Payload::Data(data.clone()));
                fragment.chunk = Some(Chunk {
                    metadata: node.metadata.clone(),
                    payload,
                });
            }
            Some(LogPiece::Children(children)) => {
                fragment.children = children
                    .iter()
                    .map(|&child| store.get(child).id.clone())
                    .collect();
                let children = children.clone();
                self.announced(key, &children, store);
            }
            Some(LogPiece::Status(status)) => {
                let payload = Some(Payload::Status(status.clone()));
                fragment.chunk = Some(Chunk {
                    metadata: None,
                    payload,
                });
            }
            // The end of a leaf repeats its metadata, for dialects that need that (EV-721).
            Some(LogPiece::Empty) if node.kind == NodeKind::Leaf => {
                let metadata = node.metadata.clone();
                fragment.chunk = metadata.map(|metadata| Chunk {
                    metadata: Some(metadata),
                    payload: None,
                });
            }
            // We never write references or slices.
            Some(LogPiece::Empty | LogPiece::Ref(_) | LogPiece::Slice(_)) | None => {}
        }
        if last {
            self.wholly_sent(key, store);
        }
        store.release(key);
        fragment
    }

    /// Handles a node that was wholly sent: the tree that lists it may end, if it waited for that.
    fn wholly_sent(&mut self, key: NodeKey, store: &mut Store) {
        let parent = store.get_mut(key).producer.as_mut().and_then(|producer| {
            let awaited = std::mem::take(&mut producer.awaited);
            producer.parent.filter(|_| awaited)
        });
        store.was_wholly_sent(key);
        let Some(parent) = parent else { return };
        if let Some(producer) = &mut store.get_mut(parent).producer {
            producer.open_children -= 1;
        }
        if next_bytes(parent, store).is_some() {
            self.queue(parent, store);
        }
        self.next_turn(parent, Some(key), store);
    }

    /// These children of a tree were announced to the peer: the first of them may be sent.
    fn announced(&mut self, tree: NodeKey, children: &[NodeKey], store: &mut Store) {
        let waiting = |child: &&NodeKey| {
            let producer = store.get(**child).producer.as_ref();
            producer.is_some_and(|producer| {
                producer.parent == Some(tree) && producer.pending_at.is_some()
            })
        };
        let count = children.iter().filter(waiting).count();
        if let Some(producer) = &mut store.get_mut(tree).producer {
            producer.announced += count;
        }
        self.next_turn(tree, None, store);
    }

    /// Starts the next leaf of a tree, where the peer needs leaves one after the other (EV-722).
    pub(super) fn next_turn(&mut self, tree: NodeKey, ended: Option<NodeKey>, store: &mut Store) {
        let Some(producer) = &mut store.get_mut(tree).producer else {
            return;
        };
        if producer.turn != ended || producer.announced == 0 {
            producer.turn = producer.turn.filter(|turn| Some(*turn) != ended);
            return;
        }
        producer.announced -= 1;
        producer.turn = producer.line.pop_front();
        let Some(next) = producer.turn else { return };
        let retained = store.get_mut(next).producer.as_mut();
        self.bytes += retained
            .and_then(|producer| producer.pending_at.take())
            .unwrap_or_default();
        if next_bytes(next, store).is_some() {
            self.queue(next, store);
        }
    }
}

/// The size of the next fragment of a node, or `None` if none may be sent now.
fn next_bytes(key: NodeKey, store: &Store) -> Option<usize> {
    let node = store.get(key);
    let producer = node.producer.as_ref()?;
    let piece = node.piece(producer.sent)?;
    // A tree ends after everything below it (EV-508), and so does the status of an action (EV-735).
    // A piece that is not sendable yet stays in the log; `wholly_sent` queues its node again.
    let retained = node.last == Some(producer.sent) && producer.open_children > 0;
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
