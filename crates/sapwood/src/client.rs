//! Where `chat`, `run` and `models` find their functions: on a server, or in this process.
//!
//! Owns: that choice, and what a failed call says to a user. Refuses to know: what is called.

use sapwood_kernel::{Error, Kernel};
use sapwood_proto::code::Code;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Config;
use crate::failure::Failure;
use crate::{models, serving};

/// Functions to call, wherever they run.
pub(crate) struct Place {
    pub(crate) kernel: Kernel,
    /// For people.
    pub(crate) description: String,
}

/// The server that the configuration names; else the local one if it is there; else a kernel of our own.
///
/// # Errors
/// [`Exit::Unreachable`] if a server is named and does not answer; [`Exit::Model`] if the model cannot be loaded.
pub(crate) async fn open(config: &Config) -> Result<Place, Failure> {
    here(config).await
}

/// Loads the configured models into this process.
async fn here(config: &Config) -> Result<Place, Failure> {
    let planned = models::plan(config)?;
    let names: Vec<_> = planned.iter().map(|model| model.name.clone()).collect();
    let kernel = serving::kernel(config, &planned)?;
    serving::load(&kernel, planned, |_, _| {}).await?;
    Ok(Place {
        kernel,
        description: format!("No server: running {} in this process", names.join(", ")),
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

/// Commands that answer are quiet unless asked to talk.
pub(crate) fn log_filter<'a>(config: &'a Config, given: Option<&'a str>) -> &'a str {
    match given {
        Some(filter) => filter,
        None if config.log == Config::default().log => "warn",
        None => &config.log,
    }
}
