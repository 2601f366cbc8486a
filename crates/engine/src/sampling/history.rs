//! What the penalties know of a sequence's tokens.

use sapwood_proto::steer::Token;

use super::counts::TokenCounts;
use super::dry::{DryHistory, DryScratch};
use super::token_set::TokenSet;
use super::vector::Candidate;
use crate::api::{Sampling, Vocabulary};

/// The history of a sequence, for its penalties.
#[derive(Clone, Debug)]
pub(crate) struct TokenHistory {
    counts: Option<TokenCounts>,
    dry: Option<DryHistory>,
}

impl TokenHistory {
    /// Returns the history of a prompt, or `None` if no penalty needs it. This takes milliseconds for a long prompt.
    pub(crate) fn of(
        prompt: &[Token],
        sampling: &Sampling,
        vocabulary: &dyn Vocabulary,
    ) -> Option<Self> {
        let counts = TokenCounts::of(prompt, sampling);
        let dry = sampling.dry.as_ref();
        let dry = dry.map(|dry| DryHistory::of(prompt, dry, vocabulary));
        (counts.is_some() || dry.is_some()).then_some(Self { counts, dry })
    }

    /// Adds a sampled token of the output. `tokens` are prompt and output as the model sees them, with the new one at
    /// the end; there, a token may stand in for the sampled one (AI-804).
    pub(crate) fn append(&mut self, sampled: Token, tokens: &[Token], vocabulary: &dyn Vocabulary) {
        match &mut self.counts {
            Some(TokenCounts::Whole { output, .. }) => *output.entry(sampled).or_default() += 1,
            Some(TokenCounts::Window(window)) => window.append(tokens),
            None => {}
        }
        if let Some(dry) = &mut self.dry {
            dry.append(tokens, vocabulary);
        }
    }

    /// Removes the tokens of the output that are rolled back: all but the first `left` of `tokens`, prompt included.
    /// `sampled` are the same tokens as they were sampled.
    pub(crate) fn truncate(
        &mut self,
        tokens: &[Token],
        left: usize,
        sampled: impl Iterator<Item = Token>,
    ) {
        match &mut self.counts {
            Some(TokenCounts::Whole { output, .. }) => {
                for token in sampled {
                    if let Some(count) = output.get_mut(&token) {
                        // An entry of zero stays and changes nothing.
                        *count = count.saturating_sub(1);
                    }
                }
            }
            Some(TokenCounts::Window(window)) => window.truncate(tokens, left),
            None => {}
        }
        if let Some(dry) = &mut self.dry {
            dry.truncate(left);
        }
    }

    /// Applies the repetition, presence and frequency penalties to a row, and records the original logits.
    pub(super) fn penalise(
        &self,
        row: &mut [f32],
        sampling: &Sampling,
        before: &mut Vec<(Token, f32)>,
    ) {
        if let Some(counts) = &self.counts {
            counts.penalise(row, sampling, before);
            // Steps may come in any order, and DRY may have recorded some of these already.
            if self.dry.is_some() {
                keep_first(before);
            }
        }
    }

    /// Applies DRY to a row, and records the original logits.
    pub(super) fn penalise_repetition(
        &self,
        row: &mut [f32],
        tokens: &[Token],
        scratch: &mut DryScratch,
        before: &mut Vec<(Token, f32)>,
    ) {
        let Some(dry) = &self.dry else {
            return;
        };
        for &(token, penalty) in dry.penalties(tokens, scratch) {
            if let Some(logit) = row.get_mut(token as usize) {
                before.push((token, *logit));
                *logit -= penalty;
            }
        }
        if self.counts.is_some() {
            keep_first(before);
        }
    }

    /// Applies the repetition, presence and frequency penalties to candidates.
    pub(super) fn penalise_candidates(
        &self,
        candidates: &mut [Candidate],
        sampling: &Sampling,
        marked: &mut TokenSet,
    ) {
        if let Some(counts) = &self.counts {
            counts.penalise_candidates(candidates, sampling, marked);
        }
    }

    /// Applies DRY to candidates.
    pub(super) fn penalise_repetition_of_candidates(
        &self,
        candidates: &mut [Candidate],
        tokens: &[Token],
        scratch: &mut DryScratch,
    ) {
        let Some(dry) = &self.dry else {
            return;
        };
        if dry.penalties(tokens, scratch).is_empty() {
            return;
        }
        for (logit, token) in candidates {
            if scratch.is_penalised(*token) {
                *logit -= dry.penalty(*token, scratch);
            }
        }
    }
}

/// Keeps the first of the records of each token, which has its original logit.
fn keep_first(before: &mut Vec<(Token, f32)>) {
    before.sort_by_key(|(token, _)| *token);
    before.dedup_by_key(|(token, _)| *token);
}
