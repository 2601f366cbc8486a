//! The scripts of scripted models, from the configuration.

use std::collections::BTreeMap;

use sapwood_engine::llama_options::LoraAdapter;
use sapwood_engine::scripted::Config as ScriptConfig;
use sapwood_server::faces::generate;

use super::size::ModelSize;
use crate::config::{BackendConfig, Config, ServedModelConfig};
use crate::failure::CliError;

/// The controls of a scripted model that requests may set; their names were checked when it was parsed.
pub(super) fn controls(script: &ScriptConfig) -> BTreeMap<generate::ScriptControl, String> {
    let named = script.controls.iter();
    let known = named.filter_map(|(name, parameter)| {
        Some((generate::ScriptControl::from_name(name)?, parameter.clone()))
    });
    known.collect()
}

/// The script of a configured model, if it is a scripted one.
///
/// # Errors
/// [`Exit::Usage`] if it does not parse.
pub(crate) fn scripted(
    config: &Config,
    model: &ServedModelConfig,
) -> Result<Option<ScriptConfig>, CliError> {
    match model.backend {
        BackendConfig::Scripted => of(model, &ModelSize::of(&config.engine, model)).map(Some),
        BackendConfig::Embedded | BackendConfig::Upstream => Ok(None),
    }
}

/// The script of a scripted model; its name and size are set outside.
pub(super) fn of(model: &ServedModelConfig, size: &ModelSize) -> Result<ScriptConfig, CliError> {
    let wrong = |why: figment::Error| {
        let key = why.path.join(".");
        CliError::usage(format!(
            "models `{}`: scripted.{key}: {}",
            model.name, why.kind
        ))
    };
    let mut script: ScriptConfig = match &model.scripted {
        Some(value) => value.deserialize().map_err(wrong)?,
        None => ScriptConfig::default(),
    };
    if let Some(name) = script
        .controls
        .keys()
        .find(|name| generate::ScriptControl::from_name(name).is_none())
    {
        let known: Vec<&str> = generate::ScriptControl::ALL
            .iter()
            .map(|(name, _)| *name)
            .collect();
        return Err(CliError::usage(format!(
            "models `{}`: scripted.controls.{name}: there are: {}",
            model.name,
            known.join(", ")
        )));
    }
    // Set last: these are keys of every model, and take precedence over the script's own.
    script.name.clone_from(&model.name);
    script.parallel = size.parallel;
    script.kept_prefixes = size.kept_prefixes;
    script.adapters = size.lora.iter().map(LoraAdapter::info).collect();
    if size.ctx > 0 {
        script.context_tokens = size.ctx;
    }
    Ok(script)
}
