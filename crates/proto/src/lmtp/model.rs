//! The facts of a model that a connection needs.

use std::sync::Arc;

use serde::Serialize;

use super::{LmtpError, LmtpReason};
use crate::steer::Token;

/// One model, as MODEL_INFO describes it and as requests are checked against it. The members go out in this order (LM-331).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LmtpModelInfo {
    /// How it is served, in a few words for people.
    pub constructor: String,
    /// Its architecture.
    pub model_type: String,
    /// Ids are below this number. `None`: the server that runs the model does not report it, and checks ids itself (LM-712).
    pub vocab_size: Option<u32>,
    /// A prompt has to be shorter than this (D-23); `None` as above.
    pub max_context: Option<usize>,
    /// The token that begins a text, if it has one.
    pub bos: Option<Token>,
    /// The tokens that end one.
    pub eos: Vec<Token>,
    /// How text becomes tokens; `None` serves tokens alone, and `stop` is `unsupported_operation`.
    pub tokenizer: Option<TokenizerInfo>,
    /// The server's version.
    pub version: String,
    /// It is still being loaded, and this is what its file says: how text becomes tokens follows.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub loading: bool,
}

impl LmtpModelInfo {
    /// Whether there is a token of this id, as far as that is known.
    #[must_use]
    pub fn has_token(&self, id: Token) -> bool {
        self.vocab_size.is_none_or(|size| id < size)
    }

    /// Whether so many forbidden tokens are all that there are.
    #[must_use]
    pub fn is_all(&self, forbidden: usize) -> bool {
        self.vocab_size
            .is_some_and(|size| size as usize == forbidden)
    }
}

/// Which tokenizer a model has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenizerInfo {
    /// `bpe`, `spm`, `bytes` or `words`.
    pub kind: String,
    /// How many ids it has.
    pub vocab_size: u32,
    /// Its tokens at both ends of a text, if that is known.
    #[serde(flatten)]
    pub ends: Option<TextEnds>,
    /// The digest of its file, in hex; without one, of the vocabulary itself.
    pub sha256: String,
    /// The control tokens and what they are called; at most 256.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub special: Vec<(Token, String)>,
    /// Where its file is to be had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// What a tokenizer puts around a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TextEnds {
    /// The token that begins one.
    pub bos: Option<Token>,
    /// The tokens that end one.
    pub eos: Vec<Token>,
    /// Whether the first is put there if nobody says otherwise.
    pub add_bos: bool,
}

/// The models by the names that clients may use (LM-321).
pub trait ModelLookup {
    /// The model of exactly this name or alias. Answers from memory.
    ///
    /// # Errors
    /// [`LmtpReason::ModelNotFound`], or [`LmtpReason::InsufficientScope`] if the caller may not use it.
    fn find(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason>;

    /// The same for a request that only asks for facts: known of a model that is still loading, too, as far as its file says it
    /// (LM-332).
    ///
    /// # Errors
    /// As [`ModelLookup::find`].
    fn describe(&self, name: &str) -> Result<Arc<LmtpModelInfo>, LmtpReason> {
        self.find(name)
    }

    /// The vocabulary of this model, if its tokenizer is at hand; without one version 2 has no text of it.
    fn vocabulary(&self, _name: &str) -> Option<Arc<dyn TextCodec>> {
        None
    }

    /// How busy the server is (LM-902).
    fn load(&self) -> Load {
        Load::default()
    }
}

/// From text to tokens and back: what text mode needs of a model (LM-911). Answers at once, on the connection's task.
pub trait TextCodec: Send + Sync {
    /// The tokens of a text, in which control tokens are not looked for.
    fn tokenize(&self, text: &str) -> Vec<Token>;

    /// The token that the tokenizer puts before a text, if it does.
    fn bos(&self) -> Option<Token>;

    /// The bytes of a token; none for control tokens.
    fn bytes(&self, token: Token) -> &[u8];

    /// The tokens of a conversation, in the shape of OpenAI's `messages`, by the model's template.
    ///
    /// # Errors
    /// `unsupported_operation` without a template; `invalid_value` for a conversation that it does not take.
    fn chat(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
    ) -> Result<Vec<Token>, LmtpError>;
}

/// Streams of the server, or of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// In the batch.
    pub running: u64,
    /// Waiting for a place.
    pub queued: u64,
    /// Waiting for their readers.
    pub parked: u64,
}
