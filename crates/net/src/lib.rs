//! Sapwood's clients: one module for each protocol. No other crate opens client sockets.

mod address;
mod connection;
pub mod evergreen;
mod http1;
pub mod hub;
pub mod lmtp;
#[cfg(feature = "otlp")]
pub mod otlp;
pub mod references;
pub mod rest;
mod tls;
pub mod triton;

pub use address::ServerAddress;
pub use connection::{NO_ANSWER, UNTRUSTED};
