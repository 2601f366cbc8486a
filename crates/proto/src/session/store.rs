//! The nodes of a session.
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
    /// Nothing (EV-210).
    Empty,
    /// The beginning of an item.
    Begin(Arc<Metadata>, Bytes),
    /// More of the item.
    Data(Bytes),
    /// A reference to content that did not come with it.
    Ref(Box<Reference>),
    /// Children of a tree.
    Children(Box<[NodeKey]>),
    /// A part of a child.
    Slice(Box<ChildSlice>),
    /// How the producer ended.
    Status(Option<Arc<Status>>),
}

/// A child, and which bytes of its content are meant (EV-740).
#[derive(Debug)]
pub(super) struct ChildSlice {
    pub(super) child: NodeKey,
    pub(super) range: Range<u64>,
}

/// A reference to content elsewhere, or why nobody can read it.
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
    /// What the quota counts for it at this seq (EV-801).
    pub(super) fn cost(&self, seq: u32) -> u64 {
        let (metadata, more) = match self {
            Self::Begin(metadata, _) => (Some(metadata), 0),
            Self::Ref(reference) => (reference.metadata.as_ref(), reference.uri_bytes()),
            Self::Children(children) => (None, children.len() * CHILD_BYTES),
            Self::Slice(_) => (None, size_of::<ChildSlice>()),
            Self::Data(_) | Self::Empty | Self::Status(_) => (None, 0),
        };
        // One piece of metadata is part of a leaf; more of it is more to hold.
        let each = if seq == 0 { 0 } else { METADATA_BYTES };
        let metadata = metadata.map_or(0, |metadata| each + metadata.len());
        (FRAGMENT_BYTES + metadata + more + self.len()) as u64
    }

    /// Payload bytes; a status counts about what it takes.
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

/// What a node turned out to be (EV-209).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeKind {
    Unknown,
    Leaf,
    /// Where the dialect mixes them (EV-740), there may be chunks between its children.
    Tree,
}

/// Who produces a node (EV-216), and for which action.
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

/// What sending needs to know of a node of ours.
#[derive(Debug, Default)]
pub(super) struct Producer {
    /// How many pieces were handed to the transport: the transport is one more cursor on the log.
    pub(super) sent: u32,
    /// Whether it stands in the queue.
    pub(super) queued: bool,
    /// The tree of ours that listed it first.
    pub(super) parent: Option<NodeKey>,
    /// Whether that tree may not end before it does (EV-508): it is not wholly sent.
    pub(super) awaited: bool,
    /// Children of ours that are not wholly sent.
    pub(super) open_children: u32,
    /// Set while its turn has not come, for peers that take leaves as they arrive (EV-722): the bytes that wait with it.
    pub(super) pending_at: Option<usize>,
    /// Children of ours whose turn has not come, in reading order.
    pub(super) line: VecDeque<NodeKey>,
    /// How many of those the peer has been sent.
    pub(super) announced: usize,
    /// The child whose turn it is.
    pub(super) turn: Option<NodeKey>,
}

#[derive(Debug)]
pub(super) struct StoredNode {
    pub(super) id: NodeId,
    /// The contiguous prefix.
    pub(super) log: Log<LogPiece>,
    /// Fragments ahead of their turn.
    pub(super) early: BTreeMap<u32, LogPiece>,
    /// The seq of the final fragment.
    pub(super) last: Option<u32>,
    pub(super) kind: NodeKind,
    pub(super) owner: NodeProducer,
    /// Whether it is a child or an input of something; what is not cannot be part of a cycle yet.
    pub(super) referenced: bool,
    /// Whether a fragment after the first has a payload that relies on the first one's metadata (EV-401).
    pub(super) relies_on_first: bool,
    /// Metadata of seq 0.
    pub(super) metadata: Option<Arc<Metadata>>,
    /// Cursors parked here.
    pub(super) waiters: SmallVec<[CursorId; 2]>,
    /// How many pieces the foremost reader has passed.
    pub(super) passed: u32,
    /// Payload bytes received and not passed by any reader.
    pub(super) unread: u64,
    pub(super) producer: Option<Box<Producer>>,
    /// How often pieces of trees that are held list it.
    pub(super) listed: u32,
    /// Who has still to pass it, where that decides what is kept (EV-955).
    pub(super) readers: Option<Box<Readers>>,
    pub(super) fate: NodeFate,
    /// It serves one RESUME: nothing refers to it later, so that its id goes with it and its place is given out anew.
    pub(super) transient: bool,
    /// Its producer was stopped before the end, and reports that (D-51).
    pub(super) cut: bool,
    /// The first seq that came twice with different content: the first counts, and readers of the rest fail.
    pub(super) repeated: Option<u32>,
    /// Which of those it is that had its place.
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

