//! The configuration: the keys of `sapwood.toml`, their types, defaults and checks. The origin of each value is in
//! [`layers`].

pub(crate) mod controllers;
pub(crate) mod endpoint;
pub(crate) mod environment;
pub(crate) mod generate;
pub(crate) mod hub;
pub(crate) mod keys;
pub(crate) mod layers;
pub(crate) mod lmtp;
pub(crate) mod ports;
pub(crate) mod references;
pub(crate) mod remote_model;
pub(crate) mod speculation;
pub(crate) mod trace;
pub(crate) mod upstream;

use std::path::PathBuf;
use std::time::Duration;

use sapwood_engine::embedding::Pooling;
use sapwood_engine::llama_options::{GpuLayers, LlamaOptions, LoraAdapter};
use sapwood_kernel::{OutputParsers, ReasoningParser, ToolParser};
use sapwood_proto::evergreen::SessionLimits as Evergreen;
use sapwood_proto::secret::{Secret, SecretUrl};
use sapwood_server::listener::tls;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::failure::CliError;
use crate::hub::source::ModelSource;
use controllers::ControllersConfig;
use endpoint::EndpointConfig;
use generate::{GenerateFaceConfig, ModelCompat, TensorConfig};
use hub::HubConfig;
use lmtp::LmtpConfig;
use ports::Preset;
use references::ReferencesConfig;
use remote_model::RemoteModel;
use speculation::SpeculationConfig;
use trace::TraceConfig;
use upstream::UpstreamConfig;

/// Whether the value of a dotted key, or of a parent of it, is never printed when it cannot be parsed. A value that is
/// parsed has a type that prints nothing ([`Secret`], [`SecretUrl`]).
pub(crate) fn may_hold_secret(key: &str) -> bool {
    let is_upstream = is_within(key, "models") && key.contains(".upstream");
    is_upstream || SECRETS.iter().any(|secret| is_within(key, secret))
}

/// Whether the value of a dotted key is always text, even if it looks like a number.
pub(crate) fn is_text(key: &str) -> bool {
    matches!(key, "auth.key" | "client.key" | "hub.token")
        || key.starts_with("references.store_options.")
        || (is_named_by_user(key) && key.ends_with(".value"))
}

/// Whether a dotted key is below a table whose keys the user chooses.
pub(crate) fn is_named_by_user(key: &str) -> bool {
    let tables = ["references.store_options.", "generate.restricted."];
    tables.iter().any(|table| key.starts_with(table))
}

