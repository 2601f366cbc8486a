//! Evergreen over WebSockets, from raw clients: the transport, and each dialect.
//!
//! Owns: nothing; a file per dialect. Refuses to know: the codecs, which are tested where they stand.

mod json;
mod msgpack;
mod protobuf;
mod transport;
