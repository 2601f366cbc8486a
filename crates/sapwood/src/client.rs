//! Where `chat`, `run` and `models` find their functions: on a server, or in this process.
//!
//! Owns: that choice, the goodbye to a server, and what a failed call says to a user. Refuses to know: what is called.

use std::path::PathBuf;
use std::time::Duration;

use sapwood_kernel::connect::{evergreen, triton};
use sapwood_kernel::{Error, Fun, Kernel};
use sapwood_net::evergreen::{Address, Options, Session};
use sapwood_net::triton::{Address as TritonAddress, Client as TritonClient};
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::Status;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Config;
use crate::failure::{Exit, Failure};
use crate::{models, serving};

/// Functions to call, wherever they run.
pub(crate) struct Place {
    pub(crate) kernel: Kernel,
    /// For people.
    pub(crate) description: String,
    /// With the server, if there is one.
    session: Option<Session>,
}

impl Place {
    /// Takes leave of the server, so that it sees an orderly end. To be called when everything that was called here
    /// has ended or been dropped, on every way out of a command.
    pub(crate) async fn close(self) {
        if let Some(session) = self.session {
            leave(session).await;
        }
    }
}

/// Half-closes a session and waits for its end. A server that does not answer the goodbye must not hold anybody up:
/// then the connection is just dropped.
pub(crate) async fn leave(session: Session) {
    match tokio::time::timeout(GOODBYE, session.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(status)) => tracing::debug!(code = %status.code, "the session had ended before"),
        Err(_) => tracing::debug!("the server did not answer the goodbye"),
    }
}

/// The server that the configuration names; else the local one if it is there; else a kernel of our own.
///
/// # Errors
/// [`Exit::Unreachable`] if a server is named and does not answer; [`Exit::Model`] if the model cannot be loaded.
pub(crate) async fn open(config: &Config) -> Result<Place, Failure> {
    match find(config).await? {
        Some(place) => Ok(place),
        None => here(config).await,
    }
}

/// What can be called without loading anything: on the server, or as configured for this process.
///
/// # Errors
/// As [`open`].
pub(crate) async fn look(config: &Config) -> Result<Place, Failure> {
    if let Some(place) = find(config).await? {
        return Ok(place);
    }
    let planned = models::plan(config)?;
    let kernel = serving::kernel(config, &planned)?;
    Ok(Place {
        kernel,
        description: "No server: what this process would run".into(),
        session: None,
    })
}

/// The server to use, if there is one.
async fn find(config: &Config) -> Result<Option<Place>, Failure> {
    if config.client.server.as_deref() == Some(HERE) {
        return Ok(None);
    }
    if let Some(url) = &config.client.server {
        let there = there(url, config, CONNECT_TIMEOUT).await;
        return there.map(Some).map_err(|status| unreachable(url, &status));
    }
    match there(LOCAL, config, LOCAL_TIMEOUT).await {
        Ok(place) => Ok(Some(place)),
        // It is ours and does not let us in: running something else instead would only confuse.
        Err(status) if status.code == Code::Unauthenticated => Err(unreachable(LOCAL, &status)),
        Err(_) => Ok(None),
    }
}

async fn there(url: &str, config: &Config, timeout: Duration) -> Result<Place, Status> {
    let kernel = Kernel::new();
    let broken = |error: Error| Status::other(error.code(), "", error.to_string());
    let (session, functions) = join(&address(url, config, timeout)?).await?;
    kernel.add_all(functions).map_err(broken)?;
    Ok(Place {
        kernel,
        description: format!("Talking to {url}"),
        session: Some(session),
    })
}

/// The server at `url`, and how this configuration is let in there.
///
/// # Errors
/// The authorities to trust cannot be read.
pub(crate) fn address(url: &str, config: &Config, timeout: Duration) -> Result<Address, Status> {
    let mut address = Address::new(url);
    address.key.clone_from(&config.client.key);
    address.connect_timeout = timeout;
    address.authorities = authorities(config)?;
    Ok(address)
}

