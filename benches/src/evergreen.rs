//! Shared by the Evergreen benches: a bare echo as the baseline, and a load generator.

pub mod bare;
pub mod load;
pub mod session;
pub mod wire;
