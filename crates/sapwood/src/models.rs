//! The models that the configuration names: what is known of each before it is loaded, and its load.

mod files;
mod load;
mod script;
mod size;

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

#[cfg(feature = "embedded")]
use sapwood_engine::embedded;
use sapwood_engine::llama_options::LoraAdapter;
use sapwood_engine::{PrefixDiskConfig, PrefixSharing, SpeculationMode, scripted};
use sapwood_kernel::{ModelFacts, OutputParsers, SamplingDefaults};
use sapwood_server::faces::generate;

use crate::config::speculation::SpeculationConfig;
use crate::config::{
    BackendConfig, Config, EngineConfig, LoadTime, PrefixScope, ServedModelConfig,
};
use crate::failure::CliError;
use crate::hub::ModelSource;

pub(crate) use self::files::is_gguf;
use self::files::look_at;
#[cfg(any(feature = "embedded", test))]
pub(crate) use self::files::parts;
#[cfg(feature = "embedded")]
pub(crate) use self::load::try_out;
pub(crate) use self::script::scripted;
pub(crate) use self::size::ModelSize;

/// One model that can be loaded.
#[derive(Clone, Debug)]
pub(crate) struct PlannedModel {
    /// The name under which it is called.
    pub(crate) name: String,
    /// Whether the server is ready only with it, and exits if it cannot be loaded (TR-709).
    pub(crate) required: bool,
    source: PlannedSource,
    /// What finds calls and reasoning in its output.
    pub(crate) parsers: OutputParsers,
    /// Its values for parameters that a request leaves unset.
    pub(crate) defaults: SamplingDefaults,
    /// Used only if llama.cpp is built in.
    #[cfg_attr(
        not(feature = "embedded"),
        allow(dead_code, reason = "nothing to apply them to")
    )]
    size: ModelSize,
    limits: sapwood_engine::Config,
    /// When it is loaded, and when it leaves the memory.
    pub(crate) residence: Residence,
    /// Whether its file is tried in a process of its own first, because a crash would affect other models.
    #[cfg_attr(
        not(feature = "embedded"),
        allow(dead_code, reason = "there is no file to try")
    )]
    is_tried: bool,
}

/// When a model is in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Residence {
    load: LoadTime,
    /// How long it stays without a call; `None` if it stays until another one needs the memory, or for ever.
    pub(crate) idle_unload: Option<Duration>,
}

impl Residence {
    fn of(engine: &EngineConfig, model: &ServedModelConfig) -> Self {
        let idle_unload = model.idle_unload.unwrap_or(engine.idle_unload);
        Self {
            load: model.load.unwrap_or(engine.load),
            idle_unload: (!idle_unload.is_zero()).then_some(idle_unload),
        }
    }

    /// Whether it is loaded when the server starts.
    pub(crate) fn is_at_start(self) -> bool {
        self.load == LoadTime::Start
    }

    /// Whether a call may have to load it.
    pub(crate) fn is_on_demand(self) -> bool {
        !self.is_at_start() || self.idle_unload.is_some()
    }
}

#[derive(Clone, Debug)]
enum PlannedSource {
    #[cfg(feature = "embedded")]
    File(std::path::PathBuf),
    /// A file that may have to be downloaded.
    #[cfg(feature = "embedded")]
    Named(ModelSource),
    #[cfg(feature = "demo-model")]
    Demo,
    Scripted(Box<scripted::Config>),
}

/// The models that the configuration names, or the demo model. Nothing is loaded yet.
///
/// # Errors
/// [`CliError::usage`] if a scripted model does not parse; an exit with `Exit::Model` if this binary cannot run a model of this
/// kind.
pub(crate) fn plan(config: &Config) -> Result<Vec<PlannedModel>, CliError> {
    // A server that joins another one serves the models of that, without the demo model beside them.
    if config.models.is_empty() && config.upstreams.is_empty() {
        return Ok(vec![demo(config)?]);
    }
    config
        .models
        .iter()
        .filter_map(|model| planned_by(config, model, config.engine.try_files).transpose())
        .collect()
}

/// The same for a process that is no server: it has no folder of cached prefixes, which is the server's.
///
/// # Errors
/// As [`plan`].
pub(crate) fn plan_without_server(config: &Config) -> Result<Vec<PlannedModel>, CliError> {
    let mut planned = plan(config)?;
    for model in &mut planned {
        model.limits.prefix_disk = None;
    }
    Ok(planned)
}

