//! The nodes of a session, with their logs, ids and quota.
//!
//! ```text
//!   mentioned ──fragment──► growing ──final, all before it──► complete
//!                             │ ▲
//!                             └─┘ fragments, some ahead of their turn
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use ahash::RandomState;
use bytes::Bytes;
use bytestring::ByteString;
use smallvec::SmallVec;

use super::copy_arena::CopyArena;
use super::dropping::{DropBatch, NodeFate};
use super::port::{ActionKey, Config, CursorId, NodeKey};
use super::reference::ExternalContent;
use super::release::{Readers, RetentionPolicy};
use super::slab::Slab;
use crate::evergreen::{Metadata, NodeId, Reason, SessionLimits, Status};
use crate::log::Log;

/// One accepted fragment. Its index in the log is its seq.
#[derive(Debug)]
pub(super) enum LogPiece {
    /// No content (EV-210).
    Empty,
    /// The first piece of an item.
    Begin(Arc<Metadata>, Bytes),
    /// The next piece of the same item.
    Data(Bytes),
    /// A reference to external content.
    Ref(Box<Reference>),
    /// Children of a tree.
    Children(Box<[NodeKey]>),
    /// A byte range of a child.
    Slice(Box<ChildSlice>),
    /// The status of the producer at the end.
    Status(Option<Arc<Status>>),
}

/// A child, and which bytes of its content are selected (EV-740).
#[derive(Debug)]
pub(super) struct ChildSlice {
    pub(super) child: NodeKey,
    pub(super) range: Range<u64>,
}

/// A reference to external content, or why it cannot be read.
#[derive(Debug)]
pub(super) struct Reference {
    pub(super) metadata: Option<Arc<Metadata>>,
    pub(super) content: Result<Arc<ExternalContent>, Arc<Status>>,
}

impl Reference {
    fn uri_bytes(&self) -> usize {
        self.content
            .as_ref()
            .map_or(0, |content| content.uri().len())
    }
}

impl LogPiece {
    /// Quota bytes of the piece at this seq (EV-801).
    pub(super) fn cost(&self, seq: u32) -> u64 {
        let (metadata, more) = match self {
            Self::Begin(metadata, _) => (Some(metadata), 0),
            Self::Ref(reference) => (reference.metadata.as_ref(), reference.uri_bytes()),
            Self::Children(children) => (None, children.len() * CHILD_BYTES),
            Self::Slice(_) => (None, size_of::<ChildSlice>()),
            Self::Data(_) | Self::Empty | Self::Status(_) => (None, 0),
        };
        // The first metadata is counted with the leaf; later metadata is charged for itself.
        let each = if seq == 0 { 0 } else { METADATA_BYTES };
        let metadata = metadata.map_or(0, |metadata| each + metadata.len());
        (FRAGMENT_BYTES + metadata + more + self.len()) as u64
    }

    /// Payload bytes; for a status, an estimate of its size.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Begin(_, data) | Self::Data(data) => data.len(),
            Self::Status(Some(status)) => STATUS_BYTES + status.text_bytes(),
            Self::Empty
            | Self::Ref(_)
            | Self::Children(_)
            | Self::Slice(_)
            | Self::Status(None) => 0,
        }
    }

    /// The children that it lists.
    pub(super) fn children(&self) -> &[NodeKey] {
        match self {
            Self::Children(children) => children,
            Self::Slice(slice) => std::slice::from_ref(&slice.child),
            _ => &[],
        }
    }
}

/// The kind of a node (EV-209).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeKind {
    Unknown,
    Leaf,
    /// In a dialect that mixes both (EV-740), a tree may have chunks between its children.
    Tree,
}

/// The producer of a node (EV-216), and its action if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeProducer {
    Unclaimed,
    Peer(Option<ActionKey>),
    Local(Option<ActionKey>),
}

impl NodeProducer {
    pub(super) const fn is_local(self) -> bool {
        matches!(self, Self::Local(_))
    }
}

