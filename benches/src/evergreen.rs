//! What the Evergreen benches share: a bare echo to compare with, and a load.
//!
//! Owns: nothing but these. Refuses to know: Sapwood's server; the bench program starts it.

pub mod bare;
pub mod load;
pub mod session;
pub mod wire;
