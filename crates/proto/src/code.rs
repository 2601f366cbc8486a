//! The closed set of error codes that all protocols, functions and engines share.
//!
//! Each core has its own precise enum; one function per core maps each variant to a code and a reason (DESIGN section
//! 6, D-30). Each code has a page in `docs/errors/`.

use std::fmt;

/// The party that caused an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blame {
    /// The client: the request cannot be fulfilled as sent.
    Client,
    /// An upstream server failed.
    Upstream,
    /// A controller (a program that steers decoding) failed.
    Controller,
    /// This server failed.
    Server,
}

/// Whether a retry can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetryAdvice {
    /// The same request fails again.
    No,
    /// The same request may be sent again at once.
    Same,
    /// The same request may be sent again after a while.
    Later,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $blame:ident, $retry:ident, $grpc:literal, $http:literal;)*) => {
        /// The category of an error, for programs.
        ///
        /// The kebab-case name is stable for ever; the finer name is a *reason* next to it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Code { $($(#[$doc])* $variant,)* }

        impl Code {
            /// Every code, in table order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The stable kebab-case name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The party that caused it.
            #[must_use]
            pub const fn blame(self) -> Blame {
                match self { $(Self::$variant => Blame::$blame,)* }
            }

            /// Whether a retry can help.
            #[must_use]
            pub const fn retry(self) -> RetryAdvice {
                match self { $(Self::$variant => RetryAdvice::$retry,)* }
            }

            /// The gRPC status number (`google.rpc.Code`).
            #[must_use]
            pub const fn grpc(self) -> u8 {
                match self { $(Self::$variant => $grpc,)* }
            }

            /// The HTTP status, unless a protocol defines another one.
            #[must_use]
            pub const fn http(self) -> u16 {
                match self { $(Self::$variant => $http,)* }
            }
        }
    };
}

codes! {
    /// The request is malformed or out of range.
    InvalidRequest = "invalid-request", Client, No, 3, 400;
    /// Nothing has this name.
    NotFound = "not-found", Client, No, 5, 404;
    /// The name is taken.
    AlreadyExists = "already-exists", Client, No, 6, 409;
    /// The credential is missing or wrong.
    Unauthenticated = "unauthenticated", Client, No, 16, 401;
    /// A valid credential that does not permit this.
    PermissionDenied = "permission-denied", Client, No, 7, 403;
    /// A named limit was exceeded.
    LimitExceeded = "limit-exceeded", Client, No, 8, 413;
    /// Too many requests of this caller in a time span.
    RateLimited = "rate-limited", Client, Later, 8, 429;
    /// The server has more work than it can queue.
    Overloaded = "overloaded", Server, Later, 14, 503;
    /// A precondition of the request is not met.
    FailedPrecondition = "failed-precondition", Client, No, 9, 400;
    /// The caller cancelled.
    Cancelled = "cancelled", Client, No, 1, 499;
    /// The deadline has passed.
    DeadlineExceeded = "deadline-exceeded", Client, Same, 4, 504;
    /// A stream ended without its final marker.
    Truncated = "truncated", Upstream, Same, 14, 502;
    /// An upstream server failed.
    UpstreamFailed = "upstream-failed", Upstream, Later, 14, 502;
    /// A controller failed.
    ControllerFailed = "controller-failed", Controller, No, 13, 500;
    /// Loading, draining or shut down.
    Unavailable = "unavailable", Server, Later, 14, 503;
    /// Known, but not implemented or not enabled here.
    Unimplemented = "unimplemented", Client, No, 12, 501;
    /// Superseded by another request.
    Aborted = "aborted", Client, Same, 10, 409;
    /// An internal error.
    Internal = "internal", Server, No, 13, 500;
}

impl Code {
    /// The code with this kebab-case name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| code.name() == name)
    }

    /// The gRPC status name, as in JSON error objects.
    #[must_use]
    pub const fn grpc_name(self) -> &'static str {
        match self.grpc() {
            1 => "CANCELLED",
            3 => "INVALID_ARGUMENT",
            4 => "DEADLINE_EXCEEDED",
            5 => "NOT_FOUND",
            6 => "ALREADY_EXISTS",
            7 => "PERMISSION_DENIED",
            8 => "RESOURCE_EXHAUSTED",
            9 => "FAILED_PRECONDITION",
            10 => "ABORTED",
            12 => "UNIMPLEMENTED",
            14 => "UNAVAILABLE",
            16 => "UNAUTHENTICATED",
            _ => "INTERNAL",
        }
    }

    /// The code for a peer's gRPC status number; unknown numbers are `internal`.
    #[must_use]
    pub const fn from_grpc(number: i32) -> Self {
        // Several codes share 8, 13 and 14; here each number becomes the most general of them. A reason of ours
        // restores the finer one (`Status::decode`).
        match number {
            1 => Self::Cancelled,
            // OUT_OF_RANGE blames the request, as INVALID_ARGUMENT does.
            3 | 11 => Self::InvalidRequest,
            4 => Self::DeadlineExceeded,
            5 => Self::NotFound,
            6 => Self::AlreadyExists,
            7 => Self::PermissionDenied,
            8 => Self::LimitExceeded,
            9 => Self::FailedPrecondition,
            10 => Self::Aborted,
            12 => Self::Unimplemented,
            14 => Self::Unavailable,
            16 => Self::Unauthenticated,
            _ => Self::Internal,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_read_back() {
        for &code in Code::ALL {
            assert_eq!(Code::from_name(code.name()), Some(code));
        }
    }
}
