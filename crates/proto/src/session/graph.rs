//! The graph of a session: its nodes with their logs, ids and edges, and the quota for what is retained.
//!
//! It knows nothing of readers, actions or the connection: those are keys to it. Two things must hold after each call:
//! the quota has the sum of what the nodes cost (EV-801) plus what others have charged, and `unread` is the sum of what
//! the nodes have received and no reader has passed.
//!
//! ```text
//!   mentioned ──fragment──► growing ──final, all before it──► complete
//!                             │ ▲
//!                             └─┘ fragments, some ahead of their turn
//! ```

pub(super) mod accept;
pub(super) mod closure;
mod copy_arena;
pub(super) mod node;
mod quota;
pub(super) mod release;
pub(super) mod search;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use ahash::RandomState;
use bytestring::ByteString;

use self::copy_arena::CopyArena;
pub(super) use self::node::{
    ChildSlice, FRAGMENT_BYTES, LogPiece, NodeKind, NodeProducer, Reference, SendState, StoredNode,
};
use self::quota::Quota;
use self::release::RetentionPolicy;
use super::lifetime::NodeFate;
use super::port::{Config, NodeKey};
use crate::evergreen::{NodeId, Reason, SessionLimits, Status};

/// All nodes of a session. They live until it ends, so keys are plain indices and freeing never recurses (EV-305). Only
/// where sessions last for years ([`Config::forgets_actions`]) are nodes removed of which nothing is left, except the
/// most recent: their indices are reused, and the key of a removed node finds a node that was released.
#[derive(Debug)]
pub(super) struct Graph {
    limits: Arc<SessionLimits>,
    nodes: Vec<StoredNode>,
    /// Free indices.
    vacant: Vec<u32>,
    /// Nodes that can be removed, the oldest first.
    removed: VecDeque<NodeKey>,
    removes_nodes: bool,
    /// Returned by lookups with the key of a removed node.
    removed_node: Box<StoredNode>,
    /// Copies small payloads of all nodes.
    packer: CopyArena,
    ids: HashMap<NodeId, NodeKey, RandomState>,
    /// The bytes retained by the nodes, and by other machines that charge them here.
    pub(super) quota: Quota,
    /// Payload bytes received that no reader has passed.
    pub(super) unread: u64,
    /// Prefix of the ids that we generate.
    prefix: u32,
    made: u64,
    /// Number of ids generated without the prefix.
    plain: u64,
    /// Changed only before anything is stored.
    pub(super) retain: RetentionPolicy,
}

impl Graph {
    pub(super) fn new(config: &Config) -> Self {
        let (entropy, retain) = (config.entropy, config.retention());
        // Peers choose the ids that are hashed: with seeds that they could guess, they could choose ids that collide.
        let seed = |salt: u64| entropy.rotate_left(17) ^ salt;
        // A claimed node that is removed: a stale key can neither be claimed nor written, and a reader of it fails with
        // NODE_RELEASED, as with any other released node.
        let evicted = StoredNode {
            owner: NodeProducer::Peer(None),
            fate: NodeFate::Removed,
            ..StoredNode::default()
        };
        Self {
            limits: Arc::clone(&config.limits),
            nodes: Vec::new(),
            vacant: Vec::new(),
            removed: VecDeque::new(),
            removes_nodes: config.forgets_actions,
            removed_node: Box::new(evicted),
            packer: CopyArena::default(),
            ids: HashMap::with_hasher(RandomState::with_seeds(entropy, seed(1), seed(2), seed(3))),
            quota: Quota::new(config.limits.retained_bytes),
            unread: 0,
            // Uses the upper half of `entropy`, so that sent ids reveal as little as possible of the hash seeds.
            prefix: (entropy >> 32) as u32 ^ 0x5a9d_a00d,
            made: 0,
            plain: 0,
            retain,
        }
    }

    pub(super) fn limits(&self) -> &SessionLimits {
        &self.limits
    }

    pub(super) fn get(&self, key: NodeKey) -> &StoredNode {
        // Shells keep keys and are not told when a node is removed: a stale key must not find the next node at its
        // index.
        match self.nodes.get(key.index as usize) {
            Some(node) if node.generation == key.generation => node,
            _ => &self.removed_node,
        }
    }

    pub(super) fn get_mut(&mut self, key: NodeKey) -> &mut StoredNode {
        self.get_to_fill(key).0
    }

