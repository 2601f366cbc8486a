//! Scripted models for the benches of token faces, and the kernels that serve them.

use anyhow::Result;
use sapwood_engine::Engine;
use sapwood_engine::scripted::{Config, Script, Scripted};
use sapwood_kernel::Kernel;

use crate::NAME;

/// Maximum tokens of a sequence, so that streams rarely end.
const CONTEXT_TOKENS: u32 = 120_000;
/// Maximum streams in one batch.
const PARALLEL: u32 = 128;

/// A model that generates pseudo-random words without end, as fast as its readers accept them.
#[must_use]
pub fn endless() -> Config {
    Config {
        name: NAME.to_owned(),
        script: Script::Tokens,
        count: u32::MAX,
        context_tokens: CONTEXT_TOKENS,
        parallel: PARALLEL,
        kept_prefixes: 0,
        ..Config::default()
    }
}

/// A kernel with one such model and nothing else, and the model's engine.
///
/// # Errors
/// If its thread cannot be started.
pub fn kernel_and_engine(config: Config) -> Result<(Kernel, Engine)> {
    crate::kernel_and_engine(Box::new(Scripted::new(config)?))
}

/// A kernel with the endless model.
///
/// # Errors
/// If its thread cannot be started.
pub fn kernel() -> Result<Kernel> {
    paced(0.0)
}

/// The same, limited to this many tokens per second for each sequence; 0 is as fast as its reader.
///
/// # Errors
/// If its thread cannot be started.
pub fn paced(tokens_per_s: f64) -> Result<Kernel> {
    let model = Config {
        tokens_per_s,
        ..endless()
    };
    Ok(kernel_and_engine(model)?.0)
}
