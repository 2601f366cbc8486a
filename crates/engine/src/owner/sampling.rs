//! Samples the output rows of a step: logits and the steerer's mask give one token each.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::steer::{Mask, Token};
use sapwood_proto::time::Time;

use super::EngineOwner;
use super::sequence::{CachedRow, RunningSequence};
use super::steering::{Middle, SteerRules};
use crate::api::{ChoiceEnd, EngineError, FinishReason};
use crate::model::{Model, OutputRow};
use crate::ranking::RankedRow;
use crate::sampling::{Sample, SampleError, SampleParams, Sampler};
use crate::scheduler::SequenceKey;
use crate::stats::Counter;
use crate::submission::RequestTerms;

/// The logits of an output row.
pub(super) enum Logits<'a> {
    Whole(&'a mut [f32]),
    Ranked(RankedRow),
}

impl Logits<'_> {
    fn keep(self) -> CachedRow {
        match self {
            Logits::Whole(row) => CachedRow::Logits(row.to_vec()),
            Logits::Ranked(ranking) => CachedRow::Ranked(ranking),
        }
    }
}

/// The result of one output row.
pub(super) enum RowOutcome {
    Sampled(Sample, SoleToken),
    Splice {
        backtrack: u32,
        tokens: Vec<Token>,
    },
    Finish(FinishReason),
    NotBefore(Time),
    Error(EngineError),
    /// The row was cached for later; nothing was appended.
    Waits,
}

/// Whether the mask allowed only the token sampled (AI-804).
pub(super) type SoleToken = bool;

impl EngineOwner {
    /// Samples from every row that was cached for a late steerer, and from every output row of this step.
    pub(super) fn gather(&mut self, now: Time) {
        let mut order = std::mem::take(&mut self.scratch.order);
        order.clear();
        order.extend(
            self.scheduler
                .running()
                .filter(|&key| self.sequences[key].cached_row.is_some()),
        );
        for &key in &order {
            if !self.sequences.contains(key) || self.sequences[key].is_suspended() {
                continue;
            }
            if let Some(row) = self.sequences[key].cached_row.take() {
                let outcome = self.take_cached_row(key, row, now);
                self.follow(key, outcome, now);
            }
        }
        self.scratch.order = order;
        let rows = std::mem::take(&mut self.scratch.rows);
        for &(key, index) in &rows {
            // The failure of a sibling in this loop may have ended it.
            match self.sequences.get(key) {
                // An earlier row of this step is not available yet, and the slot was truncated to it.
                Some(sequence) if sequence.asleep_until.is_some() => {}
                Some(sequence) if sequence.next_in_prompt().is_some() => {
                    self.score_prompt(key, index, now);
                }
                Some(sequence) if sequence.scored => self.score(key, index, now),
                Some(_) => {
                    let outcome = self.take(key, index, now);
                    self.follow(key, outcome, now);
                }
                None => {}
            }
        }
        self.scratch.rows = rows;
    }

    fn take(&mut self, key: SequenceKey, index: usize, now: Time) -> RowOutcome {
        let rules = self.rules();
        let row = match ask(&mut *self.model, &self.inbox.stats.panics, index, now) {
            Ok(row) => row,
            Err(outcome) => return outcome,
        };
        let sequence = &mut self.sequences[key];
        let terms = &self.jobs[sequence.job].terms;
        let steps = Steps {
            sampler: &mut self.sampler,
            ends: &self.ends,
            rules,
            panics: &self.inbox.stats.panics,
        };
        steps.decide(sequence, terms, row, now)
    }

    fn take_cached_row(&mut self, key: SequenceKey, row: CachedRow, now: Time) -> RowOutcome {
        let rules = self.rules();
        let sequence = &mut self.sequences[key];
        let terms = &self.jobs[sequence.job].terms;
        let steps = Steps {
            sampler: &mut self.sampler,
            ends: &self.ends,
            rules,
            panics: &self.inbox.stats.panics,
        };
        match row {
            CachedRow::Logits(mut row) => {
                steps.decide(sequence, terms, Logits::Whole(&mut row), now)
            }
            CachedRow::Ranked(ranking) => {
                steps.decide(sequence, terms, Logits::Ranked(ranking), now)
            }
        }
    }

    fn rules(&self) -> SteerRules {
        SteerRules {
            deadline_budget: Duration::from_millis(self.config.steer_ms),
            vocabulary: self.info.vocabulary_tokens as usize,
        }
    }

