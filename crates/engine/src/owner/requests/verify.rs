//! Verifies drafts: which of the computed draft tokens become part of a sequence ([`super::super::speculation`]).

use std::time::Duration;

use super::super::sequence::RunningSequence;
use super::Requests;
use crate::model::SlotId;
use crate::scheduler::SequenceKey;
use crate::stats::EngineStats;

/// The gap before the tokens that a sequence gets in one step by its draft, until the draft is verified. They arrive
/// together, and each has an equal part of it.
#[derive(Debug, Default)]
pub(super) struct StepGap {
    all: Duration,
    tokens: u32,
}

impl StepGap {
    /// Adds a token, which arrives so long after the one before it.
    pub(super) fn add(&mut self, gap: Duration) {
        self.all += gap;
        self.tokens += 1;
    }

    fn observe(&mut self, stats: &EngineStats) {
        for _ in 0..self.tokens {
            let part = self.all / self.tokens;
            stats.inter_token_seconds.observe_span(part);
        }
        *self = Self::default();
    }
}

impl Requests {
    /// Compares the token that a row has just given with the draft of its sequence. If they are equal, the slot holds that
    /// token already, and the next row is that after it; otherwise the rest of the draft is dropped.
    #[inline]
    pub(in super::super) fn verify(&mut self, key: SequenceKey) {
        // One that has ended has dropped its draft.
        if let Some(sequence) = self.sequences.get(key)
            && !sequence.draft().is_empty()
        {
            self.verify_draft(key);
        }
        let goes_on = |sequence: &RunningSequence| !sequence.draft().is_empty();
        if self.step_gap.tokens > 0 && !self.sequences.get(key).is_some_and(goes_on) {
            self.step_gap.observe(&self.stats);
        }
    }

    fn verify_draft(&mut self, key: SequenceKey) {
        let sequence = &mut self.sequences[key];
        let Some(drafting) = &mut sequence.drafting else {
            return;
        };
        if sequence.asleep_until.is_some() {
            // The row was not available, and the slot was truncated before it.
            return drafting.clear();
        }
        if drafting.accepts(sequence.tokens.last()) {
            let request = &mut self.jobs[sequence.job];
            let until = sequence.computed + 1;
            // As the next step would have: a token that ends the output is never processed.
            self.fuel.charge_processed(request, sequence, until);
            sequence.computed = until;
            return;
        }
        drafting.finish();
        let (slot, computed) = (sequence.slot, sequence.computed);
        if slot.is_some_and(|slot| !self.drop_draft(slot, computed)) {
            // The sequence is computed anew, and that costs more than all drafts save.
            self.preempt(key);
            if let Some(drafting) = &mut self.sequences[key].drafting {
                drafting.off = true;
            }
        }
    }

    /// Truncates a slot to the tokens of its sequence, if it holds a draft behind them. Returns false if it cannot.
    pub(super) fn drop_draft(&mut self, slot: SlotId, computed: usize) -> bool {
        self.slots.len(slot) <= computed || self.slots.truncate(slot, computed)
    }
}
