//! [`Fuel`]: bounds the work of a steered request, whose steerer may drop, roll back and fork without end (AI-825).

use super::requests::Requests;
use super::sequence::{RequestJob, RunningSequence};
use crate::api::FinishReason;

/// What a request has spent, its forks included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SpentFuel {
    /// Tokens sampled, whether they were appended or not.
    pub(super) sampled: u32,
    /// Tokens that went through the model. Those that are computed again, after a preemption or for an output row, count
    /// once.
    pub(super) processed: u32,
}

impl SpentFuel {
    fn cost(self) -> u64 {
        2 * u64::from(self.sampled) + u64::from(self.processed)
    }
}

/// The limit, and the requests that are past it.
#[derive(Debug)]
pub(super) struct Fuel {
    limit: u64,
    /// Requests that passed the limit in this step.
    exhausted: Vec<usize>,
}

impl Fuel {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit,
            exhausted: Vec::new(),
        }
    }

    /// Forgets the requests of a step that failed: they have ended.
    pub(super) fn clear(&mut self) {
        self.exhausted.clear();
    }

    /// Records a sampled token of a sequence of this request.
    #[inline]
    pub(super) fn charge_sampled(&mut self, key: usize, request: &mut RequestJob) {
        self.charge(key, request, |spent| {
            spent.sampled = spent.sampled.saturating_add(1);
        });
    }

    /// Records that the tokens of a sequence of this request are computed up to `until`.
    pub(super) fn charge_processed(
        &mut self,
        request: &mut RequestJob,
        sequence: &mut RunningSequence,
        until: usize,
    ) {
        // Cached prefixes were not computed, and what was computed before is not charged again.
        let fresh = until.saturating_sub(sequence.charged.max(sequence.computed));
        sequence.charged = sequence.charged.max(until);
        let fresh = u32::try_from(fresh).unwrap_or(u32::MAX);
        self.charge(sequence.job, request, |spent| {
            spent.processed = spent.processed.saturating_add(fresh);
        });
    }

    #[inline]
    fn charge(&mut self, key: usize, request: &mut RequestJob, spend: impl FnOnce(&mut SpentFuel)) {
        let before = request.spent.cost();
        spend(&mut request.spent);
        // Once, when the limit is passed: the request ends with this step.
        if request.steered && before <= self.limit && request.spent.cost() > self.limit {
            self.exhausted.push(key);
        }
    }
}

/// Ends the requests that have passed the limit in this step.
pub(super) fn end_exhausted(requests: &mut Requests) {
    for job in std::mem::take(&mut requests.fuel.exhausted) {
        // It may have ended in this step, but it is removed only with the events of the step.
        if !requests.jobs[job].ended {
            requests.finish_all(job, FinishReason::Fuel);
        }
    }
}