    /// A node, the arena that copies its small payloads, and the limits of its content.
    pub(super) fn get_to_fill(
        &mut self,
        key: NodeKey,
    ) -> (&mut StoredNode, &mut CopyArena, &SessionLimits) {
        let node = match self.nodes.get_mut(key.index as usize) {
            Some(node) if node.generation == key.generation => node,
            _ => &mut self.removed_node,
        };
        (node, &mut self.packer, &self.limits)
    }

    /// Whether this node exists.
    pub(super) fn has(&self, key: NodeKey) -> bool {
        let node = self.nodes.get(key.index as usize);
        node.is_some_and(|node| node.generation == key.generation)
    }

    /// Number of indices, free ones included.
    pub(super) const fn capacity(&self) -> usize {
        self.nodes.len()
    }

    /// The keys of all nodes, free indices included.
    pub(super) fn keys(&self) -> impl Iterator<Item = NodeKey> + Clone + use<> {
        // Collected, so that the caller can change nodes while it iterates.
        let keys = (0..).zip(&self.nodes).map(|(index, node)| NodeKey {
            index,
            generation: node.generation,
        });
        keys.collect::<Vec<_>>().into_iter()
    }

    /// The hash builder of this session's tables.
    pub(super) fn hasher(&self) -> RandomState {
        self.ids.hasher().clone()
    }

    /// Returns the node with this id, if it is known.
    pub(super) fn find(&self, id: &str) -> Option<NodeKey> {
        self.ids.get(id).copied()
    }

    /// Returns the node with this id; creates it on its first mention.
    pub(super) fn mention(&mut self, id: &str) -> Result<NodeKey, Status> {
        if let Some(&key) = self.ids.get(id) {
            return Ok(key);
        }
        let limit = self.limits.max_id_bytes;
        check_length(id, "a node id", Reason::BadId, "max_id_bytes", limit)?;
        let max = self.limits.max_nodes;
        // Only sessions that remove ids have one to remove; in all others the limit counts every id ever mentioned.
        if self.live() >= max {
            self.remove_oldest();
        }
        Status::within(Reason::NodeLimit, "max_nodes", self.live() + 1, max)?;
        // Charged before the node exists, so that a refused mention leaves nothing behind.
        self.quota.retain(id.len() as u64)?;
        // A copy: the id may be a view of a receive buffer (EV-805).
        let id = ByteString::from(id.to_owned());
        let (index, generation) = match self.vacant.pop() {
            Some(index) => (index, self.nodes[index as usize].generation),
            None => (u32::try_from(self.nodes.len()).unwrap_or(u32::MAX), 0),
        };
        let node = StoredNode {
            id: id.clone(),
            generation,
            ..StoredNode::default()
        };
        match self.nodes.get_mut(index as usize) {
            Some(vacant) => *vacant = node,
            None => self.nodes.push(node),
        }
        let key = NodeKey { index, generation };
        self.ids.insert(id, key);
        Ok(key)
    }

