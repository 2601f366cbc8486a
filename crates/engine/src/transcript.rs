//! Turns tokens that a remote server computed into the events of a local request.
//!
//! It processes each token as the owner does a sampled one, so that a remote model's output has the same form as a
//! local one's.

use std::sync::Arc;

use compact_str::CompactString;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use crate::api::{
    ChoiceEnd, EngineError, EngineEvent, EventKind, FinishReason, GenerationRequest, ModelInfo,
    Sampled, SharedVocabulary, StopCause, TokenUsage, Tokens,
};
use crate::bad_words::TokenIndex;
use crate::submission::{RequestTerms, Submission, prepare};
use crate::text::ChoiceText;

/// One request whose tokens a remote server computes.
pub struct Transcript {
    submission: Submission,
    vocabulary: SharedVocabulary,
    choices: Vec<ChoiceTranscript>,
    cached: u32,
    /// Number of the current event group; the tokens of one call of [`Transcript::take`] share it.
    step: u64,
}

#[derive(Default)]
struct ChoiceTranscript {
    text: ChoiceText,
    output: Vec<Token>,
    over: bool,
}

impl Transcript {
    /// Validates a request and tokenises its prompt, as an engine does.
    ///
    /// # Errors
    /// Those of [`Engine::submit`](crate::Engine::submit) before anything is queued; `unimplemented` for bad words,
    /// which no protocol of a remote server has, and for prompt logprobs.
    pub fn new(
        request: GenerationRequest,
        info: &ModelInfo,
        vocabulary: SharedVocabulary,
    ) -> Result<Self, EngineError> {
        let unsupported = if !request.params.bad_words.is_empty() && request.scored.is_none() {
            Some("bad_words are not supported by a model on another server")
        } else if request.prompt_logprobs {
            Some("prompt_logprobs are not supported by a model on another server: score the prompt")
        } else if request.steer.is_some() {
            // It has no logits that a mask could change (AI-827).
            Some("controllers are not supported by a model on another server")
        } else {
            None
        };
        if let Some(why) = unsupported {
            let code = Code::Unimplemented;
            return Err(EngineError::new(code, ErrorReason::NONE, why));
        }
        // Only needed for bad words of scored tokens, which have no effect.
        let token_index = || {
            let vocabulary = Arc::clone(&vocabulary);
            Arc::new(TokenIndex::new(vocabulary, info.vocabulary_tokens))
        };
        // The remote server also samples, and picks its own seed unless one was requested.
        let longest = vocabulary.token_bytes_max();
        // The same checks as for a local model, so that a request fails alike wherever its model runs.
        let submission = prepare(request, info, &*vocabulary, longest, token_index, || 0)?;
        let mut choices = Vec::new();
        choices.resize_with(submission.choices as usize, ChoiceTranscript::default);
        Ok(Self {
            submission,
            vocabulary,
            choices,
            cached: 0,
            step: 0,
        })
    }

    /// Returns the tokens to compute from. Empty only if the first of the scored tokens has no token before it.
    #[must_use]
    pub fn prompt(&self) -> &[Token] {
        self.submission.given_prompt()
    }

    /// Returns the end of the prompt, as [`RequestHandle::prompt_tail`](crate::RequestHandle::prompt_tail) does.
    #[must_use]
    pub fn prompt_tail(&self) -> &str {
        &self.submission.prompt_tail
    }

    /// Returns the biases of the request, those by text among them.
    #[must_use]
    pub fn logit_bias(&self) -> Arc<[(Token, f32)]> {
        Arc::clone(&self.submission.terms.sampling.logit_bias)
    }

    /// Returns the maximum of tokens of each choice, limited by the context.
    #[must_use]
    pub fn max_tokens(&self) -> u32 {
        self.submission.terms.max_tokens
    }

    /// Returns the number of choices.
    #[must_use]
    pub fn choices(&self) -> u32 {
        u32::try_from(self.choices.len()).unwrap_or(u32::MAX)
    }

    /// Returns whether this choice has ended.
    #[must_use]
    pub fn is_over(&self, choice: u32) -> bool {
        let choice = self.choices.get(choice as usize);
        choice.is_none_or(|choice| choice.over)
    }

    /// Records prompt tokens that came from the remote server's prefix cache.
    pub fn cached(&mut self, tokens: u32) {
        self.cached = self.cached.max(tokens);
    }

