//! Facts of a model that a face can read without calling it.

use std::fmt;

use sapwood_engine::Engine;
use sapwood_engine::api::{ModelInfo, SharedVocabulary};
use sapwood_engine::embedding::{Embedder, EmbeddingInfo};

use crate::model::SamplingDefaults;

/// The facts of a model. They are part of its function's spec and change only with it.
#[derive(Clone)]
pub struct ModelFacts {
    /// What the model is and can do.
    pub info: ModelInfo,
    /// Its vocabulary and tokenizer.
    pub vocabulary: SharedVocabulary,
    /// Its values for the parameters that a request leaves unset.
    pub defaults: SamplingDefaults,
}

impl ModelFacts {
    pub(crate) fn of(engine: &Engine, defaults: SamplingDefaults) -> Self {
        Self {
            info: engine.info().clone(),
            vocabulary: engine.vocabulary().clone(),
            defaults,
        }
    }

    /// Tokens of the vocabulary, if their number is known: another server need not report it (LM-712).
    #[must_use]
    pub fn vocabulary_tokens(&self) -> Option<u32> {
        known(self.info.vocabulary_tokens)
    }

    /// Tokens that a sequence may hold, if that is known.
    #[must_use]
    pub fn context_tokens(&self) -> Option<u32> {
        known(self.info.context_tokens)
    }
}

/// The facts of a model that embeds, or scores documents. They are part of its function's spec and change only with it.
#[derive(Clone, Debug)]
pub struct EmbeddingFacts {
    /// What the model is and can do.
    pub info: EmbeddingInfo,
}

impl EmbeddingFacts {
    pub(crate) fn of(embedder: &Embedder) -> Self {
        Self {
            info: embedder.info().clone(),
        }
    }
}

/// Stands in [`ModelInfo`] for an unknown number of tokens.
pub(crate) const UNKNOWN: u32 = u32::MAX;

fn known(tokens: u32) -> Option<u32> {
    (tokens != UNKNOWN).then_some(tokens)
}

impl fmt::Debug for ModelFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelFacts")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}
