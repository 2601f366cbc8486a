//! Sapwood's server: the faces, and what all of them share.
//!
//! ```text
//!   listener ──► table of routes ──► gate (host, origin, caller, method, drain) ──► ops │ grpc │ each face's handlers
//! ```

mod access_log;
mod activity;
pub mod auth;
pub mod body_budget;
pub mod call_metrics;
pub mod caller;
mod compressed_limit;
pub mod context;
pub mod descriptors;
pub mod drain;
mod drain_body;
pub mod evergreen;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod generate;
mod grpc;
mod gunzip;
pub mod health;
mod intake;
pub mod listener;
pub mod lmtp;
pub mod metrics;
mod middleware;
mod open_streams;
mod ops;
pub mod origin;
mod page;
mod poll_timing;
pub mod port_purpose;
mod quotas;
pub mod rate_limit;
mod read_watch;
pub mod rejection;
pub mod request_id;
mod request_trace;
mod resume_registry;
mod revocation;
pub mod route;
pub mod server;
pub mod socket;
mod socket_dispatch;
pub mod telemetry;
pub mod timeouts;
pub mod tls;
mod upgrade;
pub mod upload_pace;
mod websocket;
mod write_stall;

pub use context::{Face, ServerContext};
pub use server::{Builder, Config, Server};

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of this build, if the builder named one in `SAPWOOD_COMMIT`.
pub const COMMIT: &str = match option_env!("SAPWOOD_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
