//! The reasons of LMTP errors: which rule was broken, finer than a code.

use std::borrow::Cow;
use std::time::Duration;

use crate::code::Code;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $code:ident, $retryable:literal;)*) => {
        /// The rule that was broken, as member `code` names it.
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

            /// The code that other faces know.
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
    /// No `TYPE JSON` with an object.
    Malformed = "malformed", InvalidRequest, false;
    /// No such type.
    UnknownCommand = "unknown_command", InvalidRequest, false;
    /// A message above the size limit.
    MessageTooLarge = "message_too_large", LimitExceeded, false;
    /// A member that has to be there is not.
    MissingRequiredParameter = "missing_required_parameter", InvalidRequest, false;
    /// A member is of another type.
    InvalidType = "invalid_type", InvalidRequest, false;
    /// A member is out of range.
    InvalidValue = "invalid_value", InvalidRequest, false;
    /// A member that nothing knows, where that is refused.
    UnknownParameter = "unknown_parameter", InvalidRequest, false;
    /// Known, and not to be had here.
    UnsupportedOperation = "unsupported_operation", Unimplemented, false;
    /// The id is that of a live stream.
    DuplicateStream = "duplicate_stream", AlreadyExists, false;
    /// A message of version 2 on a connection that has not negotiated it.
    NotNegotiated = "not_negotiated", FailedPrecondition, false;
    /// No model of this name.
    ModelNotFound = "model_not_found", NotFound, false;
    /// The key does not allow it.
    InsufficientScope = "insufficient_scope", PermissionDenied, false;
    /// The model was loading for too long.
    ModelLoading = "model_loading", Unavailable, true;
    /// The stream waited for too long.
    QueueTimeout = "queue_timeout", Overloaded, true;
    /// There is no place for another stream.
    ServerOverloaded = "server_overloaded", Overloaded, true;
    /// A key has used up what it may use in a time.
    RateLimitExceeded = "rate_limit_exceeded", RateLimited, true;
    /// The server stops.
    Draining = "draining", Unavailable, true;
    /// The prompt does not fit.
    ContextLengthExceeded = "context_length_exceeded", InvalidRequest, false;
    /// Bias and masks leave no token.
    ConstraintFailed = "constraint_failed", InvalidRequest, false;
    /// A step of the engine failed.
    EngineError = "engine_error", Internal, true;
    /// The engine is gone.
    EngineDead = "engine_dead", Internal, true;
    /// A server elsewhere failed.
    UpstreamError = "upstream_error", UpstreamFailed, true;
    /// The connection to a server elsewhere broke; at clients only.
    ConnectionLost = "connection_lost", Truncated, true;
    /// A controller failed.
    ControllerFailed = "controller_failed", ControllerFailed, false;
    /// The time allowed has passed.
    Timeout = "timeout", DeadlineExceeded, true;
    /// The peer does not read.
    Stalled = "stalled", LimitExceeded, false;
    /// A buffer is not there any more.
    BufferNotFound = "buffer_not_found", NotFound, true;
    /// A mask is not there any more.
    MaskNotFound = "mask_not_found", NotFound, true;
    /// A stream or session is not there any more.
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

/// One error: what a stream or request ends with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LmtpError {
    /// Which rule.
    pub reason: LmtpReason,
    /// For people: what is wrong and what to do.
    pub message: Cow<'static, str>,
    /// When to come again, where that is known.
    pub retry_after: Option<Duration>,
}

impl LmtpError {
    /// An error with its text.
    pub fn new(reason: LmtpReason, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            reason,
            message: message.into(),
            retry_after: None,
        }
    }

    /// The text that clients of the reference server know (LM-321).
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
                _ => "this key may not use the model",
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for &reason in LmtpReason::ALL {
            assert_eq!(LmtpReason::from_name(reason.name()), Some(reason));
        }
    }
}
