//! The interface of an engine: a request goes in, a stream of events comes out.
//!
//! See D-4 to D-11.
//!
//! A request either generates or, with [`GenerationRequest::scored`], scores given tokens. Both give the same events.
//!
//! ```text
//!   Engine::submit(Request) -> Handle ── Event{step, choice, Tokens}* ── Event{Finish} per choice ── Event{Usage} ── end
//!                                     └─ or Event{Fault} once, as the last event
//! ```
//!
//! A script that cuts its connection, and nothing else, gives a `Fault` with [`Code::Truncated`] and the reason
//! [`CUT_CLOSE`] or [`CUT_RESET`]: a face that carries one stream per connection ends that connection so (D-11).

use std::sync::Arc;
use std::time::Duration;

use compact_str::CompactString;
use sapwood_proto::code::Code;
use sapwood_proto::steer::{Steer, Token};
use smallvec::SmallVec;

use crate::recommended::RecommendedSampling;
use crate::request_phase::Follower;

/// Reason of a fault: end the transport in order, but without the protocol's own end.
pub const CUT_CLOSE: &str = "cut_close";
/// Reason of a fault: reset the transport.
pub const CUT_RESET: &str = "cut_reset";

/// What to generate from. Always whole before submission (D-9).
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids, used as they are.
    Tokens(Vec<Token>),
    /// Raw text: no template; special tokens are not parsed; a BOS token as the model says (D-24).
    Text(String),
    /// A conversation for the model's chat template.
    Chat(ChatRequest),
}

impl Prompt {
    /// Bytes of everything that tokens may be made of, by which the work on it is judged before it is done: of a conversation
    /// also what only some templates print.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Tokens(_) => 0,
            Self::Text(text) => text.len(),
            Self::Chat(chat) => chat.bytes(),
        }
    }

    /// Bytes of its texts, all of which stand in its tokens. Of a conversation the contents of its messages alone: what
    /// stands around them depends on the template.
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Tokens(_) => 0,
            Self::Text(text) => text.len(),
            Self::Chat(chat) => chat
                .messages
                .iter()
                .map(|message| message.content.len())
                .sum(),
        }
    }
}

/// A conversation, rendered by the model's own chat template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// The messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// Tool definitions in the OpenAI shape, or `Null`.
    pub tools: serde_json::Value,
    /// Further variables for the template; an object or `Null`.
    pub template_args: serde_json::Value,
    /// Continue the last assistant message instead of opening a new one (EV-606).
    pub continue_last: bool,
}

