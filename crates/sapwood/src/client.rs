//! Finds the functions for `chat`, `run` and `models`: on a server, or in this process.

use std::time::Duration;

use sapwood_engine::recommended::RecommendedSampling;
use sapwood_kernel::connect::evergreen::Listing;
use sapwood_kernel::connect::{evergreen, triton};
use sapwood_kernel::{Error, Fun, Kernel};
use sapwood_net::evergreen::{ClientSession, ClientSessionOptions};
use sapwood_net::triton::TritonClient;
use sapwood_net::{NO_ANSWER, ServerAddress, UNTRUSTED};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use sapwood_proto::secret::masked;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::endpoint::{ServerAccess, warn_of_plain_text};
use crate::config::{Config, DEMO};
use crate::controllers::ProcessControllers;
use crate::failure::{CliError, Exit};
use crate::hub::ModelCache;
use crate::models::PlannedModel;
use crate::{model_loading, models};

/// Functions that can be called, of a server or of this process.
pub(crate) struct ClientTarget {
    pub(crate) kernel: Kernel,
    /// The default model, of calls that name none.
    pub(crate) default: Option<String>,
    /// The server; `None`: this process.
    pub(crate) url: Option<String>,
    /// The demo model, if it runs in this process.
    demo: Option<String>,
    /// The session with the server, if there is one.
    session: Option<ClientSession>,
    /// Holds the locks of models in this process.
    cache: ModelCache,
}

impl ClientTarget {
    /// The names of the models.
    pub(crate) fn models(&self) -> Vec<String> {
        let specs = self.kernel.specs();
        let models = specs.iter().filter(|spec| spec.generates());
        models.map(|spec| spec.name.as_str().to_owned()).collect()
    }

    /// The model that serves `target`, if it is known.
    pub(crate) fn model(&self, target: Option<&str>) -> Option<String> {
        let only = || match &self.models()[..] {
            [only] => Some(only.clone()),
            _ => None,
        };
        // In the order in which GENERATE itself chooses.
        let asked = target.map(str::to_owned);
        asked.or_else(|| self.default.clone()).or_else(only)
    }

    /// The sampling values that the model of `target` recommends (D-53).
    pub(crate) fn recommended(&self, target: Option<&str>) -> RecommendedSampling {
        let model = self.model(target);
        let function = model.and_then(|model| self.kernel.get(&model).ok());
        function
            .map(|function| function.spec().sampling)
            .unwrap_or_default()
    }

    /// Whether the demo model serves `target`. On a server it is recognised by its name.
    pub(crate) fn is_demo(&self, target: Option<&str>) -> bool {
        let model = self.model(target);
        // A server does not say which of its models is built in.
        let demo = match self.url {
            Some(_) => Some(DEMO),
            None => self.demo.as_deref(),
        };
        model.is_some() && model.as_deref() == demo
    }

    /// The model and where it runs, as text for people (D-52).
    pub(crate) fn greeting(&self, target: Option<&str>) -> String {
        let place = match &self.url {
            Some(url) => format!("at {url}"),
            None => "in this process".to_owned(),
        };
        match self.model(target) {
            Some(model) => format!("Talking to {model} {place}."),
            None => format!(
                "Talking to the models {place}; choose one with /model or --target: {}.",
                self.models().join(", ")
            ),
        }
    }

    fn of_this_process(kernel: Kernel, config: &Config, planned: &[PlannedModel]) -> Self {
        let demo = planned.iter().find(|model| model.is_demo());
        Self {
            kernel,
            default: config.default_model.clone(),
            url: None,
            demo: demo.map(|model| model.name.clone()),
            session: None,
            cache: ModelCache::new(&config.hub),
        }
    }

    /// Closes the session in order. To be called when all calls have ended or been dropped, on every way out of a
    /// command.
    pub(crate) async fn close(self) {
        if let Some(session) = self.session {
            leave(session).await;
        }
    }
}

/// Half-closes a session and waits for its end. If a server does not answer within the limit, the connection is just
/// dropped.
pub(crate) async fn leave(session: ClientSession) {
    match tokio::time::timeout(GOODBYE, session.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(status)) => tracing::debug!(code = %status.code, "the session had ended before"),
        Err(_) => tracing::debug!("the server did not answer the half-close"),
    }
}

