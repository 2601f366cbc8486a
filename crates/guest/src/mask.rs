//! Sets of tokens.

use alloc::vec;
use alloc::vec::Vec;

use crate::{Token, vocabulary_size};

/// A set of tokens: those that may be sampled. Bit i % 32 of word i / 32 is token i.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u32>,
    vocabulary: usize,
}

impl Mask {
    /// No token.
    #[must_use]
    pub fn none() -> Self {
        Self::none_of(vocabulary_size())
    }

    /// Every token of the vocabulary.
    #[must_use]
    pub fn all() -> Self {
        Self::none().not()
    }

    /// One token.
    #[must_use]
    pub fn only(token: Token) -> Self {
        Self::of(&[token])
    }

    /// These tokens. Those beyond the vocabulary are ignored.
    #[must_use]
    pub fn of(tokens: &[Token]) -> Self {
        let mut mask = Self::none();
        for &token in tokens {
            mask.allow(token);
        }
        mask
    }

    /// No token, of a vocabulary of this size.
    pub(crate) fn none_of(vocabulary: usize) -> Self {
        Self {
            words: vec![0; vocabulary.div_ceil(32)],
            vocabulary,
        }
    }

    /// The set that these words are, of a vocabulary of this size. Bits beyond the vocabulary are dropped.
    #[must_use]
    pub fn from_words(mut words: Vec<u32>, vocabulary: usize) -> Self {
        words.resize(vocabulary.div_ceil(32), 0);
        // Complementing twice drops the bits beyond the vocabulary.
        Self { words, vocabulary }.not().not()
    }

    /// Adds a token. One beyond the vocabulary is ignored.
    pub fn allow(&mut self, token: Token) {
        if (token as usize) < self.vocabulary {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Removes a token.
    pub fn forbid(&mut self, token: Token) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }

    /// Whether the token is in the set.
    #[must_use]
    pub fn allows(&self, token: Token) -> bool {
        self.words
            .get(token as usize / 32)
            .is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The tokens that are in both sets.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word &= other;
        }
        self
    }

    /// The tokens that are in one of the sets, or in both.
    #[must_use]
    pub fn or(mut self, other: &Self) -> Self {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word |= other;
        }
        self
    }

    /// The other tokens of the vocabulary.
    #[must_use]
    #[expect(
        clippy::should_implement_trait,
        reason = "`and`, `or` and `not` read alike in a chain; operators would need references for some of them"
    )]
    pub fn not(mut self) -> Self {
        for word in &mut self.words {
            *word = !*word;
        }
        // Equality and counts need the bits beyond the vocabulary to be 0.
        let used = self.vocabulary % 32;
        if let Some(last) = self.words.last_mut().filter(|_| used != 0) {
            *last &= (1 << used) - 1;
        }
        self
    }

    /// How many tokens are in the set.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// Whether no token is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// The tokens in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Token> + '_ {
        self.words.iter().zip(0..).flat_map(|(&word, index)| {
            (0..32u32)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| index * 32 + bit)
        })
    }

    /// The set as words.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }
}

#[cfg(test)]
mod tests {
    use super::Mask;

    #[test]
    fn masks_are_sets() {
        let mut mask = Mask::none_of(70);
        assert!(mask.is_empty());
        for token in [0, 31, 32, 69] {
            mask.allow(token);
        }
        // One beyond the vocabulary, and one beyond the words.
        mask.allow(70);
        mask.allow(1_000);
        assert_eq!(mask.iter().collect::<Vec<_>>(), [0, 31, 32, 69]);
        assert!(mask.allows(69) && !mask.allows(70) && !mask.allows(1_000));
        mask.forbid(31);
        mask.forbid(1_000);
        assert_eq!(mask.count(), 3);
    }

    #[test]
    fn not_stays_within_the_vocabulary() {
        for size in [0, 1, 31, 32, 33, 64, 70] {
            assert_eq!(Mask::none_of(size).not().count(), size);
            assert!(Mask::none_of(size).not().not().is_empty());
        }
    }

    #[test]
    fn and_and_or_combine() {
        let of = |tokens: &[u32]| {
            let mut mask = Mask::none_of(40);
            tokens.iter().for_each(|&token| mask.allow(token));
            mask
        };
        assert_eq!(of(&[1, 2, 39]).and(&of(&[2, 39])), of(&[2, 39]));
        assert_eq!(of(&[1]).or(&of(&[33])), of(&[1, 33]));
    }
}
