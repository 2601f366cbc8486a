//! Controllers in Wasm that steer decoding, and the AICI runtime for other engines.

pub mod compiler;
pub mod controllers;
pub mod host;
pub mod module;
pub mod steer;
pub mod store;
pub mod trie;
