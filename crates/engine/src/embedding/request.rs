//! Requests, and how they become tokens.

use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use super::model::EmbeddingInfo;
use super::vectors::RowShape;
use crate::api::{EngineError, Vocabulary};
use crate::stop;
use crate::template::RerankTemplate;

/// The maximum of texts, or of documents, of a request.
pub const TEXTS_MAX: usize = 2048;
/// The maximum of bytes of all texts of a request.
pub const TEXT_BYTES_MAX: usize = 16 << 20;
/// The maximum of numbers of all rows of a request: 8 MiB, and some 100 MiB while they are written as JSON.
pub const NUMBERS_MAX: usize = 2 << 20;

/// What is embedded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmbeddingInput {
    /// Text: special tokens in it are not parsed, and those that the model was trained with are put around it.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<Token>),
}

impl EmbeddingInput {
    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) => tokens.len().saturating_mul(size_of::<Token>()),
        }
    }
}

/// A request for embeddings.
#[derive(Clone, Debug, Default)]
pub struct EmbeddingRequest {
    /// What is embedded: 1 to [`TEXTS_MAX`], of [`TEXT_BYTES_MAX`] bytes together.
    pub inputs: Vec<EmbeddingInput>,
    /// Keep so many numbers of each row, and scale those; only models that were trained for it (Matryoshka) give useful
    /// embeddings then. `None`: all.
    pub dimensions: Option<u32>,
    /// Scale rows to length 1. `None`: what the model is configured to do.
    pub normalize: Option<bool>,
    /// Cut texts that are longer than the context at their end; otherwise they are an error.
    pub truncate: bool,
    /// Whose share of the queue it takes (D-54).
    pub caller: u64,
    /// How long it may take.
    pub timeout: Option<Duration>,
}

/// A request for scores.
#[derive(Clone, Debug, Default)]
pub struct RerankRequest {
    /// The query.
    pub query: String,
    /// The documents that are scored: 1 to [`TEXTS_MAX`], of [`TEXT_BYTES_MAX`] bytes together, the query counted for each.
    pub documents: Vec<String>,
    /// Cut documents that do not fit in the context beside the query at their end; otherwise they are an error.
    pub truncate: bool,
    /// Whose share of the queue it takes (D-54).
    pub caller: u64,
    /// How long it may take.
    pub timeout: Option<Duration>,
}

/// A request whose texts are tokens.
#[derive(Debug)]
pub(super) struct PreparedTexts {
    pub(super) texts: Vec<Vec<Token>>,
    pub(super) shape: RowShape,
    pub(super) caller: u64,
    pub(super) timeout: Option<Duration>,
}

impl PreparedTexts {
    /// Tokens of all texts.
    pub(super) fn tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }
}

/// Validates a request and tokenises its texts.
///
/// # Errors
/// `BAD_CONFIG`, `BAD_TOKENS`, `EMPTY_PROMPT`, `PROMPT_TOO_LONG` with the number of the text; `failed-precondition` if the
/// model scores pairs.
pub(super) fn of_texts(
    request: EmbeddingRequest,
    info: &EmbeddingInfo,
    vocabulary: &dyn Vocabulary,
    tokens_max: usize,
) -> Result<PreparedTexts, EngineError> {
    if info.ranks() {
        return Err(wrong_kind(
            "this model scores documents for a query, and gives no embeddings: send it a query and documents",
        ));
    }
    let bytes = request.inputs.iter().map(EmbeddingInput::bytes);
    within_limits("texts", request.inputs.len(), bytes)?;
    let dimensions = request.dimensions.unwrap_or(info.dimensions);
    if dimensions == 0 || dimensions > info.dimensions {
        let most = info.dimensions;
        let message = format!("dimensions must be from 1 to {most}, and is {dimensions}");
        return Err(EngineError::invalid(ErrorReason::BAD_CONFIG, message));
    }
    let count = request.inputs.len();
    if count.saturating_mul(dimensions as usize) > NUMBERS_MAX {
        let message = format!(
            "an answer may have {NUMBERS_MAX} numbers, and this one would have {count} times {dimensions}: send several requests"
        );
        return Err(EngineError::invalid(ErrorReason::BAD_CONFIG, message));
    }
    let mut texts = Vec::with_capacity(count);
    for (index, input) in request.inputs.into_iter().enumerate() {
        // The caller has gone: what is prepared is not used.
        if stop::stopped() {
            break;
        }
        let tokens = match input {
            EmbeddingInput::Text(text) => {
                let inner = vocabulary.tokenize(&text, false);
                let around = &info.layout;
                fitted(&around.begin, inner, &around.end, request.truncate, info)
            }
            EmbeddingInput::Tokens(tokens) => {
                known(&tokens, info)?;
                fitted(&[], tokens, &[], request.truncate, info)
            }
        };
        texts.push(tokens.map_err(|length| too_long("text", index, length, info))?);
    }
    if let Some(index) = texts.iter().position(Vec::is_empty) {
        let message = format!("text {index} has no tokens");
        return Err(EngineError::invalid(ErrorReason::EMPTY_PROMPT, message));
    }
    within_queue(&texts, tokens_max)?;
    Ok(PreparedTexts {
        texts,
        shape: RowShape {
            width: dimensions as usize,
            normalize: request.normalize.unwrap_or(info.normalize),
        },
        caller: request.caller,
        timeout: request.timeout,
    })
}

