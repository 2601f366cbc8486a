//! The encoding-neutral session message that every dialect decodes into and encodes from.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use prost_types::Any;
use smallvec::SmallVec;

use super::{Metadata, Status};

/// A node's id as on the wire. Clones share memory.
pub type NodeId = ByteString;

/// The fragments of a message. Most messages of a token stream have one, which needs no allocation (EV-985).
pub type Fragments = SmallVec<[Fragment; 1]>;

/// Any mix of fragments and actions. Order inside a message carries no meaning (EV-102).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WireMessage {
    /// Fragments of nodes.
    pub fragments: Fragments,
    /// Actions.
    pub actions: Vec<Action>,
    /// Size of the message on the wire in bytes, if known. Payloads that are a small part of it are copied, so that
    /// they do not pin the receive buffer (EV-805). Never sent.
    pub wire_bytes: usize,
}

impl WireMessage {
    /// Payload bytes of all fragments.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        let payloads = self
            .fragments
            .iter()
            .filter_map(|fragment| fragment.chunk.as_ref()?.payload.as_ref());
        payloads.map(Payload::len).sum()
    }
}

/// A fragment of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fragment {
    /// The node.
    pub id: NodeId,
    /// Position in the node, from 0.
    pub seq: i32,
    /// Whether it is the final fragment of the node.
    pub last: bool,
    /// Children, if the node is a tree.
    pub children: Vec<NodeId>,
    /// The selected bytes of the child's content, if not all (EV-740). Only msgpack supports that, for one child at a
    /// time.
    // Boxed, because almost no fragment has one and it would add 16 bytes to each.
    pub range: Option<Box<Range<u64>>>,
    /// Content, if the node is a leaf.
    pub chunk: Option<Chunk>,
}

/// A piece of a leaf.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Metadata of the content. In messages that we send, every chunk of a leaf has it; each dialect writes it where it
    /// belongs (EV-404, EV-721).
    pub metadata: Option<Arc<Metadata>>,
    /// The content.
    pub payload: Option<Payload>,
}

/// The content of a chunk.
#[derive(Clone, Debug, PartialEq)]
pub enum Payload {
    /// The bytes themselves.
    Data(Bytes),
    /// A URI to content that is read in place of this chunk.
    Ref(ByteString),
    /// The status of the node's producer at its end; `None` is success. The dialect chooses the form (EV-931).
    Status(Option<Arc<Status>>),
}

impl Payload {
    /// Bytes that count against limits.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Ref(uri) => uri.len(),
            // A peer's status is retained like content, so it counts as much.
            Self::Status(status) => status.as_ref().map_or(0, |status| status.text_bytes()),
        }
    }

    /// Whether it has no bytes that count.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A call of a named function over nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Action {
    /// The function.
    pub name: ByteString,
    /// The model, agent or endpoint; empty for the default.
    pub target: ByteString,
    /// Bound inputs, unordered.
    pub inputs: Vec<Param>,
    /// Bound outputs, unordered.
    pub outputs: Vec<Param>,
    /// Settings, of different types.
    pub configs: Vec<Any>,
}

/// A parameter and the node that is bound to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Param {
    /// The parameter.
    pub name: ByteString,
    /// The node.
    pub id: NodeId,
}

impl Param {
    /// `name` bound to the node `id`.
    #[must_use]
    pub fn new(name: impl Into<ByteString>, id: impl Into<NodeId>) -> Self {
        Self {
            name: name.into(),
            id: id.into(),
        }
    }
}
