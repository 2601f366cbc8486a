//! Fill in the middle (FIM): prompts of a text before and a text behind the place that the model fills in.
//!
//! ```text
//!   PSM, the usual order:  [BOS] PREFIX prefix SUFFIX suffix MIDDLE
//!   SPM:                   [BOS] SUFFIX suffix PREFIX prefix MIDDLE
//! ```
//!
//! Both are llama-server's orders of `/infill`. In SPM order a prefix that grows keeps what is computed of the suffix.

use std::borrow::Cow;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use crate::api::{EngineError, Vocabulary};
use crate::control_names::cut;

pub(crate) mod tokens;

pub use self::tokens::InfillTokens;

/// Returns the tokens of a prompt that is to be filled in between `prefix` and `suffix`, after `bos`. Names of control
/// tokens in the texts are plain text, as in other raw prompts (D-24), so that no text can move the place.
///
/// # Errors
/// `NO_INFILL` if the vocabulary has no tokens for this; `BAD_TOKENS` for a text that has one of these tokens in a
/// vocabulary where they are ordinary text and cannot be cut in two.
pub fn infill_prompt(
    vocabulary: &dyn Vocabulary,
    bos: Option<Token>,
    prefix: &str,
    suffix: &str,
) -> Result<Vec<Token>, EngineError> {
    let infill = vocabulary.infill().ok_or_else(no_infill)?;
    let mut before = vec![infill.prefix];
    before.extend(plain(vocabulary, infill, prefix)?);
    let mut behind = vec![infill.suffix];
    behind.extend(plain(vocabulary, infill, suffix)?);
    let parts = if infill.suffix_first {
        [behind, before]
    } else {
        [before, behind]
    };
    let mut tokens: Vec<_> = bos.into_iter().collect();
    tokens.extend(parts.into_iter().flatten());
    tokens.push(infill.middle);
    Ok(tokens)
}

/// The error of a model that has no tokens for it.
#[must_use]
pub fn no_infill() -> EngineError {
    let message = "this model has no tokens for fill in the middle: leave out the suffix, or choose a model that was \
                   trained for it";
    EngineError::invalid(ErrorReason::NO_INFILL, message)
}

/// The tokens of a text, none of which is one of `infill`. Other control tokens in the text are found or not as in any raw
/// prompt.
fn plain(
    vocabulary: &dyn Vocabulary,
    infill: InfillTokens,
    text: &str,
) -> Result<Vec<Token>, EngineError> {
    let has_any = |tokens: &[Token]| tokens.iter().any(|token| infill.all().contains(token));
    let tokens = vocabulary.tokenize(text, false);
    // Nearly always: names of control tokens are plain text. Some files have these tokens with another type.
    if !has_any(&tokens) {
        return Ok(tokens);
    }
    let names = infill.all().map(|token| name(vocabulary, token));
    let parts = cut(text, &names);
    let tokens: Vec<_> = parts
        .into_iter()
        .flat_map(|part| vocabulary.tokenize(part, false))
        .collect();
    let bytes = tokens.iter().flat_map(|token| vocabulary.bytes(*token));
    let bytes: Vec<u8> = bytes.copied().collect();
    // SentencePiece puts a space before each text that it gets, so also within a text that is cut.
    let spaced = bytes.strip_prefix(b" ").unwrap_or(&bytes);
    let is_text = bytes == text.as_bytes() || spaced == text.as_bytes();
    if has_any(&tokens) || !is_text {
        let message = "the prompt or its suffix has a text that this model takes for one of its tokens for fill in the \
                       middle: leave that text out";
        return Err(EngineError::invalid(ErrorReason::BAD_TOKENS, message));
    }
    Ok(tokens)
}

/// The text of a token, without the space that SentencePiece has in front of words.
fn name(vocabulary: &dyn Vocabulary, token: Token) -> String {
    let name = vocabulary.name(token).map_or_else(
        || String::from_utf8_lossy(vocabulary.bytes(token)),
        Cow::Owned,
    );
    name.trim_start().to_owned()
}

// Half of the vocabularies there are read from files.
#[cfg(feature = "tokenizer")]
#[cfg(test)]
mod tests;
