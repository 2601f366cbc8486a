//! Appends tokens to a sequence, sampled, forced or scored: context, text, events, and the checks for its end.

use compact_str::CompactString;
use sapwood_proto::steer::{Appended, Post, Token};
use sapwood_proto::time::Time;
use smallvec::{SmallVec, smallvec};

use super::super::sampling::{SoleToken, StepSplice};
use super::super::steering::{Steering, check_splice};
use super::Requests;
use crate::api::{EventKind, FinishReason, Sampled, StopCause, Tokens};
use crate::sampling::Sample;
use crate::scheduler::SequenceKey;
use crate::submission::RequestTerms;
use crate::text::ChoiceText;

impl Requests {
    /// Appends a sampled token, and ends the sequence if the token ends it.
    #[inline]
    pub(in super::super) fn append_sampled(
        &mut self,
        key: SequenceKey,
        sample: Sample,
        sole: SoleToken,
        now: Time,
    ) {
        let token = sample.token;
        let terms = self.terms(key);
        let is_end = self.is_end(terms, token);
        let sequence = &self.sequences[key];
        let output = &sequence.tokens[sequence.prompt_tokens..];
        let by_tokens = terms.stop_sequence(output, token, sequence.appended + 1);
        let sampled = self.tokens.with_logprobs(sample);
        // The token is reported, but neither an EOG token nor a completed stop sequence adds text (LM-307).
        let hidden = is_end || by_tokens.is_some();
        let (text, by_text) = if hidden {
            (CompactString::default(), None)
        } else {
            self.push_text(key, token)
        };
        self.charge_sampled(key);
        self.count_token(key, now);
        let steering = self.sequences[key].steering.as_ref();
        let steered = steering.is_some();
        let stays = steering.is_none_or(Steering::ends_at_eos) || sole;
        // A controller decides whether an EOG token ends the output; if not, a space replaces it in the context
        // (AI-804).
        let context = if is_end && !stays {
            self.tokens.space_or(token)
        } else {
            token
        };
        // An event that rolls back cannot be merged with the one before it, so a steered token never waits for the
        // next.
        let joins = !steered && self.joins(key);
        self.sequences[key].record(&sampled, context);
        let tokens = Tokens {
            tokens: smallvec![sampled],
            text,
            ..Tokens::default()
        };
        // The last token is reported before the end, whatever ends the sequence below.
        self.emit_or_join(key, tokens, joins);
        let by_end = (is_end && stays).then(|| vec![token]);
        let stop = by_tokens.or(by_end).map(StopCause::Tokens).or(by_text);
        self.end_after(key, token, stop, is_end);
    }

    /// Ends the sequence if the sampled token was the last one: by a stop, the steerer or the limits.
    #[inline]
    fn end_after(&mut self, key: SequenceKey, token: Token, stop: Option<StopCause>, is_end: bool) {
        // The steerer sees the last token too, before the end.
        let appended = Appended {
            backtrack: 0,
            tokens: &[token],
            sampled: Some(token),
        };
        let Some(post) = self.call_post(key, appended) else {
            return;
        };
        // A stop wins over the steerer's result: the text after it was never sent.
        if stop.is_some() {
            self.finish(key, FinishReason::Stop, stop);
        } else if post == Post::Stop {
            let reason = if is_end {
                FinishReason::Stop
            } else {
                FinishReason::Controller
            };
            self.finish(key, reason, None);
        } else {
            // The limit comes last, so that the token which fills the context can still end by a stop.
            self.finish_if_full(key);
        }
    }

