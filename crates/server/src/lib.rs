//! Sapwood's server: the faces, and what every face needs around it.
//!
//! Owns: listeners, faces, keys, admission, health, metrics, drain. Refuses to know: how a model computes, and no
//! face knows another.

pub mod auth;
pub mod drain;
pub mod health;
pub mod metrics;
pub mod refusal;
pub mod request_id;
pub mod shared;

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of this build, if the builder named one in `SAPWOOD_COMMIT`.
pub const COMMIT: &str = match option_env!("SAPWOOD_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
mod generated;
