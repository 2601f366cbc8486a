//! Controllers in Wasm that steer decoding, and the AICI runtime for other engines.

pub mod host;
pub mod module;
#[cfg(target_os = "linux")]
pub mod runtime;
pub mod trie;
#[cfg(target_os = "linux")]
pub mod wire;
