//! [`ModuleError`]: why a module is refused, or could not be compiled.

use std::fmt;

use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::SteerRefusal;

/// Why a module cannot be used. Every text that blames the module begins `invalid module: ` (AI-311).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// It breaks a rule; the text names the import, export or feature.
    #[error("invalid module: {0}")]
    Invalid(String),
    /// More bytes than are accepted.
    #[error("invalid module: larger than {limit} bytes")]
    TooLarge {
        /// The most bytes of a module.
        limit: usize,
    },
    /// The compiler failed on it: it crashed, or went over its memory (AI-732).
    #[error("invalid module: compile failed")]
    CompileFailed,
    /// The compiler did not end in time (AI-732).
    #[error("invalid module: compilation took longer than {seconds} s")]
    CompileTimeout {
        /// The time allowed.
        seconds: u64,
    },
    /// Too many modules are being compiled already.
    #[error("too many modules are being compiled: try again later")]
    Busy,
    /// The programs that requests run take all memory that programs may.
    #[error("the controllers that run leave no memory for another: try again later")]
    ProgramsInUse,
    /// This host failed, not the module. The cause is logged; the text is safe for strangers.
    #[error("the module cannot be stored or loaded: {0}")]
    Host(String),
}

impl ModuleError {
    /// A broken rule. The text may quote the module; it is truncated.
    pub(crate) fn invalid(reason: impl fmt::Display) -> Self {
        Self::Invalid(clip::shown(reason))
    }
}

impl From<ModuleError> for SteerRefusal {
    fn from(error: ModuleError) -> Self {
        let (code, reason) = match &error {
            ModuleError::Invalid(_)
            | ModuleError::CompileFailed
            | ModuleError::CompileTimeout { .. } => {
                (Code::InvalidRequest, ErrorReason::INVALID_MODULE)
            }
            ModuleError::TooLarge { .. } => (Code::LimitExceeded, ErrorReason::INVALID_MODULE),
            ModuleError::Busy | ModuleError::ProgramsInUse => {
                (Code::Overloaded, ErrorReason::CONTROLLERS_UNAVAILABLE)
            }
            ModuleError::Host(_) => (Code::Internal, ErrorReason::INTERNAL_ERROR),
        };
        Self {
            code,
            reason,
            message: error.to_string(),
        }
    }
}
