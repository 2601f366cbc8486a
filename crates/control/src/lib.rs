//! Controllers in Wasm that steer decoding, and the AICI runtime for other engines.

pub mod module;