impl ChatRequest {
    fn bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(ChatMessage::bytes).sum();
        messages + json_bytes(&self.tools) + json_bytes(&self.template_args)
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`, or whatever the template knows.
    pub role: String,
    /// The text. It never turns into special tokens (EV-607).
    pub content: String,
    /// The speaker's name, if any.
    pub name: Option<String>,
    /// Calls made by an assistant message, in the OpenAI shape, or `Null`.
    pub tool_calls: serde_json::Value,
    /// The call that a tool message answers.
    pub tool_call_id: Option<String>,
}

impl ChatMessage {
    /// What it says of itself, each of which is a name.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let others = [&self.name, &self.tool_call_id].into_iter();
        std::iter::once(&*self.role).chain(others.filter_map(|name| name.as_deref()))
    }

    fn bytes(&self) -> usize {
        let names: usize = self.names().map(str::len).sum();
        names + self.content.len() + json_bytes(&self.tool_calls)
    }
}

/// What a template that prints it makes of it, about.
fn json_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    match value {
        Value::Null => 0,
        Value::Bool(_) | Value::Number(_) => 8,
        Value::String(text) => text.len() + 2,
        Value::Array(values) => values.iter().map(|value| json_bytes(value) + 2).sum(),
        Value::Object(members) => {
            let bytes = members.iter();
            bytes
                .map(|(name, value)| name.len() + json_bytes(value) + 6)
                .sum()
        }
    }
}

/// How tokens are chosen. Ranges are those of D-20's core column; out of range is refused, never clipped.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token; at most 100.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set with this probability; in (0, 1], 1 is off.
    pub top_p: f32,
    /// Keep what is at least this fraction of the most likely; in [0, 1), 0 is off.
    pub min_p: f32,
    /// Divides (or multiplies, if negative) the logits of tokens seen; in (0, 10], 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens generated before; within ±100.
    pub presence_penalty: f32,
    /// Subtracted per earlier occurrence in the output; within ±100.
    pub frequency_penalty: f32,
    /// Added to the logits before everything else; minus infinity forbids the token (LM-305). In any order, several for
    /// one token add up. Shared, because some callers send the same tens of thousands of them again and again.
    pub logit_bias: Arc<[(Token, f32)]>,
    /// Equal seed, build, model and request give equal tokens (D-21). `None`: the engine picks one and reports it.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Arc::default(),
            seed: None,
        }
    }
}

/// One generation, wanted `n` times.
pub struct GenerationRequest {
    /// What to generate from.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// At most this many tokens per choice; `None`: the rest of the context. 0 generates nothing.
    pub max_tokens: Option<u32>,
    /// Before this many tokens neither end-of-sequence nor a stop ends a choice.
    pub min_tokens: u32,
    /// Texts that end a choice and are not part of it; at most 64 of at most 1 KiB, none empty.
    pub stop: Vec<String>,
    /// Sequences of tokens that end a choice, matched in its output only (LM-307); at most 256 of 1 to 64 tokens. The
    /// token that completes one is reported, but its bytes are no text.
    pub stop_sequences: Vec<Vec<Token>>,
    /// Texts that must not come in an output, however it is cut into tokens; at most 64 of at most 1 KiB, none empty.
    /// A token that would complete one is forbidden as if a mask did it. What a steerer forces may hold them.
    pub bad_words: Vec<String>,
    /// Generate on past the end-of-sequence token.
    pub ignore_eos: bool,
    /// Control tokens are no text; without this they are their names.
    pub skip_special_tokens: bool,
    /// `None`: no log-probabilities at all. `Some(k)`: the chosen token's, and the `k` best.
    pub top_logprobs: Option<u32>,
    /// How many choices; 1 to 64.
    pub n: u32,
    /// Higher goes first among those that wait; 0 is usual.
    pub priority: i32,
    /// Whose request it is: among equal priorities, callers take turns. 0 is nobody in particular.
    pub caller: u64,
    /// Which of that caller's connections or sessions it came by: those take turns within their caller's (D-54).
    pub connection: u64,
    /// Whose computed prefixes it shares, where they are not everybody's (LM-609): those of requests with the same number.
    /// 0 is nobody in particular.
    pub prefix_scope: u64,
    /// Ends the request this long after submission, waiting included.
    pub timeout: Option<Duration>,
    /// Requests with the same key probably share a prefix; keep it warm for them.
    pub cache_key: Option<u64>,
    /// Steers the request; forked for each further choice.
    pub steer: Option<Box<dyn Steer>>,
    /// Receives the phase of the request before its first token.
    pub follower: Option<Follower>,
    /// Not to generate: these tokens, at least one, are taken as the output, each with its log-probability given the
    /// prompt and those before it, without bias (LM-312). Only `top_logprobs` counts beside the prompt: nothing stops
    /// it, nothing is drawn; `n` is 1 and there is no steerer. It ends with [`FinishReason::Stop`].
    pub scored: Option<Vec<Token>>,
    /// How likely the prompt is, with the first tokens of choice 0: [`Tokens::prompt`]. Every token of it but the first is
    /// computed for that, whatever is cached, and scored without bias.
    pub prompt_logprobs: bool,
}

impl GenerationRequest {
    /// A request with the defaults of the core for everything but its prompt.
    #[must_use]
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            sampling: Sampling::default(),
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            stop_sequences: Vec::new(),
            bad_words: Vec::new(),
            ignore_eos: false,
            skip_special_tokens: true,
            top_logprobs: None,
            n: 1,
            priority: 0,
            caller: 0,
            connection: 0,
            prefix_scope: 0,
            timeout: None,
            cache_key: None,
            steer: None,
            follower: None,
            scored: None,
            prompt_logprobs: false,
        }
    }
}

/// One thing that happened to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineEvent {
    /// The engine's step in which it happened.
    pub step: u64,
    /// Which of the `n` choices (or forks) it concerns; 0 for `Usage` and `Fault`.
    pub choice: u32,
    /// What happened.
    pub kind: EventKind,
}

/// The kinds of event.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    /// Tokens were appended.
    Tokens(Tokens),
    /// The choice ended; the last event of this choice.
    Finish(ChoiceEnd),
    /// What the whole request cost; after the last `Finish`, the last event.
    Usage(TokenUsage),
    /// The request ended early; the last event.
    Error(EngineError),
}

/// Tokens appended in one step, and the text that became certain with them.
///
/// A steerer that rewinds withdraws what was already reported: then `backtrack` and `withdrawn` come first, and `tokens`
/// and `text` are appended to what remains. Both are 0 for every request without a steerer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// The choice's last tokens, this many, are void.
    pub backtrack: u32,
    /// The choice's last bytes of text, this many, are void.
    pub withdrawn: u32,
    /// The tokens, in order. Empty when only held-back text is released.
    pub tokens: SmallVec<[Sampled; 1]>,
    /// Whole characters, never the beginning of a stop string; often empty.
    pub text: CompactString,
    /// Of each token of the prompt but the first, with the first tokens of choice 0 where
    /// [`GenerationRequest::prompt_logprobs`] asked for it: its log-probability given those before it.
    pub prompt: Option<Arc<[f32]>>,
}

impl Tokens {
    /// The two as one: `later` takes nothing back.
    pub(crate) fn followed_by(mut self, later: Self) -> Self {
        self.tokens.extend(later.tokens);
        self.text.push_str(&later.text);
        self
    }
}

/// One token of an output. Its bytes are the vocabulary's.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: Token,
    /// Natural logarithm of its probability over the whole vocabulary, after bias and masks, before temperature
    /// (D-22). NaN if not asked for.
    pub logprob: f32,
    /// Its place among all tokens by that probability, the most likely being 1; `None` if not asked for.
    pub rank: Option<u32>,
    /// The most likely tokens with theirs, best first, ties by lower id; exactly as many as asked (KE-614), fewer only
    /// in a smaller vocabulary. The sampled token stands in it only if it is among them.
    pub top: Vec<(Token, f32)>,
    /// A control token of the vocabulary.
    pub special: bool,
    /// Forced by a steerer rather than sampled.
    pub forced: bool,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChoiceEnd {
    /// Why.
    pub reason: FinishReason,
    /// The stop text or the stop tokens that did it, if they did.
    pub stop: Option<StopCause>,
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// End-of-sequence, a stop text, stop tokens, or the last of the tokens to be scored.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// A steerer said so.
    Controller,
    /// The caller cancelled the request; the output so far stands.
    Cancelled,
}

/// What stopped a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// This stop text.
    Text(String),
    /// These tokens, the last of the output; one for an end of sequence.
    Tokens(Vec<Token>),
}

/// What a request cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, all choices together.
    pub completion_tokens: u32,
    /// Tokens of the prompt that were not computed because an equal prefix was cached.
    pub cached_tokens: u32,
    /// The seed in force.
    pub seed: u64,
    /// From submission to a place in the batch.
    pub queued: Duration,
    /// From there to the first token; zero without one.
    pub prefill: Duration,
}

/// Why a request ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EngineError {
    /// The closed code.
    pub code: Code,
    /// The finer, stable name (`ENGINE_BUSY`, `PROMPT_TOO_LONG`, `timeout` …), or empty.
    pub reason: &'static str,
    /// A message for people. Contains nothing that a client must not see.
    pub message: String,
    /// When it is worth asking again, where that is known.
    pub retry_after: Option<Duration>,
}

impl EngineError {
    /// A fault with its reason and its message.
    #[must_use]
    pub fn new(code: Code, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            retry_after: None,
        }
    }

    /// With the time after which it is worth asking again.
    #[must_use]
    pub fn after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

/// Why a request was not taken at all.
pub type SubmitError = EngineError;

/// What a model is and can do. Immutable while it is loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// The name under which it is served.
    pub name: String,
    /// The architecture (`llama`, `scripted` …).
    pub architecture: String,
    /// What it is, for people: size, quantisation, source.
    pub description: String,
    /// Tokens a sequence may hold, prompt and output together. A prompt of this many is refused (D-23).
    pub context_tokens: u32,
    /// Tokens of the vocabulary.
    pub vocabulary_tokens: u32,
    /// Parameters; 0 if unknown.
    pub parameters: u64,
    /// Bytes of the weights; 0 if none.
    pub weight_bytes: u64,
    /// Sequences that can be in one batch.
    pub parallel: u32,
    /// It has a chat template.
    pub chat: bool,
    /// A sequence can be cut back cheaply (not so for recurrent models); rewinding steerers need it.
    pub truncates: bool,
    /// Equal requests give equal tokens whatever else runs (D-21).
    pub deterministic: bool,
    /// What its file recommends for sampling; only programs that ask for people look at it (D-53).
    pub sampling: RecommendedSampling,
}

/// Tokenising and templating: immutable, shared, callable from any thread (D-8).
pub trait Vocabulary: Send + Sync + 'static {
    /// Number of tokens.
    fn size(&self) -> usize;

    /// Whether text becomes tokens here, and tokens text. Without, it is numbers alone: those of a model elsewhere whose
    /// tokenizer is not known.
    fn has_text(&self) -> bool {
        true
    }

    /// A `tokenizer.json` by which others tokenise as this does: the one that it was read from, or one that was made of it
    /// (LM-951). `None`: no such file can say it.
    fn file(&self) -> Option<bytes::Bytes> {
        None
    }

    /// The tokens of `text`. With `special`, the texts of control tokens become control tokens; without, plain text.
    fn tokenize(&self, text: &str, special: bool) -> Vec<Token>;

    /// The bytes of one token; empty for control tokens and ids outside the vocabulary.
    fn bytes(&self, token: Token) -> &[u8];

    /// Bytes of the longest token, or more where that is not known. Looks at all of them unless implemented.
    fn token_bytes_max(&self) -> usize {
        if !self.has_text() {
            return usize::MAX;
        }
        let tokens = 0..Token::try_from(self.size()).unwrap_or(Token::MAX);
        tokens
            .map(|token| self.bytes(token).len())
            .max()
            .unwrap_or(0)
    }

    /// Whether the token is a control token.
    fn is_special(&self, token: Token) -> bool;

    /// What a control token is called, where that is known.
    fn name(&self, _token: Token) -> Option<String> {
        None
    }

    /// Whether the token ends a generation.
    fn is_end(&self, token: Token) -> bool;

    /// The token to put before raw text, if the model wants one.
    fn bos(&self) -> Option<Token>;

    /// The token that ends a turn, if there is one (EV-607).
    fn end_of_turn(&self) -> Option<Token>;

    /// Renders a conversation with the chat template and tokenises it; contents never become special tokens.
    ///
    /// # Errors
    /// `NO_TEMPLATE` if there is none; `BAD_ROLE` or `invalid-request` if the template rejects the conversation.
    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError>;
}

/// A shared vocabulary.
pub type SharedVocabulary = Arc<dyn Vocabulary>;
