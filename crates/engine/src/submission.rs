//! Prepares a request before the owner receives it: validates, tokenises, and fixes its seed and limits.
//!
//! It runs on the caller's thread, so that a long prompt does not delay other requests (D-8), and returns early if the
//! caller no longer waits for it ([`stop`]).

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use compact_str::CompactString;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::{GenerationParams, LoraUse, ParamRanges};
use sapwood_proto::steer::{Steer, StepWaker, Token};

use crate::adapters::AdapterSet;
use crate::api::{
    ChatMessage, EngineError, GenerationRequest, MARK_CLOSE, MARK_OPEN, ModelInfo, Prompt,
    Sampling, StopCause, Vocabulary,
};
use crate::bad_words::{BadWords, TokenIndex};
use crate::infill::infill_prompt;
use crate::request_phase::Follower;
use crate::sampling::TokenHistory;
use crate::scheduler::SchedulerTurn;
use crate::stats::EngineStats;
use crate::stop;
use crate::text::{self, ChoiceText};

/// A validated request that can be run as it is.
pub(crate) struct Submission {
    /// Never empty, shorter than the context, every token within the vocabulary.
    pub(crate) prompt: Vec<Token>,
    /// The text of its last tokens, if a chat template rendered it.
    pub(crate) prompt_tail: String,
    /// The parameters that all choices share.
    pub(crate) terms: RequestTerms,
    pub(crate) choices: u32,
    pub(crate) priority: i32,
    pub(crate) turn: SchedulerTurn,
    pub(crate) prefix_scope: u64,
    /// The LoRA adapters that the request names, until [`Submission::choose_adapters`].
    pub(crate) lora: Option<Vec<LoraUse>>,
    /// The adapters that compute; `None`: those that the model applies by default.
    pub(crate) adapters: Option<AdapterSet>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) cache_key: Option<u64>,
    pub(crate) follower: Option<Follower>,
    /// The tokens of the prompt, if a penalty counts them. Each choice continues with a copy.
    pub(crate) history: Option<TokenHistory>,
    /// Steers the request; forked for further choices when it has begun.
    pub(crate) steer: Option<Box<dyn Steer>>,
    /// Asks for the reports of the steerer.
    pub(crate) watched: bool,
}

/// The parameters that all choices of a request share.
#[derive(Debug)]
pub(crate) struct RequestTerms {
    pub(crate) sampling: Sampling,
    pub(crate) seed: u64,
    /// The maximum of output tokens of each choice; at most what the context leaves.
    pub(crate) max_tokens: u32,
    /// `max_tokens` as the request gave it.
    pub(crate) asked_max_tokens: Option<u32>,
    pub(crate) min_tokens: u32,
    pub(crate) stop: Vec<String>,
    /// Whether the stop that ends a choice stays in its text.
    pub(crate) include_stop: bool,
    pub(crate) stop_sequences: Vec<Vec<Token>>,
    pub(crate) bad_words: Option<BadWords>,
    pub(crate) ignore_eos: bool,
    pub(crate) skip_special_tokens: bool,
    /// Control tokens whose names are part of the text, between marks.
    pub(crate) marked: Arc<[Token]>,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) scored: Option<Scored>,
    pub(crate) prompt_logprobs: bool,
}

/// The output of a request that scores tokens instead of generating them.
#[derive(Debug)]
pub(crate) struct Scored {
    /// The tokens to score. Never empty; the prompt and these fit in the context.
    pub(crate) tokens: Vec<Token>,
    /// The prompt is empty, so no token precedes the first one: it takes the place of the prompt, and its score is 0
    /// (LM-312).
    pub(crate) score_only: bool,
}

impl Submission {
    /// Returns the prompt that the request gave. Empty only if the first of the scored tokens has no token before it.
    pub(crate) fn given_prompt(&self) -> &[Token] {
        match &self.terms.scored {
            Some(scored) if scored.score_only => &[],
            _ => &self.prompt,
        }
    }

    /// Finds the adapters that the request names among those of the model. Not for models on other servers, whose adapters
    /// are not known here.
    ///
    /// # Errors
    /// `BAD_CONFIG` for one that the model does not have.
    pub(crate) fn choose_adapters(&mut self, info: &ModelInfo) -> Result<(), EngineError> {
        if let Some(chosen) = self.lora.take() {
            self.adapters = AdapterSet::of(&chosen, &info.adapters)?;
        }
        Ok(())
    }

