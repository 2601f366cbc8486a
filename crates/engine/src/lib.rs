//! Sapwood's engine: the only room with model code.
//!
//! Owns: the engine's interface, the owner thread, the pure scheduler and prefix cache, sampling, the scripted and the
//! embedded model. Refuses to know: faces, kernels, sockets, configuration files.

pub mod api;
pub mod model;
pub mod ranking;
