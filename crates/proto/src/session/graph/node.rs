//! One node of the graph: its log, its kind, its producer, and its readers and parents.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;

use super::release::NodeReaders;
use crate::evergreen::{Metadata, NodeId, Status};
use crate::log::Log;
use crate::session::lifetime::NodeFate;
use crate::session::port::{ActionKey, CursorId, NodeKey};
use crate::session::reference::ExternalContent;

/// One accepted fragment. Its index in the log is its seq.
#[derive(Debug)]
pub(in crate::session) enum LogPiece {
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
pub(in crate::session) struct ChildSlice {
    pub(in crate::session) child: NodeKey,
    pub(in crate::session) range: Range<u64>,
}

/// A reference to external content, or why it cannot be read.
#[derive(Debug)]
pub(in crate::session) struct Reference {
    pub(in crate::session) metadata: Option<Arc<Metadata>>,
    pub(in crate::session) content: Result<Arc<ExternalContent>, Arc<Status>>,
}

impl Reference {
    /// Estimated bytes of the reference, without its metadata.
    fn bytes(&self) -> usize {
        let content = match &self.content {
            Ok(content) => size_of::<ExternalContent>() + content.uri().len(),
            Err(rejection) => status_bytes(rejection),
        };
        size_of::<Self>() + content
    }
}

impl LogPiece {
    /// Quota bytes of the piece at this seq (EV-801).
    #[inline]
    pub(in crate::session) fn cost(&self, seq: u32) -> u64 {
        let (metadata, more) = match self {
            Self::Begin(metadata, _) => (Some(metadata), 0),
            Self::Ref(reference) => (reference.metadata.as_ref(), reference.bytes()),
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
    #[inline]
    pub(in crate::session) fn len(&self) -> usize {
        match self {
            Self::Begin(_, data) | Self::Data(data) => data.len(),
            Self::Status(Some(status)) => status_bytes(status),
            Self::Empty
            | Self::Ref(_)
            | Self::Children(_)
            | Self::Slice(_)
            | Self::Status(None) => 0,
        }
    }

    /// The children that it lists.
    pub(in crate::session) fn children(&self) -> &[NodeKey] {
        match self {
            Self::Children(children) => children,
            Self::Slice(slice) => std::slice::from_ref(&slice.child),
            _ => &[],
        }
    }
}

/// The kind of a node (EV-209).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::session) enum NodeKind {
    #[default]
    Unknown,
    Leaf,
    /// A leaf with excerpts of other nodes among its content (EV-740).
    Excerpts,
    Tree,
}

impl NodeKind {
    /// Whether nodes of this kind list others.
    pub(in crate::session) const fn lists(self) -> bool {
        matches!(self, Self::Excerpts | Self::Tree)
    }
}

/// The producer of a node (EV-216), and its action if there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::session) enum NodeProducer {
    #[default]
    Unclaimed,
    Peer(Option<ActionKey>),
    Local(Option<ActionKey>),
}

impl NodeProducer {
    pub(in crate::session) const fn is_local(self) -> bool {
        matches!(self, Self::Local(_))
    }

    pub(in crate::session) const fn action(self) -> Option<ActionKey> {
        match self {
            Self::Peer(action) | Self::Local(action) => action,
            Self::Unclaimed => None,
        }
    }
}

/// Send state of a node of ours.
#[derive(Debug, Default)]
pub(in crate::session) struct SendState {
    /// Number of pieces handed to the transport: the transport is one more cursor on the log.
    pub(in crate::session) sent: u32,
    /// Whether the node is in the send queue.
    pub(in crate::session) queued: bool,
    /// The first tree of ours that listed it.
    pub(in crate::session) parent: Option<NodeKey>,
    /// Whether that tree may not end before this node is wholly sent (EV-508).
    pub(in crate::session) awaited: bool,
    /// Number of children of ours that are not wholly sent.
    pub(in crate::session) open_children: u32,
    /// Set while the node's turn has not come, for peers that need leaves one after the other (EV-722): its unsent
    /// bytes.
    pub(in crate::session) pending_at: Option<usize>,
    /// Whether the peer was told of the node while its turn has not come.
    pub(in crate::session) known: bool,
    /// Children of ours whose turn has not come, in reading order.
    pub(in crate::session) line: VecDeque<NodeKey>,
    /// How many of those were announced to the peer.
    pub(in crate::session) announced: usize,
    /// The child whose turn it is to be sent.
    pub(in crate::session) turn: Option<NodeKey>,
}

#[derive(Debug, Default)]
pub(in crate::session) struct StoredNode {
    pub(in crate::session) id: NodeId,
    /// The contiguous prefix.
    pub(in crate::session) log: Log<LogPiece>,
    /// Buffered fragments ahead of the contiguous prefix.
    pub(in crate::session) early: BTreeMap<u32, LogPiece>,
    /// The seq of the final fragment.
    pub(in crate::session) last: Option<u32>,
    pub(in crate::session) kind: NodeKind,
    pub(in crate::session) owner: NodeProducer,
    /// Whether it is a child or an input of something; an unreferenced node cannot be part of a cycle yet.
    pub(in crate::session) referenced: bool,
    /// Whether a fragment after the first has a payload that relies on the first one's metadata (EV-401).
    pub(in crate::session) relies_on_first: bool,
    /// Metadata of seq 0.
    pub(in crate::session) metadata: Option<Arc<Metadata>>,
    /// Cursors parked at this node.
    pub(in crate::session) waiters: SmallVec<[CursorId; 2]>,
    /// Number of pieces that the foremost reader has passed.
    pub(in crate::session) passed: u32,
    /// Payload bytes received that no reader has passed.
    pub(in crate::session) unread: u64,
    pub(in crate::session) sending: Option<Box<SendState>>,
    /// How many retained pieces of trees list it.
    pub(in crate::session) listed: u32,
    /// Readers that have still to pass it; only tracked where that decides what is retained (EV-955).
    pub(in crate::session) readers: Option<Box<NodeReaders>>,
    pub(in crate::session) fate: NodeFate,
    /// It serves one RESUME: nothing refers to it later, so that its id is removed with it and its index is reused.
    pub(in crate::session) transient: bool,
    /// Its producer was stopped before its end, and reports that (D-51).
    pub(in crate::session) cut: bool,
    /// The first seq that was received twice with different content: the first content is used, and readers that wait
    /// for more fail.
    pub(in crate::session) repeated: Option<u32>,
    /// Distinguishes the nodes that had this index one after the other.
    pub(in crate::session) generation: u32,
}

impl StoredNode {
    pub(in crate::session) const fn is_complete(&self) -> bool {
        self.log.ended().is_some()
    }

