//! [`tokenize_continuation`]: tokenises text that stands in the middle of a sequence.

use std::collections::HashSet;

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
    // A tokenizer may write one token, whose name does not occur, for each character that it does not know.
    let mut absent = HashSet::new();
    for token in vocabulary.tokenize(text, true) {
        if !vocabulary.is_special(token) || absent.contains(&token) {
            continue;
        }
        let name = vocabulary.name(token);
        match name.and_then(|name| rest.split_once(&name)) {
            Some((before, after)) => {
                tokens.extend(plain(vocabulary, before)?);
                tokens.push(token);
                rest = after;
            }
            // Nor later: what is left only becomes shorter.
            None => drop(absent.insert(token)),
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::api::{ChatRequest, EngineError};

    /// Knows only the letter `a`, and writes a special token for each other character.
    struct OneLetter {
        names: AtomicUsize,
    }

    const UNKNOWN: Token = 0;
    const LETTER: Token = 1;

    impl Vocabulary for OneLetter {
        fn size(&self) -> usize {
            2
        }

        fn tokenize(&self, text: &str, _special: bool) -> Vec<Token> {
            let token = |letter| if letter == 'a' { LETTER } else { UNKNOWN };
            text.chars().map(token).collect()
        }

        fn bytes(&self, token: Token) -> &[u8] {
            if token == LETTER { b"a" } else { b"" }
        }

        fn is_special(&self, token: Token) -> bool {
            token == UNKNOWN
        }

        fn name(&self, _token: Token) -> Option<String> {
            self.names.fetch_add(1, Ordering::Relaxed);
            Some("<unk>".to_owned())
        }

        fn is_end(&self, _token: Token) -> bool {
            false
        }

        fn bos(&self) -> Option<Token> {
            None
        }

        fn end_of_turn(&self) -> Option<Token> {
            None
        }

        fn chat(&self, _chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn ai_605_a_name_that_does_not_occur_is_looked_for_once() {
        let vocabulary = OneLetter {
            names: AtomicUsize::new(0),
        };
        let text = format!("{}a", "b".repeat(100_000));
        assert_eq!(tokenize_continuation(&vocabulary, &text, true), None);
        assert_eq!(vocabulary.names.load(Ordering::Relaxed), 1);
        // Once more where it occurs.
        let found = tokenize_continuation(&vocabulary, "a<unk>a", true);
        assert_eq!(found, Some(vec![LETTER, UNKNOWN, LETTER]));
        assert_eq!(vocabulary.names.load(Ordering::Relaxed), 3);
    }
}
