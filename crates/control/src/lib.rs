//! Controllers in Wasm that steer decoding, and the AICI runtime for other engines.

pub mod compiler;
pub mod controllers;
pub mod module;
pub mod store;
