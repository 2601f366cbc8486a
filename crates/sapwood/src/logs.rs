//! Logs: for people on a terminal, JSON lines otherwise, always on standard error.
//!
//! Owns: the subscriber and its filter, which SIGHUP replaces. Refuses to know: who logs what. Payloads are never
//! logged by anybody.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

use crate::config::layers::no_colour;
use crate::failure::Failure;
use crate::progress::Beside;

/// The filter in force, replaceable.
pub(crate) struct Logs(reload::Handle<EnvFilter, Registry>);

impl Logs {
    /// Starts logging through `filter`.
    ///
    /// # Errors
    /// [`Failure::usage`] if the filter does not read.
    pub(crate) fn start(filter: &str) -> Result<Self, Failure> {
        let (filter, handle) = reload::Layer::new(parse(filter)?);
        let human = stderr().is_terminal();
        let lines = if human {
            fmt::layer()
                .with_writer(|| Beside)
                .with_ansi(!no_colour())
                .with_target(false)
                .boxed()
        } else {
            fmt::layer()
                .json()
                .flatten_event(true)
                .with_writer(|| Beside)
                .boxed()
        };
        // A second subscriber in one process cannot be: only tests could ask for it, and they start processes.
        let _ = tracing_subscriber::registry()
            .with(filter)
            .with(lines)
            .try_init();
        Ok(Self(handle))
    }

    /// Puts another filter in force.
    ///
    /// # Errors
    /// [`Failure::usage`] if the filter does not read; the old one stays.
    pub(crate) fn replace(&self, filter: &str) -> Result<(), Failure> {
        let filter = parse(filter)?;
        self.0
            .reload(filter)
            .map_err(|error| Failure::new(error.to_string()))
    }
}

fn parse(filter: &str) -> Result<EnvFilter, Failure> {
    EnvFilter::builder().parse(filter).map_err(|error| {
        Failure::usage(format!(
            "log: `{filter}` is no filter ({error}); write for example info or sapwood=debug"
        ))
    })
}
