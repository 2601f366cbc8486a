//! Sapwood's server: the protocols (faces), and the listener, middleware and operations that all of them share.
//!
//! ```text
//!   listener ──► table of routes ──► middleware (host, origin, caller, method, drain) ──► ops │ grpc │ each face's handlers
//! ```

pub mod auth;
mod branch_text;
pub mod context;
pub mod faces;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod http;
pub mod listener;
pub mod ops;
mod page;
mod resume;
pub mod server;
mod websocket;

#[cfg(feature = "echo")]
pub use websocket::echo;

pub use context::{Face, ServerContext};
pub use server::{Builder, Config, Server};

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of this build, if the builder named one in `SAPWOOD_COMMIT`.
pub const COMMIT: &str = match option_env!("SAPWOOD_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
