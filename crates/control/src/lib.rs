//! Controllers in Wasm that steer decoding, and the AICI runtime for other engines.

#[cfg(target_os = "linux")]
pub mod runtime;
#[cfg(target_os = "linux")]
pub mod wire;
