//! Controllers in Wasm that steer decoding, and the AICI runtime for other engines.

#[cfg(target_os = "linux")]
pub mod aicirt;
pub mod compiler;
pub mod controllers;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod host;
pub mod module;
#[cfg(target_os = "linux")]
pub mod remote;
#[cfg(target_os = "linux")]
pub mod runtime;
mod spin;
pub mod steer;
pub mod store;
pub mod trie;
#[cfg(target_os = "linux")]
pub mod wire;