/// One of the models with the configuration of a request; `None` for a model of an upstream, which is joined and not loaded. It
/// is tried whatever is configured: nobody has looked at what a request wants.
///
/// # Errors
/// As [`plan`].
pub(crate) fn planned(
    config: &Config,
    model: &ServedModelConfig,
) -> Result<Option<PlannedModel>, CliError> {
    planned_by(config, model, true)
}

fn planned_by(
    config: &Config,
    model: &ServedModelConfig,
    is_tried: bool,
) -> Result<Option<PlannedModel>, CliError> {
    let size = ModelSize::of(&config.engine, model);
    let source = match model.backend {
        BackendConfig::Scripted => PlannedSource::Scripted(Box::new(script::of(model, &size)?)),
        BackendConfig::Embedded => {
            if let Some(draft) = &size.draft
                && model.required.unwrap_or(true)
                && let Ok(ModelSource::File(path)) = ModelSource::read(&draft.path)
            {
                look_at(&model.name, "its draft model ", &path)?;
            }
            if model.is_demo() {
                let demo = demo(config)?;
                return Ok(Some(PlannedModel {
                    name: model.name.clone(),
                    required: model.required.unwrap_or(true),
                    parsers: model.parsers(),
                    defaults: model.sampling.of(&config.engine.sampling),
                    limits: limits(config, &model.name, &size),
                    size,
                    residence: Residence::of(&config.engine, model),
                    is_tried,
                    // The name is the configured one here; alone, the demo model may be called by `default_model`.
                    ..demo
                }));
            }
            // Not an error: a model that is not required may be missing, and requests for it fail with the reason.
            if let (ModelSource::File(path), true) =
                (source(model)?, model.required.unwrap_or(true))
            {
                look_at(&model.name, "", &path)?;
            }
            weights(model)?
        }
        BackendConfig::Upstream => return Ok(None),
    };
    Ok(Some(PlannedModel {
        name: model.name.clone(),
        required: model.required.unwrap_or(true),
        source,
        parsers: model.parsers(),
        defaults: model.sampling.of(&config.engine.sampling),
        limits: limits(config, &model.name, &size),
        size,
        residence: Residence::of(&config.engine, model),
        is_tried,
    }))
}

fn limits(config: &Config, name: &str, size: &ModelSize) -> sapwood_engine::Config {
    let prefix_dir = config.engine.prefix_dir.as_deref();
    sapwood_engine::Config {
        prefix_disk: prefix_dir.map(|folder| PrefixDiskConfig {
            folder: folder.join(prefix_folder_name(name)),
            bytes: config.engine.prefix_disk_bytes,
        }),
        queue_requests: config.limits.queue_requests,
        queue_tokens: config.limits.queue_tokens,
        queue_timeout_ms: config.limits.queue_timeout_ms(),
        prefix_sharing: match config.engine.prefix_cache_scope {
            PrefixScope::Key => PrefixSharing::Scope,
            PrefixScope::Server => PrefixSharing::All,
        },
        prefix_tokens_min: config.engine.prefix_tokens_min,
        prefix_ram_bytes: match (size.kept_prefixes, config.engine.prefix_ram_bytes) {
            (0, _) => Some(0),
            (_, 0) => None,
            (_, bytes) => Some(usize::try_from(bytes).unwrap_or(usize::MAX)),
        },
        speculation: match size.speculation {
            SpeculationConfig::Off => SpeculationMode::Off,
            SpeculationConfig::Lookup => SpeculationMode::Lookup,
            SpeculationConfig::Draft => SpeculationMode::Draft,
        },
        draft_tokens_max: config.engine.draft_tokens_max,
        sample_threads: (size.threads > 0).then_some(size.threads),
        ageing_turns: config.engine.ageing_turns,
        steer_ms: config.controllers.step_ms,
        step_ms: config.engine.step_ms,
        fuel_tokens: match config.controllers.fuel_tokens {
            0 => None,
            tokens => Some(tokens),
        },
        ..sapwood_engine::Config::default()
    }
}

/// The folder of a model's cached prefixes. A name may have characters that a file's name cannot.
fn prefix_folder_name(name: &str) -> String {
    let mut file = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' => file.push(char::from(byte)),
            // Capitals too: two names may differ in nothing else, and some file systems do not tell them apart.
            _ => file.push_str(&format!("%{byte:02x}")),
        }
    }
    file.push_str(".prefixes");
    file
}

