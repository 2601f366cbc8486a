//! Tokens that are given are weighed, those of an output (LM-311, LM-312) or of a prompt (LM-974): one prefill, and a
//! log-probability from each of its rows.
//!
//! Owns: the rows of what is weighed, and how many a step may have. Refuses to know: sampling; nothing is drawn here.
//!
//! A scored sequence has its whole output among its tokens from the beginning, all but the last. So it is a prompt to
//! everybody else: it is prefilled in chunks, shares prefixes, is parked, preempted and cancelled like any other. Only
//! its rows are wanted from the last token of the prompt on.

use sapwood_proto::code::Code;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;
use smallvec::smallvec;

use super::Owner;
use super::gather::{Logits, Outcome, ask, unsampleable};
use crate::api::{Event, Fault, Finish, Kind, Reason, Sampled, Tokens};
use crate::sampling::{Sample, Sampler};
use crate::scheduler::Key;

impl Owner {
    /// Shortens shares so that the batch has no more rows than the model can give. Everybody who runs has one.
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

    /// The first token of an output that nothing precedes: it is as likely as can be.
    pub(super) fn score_headless(&mut self, key: Key, now: Time) {
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

    /// Weighs the next token by a row.
    pub(super) fn score(&mut self, key: Key, index: usize, now: Time) {
        let Some(token) = self.next_scored(key) else {
            let fault = Fault::new(Code::Internal, "", "a row was computed that nobody wants");
            return self.follow(key, Outcome::Fault(fault), now);
        };
        let top = self.terms(key).top_logprobs.unwrap_or(0) as usize;
        match self.weigh(token, top, index, now) {
            Ok(sample) => self.append_scored(key, sample, now),
            Err(outcome) => self.follow_unweighed(key, outcome, now),
        }
    }

    /// Weighs the next token of the prompt by a row (LM-974).
    pub(super) fn score_prompt(&mut self, key: Key, index: usize, now: Time) {
        let sequence = &self.sequences[key];
        let Some(next) = sequence.next_in_prompt() else {
            return;
        };
        match self.weigh(sequence.tokens[next], 0, index, now) {
            Ok(sample) => {
                let scores = &mut self.sequences[key].prompt_scores;
                scores
                    .iter_mut()
                    .for_each(|scores| scores.push(sample.logprob));
            }
            Err(outcome) => self.follow_unweighed(key, outcome, now),
        }
    }

    /// A row that is wanted later, or that there is none of.
    fn follow_unweighed(&mut self, key: Key, outcome: Outcome, now: Time) {
        match outcome {
            Outcome::NotBefore(until) => {
                let first_row = self.sequences[key].first_row();
                self.sequences[key].asleep_until = Some(until);
                self.cut_back(key, first_row);
            }
            Outcome::Finish(_) => {
                let message = "the model ends before the tokens to be scored do";
                let fault = Fault::new(Code::FailedPrecondition, "", message);
                self.fault(self.sequences[key].job, fault, true);
            }
            outcome => self.follow(key, outcome, now),
        }
    }

    fn weigh(
        &mut self,
        token: Token,
        top: usize,
        index: usize,
        now: Time,
    ) -> Result<Sample, Outcome> {
        let failed = |error| Outcome::Fault(unsampleable(error, false));
        match ask(&mut *self.model, &self.inbox.stats.panics, index, now)? {
            Logits::Whole(row) => self.sampler.weigh(row, token, top).map_err(failed),
            Logits::Ranked(ranking) => Ok(Sampler::weigh_ranked(&ranking, token, top)),
        }
    }

    fn next_scored(&self, key: Key) -> Option<Token> {
        let scored = self.terms(key).scored.as_ref()?;
        scored
            .tokens
            .get(self.sequences[key].appended as usize)
            .copied()
    }

    /// Tells a weighed token, and ends the sequence with the last one. Those of one step are one event.
    fn append_scored(&mut self, key: Key, sample: Sample, now: Time) {
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
                Event {
                    kind: Kind::Tokens(tokens),
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
            let reason = Reason::Stop;
            self.finish(key, Finish { reason, stop: None });
        }
    }
}
