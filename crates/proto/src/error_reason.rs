//! [`ErrorReason`]: the finer name of an error beside its [`Code`], for programs.
//!
//! Evergreen and LMTP have closed sets of their own for violations of their rules ([`crate::evergreen::Reason`],
//! [`crate::lmtp::LmtpReason`]); this one is for functions, engines and the HTTP stack, and user code may add to it.

use std::fmt;

use crate::code::Code;

/// A stable name, finer than a code. Compare it with the constants; the text is for the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ErrorReason(&'static str);

macro_rules! reasons {
    ($($(#[$doc:meta])* $constant:ident = $name:literal, $($code:ident),+;)*) => {
        impl ErrorReason {
            $($(#[$doc])* pub const $constant: Self = Self($name);)*

            /// Every reason that has a constant, in table order.
            pub const ALL: &'static [Self] = &[$(Self::$constant,)*];

            /// The codes with which it is sent; their pages in `docs/errors/` explain it. Empty for a reason of user
            /// code.
            #[must_use]
            pub fn codes(self) -> &'static [Code] {
                match self {
                    $(Self::$constant => &[$(Code::$code),+],)*
                    _ => &[],
                }
            }
        }
    };
}

reasons! {
    // Arguments of functions.
    /// A field is out of range, or not what it must be.
    BAD_CONFIG = "BAD_CONFIG", InvalidRequest;
    /// A config of a type that the function does not accept.
    UNKNOWN_CONFIG = "UNKNOWN_CONFIG", InvalidRequest;
    /// Two configs of one type.
    DUPLICATE_CONFIG = "DUPLICATE_CONFIG", InvalidRequest;
    /// The function has no such input.
    UNKNOWN_PARAM = "UNKNOWN_PARAM", InvalidRequest, NotFound;
    /// An input is given twice.
    DUPLICATE_PARAM = "DUPLICATE_PARAM", InvalidRequest;
    /// A required input is missing.
    MISSING_INPUT = "MISSING_INPUT", InvalidRequest;
    /// A name that cannot be registered.
    BAD_NAME = "BAD_NAME", InvalidRequest;
    /// A mimetype that the function does not accept.
    UNSUPPORTED_MIMETYPE = "UNSUPPORTED_MIMETYPE", InvalidRequest;
    /// There are several models and no default.
    TARGET_REQUIRED = "TARGET_REQUIRED", InvalidRequest;
    /// There is no function of this name.
    UNKNOWN_ACTION = "UNKNOWN_ACTION", NotFound;
    /// There is no model of this name.
    UNKNOWN_TARGET = "UNKNOWN_TARGET", NotFound;
    /// There is no controller of this name.
    UNKNOWN_CONTROLLER = "UNKNOWN_CONTROLLER", NotFound;
    /// The key may not use this model or function.
    INSUFFICIENT_SCOPE = "insufficient_scope", PermissionDenied;
    /// A rate limit is used up.
    RATE_LIMITED = "RATE_LIMITED", RateLimited;
    /// The deadline has passed.
    DEADLINE = "DEADLINE", DeadlineExceeded;
    /// A function failed or panicked.
    FUNCTION = "FUNCTION", Internal;

    // Prompts.
    /// Token ids of the wrong length or outside the vocabulary.
    BAD_TOKENS = "BAD_TOKENS", InvalidRequest;
    /// The chat template rejects a role.
    BAD_ROLE = "BAD_ROLE", InvalidRequest;
    /// The name of a message's author is too long.
    NAME_TOO_LONG = "NAME_TOO_LONG", InvalidRequest;
    /// A prompt without a token.
    EMPTY_PROMPT = "EMPTY_PROMPT", InvalidRequest;
    /// The prompt does not fit into the context.
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG", InvalidRequest;
    /// The model has no chat template.
    NO_TEMPLATE = "NO_TEMPLATE", FailedPrecondition, Unimplemented;
    /// The model has no tokens for fill in the middle.
    NO_INFILL = "NO_INFILL", InvalidRequest;
    /// The chat template failed on these messages.
    CHAT_TEMPLATE_ERROR = "chat_template_error", InvalidRequest;
    /// No rule of a scripted model matches.
    NO_RULE = "NO_RULE", InvalidRequest;

    // Engines.
    /// A failure that the script of a scripted model contains.
    SCRIPTED = "scripted", Internal;
    /// A scripted model closes its connection here (D-11).
    CUT_CLOSE = "cut_close", Truncated;
    /// A scripted model resets its connection here (D-11).
    CUT_RESET = "cut_reset", Truncated;
    /// The admission queue is full.
    ENGINE_BUSY = "ENGINE_BUSY", Overloaded;
    /// The request waited too long for a slot.
    QUEUE_TIMEOUT = "queue_timeout", Unavailable;
    /// The time allowed for the request has passed, or a controller was late.
    TIMEOUT = "timeout", DeadlineExceeded, ControllerFailed;
    /// The KV cache has no room for a single sequence.
    CACHE_FULL = "CACHE_FULL", LimitExceeded;
    /// Masks, biases and bans together allow no token.
    CONSTRAINT_FAILED = "constraint_failed", InvalidRequest, ControllerFailed;
    /// The model computed something that is not a number.
    ENGINE_ERROR = "engine_error", Internal;
    /// The engine failed in a step, and has started again.
    ENGINE_PANIC = "engine_panic", Internal;
    /// The model failed in a step or on a request.
    MODEL_PANIC = "model_panic", Internal;
    /// The model was unloaded.
    MODEL_UNLOADED = "model_unloaded", Unavailable;
    /// The engine's thread has ended.
    ENGINE_DEAD = "engine_dead", Unavailable;

    // Controllers.
    /// It panicked or trapped.
    TRAP = "trap", ControllerFailed;
    /// It returned something invalid.
    BAD_RESULT = "bad-result", ControllerFailed;
    /// Every sequence of the request stayed suspended.
    DEADLOCK = "deadlock", ControllerFailed;
    /// It forked too often.
    LIMIT = "limit", ControllerFailed;
    /// It needs more memory than it may have.
    MEMORY = "memory", ControllerFailed;
    /// It used up the work that it may do.
    FUEL = "fuel", ControllerFailed;
    /// It failed before the first token.
    INIT = "init", ControllerFailed;
    /// The runtime that ran it is gone.
    RUNTIME_LOST = "runtime-lost", ControllerFailed;
    /// Controllers cannot be run at the moment.
    CONTROLLERS_UNAVAILABLE = "controllers_unavailable", Unavailable;
    /// The uploaded bytes are not a controller.
    INVALID_MODULE = "invalid_module", InvalidRequest, LimitExceeded;
    /// A constraint's pattern, schema or grammar cannot be compiled.
    INVALID_GRAMMAR = "invalid_grammar", InvalidRequest;

    // The HTTP stack.
    /// No key, or an unknown one.
    INVALID_API_KEY = "invalid_api_key", Unauthenticated;
    /// The key was revoked while the connection was open.
    REVOKED = "revoked", Unauthenticated;
    /// A request that did not pass the authentication layer.
    UNCHECKED_CALLER = "unchecked_caller", Unauthenticated;
    /// A browser's page from an origin that is not allowed.
    ORIGIN_NOT_ALLOWED = "origin_not_allowed", PermissionDenied;
    /// A host name that is not this server's.
    HOST_NOT_ALLOWED = "host_not_allowed", PermissionDenied;
    /// `Host` cannot be read.
    BAD_HOST = "bad_host", InvalidRequest;
    /// There is no such route.
    UNKNOWN_URL = "unknown_url", NotFound, Unimplemented;
    /// The route has no such method.
    METHOD_NOT_ALLOWED = "method_not_allowed", InvalidRequest;
    /// Not a gRPC request, on a port or route for gRPC.
    NOT_GRPC = "not_grpc", InvalidRequest;
    /// The header section is too large.
    TOO_MANY_HEADERS = "too_many_headers", LimitExceeded;
    /// The body did not come in time.
    REQUEST_TIMEOUT = "request_timeout", InvalidRequest;
    /// A header that sets a time limit cannot be read.
    INVALID_VALUE = "invalid_value", InvalidRequest;
    /// The route is for WebSockets.
    UPGRADE_REQUIRED = "upgrade_required", InvalidRequest;
    /// The handshake of a WebSocket is invalid.
    BAD_UPGRADE = "bad_upgrade", InvalidRequest;
    /// A query parameter of a session is invalid.
    BAD_SESSION_OPTION = "bad_session_option", InvalidRequest;
    /// The model's tokenizer is not available.
    TOKENIZER_NOT_FOUND = "tokenizer_not_found", NotFound;
    /// Too much is open or being read at once.
    SERVER_OVERLOADED = "server_overloaded", Overloaded, Unavailable;
    /// The server is shutting down.
    DRAINING = "draining", Unavailable;
    /// A model is being loaded.
    MODEL_LOADING = "model_loading", Unavailable;
    /// No server of a remote model can be reached.
    UPSTREAM_AWAY = "upstream_away", Unavailable;
    /// An upstream server failed, or none could be asked.
    UPSTREAM_ERROR = "upstream_error", UpstreamFailed, Unavailable;
    /// A defect of this server; its log has more.
    INTERNAL_ERROR = "internal_error", Internal;
}

impl ErrorReason {
    /// No finer name than the code.
    pub const NONE: Self = Self("");

    /// A reason of user code. It is sent as it is, so it must not contain anything that a client must not see.
    #[must_use]
    pub const fn custom(name: &'static str) -> Self {
        Self(name)
    }

    /// The constant of this name; [`ErrorReason::NONE`] if there is none.
    #[must_use]
    pub fn known(name: &str) -> Self {
        let mut all = Self::ALL.iter().copied();
        all.find(|reason| reason.name() == name)
            .unwrap_or(Self::NONE)
    }

    /// The name on the wire; empty for [`ErrorReason::NONE`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl From<&'static str> for ErrorReason {
    fn from(name: &'static str) -> Self {
        Self::custom(name)
    }
}

impl fmt::Display for ErrorReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl PartialEq<str> for ErrorReason {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for ErrorReason {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_tokens() {
        let mut names = HashSet::new();
        for reason in ErrorReason::ALL {
            assert!(names.insert(reason.name()), "{reason} twice");
            assert!(!reason.codes().is_empty());
            let token = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            assert!(reason.name().chars().all(token), "{reason}");
        }
    }

    #[test]
    fn user_code_may_define_its_own_reasons() {
        let mine = ErrorReason::custom("NO_SUCH_CITY");
        assert_eq!(mine, "NO_SUCH_CITY");
        assert_ne!(mine, ErrorReason::NONE);
        assert_eq!(ErrorReason::known("NO_SUCH_CITY"), ErrorReason::NONE);
        assert_eq!(ErrorReason::known("timeout"), ErrorReason::TIMEOUT);
        assert!(matches!(ErrorReason::from("timeout"), ErrorReason::TIMEOUT));
    }
}