/// Send state of a node of ours.
#[derive(Debug, Default)]
pub(super) struct Producer {
    /// Number of pieces handed to the transport: the transport is one more cursor on the log.
    pub(super) sent: u32,
    /// Whether the node is in the send queue.
    pub(super) queued: bool,
    /// The first tree of ours that listed it.
    pub(super) parent: Option<NodeKey>,
    /// Whether that tree may not end before this node is wholly sent (EV-508).
    pub(super) awaited: bool,
    /// Number of children of ours that are not wholly sent.
    pub(super) open_children: u32,
    /// Set while the node's turn has not come, for peers that need leaves one after the other (EV-722): its unsent
    /// bytes.
    pub(super) pending_at: Option<usize>,
    /// Children of ours whose turn has not come, in reading order.
    pub(super) line: VecDeque<NodeKey>,
    /// How many of those were announced to the peer.
    pub(super) announced: usize,
    /// The child whose turn it is to be sent.
    pub(super) turn: Option<NodeKey>,
}

#[derive(Debug)]
pub(super) struct StoredNode {
    pub(super) id: NodeId,
    /// The contiguous prefix.
    pub(super) log: Log<LogPiece>,
    /// Buffered fragments ahead of the contiguous prefix.
    pub(super) early: BTreeMap<u32, LogPiece>,
    /// The seq of the final fragment.
    pub(super) last: Option<u32>,
    pub(super) kind: NodeKind,
    pub(super) owner: NodeProducer,
    /// Whether it is a child or an input of something; an unreferenced node cannot be part of a cycle yet.
    pub(super) referenced: bool,
    /// Whether a fragment after the first has a payload that relies on the first one's metadata (EV-401).
    pub(super) relies_on_first: bool,
    /// Metadata of seq 0.
    pub(super) metadata: Option<Arc<Metadata>>,
    /// Cursors parked at this node.
    pub(super) waiters: SmallVec<[CursorId; 2]>,
    /// Number of pieces that the foremost reader has passed.
    pub(super) passed: u32,
    /// Payload bytes received that no reader has passed.
    pub(super) unread: u64,
    pub(super) producer: Option<Box<Producer>>,
    /// How many retained pieces of trees list it.
    pub(super) listed: u32,
    /// Readers that have still to pass it; only tracked where that decides what is retained (EV-955).
    pub(super) readers: Option<Box<Readers>>,
    pub(super) fate: NodeFate,
    /// It serves one RESUME: nothing refers to it later, so that its id is removed with it and its index is reused.
    pub(super) transient: bool,
    /// Its producer was stopped before its end, and reports that (D-51).
    pub(super) cut: bool,
    /// The first seq that was received twice with different content: the first content is used, and readers that wait
    /// for more fail.
    pub(super) repeated: Option<u32>,
    /// Distinguishes the nodes that had this index one after the other.
    generation: u32,
}

impl StoredNode {
    fn new(id: NodeId, generation: u32) -> Self {
        Self {
            id,
            generation,
            log: Log::new(),
            early: BTreeMap::new(),
            last: None,
            kind: NodeKind::Unknown,
            owner: NodeProducer::Unclaimed,
            referenced: false,
            relies_on_first: false,
            metadata: None,
            waiters: SmallVec::new(),
            passed: 0,
            unread: 0,
            producer: None,
            listed: 0,
            readers: None,
            fate: NodeFate::Retained,
            transient: false,
            cut: false,
            repeated: None,
        }
    }

    pub(super) const fn is_complete(&self) -> bool {
        self.log.ended().is_some()
    }

    /// The next seq after the contiguous prefix.
    pub(super) fn next_seq(&self) -> u32 {
        // The log cannot outgrow 2^31 pieces: seqs are int32.
        u32::try_from(self.log.len()).unwrap_or(u32::MAX)
    }

