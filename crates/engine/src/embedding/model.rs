//! The trait that the owner thread needs from a model that embeds.

use sapwood_proto::steer::Token;

use crate::api::{EngineError, SharedVocabulary};
use crate::model::Interrupt;
use crate::template::RerankTemplate;

/// How the rows of a text's tokens become one. The numbers are those of GGUF's `pooling_type`, where 0 is no pooling, which is
/// not offered: a row for each token is no embedding of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all tokens.
    Mean,
    /// The first token, which is CLS.
    Cls,
    /// The last token.
    Last,
    /// A classification head, whose first number is the score of a query and a document.
    Rank,
}

impl Pooling {
    /// The pooling with this number in a GGUF file; `None` for none and for unknown numbers.
    #[must_use]
    pub const fn from_number(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Mean),
            2 => Some(Self::Cls),
            3 => Some(Self::Last),
            4 => Some(Self::Rank),
            _ => None,
        }
    }

    /// Its name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Last => "last",
            Self::Rank => "rank",
        }
    }
}

/// The tokens around texts, as the model was trained on them.
#[derive(Clone, Debug, Default)]
pub struct TextLayout {
    /// Before a text: BOS or CLS.
    pub begin: Vec<Token>,
    /// After a text: EOS or SEP.
    pub end: Vec<Token>,
    /// Between a query and a document.
    pub separator: Vec<Token>,
    /// What a query and a document are written into, where the model has a template for it.
    pub rerank: Option<RerankTemplate>,
}

/// What a model is and can do. Immutable while it is loaded.
#[derive(Clone, Debug)]
pub struct EmbeddingInfo {
    /// The name under which it is served.
    pub name: String,
    /// The architecture (`bert`, `qwen3`, `scripted` …).
    pub architecture: String,
    /// A description for people: size, quantisation, source.
    pub description: String,
    /// How rows are made. [`Pooling::Rank`]: it scores pairs, and embeds nothing.
    pub pooling: Pooling,
    /// Numbers of a row; 1 for scores.
    pub dimensions: u32,
    /// Tokens of a text, special ones included.
    pub context_tokens: u32,
    /// Tokens of a batch. A text that has more is alone in its batch.
    pub batch_tokens: u32,
    /// Texts of a batch.
    pub parallel: u32,
    /// Tokens of the vocabulary.
    pub vocabulary_tokens: u32,
    /// Parameters; 0 if unknown.
    pub parameters: u64,
    /// Bytes of the weights; 0 if none.
    pub weight_bytes: u64,
    /// Embeddings have length 1 unless a request says otherwise.
    pub normalize: bool,
    /// The tokens around texts.
    pub layout: TextLayout,
}

impl EmbeddingInfo {
    /// Returns whether it scores pairs of a query and a document; otherwise it embeds texts.
    #[must_use]
    pub fn ranks(&self) -> bool {
        self.pooling == Pooling::Rank
    }
}

/// Why a batch was not computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EncodeStop {
    /// The [`Interrupt`] was seen.
    Aborted,
    /// The batch failed. The owner ends the requests with a text in it; the others continue.
    Failed(EngineError),
}

/// A model that embeds, called from the owner's thread only. A panic in [`EmbeddingModel::encode`] ends the requests of the
/// batch.
pub trait EmbeddingModel: Send {
    /// Returns what the model is and can do; the same at every call.
    fn info(&self) -> EmbeddingInfo;

    /// Returns its vocabulary; the same at every call.
    fn vocabulary(&self) -> SharedVocabulary;

    /// Receives the flag that aborts a running [`EmbeddingModel::encode`]; called once, before anything else.
    fn interrupt(&mut self, _flag: Interrupt) {}

    /// Appends one row of [`EmbeddingInfo::dimensions`] numbers for each text, in their order. There are 1 to
    /// [`EmbeddingInfo::parallel`] texts, each of 1 to [`EmbeddingInfo::context_tokens`] tokens of the vocabulary, together at
    /// most [`EmbeddingInfo::batch_tokens`] unless there is one.
    ///
    /// # Errors
    /// See [`EncodeStop`].
    fn encode(&mut self, texts: &[&[Token]], rows: &mut Vec<f32>) -> Result<(), EncodeStop>;
}
