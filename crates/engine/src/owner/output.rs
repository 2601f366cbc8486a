//! Appends sampled tokens to a sequence: context, text, events, and the checks for its end.

use compact_str::CompactString;
use sapwood_proto::steer::{Post, Token};
use sapwood_proto::time::Time;
use smallvec::{SmallVec, smallvec};

use super::EngineOwner;
use super::sampling::SoleToken;
use super::steering;
use crate::api::{ChoiceEnd, EventKind, FinishReason, Sampled, StopCause, Tokens};
use crate::sampling::Sample;
use crate::scheduler::SequenceKey;
use crate::text::ChoiceText;

impl EngineOwner {
    /// Appends a sampled token, and ends the sequence if the token ends it.
    pub(super) fn append_sampled(
        &mut self,
        key: SequenceKey,
        sample: Sample,
        lone: SoleToken,
        now: Time,
    ) {
        let Sample {
            token,
            logprob,
            rank,
            top,
        } = sample;
        let terms = self.terms(key);
        let is_end = self.ends.contains(&token) && !terms.ignore_eos;
        let sequence = &self.sequences[key];
        let output = &sequence.tokens[sequence.prompt_tokens..];
        // The token being appended counts towards `min_tokens`, as it does for stop strings.
        let stopping = sequence.appended + 1 >= terms.min_tokens;
        let by_tokens = terms
            .stop_sequence(output, token)
            .filter(|_| stopping)
            .map(<[_]>::to_vec);
        let sampled = Sampled {
            logprob,
            rank,
            top,
            ..self.sampled(token)
        };
        let hidden = is_end || by_tokens.is_some();
        let (text, stop_text) = self.push_text(key, token, hidden);
        self.count_token(key, now);
        let steered = self.sequences[key].steering.is_some();
        // Under a steerer an EOG token need not end the output; a space replaces it in the context (AI-804).
        let context = if is_end && steered {
            self.stand_in(token)
        } else {
            token
        };
        let joins = !steered && self.joins(key);
        self.sequences[key].record(&sampled, context);
        let tokens = Tokens {
            tokens: smallvec![sampled],
            text,
            ..Tokens::default()
        };
        self.emit_or_join(key, tokens, joins);
        let by_end = (is_end && (!steered || lone)).then(|| vec![token]);
        let by_text = stop_text.map(|index| StopCause::Text(self.terms(key).stop[index].clone()));
        let stop = by_tokens.or(by_end).map(StopCause::Tokens).or(by_text);
        self.end_after(key, token, stop, is_end);
    }

    /// Ends the sequence if the sampled token was the last one: by a stop, the steerer or the limits.
    fn end_after(&mut self, key: SequenceKey, token: Token, stop: Option<StopCause>, is_end: bool) {
        let steered = self.sequences[key].steering.is_some();
        let post = if steered {
            self.report_post(key, 0, &[token], true)
        } else {
            Some(Post::Continue)
        };
        let Some(post) = post else { return };
        if stop.is_some() {
            self.finish(
                key,
                ChoiceEnd {
                    reason: FinishReason::Stop,
                    stop,
                },
            );
        } else if post == Post::Stop {
            let reason = if is_end {
                FinishReason::Stop
            } else {
                FinishReason::Controller
            };
            self.finish(key, ChoiceEnd { reason, stop: None });
        } else {
            self.finish_if_full(key);
        }
    }

    /// Truncates the output by `backtrack` tokens and appends others, as a steerer requested.
    pub(super) fn splice(&mut self, key: SequenceKey, backtrack: u32, tokens: &[Token], now: Time) {
        if let Err(failure) = self.check_splice(key, backtrack, tokens) {
            self.fail(
                self.sequences[key].job,
                steering::to_engine_error(failure),
                true,
            );
            return;
        }
        let withdrawn = self.take_back(key, backtrack as usize);
        self.append_forced(key, backtrack, withdrawn, tokens, now);
        match self.report_post(key, backtrack, tokens, false) {
            Some(Post::Stop) => self.finish(
                key,
                ChoiceEnd {
                    reason: FinishReason::Controller,
                    stop: None,
                },
            ),
            Some(Post::Continue) => self.finish_if_full(key),
            None => {}
        }
    }