    /// Truncates the output by `backtrack` tokens and appends others, as a steerer requested.
    pub(in super::super) fn splice(&mut self, key: SequenceKey, step: &StepSplice, now: Time) {
        let (backtrack, tokens) = (step.splice.backtrack, &step.splice.tokens);
        let vocabulary = self.vocabulary_tokens;
        // Before anything changes: a bad splice fails the request with its output as it was.
        if let Err(failure) = check_splice(&self.sequences[key], backtrack, tokens, vocabulary) {
            return self.fail_request_of(key, failure.into());
        }
        if step.sampled.is_some() {
            self.charge_sampled(key);
            self.sequences[key].dropped += 1;
        }
        let withdrawn = self.roll_back(key, backtrack as usize);
        let count = self.append_forced(key, (backtrack, withdrawn), tokens, now);
        // Only after the tokens were emitted, because `post` may end the request.
        let appended = Appended {
            backtrack,
            tokens: &tokens[..count],
            sampled: step.sampled,
        };
        match self.call_post(key, appended) {
            Some(Post::Stop) => self.finish(key, FinishReason::Controller, None),
            Some(Post::Continue) => self.finish_if_full(key),
            None => {}
        }
    }

    /// Calls `post` of a sequence's steerer, if it has one. `None`: the steerer failed, and with it its request.
    #[inline]
    fn call_post(&mut self, key: SequenceKey, appended: Appended<'_>) -> Option<Post> {
        let Some(steering) = &mut self.sequences[key].steering else {
            return Some(Post::Continue);
        };
        match steering.post(appended, &self.stats.panics) {
            Ok(post) => Some(post),
            Err(failure) => {
                self.fail_request_of(key, failure.into());
                None
            }
        }
    }

    /// Appends forced tokens, which follow a rollback of `backtrack` tokens that made `withdrawn` bytes of text void.
    /// Tokens past the limit are dropped; returns how many were appended.
    pub(in super::super) fn append_forced(
        &mut self,
        key: SequenceKey,
        (backtrack, withdrawn): (u32, u32),
        tokens: &[Token],
        now: Time,
    ) -> usize {
        let mut text = String::new();
        let mut forced = SmallVec::with_capacity(tokens.len());
        for &token in tokens {
            // `max_tokens` counts forced tokens too, so that a steerer cannot extend an output without end (AI-824).
            if self.is_full(key) {
                break;
            }
            // Stop strings apply to sampled text only; a steerer ends its output itself.
            let sequence = &mut self.sequences[key];
            let terms = &self.jobs[sequence.job].submission.terms;
            let bytes = terms.bytes(&*self.tokens.vocabulary, token);
            sequence.text.push(&bytes, &terms.stop, false, &mut text);
            self.count_token(key, now);
            let requested = self.terms(key).top_logprobs;
            let sampled = Sampled {
                // A forced token had no alternative, so its probability is 1 and it is its own top list (LM-972).
                logprob: if requested.is_some() { 0.0 } else { f32::NAN },
                rank: requested.map(|_| 1),
                top: match requested {
                    Some(1..) => vec![(token, 0.0)],
                    _ => Vec::new(),
                },
                forced: true,
                ..self.tokens.sampled(token)
            };
            self.sequences[key].record(&sampled, token);
            forced.push(sampled);
        }
        let computed = self.sequences[key].computed;
        if computed == self.sequences[key].tokens.len() {
            // Nothing was appended: the output row after the last remaining token is needed again.
            self.truncate(key, computed - 1);
        }
        let appended = forced.len();
        // A sampled token that is dropped and replaced by nothing leaves nothing to report.
        if backtrack > 0 || appended > 0 {
            let tokens = Tokens {
                backtrack,
                withdrawn,
                tokens: forced,
                text: text.into(),
                ..Tokens::default()
            };
            self.emit_tokens(key, tokens);
        }
        appended
    }

