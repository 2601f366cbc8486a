//! Sapwood's kernel: named functions whose inputs and outputs are streams of chunks.
//!
//! Owns: Chunk, Node, Function, Layer, Kernel, Run, the model function, sessions executed against functions.
//! Refuses to know: faces, sockets, wire formats, how a model computes.
//!
//! Everything that flows is a [`Chunk`], everything held is a [`Node`], everything callable is a [`Function`],
//! everything around a call is a [`Layer`], everything named lives in a [`Kernel`]; `run::<T>()` is the only verb.
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

#![forbid(unsafe_code)]

mod args;
mod behalf;
mod call;
mod cancel;
mod chunk;
#[cfg(feature = "net")]
pub mod connect;
mod error;
pub mod from_chunks;
mod function;
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
mod payer;
pub mod pool;
#[cfg(test)]
mod probe;
mod run;
pub mod session;
mod spec;
mod sync;
mod witness;

pub use self::args::{Args, IntoArgs};
pub use self::behalf::Behalf;
pub use self::call::{Call, CallId, Context, Inputs, Instant, Ports, Turn, Want};
pub use self::cancel::{Cancel, Cancelled};
pub use self::chunk::{Chunk, Part, Text};
pub use self::error::Error;
pub use self::from_chunks::{FromChunks, Json, Out};
pub use self::function::{Fun, Function};
pub use self::generate::{Targets, generate};
pub use self::handler::{Blocking, Handler, blocking, function, raw};
pub use self::into_chunks::{IntoChunk, IntoChunks, Items};
pub use self::kernel::Kernel;
pub use self::layer::{Layer, Next, layered};
pub use self::meta::{Meta, Reason, Usage};
pub use self::model::{CONFIG_CONTEXT, Facts, GenerateConfig, PromptMode, model};
pub use self::name::{Mime, Name, Port};
pub use self::node::{Keep, Node, NodeWriter, source_panics};
pub use self::payer::Payer;
pub use self::run::{Folding, Run, Settled};
pub use self::spec::{Effect, InnerType, Input, Output, Spec};
pub use self::witness::Witness;

/// A result whose error is the kernel's.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A stream of chunks. After an error or the end it gives `None` for ever (KE-311).
pub type Chunks = futures::stream::BoxStream<'static, Result<Chunk>>;
