//! The Evergreen wire: what its messages look like, apart from what a session does with them.
//!
//! Owns: the protobuf messages. Refuses to know: the state of a session (`session`).

pub use crate::generated::evergreen::v2::{
    Action, Chunk, ChunkMetadata, NamedParameter, NodeFragment, SessionMessage, TargetSpec,
    chunk::Payload,
};

#[cfg(test)]
mod tests;
