//! The keys of `[engine]`: the defaults of every model.

use std::path::PathBuf;
use std::time::Duration;

use sapwood_engine::llama_options::{LlamaOptions, LoraAdapter};
use serde::{Deserialize, Serialize};

use super::Config;
use super::limits::check_time;
use super::sampling::SamplingConfig;
use super::speculation::SpeculationConfig;
use crate::failure::CliError;

/// Defaults of every model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct EngineConfig {
    /// Tokens of context per sequence; 0: what the model was trained for, at most 8,192.
    pub(crate) ctx: u32,
    /// Threads that compute the next token of each sequence, and sample it; 0: as many as are fastest, measured while it runs,
    /// and for sampling one for each processor core.
    pub(crate) threads: u32,
    /// Threads that compute prompts; 0: as `threads`, and measured separately if that is 0 too.
    pub(crate) threads_batch: u32,
    /// Milliseconds that a step should take at most, prompts included; at least 1. Streams wait for the end of a step; where
    /// none does, prompts take twice as long, and one alone four times.
    pub(crate) step_ms: u64,
    /// Sequences that are decoded together (slots); from 1 to 65,536.
    pub(crate) parallel: u32,
    /// Size of the prefix cache in sequences, at most 65,536: a prompt that begins with a cached one is prefilled only
    /// from there.
    pub(crate) kept_prefixes: u32,
    /// Size of the KV cache of an embedded model in cells, for running sequences and cached prefixes together; 0: `ctx`
    /// for each of `parallel`, if that takes at most an eighth of the available memory and 2 GiB; otherwise at most 16,384, or
    /// what fits into 128 MiB if that is more. With at least `ctx` for each of `parallel`, every slot has cells of its own.
    pub(crate) cache_tokens: u32,
    /// Which requests share cached prefixes.
    pub(crate) prefix_cache_scope: PrefixScope,
    /// Minimum length in tokens of a common prefix that is reused.
    pub(crate) prefix_tokens_min: u32,
    /// Bytes of memory for cached prefixes that have lost their KV cells; 0: an eighth of the memory that is available when
    /// the model is loaded, at most 8 GiB. Nothing is kept there if `kept_prefixes` is 0.
    pub(crate) prefix_ram_bytes: u64,
    /// Folder for cached prefixes that the memory has no room for, and for all when a model is unloaded or the server ends:
    /// one folder for each model, from which they are read back.
    pub(crate) prefix_dir: Option<PathBuf>,
    /// The maximum of bytes of such a folder.
    pub(crate) prefix_disk_bytes: u64,
    /// What drafts tokens of an embedded model, so that a decode call gives several of them (speculative decoding).
    /// By default `draft` for models with a draft model, and `off` for others.
    pub(crate) speculation: Option<SpeculationConfig>,
    /// The maximum of tokens of a draft; from 1 to 64.
    pub(crate) draft_tokens_max: u32,
    /// A draft ends before a token that the draft model gives less than this probability; from 0 to 1.
    pub(crate) draft_p_min: f32,
    /// Ageing: one of so many admissions of a key goes to its oldest request, whatever its priority; 0: off.
    pub(crate) ageing_turns: u32,
    /// Memory limit of an embedded model in bytes; 0: what the system and its control group have available.
    pub(crate) memory_bytes: u64,
    /// Try a file in a child process first if it is loaded while others are served, or the server can start without it.
    pub(crate) try_files: bool,
    /// When models are loaded.
    pub(crate) load: LoadTime,
    /// A model without a call for this long leaves the memory, and the next call loads it again; 0: it stays.
    #[serde(with = "humantime_serde")]
    pub(crate) idle_unload: Duration,
    /// A busy engine without a step for this long counts as stuck.
    #[serde(with = "humantime_serde")]
    pub(crate) watchdog: Duration,
    /// What is passed on to llama.cpp.
    pub(crate) llama: LlamaOptions,
    /// Values for sampling parameters that a request leaves unset.
    pub(crate) sampling: SamplingConfig,
}

/// When a model is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LoadTime {
    /// When the server starts, which is ready only then.
    #[default]
    Start,
    /// When it is called for the first time.
    FirstUse,
}

/// Which requests share cached prefixes. A caller can tell from the timing whether another one has sent the same prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PrefixScope {
    /// The requests of one key, and all that have none.
    #[default]
    Key,
    /// Every request.
    Server,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            ctx: 0,
            threads: 0,
            threads_batch: 0,
            step_ms: 100,
            parallel: 8,
            kept_prefixes: 32,
            cache_tokens: 0,
            prefix_cache_scope: PrefixScope::Key,
            prefix_tokens_min: 16,
            prefix_ram_bytes: 0,
            prefix_dir: None,
            prefix_disk_bytes: 8 << 30,
            speculation: None,
            draft_tokens_max: 16,
            draft_p_min: 0.75,
            ageing_turns: 8,
            memory_bytes: 0,
            try_files: true,
            load: LoadTime::Start,
            idle_unload: Duration::ZERO,
            watchdog: Duration::from_secs(30),
            llama: LlamaOptions::default(),
            sampling: SamplingConfig::default(),
        }
    }
}

impl Config {
    /// Also of each model together with the defaults, because some options exclude others.
    pub(super) fn check_llama(&self) -> Result<(), CliError> {
        let defaults = &self.engine.llama;
        let wrong = |why| CliError::usage(format!("engine.llama.{why}"));
        defaults.check().map_err(wrong)?;
        for model in &self.models {
            let wrong = |why| {
                let name = &model.name;
                Err(CliError::usage(format!(
                    "models.llama: the model `{name}`: {why}"
                )))
            };
            if model.llama.numa.is_some() {
                return wrong(
                    "numa: holds for the whole process: set engine.llama.numa".to_owned(),
                );
            }
            model.llama.or(defaults).check().or_else(wrong)?;
            if let Err(why) = LoraAdapter::check(&model.lora) {
                let name = &model.name;
                return Err(CliError::usage(format!(
                    "models.lora: the model `{name}`: {why}"
                )));
            }
        }
        Ok(())
    }

    /// Memory is reserved for each sequence and each cached prefix at the start, so their number is bounded.
    pub(super) fn check_sequences(&self) -> Result<(), CliError> {
        let engine = &self.engine;
        if engine.step_ms == 0 {
            let what = "engine.step_ms: must be at least 1";
            return Err(CliError::usage(what));
        }
        check_time("engine.watchdog", engine.watchdog)?;
        let of_engine = ("engine", Some(engine.parallel), Some(engine.kept_prefixes));
        let of_models = self.models.iter();
        let of_models = of_models.map(|model| ("models", model.parallel, model.kept_prefixes));
        for (table, parallel, kept_prefixes) in std::iter::once(of_engine).chain(of_models) {
            // Unlike elsewhere, 0 leaves nothing to the model: with no sequence every request would wait for ever.
            if parallel == Some(0) {
                let what = format!("{table}.parallel: at least one sequence must run");
                return Err(CliError::usage(what));
            }
            for (key, least, value) in [
                ("parallel", 1, parallel),
                ("kept_prefixes", 0, kept_prefixes),
            ] {
                if value.is_some_and(|value| value > SEQUENCES_MOST) {
                    let what = format!("{table}.{key}: must be from {least} to {SEQUENCES_MOST}");
                    return Err(CliError::usage(what));
                }
            }
        }
        Ok(())
    }
}

const SEQUENCES_MOST: u32 = 1 << 16;
