//! The interface of an engine: a request goes in, a stream of events comes out.
//!
//! See D-4 to D-11.
//!
//! A request either generates or, with [`GenerationRequest::scored`], scores given tokens. Both produce the same
//! events.
//!
//! ```text
//!   Engine::submit(GenerationRequest) -> RequestHandle
//!     ── EngineEvent{step, choice, Tokens}* ── EngineEvent{Finish} per choice ── EngineEvent{Usage} ── end
//!     └─ or EngineEvent{Error} once, as the last event
//! ```
//!
//! Only a script that cuts its connection produces an `Error` with [`Code::Truncated`] and the reason
//! [`ErrorReason::CUT_CLOSE`] or [`ErrorReason::CUT_RESET`]. A face that carries one stream per connection then closes or resets that connection (D-11).

use std::sync::Arc;
use std::time::Duration;

use compact_str::CompactString;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::params::{GenerationParams, SamplerStep};
use sapwood_proto::steer::{Steer, SteerFailure, StepReport, Token};
use smallvec::SmallVec;

use crate::infill::tokens::InfillTokens;
use crate::recommended::RecommendedSampling;
use crate::request_phase::Follower;
use crate::samplers;
pub use crate::samplers::{DrySampling, MirostatSampling, SamplerChain};

/// The input of a generation. It is complete before submission (D-9).
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids, used as they are.
    Tokens(Vec<Token>),
    /// Raw text: no template; special tokens are not parsed; a BOS token is added if the model wants one (D-24).
    Text(String),
    /// Two raw texts, between which the model fills in (FIM): [`crate::infill`].
    Infill {
        /// The text before the place to fill in; may be empty.
        prefix: String,
        /// The text behind it; may be empty.
        suffix: String,
    },
    /// A conversation for the model's chat template.
    Chat(ChatRequest),
}

impl Prompt {
    /// Returns the bytes of everything that may become tokens. It bounds the work before it is done, so for a
    /// conversation it includes what only some templates print.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Tokens(_) => 0,
            Self::Text(text) => text.len(),
            Self::Infill { prefix, suffix } => prefix.len().saturating_add(suffix.len()),
            Self::Chat(chat) => chat.bytes(),
        }
    }

    /// Returns the bytes of the texts that certainly become tokens. For a conversation these are the contents of its
    /// messages alone, because the rest depends on the template.
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Tokens(_) => 0,
            Self::Text(text) => text.len(),
            Self::Infill { prefix, suffix } => prefix.len().saturating_add(suffix.len()),
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
    /// `system`, `user`, `assistant`, `tool`, or another role that the template knows.
    pub role: String,
    /// The text. It never becomes special tokens (EV-607).
    pub content: String,
    /// The reasoning that led to an assistant message, if the client sent it back. Some templates print it.
    pub reasoning: Option<String>,
    /// The author's name, if any.
    pub name: Option<String>,
    /// Calls made by an assistant message, in the OpenAI shape, or `Null`.
    pub tool_calls: serde_json::Value,
    /// The id of the call that a tool message answers.
    pub tool_call_id: Option<String>,
}

impl ChatMessage {
    /// Returns the fields that hold a name or an id: role, name and tool call id.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let others = [&self.name, &self.tool_call_id].into_iter();
        std::iter::once(&*self.role).chain(others.filter_map(|name| name.as_deref()))
    }

    fn bytes(&self) -> usize {
        let names: usize = self.names().map(str::len).sum();
        let reasoning = self.reasoning.as_deref().map_or(0, str::len);
        names + self.content.len() + reasoning + json_bytes(&self.tool_calls)
    }
}

/// Estimates the bytes that a template prints for this value.
fn json_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value;
    match value {
        Value::Null => 0,
        Value::Bool(_) | Value::Number(_) => 8,
        // The quotes; below, the separators that Python's `json.dumps` prints between elements.
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

/// What the sampler needs of [`GenerationParams`], with a default for whatever is not set.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the most likely token; at most 100.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set with this probability; in (0, 1], 1 is off.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the highest probability; in [0, 1), 0 is off.
    pub min_p: f32,
    /// Divides the logits of tokens seen (multiplies negative ones); in (0, 10], 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token generated before; within ±100.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each earlier occurrence in the output; within ±100.
    pub frequency_penalty: f32,
    /// How many of the last tokens of prompt and output the penalties look at; -1 is all.
    pub penalty_last_n: i32,
    /// The penalty on tokens that would continue a repetition; `None` is off.
    pub dry: Option<Arc<DrySampling>>,
    /// Further samplers, or another order; `None` for most requests, which cost nothing more for it.
    pub chain: Option<Arc<SamplerChain>>,
    /// Added to the logits before everything else; minus infinity forbids the token (LM-305). In any order; several
    /// biases for one token add up. Shared, because some callers send the same tens of thousands of biases again and
    /// again.
    pub logit_bias: Arc<[(Token, f32)]>,
    /// Equal seed, build, model and request give equal tokens (D-21). `None`: the engine picks a seed and reports it.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self::from(&GenerationParams::default())
    }
}