fn is_within(key: &str, above: &str) -> bool {
    key.strip_prefix(above)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Every value of a tree by its dotted key, the tables included. Lists are values, because a layer replaces them whole.
pub(crate) fn dotted(tree: serde_json::Value) -> Vec<(String, serde_json::Value)> {
    let mut all = Vec::new();
    if let serde_json::Value::Object(table) = tree {
        for (key, value) in table {
            let below = dotted(value.clone()).into_iter();
            all.extend(below.map(|(rest, value)| (format!("{key}.{rest}"), value)));
            all.push((key, value));
        }
    }
    all
}

/// The whole configuration. Every key is in `config.example.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// The address of the common listener: `HOST:PORT`, `unix:PATH` or `systemd`.
    pub(crate) listen: String,
    /// An additional port for gRPC only.
    pub(crate) listen_grpc: Option<String>,
    /// An additional port for `/metrics` only.
    pub(crate) listen_metrics: Option<String>,
    /// The preset that opens these two where they are not set.
    pub(crate) preset: Option<Preset>,
    /// Allow listening beyond this machine without an API key.
    pub(crate) insecure: bool,
    /// Log filter: a level, or `target=level` pairs separated by commas.
    pub(crate) log: String,
    /// The model for calls that name none; needed only with several.
    pub(crate) default_model: Option<String>,
    /// Functions for benchmarks and client tests (EV-511).
    pub(crate) test_functions: bool,
    pub(crate) engine: EngineConfig,
    pub(crate) controllers: ControllersConfig,
    pub(crate) auth: AuthConfig,
    pub(crate) tls: TlsConfig,
    pub(crate) limits: LimitsConfig,
    pub(crate) lmtp: LmtpConfig,
    pub(crate) generate: GenerateFaceConfig,
    pub(crate) drain: DrainConfig,
    pub(crate) browser: BrowserConfig,
    pub(crate) metrics: MetricsConfig,
    pub(crate) trace: TraceConfig,
    pub(crate) client: ClientConfig,
    pub(crate) references: ReferencesConfig,
    pub(crate) hub: HubConfig,
    /// Other servers whose functions are served here too.
    pub(crate) upstreams: Vec<EndpointConfig>,
    /// The models served. Without any, the demo model.
    pub(crate) models: Vec<ServedModelConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".into(),
            listen_grpc: None,
            listen_metrics: None,
            preset: None,
            insecure: false,
            log: "info".into(),
            default_model: None,
            test_functions: false,
            engine: EngineConfig::default(),
            controllers: ControllersConfig::default(),
            auth: AuthConfig::default(),
            tls: TlsConfig::default(),
            limits: LimitsConfig::default(),
            lmtp: LmtpConfig::default(),
            generate: GenerateFaceConfig::default(),
            drain: DrainConfig::default(),
            browser: BrowserConfig::default(),
            metrics: MetricsConfig::default(),
            trace: TraceConfig::default(),
            client: ClientConfig::default(),
            references: ReferencesConfig::default(),
            hub: HubConfig::default(),
            upstreams: Vec::new(),
            models: Vec::new(),
        }
    }
}

/// Defaults of every model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct EngineConfig {
    /// Tokens of context per sequence; 0: what the model was trained for, at most 8,192.
    pub(crate) ctx: u32,
    /// Threads that compute the next token of each sequence; 0: as many as are fastest, measured while it runs.
    pub(crate) threads: u32,
    /// Threads that compute prompts; 0: as `threads`, and measured separately if that is 0 too.
    pub(crate) threads_batch: u32,
    /// Milliseconds that a step should take at most, prompts included; at least 1. Streams wait for the end of a step.
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
    /// Ageing: one of so many admissions goes to the request that has waited longest, whatever its priority; 0: off.
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
            step_ms: 200,
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
        }
    }
}

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

/// API keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AuthConfig {
    /// One key with every scope.
    #[serde(deserialize_with = "secret")]
    pub(crate) key: Option<Secret>,
    /// A file of `[[keys]]` entries, as `sapwood key new` prints them.
    pub(crate) key_file: Option<PathBuf>,
    /// `/metrics` needs no key.
    pub(crate) metrics_public: bool,
    /// Accept the key of a WebSocket as `?key=`, because a browser cannot set a header there.
    pub(crate) query_key: bool,
}

/// TLS on the listener: with certificate and key it is on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TlsConfig {
    /// PEM file of the server's certificate and its chain.
    pub(crate) certificate: Option<PathBuf>,
    /// PEM file of its private key.
    pub(crate) key: Option<PathBuf>,
    /// PEM file of the authority that signs clients' certificates; if it is set, clients are asked for one.
    pub(crate) client_ca: Option<PathBuf>,
    /// Whether a client without a certificate is refused.
    pub(crate) mtls: ClientCertificates,
}

/// Whether clients must have a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ClientCertificates {
    Optional,
    #[default]
    Required,
}

impl TlsConfig {
    /// The TLS settings of the server; `None` without TLS.
    ///
    /// # Errors
    /// [`CliError::usage`] if only some of the files are given that belong together.
    pub(crate) fn files(&self) -> Result<Option<tls::Config>, CliError> {
        let clients = self.client_ca.clone().map(|authority| tls::Clients {
            authority,
            mtls: match self.mtls {
                ClientCertificates::Optional => tls::Mtls::Optional,
                ClientCertificates::Required => tls::Mtls::Required,
            },
        });
        match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Ok(Some(tls::Config {
                certificate: certificate.clone(),
                key: key.clone(),
                clients,
            })),
            (None, None) if clients.is_none() => Ok(None),
            _ => Err(CliError::usage(
                "tls: TLS needs both tls.certificate (--tls-cert) and tls.key (--tls-key)",
            )),
        }
    }
}