/// Validates a request and tokenises its pairs.
///
/// # Errors
/// `BAD_CONFIG`, `PROMPT_TOO_LONG` with the number of the document; `failed-precondition` if the model embeds.
pub(super) fn of_pairs(
    request: RerankRequest,
    info: &EmbeddingInfo,
    vocabulary: &dyn Vocabulary,
    tokens_max: usize,
) -> Result<PreparedTexts, EngineError> {
    if !info.ranks() {
        return Err(wrong_kind(
            "this model gives embeddings, and scores no documents: send it texts, or choose a model for reranking",
        ));
    }
    let query_bytes = request.query.len();
    let bytes = request.documents.iter();
    let bytes = bytes.map(|document| document.len().saturating_add(query_bytes));
    let count = request.documents.len();
    within_limits("documents", count, bytes)?;
    let query = PreparedQuery::new(&request.query, info, vocabulary);
    let what = "query with document";
    let around = query.tokens(info);
    // Before the documents are tokenised: each has these too.
    if around > info.context_tokens as usize {
        return Err(too_long(what, 0, around, info));
    }
    if count > 1 && around.saturating_mul(count) > tokens_max {
        return Err(too_many(around.saturating_mul(count), tokens_max));
    }
    let mut texts = Vec::with_capacity(count);
    for (index, document) in request.documents.iter().enumerate() {
        if stop::stopped() {
            break;
        }
        let pair = query.fitted(document, request.truncate, info, vocabulary);
        texts.push(pair.map_err(|length| too_long(what, index, length, info))?);
    }
    within_queue(&texts, tokens_max)?;
    Ok(PreparedTexts {
        texts,
        shape: RowShape {
            width: 1,
            normalize: false,
        },
        caller: request.caller,
        timeout: request.timeout,
    })
}

fn within_limits(
    what: &str,
    count: usize,
    mut bytes: impl Iterator<Item = usize>,
) -> Result<(), EngineError> {
    let refused = |message: String| Err(EngineError::invalid(ErrorReason::BAD_CONFIG, message));
    if count == 0 {
        return refused(format!("there are no {what}"));
    }
    if count > TEXTS_MAX {
        return refused(format!(
            "a request may have {TEXTS_MAX} {what}, and this one has {count}: send several requests"
        ));
    }
    let sum = bytes.try_fold(0_usize, |sum, bytes| {
        sum.checked_add(bytes).filter(|sum| *sum <= TEXT_BYTES_MAX)
    });
    match sum {
        Some(_) => Ok(()),
        None => refused(format!(
            "the {what} of a request may have {TEXT_BYTES_MAX} bytes together: send several requests"
        )),
    }
}

/// Joins a text with the tokens around it. If it is too long for the context its end is cut, or its length is the error; it is
/// so too if nothing of it fits.
fn fitted(
    begin: &[Token],
    mut inner: Vec<Token>,
    end: &[Token],
    truncate: bool,
    info: &EmbeddingInfo,
) -> Result<Vec<Token>, usize> {
    let around = begin.len() + end.len();
    let length = around + inner.len();
    let context = info.context_tokens as usize;
    if length > context {
        if !truncate || around >= context {
            return Err(length);
        }
        inner.truncate(context - around);
    }
    let mut tokens = Vec::with_capacity(around + inner.len());
    tokens.extend(begin);
    tokens.append(&mut inner);
    tokens.extend(end);
    Ok(tokens)
}