/// Connects to the server that the configuration names; else to the local one if it is running; else makes a kernel in
/// this process.
///
/// In this process a model with `load = "first_use"` is loaded if it is `wanted`, or if what is wanted is not the name of a
/// model.
///
/// # Errors
/// [`Exit::Unreachable`] if the named server does not answer; [`Exit::Model`] if the model cannot be loaded.
pub(crate) async fn open(config: &Config, wanted: Option<&str>) -> Result<ClientTarget, CliError> {
    match find(config).await? {
        Some(target) => Ok(target),
        None => here(config, wanted).await,
    }
}

/// The functions that exist without loading a model: those of the server, or those configured for this process.
///
/// # Errors
/// As [`open`].
pub(crate) async fn look(config: &Config) -> Result<ClientTarget, CliError> {
    if let Some(target) = find(config).await? {
        return Ok(target);
    }
    let planned = models::plan_without_server(config)?;
    let kernel = model_loading::kernel(config, &planned)?;
    Ok(ClientTarget::of_this_process(kernel, config, &planned))
}

/// The server to use, if there is one.
async fn find(config: &Config) -> Result<Option<ClientTarget>, CliError> {
    if let Some(url) = &config.client.server {
        if url.expose() == HERE {
            return Ok(None);
        }
        // A server that was named is never replaced by a model in this process: its user would talk to another model
        // unnoticed.
        let there = there(url.expose(), config, CONNECT_TIMEOUT).await;
        return there
            .map(Some)
            .map_err(|status| unreachable(&url.to_string(), &status));
    }
    let Some(local) = local(config) else {
        return Ok(None);
    };
    match there(&local, config, LOCAL_TIMEOUT).await {
        Ok(target) => Ok(Some(target)),
        // A Sapwood server that refuses our key: running a model in this process instead would only confuse.
        Err(status) if status.code == Code::Unauthenticated || status.reason == UNTRUSTED => {
            Err(unreachable(&local, &status))
        }
        // Whatever else listens there, it is no server of ours, and the model can run here.
        Err(_) => Ok(None),
    }
}

/// The address at which clients on this machine reach a server of this configuration.
fn local(config: &Config) -> Option<String> {
    let listen = &config.listen;
    let (host, port) = listen
        .rsplit_once(':')
        .filter(|(host, _)| *host != "unix")?;
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host {
        // A client cannot connect to the unspecified address everywhere.
        "0.0.0.0" | "" => "127.0.0.1",
        "[::]" => "[::1]",
        host => host,
    };
    let scheme = if config.tls.certificate.is_some() {
        "https"
    } else {
        "http"
    };
    Some(format!("{scheme}://{host}:{port}"))
}

/// The server for commands that use REST routes: the one that the configuration names, or the local one.
///
/// # Errors
/// [`Exit::Usage`] if there is none: this process serves no routes.
pub(crate) fn rest_address(config: &Config) -> Result<ServerAddress, CliError> {
    let named = config.client.server.as_ref().map(|url| url.expose());
    let url = match named {
        Some(HERE) => None,
        Some(url) => Some(url.to_owned()),
        None => local(config),
    };
    let url = url.ok_or_else(|| {
        CliError::usage("this command needs a server: name one with --server http://HOST:PORT")
    })?;
    Ok(address(&url, config.client.access()?, CONNECT_TIMEOUT))
}

