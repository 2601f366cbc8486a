//! Inputs and outputs of a session beside messages.

use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use prost_types::Any;

use super::reference::Referenced;
use super::release::RetentionPolicy;
use super::slab::SlabKey;
use crate::evergreen::{DialectCapabilities, Metadata, MetadataMode, Param, SessionLimits, Status};
use crate::time::Time;

/// A node of one session. Valid as long as the session; where a session forgets nodes (EV-741), what has become of a
/// forgotten one is what becomes of any that was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeKey {
    pub(super) index: u32,
    /// Which of the nodes that had this place one after the other.
    pub(super) generation: u32,
}

/// An action of one session, ours or the peer's. Stale once the action is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActionKey(pub(super) SlabKey);

/// A reader of one node. Stale once closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CursorId(pub(super) SlabKey);

impl CursorId {
    /// The id as a number, for shells whose own cursors are numbers.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0.to_bits()
    }

    /// The id that `bits` was made from; any other number is a stale id.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(SlabKey::from_bits(bits))
    }
}

/// How an action came to the end of a leaf that it wrote (D-51).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeafEnd {
    /// By itself, as far as anybody has said.
    Whole,
    /// At a limit: there would have been more.
    Cut,
}

/// Which end of the connection this machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// We opened it.
    Client,
    /// We accepted it.
    Server,
}

/// How a session behaves; fixed when it begins.
#[derive(Clone, Debug)]
pub struct Config {
    /// What it may hold and do.
    pub limits: Arc<SessionLimits>,
    /// How metadata after the first fragment is judged (EV-405).
    pub metadata: MetadataMode,
    /// Whether a failed action leaves the session alive (EV-930).
    pub partial_failure: bool,
    /// Whether ready fragments are joined into messages; off gives one fragment per message (D-33).
    pub coalesce: bool,
    /// Which pieces are kept (EV-955).
    pub retain: RetentionPolicy,
    /// What the peer's dialect cannot do without.
    pub capabilities: DialectCapabilities,
    /// Whether the shell follows references to content elsewhere (EV-410); without it they are `REF_DENIED`.
    pub references: bool,
    /// Whether the session outlives its connection for a while (EV-940). It keeps everything then, whatever `retain`
    /// says: what was sent may have to be sent again.
    pub resume: bool,
    /// When the session ends whatever happens (EV-950).
    pub deadline: Option<Time>,
    /// A random number: it makes ids of ours unguessable and hashing of ids unpredictable. The machine has no
    /// randomness of its own.
    pub entropy: u64,
}

impl Config {
    /// Which pieces are kept in truth.
    pub(super) fn retention(&self) -> RetentionPolicy {
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
            capabilities: DialectCapabilities::default(),
            deadline: None,
            entropy: 0,
        }
    }
}

/// What the machine asks of its shell.
#[derive(Clone, Debug)]
pub enum SessionOutput {
    /// Run this action. It ends with [`super::SessionMachine::finish`] or [`super::SessionMachine::fail`].
    Start(Box<ActionStart>),
    /// An action of the peer's ended badly before there was anything to run. There is nothing to do but to count it.
    Refused(Arc<Status>),
    /// Stop this action's work.
    Cancel {
        /// The action.
        action: ActionKey,
        /// Who wants it, and with that what is left to do.
        by: CancelledBy,
    },
    /// Reading this cursor again gives something else than pending.
    Ready(CursorId),
    /// There is room for output again, after [`super::SessionMachine::has_room`] said no.
    Writable,
    /// Reading of the connection may go on, after [`super::SessionMachine::inbound_paused`] said it should not.
    Resume,
    /// A time has come nearer: ask [`super::SessionMachine::wake_at`] anew.
    Timed,
    /// All outputs of an action that we sent are complete; its key is stale from here on.
    Done(ActionKey),
    /// Everything we had to send is sent, after [`super::SessionMachine::finish_sending`]: half-close the connection.
    HalfClose,
    /// The session is over: without error, or with this status, which is sent to the peer. Nothing follows.
    Close(Option<Arc<Status>>),
}

/// Who stops an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelledBy {
    /// The peer, with CANCEL: stop, write what `meta` should say, and finish the action (EV-913).
    Peer,
    /// The machine: the action has failed already (a deadline), only its work is left to drop.
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
    /// Outputs: parameter and node. `__status__` is not among them, the machine writes it.
    pub outputs: Vec<(ByteString, NodeKey)>,
    /// Configs, but for `sapwood.v1.ActionOptions`, which the machine has read.
    pub configs: Vec<Any>,
    /// When it has to be finished: the earlier of its own deadline and the session's (EV-950).
    pub deadline: Option<Time>,
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

/// What a cursor yields.
#[derive(Clone, Debug)]
pub enum CursorRead {
    /// A piece of an item.
    Piece(LeafPiece),
    /// Content that stands elsewhere, in this place. The answer stays the same until the shell has said with
    /// [`super::SessionMachine::end_reference`] that all of it was read, or with [`super::SessionMachine::fail_reference`] why it
    /// cannot be.
    Reference(Referenced),
    /// Nothing yet; [`SessionOutput::Ready`] will tell.
    Pending,
    /// There is more, but this turn has made visits enough: read again in the next one, after
    /// [`super::SessionMachine::begin_turn`].
    Busy,
    /// The end of the content.
    End,
    /// The content cannot be read further, now or ever.
    Failed(Arc<Status>),
}

/// A piece of an item, the content of a leaf (EV-301).
#[derive(Clone, Debug)]
pub struct LeafPiece {
    /// Which item, counted from 0. Items never merge (EV-304).
    pub item: u32,
    /// Whether this is the item's first piece. An item may be nothing but an empty first piece.
    pub first: bool,
    /// The leaf it is from.
    pub node: NodeKey,
    /// What the item is.
    pub metadata: Arc<Metadata>,
    /// Its next bytes.
    pub data: Bytes,
}

/// Why something was not written.
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
    /// The node is the peer's, or a leaf where a tree is asked for, or the other way round.
    #[error("the node cannot take this")]
    Refused,
    /// The node has used every seq there is (EV-203).
    #[error("the node has no seq left")]
    Exhausted,
}

/// What a session has counted (EV-904). Only ever grows.
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
    /// Fragments ignored because their seq was there already.
    pub duplicates: u64,
    /// Fragments ignored because their node was dropped.
    pub discarded: u64,
    /// Actions received.
    pub actions: u64,
    /// Actions that ended badly.
    pub failures: u64,
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