/// What all pairs of a request have.
enum PreparedQuery<'a> {
    /// The tokens before a document.
    Tokens(Vec<Token>),
    Template {
        template: &'a RerankTemplate,
        query: &'a str,
        /// The pair with an empty document.
        base: Vec<Token>,
    },
}

impl<'a> PreparedQuery<'a> {
    fn new(query: &'a str, info: &'a EmbeddingInfo, vocabulary: &dyn Vocabulary) -> Self {
        if let Some(template) = &info.layout.rerank {
            let base = template.tokens(query, "", vocabulary);
            return Self::Template {
                template,
                query,
                base,
            };
        }
        let mut begin = info.layout.begin.clone();
        begin.extend(vocabulary.tokenize(query, false));
        begin.extend(&info.layout.separator);
        Self::Tokens(begin)
    }

    /// The tokens of a pair with an empty document.
    fn tokens(&self, info: &EmbeddingInfo) -> usize {
        match self {
            Self::Tokens(begin) => begin.len() + info.layout.end.len(),
            Self::Template { base, .. } => base.len(),
        }
    }

    /// As [`fitted`].
    fn fitted(
        &self,
        document: &str,
        truncate: bool,
        info: &EmbeddingInfo,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Vec<Token>, usize> {
        let (template, query, base) = match self {
            Self::Tokens(begin) => {
                let inner = vocabulary.tokenize(document, false);
                return fitted(begin, inner, &info.layout.end, truncate, info);
            }
            Self::Template {
                template,
                query,
                base,
            } => (template, query, base),
        };
        let context = info.context_tokens as usize;
        let room = context.saturating_sub(base.len());
        let mut kept = document.len();
        // The text is cut, not its tokens: the template goes on after it. Each round tokenises the query too, so there are
        // few.
        for _ in 0..CUT_ROUNDS {
            let text = &document[..document.floor_char_boundary(kept)];
            let tokens = template.tokens(query, text, vocabulary);
            let length = tokens.len();
            if length <= context {
                return Ok(tokens);
            }
            if !truncate || room == 0 {
                return Err(length);
            }
            // By the share that fits, and a little more: tokens are not equally long.
            let inner = length.saturating_sub(base.len()).max(1);
            let share = text.len().saturating_mul(room) / inner;
            let share = share.min(text.len());
            kept = share - share.div_ceil(16);
        }
        // Few texts have fewer bytes than tokens.
        let text = &document[..document.floor_char_boundary(kept.min(room / 2))];
        let tokens = template.tokens(query, text, vocabulary);
        match tokens.len() {
            length if length <= context => Ok(tokens),
            length => Err(length),
        }
    }
}

/// How often a pair is tokenised until its document is cut to what surely fits.
const CUT_ROUNDS: u32 = 3;

/// Refuses texts of more tokens than may be queued: an empty queue accepts anything, and would be taken by one request. A
/// single text is no longer than the context.
fn within_queue(texts: &[Vec<Token>], most: usize) -> Result<(), EngineError> {
    let tokens: usize = texts.iter().map(Vec::len).sum();
    if texts.len() > 1 && tokens > most {
        return Err(too_many(tokens, most));
    }
    Ok(())
}

fn too_many(tokens: usize, most: usize) -> EngineError {
    let message = format!(
        "the texts of a request may have {most} tokens together, and these have at least {tokens}: send several requests"
    );
    EngineError::invalid(ErrorReason::BAD_CONFIG, message)
}

fn known(tokens: &[Token], info: &EmbeddingInfo) -> Result<(), EngineError> {
    let size = info.vocabulary_tokens;
    match tokens.iter().find(|token| **token >= size) {
        None => Ok(()),
        Some(token) => {
            let message = format!("token {token} is outside the vocabulary of {size} tokens");
            Err(EngineError::invalid(ErrorReason::BAD_TOKENS, message))
        }
    }
}

fn too_long(what: &str, index: usize, length: usize, info: &EmbeddingInfo) -> EngineError {
    let context = info.context_tokens;
    let message = format!(
        "{what} {index} of {length} tokens exceeds the model's context of {context} tokens: shorten it, or ask to truncate"
    );
    EngineError::invalid(ErrorReason::PROMPT_TOO_LONG, message)
}

fn wrong_kind(message: &str) -> EngineError {
    EngineError::new(Code::FailedPrecondition, ErrorReason::NONE, message)
}