/// One session with a server, and its functions as ours. A failed answer must not cost the conversation (EV-930).
///
/// # Errors
/// Nobody answers, the server refuses, or what it lists cannot be read.
pub(crate) async fn join(address: &Address) -> Result<(Session, Vec<Fun>), Status> {
    let options = Options {
        partial_failure: true,
        ..Options::default()
    };
    let session = Session::connect(address, options).await?;
    let broken = |error: Error| Status::other(error.code(), "", error.to_string());
    let functions = evergreen::import(&session).await.map_err(broken)?;
    Ok((session, functions))
}

/// The Triton server at `url`, and how this configuration is let in there.
///
/// # Errors
/// The authorities to trust cannot be read.
pub(crate) fn triton_address(
    url: &str,
    config: &Config,
    timeout: Duration,
) -> Result<TritonAddress, Status> {
    let mut address = TritonAddress::new(url);
    address.key.clone_from(&config.client.key);
    address.connect_timeout = timeout;
    address.authorities = authorities(config)?;
    Ok(address)
}

/// A Triton server that is ready, and its models as functions.
///
/// # Errors
/// Nobody answers, the server refuses, or what it says of its models cannot be read.
pub(crate) async fn join_triton(
    address: &TritonAddress,
) -> Result<(TritonClient, Vec<Fun>), Status> {
    let client = TritonClient::connect(address).await;
    let client = client.map_err(|error| Status::other(error.code(), "", error.to_string()))?;
    let functions = triton::import(&client).await;
    let functions =
        functions.map_err(|error| Status::other(error.code(), "", error.to_string()))?;
    Ok((client, functions))
}

/// The authorities that the configuration adds to the well-known ones.
fn authorities(config: &Config) -> Result<Option<Vec<u8>>, Status> {
    let read = |path: &PathBuf| {
        std::fs::read(path).map_err(|error| {
            let message = format!("client.ca {}: {error}", path.display());
            Status::other(Code::InvalidRequest, "", message)
        })
    };
    config.client.ca.as_ref().map(read).transpose()
}

/// Refused is answered: only silence is unreachable.
pub(crate) fn unreachable(url: &str, status: &Status) -> Failure {
    match status.code {
        Code::Unauthenticated | Code::PermissionDenied => Failure::new(format!(
            "{url} does not let us in: {}; give a key with --api-key or SAPWOOD_API_KEY",
            status.message
        )),
        Code::InvalidRequest | Code::Unimplemented => {
            Failure::usage(format!("--server {url}: {}", status.message))
        }
        _ => Failure::exit(
            Exit::Unreachable,
            format!(
                "no server answers at {url}; start one with `sapwood serve`, or correct the address"
            ),
        ),
    }
}

/// Loads the configured models into this process.
async fn here(config: &Config) -> Result<Place, Failure> {
    let planned = models::plan(config)?;
    let names: Vec<_> = planned.iter().map(|model| model.name.clone()).collect();
    let kernel = serving::kernel(config, &planned)?;
    serving::load(&kernel, planned, |_, _, _| {}).await?;
    Ok(Place {
        kernel,
        description: format!("No server: running {} in this process", names.join(", ")),
        session: None,
    })
}

/// What a failed call says: the message, the finer reason, and what to do about it where we know.
pub(crate) fn told(error: &Error) -> Failure {
    let reason = match error.reason() {
        "" => String::new(),
        reason => format!(" ({reason})"),
    };
    let hint = match error.code() {
        Code::Unauthenticated => "; give a key with --api-key or SAPWOOD_API_KEY",
        Code::Overloaded | Code::RateLimited => "; try again later",
        _ => "",
    };
    Failure::new(format!("{error}{reason}{hint}"))
}

/// Ctrl-C from now on. Made once for each thing that can be interrupted: a listener made anew would miss what came
/// between.
pub(crate) fn interrupts() -> Result<Signal, Failure> {
    signal(SignalKind::interrupt())
        .map_err(|error| Failure::new(format!("cannot watch signals: {error}")))
}

/// Instead of a URL: no server at all.
const HERE: &str = "here";
const LOCAL: &str = "http://127.0.0.1:8000";
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A server on this machine accepts at once or not at all.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(1);
const GOODBYE: Duration = Duration::from_secs(2);
