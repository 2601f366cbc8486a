//! [`CallFailure`]: why a callback failed, and how errors of the Wasm engine become one.

use std::fmt::Write as _;

use sapwood_proto::error_reason::ErrorReason;
use wasmtime::{Trap, WasmBacktrace};

/// Why a callback, an instantiation or a fork failed. The instance is gone with it (AI-422).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CallFailure {
    /// `trap`, `timeout`, `memory`, `fuel`, `init`, `bad-result`, `limit` (AI-932).
    pub reason: ErrorReason,
    /// For people; what follows `Error (LABEL): ` on the wire (AI-421): of a trap the log, the backtrace and the trap.
    pub message: String,
    /// How many bytes at the start of `message` are the log.
    log_bytes: usize,
}

impl CallFailure {
    /// A failure with `reason` and `message`.
    #[must_use]
    pub fn new(reason: ErrorReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            log_bytes: 0,
        }
    }

    /// The message without the log, for those who have it from the report.
    #[must_use]
    pub fn without_log(&self) -> &str {
        &self.message[self.log_bytes..]
    }

    /// A failure whose message begins with `log_bytes` bytes of log. `None` if it has no such beginning.
    #[cfg(target_os = "linux")]
    pub(super) fn with_log(reason: ErrorReason, message: String, log_bytes: usize) -> Option<Self> {
        message.is_char_boundary(log_bytes).then_some(Self {
            reason,
            message,
            log_bytes,
        })
    }

    /// How many bytes at the start of the message are the log.
    #[cfg(target_os = "linux")]
    pub(super) const fn log_bytes(&self) -> usize {
        self.log_bytes
    }

    /// The controller returned something invalid.
    pub(super) fn bad_result(message: impl Into<String>) -> Self {
        Self::new(ErrorReason::BAD_RESULT, message)
    }

    /// What a call of a failed instance returns; clients look for these words (AI-422).
    pub(super) fn previous() -> Self {
        Self::new(ErrorReason::TRAP, "Previous WASM Error")
    }

    /// The failure of a call that ended with `error`. `log`: what the callback had printed; the message begins with it.
    pub(super) fn of_call(error: &wasmtime::Error, log: &str) -> Self {
        let mut message = log.to_owned();
        if !message.is_empty() && !message.ends_with('\n') {
            message.push('\n');
        }
        let log_bytes = message.len();
        let abort = error.downcast_ref::<Abort>();
        if abort.is_none_or(|abort| abort.backtrace)
            && let Some(backtrace) = error.downcast_ref::<WasmBacktrace>()
        {
            write_backtrace(&mut message, backtrace);
        }
        let reason = if let Some(abort) = abort {
            message.push_str(&abort.message);
            abort.reason
        } else {
            match error.downcast_ref::<Trap>() {
                Some(Trap::OutOfFuel) => {
                    message.push_str("fuel exhausted");
                    ErrorReason::FUEL
                }
                Some(trap) => {
                    let _ = write!(message, "wasm trap: {trap}");
                    ErrorReason::TRAP
                }
                None => {
                    // Of the host, not of the guest: its text could name things of this machine.
                    tracing::error!(%error, "a controller's call failed in the host");
                    message.push_str("the controller could not be run");
                    ErrorReason::TRAP
                }
            }
        };
        Self {
            reason,
            message,
            log_bytes,
        }
    }
}

/// An end of a callback that the host decides: carried through the guest's frames as the error of a host function.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Abort {
    pub(super) reason: ErrorReason,
    pub(super) message: String,
    /// Whether the guest's backtrace belongs to the message.
    pub(super) backtrace: bool,
    /// Whether `aici_panic` is called afterwards (AI-606).
    pub(super) fatal: bool,
}

impl Abort {
    /// The guest did what it may not.
    pub(super) fn trap(message: impl Into<String>) -> Self {
        Self {
            reason: ErrorReason::TRAP,
            message: message.into(),
            backtrace: true,
            fatal: false,
        }
    }

    /// As [`Abort::trap`], and the guest's panic handler runs.
    pub(super) fn fatal(message: impl Into<String>) -> Self {
        Self {
            fatal: true,
            ..Self::trap(message)
        }
    }

    /// The guest ended its callback itself.
    pub(super) fn stop(message: impl Into<String>) -> Self {
        Self {
            backtrace: false,
            ..Self::trap(message)
        }
    }

    /// A limit is exceeded.
    pub(super) fn limit(reason: ErrorReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            ..Self::trap(message)
        }
    }
}

/// Writes frames, innermost first. A recursion can have 100,000 of them, of which the ends say enough.
fn write_backtrace(message: &mut String, backtrace: &WasmBacktrace) {
    message.push_str("guest backtrace:\n");
    let frames = backtrace.frames();
    for (index, frame) in frames.iter().enumerate().take(FRAMES_MAX) {
        let name = frame.func_name().unwrap_or("");
        let name = sapwood_proto::clip::shown(name);
        let _ = writeln!(message, "  {index}: function {} {name}", frame.func_index());
    }
    if frames.len() > FRAMES_MAX {
        let _ = writeln!(message, "  and {} more", frames.len() - FRAMES_MAX);
    }
}

const FRAMES_MAX: usize = 20;
