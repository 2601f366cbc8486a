//! Scores given tokens, those of an output (LM-311, LM-312) or of a prompt (LM-974): one prefill, and a log-probability
//! from each output row.
//!
//! A scored sequence has its whole output except the last token among its tokens from the start. For the rest of the
//! engine it is therefore a prompt: it is prefilled in chunks, shares prefixes, and is parked, preempted and cancelled
//! like any other. The only difference is that output rows are needed from the last token of the prompt on.

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::requests::Requests;
use super::sampling::{Logits, RowOutcome, RowSampling, logits, sample_error};
use crate::api::EngineError;
use crate::sampling::{Sample, SampleError, Sampler};
use crate::scheduler::SequenceKey;

/// Reports the first token of an output that no token precedes, with log-probability 0.
pub(super) fn score_first(requests: &mut Requests, key: SequenceKey, now: Time) {
    if let Some(token) = next_scored(requests, key) {
        let sample = Sample {
            token,
            logprob: 0.0,
            rank: Some(1),
            top: Vec::new(),
            mirostat: None,
        };
        requests.append_scored(key, sample, now);
    }
}

impl RowSampling {
    /// Scores the next token of a given output with an output row.
    pub(super) fn score(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        index: usize,
        now: Time,
    ) {
        let Some(token) = next_scored(requests, key) else {
            let message = "an output row was computed after the last scored token";
            let error = EngineError::internal(ErrorReason::NONE, message);
            return requests.fail_request_of(key, error);
        };
        // A score is always computed; without `top_logprobs` only the list of alternatives is empty (LM-311).
        let top = requests.terms(key).top_logprobs.unwrap_or(0) as usize;
        match self.score_token(requests, token, top, index, now) {
            Ok(sample) => requests.append_scored(key, sample, now),
            Err(outcome) => self.apply_unscored(requests, key, outcome, now),
        }
    }

    /// Scores the next token of the prompt with an output row (LM-974).
    pub(super) fn score_prompt(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        index: usize,
        now: Time,
    ) {
        let sequence = &requests.sequences[key];
        let Some(next) = sequence.next_in_prompt() else {
            return;
        };
        let token = sequence.tokens[next];
        // No alternatives for the prompt: LM-974 reports one number per token.
        match self.score_token(requests, token, 0, index, now) {
            Ok(sample) => {
                if let Some(scores) = &mut requests.sequences[key].prompt_scores {
                    scores.push(sample.logprob);
                }
            }
            Err(outcome) => self.apply_unscored(requests, key, outcome, now),
        }
    }

    fn score_token(
        &mut self,
        requests: &mut Requests,
        token: Token,
        top: usize,
        index: usize,
        now: Time,
    ) -> Result<Sample, RowOutcome> {
        // Never masked: scores are without bias and masks, so that they agree with a plain generation (LM-312, LM-314).
        let failed = |error: SampleError| RowOutcome::Error(sample_error(&error));
        match logits(&mut requests.slots, &requests.stats.panics, index, now)? {
            Logits::Whole(row) => self.sampler.score_row(row, token, top).map_err(failed),
            Logits::Ranked(ranking) => Ok(Sampler::score_ranked(&ranking, token, top)),
        }
    }

    /// Applies an outcome without logits: the row is available later, or not at all.
    fn apply_unscored(
        &mut self,
        requests: &mut Requests,
        key: SequenceKey,
        outcome: RowOutcome,
        now: Time,
    ) {
        match outcome {
            RowOutcome::NotBefore(until) => {
                let sequence = &mut requests.sequences[key];
                sequence.asleep_until = Some(until);
                // Later rows of this step are dropped with it: scores are reported in order.
                let first_row = sequence.first_row();
                requests.truncate(key, first_row);
            }
            RowOutcome::Finish(_) => {
                let message = "the model ends before the tokens to be scored do";
                let error = EngineError::new(Code::FailedPrecondition, ErrorReason::NONE, message);
                requests.fail_request_of(key, error);
            }
            outcome => self.apply(requests, key, outcome, now),
        }
    }
}

/// Returns the token that is scored next, if the sequence's output is given.
fn next_scored(requests: &Requests, key: SequenceKey) -> Option<Token> {
    let next = requests.sequences[key].appended;
    requests.terms(key).scored_token(next)
}
