//! Sapwood's protocol cores: shared types, state machines and wire formats, as pure values without I/O.
//!
//! Time is an argument ([`time::Time`]); errors are values ([`code::Code`]).

#![forbid(unsafe_code)]

pub mod bounded_json;
pub mod clip;
pub mod code;
#[cfg(test)]
mod corpus;
pub mod error_reason;
pub mod evergreen;
pub mod generate;
pub mod generated;
pub mod lmtp;
pub mod log;
pub mod params;
pub mod replay;
pub mod secret;
pub mod session;
pub mod sse;
pub mod steer;
pub mod time;
