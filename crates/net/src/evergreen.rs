//! The Evergreen client (EV-970 to EV-975): sessions with a server over gRPC or WebSockets.

pub mod grpc;
mod link;
mod session;
mod transport;
mod websocket;

pub use crate::address::ServerAddress;
pub use link::panics;
pub use sapwood_session::peer::{
    CallRequest, NodeReader, PeerCall, PeerHandle, PeerNodeWriter, SessionNode,
};
pub use session::{ClientSession, ClientSessionOptions};
