//! Builds engines from the configuration.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use sapwood_engine::embedding::{Embedder, Pooling, ScriptedEmbedding, ScriptedEmbeddingConfig};
use sapwood_engine::llama_options::{LlamaOptions, LoraAdapter};
#[cfg(feature = "embedded")]
use sapwood_engine::{DraftModel, embedded};
use sapwood_engine::{Engine, PrefixDiskConfig, PrefixSharing, SpeculationMode, scripted};
use sapwood_kernel::{ModelFacts, OutputParsers};
use sapwood_server::faces::generate;
use serde::{Deserialize, Serialize};

use crate::config::speculation::{DraftSize, SpeculationConfig};
use crate::config::{
    BackendConfig, Config, EngineConfig, LoadTime, PoolingConfig, PrefixScope, ServedModelConfig,
};
use crate::failure::{CliError, Exit};
use crate::hub::{ModelCache, ModelSource};
use crate::loaded_model::LoadedModel;

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

/// The size of its batch, context and caches; 0 leaves a value to the model or the machine.
#[cfg_attr(
    not(feature = "embedded"),
    allow(dead_code, reason = "nothing to apply them to")
)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ModelSize {
    ctx: u32,
    threads: u32,
    threads_batch: u32,
    parallel: u32,
    kept_prefixes: u32,
    /// Whether the number of cached prefixes was configured explicitly, so that fewer are worth a warning.
    prefixes_asked: bool,
    cache_tokens: u32,
    speculation: SpeculationConfig,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    draft: Option<DraftSize>,
    memory_bytes: u64,
    #[serde(default)]
    llama: LlamaOptions,
    #[serde(default)]
    lora: Vec<LoraAdapter>,
    /// Whether it embeds instead of generating; `None`: as its file says.
    embedding: Option<bool>,
    pooling: Option<PoolingConfig>,
    normalize: bool,
}

#[cfg(feature = "embedded")]
impl ModelSize {
    /// Whether options or adapters change what is computed.
    #[cfg(feature = "demo-model")]
    fn is_changed(&self) -> bool {
        self.llama != LlamaOptions::default() || !self.lora.is_empty() || self.draft.is_some()
    }

    /// Whether the model of a file embeds.
    fn embeds(&self, source: &embedded::ModelSource) -> Result<bool, embedded::LoadError> {
        match self.embedding {
            Some(embeds) => Ok(embeds),
            None => embedded::embeds(source, &self.llama),
        }
    }

    fn embedding(&self) -> embedded::EmbeddingOptions {
        embedded::EmbeddingOptions {
            pooling: self.pooling.map(Into::into),
            normalize: self.normalize,
        }
    }

