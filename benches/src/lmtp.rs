//! What the LMTP benches share: bare senders to compare with, and the one client that drives every server.
//!
//! Owns: nothing but these. Refuses to know: Sapwood's server; the bench program starts it.

pub mod bare;
pub mod face;
pub mod load;
