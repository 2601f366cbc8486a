//! Sapwood: one server, runtime and library for streaming generative AI. This is the facade that programs import.

pub use sapwood_engine as engine;
pub use sapwood_kernel as kernel;
#[cfg(feature = "net")]
pub use sapwood_net as net;
pub use sapwood_proto as proto;
/// What the arguments of functions derive.
#[cfg(feature = "serve")]
pub use {schemars, serde};

#[cfg(feature = "serve")]
pub mod serve;

/// The examples of the README compile.
#[cfg(all(doctest, feature = "serve"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So does the guide to the kernel.
#[cfg(all(doctest, feature = "net"))]
#[doc = include_str!("../../../docs/kernel.md")]
struct KernelGuide;

/// So do those of the faces.
#[cfg(all(doctest, feature = "net"))]
#[doc = include_str!("../../../docs/faces/evergreen.md")]
struct Evergreen;
