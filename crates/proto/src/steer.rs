//! The interface of steerers, which constrain one sequence token by token.
//!
//! Implemented by Wasm controllers, runtimes in other processes and native constraints (DESIGN section 5, AI-801,
//! D-12).
//!
//! ```text
//!   pre ──► mid_begin ──► (forward pass) ──► mid_poll … ──► (sample) ──► post ──► pre …
//! ```
//!
//! All methods are polled: none may block, and the engine enforces timeouts (AI-812).

use crate::error_reason::ErrorReason;
use crate::time::Time;

/// A token id of the model's vocabulary.
pub type Token = u32;

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

    /// How many tokens are allowed.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }
}

/// The request of [`Steer::pre`] for the coming step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pre {
    /// Take part in the step; first append these tokens (they need a forward pass, no sampling).
    Run {
        /// Tokens to append before sampling; often empty.
        fast_forward: Vec<Token>,
    },
    /// Skip this step. `pre` runs again before the next one (AI-813).
    Suspend,
    /// Become this many sequences in all, this one included; at least 1.
    Fork(u32),
    /// End the sequence here.
    Stop,
}

/// The request of [`Steer::mid_poll`] for sampling.
#[derive(Clone, Debug, PartialEq)]
pub enum Mid {
    /// Sample one token.
    Sample {
        /// The allowed tokens; `None` allows all.
        mask: Option<Mask>,
        /// Added to the logits, after the request's own bias.
        bias: Vec<(Token, f32)>,
        /// Replaces the request's temperature in this step.
        temperature: Option<f32>,
    },
    /// Roll back the last `backtrack` tokens, append `tokens`, sample nothing.
    Splice {
        /// How many tokens to roll back; at most those after the prompt.
        backtrack: u32,
        /// What to append instead.
        tokens: Vec<Token>,
    },
    /// Neither sample nor append in this step.
    Noop,
    /// End the sequence here.
    Stop,
}

/// The request of [`Steer::post`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    /// Continue.
    Continue,
    /// End the sequence after the tokens just appended.
    Stop,
}

/// Why a steerer failed. The sequence ends as `controller-failed` with this reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct SteerFailure {
    /// The short, stable name (`trap`, `timeout`, `constraint_failed`, `deadlock` …).
    pub reason: ErrorReason,
    /// A message for humans. Contains nothing that a client must not see.
    pub message: String,
}

/// The result of a steerer's method.
pub type Steered<T> = Result<T, SteerFailure>;

/// Steers one sequence. The engine calls the methods in the order of the module's diagram.
pub trait Steer: Send {
    /// Called at the start of a step, before the batch is formed.
    fn pre(&mut self) -> Steered<Pre>;

    /// Starts the computation for this step's sampling. Called before the forward pass; must return at once.
    fn mid_begin(&mut self, now: Time);

    /// The result of [`Steer::mid_begin`], or `None` if it is not ready yet. Called after the forward pass, and again
    /// in later steps while it is late (the sequence's output row is retained meanwhile).
    fn mid_poll(&mut self, now: Time) -> Steered<Option<Mid>>;

    /// Reports the result of the step: `backtrack` tokens were rolled back, then `tokens` appended, the last one
    /// `sampled` or not.
    fn post(&mut self, backtrack: u32, tokens: &[Token], sampled: bool) -> Steered<Post>;

    /// Creates a steerer for a fork of this sequence, in the same state. `index` is the new branch's number (1, 2, …);
    /// the original sequence is branch 0.
    fn fork(&mut self, index: u32) -> Steered<Box<dyn Steer>>;
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
}
