//! Tokens that somebody else computes, as the events of a request.
//!
//! Owns: [`Transcript`]: the checks and the tokens of a prompt, and what becomes of tokens as they come: text, stops, limits,
//! usage (LM-704, LM-712). Refuses to know: who computes, and how it is asked. It does to each token what the owner does to
//! one that it has sampled, so that a model elsewhere reads like one that is here.

use std::sync::{Arc, OnceLock};

use compact_str::CompactString;
use sapwood_proto::code::Code;
use sapwood_proto::steer::{Mask, Token};

use crate::api::{
    Event, Finish, Kind, ModelInfo, Reason, Refusal, Request, Sampled, SharedVocabulary, Stop,
    Tokens, Usage,
};
use crate::bad_words::Lexicon;
use crate::submission::{Submission, Terms, prepare};
use crate::text::Text;

/// What the bad words of a model's requests have to know of its vocabulary. It is made when the first of them comes, which takes a
/// while: keep one for each model.
#[derive(Default)]
pub struct Words(OnceLock<Arc<Lexicon>>);

/// One request whose tokens come from elsewhere.
pub struct Transcript {
    prompt: Arc<[Token]>,
    terms: Arc<Terms>,
    vocabulary: SharedVocabulary,
    choices: Vec<Choice>,
    cached: u32,
    /// Of whatever came together.
    step: u64,
}

#[derive(Default)]
struct Choice {
    text: Text,
    output: Vec<Token>,
    over: bool,
}

impl Transcript {
    /// Checks a request and makes tokens of its prompt, as an engine does.
    ///
    /// # Errors
    /// As [`Engine::submit`](crate::Engine::submit) has them before anything is queued; `unimplemented` for bad words where the
    /// vocabulary has no text, and for log-probabilities of the prompt.
    pub fn new(
        request: Request,
        info: &ModelInfo,
        vocabulary: SharedVocabulary,
        words: &Words,
    ) -> Result<Self, Refusal> {
        if !request.bad_words.is_empty() && !vocabulary.has_text() {
            let why = "bad_words are not there for a model whose tokenizer is not known";
            return Err(Refusal::new(Code::Unimplemented, "", why));
        }
        if request.prompt_logprobs {
            let why = "prompt_logprobs are not there for a model elsewhere: score the prompt";
            return Err(Refusal::new(Code::Unimplemented, "", why));
        }
        let made = || {
            let vocabulary = Arc::clone(&vocabulary);
            Arc::new(Lexicon::new(vocabulary, info.vocabulary_tokens))
        };
        let lexicon = || Arc::clone(words.0.get_or_init(made));
        // Whoever computes draws, and has a seed of its own unless one was asked for.
        let longest = vocabulary.token_bytes_max();
        let submission = prepare(request, info, &*vocabulary, longest, lexicon, || 0)?;
        let Submission {
            prompt,
            terms,
            choices,
            ..
        } = submission;
        let mut all = Vec::new();
        all.resize_with(choices as usize, Choice::default);
        Ok(Self {
            prompt,
            terms,
            vocabulary,
            choices: all,
            cached: 0,
            step: 0,
        })
    }

    /// What is to be computed from. Empty only where tokens are weighed that nothing precedes.
    #[must_use]
    pub fn prompt(&self) -> &[Token] {
        match &self.terms.scored {
            Some(scored) if scored.headless => &[],
            _ => &self.prompt,
        }
    }

    /// Tokens of each choice at most, as far as the context has room.
    #[must_use]
    pub fn max_tokens(&self) -> u32 {
        self.terms.max_tokens
    }

    /// How many choices there are.
    #[must_use]
    pub fn choices(&self) -> u32 {
        u32::try_from(self.choices.len()).unwrap_or(u32::MAX)
    }

    /// Whether nothing more is to come of this choice.
    #[must_use]
    pub fn is_over(&self, choice: u32) -> bool {
        let choice = self.choices.get(choice as usize);
        choice.is_none_or(|choice| choice.over)
    }

    /// What has come of a choice.
    #[must_use]
    pub fn output(&self, choice: u32) -> &[Token] {
        let choice = self.choices.get(choice as usize);
        choice.map_or(&[], |choice| &choice.output)
    }