    /// Truncates context, penalty history and text by `count` tokens; returns the bytes of reported text that are void.
    fn roll_back(&mut self, key: SequenceKey, count: usize) -> u32 {
        if count == 0 {
            return 0;
        }
        let sequence = &mut self.sequences[key];
        let left = sequence.tokens.len() - count;
        // Tokens first, slot last: `truncate` may preempt the sequence, which must then have its final tokens.
        sequence.tokens.to_mut().truncate(left);
        sequence.charged = sequence.charged.min(left);
        if let Some(steering) = &mut sequence.steering {
            let rest = steering.output.len() - count;
            for removed in steering.output.drain(rest..) {
                if let Some(history) = &mut sequence.history {
                    history.remove(removed.id);
                }
            }
        }
        let before = sequence.text.shown();
        // The text cannot be shortened by bytes: a removed token may have completed a character, or released text that
        // was held back before it.
        let (text, _) = self.replay(key);
        let sequence = &mut self.sequences[key];
        sequence.text = text;
        let withdrawn = before.saturating_sub(sequence.text.shown());
        self.truncate(key, left);
        u32::try_from(withdrawn).unwrap_or(u32::MAX)
    }

    /// Rebuilds the text of a steered sequence from its output. The same tokens give the same text, so this is the text
    /// that had been sent when the output ended there.
    fn replay(&self, key: SequenceKey) -> (ChoiceText, String) {
        let terms = self.terms(key);
        let steering = self.sequences[key].steering.as_ref();
        let output = steering.map_or(&[][..], |steering| &steering.output);
        let (mut text, mut shown) = (ChoiceText::default(), String::new());
        let hidden = |sampled: &&Sampled| !sampled.forced && self.is_end(terms, sampled.id);
        // An EOG token adds no text when it is sampled, so it adds none here (LM-307).
        for sampled in output.iter().filter(|sampled| !hidden(sampled)) {
            // No stop string ended the output then, so none is searched for.
            let bytes = terms.bytes(&*self.tokens.vocabulary, sampled.id);
            text.push(&bytes, &terms.stop, false, &mut shown);
        }
        (text, shown)
    }

    /// Returns whether a sampled token is an EOG token, and not ignored as such.
    fn is_end(&self, terms: &RequestTerms, token: Token) -> bool {
        self.tokens.ends.contains(&token) && !terms.ignore_eos
    }

    /// Adds a branch of a steered sequence to its request: a sequence with the same output so far.
    pub(in super::super) fn add_branch(
        &mut self,
        key: SequenceKey,
        steering: Steering,
    ) -> SequenceKey {
        let parent = &self.sequences[key];
        let fork_of = Some(parent.choice);
        // Before the prompt is computed, the branch waits for its parent to compute it, and then shares it.
        let after = (!parent.can_share_prompt()).then(|| self.prompt_of(key));
        let sent = steering.output.clone();
        let tokens = parent.tokens.clone();
        let born = self.add_sequence(parent.job, tokens, Some(steering), after);
        let (text, shown) = self.replay(key);
        if let Some((parent, branch)) = self.sequences.get2_mut(key, born) {
            branch.history.clone_from(&parent.history);
            // Inherited tokens count towards the branch's limit and move its random draws on, but nothing was computed
            // for them: `completion_tokens` counts them once.
            branch.appended = parent.appended;
            branch.dropped = parent.dropped;
            branch.charged = parent.charged;
            branch.text = text;
        }
        // The branch's first event repeats the output before the fork, so that every choice is complete (AI-933).
        let tokens = Tokens {
            inherited: u32::try_from(sent.len()).unwrap_or(u32::MAX),
            fork_of,
            tokens: sent.into(),
            text: shown.into(),
            ..Tokens::default()
        };
        self.emit_tokens(born, tokens);
        born
    }

    /// Publishes the reports of this step.
    pub(in super::super) fn emit_reports(&mut self) {
        let watched = |key: &SequenceKey| {
            let steering = self.sequences[*key].steering.as_ref();
            steering.is_some_and(Steering::is_watched)
        };
        // Nearly always none, and then nothing is collected.
        let watched: Vec<SequenceKey> = self.scheduler.running().filter(watched).collect();
        for key in watched {
            self.emit_report(key);
        }
    }

