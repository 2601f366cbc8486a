//! What the LMTP benches share: bare senders to compare with, the server under test, and the clients that drive them.
//!
//! Owns: nothing but these. Refuses to know: Sapwood's server; the bench program starts it.

pub mod bare;
pub mod face;
pub mod items;
pub mod load;
