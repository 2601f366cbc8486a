//! Builds the batch of a step, decodes it, and handles failures of the model.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sapwood_proto::code::Code;
use sapwood_proto::time::Time;

use super::EngineOwner;
use crate::api::EngineError;
use crate::model::{BatchEntry, DecodeStop};
use crate::scheduler::{Runnable, SequenceKey, StepBudget, plan};

impl EngineOwner {
    /// Plans a batch and decodes it; returns the number of tokens computed. Output rows to collect are in
    /// `scratch.rows`.
    pub(super) fn pass(&mut self, now: Time) -> usize {
        self.scratch.rows.clear();
        // Each round that fails frees cached cells or takes those of one sequence, so the loop ends.
        loop {
            if !self.plan() {
                return 0;
            }
            self.begin_mid(now);
            self.build_batch();
            let model = &mut *self.model;
            let batch = &self.scratch.batch;
            let outcome = catch_unwind(AssertUnwindSafe(|| model.decode(batch, now)));
            match outcome {
                Ok(Ok(())) => return self.commit(),
                Ok(Err(DecodeStop::Full)) => {
                    if !self.make_room() {
                        let message = "the model's cache has no room for a single sequence";
                        self.fail_batch(&EngineError::new(
                            Code::LimitExceeded,
                            "CACHE_FULL",
                            message,
                        ));
                        return 0;
                    }
                }
                Ok(Err(DecodeStop::Aborted)) => {
                    self.scratch.rows.clear();
                    return 0;
                }
                Ok(Err(DecodeStop::Failed(error))) => {
                    self.fail_batch(&error);
                    return 0;
                }
                Ok(Err(DecodeStop::Dead(error))) => {
                    self.fail_all(error);
                    return 0;
                }
                Err(_panic) => {
                    self.inbox.stats.panics.add(1);
                    let message = "the model failed in this step";
                    self.fail_batch(&EngineError::new(Code::Internal, "model_panic", message));
                    return 0;
                }
            }
        }
    }

    /// Fills `scratch.shares`; preempts until the plan fits. Returns false if there is nothing to compute.
    fn plan(&mut self) -> bool {
        loop {
            let mut work = std::mem::take(&mut self.scratch.work);
            work.clear();
            work.extend(self.scheduler.running().filter_map(|key| self.work(key)));
            let budget = StepBudget {
                batch: self.batch_tokens,
                alone: self.config.prefill_tokens_alone as usize,
                step: self.config.step_tokens as usize,
                prefill_min: self.config.prefill_tokens_min as usize,
                room: self.cache.room(),
            };
            let fits = plan(&work, &budget, &mut self.scratch.shares);
            let idle = work.is_empty();
            self.scratch.work = work;
            if fits || idle {
                self.ration_rows();
                return !self.scratch.shares.is_empty();
            }
            let sequences = &self.sequences;
            let Some(victim) = self
                .scheduler
                .victim(true, |key| sequences[key].slot.is_some())
            else {
                return !self.scratch.shares.is_empty();
            };
            self.preempt(victim);
        }
    }

    /// Returns the work that a running sequence has in this step.
    fn work(&self, key: SequenceKey) -> Option<Runnable> {
        let sequence = &self.sequences[key];
        let mut pending = sequence.pending();
        if pending == 0 || sequence.asleep_until.is_some() || sequence.is_suspended() {
            return None;
        }
        // A model that cannot truncate can share a prompt only from a slot that ends there, so prefill stops once
        // before the last token of the prompt.
        let shared = sequence.prompt_tokens.saturating_sub(1);
        if !self.info.truncates
            && sequence.computed < shared
            && self.jobs[sequence.job].members.len() > 1
        {
            pending = shared - sequence.computed;
        }
        Some(Runnable { key, pending })
    }

    fn build_batch(&mut self) {
        let total = self.scratch.shares.iter().map(|share| share.tokens).sum();
        for slot in self.cache.evict_for(total) {
            self.model.release(slot);
        }
        self.scratch.batch.clear();
        self.scratch.rows.clear();
        for share in &self.scratch.shares {
            let sequence = &self.sequences[share.key];
            let Some(slot) = sequence.slot else { continue };
            let until = sequence.computed + share.tokens;
            for index in sequence.computed..until {
                self.scratch.batch.push(BatchEntry {
                    slot,
                    // A sequence is shorter than the context, which is a u32.
                    position: u32::try_from(index).unwrap_or(u32::MAX),
                    token: sequence.tokens[index],
                    row: sequence.wants_row(index),
                });
                if sequence.wants_row(index) {
                    let at = self.scratch.batch.len() - 1;
                    self.scratch.rows.push((share.key, at));
                }
            }
        }
    }

    /// Records what was computed.
    fn commit(&mut self) -> usize {
        for share in &self.scratch.shares {
            let sequence = &mut self.sequences[share.key];
            let Some(slot) = sequence.slot else { continue };
            let until = sequence.computed + share.tokens;
            self.cache
                .append(slot, &sequence.tokens[sequence.computed..until]);
            // A single token after a sampled one is a decode; all other tokens were known before.
            if share.tokens == 1 && sequence.appended > 0 && until == sequence.tokens.len() {
                self.report.decoded.push(sequence.number);
            } else {
                let tokens = u32::try_from(share.tokens).unwrap_or(u32::MAX);
                self.report.prefilled.push((sequence.number, tokens));
            }
            sequence.computed = until;
        }
        self.scratch.batch.len()
    }

    /// The model has less room than was counted: evicts all cached prefixes, or else preempts a sequence. Returns false
    /// if neither is possible.
    fn make_room(&mut self) -> bool {
        let mut freed = false;
        while let Some(slot) = self.cache.evict(None) {
            self.model.release(slot);
            freed = true;
        }
        if freed {
            return true;
        }
        let sequences = &self.sequences;
        let victim = self
            .scheduler
            .victim(true, |key| sequences[key].slot.is_some());
        let Some(victim) = victim else { return false };
        self.preempt(victim);
        true
    }

    /// Fails every request with a sequence in the batch. The contents of their slots are undefined, so the slots are
    /// freed.
    fn fail_batch(&mut self, error: &EngineError) {
        self.scratch.rows.clear();
        let shares = std::mem::take(&mut self.scratch.shares);
        for share in &shares {
            if let Some(sequence) = self.sequences.get(share.key) {
                self.fail(sequence.job, error.clone(), false);
            }
        }
        self.scratch.shares = shares;
    }

    fn fail_all(&mut self, error: EngineError) {
        self.scratch.rows.clear();
        let jobs: Vec<usize> = self
            .jobs
            .iter()
            .filter(|(_, job)| !job.ended)
            .map(|(index, _)| index)
            .collect();
        for job in jobs {
            self.fail(job, error.clone(), false);
        }
        self.inbox.stats.dead.set(1);
        self.dead = Some(error);
    }
}