/// Limits of the listener, of sessions and of queues.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LimitsConfig {
    /// Open connections; above it the listener stops accepting.
    pub(crate) connections: usize,
    /// Open connections from one address; further ones are closed.
    pub(crate) connections_each: usize,
    /// Concurrent HTTP/2 streams of one connection.
    pub(crate) streams_per_connection: u32,
    /// Bytes of a request's head.
    pub(crate) header_bytes: u32,
    /// Header lines of a request, over each version of HTTP.
    pub(crate) headers: usize,
    /// Timeout for the first byte of a connection, and for the head of a request.
    #[serde(with = "humantime_serde")]
    pub(crate) handshake: Duration,
    /// Idle timeout of a connection.
    #[serde(with = "humantime_serde")]
    pub(crate) idle: Duration,
    /// Idle timeout of a request body; after its first 4 KiB, at least 16 KiB must arrive in each such interval.
    #[serde(with = "humantime_serde")]
    pub(crate) body_idle: Duration,
    /// Byte budget: bytes of requests in memory, of all callers together; what does not fit waits, then 503.
    pub(crate) body_bytes_total: usize,
    /// The part of it that one key, or one address without a key, may use.
    pub(crate) body_bytes_each: usize,
    /// How long a request waits for room in the budget.
    #[serde(with = "humantime_serde")]
    pub(crate) body_bytes_wait: Duration,
    /// Bytes of a refused request's body that are read before it is answered; without a valid key at most 1 MiB.
    pub(crate) drain_bytes: u64,
    /// Write-stall timeout: a response whose client reads nothing for this long is reset.
    #[serde(with = "humantime_serde")]
    pub(crate) stall: Duration,
    /// Timeout of a request; a client may ask for less.
    #[serde(with = "humantime_serde")]
    pub(crate) request: Duration,
    /// Bytes of one message of an Evergreen client, in any dialect; a longer one ends its session.
    pub(crate) max_message_bytes: usize,
    /// Open Evergreen sessions; further ones are refused.
    pub(crate) sessions: usize,
    /// The part of them that one key, or one address without a key, may have.
    pub(crate) sessions_each: usize,
    /// Bytes retained by all Evergreen sessions together; a session that needs more ends.
    pub(crate) server_retained_bytes: u64,
    /// Bytes retained by the Evergreen sessions of one key, or of one address without a key.
    pub(crate) retained_bytes_each: u64,
    /// Resumable sessions, or streams, of each face; 0: none.
    pub(crate) resumable_sessions: usize,
    /// The part of them that one key, or one address without a key, may have.
    pub(crate) resumable_sessions_each: usize,
    /// How long a detached Evergreen session or Triton stream waits for its client.
    #[serde(with = "humantime_serde")]
    pub(crate) resume_grace: Duration,
    /// Timeout of a function that a client has offered.
    #[serde(with = "humantime_serde")]
    pub(crate) reverse_timeout: Duration,
    /// Queued requests of one model; further ones are refused.
    pub(crate) queue_requests: usize,
    /// Prompt tokens of the queued requests of one model.
    pub(crate) queue_tokens: usize,
    /// A request that is queued longer fails.
    #[serde(with = "humantime_serde")]
    pub(crate) queue_timeout: Duration,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            connections: 20_000,
            connections_each: 10_000,
            streams_per_connection: 256,
            header_bytes: 65_536,
            headers: 100,
            handshake: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            body_idle: Duration::from_secs(30),
            body_bytes_total: 160 << 20,
            body_bytes_each: 112 << 20,
            body_bytes_wait: Duration::from_secs(5),
            drain_bytes: 128 << 20,
            stall: Duration::from_secs(60),
            request: Duration::from_secs(600),
            max_message_bytes: Evergreen::default().max_message_bytes,
            sessions: 20_000,
            sessions_each: 10_000,
            server_retained_bytes: 4 << 30,
            retained_bytes_each: 2 << 30,
            resumable_sessions: 1_000,
            resumable_sessions_each: 250,
            resume_grace: Duration::from_secs(60),
            reverse_timeout: Duration::from_secs(60),
            queue_requests: 1_024,
            queue_tokens: 4_194_304,
            queue_timeout: Duration::from_secs(60),
        }
    }
}

