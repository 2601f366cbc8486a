//! The keys of `[[models]]`: one model to serve, and how it is computed.

use std::path::PathBuf;
use std::time::Duration;

use sapwood_engine::embedding::Pooling;
use sapwood_engine::llama_options::{GpuLayers, LlamaOptions, LoraAdapter};
use sapwood_kernel::{OutputParsers, ReasoningParser, ToolParser};
use serde::{Deserialize, Serialize, Serializer};

use super::engine::LoadTime;
use super::generate::{ModelCompat, TensorConfig};
use super::sampling::SamplingConfig;
use super::speculation::SpeculationConfig;
use super::upstream::UpstreamConfig;
use crate::failure::CliError;
use crate::hub::source::ModelSource;

/// One model to serve.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServedModelConfig {
    /// The name under which it is called.
    pub(crate) name: String,
    /// What computes it.
    #[serde(default)]
    pub(crate) backend: BackendConfig,
    /// The GGUF file of an embedded model, or what [`ModelSource`] names it by; the model `demo` has none if it is that of
    /// the binary.
    #[serde(default, serialize_with = "shown_path")]
    pub(crate) path: Option<PathBuf>,
    /// The server is ready only with it, and does not start if it cannot be loaded. Default: true.
    #[serde(default)]
    pub(crate) required: Option<bool>,
    /// The output of a scripted model: the keys of [`sapwood_engine::scripted::Config`].
    #[serde(default, alias = "mock")]
    pub(crate) scripted: Option<figment::value::Value>,
    /// The servers of a model of backend `upstream`.
    #[serde(default)]
    pub(crate) upstream: Option<UpstreamConfig>,
    /// Overrides `engine.ctx`.
    #[serde(default)]
    pub(crate) ctx: Option<u32>,
    /// Overrides `engine.threads`.
    #[serde(default)]
    pub(crate) threads: Option<u32>,
    /// Overrides `engine.threads_batch`.
    #[serde(default)]
    pub(crate) threads_batch: Option<u32>,
    /// Overrides `engine.parallel`.
    #[serde(default)]
    pub(crate) parallel: Option<u32>,
    /// Overrides `engine.kept_prefixes`.
    #[serde(default)]
    pub(crate) kept_prefixes: Option<u32>,
    /// Overrides `engine.cache_tokens`.
    #[serde(default)]
    pub(crate) cache_tokens: Option<u32>,
    /// Overrides `engine.load`.
    #[serde(default)]
    pub(crate) load: Option<LoadTime>,
    /// Overrides `engine.idle_unload`.
    #[serde(default, with = "humantime_serde")]
    pub(crate) idle_unload: Option<Duration>,
    /// Overrides single options of `engine.llama`.
    #[serde(default)]
    pub(crate) llama: LlamaOptions,
    /// Overrides single keys of `engine.sampling`. Of a model of backend `upstream` these alone count.
    #[serde(default, serialize_with = "SamplingConfig::serialize_set")]
    pub(crate) sampling: SamplingConfig,
    /// LoRA adapters, of which requests may choose.
    #[serde(default)]
    pub(crate) lora: Vec<LoraAdapter>,
    /// Overrides `engine.speculation`.
    #[serde(default)]
    pub(crate) speculation: Option<SpeculationConfig>,
    /// The GGUF file of a small model with the same vocabulary, or what [`ModelSource`] names it by.
    #[serde(default, serialize_with = "shown_path")]
    pub(crate) draft_model: Option<PathBuf>,
    /// Tokens of context per sequence for which it drafts; 0 or unset: as the model.
    #[serde(default)]
    pub(crate) draft_ctx: Option<u32>,
    /// Its layers that a GPU computes. Default: as many as fit.
    #[serde(default)]
    pub(crate) draft_gpu_layers: Option<GpuLayers>,
    /// Whether it embeds texts, or scores documents, instead of generating. Default: as its file says.
    #[serde(default)]
    pub(crate) embedding: Option<bool>,
    /// How the rows of a text's tokens become its embedding. Default: as its file says.
    #[serde(default)]
    pub(crate) pooling: Option<PoolingConfig>,
    /// Scale embeddings to length 1 unless a request says otherwise. Default: true.
    #[serde(default)]
    pub(crate) normalize: Option<bool>,
    /// What finds calls of tools in its output.
    #[serde(default, serialize_with = "tool_parser")]
    pub(crate) tool_parser: ToolParser,
    /// What finds reasoning in its output.
    #[serde(default, serialize_with = "reasoning_parser")]
    pub(crate) reasoning_parser: ReasoningParser,
    /// Its versions at the Triton face. Default: 1.
    #[serde(default)]
    pub(crate) versions: Option<Vec<u64>>,
    /// Its inputs at the Triton face. Default: those of every text model.
    #[serde(default)]
    pub(crate) inputs: Vec<TensorConfig>,
    /// Its outputs there.
    #[serde(default)]
    pub(crate) outputs: Vec<TensorConfig>,
    /// Whether it declares any number of responses there.
    #[serde(default)]
    pub(crate) decoupled: Option<bool>,
    /// The batch size that it declares there.
    #[serde(default)]
    pub(crate) max_batch_size: Option<u32>,
    /// The clients that it is compatible with there.
    #[serde(default)]
    pub(crate) compat: ModelCompat,
    /// Refuse unknown parameters there.
    #[serde(default)]
    pub(crate) strict_parameters: bool,
    /// Prepend the prompt to the output there, unless a request says otherwise.
    #[serde(default)]
    pub(crate) prepend_prompt_default: bool,
    /// Apply the chat template to bare prompts there. Default: for the demo model only.
    #[serde(default)]
    pub(crate) template_raw_prompts: Option<bool>,
}

