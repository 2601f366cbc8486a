//! Connectors: servers elsewhere as functions of this kernel (D-5).
//!
//! Owns: the functions over the clients of `sapwood-net`. Refuses to know: sockets.

pub mod evergreen;
pub mod lmtp;
mod reference;
pub mod triton;
