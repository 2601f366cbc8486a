//! [`SteeredOutput`]: the output of a steered sequence, with the states of its text to which a rollback returns.
//!
//! A text cannot be shortened by bytes: a removed token may have completed a character, or released text that was held
//! back before it. So it is made again from the last checkpoint that a rollback leaves. A steerer may roll back in every
//! step, and from the start that would cost the engine's thread the whole output each time.

use std::ops::Deref;
use std::vec::Drain;

use crate::api::Sampled;
use crate::text::ChoiceText;

/// The output as it was reported: the tokens themselves, not their replacements in the context (AI-804).
#[derive(Clone, Debug, Default)]
pub(super) struct SteeredOutput {
    tokens: Vec<Sampled>,
    /// The text after each [`CHECKPOINT_TOKENS`] tokens. The incomplete character and the held-back text are part of it:
    /// a stop string may be chosen such that something is held back after every token.
    checkpoints: Vec<ChoiceText>,
}

/// Tokens between two checkpoints. A rollback makes the text of fewer tokens again. A checkpoint has fewer bytes than so
/// many tokens, unless most of a stop string is held back (1 KiB).
pub(super) const CHECKPOINT_TOKENS: usize = 32;

impl SteeredOutput {
    /// Appends a token. `text`: the text of the output, this token included.
    pub(super) fn push(&mut self, token: Sampled, text: &ChoiceText) {
        self.tokens.push(token);
        if self.tokens.len().is_multiple_of(CHECKPOINT_TOKENS) {
            self.checkpoints.push(text.clone());
        }
    }

    /// Removes the tokens after the first `left`, and returns them.
    pub(super) fn truncate(&mut self, left: usize) -> Drain<'_, Sampled> {
        self.checkpoints.truncate(left / CHECKPOINT_TOKENS);
        self.tokens.drain(left..)
    }

    /// Returns the text at the last checkpoint, and the tokens that were appended after it.
    pub(super) fn since_checkpoint(&self) -> (ChoiceText, &[Sampled]) {
        let text = self.checkpoints.last().cloned().unwrap_or_default();
        let replayed = self.checkpoints.len() * CHECKPOINT_TOKENS;
        (text, &self.tokens[replayed..])
    }
}

impl Deref for SteeredOutput {
    type Target = [Sampled];

    fn deref(&self) -> &[Sampled] {
        &self.tokens
    }
}

#[cfg(test)]
mod tests;
