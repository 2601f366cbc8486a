//! Benchmarks; each is a binary under `src/bin`. This library has the code that they share.

pub mod child;
pub mod dense;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod evergreen;
pub mod generate;
pub mod lmtp;
pub mod measure;
pub mod report;
pub mod scripted;
pub mod side;
pub mod soak;
pub mod steering;

use anyhow::Result;
use sapwood_engine::model::Model;
use sapwood_engine::{Config, Engine};
use sapwood_kernel::Kernel;

/// The name of the served model.
pub const NAME: &str = "load";

/// A kernel with one model and nothing else, and the model's engine.
///
/// # Errors
/// If its thread cannot be started.
pub fn kernel_and_engine(model: Box<dyn Model>) -> Result<(Kernel, Engine)> {
    let engine = Engine::spawn(model, Config::default())?;
    let kernel = Kernel::new();
    kernel.add(sapwood_kernel::model(NAME, engine.clone()))?;
    Ok((kernel, engine))
}

/// The allocator of the command `sapwood`. The baselines, which are processes of the same program, have it too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
