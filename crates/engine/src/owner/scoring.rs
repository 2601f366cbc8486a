//! Scores given tokens, those of an output (LM-311, LM-312) or of a prompt (LM-974): one prefill, and a log-probability
//! from each output row.
//!
//! A scored sequence has its whole output except the last token among its tokens from the start. For the rest of the
//! engine it is therefore a prompt: it is prefilled in chunks, shares prefixes, and is parked, preempted and cancelled
//! like any other. The only difference is that output rows are needed from the last token of the prompt on.

use sapwood_proto::code::Code;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use smallvec::smallvec;

use super::EngineOwner;
use super::sampling::{Logits, RowOutcome, ask, unsampleable};
use crate::api::{ChoiceEnd, EngineError, EngineEvent, EventKind, FinishReason, Sampled, Tokens};
use crate::sampling::{Sample, Sampler};
use crate::scheduler::SequenceKey;

impl EngineOwner {
    /// Shortens shares so that the batch needs no more output rows than the model has. One row is reserved for each
    /// running sequence.
    pub(super) fn ration_rows(&mut self) {
        let mut spare = self.spare_rows;
        for share in &mut self.scratch.shares {
            let sequence = &self.sequences[share.key];
            let until = sequence.computed + share.tokens;
            let more = until.saturating_sub(sequence.first_row() + 1);
            let granted = more.min(spare);
            spare -= granted;
            share.tokens -= more - granted;
        }
    }

    /// Reports the first token of an output that no token precedes, with log-probability 0.
    pub(super) fn score_only_step(&mut self, key: SequenceKey, now: Time) {
        if let Some(token) = self.next_scored(key) {
            let sample = Sample {
                token,
                logprob: 0.0,
                rank: Some(1),
                top: Vec::new(),
            };
            self.append_scored(key, sample, now);
        }
    }

    /// Scores the next token with an output row.
    pub(super) fn score(&mut self, key: SequenceKey, index: usize, now: Time) {
        let Some(token) = self.next_scored(key) else {
            let error =
                EngineError::new(Code::Internal, "", "a row was computed that nobody wants");
            return self.follow(key, RowOutcome::Error(error), now);
        };
        let top = self.terms(key).top_logprobs.unwrap_or(0) as usize;
        match self.score_token(token, top, index, now) {
            Ok(sample) => self.append_scored(key, sample, now),
            Err(outcome) => self.follow_unweighed(key, outcome, now),
        }
    }

    /// Scores the next token of the prompt with an output row (LM-974).
    pub(super) fn score_prompt(&mut self, key: SequenceKey, index: usize, now: Time) {
        let sequence = &self.sequences[key];
        let Some(next) = sequence.next_in_prompt() else {
            return;
        };
        match self.score_token(sequence.tokens[next], 0, index, now) {
            Ok(sample) => {
                let scores = &mut self.sequences[key].prompt_scores;
                scores
                    .iter_mut()
                    .for_each(|scores| scores.push(sample.logprob));
            }
            Err(outcome) => self.follow_unweighed(key, outcome, now),
        }
    }

    /// Handles an outcome without logits: the row is available later, or not at all.
    fn follow_unweighed(&mut self, key: SequenceKey, outcome: RowOutcome, now: Time) {
        match outcome {
            RowOutcome::NotBefore(until) => {
                let first_row = self.sequences[key].first_row();
                self.sequences[key].asleep_until = Some(until);
                self.cut_back(key, first_row);
            }
            RowOutcome::Finish(_) => {
                let message = "the model ends before the tokens to be scored do";
                let error = EngineError::new(Code::FailedPrecondition, "", message);
                self.fail(self.sequences[key].job, error, true);
            }
            outcome => self.follow(key, outcome, now),
        }
    }

    fn score_token(
        &mut self,
        token: Token,
        top: usize,
        index: usize,
        now: Time,
    ) -> Result<Sample, RowOutcome> {
        let failed = |error| RowOutcome::Error(unsampleable(error, false));
        match ask(&mut *self.model, &self.inbox.stats.panics, index, now)? {
            Logits::Whole(row) => self.sampler.score_row(row, token, top).map_err(failed),
            Logits::Ranked(ranking) => Ok(Sampler::score_ranked(&ranking, token, top)),
        }
    }

    fn next_scored(&self, key: SequenceKey) -> Option<Token> {
        let scored = self.terms(key).scored.as_ref()?;
        scored
            .tokens
            .get(self.sequences[key].appended as usize)
            .copied()
    }

    /// Reports a scored token, and ends the sequence with the last one. The tokens of one step form one event.
    fn append_scored(&mut self, key: SequenceKey, sample: Sample, now: Time) {
        let Sample {
            token,
            logprob,
            rank,
            top,
        } = sample;
        let sampled = Sampled {
            logprob,
            rank,
            top,
            ..self.sampled(token)
        };
        let (text, _) = self.push_text(key, token, false);
        self.count_token(key, now);
        let job = self.sequences[key].job;
        match self.outgoing.last_mut() {
            Some((
                to,
                EngineEvent {
                    kind: EventKind::Tokens(tokens),
                    ..
                },
            )) if *to == job => {
                tokens.tokens.push(sampled);
                tokens.text.push_str(&text);
            }
            _ => self.emit_tokens(
                key,
                Tokens {
                    tokens: smallvec![sampled],
                    text,
                    ..Tokens::default()
                },
            ),
        }
        if self.next_scored(key).is_none() {
            let reason = FinishReason::Stop;
            self.finish(key, ChoiceEnd { reason, stop: None });
        }
    }
}
