//! Logs on standard error: for people on a terminal, JSON lines otherwise. Payloads are never logged.

use std::io::{self, IsTerminal, Write, stderr};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tracing::{Level, Metadata};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

use crate::config::environment::no_colour;
use crate::failure::CliError;
use crate::log_queue::LogQueue;
use crate::progress::StderrBesideBars;

/// The current log filter, which can be replaced.
pub(crate) struct Logs(reload::Handle<EnvFilter, Registry>);

/// The queue for everything that is written to standard error, once a server has started.
static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// Standard error of this process: written directly, or through the queue of a server.
#[derive(Debug)]
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match QUEUE.get() {
            // One call has one whole line, as the formatter writes it; the queue drops whole lines only.
            Some(queue) => queue.push(bytes),
            None => StderrBesideBars.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Logs {
    /// Starts logging through `filter`.
    ///
    /// # Errors
    /// [`CliError::usage`] if the filter does not parse.
    pub(crate) fn start(filter: &str) -> Result<Self, CliError> {
        // Only the filter is replaced by a reload; the format depends on what standard error is.
        let (filter, handle) = reload::Layer::new(parse(filter)?);
        let human = stderr().is_terminal();
        let lines = if human {
            fmt::layer()
                .with_writer(|| Stderr)
                .with_ansi(!no_colour())
                .with_target(false)
                .boxed()
        } else {
            fmt::layer()
                .json()
                .flatten_event(true)
                .with_writer(|| Stderr)
                .boxed()
        };
        // Fails only if there is a subscriber already. Only tests could set two, and they start processes.
        let _ = tracing_subscriber::registry()
            .with(filter)
            .with(filter_fn(has_no_secret))
            .with(lines)
            .try_init();
        Ok(Self(handle))
    }

    /// The same for a server: from here on no write to standard error waits for its reader, and panics are logged like
    /// everything else.
    ///
    /// # Errors
    /// As [`Self::start`]; or the system provides no thread.
    pub(crate) fn serve(filter: &str) -> Result<Self, CliError> {
        let logs = Self::start(filter)?;
        let missed = |lines| {
            tracing::warn!(
                lines,
                "log lines were dropped: the log was not read in time"
            );
        };
        let queue = LogQueue::start(QUEUE_BYTES, StderrBesideBars, missed)
            .map_err(|error| CliError::new(format!("no thread for the log: {error}")))?;
        // Fails only if it was set before, and a process serves once.
        let _ = QUEUE.set(queue);
        // The default hook writes to standard error directly, and a blocked reader would block the thread that panics.
        std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panicked")));
        Ok(logs)
    }

    /// Replaces the filter.
    pub(crate) fn replace(&self, filter: EnvFilter) {
        // Fails only if the subscriber was dropped, and then there is no log.
        let _ = self.0.reload(filter);
    }
}

/// Number of lines that a server had to drop so far.
pub(crate) fn dropped() -> Arc<AtomicU64> {
    QUEUE.get().map(LogQueue::dropped).unwrap_or_default()
}

/// Writes the queued lines, at the end of the process. Does not wait for a stalled reader.
pub(crate) fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(LAST_LINE);
    }
}

/// Parses a filter.
///
/// # Errors
/// [`CliError::usage`] if it does not parse.
pub(crate) fn parse(filter: &str) -> Result<EnvFilter, CliError> {
    EnvFilter::builder().parse(filter).map_err(|error| {
        CliError::usage(format!(
            "log: `{filter}` is not a valid filter ({error}); write for example info or sapwood=debug"
        ))
    })
}

/// Reads a filter that was written for other programs, which may allow more than ours. `None` if it says nothing here.
pub(crate) fn foreign(filter: &str) -> Option<String> {
    let filter: String = filter.split_whitespace().collect();
    EnvFilter::builder()
        .parse(&filter)
        .is_ok()
        .then_some(filter)
}

/// Whether a line may be written, whatever the filter allows: at `trace`, tungstenite logs the first line of its
/// request, which holds the key of an LMTP address, and every whole message.
fn has_no_secret(line: &Metadata<'_>) -> bool {
    *line.level() != Level::TRACE || !line.target().starts_with("tungstenite")
}

/// Maximum bytes that wait for the reader of the log: some 3,000 lines.
const QUEUE_BYTES: usize = 1 << 20;
/// Timeout at the end of the process for a reader that accepts no line.
const LAST_LINE: Duration = Duration::from_secs(1);
