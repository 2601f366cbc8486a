//! [`ModelSize`]: the settings of a model that decide how it is computed, and what it takes. The child process that tries its
//! file gets them as JSON.

#[cfg(feature = "embedded")]
use sapwood_engine::embedded;
use sapwood_engine::llama_options::{LlamaOptions, LoraAdapter};
use serde::{Deserialize, Serialize};

use crate::config::speculation::{DraftSize, SpeculationConfig};
use crate::config::{BackendConfig, EngineConfig, PoolingConfig, ServedModelConfig};

/// The size of its batch, context and caches; 0 leaves a value to the model or the machine.
#[cfg_attr(
    not(feature = "embedded"),
    allow(dead_code, reason = "nothing to apply them to")
)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ModelSize {
    pub(super) ctx: u32,
    pub(super) threads: u32,
    pub(super) threads_batch: u32,
    pub(super) parallel: u32,
    pub(super) kept_prefixes: u32,
    /// Whether the number of cached prefixes was configured explicitly, so that fewer are worth a warning.
    pub(super) prefixes_asked: bool,
    pub(super) cache_tokens: u32,
    pub(super) speculation: SpeculationConfig,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) draft: Option<DraftSize>,
    pub(super) memory_bytes: u64,
    #[serde(default)]
    pub(super) llama: LlamaOptions,
    #[serde(default)]
    pub(super) lora: Vec<LoraAdapter>,
    /// Whether it embeds instead of generating; `None`: as its file says.
    pub(super) embedding: Option<bool>,
    pub(super) pooling: Option<PoolingConfig>,
    pub(super) normalize: bool,
}

impl ModelSize {
    /// The size of a model: its own settings, and the defaults where it has none.
    pub(super) fn of(engine: &EngineConfig, model: &ServedModelConfig) -> Self {
        let speculation = match model.backend {
            // A script decides when its tokens come, and there are no weights to read.
            BackendConfig::Scripted => SpeculationConfig::Off,
            BackendConfig::Embedded | BackendConfig::Upstream => {
                let of_draft = model.draft_model.as_ref().map(|_| SpeculationConfig::Draft);
                let asked = model.speculation.or(engine.speculation);
                asked.or(of_draft).unwrap_or(SpeculationConfig::Off)
            }
        };
        Self {
            ctx: model.ctx.unwrap_or(engine.ctx),
            threads: model.threads.unwrap_or(engine.threads),
            threads_batch: model.threads_batch.unwrap_or(engine.threads_batch),
            parallel: model.parallel.unwrap_or(engine.parallel),
            kept_prefixes: model.kept_prefixes.unwrap_or(engine.kept_prefixes),
            // The default is no request: a small model may have less room, and that is not worth a warning.
            prefixes_asked: model.kept_prefixes.is_some()
                || engine.kept_prefixes != EngineConfig::default().kept_prefixes,
            cache_tokens: model.cache_tokens.unwrap_or(engine.cache_tokens),
            speculation,
            draft: DraftSize::of(model, speculation, engine.draft_p_min),
            memory_bytes: engine.memory_bytes,
            llama: model.llama.or(&engine.llama),
            lora: model.lora.clone(),
            embedding: model.embedding,
            pooling: model.pooling,
            normalize: model.normalize.unwrap_or(true),
        }
    }
}

#[cfg(feature = "embedded")]
impl ModelSize {
    /// Whether options or adapters change what is computed.
    #[cfg(feature = "demo-model")]
    pub(super) fn is_changed(&self) -> bool {
        self.llama != LlamaOptions::default() || !self.lora.is_empty() || self.draft.is_some()
    }

    /// Whether the model of a file embeds.
    pub(super) fn embeds(
        &self,
        source: &embedded::ModelSource,
    ) -> Result<bool, embedded::LoadError> {
        match self.embedding {
            Some(embeds) => Ok(embeds),
            None => embedded::embeds(source, &self.llama),
        }
    }

    pub(super) fn embedding(&self) -> embedded::EmbeddingOptions {
        embedded::EmbeddingOptions {
            pooling: self.pooling.map(Into::into),
            normalize: self.normalize,
        }
    }

    pub(super) fn options(&self) -> embedded::LoadOptions {
        let unless_zero = |value: u32| (value > 0).then_some(value);
        embedded::LoadOptions {
            context_tokens: unless_zero(self.ctx),
            threads: unless_zero(self.threads),
            threads_batch: unless_zero(self.threads_batch),
            parallel: self.parallel,
            kept_prefixes: self.prefixes_asked.then_some(self.kept_prefixes),
            cache_tokens: unless_zero(self.cache_tokens),
            memory_bytes: (self.memory_bytes > 0).then_some(self.memory_bytes),
            llama: self.llama.clone(),
            lora: self.lora.clone(),
            draft: self.draft.as_ref().map(|draft| embedded::DraftOptions {
                source: embedded::ModelSource::File(draft.path.clone()),
                gpu_layers: draft.gpu_layers,
                context_tokens: unless_zero(draft.ctx),
            }),
            ..embedded::LoadOptions::default()
        }
    }
}
