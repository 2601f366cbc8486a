//! Bad words: masks the tokens that would complete a forbidden text after the output so far.
//!
//! The text is forbidden, however it is split into tokens, and only in the output, as with stop strings. The search is
//! over bytes: a character of several tokens is searched for like any other text. U+FFFD, which stands for invalid
//! bytes, is not part of the output's bytes.
//!
//! ```text
//!   output … t h e │c a│   next token  t s …      a token is forbidden if a bad word ends within it:
//!                   ▲                  ▲
//!                   begun              rest        the token contains the whole word: known before the first step
//!                                                  the word began before it: the token begins with its rest,
//!                                                  and tokens that begin alike are neighbours in the token index
//! ```
//!
//! Requests without bad words skip all of this; the token index is built for the first request that has some.

use std::ops::Range;
use std::sync::Arc;

use sapwood_proto::steer::{Mask, Token};

use crate::api::SharedVocabulary;

/// Token index: the tokens of a vocabulary that have bytes, sorted by their bytes.
pub(crate) struct TokenIndex {
    vocabulary: SharedVocabulary,
    /// Tokens of the vocabulary, those without bytes included.
    size: usize,
    order: Vec<Token>,
    /// Bytes of the longest token.
    longest: usize,
}

impl TokenIndex {
    /// Sorts the first `size` tokens of a vocabulary. This is slow: create one per engine.
    pub(crate) fn new(vocabulary: SharedVocabulary, size: u32) -> Self {
        let mut order: Vec<Token> = (0..size)
            .filter(|&token| !vocabulary.bytes(token).is_empty())
            .collect();
        // Sorted, so that the tokens that begin with the rest of a word are one range, found by binary search.
        order.sort_by_cached_key(|&token| vocabulary.bytes(token));
        let lengths = order.iter().map(|&token| vocabulary.bytes(token).len());
        Self {
            longest: lengths.max().unwrap_or(0),
            size: size as usize,
            order,
            vocabulary,
        }
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.vocabulary.bytes(token)
    }

    /// Returns the range of tokens that begin with `bytes`.
    fn beginning_with(&self, bytes: &[u8]) -> Range<usize> {
        let start = self
            .order
            .partition_point(|&token| self.bytes(token) < bytes);
        let count =
            self.order[start..].partition_point(|&token| self.bytes(token).starts_with(bytes));
        start..start + count
    }
}

/// The forbidden texts of one request, prepared for its steps.
pub(crate) struct BadWords {
    token_index: Arc<TokenIndex>,
    words: Vec<String>,
    /// The tokens that do not contain a whole word.
    harmless: Mask,
    endings: Vec<Completion>,
    /// The most bytes of output that any completion looks at.
    reach: usize,
}

/// A way to complete a word: the output ends with its first bytes, and a token begins with the rest.
struct Completion {
    word: usize,
    /// Number of bytes that the output ends with; at least one, never all.
    begun: usize,
    /// The tokens, as a range in the token index; at least one.
    tokens: Range<usize>,
}

impl BadWords {
    /// Searches the vocabulary once. None of the words is empty.
    pub(crate) fn new(words: Vec<String>, token_index: Arc<TokenIndex>) -> Self {
        // Before the vocabulary is searched: fewer words are fewer comparisons at each byte.
        let words = shortest(words);
        let mut harmless = Mask::all(token_index.size);
        let mut firsts = [false; 256];
        for first in words.iter().filter_map(|word| word.as_bytes().first()) {
            // A table of first bytes: most positions of most tokens begin no word and are dismissed by one look-up.
            firsts[usize::from(*first)] = true;
        }
        let begins_bad = |bytes: &[u8]| {
            firsts[usize::from(bytes[0])]
                && words.iter().any(|word| bytes.starts_with(word.as_bytes()))
        };
        for &token in &token_index.order {
            let bytes = token_index.bytes(token);
            // Any position: a token may contain a word after its first byte.
            if (0..bytes.len()).any(|at| begins_bad(&bytes[at..])) {
                harmless.forbid(token);
            }
        }
        let endings = endings(&words, &token_index);
        let reach = endings.iter().map(|ending| ending.begun).max();
        Self {
            reach: reach.unwrap_or(0),
            token_index,
            words,
            harmless,
            endings,
        }
    }

    /// Returns the mask of tokens that complete no bad word after `output`, which is given from its end. Tokens without
    /// bytes, such as an EOG token, are always allowed.
    pub(crate) fn mask(&self, output: impl Iterator<Item = Token>) -> Mask {
        // The part that does not depend on the output was computed once; only completions are added for each token.
        let mut mask = self.harmless.clone();
        let tail = self.tail(output);
        for ending in &self.endings {
            let begun = &self.words[ending.word].as_bytes()[..ending.begun];
            if tail.ends_with(begun) {
                let tokens = &self.token_index.order[ending.tokens.clone()];
                tokens.iter().for_each(|&token| mask.forbid(token));
            }
        }
        mask
    }

    /// Returns the last bytes of an output, as many as a completion needs.
    fn tail(&self, output: impl Iterator<Item = Token>) -> Vec<u8> {
        let mut pieces = Vec::new();
        let mut length = 0;
        // From the end, and only as far as a completion looks back: the cost does not grow with the output.
        for token in output {
            if length >= self.reach {
                break;
            }
            let bytes = self.token_index.bytes(token);
            length += bytes.len();
            pieces.push(bytes);
        }
        let forwards = pieces.iter().rev();
        forwards.flat_map(|bytes| bytes.iter().copied()).collect()
    }
}

/// Drops the words that contain another word: those are forbidden already. This bounds the work of a step: no two
/// completions with the same rest apply at once.
fn shortest(mut words: Vec<String>) -> Vec<String> {
    // The shortest first, so that each word is compared only with those that it may contain.
    words.sort_by_key(String::len);
    let mut shortest: Vec<String> = Vec::new();
    for word in words {
        if !shortest.iter().any(|other| word.contains(other.as_str())) {
            shortest.push(word);
        }
    }
    shortest
}

fn endings(words: &[String], token_index: &TokenIndex) -> Vec<Completion> {
    let mut endings = Vec::new();
    for (index, word) in words.iter().enumerate() {
        // A rest longer than the longest token is the beginning of none.
        let least = word.len().saturating_sub(token_index.longest).max(1);
        // From 1: a token that contains the word from its beginning is excluded by `harmless`.
        for begun in least..word.len() {
            let tokens = token_index.beginning_with(&word.as_bytes()[begun..]);
            if !tokens.is_empty() {
                endings.push(Completion {
                    word: index,
                    begun,
                    tokens,
                });
            }
        }
    }
    endings
}

impl std::fmt::Debug for BadWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BadWords").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
