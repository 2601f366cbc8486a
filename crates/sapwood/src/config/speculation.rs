//! Speculative decoding: what drafts tokens, and with which draft model.

use std::path::Path;

use sapwood_engine::llama_options::GpuLayers;
use serde::{Deserialize, Serialize};

use super::{Config, ServedModelConfig};
use crate::failure::CliError;
use crate::hub::ModelSource;

/// What drafts tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SpeculationConfig {
    /// Nothing.
    #[default]
    Off,
    /// Prompt lookup: what followed the same tokens before, in the prompt or the output.
    Lookup,
    /// Prompt lookup, and where it finds nothing the draft model.
    Draft,
}

impl Config {
    /// Checks the keys of drafts.
    pub(super) fn check_speculation(&self) -> Result<(), CliError> {
        let engine = &self.engine;
        if !(1..=DRAFT_TOKENS_MOST).contains(&engine.draft_tokens_max) {
            return Err(CliError::usage(format!(
                "engine.draft_tokens_max: must be from 1 to {DRAFT_TOKENS_MOST}; speculation = \"off\" makes no drafts"
            )));
        }
        if !(0.0..=1.0).contains(&engine.draft_p_min) {
            return Err(CliError::usage(
                "engine.draft_p_min: must be a probability, from 0 to 1",
            ));
        }
        self.models.iter().try_for_each(check_model)
    }
}

fn check_model(model: &ServedModelConfig) -> Result<(), CliError> {
    let wrong = |key: &str, why: &str| {
        let name = &model.name;
        Err(CliError::usage(format!(
            "models.{key}: the model `{name}`: {why}"
        )))
    };
    let Some(path) = &model.draft_model else {
        return match model.speculation {
            Some(SpeculationConfig::Draft) => wrong(
                "speculation",
                "\"draft\" needs a draft_model: name a small model of the same family, or choose \"lookup\"",
            ),
            _ if model.draft_ctx.is_some() => wrong("draft_ctx", "there is no draft_model"),
            _ if model.draft_gpu_layers.is_some() => {
                wrong("draft_gpu_layers", "there is no draft_model")
            }
            _ => Ok(()),
        };
    };
    if let Err(why) = ModelSource::read(path) {
        return wrong("draft_model", &why);
    }
    Ok(())
}

/// A draft model, and how it is loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DraftSize {
    /// Its file, or what else names it until it is on this machine.
    pub(crate) path: std::path::PathBuf,
    /// 0: the context of the model for which it drafts.
    pub(crate) ctx: u32,
    pub(crate) gpu_layers: Option<GpuLayers>,
    pub(crate) p_min: f32,
}

impl DraftSize {
    /// The draft model of a model whose tokens are drafted as `speculation` says.
    pub(crate) fn of(
        model: &ServedModelConfig,
        speculation: SpeculationConfig,
        p_min: f32,
    ) -> Option<Self> {
        let path = model.draft_model.as_deref().map(Path::to_owned)?;
        (speculation == SpeculationConfig::Draft).then(|| Self {
            path,
            ctx: model.draft_ctx.unwrap_or(0),
            gpu_layers: model.draft_gpu_layers,
            p_min,
        })
    }
}

/// The maximum of `draft_tokens_max`: an embedded model has so many output rows beside those of its sequences.
const DRAFT_TOKENS_MOST: u32 = 64;
