//! The reasons of Evergreen errors: the rule that was broken, finer than a code.

use crate::code::Code;

/// What an error ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorScope {
    /// One action; the session as well unless partial failure is on (EV-107, EV-930).
    Action,
    /// The session.
    Session,
    /// The connection, before there is a session.
    Connection,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $code:ident, $scope:ident, $close:literal;)*) => {
        /// The rule that was broken, as the wire names it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason { $($(#[$doc])* $variant,)* }

        impl Reason {
            /// Every reason, in table order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name on the wire.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The code of this reason.
            #[must_use]
            pub const fn code(self) -> Code {
                match self { $(Self::$variant => Code::$code,)* }
            }

            /// What an error with this reason ends.
            #[must_use]
            pub const fn scope(self) -> ErrorScope {
                match self { $(Self::$variant => ErrorScope::$scope,)* }
            }

            /// The close code on a WebSocket.
            #[must_use]
            pub const fn close(self) -> u16 {
                match self { $(Self::$variant => $close,)* }
            }
        }
    };
}

reasons! {
    /// A node id is empty or too long.
    BadId = "BAD_ID", InvalidRequest, Session, 1008;
    /// A seq is negative.
    BadSeq = "BAD_SEQ", InvalidRequest, Session, 1008;
    /// A fragment follows the final one.
    SeqPastFinal = "SEQ_PAST_FINAL", InvalidRequest, Session, 1008;
    /// A node is leaf and tree at once.
    NodeKind = "NODE_KIND", InvalidRequest, Session, 1008;
    /// A fragment for a node that the receiver produces.
    NodeOwner = "NODE_OWNER", InvalidRequest, Session, 1008;
    /// A node contains itself.
    Cycle = "CYCLE", InvalidRequest, Session, 1008;
    /// An action reads its own output.
    ActionCycle = "ACTION_CYCLE", InvalidRequest, Session, 1008;
    /// A leaf has content and no metadata.
    MetadataMissing = "METADATA_MISSING", InvalidRequest, Session, 1008;
    /// Metadata after the first fragment, in strict mode.
    MetadataRepeated = "METADATA_REPEATED", InvalidRequest, Session, 1008;
    /// Metadata after the first fragment that differs from the first, in lenient mode.
    MetadataConflict = "METADATA_CONFLICT", InvalidRequest, Session, 1008;
    /// A message that cannot be decoded.
    BadMessage = "BAD_MESSAGE", InvalidRequest, Session, 1007;
    /// A parameter is bound twice.
    DuplicateParam = "DUPLICATE_PARAM", InvalidRequest, Action, 1008;
    /// The action has no such parameter.
    UnknownParam = "UNKNOWN_PARAM", InvalidRequest, Action, 1008;
    /// A required input is not bound.
    MissingInput = "MISSING_INPUT", InvalidRequest, Action, 1008;
    /// Too many parameters or configs.
    ParamLimit = "PARAM_LIMIT", InvalidRequest, Action, 1008;
    /// A name is empty or too long.
    BadName = "BAD_NAME", InvalidRequest, Action, 1008;
    /// There are several targets and no default.
    TargetRequired = "TARGET_REQUIRED", InvalidRequest, Action, 1008;
    /// A config of a type that the action does not accept.
    UnknownConfig = "UNKNOWN_CONFIG", InvalidRequest, Action, 1008;
    /// Two configs of one type.
    DuplicateConfig = "DUPLICATE_CONFIG", InvalidRequest, Action, 1008;
    /// A config that cannot be decoded, or is out of range.
    BadConfig = "BAD_CONFIG", InvalidRequest, Action, 1008;
    /// The chat template rejects a role.
    BadRole = "BAD_ROLE", InvalidRequest, Action, 1008;
    /// Text that is not UTF-8.
    BadText = "BAD_TEXT", InvalidRequest, Action, 1008;
    /// Token ids of the wrong length or out of vocabulary.
    BadTokens = "BAD_TOKENS", InvalidRequest, Action, 1008;
    /// A mimetype that the target does not accept.
    UnsupportedMimetype = "UNSUPPORTED_MIMETYPE", InvalidRequest, Action, 1008;
    /// The prompt does not fit into the context.
    PromptTooLong = "PROMPT_TOO_LONG", InvalidRequest, Action, 1008;
    /// A reference of an unsupported scheme.
    RefScheme = "REF_SCHEME", InvalidRequest, Action, 1008;
    /// There is no action of this name.
    UnknownAction = "UNKNOWN_ACTION", NotFound, Action, 1008;
    /// There is no target of this id.
    UnknownTarget = "UNKNOWN_TARGET", NotFound, Action, 1008;
    /// There is no controller of this id.
    UnknownController = "UNKNOWN_CONTROLLER", NotFound, Action, 1008;
    /// The content of a reference does not exist.
    RefNotFound = "REF_NOT_FOUND", NotFound, Action, 1008;
    /// There is no session for this token.
    NoSession = "NO_SESSION", NotFound, Connection, 1008;
    /// An output id that is already an output.
    OutputNotNew = "OUTPUT_NOT_NEW", AlreadyExists, Session, 1008;
    /// A reference that is not permitted.
    RefDenied = "REF_DENIED", PermissionDenied, Action, 1008;
    /// A message above the size limit.
    MessageTooLarge = "MESSAGE_TOO_LARGE", LimitExceeded, Session, 1009;
    /// The session retains too many bytes.
    RetainedLimit = "RETAINED_LIMIT", LimitExceeded, Session, 1008;
    /// Too many nodes.
    NodeLimit = "NODE_LIMIT", LimitExceeded, Session, 1008;
    /// Too many children in one fragment.
    ChildLimit = "CHILD_LIMIT", LimitExceeded, Session, 1008;
    /// A fragment is too large.
    FragmentLimit = "FRAGMENT_LIMIT", LimitExceeded, Session, 1008;
    /// Nodes are nested too deeply.
    DepthLimit = "DEPTH_LIMIT", LimitExceeded, Session, 1008;
    /// Too many fragments out of order.
    ReorderLimit = "REORDER_LIMIT", LimitExceeded, Session, 1008;
    /// The peer does not read.
    SlowReader = "SLOW_READER", LimitExceeded, Session, 1008;
    /// The flattened content is too large.
    FlattenLimit = "FLATTEN_LIMIT", LimitExceeded, Action, 1008;
    /// Too many unfinished actions.
    ActionLimit = "ACTION_LIMIT", LimitExceeded, Action, 1008;
    /// A reference's content is too large.
    RefLimit = "REF_LIMIT", LimitExceeded, Action, 1008;
    /// Content that can no longer arrive.
    IncompleteInput = "INCOMPLETE_INPUT", FailedPrecondition, Action, 1008;
    /// Actions that wait for one another.
    Deadlock = "DEADLOCK", FailedPrecondition, Action, 1008;
    /// Chat with a target that has no template.
    NoTemplate = "NO_TEMPLATE", FailedPrecondition, Action, 1008;
    /// A node that is no longer retained.
    NodeReleased = "NODE_RELEASED", FailedPrecondition, Action, 1008;
    /// The caller cancelled.
    Cancelled = "CANCELLED", Cancelled, Action, 1008;
    /// The deadline has passed.
    Deadline = "DEADLINE", DeadlineExceeded, Action, 1011;
    /// Nothing happened for too long.
    IdleTimeout = "IDLE_TIMEOUT", DeadlineExceeded, Session, 1001;
    /// Another connection took over the session.
    Superseded = "SUPERSEDED", Aborted, Connection, 1008;
    /// A function failed.
    Function = "FUNCTION", Internal, Action, 1011;
    /// A controller failed.
    Controller = "CONTROLLER", ControllerFailed, Action, 1011;
    /// A reference could not be fetched.
    RefFetch = "REF_FETCH", UpstreamFailed, Action, 1013;
    /// The engine's queue is full.
    EngineBusy = "ENGINE_BUSY", Overloaded, Action, 1013;
    /// The rate limit of a key is exceeded (OA-906).
    RateLimited = "RATE_LIMITED", RateLimited, Action, 1013;
    /// The server is shutting down.
    GoingAway = "GOING_AWAY", Unavailable, Session, 1001;
    /// The key with which the session was opened is no longer valid.
    Revoked = "REVOKED", Unauthenticated, Session, 1008;
    /// A stream ended without its final fragment (EV-972); seen by our readers, never sent.
    Truncated = "TRUNCATED", Truncated, Action, 1011;
    /// Known to the protocol, but not implemented here.
    Unimplemented = "UNIMPLEMENTED", Unimplemented, Action, 1008;
}

impl Reason {
    /// The reason with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for &reason in Reason::ALL {
            assert_eq!(Reason::from_name(reason.name()), Some(reason));
        }
    }
}
