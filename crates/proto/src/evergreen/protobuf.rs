//! The protobuf dialect: messages of type `evergreen.v2.SessionMessage`, over gRPC and WebSockets.
//!
//! Both directions convert directly between the message and the caller's buffer, without the generated structs in
//! between, so that a token costs no allocation (EV-985).

mod read;
#[cfg(test)]
mod tests;
mod write;

use bytes::Buf;

use self::read::ProtobufError;
pub(super) use self::read::failure;
pub(crate) use self::write::status_bytes;
pub use self::write::{encode, encoded_len};
use super::{Reason, Status, WireMessage};

/// Decodes one message. Texts and payloads are views of `bytes` if those are shared already.
///
/// # Errors
/// `BAD_MESSAGE`; the decoder's error is not repeated, because it may quote the sender's bytes. `FRAGMENT_LIMIT` for a
/// message of more than [`ENTRIES_MAX`] parts, because a part of two bytes takes two hundred once it is decoded.
pub fn decode(mut bytes: impl Buf) -> Result<WireMessage, Status> {
    // Copies nothing if the buffer is one piece of `Bytes`.
    let bytes = bytes.copy_to_bytes(bytes.remaining());
    read::message(&bytes).map_err(|refused| match refused {
        ProtobufError::Malformed => {
            let what = "a message is not an evergreen.v2.SessionMessage; check the schema and the UTF-8 of strings";
            Status::new(Reason::BadMessage, what)
        }
        ProtobufError::TooMany => {
            let max = ENTRIES_MAX as u64;
            Status::limit(Reason::FragmentLimit, "entries_max", max + 1, max)
        }
    })
}

/// Maximum number of fragments, actions, children, parameters and configs in one message, together.
pub const ENTRIES_MAX: usize = 131_072;

// Field numbers of evergreen.v2; a test compares every one with the generated code.
const FRAGMENTS: u32 = 1;
const ACTIONS: u32 = 2;
const ID: u32 = 1;
const SEQ: u32 = 2;
const CONTINUED: u32 = 3;
const CHILD_IDS: u32 = 4;
const CHUNK: u32 = 5;
const METADATA: u32 = 1;
const REF: u32 = 3;
const DATA: u32 = 10;
const MIMETYPE: u32 = 1;
const ROLE: u32 = 2;
const FILE_NAME: u32 = 3;
const CAPTURE_TIME: u32 = 6;
const EXPERIMENTAL: u32 = 100;