    /// Handles a token of a choice, its end, or both. Returns the events; the last event of the request follows the end
    /// of its last choice. Anything after the end of a choice is ignored.
    pub fn take(
        &mut self,
        choice: u32,
        token: Option<Sampled>,
        end: Option<FinishReason>,
    ) -> Vec<EngineEvent> {
        // Each call is an event group of its own: what the remote server sent together is not known to belong to one
        // step.
        self.step += 1;
        let mut events = Vec::new();
        let Some(state) = self.choices.get_mut(choice as usize) else {
            return events;
        };
        // A remote server may go on after a stop that only this side recognises; what it sends then was never asked
        // for.
        if state.over {
            return events;
        }
        let mut stop = None;
        let mut tokens = Tokens::default();
        if let Some(mut token) = token {
            token.special = self.vocabulary.is_special(token.id);
            let (text, by) = state.append(token.id, &self.submission.terms, &self.vocabulary);
            tokens.text = text;
            tokens.tokens.push(token);
            stop = by;
        }
        // The limit is enforced here too, because a remote server may count differently.
        let is_full = state.output.len() >= self.submission.terms.max_tokens as usize;
        // A stop found here comes first, because the text ends at it whatever the server reports.
        let reason = match (&stop, end) {
            (Some(_), _) => Some(FinishReason::Stop),
            (None, Some(end)) => Some(end),
            (None, None) if is_full && self.submission.terms.scored.is_some() => {
                Some(FinishReason::Stop)
            }
            (None, None) => is_full.then_some(FinishReason::Length),
        };
        // As in the owner: after a complete stop string the held-back text is dropped, after any other end it is sent.
        if reason.is_some() && !matches!(stop, Some(StopCause::Text(_))) {
            let mut rest = tokens.text.to_string();
            state.text.flush(&mut rest);
            tokens.text = rest.into();
        }
        state.over = reason.is_some();
        if !tokens.tokens.is_empty() || !tokens.text.is_empty() {
            events.push(self.event(choice, EventKind::Tokens(tokens)));
        }
        if let Some(reason) = reason {
            events.push(self.event(choice, EventKind::Finish(ChoiceEnd { reason, stop })));
            // `Usage` is the last event, so it waits for the last choice.
            if self.choices.iter().all(|choice| choice.over) {
                events.push(self.event(0, EventKind::Usage(self.usage())));
            }
        }
        events
    }

    const fn event(&self, choice: u32, kind: EventKind) -> EngineEvent {
        EngineEvent {
            step: self.step,
            choice,
            kind,
        }
    }

    fn usage(&self) -> TokenUsage {
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        let completion = self.choices.iter().map(|choice| choice.output.len()).sum();
        TokenUsage {
            prompt_tokens: count(self.prompt().len()),
            completion_tokens: count(completion),
            cached_tokens: self.cached,
            seed: self.submission.terms.seed,
            ..TokenUsage::default()
        }
    }
}

impl ChoiceTranscript {
    /// Appends a token; returns the text that is ready to be sent, and the stop that it completes.
    fn append(
        &mut self,
        token: Token,
        terms: &RequestTerms,
        vocabulary: &SharedVocabulary,
    ) -> (CompactString, Option<StopCause>) {
        let appended = u32::try_from(self.output.len() + 1).unwrap_or(u32::MAX);
        let by_tokens = terms.stop_sequence(&self.output, token, appended);
        let by_end = (vocabulary.is_end(token) && !terms.ignore_eos).then(|| vec![token]);
        self.output.push(token);
        // Scored tokens are reported to the last one, whatever they are.
        let stop = by_tokens.or(by_end).filter(|_| terms.scored.is_none());
        if let Some(stop) = stop {
            let mut text = CompactString::default();
            // A token that completes a stop sequence adds no text, unless the request keeps its stop.
            if terms.include_stop && !vocabulary.is_end(token) {
                let bytes = terms.bytes(&**vocabulary, token);
                text = terms.push_text(&mut self.text, token, &bytes, appended).0;
            }
            return (text, Some(StopCause::Tokens(stop)));
        }
        let bytes = terms.bytes(&**vocabulary, token);
        terms.push_text(&mut self.text, token, &bytes, appended)
    }
}

#[cfg(test)]
mod tests;