    /// The next seq after the contiguous prefix.
    pub(in crate::session) fn next_seq(&self) -> u32 {
        // The log cannot outgrow 2^31 pieces: seqs are int32.
        u32::try_from(self.log.len()).unwrap_or(u32::MAX)
    }

    /// Whether a fragment with this seq was accepted.
    pub(in crate::session) fn has(&self, seq: u32) -> bool {
        seq < self.next_seq() || self.early.contains_key(&seq)
    }

    /// The highest seq accepted.
    pub(in crate::session) fn highest(&self) -> Option<u32> {
        let ahead = self.early.keys().next_back().copied();
        ahead.or_else(|| self.next_seq().checked_sub(1))
    }

    /// The accepted fragment with this seq.
    pub(in crate::session) fn piece(&self, seq: u32) -> Option<&LogPiece> {
        match self.log.at(seq as usize) {
            crate::log::LogRead::Item(piece) => Some(piece),
            _ => self.early.get(&seq),
        }
    }

    /// Whether some of it, at least its end, is still to be handed to the transport.
    pub(in crate::session) fn is_unsent(&self) -> bool {
        // Enough to know about the end as well: an end is the last piece, or a mark on it, and never comes without a
        // piece.
        let sent = self.sending.as_ref().map(|sending| sending.sent);
        sent.is_some_and(|sent| sent < self.next_seq())
    }

    /// Quota bytes of its content, without its id.
    pub(in crate::session) fn content_cost(&self) -> u64 {
        // The seq matters: metadata at seq 0 is charged differently from later metadata.
        let first = u32::try_from(self.log.released()).unwrap_or(u32::MAX);
        let log = (first..).zip(self.log.iter());
        let early = self.early.iter().map(|(seq, piece)| (*seq, piece));
        let pieces = log.chain(early).map(|(seq, piece)| piece.cost(seq));
        pieces.sum::<u64>()
    }

    /// Every child that an accepted fragment lists, including buffered fragments.
    pub(in crate::session) fn children(&self) -> impl Iterator<Item = NodeKey> + '_ {
        self.edges().flatten()
    }

    /// The same, with `None` for each piece that lists nothing: a walk with a budget is charged for these too.
    pub(in crate::session) fn edges(&self) -> impl Iterator<Item = Option<NodeKey>> + '_ {
        self.edges_from(0, 0)
    }

    /// The same, from one position on.
    pub(in crate::session) fn edges_from(
        &self,
        piece: u32,
        child: u32,
    ) -> impl Iterator<Item = Option<NodeKey>> + '_ {
        let pieces = self.kind.lists().then(|| {
            // The cursor's index counts released pieces, the iterator does not.
            let skipped = (piece as usize).saturating_sub(self.log.released());
            self.log.iter().skip(skipped).chain(self.early.values())
        });
        let mut passed = child as usize;
        pieces.into_iter().flatten().flat_map(move |piece| {
            // Only children of the first piece were passed.
            let passed = std::mem::take(&mut passed);
            let children = piece.children().get(passed..).unwrap_or_default();
            let nothing = children.is_empty().then_some(None);
            nothing
                .into_iter()
                .chain(children.iter().copied().map(Some))
        })
    }
}

/// Estimated size of a status.
fn status_bytes(status: &Status) -> usize {
    // A peer may send entries without text, and each of them takes more than most texts do.
    let entries = size_of_val(&*status.details) + size_of_val(&*status.fields);
    size_of::<Status>() + entries + status.text_bytes()
}

/// Bytes that the quota and the outbound queue count per fragment, without its payload (EV-801, EV-803).
pub(in crate::session) const FRAGMENT_BYTES: usize = 64;
/// Bytes that the quota counts for metadata after the first, which per-chunk mode retains.
const METADATA_BYTES: usize = 128;
/// Bytes that the quota counts per listed child.
const CHILD_BYTES: usize = size_of::<NodeKey>();