    /// Whether a fragment with this seq was accepted.
    pub(super) fn has(&self, seq: u32) -> bool {
        seq < self.next_seq() || self.early.contains_key(&seq)
    }

    /// The highest seq accepted.
    pub(super) fn highest(&self) -> Option<u32> {
        let ahead = self.early.keys().next_back().copied();
        ahead.or_else(|| self.next_seq().checked_sub(1))
    }

    /// The accepted fragment with this seq.
    pub(super) fn piece(&self, seq: u32) -> Option<&LogPiece> {
        match self.log.at(seq as usize) {
            crate::log::LogRead::Item(piece) => Some(piece),
            _ => self.early.get(&seq),
        }
    }

    /// Whether some of it, at least its end, is still to be handed to the transport.
    pub(super) fn is_unsent(&self) -> bool {
        let sent = self.producer.as_ref().map(|producer| producer.sent);
        sent.is_some_and(|sent| sent < self.next_seq())
    }

    /// The children listed from one position on.
    pub(super) fn children_from(
        &self,
        piece: u32,
        child: u32,
    ) -> impl Iterator<Item = NodeKey> + '_ {
        let skipped = (piece as usize).saturating_sub(self.log.released());
        let pieces = self.log.iter().skip(skipped).chain(self.early.values());
        let all = pieces.flat_map(|piece| piece.children().iter().copied());
        // An offset within a piece is an offset within its list of children.
        all.skip(child as usize)
    }

    /// Quota bytes of its content, without its id.
    pub(super) fn content_cost(&self) -> u64 {
        let first = u32::try_from(self.log.released()).unwrap_or(u32::MAX);
        let log = (first..).zip(self.log.iter());
        let early = self.early.iter().map(|(seq, piece)| (*seq, piece));
        let pieces = log.chain(early).map(|(seq, piece)| piece.cost(seq));
        pieces.sum::<u64>()
    }

    /// Every child that an accepted fragment lists, including buffered fragments.
    pub(super) fn children(&self) -> impl Iterator<Item = NodeKey> + '_ {
        self.edges().flatten()
    }

    /// The same, with `None` for each piece that lists nothing: a walk with a budget is charged for these too.
    pub(super) fn edges(&self) -> impl Iterator<Item = Option<NodeKey>> + '_ {
        let ahead = self.early.values();
        let pieces = if self.kind == NodeKind::Tree {
            Some(self.log.iter().chain(ahead))
        } else {
            None
        };
        pieces.into_iter().flatten().flat_map(|piece| {
            let children = piece.children();
            let nothing = children.is_empty().then_some(None);
            nothing
                .into_iter()
                .chain(children.iter().copied().map(Some))
        })
    }
}

/// All nodes of a session. They live until it ends, so keys are plain indices and freeing never recurses (EV-305). Only
/// a dialect whose sessions last for years removes nodes of which nothing is left, except the most recent: their
/// indices are reused, and the key of a removed node finds a node that was released.
#[derive(Debug)]
pub(super) struct Store {
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
    /// Retained bytes (EV-801).
    retained: u64,
    /// Payload bytes received that no reader has passed.
    pub(super) unread: u64,
    /// Prefix of the ids that we generate.
    prefix: u32,
    made: u64,
    /// Number of ids generated without the prefix.
    plain: u64,
    retain: RetentionPolicy,
    /// Batches of dropped nodes that are still read or sent.
    pub(super) drops: Slab<DropBatch>,
}

