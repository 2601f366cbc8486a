//! Sapwood: one server, runtime and library for streaming generative AI. This is the facade that programs import.

pub use sapwood_engine as engine;
pub use sapwood_kernel as kernel;
#[cfg(feature = "net")]
pub use sapwood_net as net;
pub use sapwood_proto as proto;
/// The crates whose derives the argument types of functions need.
#[cfg(feature = "serve")]
pub use {schemars, serde};

#[cfg(feature = "serve")]
pub mod serve;

/// Compiles the examples of the README.
#[cfg(all(doctest, feature = "serve"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Compiles the examples of the guide to the kernel.
#[cfg(all(doctest, feature = "net"))]
#[doc = include_str!("../../../docs/kernel.md")]
struct KernelGuide;

/// Compiles the examples of the pages on the faces.
#[cfg(all(doctest, feature = "net"))]
#[doc = include_str!("../../../docs/faces/evergreen.md")]
struct Evergreen;
