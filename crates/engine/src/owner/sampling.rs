//! [`RowSampling`]: turns the output rows of a step into tokens. Logits and the steerer's mask give one token each.

use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Branch, Mid, Sample as SteeredSample, Splice, SteerFailure, Token};
use sapwood_proto::time::Time;

use super::kv_slots::KvSlots;
use super::requests::Requests;
use super::sequence::{CachedRow, RunningSequence};
use super::steering::SteerRules;
use crate::api::{EngineError, FinishReason};
use crate::model::OutputRow;
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
    fn retain(self) -> CachedRow {
        match self {
            Logits::Whole(row) => CachedRow::Logits(row.to_vec()),
            Logits::Ranked(ranking) => CachedRow::Ranked(ranking),
        }
    }
}

/// The result of one output row.
pub(super) enum RowOutcome {
    Sampled(Sample, SoleToken),
    Splice(Splice),
    Finish(FinishReason),
    NotBefore(Time),
    Error(EngineError),
    /// The row was cached for later; nothing was appended.
    Waits,
}

/// Whether the mask allowed only the token sampled (AI-804).
pub(super) type SoleToken = bool;

/// Samples and scores output rows.
pub(super) struct RowSampling {
    pub(super) sampler: Sampler,
    rules: SteerRules,
    /// Buffer that retains its allocation.
    order: Vec<SequenceKey>,
}

impl RowSampling {
    pub(super) fn new(steer_ms: u64, vocabulary_tokens: u32) -> Self {
        Self {
            sampler: Sampler::default(),
            rules: SteerRules {
                deadline_budget: Duration::from_millis(steer_ms),
                vocabulary: vocabulary_tokens as usize,
            },
            order: Vec::new(),
        }
    }

    /// Takes a token from every row that was cached for a late steerer, and from every output row of this step (pairs
    /// of a sequence and the index of the row's entry in the batch).
    pub(super) fn collect(
        &mut self,
        requests: &mut Requests,
        rows: &[(SequenceKey, usize)],
        now: Time,
    ) {
        // Taken out of `self`, which sampling borrows as a whole.
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        let waits = |&key: &SequenceKey| requests.sequences[key].cached_row.is_some();
        order.extend(requests.scheduler.running().filter(waits));
        for &key in &order {
            // The failure of a sibling in this loop may have ended it.
            let sequence = requests.sequences.get_mut(key);
            let Some(sequence) = sequence.filter(|sequence| !sequence.is_suspended()) else {
                continue;
            };
            if let Some(row) = sequence.cached_row.take() {
                let outcome = self.sample_cached(requests, key, row, now);
                apply(requests, key, outcome, now);
            }
        }
        self.order = order;
        // Cached rows come first: they belong to earlier steps. A sequence with a cached row computes nothing, so it
        // has no row in this batch.
        for &(key, index) in rows {
            match requests.sequences.get(key) {
                // An earlier row of this step is not available yet, and the slot was truncated to it.
                Some(sequence) if sequence.asleep_until.is_some() => {}
                // Rows of one sequence are in the order of its tokens, so those of the prompt come before those of the
                // output.
                Some(sequence) if sequence.next_in_prompt().is_some() => {
                    self.score_prompt(requests, key, index, now);
                }
                Some(sequence) if sequence.scored => self.score(requests, key, index, now),
                Some(_) => {
                    let outcome = self.sample_row(requests, key, index, now);
                    apply(requests, key, outcome, now);
                }
                // An earlier row of this loop ended its request.
                None => {}
            }
        }
    }

    #[inline]
    fn sample_row(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        index: usize,
        now: Time,
    ) -> RowOutcome {
        let panics = &requests.stats.panics;
        let sequence = &mut requests.sequences[key];
        let terms = &requests.jobs[sequence.job].submission.terms;
        match logits(&mut requests.slots, panics, index, now) {
            Ok(row) => self.decide(sequence, terms, &requests.tokens.ends, row, panics, now),
            Err(outcome) => outcome,
        }
    }

    fn sample_cached(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        mut row: CachedRow,
        now: Time,
    ) -> RowOutcome {
        let panics = &requests.stats.panics;
        let sequence = &mut requests.sequences[key];
        let terms = &requests.jobs[sequence.job].submission.terms;
        let row = match &mut row {
            CachedRow::Logits(row) => Logits::Whole(row),
            CachedRow::Ranked(ranking) => Logits::Ranked(ranking.clone()),
        };
        self.decide(sequence, terms, &requests.tokens.ends, row, panics, now)
    }