impl Store {
    pub(super) fn new(config: &Config) -> Self {
        let (entropy, retain) = (config.entropy, config.retention());
        let seed = |salt: u64| entropy.rotate_left(17) ^ salt;
        let evicted = StoredNode {
            owner: NodeProducer::Peer(None),
            fate: NodeFate::Removed,
            ..StoredNode::new(NodeId::default(), 0)
        };
        Self {
            nodes: Vec::new(),
            vacant: Vec::new(),
            removed: VecDeque::new(),
            removes_nodes: config.capabilities.flat,
            removed_node: Box::new(evicted),
            packer: CopyArena::default(),
            ids: HashMap::with_hasher(RandomState::with_seeds(entropy, seed(1), seed(2), seed(3))),
            retained: 0,
            unread: 0,
            // Uses the upper half of `entropy`, so that sent ids reveal as little as possible of the hash seeds.
            prefix: (entropy >> 32) as u32 ^ 0x5a9d_a00d,
            made: 0,
            plain: 0,
            retain,
            drops: Slab::new(),
        }
    }

    pub(super) fn get(&self, key: NodeKey) -> &StoredNode {
        match self.nodes.get(key.index as usize) {
            Some(node) if node.generation == key.generation => node,
            _ => &self.removed_node,
        }
    }

    pub(super) fn get_mut(&mut self, key: NodeKey) -> &mut StoredNode {
        self.get_with_packer(key).0
    }