impl Sampling {
    /// Returns the first state of mirostat: twice the surprise that it aims at.
    pub(crate) fn first_mirostat(&self) -> f32 {
        let chain = self.chain.as_ref();
        let mirostat = chain.and_then(|chain| chain.mirostat.as_ref());
        mirostat.map_or(0.0, |mirostat| 2.0 * mirostat.tau)
    }
}

impl From<&GenerationParams> for Sampling {
    fn from(params: &GenerationParams) -> Self {
        // What a step would read is off where the order has no such step, so that nobody has to ask for both.
        let order = samplers::active_steps(params);
        let number =
            |step, value: Option<f32>, off| value.filter(|_| order.contains(step)).unwrap_or(off);
        // 0 is greedy with and without the step.
        let temperature = params.temperature.unwrap_or(1.0);
        let is_applied = temperature <= 0.0 || order.contains(SamplerStep::Temperature);
        let top_k = params.top_k.filter(|_| order.contains(SamplerStep::TopK));
        let dry = order
            .contains(SamplerStep::Dry)
            .then(|| DrySampling::of(params));
        Self {
            temperature: if is_applied { temperature } else { 1.0 },
            top_k: top_k.unwrap_or(0),
            top_p: number(SamplerStep::TopP, params.top_p, 1.0),
            min_p: number(SamplerStep::MinP, params.min_p, 0.0),
            repetition_penalty: number(SamplerStep::Penalties, params.repetition_penalty, 1.0),
            presence_penalty: number(SamplerStep::Penalties, params.presence_penalty, 0.0),
            frequency_penalty: number(SamplerStep::Penalties, params.frequency_penalty, 0.0),
            penalty_last_n: params.penalty_last_n.unwrap_or(-1),
            dry: dry.flatten(),
            chain: SamplerChain::of(params, order),
            logit_bias: Arc::clone(&params.logit_bias),
            seed: params.seed,
        }
    }
}

/// One generation request.
pub struct GenerationRequest {
    /// The input.
    pub prompt: Prompt,
    /// The generation parameters, in the core's ranges ([`ParamRanges::CORE`](sapwood_proto::params::ParamRanges::CORE)); a
    /// value out of range is refused, never clipped. Without `max_tokens` the rest of the context may be generated.
    pub params: GenerationParams,
    /// The caller's identity: callers take turns, and a priority orders the requests of one of them. 0 is an anonymous caller.
    pub caller: u64,
    /// The caller's connection or session: these take turns within the caller's turns (D-54).
    pub connection: u64,
    /// If cached prefixes are not shared by all (LM-609): the scope whose prefixes it shares, which is that of requests
    /// with the same number. 0 is the anonymous scope.
    pub prefix_scope: u64,
    /// Ends the request this long after submission; the time in the queue counts.
    pub timeout: Option<Duration>,
    /// Requests with the same key probably share a prefix: each of them marks cached prefixes with this key as used.
    pub cache_key: Option<u64>,
    /// Steers the request. It begins when the request is submitted, and is forked for each further choice when it has
    /// begun.
    pub steer: Option<Box<dyn Steer>>,
    /// Asks for what the steerer prints and writes in each step: [`EventKind::Report`].
    pub watched: bool,
    /// Receives the phase of the request before its first token.
    pub follower: Option<Follower>,
    /// Control tokens whose names are part of the text, between [`MARK_OPEN`] and [`MARK_CLOSE`]: those that tell a
    /// parser of the output where something begins. Empty for a reader of plain text, who must not see them.
    pub marked: Arc<[Token]>,
    /// Scores these tokens instead of generating. At least one; they are taken as the output, each with its
    /// log-probability given the prompt and the tokens before it, without bias (LM-312). Apart from the prompt, only
    /// `top_logprobs` applies: nothing stops the output and nothing is sampled; `n` is 1 and there is no steerer. It
    /// ends with [`FinishReason::Stop`].
    pub scored: Option<Vec<Token>>,
    /// Prompt logprobs, sent with the first tokens of choice 0: [`Tokens::prompt`]. Every token of the prompt but the
    /// first is computed for that, even if it is cached, and scored without bias.
    pub prompt_logprobs: bool,
}

impl GenerationRequest {
    /// A request with the core's defaults for everything but its prompt.
    #[must_use]
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            params: GenerationParams::default(),
            caller: 0,
            connection: 0,
            prefix_scope: 0,
            timeout: None,
            cache_key: None,
            steer: None,
            watched: false,
            follower: None,
            marked: Arc::new([]),
            scored: None,
            prompt_logprobs: false,
        }
    }
}

