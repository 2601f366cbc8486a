//! `sapwood serve`: runs the server.
//!
//! ```text
//!   configuration ─► port ─► server (answers while models load) ─► models ─► signal ─► drain ─► exit code
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use sapwood_proto::secret::{Secret, SecretUrl};
use sapwood_server::Server;
use sapwood_server::auth::ApiKey;
use sapwood_server::auth::charge_layer::AllowanceLayer;
use sapwood_server::faces::lmtp::LmtpService;
use sapwood_server::http::body_budget;
use sapwood_server::http::origin;
use sapwood_server::http::timeouts;
use sapwood_server::listener;
use sapwood_server::listener::descriptors::{DescriptorCheck, LEAST};
use sapwood_server::listener::port_purpose::PortPurpose;
use sapwood_server::listener::socket::ListeningSocket;
use sapwood_server::listener::tls::Tls;
use sapwood_server::ops::drain;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;

use super::engine_flags::EngineFlags;
use super::sampling_flags::SamplingFlags;
use super::{Common, ModelFlags};
use crate::config::layers::{Flags, Layers, list};
use crate::config::{ClientCertificates, Config, keys};
use crate::failure::{CliError, Exit};
use crate::listening::{BoundSockets, ServerName};
use crate::logs::Logs;
use crate::models::PlannedModel;
use crate::repository::ServedModels;
use crate::span_export::SpanExport;
use crate::upstreams::{Pools, Upstreams};
use crate::{listening, logs, model_loading, output};
use plan::ServePlan;

mod plan;

#[derive(Debug, Args)]
pub(super) struct ServeCommand {
    /// Address to listen on: HOST:PORT, unix:PATH, or systemd for a socket that systemd passes
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// A port for gRPC alone, beside the one for everything: HOST:PORT or unix:PATH
    #[arg(long, value_name = "HOST:PORT")]
    listen_grpc: Option<String>,
    /// A port for /metrics alone
    #[arg(long, value_name = "HOST:PORT")]
    listen_metrics: Option<String>,
    /// Listen on the ports of a Triton server: 8001 for gRPC and 8002 for metrics, beside 8000 for everything
    #[arg(long, value_parser = ["triton"])]
    preset: Option<String>,
    /// Also serve the functions of another server while it can be reached: evergreen+http://HOST:PORT, triton+http://HOST:PORT,
    /// triton+grpc://HOST:PORT, lmtp://HOST:PORT/MODEL?tokenizer=PATH; may be repeated
    #[arg(long, value_name = "URL")]
    upstream: Vec<SecretUrl>,
    /// Require this key from callers [env: SAPWOOD_API_KEY]
    #[arg(long, value_name = "KEY")]
    api_key: Option<Secret>,
    /// Require a key of this file from callers, made with `sapwood key new`
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Use TLS with this certificate (PEM, with its chain)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Accept only clients with a certificate signed by this authority (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Allow listening beyond this machine without an API key
    #[arg(long)]
    insecure: bool,
    /// Maximum size of a Triton request in bytes, as JSON and as tensors
    #[arg(long, value_name = "BYTES")]
    http_max_input_size: Option<usize>,
    #[command(flatten)]
    engine: EngineFlags,
    /// Defaults of every model, for what a request leaves unset.
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    models: ModelFlags,
}

impl ServeCommand {
    fn layers(&self, common: &Common) -> Result<Layers, CliError> {
        let mut flags = Flags::default();
        for (key, flag, sent) in [
            ("listen", "--listen", &self.listen),
            ("listen_grpc", "--listen-grpc", &self.listen_grpc),
            ("listen_metrics", "--listen-metrics", &self.listen_metrics),
            ("preset", "--preset", &self.preset),
        ] {
            flags.set(key, flag, sent.clone());
        }
        let key = self.api_key.as_ref().map(Secret::expose);
        flags.set("auth.key", "--api-key", key);
        if !self.upstream.is_empty() {
            let urls = self.upstream.iter().map(|url| url.expose().into());
            flags.set("upstreams", "--upstream", Some(list(urls)));
        }
        flags.set(
            "generate.http_max_input_size",
            "--http-max-input-size",
            self.http_max_input_size,
        );
        for (key, flag, path) in [
            ("auth.key_file", "--key-file", &self.key_file),
            ("tls.certificate", "--tls-cert", &self.tls_cert),
            ("tls.key", "--tls-key", &self.tls_key),
            ("tls.client_ca", "--tls-client-ca", &self.tls_client_ca),
        ] {
            let path = path
                .as_ref()
                .map(|path| path.to_string_lossy().into_owned());
            flags.set(key, flag, path);
        }
        flags.set("insecure", "--insecure", self.insecure.then_some(true));
        self.engine.set(&mut flags);
        self.sampling.set(&mut flags);
        self.models.set(&mut flags)?;
        common.layers(flags)
    }