    /// Asks the steerer, if there is one, and samples unless it decides otherwise.
    #[inline]
    fn decide(
        &mut self,
        sequence: &mut RunningSequence,
        terms: &RequestTerms,
        ends: &[Token],
        row: Logits<'_>,
        panics: &Counter,
        now: Time,
    ) -> RowOutcome {
        let Some(steering) = &mut sequence.steering else {
            return self.sample(sequence, terms, ends, row, &SteeredSample::default());
        };
        match steering.poll_mid(now, self.rules, panics) {
            Ok(Some(Mid::One(Branch::Sample(sample)))) => {
                self.sample(sequence, terms, ends, row, &sample)
            }
            Ok(Some(Mid::One(Branch::Splice(splice)))) => RowOutcome::Splice(splice),
            Ok(Some(Mid::Fork(_))) => RowOutcome::Error(
                SteerFailure {
                    reason: ErrorReason::LIMIT,
                    message: "a sequence cannot be forked at sampling".to_owned(),
                }
                .into(),
            ),
            Ok(Some(Mid::Stop)) => RowOutcome::Finish(FinishReason::Controller),
            // After a noop the row is sampled in a later step, after another round: nothing happens to the sequence
            // (AI-505).
            Ok(Some(Mid::One(Branch::Noop)) | None) => {
                // Copied, because the model overwrites its rows with the next batch. The sequence then needs no second
                // decode call (AI-812).
                sequence.cached_row = Some(row.retain());
                RowOutcome::Waits
            }
            Err(failure) => RowOutcome::Error(failure.into()),
        }
    }

    #[inline]
    fn sample(
        &mut self,
        sequence: &RunningSequence,
        terms: &RequestTerms,
        ends: &[Token],
        row: Logits<'_>,
        steered: &SteeredSample,
    ) -> RowOutcome {
        let forbidden: Vec<Token> = if sequence.appended < terms.min_tokens {
            let ends = ends.iter().copied();
            ends.chain(terms.single_stops()).collect()
        } else {
            Vec::new()
        };
        // Bad words and the steerer's mask apply together: only tokens that both allow remain.
        let mask = steered.mask.as_deref();
        let good = terms.bad_words.as_ref().map(|bad| {
            // Computed for every token: which tokens would complete a word depends on the output so far.
            let mut good = bad.mask(sequence.emitted());
            mask.iter().for_each(|mask| good.intersect(mask));
            good
        });
        let params = SampleParams {
            sampling: &terms.sampling,
            seed: terms.seed,
            choice: sequence.choice,
            // Rolled-back tokens count as well, so that a position that is sampled again gets a new draw.
            index: sequence.appended,
            history: sequence.history.as_ref(),
            forbidden: &forbidden,
            mask: good.as_ref().or(mask),
            bias: &steered.bias,
            temperature: steered.temperature,
            top_logprobs: terms.top_logprobs,
        };
        let sampled = match row {
            Logits::Whole(row) => self.sampler.sample(row, &params),
            Logits::Ranked(ranking) => self.sampler.sample_ranked(&ranking, &params),
        };
        match sampled {
            // The steerer's mask alone decides: bad words that leave a single token do not end an output.
            Ok(sample) => RowOutcome::Sampled(sample, mask.is_some_and(|mask| mask.count() == 1)),
            Err(error) => RowOutcome::Error(sample_error(error, mask.is_some())),
        }
    }
}

/// Applies the outcome of a row to its sequence.
#[inline]
pub(super) fn apply(requests: &mut Requests, key: SequenceKey, outcome: RowOutcome, now: Time) {
    match outcome {
        RowOutcome::Sampled(sample, sole) => requests.append_sampled(key, sample, sole, now),
        RowOutcome::Splice(splice) => requests.splice(key, &splice, now),
        RowOutcome::Finish(reason) => requests.finish(key, reason, None),
        RowOutcome::NotBefore(until) => {
            let sequence = &mut requests.sequences[key];
            sequence.asleep_until = Some(until);
            // The model computes the row anew when it is available, so its token counts as not computed.
            let computed = sequence.computed - 1;
            requests.truncate(key, computed);
        }
        RowOutcome::Error(error) => requests.fail_request_of(key, error),
        RowOutcome::Waits => {
            let sequence = &requests.sequences[key];
            if sequence.is_in_mid() {
                requests.report.late.push(sequence.number);
            }
        }
    }
}

/// Returns the logits of an entry of the last batch, or the outcome that replaces a token.
pub(super) fn logits<'a>(
    slots: &'a mut KvSlots,
    panics: &Counter,
    index: usize,
    now: Time,
) -> Result<Logits<'a>, RowOutcome> {
    match slots.row(index, now, panics) {
        OutputRow::Logits(row) => Ok(Logits::Whole(row)),
        OutputRow::Ranked(ranking) => Ok(Logits::Ranked(ranking)),
        OutputRow::NotBefore(until) => Err(RowOutcome::NotBefore(until)),
        OutputRow::End(reason) => Err(RowOutcome::Finish(reason)),
        OutputRow::Failed(error) => Err(RowOutcome::Error(error)),
    }
}

pub(super) fn sample_error(error: SampleError, masked: bool) -> EngineError {
    match error {
        SampleError::NotANumber => {
            EngineError::internal(ErrorReason::ENGINE_ERROR, error.to_string())
        }
        // The controller is at fault if it gave a mask, the request otherwise.
        SampleError::NothingAllowed if masked => EngineError::new(
            Code::ControllerFailed,
            ErrorReason::CONSTRAINT_FAILED,
            error.to_string(),
        ),
        SampleError::NothingAllowed => {
            let message = "logit_bias, bad_words and min_tokens together allow no token";
            EngineError::invalid(ErrorReason::CONSTRAINT_FAILED, message)
        }
    }
}
