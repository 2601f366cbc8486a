//! The model of the benches of token faces: a scripted one, as fast as its readers take what it says, or at a pace of its own.
//!
//! Owns: its settings. Refuses to know: the face that serves it.

use anyhow::Result;
use sapwood_engine::scripted::{Config, Script, Scripted};
use sapwood_engine::{Engine, model};
use sapwood_kernel::Kernel;

/// The name under which it is served.
pub const NAME: &str = "load";
/// Tokens of a sequence: streams come to their end seldom.
const CONTEXT_TOKENS: u32 = 120_000;
/// Streams that can be in one batch.
const PARALLEL: u32 = 128;

/// A kernel with that model and nothing else, which is as fast as its readers.
///
/// # Errors
/// If its thread cannot be started.
pub fn kernel() -> Result<Kernel> {
    paced(0.0)
}

/// The same; each sequence has so many tokens per second.
///
/// # Errors
/// If its thread cannot be started.
pub fn paced(tokens_per_s: f64) -> Result<Kernel> {
    let model: Box<dyn model::Model> = Box::new(Scripted::new(Config {
        name: NAME.to_owned(),
        script: Script::Tokens,
        count: u32::MAX,
        context_tokens: CONTEXT_TOKENS,
        parallel: PARALLEL,
        kept_prefixes: 0,
        tokens_per_s,
        ..Config::default()
    })?);
    let engine = Engine::spawn(model, sapwood_engine::Config::default())?;
    let kernel = Kernel::new();
    kernel.add(sapwood_kernel::model(NAME, engine))?;
    Ok(kernel)
}
