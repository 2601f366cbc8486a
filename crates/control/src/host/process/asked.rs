//! [`Asked`]: what a controller's process has been asked to do, and which outcomes that can have.

use std::time::Duration;

use crate::host::callback::Callback;
use crate::host::controller::Outcome;
use crate::host::group::GroupMark;
use crate::host::result::Returned;

/// One thing that a process does. `S`: the slot of a process.
pub(super) enum Asked<S> {
    Start,
    Call {
        kind: AskedCall,
        /// Until it is late.
        late: Duration,
        /// Until the process is killed.
        time: Duration,
        /// Taken before the call, for a result that waits.
        mark: GroupMark,
    },
    /// The process clones itself.
    Fork {
        /// Of the clone.
        slot: S,
        /// What the clone was charged in advance.
        charged: usize,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AskedCall {
    Pre,
    Mid,
    Post,
    Process,
}

impl<S> Asked<S> {
    pub(super) const fn has_outcome(&self) -> bool {
        !matches!(self, Self::Fork { .. })
    }

    /// What a result that waits refers to.
    pub(super) fn mark(&self) -> GroupMark {
        match self {
            Self::Call { mark, .. } => *mark,
            Self::Start | Self::Fork { .. } => GroupMark::default(),
        }
    }

    /// Whether it may have this outcome.
    pub(super) fn is_answered_by(&self, outcome: &Outcome) -> bool {
        match (self, &outcome.result) {
            (Self::Fork { .. }, _) => false,
            (_, Err(_)) | (Self::Start, Ok(Returned::Begun { .. })) => true,
            (Self::Call { kind, .. }, Ok(returned)) => matches!(
                (kind, returned),
                (AskedCall::Pre, Returned::Pre { .. })
                    | (AskedCall::Mid, Returned::Mid(_))
                    | (AskedCall::Post, Returned::Post { .. })
                    | (AskedCall::Process, Returned::Branches(_))
            ),
            (Self::Start, Ok(_)) => false,
        }
    }
}

impl AskedCall {
    /// See [`Callback::begins_step`].
    pub(super) const fn begins_step(self) -> bool {
        matches!(self, Self::Pre | Self::Process)
    }

    pub(super) const fn of(callback: &Callback) -> Self {
        match callback {
            Callback::Pre => Self::Pre,
            Callback::Mid { .. } => Self::Mid,
            Callback::Post { .. } => Self::Post,
            Callback::Process { .. } => Self::Process,
        }
    }
}
