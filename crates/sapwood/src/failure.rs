//! The exit codes of a command, and the last line of one that failed (`docs/cli.md`).

use std::fmt;
use std::io;

/// The exit codes. Stable for ever; documented in `docs/cli.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// All went well.
    Ok = 0,
    /// The call failed.
    Failure = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// The server drained, but had to cut running work.
    Cut = 3,
    /// No server answers where one was named.
    Unreachable = 4,
    /// A model cannot be loaded.
    Model = 5,
    /// The address cannot be listened on.
    Listen = 6,
    /// Interrupted by a signal.
    Interrupted = 130,
}

/// Why a command ended early.
#[derive(Debug)]
pub(crate) struct CliError {
    /// The exit code.
    pub(crate) exit: Exit,
    /// One line: what is wrong and what to do. Empty: say nothing.
    pub(crate) message: String,
}

impl CliError {
    /// The general failure.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self::exit(Exit::Failure, message)
    }

    /// A wrong command line or configuration.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::exit(Exit::Usage, message)
    }

    /// A failure with a code of its own.
    pub(crate) fn exit(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Writing to standard output failed. A reader that has seen enough (`| head`) is no failure.
impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::exit(Exit::Ok, "");
        }
        Self::new(format!("cannot write the output: {error}"))
    }
}
