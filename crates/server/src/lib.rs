//! Sapwood's server: the faces, and what every face needs around it.
//!
//! Owns: listeners, faces, keys, admission, health, metrics, drain. Refuses to know: how a model computes, and no
//! face knows another.
//!
//! ```text
//!   listener ──► table of routes ──► gate (host, origin, caller, method, drain) ──► ops │ grpc │ each face's handlers
//! ```

mod access;
mod activity;
pub mod allowance;
pub mod auth;
pub mod body_budget;
pub mod caller;
pub mod counting;
mod departures;
pub mod descriptors;
pub mod drain;
pub mod evergreen;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod gate;
pub mod generate;
mod grpc;
mod gunzip;
mod handover;
pub mod health;
mod heard;
mod held;
mod intake;
mod leftover;
pub mod listener;
pub mod lmtp;
pub mod metrics;
mod open;
mod ops;
pub mod origin;
pub mod pace;
mod packed;
mod page;
pub mod patience;
mod places;
mod polls;
pub mod purpose;
mod reception;
pub mod refusal;
pub mod request_id;
mod revocation;
pub mod route;
pub mod server;
pub mod shared;
pub mod socket;
pub mod telemetry;
pub mod tls;
mod trail;
mod websocket;

pub use server::{Builder, Config, Server};
pub use shared::{Face, Shared};

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of this build, if the builder named one in `SAPWOOD_COMMIT`.
pub const COMMIT: &str = match option_env!("SAPWOOD_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