/// Graceful shutdown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DrainConfig {
    /// After the signal, new work is accepted for this long, because load balancers react late.
    #[serde(with = "humantime_serde")]
    pub(crate) grace: Duration,
    /// Then running work has this long to finish.
    #[serde(with = "humantime_serde")]
    pub(crate) deadline: Duration,
}

impl Default for DrainConfig {
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(5),
            deadline: Duration::from_secs(30),
        }
    }
}

/// What `/metrics` exports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct MetricsConfig {
    /// Export model metrics under Triton's names as well.
    pub(crate) triton: bool,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { triton: true }
    }
}

/// What web pages may do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct BrowserConfig {
    /// Other origins whose pages may call this server (CORS).
    pub(crate) origins: Vec<String>,
    /// Host names that browsers may use; empty: loopback names on a loopback listener, every name elsewhere.
    pub(crate) hosts: Vec<String>,
}

/// Settings of `chat`, `run` and `models`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ClientConfig {
    /// The server to talk to; `here`: none, the model runs in this process; unset: the local one if it is there, else
    /// `here`.
    pub(crate) server: Option<SecretUrl>,
    /// The key to send to it, and to upstreams that have none of their own.
    #[serde(deserialize_with = "secret")]
    pub(crate) key: Option<Secret>,
    /// PEM file of authorities to trust beside the well-known ones.
    pub(crate) ca: Option<PathBuf>,
}