fn tool_parser<S: Serializer>(parser: &ToolParser, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(parser.name())
}

fn reasoning_parser<S: Serializer>(parser: &ReasoningParser, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(parser.name())
}

impl ServedModelConfig {
    /// What finds calls and reasoning in its output.
    pub(crate) fn parsers(&self) -> OutputParsers {
        OutputParsers {
            tools: self.tool_parser,
            reasoning: self.reasoning_parser,
        }
    }
}

/// How the rows of a text's tokens become its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PoolingConfig {
    /// The mean of all.
    Mean,
    /// That of the first token.
    Cls,
    /// That of the last token.
    Last,
    /// A classification head, for scores.
    Rank,
}

impl From<PoolingConfig> for Pooling {
    fn from(pooling: PoolingConfig) -> Self {
        match pooling {
            PoolingConfig::Mean => Self::Mean,
            PoolingConfig::Cls => Self::Cls,
            PoolingConfig::Last => Self::Last,
            PoolingConfig::Rank => Self::Rank,
        }
    }
}

/// The default name of the model in the binary.
pub(crate) const DEMO: &str = "demo";

/// What computes a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BackendConfig {
    /// llama.cpp in this process.
    #[default]
    Embedded,
    /// A deterministic model without weights, for tests and load.
    #[serde(alias = "mock")]
    Scripted,
    /// Other servers.
    Upstream,
}

impl ServedModelConfig {
    /// Checks what the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(super) fn check(&self) -> Result<(), CliError> {
        // The name appears in logs, headers and URLs.
        if self.name.is_empty() || self.name.chars().any(char::is_control) {
            return Err(CliError::usage(
                "models.name: a model needs a name without control characters",
            ));
        }
        if self.backend == BackendConfig::Embedded && self.path.is_none() && !self.is_demo() {
            let what = format!(
                "models.path: the model `{}` needs the path of its GGUF file; only the demo model needs none, and is \
                 called `{DEMO}`",
                self.name
            );
            return Err(CliError::usage(what));
        }
        if let Some(path) = &self.path {
            let read = ModelSource::read(path);
            read.map_err(|why| {
                CliError::usage(format!("models.path: the model `{}`: {why}", self.name))
            })?;
        }
        self.check_upstream()?;
        self.check_sampling()?;
        self.check_served()
    }

    /// Whether it is the demo model: it has that name, and no file.
    pub(crate) fn is_demo(&self) -> bool {
        self.backend == BackendConfig::Embedded && self.path.is_none() && self.name == DEMO
    }

    /// A model of backend `upstream` has a table `upstream`, and no other model has one.
    fn check_upstream(&self) -> Result<(), CliError> {
        let name = &self.name;
        match (&self.upstream, self.backend == BackendConfig::Upstream) {
            (Some(upstream), true) => upstream.check(name),
            (None, false) => Ok(()),
            (None, true) => Err(CliError::usage(format!(
                "models.upstream: the model `{name}` needs upstream.endpoints, the servers that compute it"
            ))),
            (Some(_), false) => Err(CliError::usage(format!(
                "models.upstream: the model `{name}` has a table `upstream`, which needs backend = \"upstream\""
            ))),
        }
    }
}

/// A path as it is; the query of a URL may have a signature in it.
fn shown_path<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
    let shown = path.as_deref().map(|path| match ModelSource::read(path) {
        Ok(source @ ModelSource::Url(_)) => source.to_string().into(),
        _ => path.to_owned(),
    });
    shown.serialize(to)
}