    /// Appends forced tokens. Tokens past the limit are dropped.
    pub(super) fn append_forced(
        &mut self,
        key: SequenceKey,
        backtrack: u32,
        withdrawn: u32,
        tokens: &[Token],
        now: Time,
    ) {
        let mut text = String::new();
        let mut forced = SmallVec::with_capacity(tokens.len());
        for &token in tokens {
            if self.is_full(key) {
                break;
            }
            // Stop strings apply to sampled text only; a steerer ends its output itself.
            self.push_forced_text(key, token, &mut text);
            self.count_token(key, now);
            let asked = self.terms(key).top_logprobs;
            let logprob = if asked.is_some() { 0.0 } else { f32::NAN };
            let top = asked
                .filter(|&top| top > 0)
                .map_or_else(Vec::new, |_| vec![(token, 0.0)]);
            let sampled = Sampled {
                logprob,
                rank: asked.map(|_| 1),
                top,
                forced: true,
                ..self.sampled(token)
            };
            self.sequences[key].record(&sampled, token);
            forced.push(sampled);
        }
        let computed = self.sequences[key].computed;
        if computed == self.sequences[key].tokens.len() {
            // Nothing was appended: the output row after the last remaining token is needed again.
            self.cut_back(key, computed - 1);
        }
        let text = CompactString::from(text);
        self.emit_tokens(
            key,
            Tokens {
                backtrack,
                withdrawn,
                tokens: forced,
                text,
                ..Tokens::default()
            },
        );
    }

    /// Truncates context, penalty history and text by `count` tokens; returns the bytes of reported text that are void.
    fn take_back(&mut self, key: SequenceKey, count: usize) -> u32 {
        if count == 0 {
            return 0;
        }
        let sequence = &mut self.sequences[key];
        let left = sequence.tokens.len() - count;
        sequence.tokens.truncate(left);
        if let Some(steering) = &mut sequence.steering {
            let cached = steering.output.len() - count;
            for taken in steering.output.drain(cached..) {
                if let Some(history) = &mut sequence.history {
                    history.take_back(taken.id);
                }
            }
        }
        let before = sequence.text.shown();
        let (text, _) = self.replay(key);
        let sequence = &mut self.sequences[key];
        sequence.text = text;
        let withdrawn = before.saturating_sub(sequence.text.shown());
        self.cut_back(key, left);
        u32::try_from(withdrawn).unwrap_or(u32::MAX)
    }

    /// Rebuilds the text of a steered sequence from its output. The same tokens give the same text, so this is the text
    /// that had been sent when the output ended there.
    pub(super) fn replay(&self, key: SequenceKey) -> (ChoiceText, String) {
        let sequence = &self.sequences[key];
        let output = sequence
            .steering
            .as_ref()
            .map_or(&[][..], |steering| &steering.output);
        let (mut text, mut shown) = (ChoiceText::default(), String::new());
        for sampled in output {
            // No stop string ended the output then, so none is searched for.
            let terms = self.terms(key);
            let bytes = terms.bytes(&*self.vocabulary, sampled.id);
            text.push(&bytes, &terms.stop, false, &mut shown);
        }
        (text, shown)
    }

    /// Returns the text that is ready to be sent after a sampled token, and the index of the stop string that it
    /// completes. A hidden token adds no text.
    pub(super) fn push_text(
        &mut self,
        key: SequenceKey,
        token: Token,
        hidden: bool,
    ) -> (CompactString, Option<usize>) {
        let sequence = &mut self.sequences[key];
        let terms = &self.jobs[sequence.job].terms;
        if hidden {
            return (CompactString::default(), None);
        }
        let bytes = terms.bytes(&*self.vocabulary, token);
        if let Some(text) = sequence.text.pass(&bytes, &terms.stop) {
            return (text, None);
        }
        // The token being appended counts: the last token of the minimum may complete a stop string.
        let stopping = sequence.appended + 1 >= terms.min_tokens;
        let mut out = String::new();
        let stop = sequence.text.push(&bytes, &terms.stop, stopping, &mut out);
        (out.into(), stop)
    }

