//! Appends tokens to a sequence, sampled, forced or scored: context, text, events, and the checks for its end.

use compact_str::CompactString;
use sapwood_proto::steer::{Appended, Post, Token};
use sapwood_proto::time::Time;
use smallvec::{SmallVec, smallvec};

use super::super::sampling::{SoleToken, StepSplice};
use super::super::steering::{Steering, check_splice};
use super::Requests;
use crate::api::{EngineError, EventKind, FinishReason, Sampled, StopCause, Tokens};
use crate::sampling::Sample;
use crate::scheduler::SequenceKey;
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
        let sequence = &mut self.sequences[key];
        let request = &mut self.jobs[sequence.job];
        let terms = &request.submission.terms;
        let is_end = self.tokens.is_end(terms, token);
        let output = &sequence.tokens[sequence.prompt_tokens..];
        let by_tokens = terms.stop_sequence(output, token, sequence.appended + 1);
        let sampled = self.tokens.with_logprobs(sample);
        // The token is reported, but neither an EOG token nor a completed stop sequence adds text (LM-307), unless the
        // request keeps its stop.
        let hidden = is_end || by_tokens.is_some() && !terms.include_stop;
        let (text, by_text) = if hidden {
            (CompactString::default(), None)
        } else {
            self.tokens.push_text(terms, sequence, token)
        };
        self.fuel.charge_sampled(sequence.job, request);
        self.count_token(key, now);
        let sequence = &mut self.sequences[key];
        // Before the end: the last token of an output may be one of the draft.
        if let Some(drafting) = &sequence.drafting
            && drafting.proposes(token)
        {
            self.stats.accepted_tokens.add(1);
        }
        let steering = sequence.steering.as_ref();
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
        let joins = !steered && self.slots.model().joins(sequence);
        sequence.record(&sampled, context, &*self.tokens.vocabulary);
        let tokens = Tokens {
            tokens: smallvec![sampled],
            text,
            ..Tokens::default()
        };
        // The last token is reported before the end, whatever ends the sequence below.
        self.output.emit_or_join(sequence, tokens, joins);
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
        let sequence = &mut self.sequences[key];
        // Before anything changes: a bad splice ends the sequence with its output as it was.
        if let Err(failure) = check_splice(sequence, backtrack, tokens, vocabulary) {
            return self.fail_choice(key, failure.into());
        }
        if step.sampled.is_some() {
            let job = sequence.job;
            self.fuel.charge_sampled(job, &mut self.jobs[job]);
            sequence.dropped += 1;
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

    /// Calls `post` of a sequence's steerer, if it has one. `None`: the steerer failed, and with it its sequence.
    #[inline]
    fn call_post(&mut self, key: SequenceKey, appended: Appended<'_>) -> Option<Post> {
        let Some(steering) = &mut self.sequences[key].steering else {
            return Some(Post::Continue);
        };
        match steering.post(appended, &self.stats.panics) {
            Ok(post) => Some(post),
            Err(failure) => {
                self.fail_choice(key, failure.into());
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
            terms.append(&mut sequence.text, token, &bytes, false, &mut text);
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
            self.sequences[key].record(&sampled, token, &*self.tokens.vocabulary);
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
            self.output.emit_tokens(&mut self.sequences[key], tokens);
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
        if let Some(steering) = &mut sequence.steering {
            let rest = steering.output.len() - count;
            let removed = steering.output.truncate(rest);
            if let Some(history) = &mut sequence.history {
                // Before the tokens are removed: a window goes back over them.
                let removed = removed.into_iter().map(|removed| removed.id);
                history.truncate(&sequence.tokens, left, removed);
            }
        }
        // Tokens first, slot last: `truncate` may preempt the sequence, which must then have its final tokens.
        sequence.tokens.to_mut().truncate(left);
        sequence.charged = sequence.charged.min(left);
        let steering = sequence.steering.as_ref();
        let (mut text, replayed) = steering
            .map(|steering| steering.output.since_checkpoint())
            .unwrap_or_default();
        let terms = &self.jobs[sequence.job].submission.terms;
        self.tokens
            .replay(terms, replayed, &mut text, &mut String::new());
        let before = std::mem::replace(&mut sequence.text, text).shown();
        let withdrawn = before.saturating_sub(sequence.text.shown());
        self.truncate(key, left);
        u32::try_from(withdrawn).unwrap_or(u32::MAX)
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
        let sent = steering.output.to_vec();
        let tokens = parent.tokens.clone();
        let born = self.add_sequence(parent.job, tokens, Some(steering), after);
        let (mut text, mut shown) = (ChoiceText::default(), String::new());
        let terms = self.terms(born);
        // From the start, because all of the text is sent, as all of the tokens are.
        self.tokens.replay(terms, &sent, &mut text, &mut shown);
        if let Some((parent, branch)) = self.sequences.get2_mut(key, born) {
            branch.history.clone_from(&parent.history);
            branch.mirostat = parent.mirostat;
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
        self.output.emit_tokens(&mut self.sequences[born], tokens);
        born
    }

    /// Reports a branch whose copy could not be made: it has a choice, which ends at once (AI-714).
    pub(in super::super) fn add_failed_branch(&mut self, parent: SequenceKey, error: EngineError) {
        let job = self.sequences[parent].job;
        let request = &mut self.jobs[job];
        let choice = request.next_choice;
        request.next_choice += 1;
        self.stats.count_controller_failure(&error);
        self.output.emit(job, choice, EventKind::Failed(error));
    }

    /// Emits the reports of this step.
    pub(in super::super) fn emit_reports(&mut self) {
        for key in self.scheduler.running() {
            let sequence = &mut self.sequences[key];
            self.output.emit_report(sequence, &self.stats.panics);
        }
    }

    /// Reports a scored token, and ends the sequence with the last one. The tokens of one step form one event.
    pub(in super::super) fn append_scored(&mut self, key: SequenceKey, sample: Sample, now: Time) {
        let token = sample.token;
        let sequence = &mut self.sequences[key];
        let job = sequence.job;
        let terms = &self.jobs[job].submission.terms;
        let (text, _) = self.tokens.push_text(terms, sequence, token);
        let sampled = self.tokens.with_logprobs(sample);
        self.count_token(key, now);
        if let Err(sampled) = self.output.append_token(job, sampled, &text) {
            let tokens = Tokens {
                tokens: smallvec![sampled],
                text,
                ..Tokens::default()
            };
            self.output.emit_tokens(&mut self.sequences[key], tokens);
        }
        // The last scored token was not decoded; only the tokens before it give output rows.
        let next = self.sequences[key].appended;
        if self.terms(key).scored_token(next).is_none() {
            self.finish(key, FinishReason::Stop, None);
        }
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
            let gap = now.since(last);
            if sequence.draft().is_empty() {
                stats.inter_token_seconds.observe_span(gap);
            } else {
                self.step_gap.add(gap);
            }
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
}
