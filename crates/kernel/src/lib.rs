//! Sapwood's kernel: named functions whose inputs and outputs are streams of chunks.
//!
//! Data flows as a [`Chunk`], a replayable stream of chunks is a [`Node`], everything that can be called is a
//! [`Function`], a wrapper around calls is a [`Layer`], and a [`Kernel`] holds them by name. `run::<T>()` is the only
//! way to call.
//!
//! ```
//! # futures::executor::block_on(async {
//! use futures::StreamExt;
//! use sapwood_kernel::{Kernel, args, function};
//!
//! #[derive(serde::Deserialize, schemars::JsonSchema)]
//! struct Greet {
//!     name: String,
//! }
//!
//! let kernel = Kernel::new();
//! kernel.add(function("greet", "Greets.", |args: Greet| async move { format!("Hello, {}!", args.name) }))?;
//!
//! let mut run = kernel.run::<String>("greet", args! { name: "Ada" });
//! while let Some(piece) = run.next().await {
//!     assert_eq!(piece?, "Hello, Ada!");
//! }
//! # Ok::<(), sapwood_kernel::Error>(())
//! # }).unwrap();
//! ```
//!
//! Modules import downwards only, in this order:
//!
//! ```text
//!   model, generate, connect, session, layers      what is built on runs
//!   run                                            calls in progress, and where they begin (`Kernel::run`, `Node::run`)
//!   kernel                                         the registry of functions and layers
//!   handler, layer, function                       what can be called
//!   call, args                                     one call: inputs, deadline, extensions
//!   node, from_chunks, into_chunks                 streams of chunks, and types made of them
//!   spec, want, facts                              what a function gives, and what a caller requests
//!   chunk, delta, meta, name, error, cancel               plain values
//! ```

#![forbid(unsafe_code)]

mod args;
mod call;
mod cancel;
mod chunk;
#[cfg(feature = "net")]
pub mod connect;
mod delta;
mod error;
mod extensions;
mod facts;
pub mod from_chunks;
mod function;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod generate;
mod handler;
mod into_chunks;
mod kernel;
mod layer;
pub mod layers;
pub mod limits;
mod meta;
mod model;
mod name;
mod node;
mod observer;
pub mod pool;
#[cfg(test)]
mod probe;
mod run;
pub mod session;
mod spec;
mod state;
mod steering;
mod sync;
mod token_charge;
mod tool_arguments;
#[cfg(feature = "tower")]
mod tower;
mod want;

pub use self::args::{Args, IntoArgs};
pub use self::call::{Call, CallId, Caller, FairShare, Inputs, Instant, KnownModels};
pub use self::cancel::Cancel;
pub use self::chunk::{Chunk, Part, Text};
pub use self::delta::{Delta, ToolCallRecord};
pub use self::error::Error;
pub use self::extensions::{Context, Extensions};
pub use self::facts::{EmbeddingFacts, ModelFacts};
pub use self::from_chunks::{FromChunks, Json, Out};
pub use self::function::{Fun, Function};
pub use self::generate::{Targets, generate};
pub use self::handler::{Blocking, Handler, blocking, function, raw};
pub use self::into_chunks::{IntoChunk, IntoChunks, StreamOf};
pub use self::kernel::Kernel;
pub use self::layer::{Layer, Next, layered};
pub use self::meta::{ChoiceFinish, Meta, RunUsage};
pub use self::model::{
    CONFIG_CONTEXT, GenerateConfig, ModelOptions, OutputParsers, PromptMode, ReasoningParser,
    SamplingDefaults, ToolParser, VariablesSharing, embedding_model, model, model_with,
    steered_model,
};
pub use self::name::{Mime, Name, Port};
pub use self::node::{Node, NodeWriter, Retention, source_panics};
pub use self::observer::CallObserver;
pub use self::run::{Folding, Run, Settled};
pub use self::spec::{Effect, InnerType, InputSpec, OutputSpec, Spec};
pub use self::state::{NeededState, State};
pub use self::steering::{HoldPolicy, SteerRights, Steering};
pub use self::token_charge::TokenCharge;
pub use self::tool_arguments::ToolArguments;
#[cfg(feature = "tower")]
pub use self::tower::{Head, tower_layer};
pub use self::want::{RequestedPorts, Want};
pub use sapwood_proto::error_reason::ErrorReason;

/// A result whose error is the kernel's.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A stream of chunks. After an error or the end it returns `None` for ever (KE-311).
pub type Chunks = futures::stream::BoxStream<'static, Result<Chunk>>;