/// Begins the name of a control token in a text ([`GenerationRequest::marked`]). It and [`MARK_CLOSE`] are
/// noncharacters, which no text has, so that text that only spells such a name is told apart.
pub const MARK_OPEN: char = '\u{fdd0}';
/// Ends the name of a control token in a text.
pub const MARK_CLOSE: char = '\u{fdd1}';

/// One event of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineEvent {
    /// The engine's step in which it occurred.
    pub step: u64,
    /// The choice (one of `n`, or a fork) that it belongs to; 0 for `Usage` and `Error`.
    pub choice: u32,
    /// The kind of event, with its data.
    pub kind: EventKind,
}

/// The kinds of event.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    /// Tokens were appended.
    Tokens(Tokens),
    /// What the steerer of the choice printed and wrote since its last report; only if the request is watched
    /// ([`GenerationRequest::watched`]).
    Report(StepReport),
    /// The choice ended; the last event of this choice.
    Finish(ChoiceEnd),
    /// The steerer of the choice failed while other choices go on or have ended well; the last event of this choice. If
    /// all choices fail, the last of them fails the request.
    Failed(EngineError),
    /// The token counts and times of the whole request; after the end of the last choice, the last event.
    Usage(TokenUsage),
    /// The request failed; the last event.
    Error(EngineError),
}

/// Tokens appended in one step, and the text that is ready to be sent with them.
///
/// A steerer that rewinds truncates what was already reported: `backtrack` and `withdrawn` are applied first, then
/// `tokens` and `text` are appended to what remains. Both are 0 for every request without a steerer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// Number of tokens to remove from the end of the choice.
    pub backtrack: u32,
    /// Number of bytes of text to remove from the end of the choice.
    pub withdrawn: u32,
    /// The tokens, in order. Empty when only held-back text is released.
    pub tokens: SmallVec<[Sampled; 1]>,
    /// Whole characters, never the possible start of a stop string; often empty.
    pub text: CompactString,
    /// Prompt logprobs, with the first tokens of choice 0 if [`GenerationRequest::prompt_logprobs`] requested them: for
    /// each token of the prompt but the first, its log-probability given the tokens before it.
    pub prompt: Option<Arc<[f32]>>,
    /// How many of the first tokens repeat the output that a branch had in common with its parent before the fork; 0
    /// in every event but a branch's first. `text` begins with theirs.
    pub inherited: u32,
    /// The choice that this one was forked from; only in a branch's first event.
    pub fork_of: Option<u32>,
}

impl Tokens {
    /// Merges both into one event. `later` must not backtrack.
    pub(crate) fn followed_by(mut self, later: Self) -> Self {
        self.tokens.extend(later.tokens);
        self.text.push_str(&later.text);
        self
    }
}

/// One token of an output. [`Vocabulary::bytes`] has its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: Token,
    /// Natural logarithm of its probability over the whole vocabulary, after bias and masks, before temperature (D-22).
    /// NaN if not requested.
    pub logprob: f32,
    /// Its rank among all tokens by that probability, the most likely being 1; `None` if not requested.
    pub rank: Option<u32>,
    /// The most likely tokens with their log-probabilities, best first, ties by lower id. Exactly as many as requested
    /// (KE-614), fewer only in a smaller vocabulary. It contains the sampled token only if that is among the best.
    pub top: Vec<(Token, f32)>,
    /// A control token of the vocabulary.
    pub special: bool,
    /// Forced by a steerer rather than sampled.
    pub forced: bool,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChoiceEnd {
    /// The reason.
    pub reason: FinishReason,
    /// The stop string or the stop tokens that ended it, if any.
    pub stop: Option<StopCause>,
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An EOG token, a stop string, stop tokens, or the last of the tokens to be scored.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// A steerer stopped it.
    Controller,
    /// The work of a steered request has passed its limit (AI-825).
    Fuel,
    /// The caller cancelled the request; the output so far remains valid.
    Cancelled,
}

/// What stopped a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// This stop string.
    Text(String),
    /// These tokens, the last of the output; a single one for an EOG token.
    Tokens(Vec<Token>),
}

