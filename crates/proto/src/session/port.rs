//! Configuration, keys, outputs and errors of the session machine: the types of its interface other than messages.

use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use prost_types::Any;

use super::adapter::PeerAdapter;
use super::graph::release::RetentionPolicy;
use super::reference::Referenced;
use super::slab::SlabKey;
use crate::evergreen::{
    Dialect, Fragment, Metadata, MetadataMode, Param, Payload, SessionLimits, Status,
};
use crate::time::Time;

/// A node of one session. Valid as long as the session; where a session removes nodes (EV-741), the key of a removed
/// node behaves as that of any released one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeKey {
    pub(super) index: u32,
    /// Distinguishes the nodes that had this index one after the other.
    pub(super) generation: u32,
}

/// An action of one session, ours or the peer's. Stale once the action is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActionKey(pub(super) SlabKey);

/// A reader of one node. Stale once closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CursorId(pub(super) SlabKey);

impl CursorId {
    /// The id as a number, for shells whose cursors are numbers.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0.to_bits()
    }

    /// The id that `bits` was made from; any other number gives a stale id.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(SlabKey::from_bits(bits))
    }
}

/// How an action ended a leaf that it wrote (D-51).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeafEnd {
    /// It ended by itself, unless reported otherwise.
    Whole,
    /// It was stopped at a limit: there would have been more content.
    Cut,
}

/// Which side of the connection this machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that opened it.
    Client,
    /// The side that accepted it.
    Server,
}

/// Configuration of a session; fixed when it begins.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its limits.
    pub limits: Arc<SessionLimits>,
    /// How metadata after the first fragment is handled (EV-405).
    pub metadata: MetadataMode,
    /// Whether a failed action leaves the session alive (EV-930).
    pub partial_failure: bool,
    /// Whether ready fragments are joined into messages; off gives one fragment per message (D-33).
    pub coalesce: bool,
    /// Which pieces are retained (EV-955).
    pub retain: RetentionPolicy,
    /// In which order the leaves of a tree of ours are sent.
    pub leaf_order: LeafOrder,
    /// Whether the nodes of an action are dropped when it ends, and the ids of dropped nodes removed after some time:
    /// for peers whose sessions last for years (EV-741). Keys and late fragments of such nodes find a released node.
    pub forgets_actions: bool,
    /// Brings the peer's fragments into the canonical form.
    pub adapter: PeerAdapter,
    /// Whether the shell resolves references to external content (EV-410); without it they fail with `REF_DENIED`.
    pub references: bool,
    /// Whether the session outlives its connection for a grace period (EV-940). It then retains everything, whatever
    /// `retain` says: content that was sent may have to be sent again.
    pub resume: bool,
    /// When the session ends in any case (EV-950).
    pub deadline: Option<Time>,
    /// A random number: it makes our ids unguessable and the hashing of ids unpredictable. The machine has no
    /// randomness of its own.
    pub entropy: u64,
}

impl Config {
    /// The configuration of a server whose client speaks `dialect`; everything else has its default.
    #[must_use]
    pub fn for_client_of(dialect: Dialect) -> Self {
        Self {
            metadata: dialect.metadata(),
            leaf_order: LeafOrder::for_client_of(dialect),
            forgets_actions: dialect == Dialect::Msgpack,
            adapter: PeerAdapter::of(dialect),
            ..Self::default()
        }
    }

    /// The configuration of a client whose server speaks `dialect`; everything else has its default. Leaves are sent in
    /// any order: servers order what they receive.
    #[must_use]
    pub fn for_server_of(dialect: Dialect) -> Self {
        let metadata = match dialect {
            // A JSON server repeats the metadata on every fragment of a leaf (EV-721): different metadata is an error.
            Dialect::Json => MetadataMode::Lenient,
            Dialect::Msgpack => MetadataMode::PerItem,
            Dialect::Grpc | Dialect::Protobuf => dialect.metadata(),
        };
        Self {
            metadata,
            adapter: PeerAdapter::of(dialect),
            ..Self::default()
        }
    }

    /// How many children a fragment of ours has at most. Action Engine's fragments have room for one, so each child has
    /// a seq of its own there (EV-740).
    pub(super) fn children_max(&self) -> usize {
        match self.adapter {
            PeerAdapter::Canonical => self.limits.max_children_per_fragment.max(1),
            PeerAdapter::ActionEngine => 1,
        }
    }

    /// The effective retention policy.
    pub(super) fn retention(&self) -> RetentionPolicy {
        // Released content cannot be sent again (EV-942).
        if self.resume {
            RetentionPolicy::Session
        } else {
            self.retain
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: Arc::default(),
            metadata: MetadataMode::Lenient,
            partial_failure: false,
            coalesce: true,
            retain: RetentionPolicy::Session,
            references: false,
            resume: false,
            leaf_order: LeafOrder::Free,
            forgets_actions: false,
            adapter: PeerAdapter::Canonical,
            deadline: None,
            entropy: 0,
        }
    }
}

/// The order in which the leaves of a tree are sent to the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeafOrder {
    /// As they are written: leaves of one tree interleave.
    #[default]
    Free,
    /// One after the other, in reading order: for clients that append leaves as they arrive (EV-722).
    Reading,
}

impl LeafOrder {
    /// What a client of this dialect needs.
    #[must_use]
    pub const fn for_client_of(dialect: Dialect) -> Self {
        match dialect {
            Dialect::Json => Self::Reading,
            Dialect::Grpc | Dialect::Protobuf | Dialect::Msgpack => Self::Free,
        }
    }
}