impl Config {
    /// Checks the constraints that the types cannot express.
    ///
    /// # Errors
    /// [`CliError::usage`], naming the key.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        let mut names: Vec<&str> = Vec::new();
        for model in &self.models {
            // The name appears in logs, headers and URLs.
            if model.name.is_empty() || model.name.chars().any(char::is_control) {
                return Err(CliError::usage(
                    "models.name: a model needs a name without control characters",
                ));
            }
            if names.contains(&model.name.as_str()) {
                let what = format!("models.name: two models are called `{}`", model.name);
                return Err(CliError::usage(what));
            }
            if model.backend == BackendConfig::Embedded && model.path.is_none() && !model.is_demo()
            {
                let what = format!(
                    "models.path: the model `{}` needs the path of its GGUF file; only the demo model needs none, and is \
                     called `{DEMO}`",
                    model.name
                );
                return Err(CliError::usage(what));
            }
            if let Some(path) = &model.path {
                let read = ModelSource::read(path);
                read.map_err(|why| {
                    CliError::usage(format!("models.path: the model `{}`: {why}", model.name))
                })?;
            }
            model.check_upstream()?;
            model.check_served()?;
            names.push(&model.name);
        }
        // Without configured models the demo model takes this name.
        if let Some(name) = &self.default_model
            && !names.is_empty()
            && !names.contains(&name.as_str())
        {
            let what = format!(
                "default_model: no model is called `{name}`; there are: {}",
                names.join(", ")
            );
            return Err(CliError::usage(what));
        }
        self.check_sequences()?;
        self.check_llama()?;
        self.check_speculation()?;
        self.limits.check()?;
        self.controllers.check()?;
        check_message_bytes("limits.max_message_bytes", self.limits.max_message_bytes)?;
        self.check_ports()?;
        self.hub.check()?;
        self.lmtp.check()?;
        self.generate.check()?;
        // Whether the files belong together; they are read when the server starts, and by `config check`.
        self.tls.files()?;
        self.upstreams.iter().try_for_each(check_upstream)
    }

    /// Also of each model together with the defaults, because some options exclude others.
    fn check_llama(&self) -> Result<(), CliError> {
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
    fn check_sequences(&self) -> Result<(), CliError> {
        let engine = &self.engine;
        if engine.step_ms == 0 {
            let what = "engine.step_ms: must be at least 1";
            return Err(CliError::usage(what));
        }
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

impl LimitsConfig {
    /// Checks the bounds of numbers for which memory is reserved in advance.
    fn check(&self) -> Result<(), CliError> {
        for (key, value, least, most) in [
            // Below this minimum, HTTP has too little buffer to start.
            ("header_bytes", self.header_bytes as usize, 8 << 10, 1 << 20),
            ("headers", self.headers, 10, 10_000),
            ("queue_requests", self.queue_requests, 0, 1 << 20),
        ] {
            if !(least..=most).contains(&value) {
                let what = format!("limits.{key}: must be from {least} to {most}");
                return Err(CliError::usage(what));
            }
        }
        Ok(())
    }
}

impl ServedModelConfig {
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

/// A message must have room for its own frame, and its length must fit into four bytes.
fn check_message_bytes(key: &str, value: usize) -> Result<(), CliError> {
    let bounds = MESSAGE_BYTES_LEAST..=MESSAGE_BYTES_MOST;
    if bounds.contains(&value) {
        return Ok(());
    }
    Err(CliError::usage(format!(
        "{key}: must be from {MESSAGE_BYTES_LEAST} to {MESSAGE_BYTES_MOST}"
    )))
}

/// D-40: the schemes of an upstream's address, as far as they are implemented.
fn check_upstream(upstream: &EndpointConfig) -> Result<(), CliError> {
    upstream.check("upstreams")?;
    let url = &upstream.url;
    if upstream.weight.is_some() {
        return Err(CliError::usage(format!(
            "upstreams: `{url}`: `weight` is a key of models.upstream.endpoints, of which several compute one model"
        )));
    }
    let address = url.expose();
    let scheme = address.split_once("://").map_or("", |(scheme, _)| scheme);
    let there_are = "write evergreen+http://HOST:PORT for another Sapwood, triton+http://HOST:PORT or \
                     triton+grpc://HOST:PORT for a Triton server, lmtp://HOST:PORT/MODEL for a model of an LMTP server, \
                     or of several: lmtp://HOST:PORT,HOST:PORT/MODEL; with ?tokenizer=PATH appended if they do not offer theirs";
    match scheme {
        "evergreen+http" | "evergreen+https" | "evergreen+ws" | "evergreen+wss" | "triton+http"
        | "triton+https" | "triton+grpc" | "triton+grpcs" => Ok(()),
        "lmtp" => match RemoteModel::read(address) {
            Ok(_) => Ok(()),
            Err(error) => Err(CliError::usage(format!(
                "upstreams: `{url}`: {}",
                error.message
            ))),
        },
        "openai+http" | "openai+https" => Err(CliError::usage(format!(
            "upstreams: {scheme}:// is not built yet; {there_are}"
        ))),
        _ => Err(CliError::usage(format!(
            "upstreams: `{url}` is not the address of an upstream; {there_are}"
        ))),
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

/// An empty key counts as none.
fn secret<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Secret>, D::Error> {
    let secret = Option::<Secret>::deserialize(from)?;
    Ok(secret.filter(|secret| !secret.is_empty()))
}

const SEQUENCES_MOST: u32 = 1 << 16;

const MESSAGE_BYTES_LEAST: usize = 1 << 10;
const MESSAGE_BYTES_MOST: usize = 1 << 30;

/// Keys that are secret, with everything below them.
const SECRETS: [&str; 9] = [
    "auth.key",
    "client.key",
    "client.server",
    "hub.token",
    "trace.endpoint",
    "trace.headers",
    "references.store_options",
    "generate.restricted",
    "upstreams",
];

#[cfg(test)]
mod tests;
