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
        // 429, as OpenAI's clients know it (D-30).
        (Code::Overloaded, _) => {
            let rejection = Rejection::new(code, ErrorReason::SERVER_OVERLOADED, message);
            return rejection.with_status(StatusCode::TOO_MANY_REQUESTS);
        }
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
        for (code, reason, status, name) in [
            (
                Code::InvalidRequest,
                ErrorReason::INVALID_MODULE,
                400,
                "invalid_module",
            ),
            (
                Code::InvalidRequest,
                ErrorReason::INVALID_GRAMMAR,
                400,
                "invalid_grammar",
            ),
            (
                Code::InvalidRequest,
                ErrorReason::BAD_CONFIG,
                400,
                "invalid_value",
            ),
            (
                Code::InvalidRequest,
                ErrorReason::PROMPT_TOO_LONG,
                400,
                "context_length_exceeded",
            ),
            (
                Code::LimitExceeded,
                ErrorReason::INVALID_MODULE,
                413,
                "invalid_module",
            ),
            (
                Code::NotFound,
                ErrorReason::UNKNOWN_CONTROLLER,
                404,
                "controller_not_found",
            ),
            (
                Code::NotFound,
                ErrorReason::UNKNOWN_TARGET,
                404,
                "model_not_found",
            ),
            (
                Code::PermissionDenied,
                ErrorReason::NONE,
                403,
                "insufficient_scope",
            ),
            (
                Code::RateLimited,
                ErrorReason::RATE_LIMITED,
                429,
                "rate_limit_exceeded",
            ),
            (
                Code::Overloaded,
                ErrorReason::ENGINE_BUSY,
                429,
                "server_overloaded",
            ),
            (
                Code::Unimplemented,
                ErrorReason::NONE,
                400,
                "unsupported_operation",
            ),
            (
                Code::Unavailable,
                ErrorReason::CONTROLLERS_UNAVAILABLE,
                503,
                "controllers_unavailable",
            ),
            (Code::Internal, ErrorReason::NONE, 500, "internal_error"),
        ] {
            let refusal = SteerRefusal {
                code,
                reason,
                message: "why".into(),
            };
            let rejection = of_store(&refusal);
            let given = rejection.http_status.map(|status| status.as_u16());
            assert_eq!(given.unwrap_or(rejection.code.http()), status, "{name}");
            assert_eq!(
                (rejection.reason.name(), &*rejection.message),
                (name, "why")
            );
        }
    }
}
