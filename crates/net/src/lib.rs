//! Sapwood's clients: the only home of client sockets.
//!
//! Owns: transports and typed clients of every protocol, reconnecting, balancing; what references name.
//! Refuses to know: kernels, engines, servers.

mod connection;
pub mod evergreen;
mod http1;
pub mod lmtp;
#[cfg(feature = "otlp")]
pub mod otlp;
pub mod references;
mod tls;
pub mod triton;

pub use connection::{NO_ANSWER, UNTRUSTED};