    /// A [`Sampled`] with the token alone: no log-probability, rank or alternatives.
    pub(super) fn sampled(&self, token: Token) -> Sampled {
        Sampled {
            id: token,
            logprob: f32::NAN,
            rank: None,
            top: Vec::new(),
            special: self.vocabulary.is_special(token),
            forced: false,
        }
    }

    fn push_forced_text(&mut self, key: SequenceKey, token: Token, out: &mut String) {
        let sequence = &mut self.sequences[key];
        let terms = &self.jobs[sequence.job].terms;
        let bytes = terms.bytes(&*self.vocabulary, token);
        sequence.text.push(&bytes, &terms.stop, false, out);
    }

    pub(super) fn count_token(&mut self, key: SequenceKey, now: Time) {
        let stats = &self.inbox.stats;
        let sequence = &mut self.sequences[key];
        let job = &mut self.jobs[sequence.job];
        sequence.appended += 1;
        job.completion_tokens += 1;
        self.report.appended += 1;
        if let Some(last) = sequence.last_token_at.replace(now) {
            stats.inter_token_seconds.observe_span(now.since(last));
        }
        if job.first_token.is_none() {
            job.first_token = Some(now);
            stats
                .first_token_seconds
                .observe_span(now.since(job.arrived));
            if let Some(started) = job.started {
                stats.prefill_seconds.observe_span(now.since(started));
            }
        }
    }

    pub(super) fn is_full(&self, key: SequenceKey) -> bool {
        let sequence = &self.sequences[key];
        sequence.appended >= self.terms(key).max_tokens
            || sequence.tokens.len() >= self.info.context_tokens as usize
    }

    pub(super) fn finish_if_full(&mut self, key: SequenceKey) {
        if self.is_full(key) {
            self.finish(
                key,
                ChoiceEnd {
                    reason: FinishReason::Length,
                    stop: None,
                },
            );
        }
    }

    /// Returns whether the token to be appended is reported together with the one after it.
    fn joins(&self, key: SequenceKey) -> bool {
        let sequence = &self.sequences[key];
        let output = sequence.tokens.len() - sequence.prompt_tokens;
        sequence
            .slot
            .is_some_and(|slot| self.model.joins(slot, output))
    }

    /// Emits tokens together with the unreported ones before them; with `joins`, retains all of them for the next
    /// event.
    fn emit_or_join(&mut self, key: SequenceKey, tokens: Tokens, joins: bool) {
        let untold = self.sequences[key].untold.take();
        let tokens = match untold {
            Some(earlier) => earlier.followed_by(tokens),
            None => tokens,
        };
        if joins {
            self.sequences[key].untold = Some(Box::new(tokens));
        } else {
            self.emit_tokens(key, tokens);
        }
    }

    /// Emits the retained tokens, because no token follows them.
    pub(super) fn emit_unreported(&mut self, key: SequenceKey) {
        if let Some(tokens) = self.sequences[key].untold.take() {
            self.emit_tokens(key, *tokens);
        }
    }

    pub(super) fn emit_tokens(&mut self, key: SequenceKey, mut tokens: Tokens) {
        tokens.prompt = self.sequences[key].take_prompt_scores();
        let (job, choice) = (self.sequences[key].job, self.sequences[key].choice);
        self.emit(job, choice, EventKind::Tokens(tokens));
    }

    pub(super) fn terms(&self, key: SequenceKey) -> &crate::submission::RequestTerms {
        &self.jobs[self.sequences[key].job].terms
    }

    fn stand_in(&self, end: Token) -> Token {
        self.vocabulary
            .tokenize(" ", false)
            .first()
            .copied()
            .unwrap_or(end)
    }
}
