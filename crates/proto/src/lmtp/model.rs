//! What a connection has to know of a model.
//!
//! Owns: the facts that checks and MODEL_INFO need. Refuses to know: where models come from and how they run; the shell
//! keeps a table and answers from memory (LM-332).

use std::sync::Arc;

use serde::Serialize;

use super::Reason;
use crate::steer::Token;

/// One model, as MODEL_INFO describes it and as requests are checked against it. The members go out in this order (LM-331).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Model {
    /// How it is served, in a few words for people.
    pub constructor: String,
    /// Its architecture.
    pub model_type: String,
    /// Ids are below this number.
    pub vocab_size: u32,
    /// A prompt has to be shorter than this (D-23).
    pub max_context: usize,
    /// The token that begins a text, if it has one.
    pub bos: Option<Token>,
    /// The tokens that end one.
    pub eos: Vec<Token>,
    /// How text becomes tokens; `None` serves tokens alone, and `stop` is `unsupported_operation`.
    pub tokenizer: Option<Tokenizer>,
    /// The server's version.
    pub version: String,
}

/// Which tokenizer a model has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tokenizer {
    /// `bpe`, `spm`, `bytes` or `words`.
    pub kind: String,
    /// How many ids it has.
    pub vocab_size: u32,
    /// The digest of its file, in hex.
    pub sha256: String,
}

/// The models by the names that clients may use (LM-321).
pub trait Models {
    /// The model of exactly this name or alias. Answers from memory.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`], or [`Reason::InsufficientScope`] if the caller may not use it.
    fn find(&self, name: &str) -> Result<Arc<Model>, Reason>;
}