    /// The next seq of the contiguous prefix.
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

    /// Whether something of it, its end at the least, is still to be handed to the transport.
    pub(super) fn is_unsent(&self) -> bool {
        let sent = self.producer.as_ref().map(|producer| producer.sent);
        sent.is_some_and(|sent| sent < self.next_seq())
    }

    /// The children listed from one place on.
    pub(super) fn children_from(
        &self,
        piece: u32,
        child: u32,
    ) -> impl Iterator<Item = NodeKey> + '_ {
        let skipped = (piece as usize).saturating_sub(self.log.released());
        let pieces = self.log.iter().skip(skipped).chain(self.early.values());
        let all = pieces.flat_map(|piece| piece.children().iter().copied());
        // A place inside of a piece is a place inside of a list of children.
        all.skip(child as usize)
    }

    /// What the quota counts for it, its id aside.
    pub(super) fn content_cost(&self) -> u64 {
        let first = u32::try_from(self.log.released()).unwrap_or(u32::MAX);
        let log = (first..).zip(self.log.iter());
        let early = self.early.iter().map(|(seq, piece)| (*seq, piece));
        let pieces = log.chain(early).map(|(seq, piece)| piece.cost(seq));
        pieces.sum::<u64>()
    }

    /// Every child that any accepted fragment lists, held ones included.
    pub(super) fn children(&self) -> impl Iterator<Item = NodeKey> + '_ {
        self.edges().flatten()
    }

    /// The same, with `None` for each piece that lists nothing: a walk within a budget is charged for these too.
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

/// All nodes of the session. They live until it ends, so keys are places and freeing never recurses (EV-305). Only a
/// dialect whose sessions last for years forgets, of those of which nothing is left, all but the last: their places are
/// reused, and the key of a removed node finds a node that was released.
#[derive(Debug)]
pub(super) struct Store {
    nodes: Vec<StoredNode>,
    /// Free indices.
    vacant: Vec<u32>,
    /// What can be forgotten, the oldest first.
    removed: VecDeque<NodeKey>,
    removes_nodes: bool,
    /// What is found where a node was forgotten.
    removed_node: Box<StoredNode>,
    /// Small payloads of all nodes.
    packer: CopyArena,
    ids: HashMap<NodeId, NodeKey, RandomState>,
    /// Bytes held (EV-801).
    retained: u64,
    /// Payload bytes of the peer's that no reader has passed.
    pub(super) unread: u64,
    /// Ids made by us begin with this.
    prefix: u32,
    made: u64,
    /// How many ids without a prefix were made.
    plain: u64,
    retain: RetentionPolicy,
    /// What was dropped and is still being read.
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
            // The half that the hash seeds show least of.
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

    /// A node, and what copies its small payloads.
    pub(super) fn get_with_packer(&mut self, key: NodeKey) -> (&mut StoredNode, &mut CopyArena) {
        let node = match self.nodes.get_mut(key.index as usize) {
            Some(node) if node.generation == key.generation => node,
            _ => &mut self.removed_node,
        };
        (node, &mut self.packer)
    }

    /// Whether there is such a node.
    pub(super) fn has(&self, key: NodeKey) -> bool {
        let node = self.nodes.get(key.index as usize);
        node.is_some_and(|node| node.generation == key.generation)
    }

    /// How many indices there are, free ones included.
    pub(super) const fn capacity(&self) -> usize {
        self.nodes.len()
    }

    /// Changes what is kept, before anything is.
    pub(super) const fn keep(&mut self, retain: RetentionPolicy) {
        self.retain = retain;
    }

