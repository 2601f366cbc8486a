//! The reasons of LMTP errors: the rule that was broken, finer than a code.

use std::borrow::Cow;
use std::time::Duration;

use crate::code::Code;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $code:ident, $retryable:literal;)*) => {
        /// The rule that was broken; member `code` has its name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum LmtpReason { $($(#[$doc])* $variant,)* }

        impl LmtpReason {
            /// Every reason, in table order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name on the wire.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The code of this reason in other protocols.
            #[must_use]
            pub const fn code(self) -> Code {
                match self { $(Self::$variant => Code::$code,)* }
            }

            /// Whether the same request may succeed later.
            #[must_use]
            pub const fn is_retryable(self) -> bool {
                match self { $(Self::$variant => $retryable,)* }
            }
        }
    };
}

reasons! {
    /// The message is not `TYPE JSON` with an object.
    Malformed = "malformed", InvalidRequest, false;
    /// There is no such type.
    UnknownCommand = "unknown_command", InvalidRequest, false;
    /// A message above the size limit.
    MessageTooLarge = "message_too_large", LimitExceeded, false;
    /// A required member is missing.
    MissingRequiredParameter = "missing_required_parameter", InvalidRequest, false;
    /// A member has the wrong type.
    InvalidType = "invalid_type", InvalidRequest, false;
    /// A member is out of range.
    InvalidValue = "invalid_value", InvalidRequest, false;
    /// An unknown member, where unknown members are refused.
    UnknownParameter = "unknown_parameter", InvalidRequest, false;
    /// Known, but not supported here.
    UnsupportedOperation = "unsupported_operation", Unimplemented, false;
    /// The id belongs to a live stream.
    DuplicateStream = "duplicate_stream", AlreadyExists, false;
    /// A message of version 2 on a connection that has not negotiated it.
    NotNegotiated = "not_negotiated", FailedPrecondition, false;
    /// There is no model of this name.
    ModelNotFound = "model_not_found", NotFound, false;
    /// The key does not permit it.
    InsufficientScope = "insufficient_scope", PermissionDenied, false;
    /// The model took too long to load.
    ModelLoading = "model_loading", Unavailable, true;
    /// The stream waited too long in the queue.
    QueueTimeout = "queue_timeout", Overloaded, true;
    /// There is no room for another stream.
    ServerOverloaded = "server_overloaded", Overloaded, true;
    /// The rate limit of the key is exceeded.
    RateLimitExceeded = "rate_limit_exceeded", RateLimited, true;
    /// The server is shutting down.
    Draining = "draining", Unavailable, true;
    /// The prompt does not fit into the context.
    ContextLengthExceeded = "context_length_exceeded", InvalidRequest, false;
    /// Bias and masks permit no token.
    ConstraintFailed = "constraint_failed", InvalidRequest, false;
    /// A step of the engine failed.
    EngineError = "engine_error", Internal, true;
    /// The engine has failed for good.
    EngineDead = "engine_dead", Internal, true;
    /// An upstream server failed.
    UpstreamError = "upstream_error", UpstreamFailed, true;
    /// The connection to an upstream server was lost; only at clients.
    ConnectionLost = "connection_lost", Truncated, true;
    /// A controller failed.
    ControllerFailed = "controller_failed", ControllerFailed, false;
    /// The deadline has passed.
    Timeout = "timeout", DeadlineExceeded, true;
    /// The peer does not read.
    Stalled = "stalled", LimitExceeded, false;
    /// The buffer does not exist, or exists no more.
    BufferNotFound = "buffer_not_found", NotFound, true;
    /// The mask does not exist, or exists no more.
    MaskNotFound = "mask_not_found", NotFound, true;
    /// The stream or session does not exist, or exists no more.
    StreamGone = "stream_gone", NotFound, true;
}

impl LmtpReason {
    /// The reason with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.name() == name)
    }
}

/// The error that a stream or request ends with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LmtpError {
    /// The rule that was broken.
    pub reason: LmtpReason,
    /// For humans: what is wrong and what to do.
    pub message: Cow<'static, str>,
    /// When to retry, if that is known.
    pub retry_after: Option<Duration>,
}

impl LmtpError {
    /// Creates an error with this message.
    pub fn new(reason: LmtpReason, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            reason,
            message: message.into(),
            retry_after: None,
        }
    }

    /// The message that clients of the reference server expect (LM-321).
    #[must_use]
    pub fn model(reason: LmtpReason) -> Self {
        Self::new(
            reason,
            match reason {
                LmtpReason::ModelNotFound => {
                    "The requested model is not loaded and the server is not configured to load it on demand."
                }
                LmtpReason::ModelLoading => "the model is still loading; try again soon",
                LmtpReason::EngineError => "the model could not be loaded",
                LmtpReason::UnsupportedOperation => {
                    "this function takes text and gives text; only models are served as tokens"
                }
                // `InsufficientScope`; lookups give no other reason.
                _ => "this key may not use the model",
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_name_inverts_name() {
        for &reason in LmtpReason::ALL {
            assert_eq!(LmtpReason::from_name(reason.name()), Some(reason));
        }
    }
}