    fn options(&self) -> embedded::LoadOptions {
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
/// [`Exit::Usage`] if a scripted model does not parse; [`Exit::Model`] if this binary cannot run a model of this kind.
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

fn size(engine: &EngineConfig, model: &ServedModelConfig) -> ModelSize {
    let speculation = match model.backend {
        // A script decides when its tokens come, and there are no weights to read.
        BackendConfig::Scripted => SpeculationConfig::Off,
        BackendConfig::Embedded | BackendConfig::Upstream => {
            let of_draft = model.draft_model.as_ref().map(|_| SpeculationConfig::Draft);
            let asked = model.speculation.or(engine.speculation);
            asked.or(of_draft).unwrap_or(SpeculationConfig::Off)
        }
    };
    ModelSize {
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
    let size = size(&config.engine, model);
    let source = match model.backend {
        BackendConfig::Scripted => PlannedSource::Scripted(Box::new(script(model, &size)?)),
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
        limits: limits(config, &model.name, &size),
        size,
        residence: Residence::of(&config.engine, model),
        is_tried,
    }))
}

/// The controls of a scripted model that requests may set; their names were checked when it was parsed.
fn controls(script: &scripted::Config) -> BTreeMap<generate::ScriptControl, String> {
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
) -> Result<Option<scripted::Config>, CliError> {
    match model.backend {
        BackendConfig::Scripted => script(model, &size(&config.engine, model)).map(Some),
        BackendConfig::Embedded | BackendConfig::Upstream => Ok(None),
    }
}

/// The script of a scripted model; its name and size are set outside.
fn script(model: &ServedModelConfig, size: &ModelSize) -> Result<scripted::Config, CliError> {
    let wrong = |why: figment::Error| {
        let key = why.path.join(".");
        CliError::usage(format!(
            "models `{}`: scripted.{key}: {}",
            model.name, why.kind
        ))
    };
    let mut script: scripted::Config = match &model.scripted {
        Some(value) => value.deserialize().map_err(wrong)?,
        None => scripted::Config::default(),
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

fn limits(config: &Config, name: &str, size: &ModelSize) -> sapwood_engine::Config {
    let prefix_dir = config.engine.prefix_dir.as_deref();
    sapwood_engine::Config {
        prefix_disk: prefix_dir.map(|folder| PrefixDiskConfig {
            folder: folder.join(prefix_folder_name(name)),
            bytes: config.engine.prefix_disk_bytes,
        }),
        queue_requests: config.limits.queue_requests,
        queue_tokens: config.limits.queue_tokens,
        queue_timeout_ms: u64::try_from(config.limits.queue_timeout.as_millis())
            .unwrap_or(u64::MAX),
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

/// Reports a file that does not exist or is no model before anything starts.
///
/// # Errors
/// [`Exit::Model`].
fn look_at(name: &str, which: &str, path: &Path) -> Result<(), CliError> {
    is_gguf(path).map_err(|why| {
        let path = path.display();
        let what = format!("cannot load the model `{name}`: {which}{path}: {why}");
        CliError::exit(Exit::Model, what)
    })
}

/// Whether a file begins with the magic of GGUF.
///
/// # Errors
/// The reason if it does not, for people.
pub(crate) fn is_gguf(path: &Path) -> Result<(), String> {
    let mut magic = [0; 4];
    // Four bytes are enough to detect the usual mistakes: a directory, a web page, a model in another format.
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    match read {
        Ok(()) if &magic == b"GGUF" => Ok(()),
        Ok(()) => Err(NO_GGUF.into()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(NO_GGUF.into()),
        Err(error) => Err(error.to_string()),
    }
}

const NO_GGUF: &str = "it is not a GGUF file";

/// Where the file of a model is.
///
/// # Errors
/// [`Exit::Usage`].
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
    Err(CliError::exit(Exit::Model, message))
}

#[cfg(feature = "demo-model")]
fn demo(config: &Config) -> Result<PlannedModel, CliError> {
    let size = size(&config.engine, &ServedModelConfig::default());
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
        size,
        residence: Residence::of(&config.engine, &ServedModelConfig::default()),
        is_tried: config.engine.try_files,
    })
}

#[cfg(not(feature = "demo-model"))]
fn demo(_: &Config) -> Result<PlannedModel, CliError> {
    let message = "this binary was built without the demo model, and no other is named; name a GGUF file with \
                   --model PATH, or build with `cargo xtask serve`";
    Err(CliError::exit(Exit::Model, message))
}

/// Loads a file, or the demo model, computes a few tokens and drops all of it.
///
/// # Errors
/// The reason that it cannot be used, for people.
#[cfg(feature = "embedded")]
pub(crate) fn try_out(file: Option<std::path::PathBuf>, size: &ModelSize) -> Result<(), String> {
    let source = match file {
        Some(file) => embedded::ModelSource::File(file),
        #[cfg(feature = "demo-model")]
        None => embedded::ModelSource::Bytes(sapwood_demo::MODEL),
        #[cfg(not(feature = "demo-model"))]
        None => return Err("this binary was built without the demo model".to_owned()),
    };
    let (options, mut go_on) = (size.options(), |_| true);
    let to_text = |why: embedded::LoadError| why.to_string();
    if size.embeds(&source).map_err(to_text)? {
        let embedding = size.embedding();
        let loaded = embedded::load_embedding("trial", &source, &options, embedding, &mut go_on);
        return loaded.map_err(to_text)?.try_out();
    }
    let loaded = embedded::load("trial", &source, &options, &mut go_on);
    let mut model = loaded.map_err(to_text)?;
    model.try_out()?;
    draft_of(&mut model, size).map(drop)
}

/// Returns the draft model that was loaded with a model, if its tokens are those of the model.
#[cfg(feature = "embedded")]
fn draft_of(
    model: &mut embedded::Embedded,
    size: &ModelSize,
) -> Result<Option<DraftModel>, String> {
    let p_min = size.draft.as_ref().map_or(0.0, |draft| draft.p_min);
    let draft = model.take_draft().map(Box::new);
    let draft = draft.map(|draft| DraftModel::new(draft, &*model, p_min));
    draft
        .transpose()
        .map_err(|why| format!("its draft model: {why}"))
}

/// The files of a model that is split into parts, `NAME-00001-of-00003.gguf` and so on, from the first; else the file alone.
#[cfg(any(feature = "embedded", test))]
pub(crate) fn parts(first: std::path::PathBuf) -> Vec<std::path::PathBuf> {
    let split = || {
        let name = first.file_name()?.to_str()?;
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let name = rest.strip_suffix("-00001")?;
        let count = count
            .parse()
            .ok()
            .filter(|count| (1..=PARTS_MAX).contains(count))?;
        let part =
            |number: u32| first.with_file_name(format!("{name}-{number:05}-of-{count:05}.gguf"));
        Some((1..=count).map(part).collect())
    };
    split().unwrap_or_else(|| vec![first])
}

/// More are no model's.
#[cfg(any(feature = "embedded", test))]
const PARTS_MAX: u32 = 1000;

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
                controls: controls(script),
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
        Some(ModelFacts { info, vocabulary })
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

    /// The same model with its file on this machine: downloaded if it is named otherwise and not there, and locked until
    /// the cache [releases](ModelCache::release) it.
    ///
    /// # Errors
    /// [`Exit::Model`] with one line that names a remedy.
    #[cfg(feature = "embedded")]
    pub(crate) async fn located(mut self, cache: &ModelCache) -> Result<Self, CliError> {
        let name = self.name.clone();
        let failed = |why: CliError| {
            let what = format!("cannot load the model `{name}`: {why}");
            CliError::exit(Exit::Model, what)
        };
        let source = match &self.source {
            PlannedSource::Named(source) => Some(source.clone()),
            // `models pull` and `rm` may reach it.
            PlannedSource::File(path) if cache.covers(path) => {
                Some(ModelSource::File(path.clone()))
            }
            _ => None,
        };
        if let Some(source) = source {
            let path = cache.acquire(&name, &source).await.map_err(&failed)?;
            self.source = PlannedSource::File(path);
        }
        if let Some(draft) = &mut self.size.draft {
            let source =
                ModelSource::read(&draft.path).map_err(|why| failed(CliError::usage(why)))?;
            let is_outside = matches!(&source, ModelSource::File(path) if !cache.covers(path));
            if !is_outside {
                let path = cache.acquire_beside(&name, &source).await;
                draft.path = path.map_err(&failed)?;
            }
        }
        Ok(self)
    }

    /// Without llama.cpp no model has a file.
    #[cfg(not(feature = "embedded"))]
    #[expect(clippy::unused_async, reason = "asynchronous where there are files")]
    pub(crate) async fn located(self, _: &ModelCache) -> Result<Self, CliError> {
        Ok(self)
    }

    /// Scripted models have no file.
    #[cfg(not(feature = "embedded"))]
    pub(crate) fn outline(&self) -> Option<ModelFacts> {
        None
    }

    /// Loads the model and starts its engine. Slow: call it where blocking is allowed. `progress` gets the share done
    /// and stops the load by returning false.
    ///
    /// # Errors
    /// [`Exit::Model`] with one line that names a remedy.
    pub(crate) fn load(
        self,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<LoadedModel, CliError> {
        let name = self.name.clone();
        let failed = |why: String| {
            CliError::exit(
                Exit::Model,
                format!("cannot load the model `{name}`: {why}"),
            )
        };
        match self.source.clone() {
            PlannedSource::Scripted(script) => {
                progress(1.0);
                self.scripted(*script).map_err(failed)
            }
            #[cfg(feature = "demo-model")]
            PlannedSource::Demo => {
                let source = embedded::ModelSource::Bytes(sapwood_demo::MODEL);
                self.embedded(&source, progress).map_err(failed)
            }
            // Only a file is loaded: see `located`.
            #[cfg(feature = "embedded")]
            PlannedSource::Named(source) => Err(failed(format!("{source} is not downloaded"))),
            #[cfg(feature = "embedded")]
            PlannedSource::File(path) => {
                let source = embedded::ModelSource::File(path);
                self.embedded(&source, progress).map_err(failed)
            }
        }
    }

    fn scripted(self, script: scripted::Config) -> Result<LoadedModel, String> {
        if self.size.embedding == Some(true) {
            let model = ScriptedEmbedding::new(ScriptedEmbeddingConfig {
                name: script.name,
                pooling: self.size.pooling.map_or(Pooling::Mean, Into::into),
                context_tokens: script.context_tokens,
                parallel: script.parallel,
                normalize: self.size.normalize,
                ..ScriptedEmbeddingConfig::default()
            });
            return spawned(Embedder::spawn(Box::new(model), &self.limits));
        }
        let model = scripted::Scripted::new(script).map_err(|why| why.to_string())?;
        spawned(Engine::spawn(Box::new(model), self.limits))
    }

    #[cfg(feature = "embedded")]
    fn embedded(
        self,
        source: &embedded::ModelSource,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<LoadedModel, String> {
        let (name, options) = (&self.name, self.size.options());
        let to_text = |why: embedded::LoadError| why.to_string();
        if self.size.embeds(source).map_err(to_text)? {
            let embedding = self.size.embedding();
            let model = embedded::load_embedding(name, source, &options, embedding, progress);
            let model = Box::new(model.map_err(to_text)?);
            return spawned(Embedder::spawn(model, &self.limits));
        }
        let mut model = embedded::load(name, source, &options, progress).map_err(to_text)?;
        let draft = draft_of(&mut model, &self.size)?;
        spawned(Engine::spawn_drafting(Box::new(model), draft, self.limits))
    }
}

fn spawned<E: Into<LoadedModel>>(engine: io::Result<E>) -> Result<LoadedModel, String> {
    engine
        .map(Into::into)
        .map_err(|why| format!("no thread for it ({why})"))
}
