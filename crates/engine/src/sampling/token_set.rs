//! [`TokenSet`]: a set of tokens as bits, in which nearly every lookup is a miss and has to be cheap.

use sapwood_proto::steer::Token;

/// A set of tokens. It keeps its memory, a bit for each token up to the largest, for the next use.
#[derive(Debug, Default)]
pub(super) struct TokenSet {
    words: Vec<u64>,
}

impl TokenSet {
    pub(super) fn insert(&mut self, token: Token) {
        let word = token as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (token % 64);
    }

    pub(super) fn remove(&mut self, token: Token) {
        if let Some(word) = self.words.get_mut(token as usize / 64) {
            *word &= !(1 << (token % 64));
        }
    }

    pub(super) fn contains(&self, token: Token) -> bool {
        let word = self.words.get(token as usize / 64);
        word.is_some_and(|word| word & (1 << (token % 64)) != 0)
    }
}
