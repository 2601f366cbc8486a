//! [`TableEntry`]: one sequence of the table.

use std::sync::Arc;

use sapwood_proto::steer::{StepReport, StepWaker};
use sapwood_proto::time::Time;

use super::super::numbers::CountedSequence;
use super::super::reply::CallResult;
use super::{Wakers, add_waker};
use crate::host::CallFailure;
use crate::host::Unreported;

/// One sequence.
pub(super) struct TableEntry {
    pub(super) place: SequencePlace,
    pub(super) waker: Arc<dyn StepWaker>,
    pub(super) happened: Unreported,
    /// P1.
    pub(super) pre: AskState,
    /// Since when its `pre` is late in every answer.
    pub(super) late_since: Option<Time>,
    pub(super) mid: AskState,
    /// Something happened while `mid` was on its way: what it answers is of no use.
    pub(super) mid_is_stale: bool,
    pub(super) pre_result: Option<CallResult>,
    pub(super) mid_result: Option<CallResult>,
    pub(super) report: StepReport,
    /// Somebody reads the reports.
    pub(super) watched: bool,
    /// Nobody steers by it any more; it lives on for its clones.
    pub(super) dropped: bool,
    _counted: CountedSequence,
}

/// Whether the runtime has the sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SequencePlace {
    /// An instance, under this request id.
    Pending(String),
    /// Its parent is there, or will be.
    Clone {
        parent: u64,
        index: u32,
    },
    Live,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AskState {
    #[default]
    None,
    Queued,
    Ready,
    Sent,
}

impl TableEntry {
    pub(super) fn new(
        place: SequencePlace,
        waker: Arc<dyn StepWaker>,
        counted: CountedSequence,
    ) -> Self {
        Self {
            place,
            waker,
            happened: Unreported::default(),
            pre: AskState::None,
            late_since: None,
            mid: AskState::None,
            mid_is_stale: false,
            pre_result: None,
            mid_result: None,
            report: StepReport::default(),
            watched: false,
            dropped: false,
            _counted: counted,
        }
    }

    /// What `mid` answered, or will answer, is of a text that has changed.
    pub(super) fn forget_mid(&mut self) {
        self.mid_result = None;
        if self.mid == AskState::Sent {
            self.mid_is_stale = true;
        }
    }

    pub(super) fn take_mid(&mut self, result: CallResult, woken: &mut Wakers) {
        if std::mem::take(&mut self.mid_is_stale) && result.is_ok() {
            // Asked again meanwhile, or not yet.
            if self.mid == AskState::Sent {
                self.mid = AskState::None;
            }
            return;
        }
        self.mid = AskState::None;
        if let Err(failure) = result {
            return self.fail(failure, woken);
        }
        self.mid_result = Some(result);
        add_waker(woken, &self.waker);
    }

    /// Whatever is asked next has this answer.
    pub(super) fn fail(&mut self, failure: CallFailure, woken: &mut Wakers) {
        (self.pre, self.mid) = (AskState::None, AskState::None);
        self.pre_result = Some(Err(failure.clone()));
        self.mid_result = Some(Err(failure));
        add_waker(woken, &self.waker);
    }

    /// Whether it may be asked for a mask although the engine has not: its answer is the one that the engine will get.
    pub(super) fn may_run_early(&self) -> bool {
        self.mid != AskState::Sent && self.mid_result.is_none()
    }
}
