//! Errors of the kernel as clients of LMTP read them (section 11, D-30).
//!
//! Owns: the one table from codes and reasons to LMTP's. Refuses to know: who is told.

use sapwood_kernel::Error;
use sapwood_proto::code::Code;
use sapwood_proto::lmtp::{Fault, Reason};
use sapwood_proto::shown;

/// How a stream ends that failed so.
pub(super) fn fault(error: &Error) -> Fault {
    let reason = reason(error);
    Fault {
        retry_after: error.retry_after().filter(|_| reason.is_retryable()),
        ..Fault::new(reason, shown::message(error.to_string()))
    }
}

fn reason(error: &Error) -> Reason {
    match error.reason() {
        "PROMPT_TOO_LONG" => return Reason::ContextLengthExceeded,
        "queue_timeout" => return Reason::QueueTimeout,
        "engine_dead" => return Reason::EngineDead,
        "constraint_failed" => return Reason::ConstraintFailed,
        "upstream_error" => return Reason::UpstreamError,
        _ => {}
    }
    match error.code() {
        Code::InvalidRequest => Reason::InvalidValue,
        Code::NotFound => Reason::ModelNotFound,
        Code::Unauthenticated | Code::PermissionDenied => Reason::InsufficientScope,
        Code::LimitExceeded => Reason::InvalidValue,
        Code::RateLimited => Reason::RateLimitExceeded,
        Code::Overloaded => Reason::ServerOverloaded,
        Code::DeadlineExceeded => Reason::Timeout,
        Code::UpstreamFailed => Reason::UpstreamError,
        Code::ControllerFailed => Reason::ControllerFailed,
        Code::Unavailable => Reason::ModelLoading,
        Code::Unimplemented => Reason::UnsupportedOperation,
        // D-11: a model that cuts its connection cuts one of many streams here.
        Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::Cancelled
        | Code::Truncated
        | Code::Aborted
        | Code::Internal => Reason::EngineError,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The whole table, and what is told of it.
    #[test]
    fn lm_502_every_code_has_its_spelling() {
        let told: Vec<_> = Code::ALL
            .iter()
            .map(|&code| {
                let error = Error::Fault {
                    code,
                    reason: "",
                    message: "why".into(),
                    retry_after: Some(Duration::from_secs(3)),
                };
                let fault = fault(&error);
                assert_eq!(fault.message, "why");
                assert!(fault.retry_after.is_none() || fault.reason.is_retryable());
                format!("{}={}", code.name(), fault.reason.name())
            })
            .collect();
        let expect = "invalid-request=invalid_value not-found=model_not_found \
                      already-exists=engine_error unauthenticated=insufficient_scope \
                      permission-denied=insufficient_scope limit-exceeded=invalid_value \
                      rate-limited=rate_limit_exceeded overloaded=server_overloaded \
                      failed-precondition=engine_error cancelled=engine_error deadline-exceeded=timeout \
                      truncated=engine_error upstream-failed=upstream_error controller-failed=controller_failed \
                      unavailable=model_loading unimplemented=unsupported_operation aborted=engine_error \
                      internal=engine_error";
        let mut expect: Vec<_> = expect.split_ascii_whitespace().collect();
        let mut told: Vec<_> = told.iter().map(String::as_str).collect();
        expect.sort_unstable();
        told.sort_unstable();
        assert_eq!(told, expect);
    }

    #[test]
    fn lm_510_finer_reasons_win() {
        for (code, reason, expect) in [
            (
                Code::InvalidRequest,
                "PROMPT_TOO_LONG",
                Reason::ContextLengthExceeded,
            ),
            (Code::Overloaded, "ENGINE_BUSY", Reason::ServerOverloaded),
            (Code::Overloaded, "queue_timeout", Reason::QueueTimeout),
            (Code::Unavailable, "engine_dead", Reason::EngineDead),
        ] {
            let error = Error::Fault {
                code,
                reason,
                message: String::new(),
                retry_after: None,
            };
            assert_eq!(fault(&error).reason, expect);
        }
    }
}