    /// Lets the steerer begin, if there is one: it must return at once, and the owner waits for its result.
    ///
    /// # Errors
    /// It panicked.
    pub(crate) fn begin(&mut self, waker: &Arc<dyn StepWaker>) -> Result<(), EngineError> {
        let Some(steer) = &mut self.steer else {
            return Ok(());
        };
        let (prompt, seed) = (&self.prompt, self.terms.seed);
        let begin = AssertUnwindSafe(|| {
            steer.seed(seed);
            steer.begin(prompt, waker);
        });
        catch_unwind(begin).map_err(|_panic| {
            let message = "the controller panicked before its first step";
            EngineError::new(Code::ControllerFailed, ErrorReason::TRAP, message)
        })
    }

    /// Returns the text of the last tokens of the prompt. It begins after the last control token that is not marked: what
    /// stands before that one, which may be the end of a message, is not what the template wrote for the answer.
    fn tail(&self, vocabulary: &dyn Vocabulary) -> String {
        let is_marked = |token: &Token| self.terms.marked.contains(token);
        let is_border = |token: &Token| vocabulary.is_special(*token) && !is_marked(token);
        let from = self.prompt.len().saturating_sub(TAIL_TOKENS);
        let last = &self.prompt[from..];
        let border = last.iter().rposition(is_border);
        let mut tail = String::new();
        for tokens in
            last[border.map_or(0, |at| at + 1)..].chunk_by(|a, b| is_marked(a) == is_marked(b))
        {
            let bytes = tokens.iter();
            let bytes = bytes.flat_map(|token| self.terms.bytes(vocabulary, *token).into_owned());
            let bytes: Vec<u8> = bytes.collect();
            let text = String::from_utf8_lossy(&bytes);
            if tokens.first().is_some_and(is_marked) {
                tail.push_str(&text);
            } else {
                tail.push_str(&text::without_marks(&text));
            }
        }
        tail
    }

    /// Records the sizes of the request.
    #[expect(
        clippy::cast_precision_loss,
        reason = "counts of tokens are exact below 2^53"
    )]
    pub(crate) fn observe(&self, stats: &EngineStats) {
        stats.prompt_tokens.add(self.prompt.len() as u64);
        stats
            .request_prompt_tokens
            .observe(self.prompt.len() as f64);
        stats.request_n.observe(f64::from(self.choices));
        stats
            .request_max_tokens
            .observe(f64::from(self.terms.max_tokens));
    }
}

impl RequestTerms {
    /// Returns the bytes that a token adds to the text of an output.
    pub(crate) fn bytes<'v>(&self, vocabulary: &'v dyn Vocabulary, token: Token) -> Cow<'v, [u8]> {
        let is_marked = self.marked.contains(&token);
        if !is_marked && (self.skip_special_tokens || !vocabulary.is_special(token)) {
            return vocabulary.bytes(token).into();
        }
        let name = vocabulary.name(token).unwrap_or_default();
        let text = if is_marked {
            format!("{MARK_OPEN}{name}{MARK_CLOSE}")
        } else {
            name
        };
        text.into_bytes().into()
    }

    /// Stop sequences of a single token. They are masked before `min_tokens`, as the EOG tokens are.
    pub(crate) fn single_stops(&self) -> impl Iterator<Item = Token> + '_ {
        let singles = self.stop_sequences.iter().map(Vec::as_slice);
        singles.filter_map(|stop| {
            if let [token] = stop {
                Some(*token)
            } else {
                None
            }
        })
    }

    /// Returns the stop sequence that `output` followed by `token` ends with. `appended` counts the tokens of the output,
    /// this one included: below the minimum nothing stops it.
    pub(crate) fn stop_sequence(
        &self,
        output: &[Token],
        token: Token,
        appended: u32,
    ) -> Option<Vec<Token>> {
        let completes = |stop: &&Vec<Token>| {
            let last = stop.split_last();
            last.is_some_and(|(last, before)| *last == token && output.ends_with(before))
        };
        let stopping = appended >= self.min_tokens;
        let stop = self.stop_sequences.iter().find(completes);
        stop.filter(|_| stopping).cloned()
    }

    /// Returns the token that is scored after `appended` others, if the output is given.
    pub(crate) fn scored_token(&self, appended: u32) -> Option<Token> {
        let scored = self.scored.as_ref()?;
        scored.tokens.get(appended as usize).copied()
    }

    /// Adds the bytes of a token to a text; returns what is ready to be sent, and the stop string that it completes.
    /// `appended` is that of [`RequestTerms::stop_sequence`].
    #[inline]
    pub(crate) fn push_text(
        &self,
        text: &mut ChoiceText,
        token: Token,
        bytes: &[u8],
        appended: u32,
    ) -> (CompactString, Option<StopCause>) {
        // Without stop strings nearly every token is whole text, and `pass` returns it without a detour through a
        // `String`. A mark begins with this byte.
        let may_mark = !self.marked.is_empty() && bytes.contains(&0xef);
        if !may_mark && let Some(whole) = text.pass(bytes, &self.stop) {
            return (whole, None);
        }
        let mut ready = String::new();
        let stop = self.append(text, token, bytes, appended >= self.min_tokens, &mut ready);
        let stop = stop.map(|index| self.stop[index].clone());
        if let Some(stop) = stop.as_ref().filter(|_| self.include_stop) {
            text.show_stop(stop, &mut ready);
        }
        let stop = stop.map(StopCause::Text);
        (ready.into(), stop)
    }

    /// Adds the bytes of a token to a text, and appends to `ready` what can be sent. Returns the index of the stop string
    /// that it completes, if one may end the output (`stopping`).
    pub(crate) fn append(
        &self,
        text: &mut ChoiceText,
        token: Token,
        bytes: &[u8],
        stopping: bool,
        ready: &mut String,
    ) -> Option<usize> {
        if self.marked.is_empty() {
            text.push(bytes, &self.stop, stopping, ready)
        } else if self.marked.contains(&token) {
            text.push_mark(bytes, ready);
            None
        } else {
            text.push_beside_marks(bytes, &self.stop, stopping, ready)
        }
    }
}

