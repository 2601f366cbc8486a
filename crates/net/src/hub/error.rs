//! Errors of hubs.

use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderMap, RETRY_AFTER};

use super::exchange::HubAnswer;
use super::listing::is_shown;

/// Why a hub did not send what was requested. Texts of servers are cut to 200 characters, and have no control characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    /// The address, the token or the authorities are invalid.
    #[error("{0}")]
    Address(String),
    /// No server answers there.
    #[error("{host} does not answer ({why})")]
    Unreachable {
        /// The host.
        host: String,
        /// The cause.
        why: String,
    },
    /// The proxy that the request needs cannot be used.
    #[error("{0}")]
    Proxy(String),
    /// A proxy does not pass the request on. 407: it wants another user name or password.
    #[error("{proxy} does not connect to {host} ({status})")]
    ProxyRefused {
        /// The proxy.
        proxy: String,
        /// The host that was to be reached.
        host: String,
        /// The status.
        status: u16,
    },
    /// The token is missing or wrong, or does not give access (401, 403).
    #[error("{host} refuses access ({status}{})", with_message(.message))]
    Denied {
        /// The host.
        host: String,
        /// The status.
        status: u16,
        /// The server's own words.
        message: String,
        /// Whether the server says that it is a gated repository, whose terms have to be accepted on its page.
        gated: bool,
    },
    /// It does not exist (404, 410).
    #[error("{host} does not have it ({status}{})", with_message(.message))]
    NotFound {
        /// The host.
        host: String,
        /// The status.
        status: u16,
        /// The server's own words.
        message: String,
    },
    /// Too many requests (429), or the server is overloaded (5xx).
    #[error("{host} cannot serve it now ({status}{})", with_message(.message))]
    Busy {
        /// The host.
        host: String,
        /// The status.
        status: u16,
        /// The server's own words.
        message: String,
        /// When to try again, as the server says.
        retry_after: Option<Duration>,
    },
    /// Another status.
    #[error("{host} answers with status {status}{}", with_message(.message))]
    Answered {
        /// The host.
        host: String,
        /// The status.
        status: u16,
        /// The server's own words.
        message: String,
    },
    /// The server does not have the requested part: what is there belongs to another version of the file.
    #[error("the server does not have the rest of the file")]
    RangeRefused,
    /// The answer is not what a hub sends.
    #[error("{0}")]
    Protocol(&'static str),
    /// The connection was lost.
    #[error("the connection was lost")]
    Cut,
    /// Nothing was received for too long.
    #[error("the server has stopped sending")]
    Stalled,
}

impl HubError {
    /// Whether the same request may succeed later.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            // A proxy answers so for a host that it does not reach.
            Self::ProxyRefused { status, .. } => *status >= 500,
            Self::Unreachable { .. } | Self::Busy { .. } | Self::Cut | Self::Stalled => true,
            _ => false,
        }
    }

    /// When to try again, if the server says so.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

fn with_message(message: &str) -> String {
    match message {
        "" => String::new(),
        message => format!(": {message}"),
    }
}

/// The error of a status that is no success. The body is not read: hubs say in headers what is wrong.
pub(super) fn refused(answer: &HubAnswer) -> HubError {
    let headers = answer.response.headers();
    let text = |name: &str| {
        let value = headers.get(name).map(|value| value.as_bytes());
        let value = String::from_utf8_lossy(value.unwrap_or_default());
        let chars = value.chars().take(MESSAGE_CHARS_MAX);
        // They are logged and shown on terminals.
        chars
            .map(|c| {
                if is_shown(c) {
                    c
                } else {
                    char::REPLACEMENT_CHARACTER
                }
            })
            .collect::<String>()
    };
    let host = answer.host.clone();
    let (status, message) = (answer.response.status(), text("x-error-message"));
    let code = text("x-error-code");
    let number = status.as_u16();
    match status {
        // The hub answers so for what does not exist, too, if there is no token: the code tells them apart.
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => HubError::Denied {
            host,
            status: number,
            message,
            gated: code == "GatedRepo",
        },
        StatusCode::NOT_FOUND | StatusCode::GONE => HubError::NotFound {
            host,
            status: number,
            message,
        },
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => HubError::Busy {
            host,
            status: number,
            message,
            retry_after: retry_after(headers),
        },
        _ if status.is_server_error() => HubError::Busy {
            host,
            status: number,
            message,
            retry_after: retry_after(headers),
        },
        _ => HubError::Answered {
            host,
            status: number,
            message,
        },
    }
}

/// The seconds of `retry-after`; a date is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?;
    Some(Duration::from_secs(value.trim().parse().ok()?))
}

const MESSAGE_CHARS_MAX: usize = 200;
