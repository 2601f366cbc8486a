//! What the benches of Triton's generate share: a bare sender to compare with, and the clients that drive both.
//!
//! Owns: nothing but these. Refuses to know: Sapwood's server; the bench program starts it.

pub mod arrivals;
pub mod bare;
pub mod face;
pub mod load;
pub mod waves;
