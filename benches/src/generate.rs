//! What the benches of Triton's generate share: a bare sender to compare with, and the clients that drive both.

pub mod arrivals;
pub mod bare;
pub mod face;
pub mod load;
pub mod waves;
