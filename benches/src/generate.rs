//! Shared by the benches of Triton's generate extension: a bare sender as the baseline, and the clients that drive
//! both.

pub mod arrivals;
pub mod bare;
pub mod face;
pub mod load;
pub mod waves;
