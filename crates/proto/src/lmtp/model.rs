//! Model metadata that a connection needs.

use std::sync::Arc;

use serde::Serialize;

use super::{LmtpError, LmtpReason};
use crate::steer::Token;

/// One model, as MODEL_INFO describes it and as requests are validated against it. The members are sent in this order
/// (LM-331).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LmtpModelInfo {
    /// How the model is served, in a few words for humans.
    pub constructor: String,
    /// Its architecture.
    pub model_type: String,
    /// Token ids are below this number. `None`: the server that runs the model does not report it, and checks ids
    /// itself (LM-712).
    pub vocab_size: Option<u32>,
    /// A prompt must be shorter than this (D-23); `None` as above.
    pub max_context: Option<usize>,
    /// The BOS token, if there is one.
    pub bos: Option<Token>,
    /// The tokens that end a text.
    pub eos: Vec<Token>,
    /// The tokenizer; `None` serves tokens only, and `stop` is `unsupported_operation`.
    pub tokenizer: Option<TokenizerInfo>,
    /// The server's version.
    pub version: String,
    /// Equal requests, with a seed or at temperature 0, give equal tokens whatever else runs; `None`: not known (D-21).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deterministic: Option<bool>,
    /// The model is still loading, and these are the facts from its file; the tokenizer is not known yet.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub loading: bool,
    /// The `max_tokens` of requests that set none, if it is another than the protocol's. Not a member of MODEL_INFO.
    #[serde(skip)]
    pub default_max_tokens: Option<u32>,
    /// The `seed` of requests that set none: their samples count from it (LM-973). Not a member of MODEL_INFO.
    #[serde(skip)]
    pub default_seed: Option<u64>,
}

impl LmtpModelInfo {
    /// Whether this token id exists, as far as the vocabulary is known.
    #[must_use]
    pub fn has_token(&self, id: Token) -> bool {
        self.vocab_size.is_none_or(|size| id < size)
    }

    /// Whether this number of forbidden tokens is the whole vocabulary.
    #[must_use]
    pub fn is_all(&self, forbidden: usize) -> bool {
        self.vocab_size
            .is_some_and(|size| size as usize == forbidden)
    }
}

/// The tokenizer of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenizerInfo {
    /// `bpe`, `spm`, `bytes` or `words`.
    pub kind: String,
    /// Number of token ids.
    pub vocab_size: u32,
    /// Its BOS and EOS tokens, if they are known.
    #[serde(flatten)]
    pub ends: Option<TextEnds>,
    /// The digest of its file, in hex; without a file, of the vocabulary.
    pub sha256: String,
    /// Control tokens and their names; at most 256.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub special: Vec<(Token, String)>,
    /// The URL of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// The tokens that a tokenizer puts around a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TextEnds {
    /// The token at the beginning.
    pub bos: Option<Token>,
    /// The tokens at the end.
    pub eos: Vec<Token>,
    /// Whether `bos` is added by default.
    pub add_bos: bool,
    /// Its tokens for fill in the middle, if it has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infill: Option<InfillMarks>,
}

/// The tokens of a prompt for fill in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct InfillMarks {
    /// Stands before the text before the place to fill in.
    pub prefix: Token,
    /// Stands before the text behind it.
    pub suffix: Token,
    /// Ends the prompt.
    pub middle: Token,
    /// Whether the suffix comes first.
    pub suffix_first: bool,
}

/// Lookup of models by the names that clients may use (LM-321).
pub trait ModelLookup {
    /// Returns the model with exactly this name or alias. Must answer from memory.
    ///
    /// # Errors
    /// [`LmtpReason::ModelNotFound`], or [`LmtpReason::InsufficientScope`] if the caller may not use it.
    fn find(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason>;

    /// The same for a request that only needs metadata: also answers for a model that is still loading, as far as its
    /// file is read (LM-332).
    ///
    /// # Errors
    /// As [`ModelLookup::find`].
    fn describe(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason> {
        self.find(name)
    }

    /// The codec of this model, if its tokenizer is available; without one, version 2 has no text for this model.
    fn vocabulary(&self, _name: &str) -> Option<Arc<dyn TextCodec>> {
        None
    }

    /// The load of the server (LM-902).
    fn load(&self) -> Load {
        Load::default()
    }
}

/// Conversion between text and tokens, for text mode (LM-911). Called on the connection's task, so it must not block.
pub trait TextCodec: Send + Sync {
    /// Tokenizes a text; control tokens in it are not recognised.
    fn tokenize(&self, text: &str) -> Vec<Token>;

    /// The token that the tokenizer puts before a text, if any.
    fn bos(&self) -> Option<Token>;

    /// The bytes of a token; empty for control tokens.
    fn bytes(&self, token: Token) -> &[u8];

    /// The tokens of a prompt for fill in the middle between two texts, after `bos`; control tokens in the texts are not
    /// recognised.
    ///
    /// # Errors
    /// `unsupported_operation` for a model without tokens for it; `invalid_value` for a text that cannot be part of one.
    fn infill(
        &self,
        bos: Option<Token>,
        prefix: &str,
        suffix: &str,
    ) -> Result<Vec<Token>, LmtpError>;

    /// The tokens of a conversation in the form of OpenAI's `messages`, by the model's chat template.
    ///
    /// # Errors
    /// `unsupported_operation` without a template; `invalid_value` for a conversation that the template rejects.
    fn chat(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
    ) -> Result<Vec<Token>, LmtpError>;
}

/// Number of streams of the server, or of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Running in the batch.
    pub running: u64,
    /// Queued for a slot.
    pub queued: u64,
    /// Parked, because their readers are slow.
    pub parked: u64,
}
