//! [`Sequence`]: one sequence's controller, as the main channel runs it.
//!
//! A trait, so that the bookkeeping of both dialects is tested without Wasm, and so that controllers of the other
//! generation and native constraints can stand behind the same calls.

use std::sync::Arc;
use std::time::Instant;

use sapwood_proto::steer::StepReport;
use sapwood_proto::steer::{SharedMask, Token};

/// A controller of one sequence. Its callbacks run elsewhere, one at a time.
pub(crate) trait Sequence: Send + Sized + 'static {
    /// Sets the id of the sequence.
    fn bind(&mut self, id: u32);

    /// Starts a callback. At most one is outstanding.
    fn call(&mut self, callback: Callback);

    /// Returns the outcome of the outstanding callback, once. The waker is called when there is one.
    fn poll(&mut self) -> Option<Outcome>;

    /// Creates a sequence in the same state. Only between callbacks.
    fn fork(&mut self) -> Result<Self, CallFailure>;
}

/// Waits for outcomes. The clock is in the same hands, so that tests decide what is late.
pub(crate) trait Pace {
    /// Returns the time.
    fn now(&self) -> Instant;

    /// Waits until a sequence may have an outcome, but not longer than `until`.
    fn wait(&self, until: Instant);
}

// HOST-TYPES-BEGIN
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Callback {
    Pre,
    Mid {
        fork_group: Vec<u32>,
    },
    Post {
        backtrack: u32,
        tokens: Vec<Token>,
    },
    Process {
        backtrack: u32,
        tokens: Vec<Token>,
        sampled: Option<Token>,
        fork_group: Vec<u32>,
    },
}
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Returned {
    Begun {
        prompt: Option<Vec<Token>>,
    },
    Pre {
        num_forks: u32,
        suspend: bool,
        ff_tokens: Vec<Token>,
    },
    Mid(MidReturned),
    Post {
        stop: bool,
    },
    Branches(Vec<ReturnedBranch>),
}
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MidReturned {
    Stop,
    Sample(Option<SharedMask>),
    Splice {
        backtrack: u32,
        ff_tokens: Vec<Token>,
    },
}
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ReturnedBranch {
    pub(crate) mask: Option<SharedMask>,
    pub(crate) temperature: Option<f32>,
    pub(crate) splices: Vec<ReturnedSplice>,
}
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReturnedSplice {
    pub(crate) when_sampled: Vec<Token>,
    pub(crate) backtrack: u32,
    pub(crate) ff_tokens: Vec<Token>,
}
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) result: Result<Returned, CallFailure>,
    pub(crate) report: StepReport,
}
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallFailure {
    pub(crate) reason: sapwood_proto::error_reason::ErrorReason,
    pub(crate) message: String,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    pub(crate) fork: bool,
    pub(crate) backtrack: bool,
    pub(crate) ff_tokens: bool,
}
// HOST-TYPES-END
