//! [`LoadError`]: why a model was not loaded, with what to do about it.

use std::io;
use std::path::PathBuf;

use super::llama::KernelsError;
use super::memory::readable;
use crate::draft_model::DraftMismatch;
use crate::template::TemplateError;

/// Why a model was not loaded. Everything that was allocated is freed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There are no kernels for this machine.
    #[error(transparent)]
    Kernels(#[from] KernelsError),
    /// The file does not exist.
    #[error("there is no file {0}: check the path")]
    Missing(PathBuf),
    /// It is a folder or a device.
    #[error("{0} is not a file: name the .gguf file itself")]
    NotAFile(PathBuf),
    /// It cannot be read.
    #[error("{path} cannot be read ({error}): check its permissions")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// It is not a GGUF file.
    #[error(
        "{0} is not a GGUF model (it does not begin with the letters GGUF): download the .gguf file of the model, or convert it"
    )]
    NotGguf(PathBuf),
    /// Its header is broken, hostile or of another version.
    #[error("{path} is not usable: {why}: download or convert it again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Its end is missing.
    #[error("{path} is incomplete: it has {have} bytes and needs {need}: download it again")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes it has.
        have: u64,
        /// Bytes it needs at least.
        need: u64,
    },
    /// Another file took the name of one of its files.
    #[error("a file of the model was replaced while it was loaded: load it again")]
    Replaced,
    /// llama.cpp does not support the architecture.
    #[error(
        "the architecture {0:?} is not supported by this build: choose another model, or a newer release"
    )]
    Architecture(String),
    /// It does not predict a next token.
    #[error(
        "a model of architecture {0:?} does not generate text: choose a language model, or let it embed, which it does \
         unless embedding = false"
    )]
    NotGenerative(String),
    /// Its texts cannot be pooled.
    #[error("a model of architecture {0:?} does not embed texts: choose an embedding model")]
    NotEmbedding(String),
    /// It does not fit in memory.
    #[error(
        "the model needs about {need} of memory ({weights} weights, {cache} cache for {cells} tokens) and {available} are \
         available: choose a smaller model or quantisation, {smaller}; engine.memory_bytes overrides what is available",
        need = readable(*need), weights = readable(*weights), cache = readable(*cache), available = readable(*available)
    )]
    Memory {
        /// Bytes needed.
        need: u64,
        /// Bytes for weights.
        weights: u64,
        /// Bytes for the KV cache.
        cache: u64,
        /// KV cells.
        cells: u32,
        /// Bytes available.
        available: u64,
        /// What else makes it smaller.
        smaller: &'static str,
    },
    /// A LoRA adapter cannot be used with it.
    #[error("the LoRA adapter {path} cannot be used: {why}")]
    Adapter {
        /// The file of the adapter.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Its chat template does not parse.
    #[error("the model's own template is not usable: {0}")]
    Template(#[from] TemplateError),
    /// The draft model was not loaded.
    #[error("its draft model: {0}")]
    Draft(Box<Self>),
    /// It cannot draft for the model, or that one cannot be drafted for.
    #[error(transparent)]
    Mismatch(#[from] DraftMismatch),
    /// An option is out of range.
    #[error("{0}")]
    Option(String),
    /// The caller stopped the loading.
    #[error("loading was stopped")]
    Stopped,
    /// llama.cpp refused the model.
    #[error("llama.cpp cannot load the model: {0}")]
    Llama(String),
}

impl LoadError {
    /// The error of a draft model.
    pub(super) fn of_draft(self) -> Self {
        match self {
            Self::Stopped => Self::Stopped,
            why => Self::Draft(Box::new(why)),
        }
    }
}