    /// Publishes what the steerer of a sequence printed and wrote since the last report.
    pub(in super::super) fn emit_report(&mut self, key: SequenceKey) {
        let sequence = &mut self.sequences[key];
        let steering = sequence.steering.as_mut();
        if let Some(report) = steering.and_then(|steering| steering.take_report(&self.stats.panics))
        {
            self.output
                .emit(sequence.job, sequence.choice, EventKind::Report(report));
        }
    }

    /// Reports a scored token, and ends the sequence with the last one. The tokens of one step form one event.
    pub(in super::super) fn append_scored(&mut self, key: SequenceKey, sample: Sample, now: Time) {
        let token = sample.token;
        let (text, _) = self.push_text(key, token);
        let sampled = self.tokens.with_logprobs(sample);
        self.count_token(key, now);
        let job = self.sequences[key].job;
        if let Err(sampled) = self.output.append_token(job, sampled, &text) {
            let tokens = Tokens {
                tokens: smallvec![sampled],
                text,
                ..Tokens::default()
            };
            self.emit_tokens(key, tokens);
        }
        // The last scored token was not decoded; only the tokens before it give output rows.
        if self.next_scored(key).is_none() {
            self.finish(key, FinishReason::Stop, None);
        }
    }

    /// Returns the token that is scored next, if the sequence's output is given.
    pub(in super::super) fn next_scored(&self, key: SequenceKey) -> Option<Token> {
        let scored = self.terms(key).scored.as_ref()?;
        let next = self.sequences[key].appended as usize;
        scored.tokens.get(next).copied()
    }

    /// Returns the text that is ready to be sent after a token, and the stop string that it completes.
    fn push_text(&mut self, key: SequenceKey, token: Token) -> (CompactString, Option<StopCause>) {
        let sequence = &mut self.sequences[key];
        let terms = &self.jobs[sequence.job].submission.terms;
        let bytes = terms.bytes(&*self.tokens.vocabulary, token);
        terms.push_text(&mut sequence.text, &bytes, sequence.appended + 1)
    }

    fn count_token(&mut self, key: SequenceKey, now: Time) {
        let stats = &self.stats;
        let sequence = &mut self.sequences[key];
        let job = &mut self.jobs[sequence.job];
        sequence.appended += 1;
        job.completion_tokens += 1;
        self.report.appended += 1;
        // Per sequence: the gaps between choices of one request are no gaps that a client sees.
        if let Some(last) = sequence.last_token_at.replace(now) {
            stats.inter_token_seconds.observe_span(now.since(last));
        }
        // Per request: the first token of any choice ends the wait of its client.
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

    /// Returns whether the token to be appended is reported together with the one after it.
    fn joins(&self, key: SequenceKey) -> bool {
        let sequence = &self.sequences[key];
        let output = sequence.tokens.len() - sequence.prompt_tokens;
        let slot = sequence.slot;
        slot.is_some_and(|slot| self.slots.joins(slot, output))
    }

    /// Emits tokens together with the unreported ones before them; with `joins`, retains all of them for the next
    /// event.
    fn emit_or_join(&mut self, key: SequenceKey, tokens: Tokens, joins: bool) {
        let tokens = match self.sequences[key].unreported.take() {
            Some(earlier) => earlier.followed_by(tokens),
            None => tokens,
        };
        if joins {
            self.sequences[key].unreported = Some(Box::new(tokens));
        } else {
            self.emit_tokens(key, tokens);
        }
    }

    /// Emits the retained tokens, because no token follows them.
    pub(super) fn emit_unreported(&mut self, key: SequenceKey) {
        if let Some(tokens) = self.sequences[key].unreported.take() {
            self.emit_tokens(key, *tokens);
        }
    }

    fn emit_tokens(&mut self, key: SequenceKey, mut tokens: Tokens) {
        let sequence = &mut self.sequences[key];
        // They are complete by now: output rows come in order, and those of the prompt precede the first of the output.
        tokens.prompt = sequence.take_prompt_scores();
        self.output
            .emit(sequence.job, sequence.choice, EventKind::Tokens(tokens));
    }
}
