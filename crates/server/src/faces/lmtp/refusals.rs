//! Maps errors of the kernel to LMTP errors (section 11, D-30).

use sapwood_kernel::Error;
use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::lmtp::{LmtpError, LmtpReason};

/// The error with which a stream ends whose call failed with `error`.
pub(super) fn to_lmtp_error(error: &Error) -> LmtpError {
    let reason = reason(error);
    LmtpError {
        // A delay beside `retryable: false` would contradict it.
        retry_after: error.retry_after().filter(|_| reason.is_retryable()),
        ..LmtpError::new(reason, clip::message(error.to_string()))
    }
}

fn reason(error: &Error) -> LmtpReason {
    // Before the code: these are finer than it, and LMTP has a reason of its own for each.
    match error.known_reason() {
        ErrorReason::PROMPT_TOO_LONG => return LmtpReason::ContextLengthExceeded,
        ErrorReason::QUEUE_TIMEOUT => return LmtpReason::QueueTimeout,
        ErrorReason::ENGINE_DEAD => return LmtpReason::EngineDead,
        ErrorReason::CONSTRAINT_FAILED => return LmtpReason::ConstraintFailed,
        ErrorReason::UPSTREAM_ERROR => return LmtpReason::UpstreamError,
        // Not `model_not_found`: the model is there (LM-971).
        ErrorReason::UNKNOWN_CONTROLLER => return LmtpReason::ControllerFailed,
        ErrorReason::CONTROLLERS_UNAVAILABLE => return LmtpReason::ControllerFailed,
        _ => {}
    }
    match error.code() {
        Code::InvalidRequest => LmtpReason::InvalidValue,
        Code::NotFound => LmtpReason::ModelNotFound,
        Code::Unauthenticated | Code::PermissionDenied => LmtpReason::InsufficientScope,
        Code::LimitExceeded => LmtpReason::InvalidValue,
        Code::RateLimited => LmtpReason::RateLimitExceeded,
        Code::Overloaded => LmtpReason::ServerOverloaded,
        Code::DeadlineExceeded => LmtpReason::Timeout,
        Code::UpstreamFailed => LmtpReason::UpstreamError,
        Code::ControllerFailed => LmtpReason::ControllerFailed,
        Code::Unavailable => LmtpReason::ModelLoading,
        Code::Unimplemented => LmtpReason::UnsupportedOperation,
        // D-11: a script's `cut` ends the transport, but this one is shared with other streams, so the stream fails.
        Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::Cancelled
        | Code::Truncated
        | Code::Aborted
        | Code::Internal => LmtpReason::EngineError,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn lm_502_every_code_has_a_reason_and_only_retryable_ones_a_delay() {
        let reported: Vec<_> = Code::ALL
            .iter()
            .map(|&code| {
                let error = Error::Engine {
                    code,
                    reason: ErrorReason::NONE,
                    message: "why".into(),
                    retry_after: Some(Duration::from_secs(3)),
                };
                let cause = to_lmtp_error(&error);
                assert_eq!(cause.message, "why");
                assert!(cause.retry_after.is_none() || cause.reason.is_retryable());
                format!("{}={}", code.name(), cause.reason.name())
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
        let mut reported: Vec<_> = reported.iter().map(String::as_str).collect();
        expect.sort_unstable();
        reported.sort_unstable();
        assert_eq!(reported, expect);
    }

    #[test]
    fn lm_510_finer_reasons_win() {
        for (code, reason, expect) in [
            (
                Code::InvalidRequest,
                "PROMPT_TOO_LONG",
                LmtpReason::ContextLengthExceeded,
            ),
            (
                Code::Overloaded,
                "ENGINE_BUSY",
                LmtpReason::ServerOverloaded,
            ),
            (Code::Overloaded, "queue_timeout", LmtpReason::QueueTimeout),
            (Code::Unavailable, "engine_dead", LmtpReason::EngineDead),
            (
                Code::NotFound,
                "UNKNOWN_CONTROLLER",
                LmtpReason::ControllerFailed,
            ),
            (
                Code::Unavailable,
                "controllers_unavailable",
                LmtpReason::ControllerFailed,
            ),
        ] {
            let error = Error::Engine {
                code,
                reason: reason.into(),
                message: String::new(),
                retry_after: None,
            };
            assert_eq!(to_lmtp_error(&error).reason, expect);
        }
    }
}
