//! LMTP's messages as typed values.
//!
//! Programs in one process exchange these values and no text.

use std::fmt;
use std::sync::Arc;

use bytestring::ByteString;
use compact_str::CompactString;

use crate::steer::Token;

/// The id of a stream or request: the bytes of a JSON value as the client sent them (LM-206).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(ByteString);

impl StreamId {
    /// Takes JSON that was checked. A copy, so that an id does not keep its message in memory.
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

/// GENERATE, with defaults for what was not sent. Ranges are those of section 3.1.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Token ids, used as they are.
    pub prompt: Vec<Token>,
    /// The stream has at most this many items; at least 1.
    pub max_tokens: u32,
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// How many of the most likely tokens each item shows beside the sampled one.
    pub top_logprobs: u32,
    /// Added to logits before everything else, by id; minus infinity forbids. Ids are those of the vocabulary, each
    /// once, ascending. A mask (version 2) is in it: what it forbids has minus infinity.
    pub logit_bias: Arc<[(Token, f32)]>,
    /// Keep the smallest set with this probability; 1 is off.
    pub top_p: f32,
    /// Keep this many of the most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep what is at least this fraction of the most likely; 0 is off.
    pub min_p: f32,
    /// Over prompt and output; 1 is off.
    pub repetition_penalty: f32,
    /// Over the output; 0 is off.
    pub presence_penalty: f32,
    /// Over the output; 0 is off.
    pub frequency_penalty: f32,
    /// 64 bits; negative numbers as their two's complement.
    pub seed: Option<u64>,
    /// Sequences of tokens that end the stream and are sent.
    pub stop_tokens: Vec<Vec<Token>>,
    /// Texts that end the stream; their tokens are sent.
    pub stop: Vec<String>,
    /// Before this many tokens neither end-of-sequence nor a stop ends the stream.
    pub min_tokens: u32,
    /// Generate on past the end-of-sequence token.
    pub ignore_eos: bool,
    /// Control tokens are no text; without this they are their names (version 2).
    pub skip_special: bool,
    /// Higher goes first among those that wait, within one key; 0 is usual (version 2).
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

/// SCORE: how likely `scored` is after `prompt`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Token ids, used as they are; may be empty.
    pub prompt: Vec<Token>,
    /// Token ids; the stream has one item for each.
    pub scored: Vec<Token>,
    /// How many of the most likely tokens each item shows beside the scored one; 0 shows none (version 2, LM-974).
    pub top_logprobs: u32,
}

/// One token of a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenItem {
    /// Its id.
    pub token: Token,
    /// Natural logarithm of its probability, as LM-411 normalises it.
    pub logprob: f32,
    /// The most likely tokens with theirs, best first, ties by lower id; as many as the stream asked for. Not read for
    /// SCORE.
    pub top: Vec<(Token, f32)>,
    /// Why the stream ends with it, if it does.
    pub finish: Option<StreamFinish>,
    /// The text that became certain with it: whole characters, without what may begin a stop. Of several tokens of one
    /// step the last may have the text of all. Shown to streams that asked (version 2).
    pub text: CompactString,
    /// The stop text that ended the stream; with the last item.
    pub stop: Option<String>,
    /// How likely each token of the prompt is after those before it, the first after nothing; with the first item of a
    /// stream that asked (version 2, LM-974).
    pub prompt: Option<Vec<Option<f32>>>,
    /// Tokens of the prompt that had not to be computed; with the last item.
    pub cached_tokens: u32,
}

/// Why a stream ended well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamFinish {
    /// End-of-sequence or a stop.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The client wanted it so (version 2).
    Cancelled,
    /// Its time was over (version 2).
    Deadline,
    /// Another request of its client has taken it over (version 2, LM-963).
    Superseded,
    /// Whatever a peer calls it.
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
            Self::Superseded => "superseded",
            Self::Other(name) => name,
        }
    }

    /// The ending with this name; any is one (LM-705).
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "stop" => Self::Stop,
            "length" => Self::Length,
            "cancelled" => Self::Cancelled,
            "deadline" => Self::Deadline,
            "superseded" => Self::Superseded,
            other => Self::Other(other.to_owned()),
        }
    }
}