/// An output of the machine, for its shell to act on.
#[derive(Clone, Debug)]
pub enum SessionOutput {
    /// Run this action. It ends with [`super::Calls::finish`] or [`super::Calls::fail`].
    Start(Box<ActionStart>),
    /// An action of the peer failed before there was anything to run. The shell only counts it.
    Refused(Arc<Status>),
    /// Stop the work of this action.
    Cancel {
        /// The action.
        action: ActionKey,
        /// Who cancels it; this decides what is left to do.
        by: CancelledBy,
    },
    /// Reading this cursor again returns something other than pending.
    Ready(CursorId),
    /// There is room for output again, after [`super::Nodes::has_room`] returned `false`.
    Writable,
    /// Reading from the connection may continue, after [`super::SessionMachine::inbound_paused`] returned `true`.
    Resume,
    /// The next timer is earlier now: ask [`super::SessionMachine::wake_at`] again.
    Timed,
    /// All outputs of an action that we sent are complete; its key is stale now.
    Done(ActionKey),
    /// All our output is sent, after [`super::Calls::finish_sending`]: half-close the connection.
    HalfClose,
    /// The session is over: without an error, or with this status, which is sent to the peer. No output follows.
    Close(Option<Arc<Status>>),
}

/// Who cancels an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelledBy {
    /// The peer, with CANCEL: stop, write what `meta` should contain, and finish the action (EV-913).
    Peer,
    /// The machine, at a deadline: the action has failed already, only its work is left to drop.
    Deadline,
}

/// An action of the peer that is to be run.
#[derive(Clone, Debug)]
pub struct ActionStart {
    /// Its key.
    pub action: ActionKey,
    /// The function's name, as sent.
    pub name: ByteString,
    /// The target, as sent; empty for the default.
    pub target: ByteString,
    /// Inputs: parameter and node.
    pub inputs: Vec<(ByteString, NodeKey)>,
    /// Outputs: parameter and node. Without `__status__`, which the machine writes.
    pub outputs: Vec<(ByteString, NodeKey)>,
    /// Configs, except `sapwood.v1.ActionOptions`, which the machine has read.
    pub configs: Vec<Any>,
    /// The deadline: the earlier of its own and the session's (EV-950).
    pub deadline: Option<Time>,
    /// Whether the peer waits for a status that the function was found (EV-736): then call
    /// [`dispatched`](super::Calls::dispatched).
    pub confirm: bool,
}

/// An action for the peer to run.
#[derive(Clone, Debug, Default)]
pub struct ActionRequest {
    /// The function's name.
    pub name: ByteString,
    /// The target; empty for the peer's default.
    pub target: ByteString,
    /// Inputs: parameter and node.
    pub inputs: Vec<(ByteString, NodeKey)>,
    /// Outputs: parameter and node; the nodes must be new.
    pub outputs: Vec<(ByteString, NodeKey)>,
    /// Configs.
    pub configs: Vec<Any>,
}

/// The result of reading a cursor.
#[derive(Clone, Debug)]
pub enum CursorRead {
    /// A piece of an item.
    Piece(LeafPiece),
    /// External content at this position. Reading returns the same until the shell reports with
    /// [`super::Nodes::end_reference`] that all of it was read, or with
    /// [`super::Nodes::fail_reference`] why it cannot be read.
    Reference(Referenced),
    /// No content yet; [`SessionOutput::Ready`] follows when there is.
    Pending,
    /// There is more, but the visits of this turn are used up: read again in the next turn, after
    /// [`super::Nodes::begin_turn`].
    Busy,
    /// The end of the content.
    End,
    /// The read has failed for good.
    Failed(Arc<Status>),
}

/// A piece of an item, the content of a leaf (EV-301).
#[derive(Clone, Debug)]
pub struct LeafPiece {
    /// Index of the item, from 0. Items never merge (EV-304).
    pub item: u32,
    /// Whether this is the item's first piece. An item may consist of one empty first piece.
    pub first: bool,
    /// The leaf that it is part of.
    pub node: NodeKey,
    /// The item's metadata.
    pub metadata: Arc<Metadata>,
    /// The next bytes of the item.
    pub data: Bytes,
}

/// Why a write failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The outbound queue is full: wait for [`SessionOutput::Writable`].
    #[error("the outbound queue is full")]
    Full,
    /// The session is over.
    #[error("the session is over")]
    Closed,
    /// The node has ended.
    #[error("the node has ended")]
    Ended,
    /// The node is the peer's, or is a leaf where a tree is required, or the other way round.
    #[error("the node cannot take this")]
    Refused,
    /// The node has used every seq (EV-203).
    #[error("the node has no seq left")]
    Exhausted,
}

/// Counters of a session (EV-904). They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionStats {
    /// Fragments received, duplicates included.
    pub fragments_in: u64,
    /// Payload bytes received, duplicates included.
    pub bytes_in: u64,
    /// Fragments handed to the transport.
    pub fragments_out: u64,
    /// Payload bytes handed to the transport.
    pub bytes_out: u64,
    /// Fragments ignored because their seq was accepted before.
    pub duplicates: u64,
    /// Fragments ignored because their node was dropped.
    pub discarded: u64,
    /// Actions received.
    pub actions: u64,
    /// Actions that failed.
    pub failures: u64,
}

impl SessionStats {
    /// Counts a fragment as it was received, before anything is decided about it.
    pub(super) fn received(&mut self, fragment: &Fragment) {
        let chunk = fragment.chunk.as_ref();
        let payload = chunk.and_then(|chunk| chunk.payload.as_ref());
        self.fragments_in += 1;
        self.bytes_in += payload.map_or(0, Payload::len) as u64;
    }
}

pub(super) fn params(
    list: &[(ByteString, NodeKey)],
    id: impl Fn(NodeKey) -> ByteString,
) -> Vec<Param> {
    list.iter()
        .map(|(name, node)| Param {
            name: name.clone(),
            id: id(*node),
        })
        .collect()
}