async fn there(url: &str, config: &Config, timeout: Duration) -> Result<ClientTarget, Status> {
    let kernel = Kernel::new();
    let broken = |error: Error| Status::other(error.code(), "", error.to_string());
    let access = config.client.access();
    let access = access.map_err(|failure| Status::other(Code::InvalidRequest, "", failure.message));
    // A local port that accepts connections and sends nothing is no server; the timeout is short, because a person
    // waits.
    let address = address(url, access?, timeout);
    // The connect timeout alone is not enough: TLS, HTTP/2 and the listing each wait for the server as well.
    let joined = tokio::time::timeout(ANSWER_TIMEOUT, join(&address)).await;
    let silent = || Status::other(Code::Unavailable, SILENT, "it does not answer");
    let (session, listing) = joined.map_err(|_| silent())??;
    // A kernel of its own, so that names of the server cannot collide with functions of this process.
    kernel.add_all(listing.functions).map_err(broken)?;
    Ok(ClientTarget {
        kernel,
        default: listing.default_target.map(|name| name.as_str().to_owned()),
        url: Some(masked(url)),
        demo: None,
        session: Some(session),
        cache: ModelCache::new(&config.hub),
    })
}

/// The server at `url`, with the credentials of `access`.
pub(crate) fn address(url: &str, access: ServerAccess, timeout: Duration) -> ServerAddress {
    let mut address = ServerAddress::new(url);
    address.key = access.key;
    address.connect_timeout = timeout;
    address.authorities = access.authorities;
    if address.exposes_key() {
        warn_of_plain_text(&masked(url));
    }
    address
}

/// Opens one session with a server. Its functions can be called here. A failed answer must not end the conversation
/// (EV-930).
///
/// # Errors
/// No server answers, it refuses, or its listing cannot be read.
pub(crate) async fn join(address: &ServerAddress) -> Result<(ClientSession, Listing), Status> {
    let options = ClientSessionOptions {
        partial_failure: true,
        ..ClientSessionOptions::default()
    };
    let session = ClientSession::connect(address, options).await?;
    let broken = |error: Error| Status::other(error.code(), "", error.to_string());
    let listing = evergreen::list(&session).await.map_err(broken)?;
    Ok((session, listing))
}

/// Connects to a ready Triton server, with its models as functions.
///
/// # Errors
/// No server answers, it refuses, or its model metadata cannot be read.
pub(crate) async fn join_triton(
    address: &ServerAddress,
) -> Result<(TritonClient, Vec<Fun>), Status> {
    let client = TritonClient::connect(address).await;
    let client = client.map_err(|error| Status::other(error.code(), "", error.to_string()))?;
    let functions = triton::import(&client).await;
    let functions =
        functions.map_err(|error| Status::other(error.code(), "", error.to_string()))?;
    Ok((client, functions))
}

/// A refusal is an answer: only a server that does not answer is unreachable.
pub(crate) fn unreachable(url: &str, status: &Status) -> CliError {
    if status.reason == UNTRUSTED {
        let what = format!(
            "{url}: {}; if the address is right, name the authority that signed its certificate with --ca FILE \
             (client.ca), or correct it",
            status.message
        );
        return CliError::exit(Exit::Unreachable, what);
    }
    if status.reason == SILENT {
        let what = format!(
            "{url} accepts connections but did not answer for {} seconds; check that it is a Sapwood server (and that \
             http:// or https:// is right), and restart it if it hangs",
            ANSWER_TIMEOUT.as_secs()
        );
        return CliError::exit(Exit::Unreachable, what);
    }
    match status.code {
        Code::Unauthenticated | Code::PermissionDenied => CliError::new(format!(
            "{url} refused access: {}; give a key with --api-key or SAPWOOD_CLIENT_KEY",
            status.message
        )),
        Code::InvalidRequest | Code::Unimplemented => {
            CliError::usage(format!("--server {url}: {}", status.message))
        }
        Code::Unavailable if status.reason == NO_ANSWER => CliError::exit(
            Exit::Unreachable,
            format!(
                "no server answers at {url}; start one with `sapwood serve`, or correct the address"
            ),
        ),
        // A server is running: starting another one would not help.
        _ => CliError::exit(
            Exit::Unreachable,
            format!("the server at {url} cannot be used: {}", status.message),
        ),
    }
}

