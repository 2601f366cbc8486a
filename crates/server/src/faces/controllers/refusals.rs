//! Maps errors of the store and of calls to answers (section 12 of the specification).

use http::StatusCode;
use sapwood_kernel::Error;
use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::SteerRefusal;

use crate::http::rejection::Rejection;

const NOT_FOUND: ErrorReason = ErrorReason::custom("controller_not_found");
const UNSUPPORTED: ErrorReason = ErrorReason::custom("unsupported_operation");
const MODEL_NOT_FOUND: ErrorReason = ErrorReason::custom("model_not_found");
const CONTEXT: ErrorReason = ErrorReason::custom("context_length_exceeded");
const RATE_LIMIT: ErrorReason = ErrorReason::custom("rate_limit_exceeded");

/// The answer to what a store refuses.
pub(super) fn of_store(refusal: &SteerRefusal) -> Rejection {
    refused(refusal.code, refusal.reason, &refusal.message)
}

/// The answer to a call that failed before its first step.
pub(super) fn of_call(error: &Error) -> Rejection {
    let mut rejection = refused(error.code(), error.known_reason(), &error.to_string());
    rejection.retry_after = error.retry_after();
    rejection
}

fn refused(code: Code, reason: ErrorReason, message: &str) -> Rejection {
    let message = clip::message(message.to_owned());
    let (code, reason) = match (code, reason) {
        (Code::NotFound, ErrorReason::UNKNOWN_TARGET | ErrorReason::UNKNOWN_ACTION) => {
            (code, MODEL_NOT_FOUND)
        }
        (Code::NotFound, _) => (code, NOT_FOUND),
        (Code::PermissionDenied, _) => (code, ErrorReason::INSUFFICIENT_SCOPE),
        (Code::Unimplemented, _) => return unsupported(&message),
        (Code::RateLimited, _) => (code, RATE_LIMIT),
        (Code::Overloaded, _) => return overloaded(&message),
        (_, ErrorReason::PROMPT_TOO_LONG) => (Code::InvalidRequest, CONTEXT),
        (Code::InvalidRequest, ErrorReason::INVALID_MODULE | ErrorReason::INVALID_GRAMMAR) => {
            (code, reason)
        }
        (Code::LimitExceeded, ErrorReason::INVALID_MODULE) => (code, reason),
        (Code::Unavailable, ErrorReason::NONE) => (code, ErrorReason::MODEL_LOADING),
        (Code::InvalidRequest | Code::FailedPrecondition, _) => (code, ErrorReason::INVALID_VALUE),
        (Code::Internal, ErrorReason::NONE) => (code, ErrorReason::INTERNAL_ERROR),
        other => other,
    };
    Rejection::new(code, reason, message)
}

/// A member of a request is wrong.
pub(super) fn invalid(message: impl Into<String>) -> Rejection {
    Rejection::new(
        Code::InvalidRequest,
        ErrorReason::INVALID_VALUE,
        clip::message(message.into()),
    )
}

/// Too much waits already. 429, as OpenAI's clients know it (D-30).
pub(super) fn overloaded(message: &str) -> Rejection {
    Rejection::new(Code::Overloaded, ErrorReason::SERVER_OVERLOADED, message)
        .with_status(StatusCode::TOO_MANY_REQUESTS)
}

/// Something of this server failed.
pub(super) fn internal(message: &str) -> Rejection {
    Rejection::new(Code::Internal, ErrorReason::INTERNAL_ERROR, message)
}

/// The server cannot do this. 400 and not 501: clients retry every 5xx (OA-202).
pub(super) fn unsupported(message: &str) -> Rejection {
    Rejection::new(Code::Unimplemented, UNSUPPORTED, message).with_status(StatusCode::BAD_REQUEST)
}

/// There is no such model, or the caller may not know of it.
pub(super) fn model_not_found(name: &str) -> Rejection {
    let message = format!("There is no model {:?} here.", clip::shown(name));
    Rejection::new(Code::NotFound, MODEL_NOT_FOUND, message)
}

/// The prompt and the tokens asked for do not fit.
pub(super) fn context_exceeded(message: String) -> Rejection {
    Rejection::new(Code::InvalidRequest, CONTEXT, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Section 12, the column of HTTP.
    #[test]
    fn ai_901_each_cause_has_its_status_and_code() {
        let table = "invalid-request invalid_module 400 invalid_module
            invalid-request invalid_grammar 400 invalid_grammar
            invalid-request BAD_CONFIG 400 invalid_value
            invalid-request PROMPT_TOO_LONG 400 context_length_exceeded
            limit-exceeded invalid_module 413 invalid_module
            not-found UNKNOWN_CONTROLLER 404 controller_not_found
            not-found UNKNOWN_TARGET 404 model_not_found
            permission-denied - 403 insufficient_scope
            rate-limited RATE_LIMITED 429 rate_limit_exceeded
            overloaded ENGINE_BUSY 429 server_overloaded
            unimplemented - 400 unsupported_operation
            unavailable controllers_unavailable 503 controllers_unavailable
            unavailable - 503 model_loading
            internal - 500 internal_error";
        for line in table.lines() {
            let columns: Vec<_> = line.split_ascii_whitespace().collect();
            let [code, reason, status, name] = columns[..] else {
                panic!("{line}");
            };
            let code = Code::from_name(code).unwrap();
            let reason = ErrorReason::known(reason);
            let refusal = SteerRefusal {
                code,
                reason,
                message: "why".into(),
            };
            let rejection = of_store(&refusal);
            let given = rejection.http_status.map(|status| status.as_u16());
            let given = given.unwrap_or_else(|| rejection.code.http());
            assert_eq!(given.to_string(), status, "{line}");
            assert_eq!(
                (rejection.reason.name(), &*rejection.message),
                (name, "why")
            );
        }
    }
}