    /// All nodes, and places without one, of which nothing is known.
    pub(super) fn keys(&self) -> impl Iterator<Item = NodeKey> + Clone + use<> {
        // The generations of now: nothing is removed while this is iterated.
        let tenants: Vec<u32> = self.nodes.iter().map(|node| node.generation).collect();
        let positions = (0..).zip(tenants);
        positions.map(|(index, generation)| NodeKey { index, generation })
    }

    pub(super) const fn retained(&self) -> u64 {
        self.retained
    }

    /// The hasher of this session's tables.
    pub(super) fn hasher(&self) -> RandomState {
        self.ids.hasher().clone()
    }

    /// The node with this id, if it was ever mentioned.
    pub(super) fn find(&self, id: &str) -> Option<NodeKey> {
        self.ids.get(id).copied()
    }

    /// The node with this id, made on its first mention.
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

    /// A place for a new node.
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

    /// Whether so many more nodes can be made.
    pub(super) fn has_room_for(&self, count: usize, limits: &SessionLimits) -> bool {
        self.live().saturating_add(count) <= limits.max_nodes
    }

    pub(super) fn live(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Nothing is left of a node but its id. Where that may be forgotten it will be, once enough others have gone the same
    /// way: what still comes for it is ignored until then.
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

    /// Forgets the node that has been gone for the longest.
    fn remove_oldest(&mut self) {
        if let Some(key) = self.removed.pop_front() {
            self.vacate(key);
        }
    }

    /// Frees the index of a removed node. A key of an earlier generation names nothing.
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

    /// A node under an id of our making (EV-216).
    pub(super) fn make(&mut self, limits: &SessionLimits) -> Result<NodeKey, Status> {
        loop {
            let id = format!("~{:08x}.{}", self.prefix, self.made);
            self.made += 1;
            if self.find(&id).is_none() {
                return self.mention(&id, limits);
            }
        }
    }

    /// A node under a short id of our making.
    pub(super) fn make_plain(&mut self, limits: &SessionLimits) -> Result<NodeKey, Status> {
        loop {
            let id = format!("{:x}", self.plain);
            self.plain += 1;
            if self.find(&id).is_none() {
                return self.mention(&id, limits);
            }
        }
    }

    /// Counts bytes against the quota, unless they are too many.
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

    /// Gives bytes back to the quota.
    pub(super) const fn give_back(&mut self, bytes: u64) {
        self.retained = self.retained.saturating_sub(bytes);
    }

    /// Counts a piece that is to be held, and what it lists.
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

    /// Takes the oldest held piece out of a node's log.
    pub(super) fn let_go(&mut self, key: NodeKey) -> Option<LogPiece> {
        let node = self.get_mut(key);
        let seq = u32::try_from(node.log.released()).unwrap_or(u32::MAX);
        let piece = node.log.release()?;
        if node.is_complete() && node.log.released() == node.log.len() {
            // Nothing is left to be typed or sent.
            node.metadata = None;
        }
        self.give_back(piece.cost(seq));
        Some(piece)
    }

    /// A piece that listed this node is held no longer. `true` if none is left that does.
    pub(super) fn unlist(&mut self, key: NodeKey) -> bool {
        let node = self.get_mut(key);
        node.listed = node.listed.saturating_sub(1);
        node.listed == 0
    }

    /// Whether what everybody has passed is let go.
    pub(super) fn releases(&self) -> bool {
        self.retain == RetentionPolicy::Unread
    }

    /// A reader has passed piece `index` of a node.
    pub(super) fn pass(&mut self, key: NodeKey, index: u32, bytes: usize) {
        let node = self.get_mut(key);
        if index >= node.passed {
            node.passed = index + 1;
            // What we produced was never counted as unread.
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

/// Of how many nodes that are gone a session that forgets still knows the ids.
const REMOVED_KNOWN: usize = 1024;
/// About what a status takes beside its text.
const STATUS_BYTES: usize = 128;
/// What the quota, and the outbound queue, count per fragment beside its payload (EV-801, EV-803).
pub(super) const FRAGMENT_BYTES: usize = 64;
/// What it counts for metadata after the first, which per-chunk mode keeps.
const METADATA_BYTES: usize = 128;
/// What it counts per listed child.
const CHILD_BYTES: usize = size_of::<NodeKey>();
