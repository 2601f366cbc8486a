//! [`Fuel`]: bounds the work of a steered request, whose steerer may drop, roll back and fork without end (AI-825).

use super::requests::Requests;
use super::sequence::RunningSequence;
use crate::api::FinishReason;
use crate::scheduler::SequenceKey;

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
}

impl Requests {
    /// Records a sampled token.
    #[inline]
    pub(super) fn charge_sampled(&mut self, key: SequenceKey) {
        self.charge(self.sequences[key].job, |spent| {
            spent.sampled = spent.sampled.saturating_add(1);
        });
    }

    /// Records that the tokens of a sequence are computed up to `until`.
    pub(super) fn charge_processed(&mut self, key: SequenceKey, until: usize) {
        let RunningSequence {
            job,
            computed,
            charged,
            ..
        } = &mut self.sequences[key];
        let job = *job;
        // Cached prefixes were not computed, and what was computed before is not charged again.
        let fresh = until.saturating_sub((*charged).max(*computed));
        *charged = (*charged).max(until);
        let fresh = u32::try_from(fresh).unwrap_or(u32::MAX);
        self.charge(job, |spent| {
            spent.processed = spent.processed.saturating_add(fresh);
        });
    }

    #[inline]
    fn charge(&mut self, job: usize, spend: impl FnOnce(&mut SpentFuel)) {
        let request = &mut self.jobs[job];
        let before = request.spent.cost();
        spend(&mut request.spent);
        // Once, when the limit is passed: the request ends with this step.
        let limit = self.fuel.limit;
        if request.steered && before <= limit && request.spent.cost() > limit {
            self.fuel.exhausted.push(job);
        }
    }

    /// Ends the requests that have passed the limit in this step.
    pub(super) fn end_exhausted(&mut self) {
        for job in std::mem::take(&mut self.fuel.exhausted) {
            // It may have ended in this step, but it is removed only with the events of the step.
            if !self.jobs[job].ended {
                self.finish_all(job, FinishReason::Fuel);
            }
        }
    }
}
