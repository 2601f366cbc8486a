//! The Evergreen client (EV-970 to EV-975).
//!
//! Owns: connections, sessions, typed errors. Refuses to know: kernels; `kernel::connect` makes functions of it.

pub mod grpc;
mod link;
mod session;
mod transport;
mod websocket;

pub use link::panics;
pub use sapwood_proto::session::peer::{Call, Node, Peer, Reader, Request, Writer};
pub use session::{Options, Session};
pub use transport::Address;