    pub(super) const fn live(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Marks a node as removed: only its id is left. Where ids may be removed as well, that happens after enough later
    /// removals; until then, fragments that arrive for it are ignored.
    pub(super) fn mark_removed(&mut self, key: NodeKey) {
        let before = std::mem::replace(&mut self.get_mut(key).fate, NodeFate::Removed);
        // At once and in every session: each reconnect makes such nodes, and their ids would add up.
        if self.get(key).transient {
            self.vacate(key);
            return;
        }
        // Queued once: a second entry would take the room in which another id stays known.
        if self.removes_nodes && self.has(key) && before != NodeFate::Removed {
            self.removed.push_back(key);
            if self.removed.len() > REMOVED_KNOWN {
                self.remove_oldest();
            }
        }
    }

    /// Removes the id of the node that was marked as removed first.
    fn remove_oldest(&mut self) {
        if let Some(key) = self.removed.pop_front() {
            self.vacate(key);
        }
    }

    /// Frees the index of a removed node. Keys of earlier generations are stale.
    pub(super) fn vacate(&mut self, key: NodeKey) {
        if !self.has(key) {
            return;
        }
        // Walks over all keys meet free indices too. Claimed, without a log and without a send state, the node gives
        // them nothing to do.
        let next = StoredNode {
            fate: NodeFate::Removed,
            owner: NodeProducer::Peer(None),
            generation: key.generation.wrapping_add(1),
            ..StoredNode::default()
        };
        let id = std::mem::replace(self.get_mut(key), next).id;
        self.ids.remove(&id);
        self.quota.give_back(id.len() as u64);
        self.vacant.push(key.index);
    }

    /// Creates a node under a generated id (EV-216).
    pub(super) fn make(&mut self) -> Result<NodeKey, Status> {
        loop {
            let id = format!("~{:08x}.{}", self.prefix, self.made);
            self.made += 1;
            // A peer that knows earlier ids can guess the next one and use it first; it is skipped then (EV-216).
            if self.find(&id).is_none() {
                return self.mention(&id);
            }
        }
    }

    /// Creates a node under a short generated id.
    pub(super) fn make_plain(&mut self) -> Result<NodeKey, Status> {
        loop {
            let id = format!("{:x}", self.plain);
            self.plain += 1;
            if self.find(&id).is_none() {
                return self.mention(&id);
            }
        }
    }

    /// Charges a piece that is to be stored, and counts the children that it lists.
    pub(super) fn hold(&mut self, seq: u32, piece: &LogPiece) -> Result<(), Status> {
        // Charged first: a piece that is refused must not count as listing its children.
        self.quota.retain(piece.cost(seq))?;
        for child in piece.children() {
            self.get_mut(*child).listed += 1;
        }
        Ok(())
    }

    /// Releases the oldest retained piece of a node's log.
    pub(super) fn let_go(&mut self, key: NodeKey) -> Option<LogPiece> {
        let node = self.get_mut(key);
        let seq = u32::try_from(node.log.released()).unwrap_or(u32::MAX);
        let piece = node.log.release()?;
        if node.is_complete() && node.log.released() == node.log.len() {
            // No piece is left that needs the metadata.
            node.metadata = None;
        }
        self.quota.give_back(piece.cost(seq));
        Some(piece)
    }

    /// A piece that listed this node was released. Returns `true` if no other retained piece lists it.
    pub(super) fn unlist(&mut self, key: NodeKey) -> bool {
        let node = self.get_mut(key);
        node.listed = node.listed.saturating_sub(1);
        node.listed == 0
    }

    /// Prepares a node to be dropped: what arrived ahead of a gap will never be read, and what was received is not
    /// waited for. Returns the quota bytes that the node has cost.
    pub(super) fn drop_unread(&mut self, key: NodeKey) -> u64 {
        let node = self.get_mut(key);
        // Before the early pieces go: the answer to DROP reports them too.
        let bytes = node.content_cost();
        let unread = std::mem::take(&mut node.unread);
        let early = std::mem::take(&mut node.early);
        self.unread -= unread;
        self.quota
            .give_back(early.iter().map(|(seq, piece)| piece.cost(*seq)).sum());
        bytes
    }

    /// Frees the content of a node.
    pub(super) fn clear(&mut self, key: NodeKey) {
        let node = self.get_mut(key);
        let bytes = node.content_cost();
        node.log.clear();
        node.metadata = None;
        node.readers = None;
        self.quota.give_back(bytes);
    }

    /// Whether pieces are released once every reader has passed them.
    pub(super) fn releases(&self) -> bool {
        self.retain == RetentionPolicy::Unread
    }

    /// Records that a reader has passed piece `index` of a node.
    pub(super) fn pass(&mut self, key: NodeKey, index: u32, bytes: usize) {
        let node = self.get_mut(key);
        // The foremost reader decides: what it has passed does not hold back the connection, whoever reads more slowly.
        if index >= node.passed {
            node.passed = index + 1;
            // Content that we produce is never counted as unread, hence the `min`.
            let bytes = (bytes as u64).min(node.unread);
            node.unread -= bytes;
            self.unread -= bytes;
        }
        self.step_reader(key, index);
    }
}

/// Checks the length of a text that may not be empty either; `what` names it.
pub(super) fn check_length(
    text: &str,
    what: &str,
    reason: Reason,
    limit: &'static str,
    max: usize,
) -> Result<(), Status> {
    let bytes = text.len();
    if (1..=max).contains(&bytes) {
        return Ok(());
    }
    let message = format!("{what} has {bytes} bytes; 1 to {max} are allowed");
    let status = Status::limit(reason, limit, bytes as u64, max as u64);
    Err(Status { message, ..status })
}

/// How many removed nodes keep their ids, in a session that removes ids.
const REMOVED_KNOWN: usize = 1024;
