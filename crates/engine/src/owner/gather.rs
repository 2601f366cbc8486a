//! Rows become tokens: what the model says, what the steerer says, and the sample of both.
//!
//! Owns: the second half of a step for each sequence with a row. Refuses to know: how the row was computed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::steer::{Mask, Token};
use sapwood_proto::time::Time;

use super::Owner;
use super::sequence::{KeptRow, Sequence};
use super::steering::{Middle, Rules};
use crate::api::{Fault, Finish, Reason};
use crate::model::{Model, Row};
use crate::ranking::Ranking;
use crate::sampling::{Draw, Sample, Sampler, Unsampleable};
use crate::scheduler::Key;
use crate::stats::Counter;
use crate::submission::Terms;

/// A row that a token can be taken from.
pub(super) enum Logits<'a> {
    Whole(&'a mut [f32]),
    Ranked(Ranking),
}

impl Logits<'_> {
    fn keep(self) -> KeptRow {
        match self {
            Logits::Whole(row) => KeptRow::Logits(row.to_vec()),
            Logits::Ranked(ranking) => KeptRow::Ranked(ranking),
        }
    }
}

/// What comes of one row.
pub(super) enum Outcome {
    Sampled(Sample, Lone),
    Splice {
        backtrack: u32,
        tokens: Vec<Token>,
    },
    Finish(Reason),
    NotBefore(Time),
    Fault(Fault),
    /// The row was kept; nothing happened.
    Waits,
}

/// Whether the mask allowed only the token sampled (AI-804).
pub(super) type Lone = bool;

impl Owner {
    /// Takes a token from every row of this step and from every row that was kept for a late steerer.
    pub(super) fn gather(&mut self, now: Time) {
        let mut order = std::mem::take(&mut self.scratch.order);
        order.clear();
        order.extend(
            self.scheduler
                .running()
                .filter(|&key| self.sequences[key].kept_row.is_some()),
        );
        for &key in &order {
            if !self.sequences.contains(key) || self.sequences[key].is_suspended() {
                continue;
            }
            if let Some(row) = self.sequences[key].kept_row.take() {
                let outcome = self.take_kept(key, row, now);
                self.follow(key, outcome, now);
            }
        }
        self.scratch.order = order;
        let rows = std::mem::take(&mut self.scratch.rows);
        for &(key, index) in &rows {
            // A sibling's fault in this very loop may have ended it.
            match self.sequences.get(key) {
                // An earlier row of this step is still to come, and the slot was cut back to it.
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

    fn take(&mut self, key: Key, index: usize, now: Time) -> Outcome {
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

    fn take_kept(&mut self, key: Key, row: KeptRow, now: Time) -> Outcome {
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
            KeptRow::Logits(mut row) => steps.decide(sequence, terms, Logits::Whole(&mut row), now),
            KeptRow::Ranked(ranking) => steps.decide(sequence, terms, Logits::Ranked(ranking), now),
        }
    }

    fn rules(&self) -> Rules {
        Rules {
            patience: Duration::from_millis(self.config.steer_ms),
            vocabulary: self.info.vocabulary_tokens as usize,
        }
    }

    pub(super) fn follow(&mut self, key: Key, outcome: Outcome, now: Time) {
        match outcome {
            Outcome::Sampled(sample, lone) => self.append_sampled(key, sample, lone, now),
            Outcome::Splice { backtrack, tokens } => self.splice(key, backtrack, &tokens, now),
            Outcome::Finish(reason) => self.finish(key, Finish { reason, stop: None }),
            Outcome::NotBefore(until) => {
                self.sequences[key].asleep_until = Some(until);
                let computed = self.sequences[key].computed;
                self.cut_back(key, computed - 1);
            }
            Outcome::Fault(fault) => self.fault(self.sequences[key].job, fault, true),
            Outcome::Waits => {
                if self.sequences[key].is_late() {
                    self.report.late.push(self.sequences[key].number);
                }
            }
        }
    }
}

/// The row of an entry of the last batch, or what comes instead of a token.
pub(super) fn ask<'a>(
    model: &'a mut dyn Model,
    panics: &Counter,
    index: usize,
    now: Time,
) -> Result<Logits<'a>, Outcome> {
    match catch_unwind(AssertUnwindSafe(once(move || model.row(index, now)))) {
        Ok(Row::Logits(row)) => Ok(Logits::Whole(row)),
        Ok(Row::Ranked(ranking)) => Ok(Logits::Ranked(ranking)),
        Ok(Row::NotBefore(until)) => Err(Outcome::NotBefore(until)),
        Ok(Row::End(reason)) => Err(Outcome::Finish(reason)),
        Ok(Row::Failed(fault)) => Err(Outcome::Fault(fault)),
        Err(_panic) => {
            panics.add(1);
            let message = "the model failed on this request";
            let fault = Fault::new(Code::Internal, "model_panic", message);
            Err(Outcome::Fault(fault))
        }
    }
}

/// A closure that may give away what it captured.
fn once<T>(call: impl FnOnce() -> T) -> impl FnOnce() -> T {
    call
}

/// What deciding needs of the owner beside the sequence.
struct Steps<'a> {
    sampler: &'a mut Sampler,
    ends: &'a [Token],
    rules: Rules,
    panics: &'a Counter,
}

impl Steps<'_> {
    fn decide(self, sequence: &mut Sequence, terms: &Terms, row: Logits<'_>, now: Time) -> Outcome {
        match sequence.poll_mid(now, self.rules, self.panics) {
            Ok(Middle::Sample {
                mask,
                bias,
                temperature,
            }) => self.sample(sequence, terms, row, mask.as_ref(), &bias, temperature),
            Ok(Middle::Splice { backtrack, tokens }) => Outcome::Splice { backtrack, tokens },
            Ok(Middle::Stop) => Outcome::Finish(Reason::Controller),
            Ok(Middle::Waits) => {
                sequence.kept_row = Some(row.keep());
                Outcome::Waits
            }
            Err(failure) => Outcome::Fault(super::steering::fault(failure)),
        }
    }

    fn sample(
        self,
        sequence: &Sequence,
        terms: &Terms,
        row: Logits<'_>,
        mask: Option<&Mask>,
        bias: &[(Token, f32)],
        temperature: Option<f32>,
    ) -> Outcome {
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
            let mut good = bad.mask(sequence.said());
            mask.iter().for_each(|mask| good.intersect(mask));
            good
        });
        let draw = Draw {
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
            Ok(sample) => Outcome::Sampled(sample, mask.is_some_and(|mask| mask.count() == 1)),
            Err(error) => Outcome::Fault(unsampleable(error, mask.is_some())),
        }
    }
}

pub(super) fn unsampleable(error: Unsampleable, masked: bool) -> Fault {
    match error {
        Unsampleable::NotANumber => Fault::new(Code::Internal, "engine_error", error.to_string()),
        Unsampleable::NothingAllowed if masked => Fault::new(
            Code::ControllerFailed,
            "constraint_failed",
            error.to_string(),
        ),
        Unsampleable::NothingAllowed => {
            let message = "logit_bias, bad_words and min_tokens together allow no token";
            Fault::new(Code::InvalidRequest, "constraint_failed", message)
        }
    }
}