/// Validates a request and tokenises its prompt.
///
/// # Errors
/// `BAD_CONFIG` names the field that is out of range; `BAD_TOKENS`, `EMPTY_PROMPT` and `PROMPT_TOO_LONG` (with both
/// numbers) are about the prompt; `NO_INFILL` is that of a model without the tokens for it; a chat template returns its own errors.
pub(crate) fn prepare(
    mut request: GenerationRequest,
    info: &ModelInfo,
    vocabulary: &dyn Vocabulary,
    token_bytes_max: usize,
    token_index: impl FnOnce() -> Arc<TokenIndex>,
    seed: impl FnOnce() -> u64,
) -> Result<Submission, EngineError> {
    check(&mut request, info.vocabulary_tokens)?;
    let is_chat = matches!(request.prompt, Prompt::Chat(_));
    fits(&request.prompt, info, token_bytes_max)?;
    let (prompt, scored) = known_tokens(&mut request, info, vocabulary)?;
    let mut params = request.params;
    if let Some(scored) = &scored {
        // Given tokens are scored to the last one, whatever texts they contain (LM-311).
        params.stop.clear();
        params.bad_words.clear();
        params.max_tokens = Some(count(scored.tokens.len()));
    }
    resolve_bias_texts(&mut params, vocabulary)?;
    let sampling = Sampling::from(&params);
    // Given tokens are not sampled, so nothing penalises them.
    let history = scored
        .is_none()
        .then(|| TokenHistory::of(&prompt, &sampling, vocabulary))
        .flatten();
    // A seed matters only if something is sampled at random. Otherwise it is constant, so that models whose output
    // depends on the seed repeat themselves.
    let drawn = sampling.temperature > 0.0 || request.steer.is_some();
    let seed = || if drawn && scored.is_none() { seed() } else { 0 };
    let seed = sampling.seed.unwrap_or_else(seed);
    // The prompt is shorter than the context, which is a u32.
    let rest = info.context_tokens - count(prompt.len());
    let mut submission = Submission {
        prompt_tail: String::new(),
        choices: params.n.unwrap_or(1),
        priority: params.priority.unwrap_or(0),
        turn: SchedulerTurn {
            caller: request.caller,
            connection: request.connection,
        },
        prefix_scope: request.prefix_scope,
        lora: params.lora.take(),
        adapters: None,
        timeout: request.timeout,
        cache_key: request.cache_key,
        follower: request.follower,
        history,
        steer: request.steer,
        watched: request.watched,
        terms: RequestTerms {
            marked: request.marked,
            scored,
            prompt_logprobs: request.prompt_logprobs,
            ..terms(params, sampling, seed, rest, token_index)
        },
        prompt,
    };
    if is_chat {
        submission.prompt_tail = submission.tail(vocabulary);
    }
    Ok(submission)
}