    /// Loads the configuration and starts the log, after which writing never waits for its reader.
    fn begin(&self, common: &Common) -> Result<(Config, Logs), CliError> {
        let layers = self.layers(common)?;
        let config = layers.config()?;
        let logs = Logs::serve(&config.log)?;
        layers.warn_unknown_keys();
        enough_descriptors(&config)?;
        // With the libraries of this binary, which may be others by the time that a model is loaded. Without kernels no model is,
        // which says why.
        #[cfg(feature = "dynamic-backends")]
        let _ = sapwood_engine::embedded::kernels();
        Ok((config, logs))
    }

    /// Starts in this order: signals; everything that the configuration can have wrong; the ports, so that one in use is
    /// reported at once and probes are answered while models load; upstreams and models last. At the end upstreams are
    /// left after the drain, because running calls may be calls of their functions.
    pub(super) async fn run(self, common: Common) -> Result<Exit, CliError> {
        // First of all: a signal may arrive at any time during the start.
        let signals = UnixSignals::install()?;
        let (config, logs) = self.begin(&common)?;
        let keys = keys::load(&config.auth)?;
        let plan = ServePlan::new(config)?;
        let config = &plan.config;
        let ports = open(config, &keys).await?;
        let local = ports.common.is_local()?;
        let broken = |error: sapwood_server::server::BuildError| CliError::new(error.to_string());
        let settings = server_config(config, local, plan.tls.clone());
        let builder = Server::builder(settings, keys).map_err(broken)?;
        let shared = builder.shared().clone();
        shared.metrics.watch_log(logs::dropped());
        shared.metrics.watch_controllers(plan.steering.numbers());
        let kernel = model_loading::kernel(config, &plan.models)?;
        let (mut upstreams, mut failures) = Upstreams::plan(&kernel, config, &shared)?;
        shared.metrics.watch_kernel(kernel.clone());
        kernel.layer(AllowanceLayer);
        let reporter = SpanExport::begin(config, &shared, &kernel)?;
        let lmtp = plan.lmtp(&kernel, &shared);
        let lines = lines(config)?;
        let loading = ServedModels::new(&kernel, &shared, config, &plan.steering, &plan.models);
        let builder = plan.add_faces(builder, &lmtp, &loading, &kernel)?;
        let server = builder.build().map_err(broken)?;
        let reload = Reload {
            serve: self,
            common,
            logs,
            auth: Arc::clone(&shared.auth),
            tls: plan.tls.clone(),
            pools: upstreams.pools(),
        };
        announce(&ports, config, &plan.models);
        let ending = loading.clone();
        upstreams.begin();
        let BoundSockets { common, own } = ports;
        let server = own.into_iter().fold(server, |server, (port, purpose)| {
            server.also(port.socket, purpose)
        });
        let stop = Arc::new(Notify::new());
        let served = server.serve(common.socket, {
            let stop = Arc::clone(&stop);
            async move { stop.notified().await }
        });
        let served = async { futures::join!(served, listen(&lmtp, lines)).0 };
        let signals = signals.watch(reload, stop);
        tokio::pin!(signals);
        // Whichever of the other arms ends first ends the process, so nothing is awaited twice and nothing is lost.
        let outcome = tokio::select! {
            outcome = served => outcome,
            failure = load(loading, plan.models) => return Err(failure),
            Some(failure) = failures.recv() => return Err(failure),
            failure = &mut signals => return Err(failure),
        };
        let ended = async {
            upstreams.leave().await;
            ending.end().await;
            reporter.end().await;
        };
        finish(ended, signals).await?;
        Ok(if outcome.cut > 0 { Exit::Cut } else { Exit::Ok })
    }
}

/// Awaits what is left to do at the end. A disk may take long for the cached prefixes, or for ever.
///
/// # Errors
/// A signal that comes before it is done.
async fn finish(
    ended: impl Future<Output = ()>,
    signals: impl Future<Output = CliError>,
) -> Result<(), CliError> {
    tokio::select! {
        failure = signals => return Err(failure),
        ended = tokio::time::timeout(END_MAX, ended) => if ended.is_err() {
            tracing::warn!(limit = ?END_MAX, "what the server saves at its end took too long, and is lost");
        },
    }
    Ok(())
}

/// How long the server may take after its last connection, above all to write the prefixes that its engines have cached.
const END_MAX: Duration = Duration::from_secs(30);

/// Opens the sockets. Refuses to open one to other machines by mistake.
async fn open(config: &Config, keys: &[ApiKey]) -> Result<BoundSockets, CliError> {
    let ports = listening::open(config).await?;
    match ports.open_to_others()? {
        // Checked on what is bound, because a name or `systemd` does not say who can reach it.
        Some(name) if keys.is_empty() && is_open(config) => Err(open_to_all(name)),
        _ => Ok(ports),
    }
}

/// Raises the limit of open files to what the connections need.
///
/// # Errors
/// [`CliError::usage`] where a server could not even open its files.
fn enough_descriptors(config: &Config) -> Result<(), CliError> {
    let found = DescriptorCheck::raise_for(config.limits.connections);
    if found.suffice() {
        return Ok(());
    }
    let soft = found.soft.unwrap_or_default();
    Err(CliError::usage(format!(
        "this process may open {soft} files, and a server needs {LEAST} at least: raise the limit (`ulimit -n`, \
         LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    )))
}

/// Whether the server would be open to other machines without a key, and the configuration does not allow that.
fn is_open(config: &Config) -> bool {
    // A required certificate identifies every caller, as a key does; an optional one does not.
    let certified =
        config.tls.client_ca.is_some() && config.tls.mtls == ClientCertificates::Required;
    !certified && !config.insecure
}

fn open_to_all(name: &ServerName) -> CliError {
    CliError::usage(format!(
        "{name} can be reached from other machines and no key is configured: set --api-key, --key-file or \
         --tls-client-ca, or --insecure to allow it"
    ))
}

/// Serves LMTP lines on a Unix socket, if there is one.
async fn listen(lmtp: &LmtpService, lines: Option<ListeningSocket>) {
    if let Some(socket) = lines {
        lmtp.listen(socket).await;
    }
}

/// The Unix socket for LMTP lines, if one is configured (LM-111).
fn lines(config: &Config) -> Result<Option<ListeningSocket>, CliError> {
    let open = |path: &PathBuf| {
        ListeningSocket::unix(path).map_err(|error| {
            let what = format!("lmtp.unix: cannot listen on {}: {error}", path.display());
            CliError::exit(Exit::Listen, what)
        })
    };
    config.lmtp.unix.as_ref().map(open).transpose()
}

/// Loads the models while the port already answers (OA-902), and supervises them. Returns only if one cannot be loaded.
async fn load(models: ServedModels, planned: Vec<PlannedModel>) -> CliError {
    // After all models are loaded this must not end: its end would end the process.
    let begun = async {
        match models.begin(planned).await {
            Ok(()) => std::future::pending().await,
            Err(failure) => failure,
        }
    };
    // At once: a model that is loaded needs no other one for its supervision.
    tokio::select! {
        failure = begun => failure,
        never = models.supervise() => match never {},
    }
}

pub(super) fn load_tls(config: &Config) -> Result<Option<Arc<Tls>>, CliError> {
    let load = |files| Tls::load(files).map_err(|error| CliError::usage(format!("tls: {error}")));
    Ok(config.tls.files()?.map(load).transpose()?.map(Arc::new))
}

fn server_config(config: &Config, local: bool, tls: Option<Arc<Tls>>) -> sapwood_server::Config {
    let limits = &config.limits;
    sapwood_server::Config {
        listener: listener::Config {
            connections: limits.connections,
            connections_each: limits.connections_each,
            streams_per_connection: limits.streams_per_connection,
            handshake: limits.handshake,
            idle: limits.idle,
            stall: limits.stall,
            header_bytes: limits.header_bytes,
            headers: limits.headers,
        },
        drain: drain::Config {
            grace: config.drain.grace,
            deadline: config.drain.deadline,
            ..drain::Config::default()
        },
        origin: origin::Config {
            origins: config.browser.origins.clone(),
            hosts: config.browser.hosts.clone(),
            loopback: local,
        },
        timeouts: timeouts::Config {
            body_idle: limits.body_idle,
            request: limits.request,
        },
        body_budget: body_budget::Config {
            total: limits.body_bytes_total,
            each: limits.body_bytes_each,
            wait: limits.body_bytes_wait,
        },
        drain_bytes: limits.drain_bytes,
        engine_watchdog: config.engine.watchdog,
        metrics_public: config.auth.metrics_public,
        query_key: config.auth.query_key,
        tls,
    }
}

fn announce(ports: &BoundSockets, config: &Config, planned: &[PlannedModel]) {
    let names: Vec<_> = planned.iter().map(|model| model.name.as_str()).collect();
    let url = |name: &ServerName| match (name, &config.tls.certificate) {
        (ServerName::Tcp(address), None) => format!("http://{address}"),
        (ServerName::Tcp(address), Some(_)) => format!("https://{address}"),
        (ServerName::Unix(_) | ServerName::Unnamed, _) => name.to_string(),
    };
    let name = &ports.common.name;
    tracing::info!(url = url(name), models = names.join(", "), "listening");
    for (port, purpose) in &ports.own {
        let purpose = match purpose {
            PortPurpose::Everything => "everything",
            PortPurpose::Grpc => "gRPC",
            PortPurpose::Metrics => "metrics",
        };
        tracing::info!(url = url(&port.name), purpose, "listening too");
    }
    if matches!(name, ServerName::Tcp(_)) {
        // Only for TCP: `chat` has no scheme for a Unix socket.
        output::whisper(format!("Talk to it: sapwood chat --server {}", url(name)));
    }
}

/// Handles SIGHUP: reloads keys, certificates, the log filter and the servers of pools; everything else needs a
/// restart.
struct Reload {
    serve: ServeCommand,
    common: Common,
    logs: Logs,
    auth: Arc<sapwood_server::auth::Authenticator>,
    tls: Option<Arc<Tls>>,
    pools: Pools,
}

impl Reload {
    /// Reads everything before anything is applied: after an error in any part, all parts are unchanged.
    fn run(&self) -> Result<(), CliError> {
        let config = self.serve.layers(&self.common)?.config()?;
        let keys = keys::load(&config.auth)?;
        // Without this check, a key file emptied by mistake would open the server to every caller.
        // Not where there were none before: such a server was opened on purpose.
        if keys.is_empty() && self.auth.required() {
            return Err(CliError::usage(
                "the configuration has no keys any more; the current keys stay in force",
            ));
        }
        let read = |tls: &Arc<Tls>| {
            let read = tls.prepare();
            read.map_err(|error| CliError::usage(format!("tls: {error}")))
        };
        // Every fallible part comes before the first change, so that a reload is applied whole or not at all.
        let certificates = self.tls.as_ref().map(read).transpose()?.flatten();
        let filter = logs::parse(&config.log)?;
        let pools = self.pools.prepare(&config)?;
        // Nothing fails from here on.
        if let (Some(tls), Some(certificates)) = (&self.tls, certificates) {
            tls.apply(certificates);
        }
        self.logs.replace(filter);
        self.auth.replace(keys);
        pools.apply();
        Ok(())
    }
}

/// The signals of OA-904. Installed before anything else, so that a signal during the start is handled once the server
/// runs.
struct UnixSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl UnixSignals {
    fn install() -> Result<Self, CliError> {
        let listen = |kind| {
            signal(kind).map_err(|error| CliError::new(format!("cannot watch signals: {error}")))
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// The first SIGTERM or SIGINT drains, the second ends the process; SIGHUP reloads.
    async fn watch(mut self, reload: Reload, stop: Arc<Notify>) -> CliError {
        let mut reported = false;
        loop {
            // Waiting for a signal is cancel safe: a signal that arrives meanwhile is returned by the next call.
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
                _ = self.hangup.recv() => {
                    match reload.run() {
                        Ok(()) => tracing::info!("reloaded keys, certificates and log filter"),
                        Err(failure) => tracing::error!(%failure, "not reloaded"),
                    }
                    continue;
                }
            }
            if reported {
                return CliError::exit(Exit::Interrupted, "ended at once after a second signal");
            }
            reported = true;
            output::whisper("Draining running work; interrupt again to end at once.");
            // `notify_one` keeps a permit: the server may not be waiting for it yet.
            stop.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn oa_904_a_signal_or_the_limit_ends_an_end_that_takes_for_ever() {
        let signal = || async { CliError::exit(Exit::Interrupted, "a second signal") };
        let ended = finish(pending(), signal()).await.unwrap_err();
        assert_eq!(ended.exit, Exit::Interrupted);
        let began = tokio::time::Instant::now();
        finish(pending(), pending()).await.unwrap();
        assert_eq!(began.elapsed().as_secs(), END_MAX.as_secs());
        finish(async {}, pending()).await.unwrap();
    }
}
