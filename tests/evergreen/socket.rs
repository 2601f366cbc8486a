//! Evergreen over WebSockets from raw clients: the transport, and each dialect.

mod json;
mod msgpack;
mod protobuf;
mod transport;