    /// The tokens that may come next in a choice because they complete no bad word (TR-401); `None` where the request has none. Who
    /// computes has to keep to that, and before anything has come it is what holds everywhere.
    #[must_use]
    pub fn allowed(&self, choice: u32) -> Option<Mask> {
        let bad_words = self.terms.bad_words.as_ref()?;
        Some(bad_words.mask(self.output(choice).iter().rev().copied()))
    }

    /// Tokens of the prompt that were not computed anew.
    pub fn cached(&mut self, tokens: u32) {
        self.cached = self.cached.max(tokens);
    }

    /// What has come of a choice: a token, or the end, or both. Gives the events, the request's last one behind the end of its
    /// last choice. What comes behind an end is nothing.
    pub fn take(&mut self, choice: u32, token: Option<Sampled>, end: Option<Reason>) -> Vec<Event> {
        self.step += 1;
        let mut events = Vec::new();
        let Some(state) = self.choices.get_mut(choice as usize) else {
            return events;
        };
        if state.over {
            return events;
        }
        let mut stop = None;
        let mut tokens = Tokens::default();
        if let Some(mut token) = token {
            token.special = self.vocabulary.is_special(token.id);
            let (text, by) = state.append(token.id, &self.terms, &self.vocabulary);
            tokens.text = text;
            tokens.tokens.push(token);
            stop = by;
        }
        let is_full = state.output.len() >= self.terms.max_tokens as usize;
        let reason = match (&stop, end) {
            (Some(_), _) => Some(Reason::Stop),
            (None, Some(end)) => Some(end),
            (None, None) if is_full && self.terms.scored.is_some() => Some(Reason::Stop),
            (None, None) => is_full.then_some(Reason::Length),
        };
        if reason.is_some() && !matches!(stop, Some(Stop::Text(_))) {
            let mut rest = tokens.text.to_string();
            state.text.flush(&mut rest);
            tokens.text = rest.into();
        }
        state.over = reason.is_some();
        if !tokens.tokens.is_empty() || !tokens.text.is_empty() {
            events.push(self.event(choice, Kind::Tokens(tokens)));
        }
        if let Some(reason) = reason {
            events.push(self.event(choice, Kind::Finish(Finish { reason, stop })));
            if self.choices.iter().all(|choice| choice.over) {
                events.push(self.event(0, Kind::Usage(self.usage())));
            }
        }
        events
    }

    const fn event(&self, choice: u32, kind: Kind) -> Event {
        Event {
            step: self.step,
            choice,
            kind,
        }
    }

    fn usage(&self) -> Usage {
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        let completion = self.choices.iter().map(|choice| choice.output.len()).sum();
        Usage {
            prompt_tokens: count(self.prompt.len()),
            completion_tokens: count(completion),
            cached_tokens: self.cached,
            seed: self.terms.seed,
            ..Usage::default()
        }
    }
}

impl Choice {
    /// Appends a token: the text that it makes certain, and what it stops at.
    fn append(
        &mut self,
        token: Token,
        terms: &Terms,
        vocabulary: &SharedVocabulary,
    ) -> (CompactString, Option<Stop>) {
        let stopping = self.output.len() + 1 >= terms.min_tokens as usize;
        let weighed = terms.scored.is_some();
        let is_end = vocabulary.is_end(token) && !terms.ignore_eos && !weighed;
        let by_tokens = terms
            .stop_sequence(&self.output, token)
            .filter(|_| stopping && !weighed)
            .map(<[_]>::to_vec);
        self.output.push(token);
        let stop = by_tokens.or_else(|| is_end.then(|| vec![token]));
        if let Some(stop) = stop {
            // The bytes of what stops are no text.
            return (CompactString::default(), Some(Stop::Tokens(stop)));
        }
        let bytes = terms.bytes(&**vocabulary, token);
        if let Some(text) = self.text.pass(&bytes, &terms.stop) {
            return (text, None);
        }
        let mut text = String::new();
        let stop = self.text.push(&bytes, &terms.stop, stopping, &mut text);
        let stop = stop.map(|index| Stop::Text(terms.stop[index].clone()));
        (text.into(), stop)
    }
}

#[cfg(test)]
mod tests;
