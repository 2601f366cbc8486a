//! LMTP's messages as typed values.
//!
//! Client and server in one process exchange these values directly, without encoding them as text.

use std::fmt;
use std::sync::Arc;

use bytestring::ByteString;
use compact_str::CompactString;

use crate::steer::Token;

/// The id of a stream or request: the bytes of a JSON value as the client sent them (LM-206).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(ByteString);

impl StreamId {
    /// Stores JSON that was checked. A copy, so that an id does not pin its message in memory.
    pub(super) fn new(json: &str) -> Self {
        Self(ByteString::from(json))
    }

    /// The JSON to echo.
    #[must_use]
    pub fn as_json(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// GENERATE, with defaults for absent members. Ranges are those of section 3.1.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Token ids of the prompt, used as they are.
    pub prompt: Vec<Token>,
    /// Maximum number of items of the stream; at least 1.
    pub max_tokens: u32,
    /// 0 selects the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens that each item shows beside the sampled one.
    pub top_logprobs: u32,
    /// Added to logits before everything else, by id; minus infinity forbids a token. Ids are within the vocabulary,
    /// each once, in ascending order. A mask (version 2) is included: forbidden tokens have minus infinity.
    pub logit_bias: Arc<[(Token, f32)]>,
    /// Nucleus sampling: keep the smallest set of tokens with this probability; 1 is off.
    pub top_p: f32,
    /// Keep this many of the most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep tokens with at least this fraction of the probability of the most likely one; 0 is off.
    pub min_p: f32,
    /// Applied to tokens of prompt and output; 1 is off.
    pub repetition_penalty: f32,
    /// Applied to tokens of the output; 0 is off.
    pub presence_penalty: f32,
    /// Applied to tokens of the output; 0 is off.
    pub frequency_penalty: f32,
    /// Seed of 64 bits; negative numbers as their two's complement.
    pub seed: Option<u64>,
    /// Token sequences that end the stream; their tokens are sent.
    pub stop_tokens: Vec<Vec<Token>>,
    /// Stop strings that end the stream; their tokens are sent.
    pub stop: Vec<String>,
    /// Before this many tokens, neither end-of-sequence nor a stop ends the stream.
    pub min_tokens: u32,
    /// Continue past the end-of-sequence token.
    pub ignore_eos: bool,
    /// Omit control tokens from text; otherwise they appear as their names (version 2).
    pub skip_special: bool,
    /// Priority among the waiting requests of one key: higher is first, 0 is the default (version 2).
    pub priority: i32,
}

impl Default for GenerateRequest {
    fn default() -> Self {
        Self {
            prompt: Vec::new(),
            max_tokens: 32,
            temperature: 0.0,
            top_logprobs: 1,
            logit_bias: Arc::default(),
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            stop_tokens: Vec::new(),
            stop: Vec::new(),
            min_tokens: 0,
            ignore_eos: false,
            skip_special: true,
            priority: 0,
        }
    }
}

/// SCORE: evaluates the probability of `scored` after `prompt`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Token ids, used as they are; may be empty.
    pub prompt: Vec<Token>,
    /// Token ids; the stream has one item for each.
    pub scored: Vec<Token>,
    /// Number of most likely tokens that each item shows beside the scored one; 0 shows none (version 2, LM-974).
    pub top_logprobs: u32,
}

/// One token of a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenItem {
    /// Its id.
    pub token: Token,
    /// Natural logarithm of its probability, normalised as in LM-411.
    pub logprob: f32,
    /// The most likely tokens with their log-probabilities, best first, ties by lower id; as many as the stream asked
    /// for. Not used for SCORE.
    pub top: Vec<(Token, f32)>,
    /// The finish reason, if this is the last item.
    pub finish: Option<StreamFinish>,
    /// Text completed by this token: whole characters, without a possible beginning of a stop string. If one step gives
    /// several tokens, the last may carry the text of all. Sent to streams that asked for text (version 2).
    pub text: CompactString,
    /// The stop string that ended the stream; with the last item.
    pub stop: Option<String>,
    /// Log-probability of each prompt token after those before it, `None` for the first; with the first item of a
    /// stream that asked (version 2, LM-974).
    pub prompt: Option<Vec<Option<f32>>>,
    /// Number of prompt tokens that came from the prefix cache; with the last item.
    pub cached_tokens: u32,
}

/// Why a stream ended without an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamFinish {
    /// End-of-sequence or a stop.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// Cancelled by the client (version 2).
    Cancelled,
    /// Its deadline has passed (version 2).
    Deadline,
    /// Any other name that a peer sends.
    Other(String),
}

impl StreamFinish {
    /// The name on the wire.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Other(name) => name,
        }
    }

    /// The finish reason with this name; every name is valid (LM-705).
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "stop" => Self::Stop,
            "length" => Self::Length,
            "cancelled" => Self::Cancelled,
            "deadline" => Self::Deadline,
            other => Self::Other(other.to_owned()),
        }
    }
}