/// The parameters that all choices share, of a request that generates; `rest` is what the context leaves for the output.
fn terms(
    params: GenerationParams,
    sampling: Sampling,
    seed: u64,
    rest: u32,
    token_index: impl FnOnce() -> Arc<TokenIndex>,
) -> RequestTerms {
    RequestTerms {
        sampling,
        seed,
        // Reduced rather than refused: a larger `max_tokens` ends with `length` where the context is full (OA-203).
        max_tokens: params.max_tokens.map_or(rest, |max| max.min(rest)),
        asked_max_tokens: params.max_tokens,
        min_tokens: params.min_tokens.unwrap_or(0),
        stop: params.stop,
        include_stop: params.include_stop_str_in_output.unwrap_or(false),
        stop_sequences: params.stop_sequences,
        bad_words: (!params.bad_words.is_empty())
            .then(|| BadWords::new(params.bad_words, token_index())),
        ignore_eos: params.ignore_eos.unwrap_or(false),
        skip_special_tokens: params.skip_special_tokens.unwrap_or(true),
        marked: Arc::default(),
        top_logprobs: params.top_logprobs,
        scored: None,
        prompt_logprobs: false,
    }
}

/// Tokens of a prompt's tail: more than templates write after the last message.
const TAIL_TOKENS: usize = 24;

/// Adds the biases that are given by text to those by token id: each token of a text gets its bias, as in llama-server.
fn resolve_bias_texts(
    params: &mut GenerationParams,
    vocabulary: &dyn Vocabulary,
) -> Result<(), EngineError> {
    if params.logit_bias_texts.is_empty() {
        return Ok(());
    }
    if !vocabulary.has_text() {
        let message = "logit_bias must be by token id: the tokenizer of this model is not known";
        return Err(EngineError::invalid(ErrorReason::BAD_CONFIG, message));
    }
    let mut biases = params.logit_bias.to_vec();
    for (text, bias) in std::mem::take(&mut params.logit_bias_texts) {
        let tokens = vocabulary.tokenize(&text, false);
        biases.extend(tokens.into_iter().map(|token| (token, bias)));
    }
    // Every step adds every entry, and many texts share their tokens: one entry with the sum for each token.
    biases.sort_by_key(|(token, _)| *token);
    biases.dedup_by(|later, first| {
        let same = later.0 == first.0;
        first.1 += if same { later.1 } else { 0.0 };
        same
    });
    params.logit_bias = biases.into();
    Ok(())
}

/// The tokens of the prompt, and those that are to be scored.
fn known_tokens(
    request: &mut GenerationRequest,
    info: &ModelInfo,
    vocabulary: &dyn Vocabulary,
) -> Result<(Vec<Token>, Option<Scored>), EngineError> {
    let tokens = match request.scored.take() {
        None => (tokenise(&request.prompt, info, vocabulary)?, None),
        Some(tokens) => scoring(&request.prompt, tokens, info, vocabulary)?,
    };
    // Tokenizing stops half way if the caller left, so the tokens may be incomplete and must not be used.
    if stop::stopped() {
        return Err(abandoned());
    }
    Ok(tokens)
}

