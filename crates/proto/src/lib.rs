//! Sapwood's protocol cores: vocabulary, state machines and wire formats, as pure values.
//!
//! Owns: everything that a stranger's bytes are turned into, and back. Refuses to know: sockets, tasks, threads,
//! files, clocks, randomness, models. Time is an argument ([`time::Time`]); errors are values ([`code::Code`]).

#![forbid(unsafe_code)]

pub mod bounded_json;
pub mod code;
#[cfg(test)]
mod corpus;
pub mod evergreen;
pub mod generate;
pub mod generated;
pub mod lmtp;
pub mod log;
pub mod secret;
pub mod session;
pub mod shown;
pub mod sse;
pub mod steer;
mod sync;
pub mod time;
