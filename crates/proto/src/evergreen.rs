//! Evergreen's wire formats. The state of a session is in [`crate::session`].
//!
//! ```text
//!   bytes ──protobuf / json / msgpack──► Message ──► session ──► Message ──dialect──► bytes
//! ```

mod dialect;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod json;
mod limits;
mod message;
pub mod metadata;
pub mod mimetype;
pub mod msgpack;
pub mod protobuf;
pub mod reason;
pub mod reference;
pub mod socket;
pub mod status;

pub use dialect::{DetectedDialect, Dialect, WebSocketFrame};
pub use limits::SessionLimits;
pub use message::{Action, Chunk, Fragment, Fragments, NodeId, Param, Payload, WireMessage};
pub use metadata::{Metadata, MetadataMode};
pub use reason::{ErrorScope, Reason};
pub use status::Status;

/// The messages of package `evergreen.v2` as the protobuf dialects encode them.
pub mod wire {
    pub use crate::generated::evergreen::v2::{
        Action, Chunk, ChunkMetadata, NamedParameter, NodeFragment, SessionMessage, TargetSpec,
        chunk::Payload,
    };
}

#[cfg(test)]
mod tests;
