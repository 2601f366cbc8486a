//! [`StoreError`]: why the folder of controllers cannot be used, or a change was not made.

use std::io;
use std::path::PathBuf;

use sapwood_proto::clip;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::SteerRefusal;

/// Why the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Somebody else could put files into the folder, which this process would run (AI-323).
    #[error("the controller folder {} belongs to another user: choose a folder of your own", .0.display())]
    ForeignOwner(PathBuf),
    /// A system call failed.
    #[error("cannot {action} the controller folder {}: {source}", .path.display())]
    Io {
        /// What was to be done.
        action: &'static str,
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What may not be removed fills the store.
    #[error("the controller store is full: delete tags and modules, or raise store_bytes")]
    Full,
    /// Its owner has as much of it as one may have.
    #[error(
        "you have half of the controller store, and one caller may have no more: delete tags and modules of yours"
    )]
    ShareFull,
    /// There are as many tags as there may be.
    #[error("too many tags")]
    TooManyTags,
    /// One caller has as many as it may have.
    #[error(
        "too many tags: you have half of all that there may be, and one caller may have no more"
    )]
    TagShareFull,
    /// There is no such module.
    #[error("module not found")]
    ModuleNotFound,
    /// There is no such tag.
    #[error("tag {} not found", clip::shown(.0))]
    TagNotFound(String),
    /// A module to be deleted still has a tag.
    #[error("the module has tags: delete {} first", clip::shown(.0))]
    ModuleTagged(String),
}

impl From<StoreError> for SteerRefusal {
    fn from(error: StoreError) -> Self {
        let (code, reason) = match &error {
            StoreError::ForeignOwner(_) | StoreError::Io { .. } => {
                // The path and the cause are for the log alone (AI-304).
                tracing::error!(%error, "the controller store failed");
                return Self {
                    code: Code::Internal,
                    reason: ErrorReason::INTERNAL_ERROR,
                    message: "the controller store failed".to_owned(),
                };
            }
            StoreError::Full
            | StoreError::ShareFull
            | StoreError::TooManyTags
            | StoreError::TagShareFull => (Code::LimitExceeded, ErrorReason::NONE),
            StoreError::ModuleNotFound | StoreError::TagNotFound(_) => {
                (Code::NotFound, ErrorReason::UNKNOWN_CONTROLLER)
            }
            StoreError::ModuleTagged(_) => (Code::FailedPrecondition, ErrorReason::NONE),
        };
        Self {
            code,
            reason,
            message: error.to_string(),
        }
    }
}
