//! Maps errors of a run to statuses of the protocol, and back.

use sapwood_proto::clip;
use sapwood_proto::code::{Code, RetryAdvice};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::{Reason, Status};

use super::offers::{MAX_OFFER_BYTES, MAX_OFFERS};
use crate::error::Error;
use crate::name::Name;

/// The status that a peer receives for `error`, which ended a run of `action`.
pub(crate) fn status(error: &Error, action: &str) -> Status {
    let reason = match error.reason() {
        // The protocol has one name for whatever a controller did; the finer one is a detail (EV-603).
        _ if error.code() == Code::ControllerFailed => Reason::Controller.name().to_owned(),
        // A pattern is a value of the config.
        _ if error.known_reason() == ErrorReason::INVALID_GRAMMAR => {
            Reason::BadConfig.name().to_owned()
        }
        // Errors without a reason come from functions; the protocol requires one of its own names.
        "" => closest(error).name().to_owned(),
        reason => reason.to_owned(),
    };
    let message = clip::message(error.to_string());
    let mut status = Status::other(error.code(), reason, message).with("action", action);
    if let Some(after) = error.retry_after() {
        status.retry_after = Some(after);
    }
    match error {
        Error::Limit { name, max } => status.with("limit", name).with("max", max),
        Error::Argument {
            name,
            why,
            reason: ErrorReason::BAD_CONFIG,
        } => status.with_field(name.as_str(), why.as_str()),
        Error::Argument { name, .. } => status.with("param", name),
        Error::NotFound {
            kind: "input",
            name,
            ..
        } => status.with("param", name),
        _ if error.code() == Code::ControllerFailed && !error.reason().is_empty() => {
            status.with("cause", error.reason())
        }
        _ => status,
    }
}

/// The error that a caller in this process gets for a peer's `status`.
pub(crate) fn error(status: &Status) -> Error {
    match status.known() {
        // These three have their own variants here, which callers match on; the others keep the peer's code and reason.
        Some(Reason::Cancelled) => Error::Cancelled,
        Some(Reason::Deadline) => Error::Deadline,
        Some(Reason::Truncated) => Error::Truncated {
            what: Name::new("a node"),
        },
        _ => Error::Remote {
            code: status.code,
            reason: Name::from(status.reason.to_string()),
            message: status.message.clone(),
            retryable: status.code.retry() != RetryAdvice::No,
            retry_after: status.retry_after,
        },
    }
}

/// The status for a session whose task was dropped with its connection, or has panicked.
pub(super) fn lost() -> Status {
    Status::new(Reason::Function, "the session ended unexpectedly")
}

/// `FUNCTION`, unless the protocol has a closer reason.
fn closest(error: &Error) -> Reason {
    match error {
        Error::Cancelled => Reason::Cancelled,
        Error::Deadline => Reason::Deadline,
        Error::Unavailable { .. } => Reason::EngineBusy,
        Error::Unimplemented { .. } => Reason::Unimplemented,
        Error::Truncated { .. } => Reason::Truncated,
        Error::Unsupported { .. } => Reason::UnsupportedMimetype,
        Error::Released => Reason::NodeReleased,
        // Limits of offers: the number of actions, and the bytes of the document.
        Error::Limit { name, .. } if *name == MAX_OFFERS => Reason::ActionLimit,
        Error::Limit { name, .. } if *name == MAX_OFFER_BYTES => Reason::FlattenLimit,
        _ => Reason::Function,
    }
}