/// Token counts and times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, all choices together.
    pub completion_tokens: u32,
    /// Prompt tokens that were not computed because a cached prefix has them.
    pub cached_tokens: u32,
    /// Tokens sampled, all choices together, including those that a steerer dropped or rolled back.
    pub sampled_tokens: u32,
    /// Tokens that went through the model, all choices together: prompt, forced and sampled ones, each once. 0 for a
    /// model on another server.
    pub processed_tokens: u32,
    /// The seed that was used.
    pub seed: u64,
    /// From submission to admission to the batch.
    pub queued: Duration,
    /// From admission to the first token; zero without one.
    pub prefill: Duration,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EngineError {
    /// One of the closed set of codes.
    pub code: Code,
    /// The finer, stable name (`ENGINE_BUSY`, `PROMPT_TOO_LONG`, `timeout` …), if there is one.
    pub reason: ErrorReason,
    /// A message for people. Contains nothing that a client must not see.
    pub message: String,
    /// When a retry makes sense, if that is known.
    pub retry_after: Option<Duration>,
}

impl EngineError {
    /// An error with its reason and its message.
    #[must_use]
    pub fn new(code: Code, reason: ErrorReason, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            retry_after: None,
        }
    }

    /// The caller's request is invalid.
    #[must_use]
    pub fn invalid(reason: ErrorReason, message: impl Into<String>) -> Self {
        Self::new(Code::InvalidRequest, reason, message)
    }

    /// The engine or its model failed.
    #[must_use]
    pub fn internal(reason: ErrorReason, message: impl Into<String>) -> Self {
        Self::new(Code::Internal, reason, message)
    }

    /// Adds the time after which a retry makes sense.
    #[must_use]
    pub fn after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

impl From<SteerFailure> for EngineError {
    fn from(failure: SteerFailure) -> Self {
        // Not the controller's fault: it has not begun.
        let code = match failure.reason {
            ErrorReason::SERVER_OVERLOADED => Code::Overloaded,
            _ => Code::ControllerFailed,
        };
        Self::new(code, failure.reason, failure.message)
    }
}

/// An adapter that a model has loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterInfo {
    /// The name by which requests choose it; unique within the model.
    pub name: String,
    /// The factor of what it adds, unless a request gives another.
    pub scale: f32,
    /// Whether it computes for requests that choose no adapters.
    pub applied: bool,
}

/// What a model is and can do. Immutable while it is loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// The name under which it is served.
    pub name: String,
    /// The architecture (`llama`, `scripted` …).
    pub architecture: String,
    /// A description for people: size, quantisation, source.
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
    /// A sequence can be truncated cheaply (not so for recurrent models); steerers that rewind need it.
    pub truncates: bool,
    /// Whether equal requests, at temperature 0 or with a seed, give equal tokens whatever else runs (D-21). `None`: not known,
    /// as before a model is loaded, or of one on another server.
    pub deterministic: Option<bool>,
    /// The LoRA adapters that requests may choose, in the order of its list; for a model on another server, where requests
    /// may choose too, they are not known.
    pub adapters: Arc<[AdapterInfo]>,
    /// Sampling parameters that its file recommends; only programs that ask on behalf of people use them (D-53).
    pub sampling: RecommendedSampling,
}

/// Tokenising and templating: immutable, shared, callable from any thread (D-8).
pub trait Vocabulary: Send + Sync + 'static {
    /// Number of tokens.
    fn size(&self) -> usize;

    /// Whether this vocabulary converts text to tokens and back. If not, it has numbers alone: the tokens of a remote
    /// model whose tokenizer is not known.
    fn has_text(&self) -> bool {
        true
    }

    /// A `tokenizer.json` with which other programs tokenise as this vocabulary does: the file that it was read from,
    /// or one generated from it (LM-951). `None`: no such file can express it.
    fn file(&self) -> Option<bytes::Bytes> {
        None
    }

    /// Tokenises `text`. With `special`, the texts of control tokens become control tokens; without, they are plain
    /// text.
    fn tokenize(&self, text: &str, special: bool) -> Vec<Token>;

    /// The bytes of one token; empty for control tokens and ids outside the vocabulary.
    fn bytes(&self, token: Token) -> &[u8];

    /// Bytes of the longest token, or an upper bound. The default implementation looks at all tokens.
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

    /// The name of a control token, if it is known.
    fn name(&self, _token: Token) -> Option<String> {
        None
    }

    /// Whether the token is an EOG token.
    fn is_end(&self, token: Token) -> bool;

    /// The BOS token to put before raw text, if the model wants one.
    fn bos(&self) -> Option<Token>;

    /// The tokens for fill in the middle, if the model has them.
    fn infill(&self) -> Option<InfillTokens> {
        None
    }

    /// The token that ends a turn, if there is one (EV-607).
    fn end_of_turn(&self) -> Option<Token>;

    /// The source of the chat template, if there is one and it is known.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// Renders a conversation with the chat template and tokenises it; contents never become special tokens.
    ///
    /// # Errors
    /// `NO_TEMPLATE` if there is none; `BAD_ROLE` or `invalid-request` if the template rejects the conversation.
    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError>;
}

/// A shared vocabulary.
pub type SharedVocabulary = Arc<dyn Vocabulary>;
