//! [`tokenize_continuation`]: tokenises text that stands in the middle of a sequence.

use sapwood_proto::steer::Token;

use crate::api::Vocabulary;

/// A control character that no tokenizer joins with a letter, a digit or a space.
const MARK: char = '\u{2}';

/// Tokens that the mark can take: a space before it, and one for each of its bytes.
const MARK_TOKENS_MAX: usize = 3;

/// Tokenises text that is appended to a sequence (AI-605). Many tokenizers put a space before a text, which is right at
/// the beginning of a prompt and wrong here. With `special`, the names of control tokens become those tokens.
///
/// `None` if the vocabulary has no tokens that spell the text, as one without byte tokens for a rare character.
#[must_use]
pub fn tokenize_continuation(
    vocabulary: &dyn Vocabulary,
    text: &str,
    special: bool,
) -> Option<Vec<Token>> {
    if !special {
        return plain(vocabulary, text);
    }
    // The tokenizer finds the names; what is between them is tokenised piece by piece, since it may put a space before
    // each piece.
    let mut tokens = Vec::new();
    let mut rest = text;
    for token in vocabulary.tokenize(text, true) {
        let name = vocabulary
            .is_special(token)
            .then(|| vocabulary.name(token))
            .flatten();
        if let Some(name) = name
            && let Some((before, after)) = rest.split_once(&name)
        {
            tokens.extend(plain(vocabulary, before)?);
            tokens.push(token);
            rest = after;
        }
    }
    tokens.extend(plain(vocabulary, rest)?);
    Some(tokens)
}

fn plain(vocabulary: &dyn Vocabulary, text: &str) -> Option<Vec<Token>> {
    let tokens = vocabulary.tokenize(text, false);
    if spells(vocabulary, &tokens, text) {
        return Some(tokens);
    }
    // So that the text is no beginning, it is put behind a character that joins with nothing.
    let marked = vocabulary.tokenize(&format!("{MARK}{text}"), false);
    (1..=marked.len().min(MARK_TOKENS_MAX))
        .map(|cut| &marked[cut..])
        .find(|tokens| spells(vocabulary, tokens, text))
        .map(<[Token]>::to_vec)
}

fn spells(vocabulary: &dyn Vocabulary, tokens: &[Token], text: &str) -> bool {
    let mut rest = text.as_bytes();
    for &token in tokens {
        match rest.strip_prefix(vocabulary.bytes(token)) {
            Some(after) => rest = after,
            None => return false,
        }
    }
    rest.is_empty()
}
