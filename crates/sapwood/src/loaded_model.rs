//! [`LoadedModel`]: the engine of a loaded model, of either kind.

use std::sync::Arc;
use std::time::Duration;

use sapwood_engine::Engine;
use sapwood_engine::embedding::Embedder;
use sapwood_engine::stats::EngineStats;
use sapwood_server::ops::metrics::WatchedEngine;

/// The engine of a loaded model. Clones share it.
#[derive(Clone, Debug)]
pub(crate) enum LoadedModel {
    /// It generates text.
    Generating(Engine),
    /// It embeds texts, or scores documents.
    Embedding(Embedder),
}

impl LoadedModel {
    /// The counters of the engine.
    pub(crate) fn stats(&self) -> &Arc<EngineStats> {
        match self {
            Self::Generating(engine) => engine.stats(),
            Self::Embedding(embedder) => embedder.stats(),
        }
    }

    /// The engine as metrics know it.
    pub(crate) fn watched(&self) -> WatchedEngine {
        match self {
            Self::Generating(engine) => engine.into(),
            Self::Embedding(embedder) => embedder.into(),
        }
    }

    /// How long the engine's thread has made no progress.
    pub(crate) fn stalled_for(&self) -> Duration {
        match self {
            Self::Generating(engine) => engine.stalled_for(),
            Self::Embedding(embedder) => embedder.stalled_for(),
        }
    }

    /// Ends the engine's thread, and its requests.
    pub(crate) fn end(&self) {
        match self {
            Self::Generating(engine) => engine.end(),
            Self::Embedding(embedder) => embedder.end(),
        }
    }

    /// Waits until the thread has ended, after [`LoadedModel::end`].
    pub(crate) fn wait_ended(&self) {
        match self {
            Self::Generating(engine) => engine.wait_ended(),
            Self::Embedding(embedder) => embedder.wait_ended(),
        }
    }

    /// Whether it can serve no request any more.
    pub(crate) fn is_lost(&self) -> bool {
        match self {
            Self::Generating(engine) => engine.is_lost(),
            Self::Embedding(embedder) => embedder.is_lost(),
        }
    }

    /// Drops the prefixes that it has saved in memory, for another model.
    pub(crate) fn drop_saved_prefixes(&self) {
        match self {
            Self::Generating(engine) => engine.drop_saved_prefixes(),
            Self::Embedding(_) => {}
        }
    }

    /// Logs that the model is loaded.
    pub(crate) fn log(&self, name: &str) {
        match self {
            Self::Generating(engine) => {
                let info = engine.info();
                tracing::info!(
                    model = name,
                    architecture = info.architecture,
                    parameters = info.parameters,
                    context_tokens = info.context_tokens,
                    parallel = info.parallel,
                    "loaded"
                );
            }
            Self::Embedding(embedder) => {
                let info = embedder.info();
                tracing::info!(
                    model = name,
                    architecture = info.architecture,
                    parameters = info.parameters,
                    context_tokens = info.context_tokens,
                    parallel = info.parallel,
                    pooling = info.pooling.name(),
                    dimensions = info.dimensions,
                    "loaded"
                );
            }
        }
    }
}

impl From<Engine> for LoadedModel {
    fn from(engine: Engine) -> Self {
        Self::Generating(engine)
    }
}

impl From<Embedder> for LoadedModel {
    fn from(embedder: Embedder) -> Self {
        Self::Embedding(embedder)
    }
}