    pub(super) fn follow(&mut self, key: SequenceKey, outcome: RowOutcome, now: Time) {
        match outcome {
            RowOutcome::Sampled(sample, lone) => self.append_sampled(key, sample, lone, now),
            RowOutcome::Splice { backtrack, tokens } => self.splice(key, backtrack, &tokens, now),
            RowOutcome::Finish(reason) => self.finish(key, ChoiceEnd { reason, stop: None }),
            RowOutcome::NotBefore(until) => {
                self.sequences[key].asleep_until = Some(until);
                let computed = self.sequences[key].computed;
                self.cut_back(key, computed - 1);
            }
            RowOutcome::Error(error) => self.fail(self.sequences[key].job, error, true),
            RowOutcome::Waits => {
                if self.sequences[key].is_late() {
                    self.report.late.push(self.sequences[key].number);
                }
            }
        }
    }
}

/// Returns the logits of an entry of the last batch, or the outcome that replaces a token.
pub(super) fn ask<'a>(
    model: &'a mut dyn Model,
    panics: &Counter,
    index: usize,
    now: Time,
) -> Result<Logits<'a>, RowOutcome> {
    match catch_unwind(AssertUnwindSafe(once(move || model.row(index, now)))) {
        Ok(OutputRow::Logits(row)) => Ok(Logits::Whole(row)),
        Ok(OutputRow::Ranked(ranking)) => Ok(Logits::Ranked(ranking)),
        Ok(OutputRow::NotBefore(until)) => Err(RowOutcome::NotBefore(until)),
        Ok(OutputRow::End(reason)) => Err(RowOutcome::Finish(reason)),
        Ok(OutputRow::Failed(error)) => Err(RowOutcome::Error(error)),
        Err(_panic) => {
            panics.add(1);
            let message = "the model failed on this request";
            let error = EngineError::new(Code::Internal, "model_panic", message);
            Err(RowOutcome::Error(error))
        }
    }
}

/// Makes a closure `FnOnce`, so that it may move out of its captures.
fn once<T>(call: impl FnOnce() -> T) -> impl FnOnce() -> T {
    call
}

/// The parts of the owner that a decision needs beside the sequence.
struct Steps<'a> {
    sampler: &'a mut Sampler,
    ends: &'a [Token],
    rules: SteerRules,
    panics: &'a Counter,
}

impl Steps<'_> {
    fn decide(
        self,
        sequence: &mut RunningSequence,
        terms: &RequestTerms,
        row: Logits<'_>,
        now: Time,
    ) -> RowOutcome {
        match sequence.poll_mid(now, self.rules, self.panics) {
            Ok(Middle::Sample {
                mask,
                bias,
                temperature,
            }) => self.sample(sequence, terms, row, mask.as_ref(), &bias, temperature),
            Ok(Middle::Splice { backtrack, tokens }) => RowOutcome::Splice { backtrack, tokens },
            Ok(Middle::Stop) => RowOutcome::Finish(FinishReason::Controller),
            Ok(Middle::Waits) => {
                sequence.cached_row = Some(row.keep());
                RowOutcome::Waits
            }
            Err(failure) => RowOutcome::Error(super::steering::to_engine_error(failure)),
        }
    }

    fn sample(
        self,
        sequence: &RunningSequence,
        terms: &RequestTerms,
        row: Logits<'_>,
        mask: Option<&Mask>,
        bias: &[(Token, f32)],
        temperature: Option<f32>,
    ) -> RowOutcome {
        let forbidden: Vec<Token> = if sequence.appended < terms.min_tokens {
            self.ends
                .iter()
                .copied()
                .chain(terms.single_stops())
                .collect()
        } else {
            Vec::new()
        };
        let good = terms.bad_words.as_ref().map(|bad| {
            let mut good = bad.mask(sequence.emitted());
            mask.iter().for_each(|mask| good.intersect(mask));
            good
        });
        let draw = SampleParams {
            sampling: &terms.sampling,
            seed: terms.seed,
            choice: sequence.choice,
            index: sequence.appended,
            history: sequence.history.as_ref(),
            forbidden: &forbidden,
            mask: good.as_ref().or(mask),
            bias,
            temperature,
            top_logprobs: terms.top_logprobs,
        };
        let sampled = match row {
            Logits::Whole(row) => self.sampler.sample(row, &draw),
            Logits::Ranked(ranking) => self.sampler.sample_ranked(&ranking, &draw),
        };
        match sampled {
            Ok(sample) => RowOutcome::Sampled(sample, mask.is_some_and(|mask| mask.count() == 1)),
            Err(error) => RowOutcome::Error(unsampleable(error, mask.is_some())),
        }
    }
}

pub(super) fn unsampleable(error: SampleError, masked: bool) -> EngineError {
    match error {
        SampleError::NotANumber => {
            EngineError::new(Code::Internal, "engine_error", error.to_string())
        }
        SampleError::NothingAllowed if masked => EngineError::new(
            Code::ControllerFailed,
            "constraint_failed",
            error.to_string(),
        ),
        SampleError::NothingAllowed => {
            let message = "logit_bias, bad_words and min_tokens together allow no token";
            EngineError::new(Code::InvalidRequest, "constraint_failed", message)
        }
    }
}
