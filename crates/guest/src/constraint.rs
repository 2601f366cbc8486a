//! Constraints: automata over bytes that say which text is allowed.
//!
//! [`Pattern`] is enough for most: fixed text, one of several texts, bytes of a class, in a sequence. [`Substring`] allows
//! the pieces of a text. Others implement [`Constraint`]. A [`Matcher`](crate::Matcher) walks one along a sequence's tokens.

mod pattern;
mod substring;

pub use pattern::{ByteClass, Pattern, PatternState};
pub use substring::{Substring, SubstringState};

/// A set of texts, as an automaton over bytes.
pub trait Constraint {
    /// Where one is in a text. Small, because a walk over the vocabulary copies it often.
    type State: Clone;

    /// The state before the first byte.
    fn start(&self) -> Self::State;

    /// The state after a byte, or `None` if the byte is not allowed there.
    fn next(&self, state: &Self::State, byte: u8) -> Option<Self::State>;

    /// Whether the text may end here.
    fn is_complete(&self, state: &Self::State) -> bool;
}

#[cfg(test)]
mod tests;
