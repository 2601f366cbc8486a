//! What the Evergreen benches share: a bare echo to compare with, and a load.

pub mod bare;
pub mod load;
pub mod session;
pub mod wire;