/// Where the file of a model is.
///
/// # Errors
/// [`CliError::usage`].
fn source(model: &ServedModelConfig) -> Result<ModelSource, CliError> {
    let path = model.path.as_deref().unwrap_or_else(|| Path::new(""));
    ModelSource::read(path)
        .map_err(|why| CliError::usage(format!("models.path: the model `{}`: {why}", model.name)))
}

#[cfg(feature = "embedded")]
fn weights(model: &ServedModelConfig) -> Result<PlannedSource, CliError> {
    Ok(match source(model)? {
        ModelSource::File(path) => PlannedSource::File(path),
        named => PlannedSource::Named(named),
    })
}

#[cfg(not(feature = "embedded"))]
fn weights(model: &ServedModelConfig) -> Result<PlannedSource, CliError> {
    let message = format!(
        "cannot load the model `{}`: this binary was built without the embedded engine; build it with `cargo xtask \
         serve`, or with --features cli,embedded",
        model.name
    );
    Err(CliError::exit(crate::failure::Exit::Model, message))
}

#[cfg(feature = "demo-model")]
fn demo(config: &Config) -> Result<PlannedModel, CliError> {
    let size = ModelSize::of(&config.engine, &ServedModelConfig::default());
    let name = config
        .default_model
        .clone()
        .unwrap_or_else(|| "demo".into());
    Ok(PlannedModel {
        limits: limits(config, &name, &size),
        name,
        required: true,
        source: PlannedSource::Demo,
        parsers: OutputParsers::default(),
        defaults: config.engine.sampling.alone(),
        size,
        residence: Residence::of(&config.engine, &ServedModelConfig::default()),
        is_tried: config.engine.try_files,
    })
}

#[cfg(not(feature = "demo-model"))]
fn demo(_: &Config) -> Result<PlannedModel, CliError> {
    let message = "this binary was built without the demo model, and no other is named; name a GGUF file with \
                   --model PATH, or build with `cargo xtask serve`";
    Err(CliError::exit(crate::failure::Exit::Model, message))
}

impl PlannedModel {
    /// Whether it is the demo model.
    pub(crate) fn is_demo(&self) -> bool {
        match self.source {
            #[cfg(feature = "demo-model")]
            PlannedSource::Demo => true,
            #[cfg(feature = "embedded")]
            PlannedSource::File(_) | PlannedSource::Named(_) => false,
            PlannedSource::Scripted(_) => false,
        }
    }

    /// The settings of the Triton face for this model.
    ///
    /// # Errors
    /// As [`Model::signature`].
    pub(crate) fn served(&self, config: &Config) -> Result<generate::ModelOptions, CliError> {
        let usual = generate::ModelOptions::default();
        let mut served = match &self.source {
            PlannedSource::Scripted(script) => generate::ModelOptions {
                platform: "scripted".into(),
                controls: script::controls(script),
                fail_message: script.fail_message.clone(),
                ..usual
            },
            #[cfg(feature = "embedded")]
            PlannedSource::File(_) | PlannedSource::Named(_) => generate::ModelOptions {
                platform: "llama.cpp".into(),
                ..usual
            },
            // The demo model gets the chat template for bare prompts, so that a newcomer's first request has a sensible
            // answer (D-24).
            #[cfg(feature = "demo-model")]
            PlannedSource::Demo => generate::ModelOptions {
                platform: "llama.cpp".into(),
                template_raw_prompts: true,
                ..usual
            },
        };
        served.adapters = self.size.lora.iter().map(LoraAdapter::info).collect();
        if let Some(model) = config.models.iter().find(|model| model.name == self.name) {
            served.signature = model.signature()?;
            served.versions = model.versions.clone().unwrap_or_else(|| vec![1]);
            served.strict_parameters = model.strict_parameters;
            served.prepend_prompt_default = model.prepend_prompt_default;
            served.template_raw_prompts = model
                .template_raw_prompts
                .unwrap_or(served.template_raw_prompts);
        }
        Ok(served)
    }

    /// Whether its configuration says that it embeds.
    pub(crate) fn is_configured_to_embed(&self) -> bool {
        self.size.embedding == Some(true)
    }

