//! [`Detokenizer`]: what the owner needs of a vocabulary: which tokens end an output, and how a token is reported.

use sapwood_proto::steer::Token;

use crate::api::{Sampled, SharedVocabulary};
use crate::sampling::Sample;

/// A vocabulary with its EOG tokens.
pub(super) struct Detokenizer {
    pub(super) vocabulary: SharedVocabulary,
    /// The EOG tokens.
    pub(super) ends: Vec<Token>,
}

impl Detokenizer {
    pub(super) fn new(vocabulary: SharedVocabulary, tokens: u32) -> Self {
        let ends = (0..tokens)
            .filter(|&token| vocabulary.is_end(token))
            .collect();
        Self { vocabulary, ends }
    }

    /// A [`Sampled`] with the token alone: no log-probability, rank or alternatives.
    pub(super) fn sampled(&self, token: Token) -> Sampled {
        Sampled {
            id: token,
            logprob: f32::NAN,
            rank: None,
            top: Vec::new(),
            special: self.vocabulary.is_special(token),
            forced: false,
        }
    }

    pub(super) fn with_logprobs(&self, sample: Sample) -> Sampled {
        Sampled {
            logprob: sample.logprob,
            rank: sample.rank,
            top: sample.top,
            ..self.sampled(sample.token)
        }
    }

    /// The token of a space, or `end` in a vocabulary without one.
    pub(super) fn space_or(&self, end: Token) -> Token {
        // Some tokenizers yield several tokens, or none; the first is close enough for a placeholder in the context.
        let space = self.vocabulary.tokenize(" ", false);
        space.first().copied().unwrap_or(end)
    }
}
