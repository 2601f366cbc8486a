//! Sapwood: one server, runtime and library for streaming generative AI.
//!
//! Owns: the facade that programs import, and the composition root of the binary. Refuses to know: anything that a
//! crate below already knows.

pub use sapwood_engine as engine;
pub use sapwood_kernel as kernel;
#[cfg(feature = "net")]
pub use sapwood_net as net;
pub use sapwood_proto as proto;

/// The examples of the README compile.
#[cfg(all(doctest, feature = "net"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So do those of the faces.
#[cfg(all(doctest, feature = "net"))]
#[doc = include_str!("../../../docs/faces/evergreen.md")]
struct Evergreen;
