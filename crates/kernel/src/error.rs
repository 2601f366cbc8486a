//! The kernel's error type.
//!
//! Messages contain nothing that a client must not see: no payload, path, query or credential.

use std::sync::Arc;
use std::time::Duration;

use sapwood_engine::api;
use sapwood_proto::clip::{SHOWN_BYTES_MAX, message, shown};
use sapwood_proto::code::{Blame, Code, RetryAdvice};
use sapwood_proto::error_reason::ErrorReason;

use crate::name::{Mime, Name};

/// Why a stream ended early; always its last item (KE-311). Cloneable, because nodes replay it.
#[non_exhaustive]
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A name that does not exist.
    #[error("there is no {kind} {name:?}{}", listed(known))]
    NotFound {
        /// `function`, `model`, `input`, `recording`, `controller`.
        kind: &'static str,
        /// The requested name.
        name: Name,
        /// Up to 20 names that exist, for people.
        known: Box<[Name]>,
    },
    /// A name that is already registered.
    #[error("{name:?} exists already; use replace, or another name")]
    Exists {
        /// The name.
        name: Name,
    },
    /// The function cannot produce the requested type (KE-142).
    #[error("{function} gives {}, not {}", mimes(produced), mimes(wanted))]
    Unsupported {
        /// The function.
        function: Name,
        /// The types that it produces.
        produced: Box<[Mime]>,
        /// The requested type.
        wanted: Box<[Mime]>,
    },
    /// An input, a port or a setting is invalid.
    #[error("{name}: {why}")]
    Argument {
        /// The input, port or field.
        name: Name,
        /// What is wrong, and what would be valid.
        why: String,
        /// The finer, stable name (`BAD_CONFIG`, `MISSING_INPUT` …), if there is one.
        reason: ErrorReason,
    },
    /// Bytes cannot be decoded as the requested type.
    #[error("not {wanted}: {why}")]
    Decode {
        /// The type.
        wanted: Name,
        /// Position and reason; never the bytes.
        why: String,
    },
    /// The stream ended without its final marker (KE-313).
    #[error("{what} ended before it was finished")]
    Truncated {
        /// What ended.
        what: Name,
    },
    /// A violation of order, port, mimetype or framing.
    #[error("{peer} broke the protocol: {why}")]
    Protocol {
        /// The peer.
        peer: Name,
        /// The violation.
        why: String,
    },
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The deadline has passed.
    #[error("the deadline has passed")]
    Deadline,
    /// A named limit was exceeded.
    #[error("{name} is limited to {max}")]
    Limit {
        /// The limit's name.
        name: &'static str,
        /// Its value.
        max: u64,
    },
    /// The requested data was released (KE-125).
    #[error("the beginning of this stream has been released")]
    Released,
    /// A call waits for itself.
    #[error("a stream waits for itself: {path}")]
    Cycle {
        /// Where.
        path: String,
    },
    /// A layer refused.
    #[error("denied: {why}")]
    Denied {
        /// The reason.
        why: String,
    },
    /// The peer reported an error.
    #[error("{message}")]
    Remote {
        /// Its code.
        code: Code,
        /// Its reason, or empty.
        reason: Name,
        /// Its message.
        message: String,
        /// Whether the peer reported that a retry can help.
        retryable: bool,
        /// When to retry, as the peer reported.
        retry_after: Option<Duration>,
    },
    /// It cannot be done at the moment.
    #[error("not available: {why}")]
    Unavailable {
        /// The reason.
        why: String,
        /// When to retry.
        retry_after: Option<Duration>,
    },
    /// The caller has used up a rate limit (OA-906).
    #[error("{why}")]
    RateLimited {
        /// The limit, and what to do.
        why: String,
        /// When there will be enough again; `None` if never enough for the requested amount.
        retry_after: Option<Duration>,
    },
    /// Known, but not built or not enabled here (D-19).
    #[error("{what} is not supported here")]
    Unimplemented {
        /// The feature.
        what: String,
    },
    /// An error with a code of its own, from an engine or a session that serves the run.
    #[error("{message}")]
    Engine {
        /// The error code.
        code: Code,
        /// The finer, stable name, if there is one.
        reason: ErrorReason,
        /// A message for people. Contains nothing that a client must not see.
        message: String,
        /// When a retry is worthwhile, if that is known.
        retry_after: Option<Duration>,
    },
    /// A function panicked (KE-139). The panic message is in the log.
    #[error("{function} failed unexpectedly")]
    Panicked {
        /// The function.
        function: Name,
    },
    /// User code failed.
    #[error("{0}")]
    Function(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// An [`Error::Argument`] without a finer reason.
    pub fn argument(name: impl Into<Name>, why: impl Into<String>) -> Self {
        let name: Name = name.into();
        Self::Argument {
            // A name can be text of a client, of any length (D-47).
            name: if name.as_str().len() > SHOWN_BYTES_MAX {
                Name::shared(&shown(name.as_str()))
            } else {
                name
            },
            why: message(why.into()),
            reason: ErrorReason::NONE,
        }
    }

    /// An [`Error::NotFound`] that lists the existing names.
    pub fn not_found(
        kind: &'static str,
        name: &str,
        known: impl IntoIterator<Item = Name>,
    ) -> Self {
        Self::NotFound {
            kind,
            // The name that was looked up may contain any text of a client.
            name: Name::shared(&shown(name)),
            known: known.into_iter().take(20).collect(),
        }
    }

    /// An error of user code. If it is a kernel error, it is returned as it is, not wrapped twice (KE-211).
    pub fn function(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        match source.into().downcast::<Self>() {
            Ok(error) => *error,
            Err(source) => Self::Function(source.into()),
        }
    }

    /// Sets this finer reason, where the variant has one.
    #[must_use]
    pub fn because(mut self, finer: impl Into<ErrorReason>) -> Self {
        if let Self::Argument { reason, .. } | Self::Engine { reason, .. } = &mut self {
            *reason = finer.into();
        }
        self
    }

    /// The error code.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::NotFound { .. } => Code::NotFound,
            Self::Exists { .. } => Code::AlreadyExists,
            Self::Unsupported { .. } | Self::Argument { .. } | Self::Cycle { .. } => {
                Code::InvalidRequest
            }
            // What cannot be decoded came from a function or a peer; bad input of the caller is an `Argument`.
            Self::Decode { .. } | Self::Protocol { .. } => Code::Internal,
            Self::Panicked { .. } | Self::Function(_) => Code::Internal,
            Self::Truncated { .. } => Code::Truncated,
            Self::Cancelled => Code::Cancelled,
            Self::Deadline => Code::DeadlineExceeded,
            Self::Limit { .. } => Code::LimitExceeded,
            Self::Released => Code::FailedPrecondition,
            Self::Denied { .. } => Code::PermissionDenied,
            Self::Remote { code, .. } | Self::Engine { code, .. } => *code,
            Self::Unavailable { .. } => Code::Unavailable,
            Self::RateLimited { .. } => Code::RateLimited,
            Self::Unimplemented { .. } => Code::Unimplemented,
        }
    }

    /// The finer, stable name beside the code, or empty.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::NotFound { kind, .. } => match *kind {
                "function" => ErrorReason::UNKNOWN_ACTION.name(),
                "model" => ErrorReason::UNKNOWN_TARGET.name(),
                "controller" => ErrorReason::UNKNOWN_CONTROLLER.name(),
                "input" => ErrorReason::UNKNOWN_PARAM.name(),
                _ => "",
            },
            Self::Argument { reason, .. } | Self::Engine { reason, .. } => reason.name(),
            Self::Remote { reason, .. } => reason,
            Self::Panicked { .. } | Self::Function(_) => ErrorReason::FUNCTION.name(),
            Self::Deadline => ErrorReason::DEADLINE.name(),
            Self::RateLimited { .. } => ErrorReason::RATE_LIMITED.name(),
            _ => "",
        }
    }

    /// The reason, to be matched; [`ErrorReason::NONE`] for one of a peer that has no constant here.
    #[must_use]
    pub fn known_reason(&self) -> ErrorReason {
        match self {
            Self::Argument { reason, .. } | Self::Engine { reason, .. } => *reason,
            // Only a name from the wire is looked up.
            other => ErrorReason::known(other.reason()),
        }
    }

    /// Who caused the error.
    #[must_use]
    pub const fn blame(&self) -> Blame {
        match self {
            // Producers are functions and peers on our side: to the caller they are all the server, not the client.
            Self::Protocol { .. } => Blame::Upstream,
            other => other.code().blame(),
        }
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Remote { retryable, .. } => *retryable,
            Self::RateLimited { retry_after, .. } => retry_after.is_some(),
            other => other.code().retry() != RetryAdvice::No,
        }
    }

    /// When to retry: as the peer or server reported, or after a second where the server is busy.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Engine {
                code, retry_after, ..
            } if code.retry() == RetryAdvice::Later => retry_after.or(Some(Duration::from_secs(1))),
            Self::Remote { retry_after, .. }
            | Self::Unavailable { retry_after, .. }
            | Self::RateLimited { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The HTTP status: the code's, except where the kernel's table is finer.
    #[must_use]
    pub fn http(&self) -> u16 {
        match self {
            Self::Unsupported { .. } => 406,
            Self::Protocol { .. } => 502,
            Self::Released => 410,
            Self::Limit { name, .. } if !name.contains("bytes") => 429,
            other => other.code().http(),
        }
    }
}

impl From<api::EngineError> for Error {
    fn from(error: api::EngineError) -> Self {
        Self::Engine {
            code: error.code,
            reason: error.reason,
            message: error.message,
            retry_after: error.retry_after,
        }
    }
}

fn listed(known: &[Name]) -> String {
    if known.is_empty() {
        return String::new();
    }
    format!("; there are: {}", known.join(", "))
}

fn mimes(list: &[Mime]) -> String {
    if list.is_empty() {
        return "nothing".into();
    }
    let texts: Vec<&str> = list.iter().map(Mime::as_str).collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests;
