//! A session message, into which every dialect decodes and from which it encodes.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use prost_types::Any;
use smallvec::SmallVec;

use super::{Metadata, Status};

/// A node's id as the wire spells it. Clones share.
pub type NodeId = ByteString;

/// The fragments of a message. Most messages of a stream of tokens have one, which needs no allocation (EV-985).
pub type Fragments = SmallVec<[Fragment; 1]>;

/// Any mix of fragments and actions. Order inside a message carries no meaning (EV-102).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WireMessage {
    /// Pieces of nodes.
    pub fragments: Fragments,
    /// Calls.
    pub actions: Vec<Action>,
    /// How many bytes the message took on the wire, if known; payloads that are a small part of it are copied out, so
    /// that they do not pin the receive buffer (EV-805). Never sent.
    pub wire_bytes: usize,
}

impl WireMessage {
    /// Bytes of payload in all fragments.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        let payloads = self
            .fragments
            .iter()
            .filter_map(|fragment| fragment.chunk.as_ref()?.payload.as_ref());
        payloads.map(Payload::len).sum()
    }
}

/// A piece of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fragment {
    /// The node.
    pub id: NodeId,
    /// Position in the node, from 0.
    pub seq: i32,
    /// Whether it is the node's last.
    pub last: bool,
    /// Children, if the node is a tree.
    pub children: Vec<NodeId>,
    /// Which bytes of the child's content are meant, if not all (EV-740). Only msgpack can say so, of one child at a time.
    pub range: Option<Box<Range<u64>>>,
    /// Content, if the node is a leaf.
    pub chunk: Option<Chunk>,
}

/// A piece of a leaf.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// What the content is. On what we send, every piece of a leaf has it; each dialect writes it where it belongs
    /// (EV-404, EV-721).
    pub metadata: Option<Arc<Metadata>>,
    /// The content.
    pub payload: Option<Payload>,
}

/// What a chunk carries.
#[derive(Clone, Debug, PartialEq)]
pub enum Payload {
    /// The bytes themselves.
    Data(Bytes),
    /// A URI whose content stands in this place.
    Ref(ByteString),
    /// How the producer of the node ended: badly, or `None` for well. The dialect chooses the form (EV-931).
    Status(Option<Arc<Status>>),
}

impl Payload {
    /// Bytes that count against limits.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Ref(uri) => uri.len(),
            Self::Status(status) => status.as_ref().map_or(0, |status| status.text_bytes()),
        }
    }

    /// Whether nothing counts.
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
