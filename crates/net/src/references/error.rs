//! Errors of references and of their allow lists.

use sapwood_proto::evergreen::{Reason, Status};

/// Why a reference cannot be read. The texts are safe to send: no path, no address, no credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The URI is not valid for its scheme.
    #[error("a reference is malformed: {0}")]
    Malformed(&'static str),
    /// No list allows it.
    #[error("{what} not allowed here; the operator can allow it with references.{key}")]
    Denied {
        /// The subject of the sentence, with its verb.
        what: &'static str,
        /// The key of the configuration that would allow it.
        key: &'static str,
    },
    /// It is refused regardless of the lists.
    #[error("a reference is refused: {0}")]
    Refused(&'static str),
    /// It does not exist.
    #[error("the content of a reference does not exist")]
    NotFound,
    /// Fetching it failed.
    #[error("a reference could not be fetched: {0}")]
    Failed(&'static str),
    /// The server responded with something other than content.
    #[error("a reference could not be fetched: the server answered with status {0}")]
    Answered(u16),
}

impl Error {
    /// Returns the protocol's status for this error (EV-410).
    #[must_use]
    pub fn status(&self) -> Status {
        let reason = match self {
            Self::Malformed(_) => Reason::RefScheme,
            Self::Denied { .. } | Self::Refused(_) => Reason::RefDenied,
            Self::NotFound => Reason::RefNotFound,
            Self::Failed(_) | Self::Answered(_) => Reason::RefFetch,
        };
        Status::new(reason, self.to_string())
    }
}

/// An invalid entry of a list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("references.{key}: `{entry}`: {why}")]
pub struct BadConfig {
    key: &'static str,
    entry: String,
    why: String,
}

impl BadConfig {
    pub(super) fn new(key: &'static str, entry: &str, why: impl Into<String>) -> Self {
        Self {
            key,
            entry: entry.into(),
            why: why.into(),
        }
    }
}
