//! LMTP's messages as typed values.
//!
//! Client and server in one process exchange these values directly, without encoding them as text.

use std::fmt;
use std::sync::Arc;

use bytestring::ByteString;
use compact_str::CompactString;

use super::LmtpError;
use crate::params::{GenerationParams, LoraUse};
use crate::steer::{ControllerChoice, Token};

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

/// GENERATE.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Token ids of the prompt, used as they are.
    pub prompt: Vec<Token>,
    /// The parameters, in LMTP's ranges ([`ParamRanges::LMTP`](crate::params::ParamRanges::LMTP)); one that is not set
    /// has LMTP's default. In a request that was read `max_tokens` and `top_logprobs` are filled in, and ids of `logit_bias`
    /// are within the vocabulary, each once, in ascending order; a mask (version 2) is included.
    pub params: GenerationParams,
    /// The controller that steers it, if any (version 2, LM-971). Shared, because each sample has a copy of the request.
    pub controller: Option<Arc<ControllerChoice>>,
}

impl GenerateRequest {
    /// The temperature of a request that sets none.
    pub const TEMPERATURE: f32 = 0.0;

    /// Maximum number of items of the stream.
    pub(super) fn max_tokens(&self) -> u32 {
        self.params.max_tokens.unwrap_or(MAX_TOKENS)
    }

    /// 0 selects the most likely token.
    pub(super) fn temperature(&self) -> f32 {
        self.params.temperature.unwrap_or(Self::TEMPERATURE)
    }

    /// Number of most likely tokens that each item shows beside the sampled one.
    pub(super) fn top_logprobs(&self) -> u32 {
        self.params.top_logprobs.unwrap_or(TOP_LOGPROBS)
    }
}

/// The defaults of section 3.1. Those that are the core's are set as well: a model's server may have others.
impl Default for GenerateRequest {
    fn default() -> Self {
        Self {
            prompt: Vec::new(),
            params: GenerationParams {
                max_tokens: Some(MAX_TOKENS),
                temperature: Some(Self::TEMPERATURE),
                top_logprobs: Some(TOP_LOGPROBS),
                top_p: Some(1.0),
                top_k: Some(0),
                min_p: Some(0.0),
                repetition_penalty: Some(1.0),
                presence_penalty: Some(0.0),
                frequency_penalty: Some(0.0),
                min_tokens: Some(0),
                ignore_eos: Some(false),
                skip_special_tokens: Some(true),
                priority: Some(0),
                ..GenerationParams::default()
            },
            controller: None,
        }
    }
}

pub(super) const MAX_TOKENS: u32 = 32;
const TOP_LOGPROBS: u32 = 1;

/// SCORE: evaluates the probability of `scored` after `prompt`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Token ids, used as they are; may be empty.
    pub prompt: Vec<Token>,
    /// Token ids; the stream has one item for each.
    pub scored: Vec<Token>,
    /// Number of most likely tokens that each item shows beside the scored one; 0 shows none (version 2, LM-974).
    pub top_logprobs: u32,
    /// The LoRA adapters that compute; `None`: those of the model.
    pub lora: Option<Vec<LoraUse>>,
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
    /// A controller has appended it, without sampling (LM-972). Its log-probability is 0.
    pub forced: bool,
    /// The branch of the work that it belongs to: 0, or the number of a [`BranchEvent::Forked`].
    pub branch: u32,
}

/// What happens to one branch of a steered stream's work, other than a token (LM-972, LM-973).
#[derive(Clone, Debug, PartialEq)]
pub enum BranchEvent {
    /// The branch begins, as a fork of branch `of` and with the first `inherited` tokens of that one.
    Forked {
        /// The branch that it is a fork of.
        of: u32,
        /// How many tokens both have in common.
        inherited: u32,
    },
    /// Its last tokens are void.
    Backtrack(u32),
    /// It has ended, without a token.
    Ended {
        /// Why.
        finish: StreamFinish,
        /// Number of prompt tokens that came from the prefix cache.
        cached_tokens: u32,
    },
    /// It has failed; the other branches go on.
    Failed(LmtpError),
}

/// Why a stream ended without an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamFinish {
    /// End-of-sequence or a stop.
    Stop,
    /// Its controller has stopped it: `stop` on the wire, with `stop_by` (version 2, LM-972).
    Controller,
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
            Self::Stop | Self::Controller => "stop",
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
