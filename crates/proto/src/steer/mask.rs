//! [`Mask`]: which tokens of the vocabulary may be sampled.

use std::sync::Arc;

use super::Token;

/// A mask that several sequences, or several steps, share: it is never copied to be read (AI-802).
pub type SharedMask = Arc<Mask>;

/// A set of allowed tokens, one bit per vocabulary entry, least significant bit first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u32>,
    vocabulary: usize,
}

impl Mask {
    /// A mask over `vocabulary` tokens that allows none.
    #[must_use]
    pub fn none(vocabulary: usize) -> Self {
        Self {
            words: vec![0; vocabulary.div_ceil(32)],
            vocabulary,
        }
    }

    /// A mask over `vocabulary` tokens that allows all.
    #[must_use]
    pub fn all(vocabulary: usize) -> Self {
        let mut mask = Self {
            words: vec![u32::MAX; vocabulary.div_ceil(32)],
            vocabulary,
        };
        mask.trim();
        mask
    }

    /// A mask from its words; bits past `vocabulary` are cleared. `None` if the length does not fit.
    #[must_use]
    pub fn from_words(words: Vec<u32>, vocabulary: usize) -> Option<Self> {
        if words.len() != vocabulary.div_ceil(32) {
            return None;
        }
        let mut mask = Self { words, vocabulary };
        mask.trim();
        Some(mask)
    }

    fn trim(&mut self) {
        // `count` and `==` take whole words, so the bits past the vocabulary must stay 0.
        let spare = self.words.len() * 32 - self.vocabulary;
        if let Some(last) = self.words.last_mut() {
            *last &= u32::MAX >> spare;
        }
    }

    /// The size of the vocabulary.
    #[must_use]
    pub const fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The bits, 32 tokens a word.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Allows `token`; a token outside the vocabulary is ignored.
    pub fn allow(&mut self, token: Token) {
        // By the vocabulary and not by the number of words: the last word has bits for ids that do not exist.
        if (token as usize) < self.vocabulary {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Forbids `token`; a token outside the vocabulary is ignored.
    pub fn forbid(&mut self, token: Token) {
        if (token as usize) < self.vocabulary {
            self.words[token as usize / 32] &= !(1 << (token % 32));
        }
    }

    /// Whether `token` is allowed.
    #[must_use]
    pub fn allows(&self, token: Token) -> bool {
        (token as usize) < self.vocabulary
            && self.words[token as usize / 32] & (1 << (token % 32)) != 0
    }

    /// Intersects with `other`. Both must be over the same vocabulary; a longer one is truncated.
    pub fn intersect(&mut self, other: &Self) {
        // `zip` cannot panic if the lengths differ, which an index could; masks come from programs of users.
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine &= theirs;
        }
    }

    /// Adds what `other` allows. Both must be over the same vocabulary; of a longer one the start counts.
    pub fn unite(&mut self, other: &Self) {
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine |= theirs;
        }
        self.trim();
    }

    /// Allows exactly what it did not allow.
    pub fn complement(&mut self) {
        for word in &mut self.words {
            *word = !*word;
        }
        self.trim();
    }

    /// Whether no token is allowed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// How many tokens are allowed.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_no_bits_past_its_vocabulary() {
        let all = Mask::all(33);
        assert_eq!(all.count(), 33);
        assert!(all.allows(32) && !all.allows(33));
        let read = Mask::from_words(vec![u32::MAX; 2], 33);
        assert_eq!(read.as_ref(), Some(&all));
        assert_eq!(Mask::from_words(vec![0], 33), None);
    }

    #[test]
    fn intersection_keeps_what_both_allow() {
        let mut left = Mask::all(40);
        let mut right = Mask::none(40);
        right.allow(7);
        right.allow(99);
        left.forbid(7);
        left.allow(7);
        left.intersect(&right);
        assert_eq!((left.count(), left.allows(7)), (1, true));
    }

    #[test]
    fn union_and_complement_stay_within_the_vocabulary() {
        let mut mask = Mask::none(33);
        assert!(mask.is_empty());
        mask.unite(&Mask::all(64));
        assert_eq!(mask, Mask::all(33));
        mask.complement();
        assert!(mask.is_empty());
        mask.complement();
        assert_eq!(mask.count(), 33);
    }
}
