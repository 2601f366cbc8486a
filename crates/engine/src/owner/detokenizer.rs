//! [`Detokenizer`]: what the owner needs of a vocabulary: which tokens end an output, the text of tokens, and how they are
//! reported.

use compact_str::CompactString;
use sapwood_proto::steer::Token;

use super::sequence::RunningSequence;
use crate::api::{Sampled, SharedVocabulary, StopCause};
use crate::sampling::Sample;
use crate::submission::RequestTerms;
use crate::text::ChoiceText;

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

    /// Returns whether a sampled token is an EOG token, and not ignored as such.
    #[inline]
    pub(super) fn is_end(&self, terms: &RequestTerms, token: Token) -> bool {
        self.ends.contains(&token) && !terms.ignore_eos
    }

    /// Adds the bytes of a sampled token to the text of a sequence. Returns the text that is ready to be sent, and the
    /// stop string that it completes.
    #[inline]
    pub(super) fn push_text(
        &self,
        terms: &RequestTerms,
        sequence: &mut RunningSequence,
        token: Token,
    ) -> (CompactString, Option<StopCause>) {
        let bytes = terms.bytes(&*self.vocabulary, token);
        terms.push_text(&mut sequence.text, token, &bytes, sequence.appended + 1)
    }

    /// Adds the text of tokens that were appended before, and appends to `shown` what is ready to be sent. The same tokens
    /// give the same text, so this is the text that had been sent when the output ended there.
    pub(super) fn replay(
        &self,
        terms: &RequestTerms,
        output: &[Sampled],
        text: &mut ChoiceText,
        shown: &mut String,
    ) {
        let hidden = |sampled: &&Sampled| !sampled.forced && self.is_end(terms, sampled.id);
        // An EOG token adds no text when it is sampled, so it adds none here (LM-307).
        for sampled in output.iter().filter(|sampled| !hidden(sampled)) {
            // No stop string ended the output then, so none is searched for.
            let bytes = terms.bytes(&*self.vocabulary, sampled.id);
            terms.append(text, sampled.id, &bytes, false, shown);
        }
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
