//! The configuration: the keys of `sapwood.toml`, their types, defaults and checks. The origin of each value is in
//! [`layers`].

pub(crate) mod controllers;
pub(crate) mod endpoint;
mod engine;
pub(crate) mod environment;
pub(crate) mod generate;
pub(crate) mod hub;
pub(crate) mod keys;
pub(crate) mod layers;
mod limits;
pub(crate) mod lmtp;
pub(crate) mod ports;
pub(crate) mod references;
pub(crate) mod remote_model;
pub(crate) mod sampling;
mod served_model;
pub(crate) mod speculation;
mod tls;
pub(crate) mod trace;
pub(crate) mod upstream;

use std::path::PathBuf;
use std::time::Duration;

use sapwood_proto::secret::{Secret, SecretUrl};
use serde::{Deserialize, Deserializer, Serialize};

use crate::failure::CliError;
use controllers::ControllersConfig;
use endpoint::EndpointConfig;
use generate::GenerateFaceConfig;
use hub::HubConfig;
use lmtp::LmtpConfig;
use ports::Preset;
use references::ReferencesConfig;
use trace::TraceConfig;

pub(crate) use engine::{EngineConfig, LoadTime, PrefixScope};
pub(crate) use limits::LimitsConfig;
pub(crate) use served_model::{BackendConfig, DEMO, PoolingConfig, ServedModelConfig};
pub(crate) use tls::{ClientCertificates, TlsConfig};

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
            model.check()?;
            if names.contains(&model.name.as_str()) {
                let what = format!("models.name: two models are called `{}`", model.name);
                return Err(CliError::usage(what));
            }
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
        self.check_ports()?;
        self.hub.check()?;
        self.lmtp.check()?;
        self.generate.check()?;
        // Whether the files belong together; they are read when the server starts, and by `config check`.
        self.tls.files()?;
        self.upstreams
            .iter()
            .try_for_each(EndpointConfig::check_joined)
    }
}

/// An empty key counts as none.
fn secret<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Secret>, D::Error> {
    let secret = Option::<Secret>::deserialize(from)?;
    Ok(secret.filter(|secret| !secret.is_empty()))
}

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
