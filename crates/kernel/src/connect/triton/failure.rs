//! Maps errors of a Triton server to errors of the kernel (D-30).

use std::time::Duration;

use sapwood_net::triton;
use sapwood_proto::code::{Code, RetryAdvice};

use crate::error::Error;
use crate::name::Name;

/// The error of a call of `function`. The message never contains the address of the server.
pub(super) fn error(error: triton::Error, function: &Name) -> Error {
    let broken = |why: String| Error::Protocol {
        peer: Name::from(format!("the server of {function}")),
        why,
    };
    match error {
        triton::Error::Truncated => Error::Truncated {
            what: function.clone(),
        },
        triton::Error::Protocol(why) => broken(why.into()),
        triton::Error::Limit { name, max } => broken(format!("{name} are limited to {max}")),
        triton::Error::Unreachable(_) => Error::Unavailable {
            why: format!("the server of {function} does not answer"),
            retry_after: Some(RETRY_AFTER),
        },
        triton::Error::Reply(reply) => match reply.code {
            Code::Cancelled => Error::Cancelled,
            Code::DeadlineExceeded => Error::Deadline,
            code => Error::Remote {
                code,
                reason: reason(code, &reply.message),
                message: reply.message,
                retryable: code.retry() != RetryAdvice::No,
                retry_after: reply.retry_after,
            },
        },
        other => Error::argument(function.clone(), other.to_string()),
    }
}

/// The finer reason, where code and text are unambiguous.
fn reason(code: Code, text: &str) -> Name {
    match code {
        Code::Overloaded => Name::new("ENGINE_BUSY"),
        Code::InvalidRequest if text.contains("exceeds the model's context") => {
            Name::new("PROMPT_TOO_LONG")
        }
        _ => Name::new(""),
    }
}

const RETRY_AFTER: Duration = Duration::from_secs(1);