/// The error of a request whose caller no longer waits; its tokens may be incomplete.
fn abandoned() -> EngineError {
    let message = "the caller no longer waits for this request";
    EngineError::new(Code::Cancelled, ErrorReason::NONE, message)
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Returns the prompt and the output of a request that scores tokens.
fn scoring(
    prompt: &Prompt,
    tokens: Vec<Token>,
    info: &ModelInfo,
    vocabulary: &dyn Vocabulary,
) -> Result<(Vec<Token>, Option<Scored>), EngineError> {
    inside(&tokens, info)?;
    let score_only = matches!(prompt, Prompt::Tokens(tokens) if tokens.is_empty());
    let prompt = if score_only {
        tokens[..1].to_vec()
    } else {
        tokenise(prompt, info, vocabulary)?
    };
    let length = prompt.len() + tokens.len() - usize::from(score_only);
    // Unlike a prompt, a scored text may fill the context: nothing is generated after it.
    if length > info.context_tokens as usize {
        return Err(too_long("prompt and scored tokens", length, info));
    }
    Ok((prompt, Some(Scored { tokens, score_only })))
}

fn inside(tokens: &[Token], info: &ModelInfo) -> Result<(), EngineError> {
    let size = info.vocabulary_tokens;
    let Some(token) = tokens.iter().find(|&&token| token >= size) else {
        return Ok(());
    };
    let message = format!("token {token} is outside the vocabulary of {size} tokens");
    Err(EngineError::invalid(ErrorReason::BAD_TOKENS, message))
}

fn too_long(what: &str, length: usize, info: &ModelInfo) -> EngineError {
    let context = info.context_tokens;
    let message =
        format!("{what} of {length} tokens exceeds the model's context of {context} tokens");
    EngineError::invalid(ErrorReason::PROMPT_TOO_LONG, message)
}

/// Bytes of a prompt per byte that its tokens represent, at most: a tokenizer may drop spaces or accents, and a
/// template may drop text too.
const DROPPED_TIMES: usize = 4;

/// The maximum of bytes of a role, a name or a call id: templates print them beside the content, and only the content
/// is measured.
const NAME_BYTES_MAX: usize = 1024;

/// Refuses a prompt that cannot fit before it is rendered or tokenised, which would take time and memory.
fn fits(prompt: &Prompt, info: &ModelInfo, token_bytes_max: usize) -> Result<(), EngineError> {
    if let Prompt::Chat(chat) = prompt {
        let (count, context) = (chat.messages.len(), info.context_tokens);
        // Messages are counted too, because empty ones have no bytes.
        if count > context as usize {
            let message =
                format!("{count} messages cannot fit the model's context of {context} tokens");
            return Err(EngineError::invalid(ErrorReason::PROMPT_TOO_LONG, message));
        }
        let mut names = chat.messages.iter().flat_map(ChatMessage::names);
        if let Some(long) = names.find(|name| name.len() > NAME_BYTES_MAX) {
            let message = format!(
                "a message's role, name and tool_call_id have at most {NAME_BYTES_MAX} bytes each, and one has {}",
                long.len()
            );
            return Err(EngineError::invalid(ErrorReason::NAME_TOO_LONG, message));
        }
    }
    // A lower bound of the tokens, so that no prompt that fits is refused; the exact count follows once it is tokenized
    // (D-47).
    let at_least = prompt.text_bytes() / token_bytes_max.max(1).saturating_mul(DROPPED_TIMES);
    if at_least > info.context_tokens as usize {
        let context = info.context_tokens;
        let message = format!(
            "a prompt of {} bytes, at least {at_least} tokens, exceeds the model's context of {context} tokens",
            prompt.text_bytes()
        );
        return Err(EngineError::invalid(ErrorReason::PROMPT_TOO_LONG, message));
    }
    Ok(())
}

fn tokenise(
    prompt: &Prompt,
    info: &ModelInfo,
    vocabulary: &dyn Vocabulary,
) -> Result<Vec<Token>, EngineError> {
    let mut tokens = match prompt {
        Prompt::Tokens(tokens) => {
            inside(tokens, info)?;
            tokens.clone()
        }
        Prompt::Text(text) => {
            let mut tokens: Vec<_> = vocabulary.bos().into_iter().collect();
            // Raw text: the names of control tokens in it are plain text (D-24).
            tokens.extend(vocabulary.tokenize(text, false));
            tokens
        }
        Prompt::Infill { prefix, suffix } => {
            infill_prompt(vocabulary, vocabulary.bos(), prefix, suffix)?
        }
        Prompt::Chat(chat) => vocabulary.chat(chat)?,
    };
    if tokens.is_empty() {
        // The first token needs a token before it; a model without a BOS token cannot score from nothing.
        let Some(bos) = vocabulary.bos() else {
            let message = "the prompt is empty: give at least one token of text";
            return Err(EngineError::invalid(ErrorReason::EMPTY_PROMPT, message));
        };
        tokens.push(bos);
    }
    // At least one token must fit behind the prompt (D-23).
    if tokens.len() >= info.context_tokens as usize {
        return Err(too_long("prompt", tokens.len(), info));
    }
    Ok(tokens)
}

/// Checks the ranges of D-20's core column, and what scoring leaves no room for.
fn check(request: &mut GenerationRequest, vocabulary_tokens: u32) -> Result<(), EngineError> {
    let bad = |message: String| EngineError::invalid(ErrorReason::BAD_CONFIG, message);
    let checked = request.params.check(&ParamRanges::CORE, vocabulary_tokens);
    checked.map_err(|error| bad(error.to_string()))?;
    let Some(scored) = &request.scored else {
        return Ok(());
    };
    if scored.is_empty() {
        return Err(bad("scored must be at least one token".to_owned()));
    }
    // Every choice would have the same scores, and a steerer has nothing to steer.
    if request.params.n.unwrap_or(1) != 1 || request.steer.is_some() {
        let message = "scored requires n = 1 and no controller";
        return Err(bad(message.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