    /// Whether it embeds, as far as that is known before it is loaded. Slow: call it where blocking is allowed.
    #[cfg(feature = "embedded")]
    pub(crate) fn embeds(&self) -> bool {
        match &self.source {
            PlannedSource::File(path) => {
                let source = embedded::ModelSource::File(path.clone());
                self.size.embeds(&source).unwrap_or(false)
            }
            _ => self.size.embedding == Some(true),
        }
    }

    /// Whether it embeds.
    #[cfg(not(feature = "embedded"))]
    pub(crate) fn embeds(&self) -> bool {
        self.size.embedding == Some(true)
    }

    /// The facts in its file, before it is loaded, if the file can be read. Slow: call it where blocking is allowed.
    #[cfg(feature = "embedded")]
    pub(crate) fn outline(&self) -> Option<ModelFacts> {
        let source = match &self.source {
            PlannedSource::Scripted(_) | PlannedSource::Named(_) => return None,
            #[cfg(feature = "demo-model")]
            PlannedSource::Demo => embedded::ModelSource::Bytes(sapwood_demo::MODEL),
            PlannedSource::File(path) => embedded::ModelSource::File(path.clone()),
        };
        // Another kind of facts, which no face needs before the model is loaded.
        if self.size.embeds(&source).ok()? {
            return None;
        }
        // Errors in the file are reported when the model is loaded.
        // With the same options as the load, so that the context length is the one that will be served.
        let outline = embedded::outline(&self.name, &source, &self.size.options());
        let (info, vocabulary) = outline.ok()?;
        Some(ModelFacts {
            info,
            vocabulary,
            defaults: self.defaults.clone(),
        })
    }

    /// Whether the memory that is available now is too little for it. Slow: call it where blocking is allowed.
    #[cfg(feature = "embedded")]
    pub(crate) fn lacks_memory(&self) -> bool {
        match &self.source {
            PlannedSource::File(path) => {
                let source = embedded::ModelSource::File(path.clone());
                let (options, embedding) = (self.size.options(), self.size.embedding());
                match self.size.embeds(&source) {
                    Ok(true) => embedded::lacks_memory_embedding(&source, &options, embedding),
                    Ok(false) => embedded::lacks_memory(&source, &options),
                    // The load says what is wrong.
                    Err(_) => false,
                }
            }
            _ => false,
        }
    }

    /// Scripted models need none.
    #[cfg(not(feature = "embedded"))]
    pub(crate) fn lacks_memory(&self) -> bool {
        false
    }

    /// The arguments of the child process that tries the model's file, if there is one and trying is enabled.
    #[cfg(feature = "embedded")]
    pub(crate) fn trial(&self) -> Option<Vec<OsString>> {
        match &self.source {
            PlannedSource::File(path) if self.is_tried => {
                let size = serde_json::to_string(&self.size).ok()?;
                // `--`: a path may begin with a dash.
                Some(vec!["--size".into(), size.into(), "--".into(), path.into()])
            }
            // By itself it is known to load; options and adapters may make another model of it.
            #[cfg(feature = "demo-model")]
            PlannedSource::Demo if self.is_tried && self.size.is_changed() => {
                let size = serde_json::to_string(&self.size).ok()?;
                Some(vec!["--size".into(), size.into()])
            }
            _ => None,
        }
    }

    /// The files that the trial reads: every part of the model, and its adapters.
    #[cfg(feature = "embedded")]
    pub(crate) fn trial_files(&self) -> Vec<std::path::PathBuf> {
        let mut files = match &self.source {
            PlannedSource::File(path) => parts(path.clone()),
            _ => Vec::new(),
        };
        files.extend(self.size.lora.iter().map(|adapter| adapter.path.clone()));
        let draft = self.size.draft.iter();
        files.extend(draft.flat_map(|draft| parts(draft.path.clone())));
        files
    }

    #[cfg(not(feature = "embedded"))]
    pub(crate) fn trial_files(&self) -> Vec<std::path::PathBuf> {
        Vec::new()
    }

    #[cfg(not(feature = "embedded"))]
    pub(crate) fn trial(&self) -> Option<Vec<OsString>> {
        None
    }

    /// Scripted models have no file.
    #[cfg(not(feature = "embedded"))]
    pub(crate) fn outline(&self) -> Option<ModelFacts> {
        None
    }
}
