//! The exit codes of a command, and the last line of one that failed (`docs/cli.md`).

use std::fmt;
use std::io;

/// The exit codes. Stable for ever; documented in `docs/cli.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Success.
    Ok = 0,
    /// The call failed.
    Failure = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// The server drained, but had to abort running work; of `aicirt`: the shared memory became unusable.
    Cut = 3,
    /// The named server does not answer.
    Unreachable = 4,
    /// A model cannot be loaded.
    Model = 5,
    /// The address cannot be bound.
    Listen = 6,
    /// Interrupted by a signal.
    Interrupted = 130,
}

/// The error of a command.
#[derive(Debug)]
pub(crate) struct CliError {
    /// The exit code.
    pub(crate) exit: Exit,
    /// One line: the error and a remedy. Empty: print nothing.
    pub(crate) message: String,
}

impl CliError {
    /// A general error.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self::exit(Exit::Failure, message)
    }

    /// A wrong command line or configuration.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::exit(Exit::Usage, message)
    }

    /// An error with this exit code.
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

/// Writing to standard output failed. If the reader closed it early (`| head`), that is no error.
impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            // Rust ignores SIGPIPE, so without this `| head` would end with an error message.
            return Self::exit(Exit::Ok, "");
        }
        Self::new(format!("cannot write the output: {error}"))
    }
}
