//! Walks a constraint along the tokens of a sequence.

use alloc::vec::Vec;

use crate::constraint::Constraint;
use crate::{Decision, Mask, Step, Token, config, eos_token, tokenize, trie};

/// A constraint at a place of a sequence. It follows taken back tokens too.
#[derive(Clone, Debug)]
pub struct Matcher<C: Constraint> {
    constraint: C,
    start: C::State,
    /// The state after each token.
    states: Vec<C::State>,
    /// How many tokens there were before the first end-of-sequence token among them.
    ended_after: Option<usize>,
}

/// Forced bytes of one step; more follow in the next.
const FORCED_MAX: usize = 1_024;

impl<C: Constraint> Matcher<C> {
    /// Starts at the next token.
    #[must_use]
    pub fn new(constraint: C) -> Self {
        Self {
            start: constraint.start(),
            constraint,
            states: Vec::new(),
            ended_after: None,
        }
    }

    /// Follows what a step did. Returns whether the constraint allows it; if not, it stays before the first token that is
    /// not allowed.
    #[must_use]
    pub fn follow(&mut self, step: &Step<'_>) -> bool {
        let kept = self.states.len().saturating_sub(step.backtrack as usize);
        self.states.truncate(kept);
        self.ended_after = self.ended_after.filter(|&before| before < kept);
        step.tokens.iter().all(|&token| self.push(token))
    }

    /// Follows one token; special tokens are allowed everywhere and change nothing, but the end-of-sequence token ends the
    /// text. Returns whether the constraint allows it.
    #[must_use]
    pub fn push(&mut self, token: Token) -> bool {
        let trie = trie();
        let is_end = token == eos_token();
        // Whatever the vocabulary has for the end: it is no text.
        let bytes = if is_end || trie.is_special(token) {
            &[]
        } else {
            trie.token_bytes(token)
        };
        let first = self.state().clone();
        let after = bytes
            .iter()
            .try_fold(first, |state, &byte| self.constraint.next(&state, byte));
        let Some(after) = after else { return false };
        if is_end {
            self.ended_after.get_or_insert(self.states.len());
        }
        self.states.push(after);
        true
    }

    /// The tokens that the constraint allows here, and the end-of-sequence token where the text may end.
    #[must_use]
    pub fn mask(&self) -> Mask {
        let mut mask = trie().mask_of(self.state().clone(), |state, byte| {
            self.constraint.next(state, byte)
        });
        if self.is_complete() {
            mask.allow(eos_token());
        }
        mask
    }

    /// Whether the text may end here.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.constraint.is_complete(self.state())
    }

    /// Whether the text has ended, or nothing can follow it.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.ended_after.is_some()
            || self.is_complete() && self.following(self.state()).next().is_none()
    }

    /// The bytes that must come next, if there is only one way.
    #[must_use]
    pub fn forced(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut state = self.state().clone();
        while bytes.len() < FORCED_MAX && !self.constraint.is_complete(&state) {
            let mut following = self.following(&state);
            let (Some((byte, after)), None) = (following.next(), following.next()) else {
                break;
            };
            drop(following);
            bytes.push(byte);
            state = after;
        }
        bytes
    }

    /// What a controller decides that wants nothing but this constraint: stop when it is finished, append what is forced,
    /// else sample.
    #[must_use]
    pub fn decide(&self) -> Decision {
        if self.is_finished() {
            return Decision::Stop;
        }
        let forced = self.forced();
        if forced.is_empty() || config("ff_tokens") == 0 {
            return Decision::Sample(self.mask());
        }
        Decision::fast_forward(tokenize(forced))
    }

    fn state(&self) -> &C::State {
        self.states.last().unwrap_or(&self.start)
    }

    fn following<'m>(&'m self, state: &'m C::State) -> impl Iterator<Item = (u8, C::State)> + 'm {
        (0..=u8::MAX).filter_map(|byte| Some((byte, self.constraint.next(state, byte)?)))
    }
}