/// Loads the configured models into this process.
async fn here(config: &Config, wanted: Option<&str>) -> Result<ClientTarget, CliError> {
    let mut planned = models::plan_without_server(config)?;
    let kernel = model_loading::kernel(config, &planned)?;
    let target = ClientTarget::of_this_process(kernel, config, &planned);
    // A server loads it with its first call; here that one call is known.
    if planned.iter().any(|it| Some(it.name.as_str()) == wanted) {
        planned.retain(|it| {
            let is_loaded = it.residence.is_at_start() || Some(it.name.as_str()) == wanted;
            if !is_loaded {
                let what = "is loaded only if it is named at the start (load = \"first_use\")";
                let kernel = &target.kernel;
                kernel.replace(model_loading::absent_instead(kernel, &it.name, what));
            }
            is_loaded
        });
    }
    let controllers = ProcessControllers::new(&config.controllers)?;
    let cache = &target.cache;
    model_loading::load(&target.kernel, &controllers, cache, planned).await?;
    Ok(target)
}

/// The text of a failed call: the message, the finer reason, and a remedy where one is known.
pub(crate) fn to_cli_error(error: &Error) -> CliError {
    let reason = match error.reason() {
        "" => String::new(),
        reason => format!(" ({reason})"),
    };
    let hint = match error.code() {
        Code::Unauthenticated => "; give a key with --api-key or SAPWOOD_CLIENT_KEY",
        Code::Overloaded | Code::RateLimited => "; try again later",
        _ => "",
    };
    CliError::new(format!("{error}{reason}{hint}"))
}

/// A stream of Ctrl-C signals from now on. Created once for each thing that can be interrupted: a new listener would
/// miss signals that arrive between two.
pub(crate) fn interrupts() -> Result<Signal, CliError> {
    signal(SignalKind::interrupt())
        .map_err(|error| CliError::new(format!("cannot watch signals: {error}")))
}

/// In place of a URL: use no server.
pub(crate) const HERE: &str = "here";
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A server on this machine accepts a connection at once or not at all.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for connecting and for the server's listing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const GOODBYE: Duration = Duration::from_secs(2);
/// The reason of a status for a server that did not answer in time.
const SILENT: &str = "SILENT_SERVER";

#[cfg(test)]
mod tests {
    use sapwood_kernel::Node;
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;

    /// A server would load it with its first call; here that call is known.
    #[tokio::test]
    async fn a_model_that_is_loaded_on_first_use_is_loaded_if_it_is_wanted() {
        use crate::config::{BackendConfig, LoadTime, ServedModelConfig};
        let mut config = Config::default();
        for (name, load) in [
            ("one", None),
            ("two", None),
            ("start", Some(LoadTime::Start)),
        ] {
            config.models.push(ServedModelConfig {
                name: name.into(),
                backend: BackendConfig::Scripted,
                load,
                ..ServedModelConfig::default()
            });
        }
        config.engine.load = LoadTime::FirstUse;
        for (wanted, loaded) in [
            (Some("one"), [true, false, true]),
            (Some("generate"), [true; 3]),
            (None, [true; 3]),
        ] {
            let target = here(&config, wanted).await.unwrap();
            for (name, is_loaded) in ["one", "two", "start"].into_iter().zip(loaded) {
                let inputs = [("prompt", Node::from("x"))];
                let run = target.kernel.run::<String>(name, inputs).await;
                assert_eq!(run.is_ok(), is_loaded, "{wanted:?} {name}: {run:?}");
            }
        }
    }

    /// Accepts every connection and never sends anything: no HTTP/2, no TLS, no upgrade.
    #[tokio::test(start_paused = true)]
    async fn a_silent_server_counts_as_unreachable_after_ten_seconds() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let taking = tokio::spawn(async move {
            let mut taken = Vec::new();
            loop {
                taken.push(listener.accept().await.unwrap());
            }
        });
        for scheme in ["http", "https", "ws", "wss"] {
            let url = format!("{scheme}://127.0.0.1:{port}");
            let mut config = Config::default();
            config.client.server = Some(url.clone().into());
            let began = Instant::now();
            let failure = open(&config, None).await.err().expect("nobody answers");
            let waited = began.elapsed();
            assert!(waited <= Duration::from_secs(11), "{url}: {waited:?}");
            assert_eq!(failure.exit, Exit::Unreachable, "{url}: {failure}");
            assert!(failure.message.contains(&url), "{failure}");
        }
        taking.abort();
    }
}