    /// A node, and the arena that copies its small payloads.
    pub(super) fn get_with_packer(&mut self, key: NodeKey) -> (&mut StoredNode, &mut CopyArena) {
        let node = match self.nodes.get_mut(key.index as usize) {
            Some(node) if node.generation == key.generation => node,
            _ => &mut self.removed_node,
        };
        (node, &mut self.packer)
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

    /// Changes the retention policy; only valid before anything is stored.
    pub(super) const fn keep(&mut self, retain: RetentionPolicy) {
        self.retain = retain;
    }

    /// The keys of all nodes, free indices included.
    pub(super) fn keys(&self) -> impl Iterator<Item = NodeKey> + Clone + use<> {
        // Collected first: nothing is removed while this is iterated, so the generations stay valid.
        let tenants: Vec<u32> = self.nodes.iter().map(|node| node.generation).collect();
        let positions = (0..).zip(tenants);
        positions.map(|(index, generation)| NodeKey { index, generation })
    }

    pub(super) const fn retained(&self) -> u64 {
        self.retained
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
    pub(super) fn mention(&mut self, id: &str, limits: &SessionLimits) -> Result<NodeKey, Status> {
        if let Some(&key) = self.ids.get(id) {
            return Ok(key);
        }
        check_id(id, limits)?;
        let max = limits.max_nodes;
        if self.live() >= max {
            self.remove_oldest();
        }
        if self.live() >= max {
            let value = self.live() as u64 + 1;
            return Err(Status::limit(
                Reason::NodeLimit,
                "max_nodes",
                value,
                max as u64,
            ));
        }
        self.retain(id.len() as u64, limits)?;
        // A copy: the id may be a view of a receive buffer (EV-805).
        let id = ByteString::from(id.to_owned());
        let key = self.allocate(id.clone());
        self.ids.insert(id, key);
        Ok(key)
    }

    /// Allocates an index for a new node.
    fn allocate(&mut self, id: NodeId) -> NodeKey {
        if let Some(index) = self.vacant.pop() {
            let position = &mut self.nodes[index as usize];
            let generation = position.generation;
            *position = StoredNode::new(id, generation);
            return NodeKey { index, generation };
        }
        let index = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        self.nodes.push(StoredNode::new(id, 0));
        NodeKey {
            index,
            generation: 0,
        }
    }

    /// Whether `count` more nodes can be created.
    pub(super) fn has_room_for(&self, count: usize, limits: &SessionLimits) -> bool {
        self.live().saturating_add(count) <= limits.max_nodes
    }

    pub(super) fn live(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Marks a node as removed: only its id is left. Where ids may be removed as well, that happens after enough later
    /// removals; until then, fragments that arrive for it are ignored.
    pub(super) fn mark_removed(&mut self, key: NodeKey) {
        let before = std::mem::replace(&mut self.get_mut(key).fate, NodeFate::Removed);
        if self.get(key).transient {
            self.vacate(key);
            return;
        }
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
        let node = self.get_mut(key);
        let next = StoredNode {
            fate: NodeFate::Removed,
            owner: NodeProducer::Peer(None),
            ..StoredNode::new(NodeId::default(), key.generation.wrapping_add(1))
        };
        let id = std::mem::replace(node, next).id;
        self.ids.remove(&id);
        self.give_back(id.len() as u64);
        self.vacant.push(key.index);
    }

    /// Creates a node under a generated id (EV-216).
    pub(super) fn make(&mut self, limits: &SessionLimits) -> Result<NodeKey, Status> {
        loop {
            let id = format!("~{:08x}.{}", self.prefix, self.made);
            self.made += 1;
            if self.find(&id).is_none() {
                return self.mention(&id, limits);
            }
        }
    }

    /// Creates a node under a short generated id.
    pub(super) fn make_plain(&mut self, limits: &SessionLimits) -> Result<NodeKey, Status> {
        loop {
            let id = format!("{:x}", self.plain);
            self.plain += 1;
            if self.find(&id).is_none() {
                return self.mention(&id, limits);
            }
        }
    }

    /// Charges bytes to the quota, or fails if they exceed it.
    pub(super) fn retain(&mut self, bytes: u64, limits: &SessionLimits) -> Result<(), Status> {
        let (value, max) = (self.retained.saturating_add(bytes), limits.retained_bytes);
        if value > max {
            return Err(Status::limit(
                Reason::RetainedLimit,
                "retained_bytes",
                value,
                max,
            ));
        }
        self.retained = value;
        Ok(())
    }

    /// Refunds bytes to the quota.
    pub(super) const fn give_back(&mut self, bytes: u64) {
        self.retained = self.retained.saturating_sub(bytes);
    }

    /// Charges a piece that is to be stored, and counts the children that it lists.
    pub(super) fn hold(
        &mut self,
        seq: u32,
        piece: &LogPiece,
        limits: &SessionLimits,
    ) -> Result<(), Status> {
        self.retain(piece.cost(seq), limits)?;
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
        self.give_back(piece.cost(seq));
        Some(piece)
    }

    /// A piece that listed this node was released. Returns `true` if no other retained piece lists it.
    pub(super) fn unlist(&mut self, key: NodeKey) -> bool {
        let node = self.get_mut(key);
        node.listed = node.listed.saturating_sub(1);
        node.listed == 0
    }

    /// Whether pieces are released once every reader has passed them.
    pub(super) fn releases(&self) -> bool {
        self.retain == RetentionPolicy::Unread
    }

    /// Records that a reader has passed piece `index` of a node.
    pub(super) fn pass(&mut self, key: NodeKey, index: u32, bytes: usize) {
        let node = self.get_mut(key);
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

pub(super) fn check_id(id: &str, limits: &SessionLimits) -> Result<(), Status> {
    if !id.is_empty() && id.len() <= limits.max_id_bytes {
        return Ok(());
    }
    let status = Status::limit(
        Reason::BadId,
        "max_id_bytes",
        id.len() as u64,
        limits.max_id_bytes as u64,
    );
    let message = format!(
        "a node id has {} bytes; 1 to {} are allowed",
        id.len(),
        limits.max_id_bytes
    );
    Err(Status { message, ..status })
}

/// How many removed nodes keep their ids, in a session that removes ids.
const REMOVED_KNOWN: usize = 1024;
/// Estimated size of a status without its text.
const STATUS_BYTES: usize = 128;
/// Bytes that the quota and the outbound queue count per fragment, without its payload (EV-801, EV-803).
pub(super) const FRAGMENT_BYTES: usize = 64;
/// Bytes that the quota counts for metadata after the first, which per-chunk mode retains.
const METADATA_BYTES: usize = 128;
/// Bytes that the quota counts per listed child.
const CHILD_BYTES: usize = size_of::<NodeKey>();
