//! Grammars by kind and pattern, and sets of tokens: computed by the host with the feature `host`, else here.
//!
//! With the feature, a module needs neither the vocabulary's trie nor masks in its memory, and it has every kind of native
//! constraint; but it runs on Sapwood only. Without it the kinds `options` and `substring` are computed in the module, and
//! on targets other than WebAssembly always.

#[cfg(all(feature = "host", target_arch = "wasm32"))]
mod held;
#[cfg(not(all(feature = "host", target_arch = "wasm32")))]
mod local;

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

#[cfg(all(feature = "host", target_arch = "wasm32"))]
use self::held::{Place, Set};
#[cfg(not(all(feature = "host", target_arch = "wasm32")))]
use self::local::{Place, Set};
use crate::{Branch, Decision, Mask, Sample, Step, Token, config, eos_token};

/// A grammar at a place of a sequence. It follows taken back tokens too.
///
/// ```
/// use sapwood_guest::prelude::*;
///
/// /// Answers with one of the texts of its argument, a JSON list.
/// #[derive(Clone)]
/// struct Answer(Grammar);
///
/// impl Default for Answer {
///     fn default() -> Self {
///         let options: String = arg();
///         Self(Grammar::new("options", options).unwrap_or_else(|error| panic!("{error}")))
///     }
/// }
///
/// impl Controller for Answer {
///     fn step(&mut self, step: Step<'_>) -> Decision {
///         if !self.0.follow(&step) {
///             return Decision::Stop;
///         }
///         self.0.decide()
///     }
/// }
/// # let run = sapwood_guest::testing::run::<Answer>(r#"["red", "green"]"#, "Leaves are ", "green");
/// # assert_eq!(run.texts(), ["green"]);
/// ```
#[derive(Debug)]
pub struct Grammar {
    place: Place,
    consumed: Vec<Token>,
}

/// Why there is no grammar: a text for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarError(String);

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for GrammarError {}

impl Grammar {
    /// Compiles a pattern; the next token is the first that it constrains. Kinds: `options`, a JSON list of texts of which it
    /// is one, and `substring`, a text of which it is a piece. The host has besides `regex`, `json-schema`, `lark` and `gbnf`.
    ///
    /// # Errors
    /// There is no such kind, or it is no pattern of this kind.
    pub fn new(kind: &str, pattern: impl AsRef<str>) -> Result<Self, GrammarError> {
        let place = Place::new(kind, pattern.as_ref()).map_err(GrammarError)?;
        Ok(Self {
            place,
            consumed: Vec::new(),
        })
    }

    /// Follows what a step did. Returns whether the grammar allows it; if not, it stays before the first token that is not
    /// allowed.
    #[must_use]
    pub fn follow(&mut self, step: &Step<'_>) -> bool {
        let kept = self.consumed.len().saturating_sub(step.backtrack as usize);
        if kept < self.consumed.len() {
            self.place.rollback(&self.consumed[kept..]);
            self.consumed.truncate(kept);
        }
        step.tokens.iter().all(|&token| self.push(token))
    }

    /// Follows one token. Returns whether the grammar allows it; special tokens are not allowed, but for the end-of-sequence
    /// token where the text may end.
    #[must_use]
    pub fn push(&mut self, token: Token) -> bool {
        let allowed = !self.has_ended() && self.place.consume(token);
        if allowed {
            self.consumed.push(token);
        }
        allowed
    }

    /// The tokens that may follow, and the end-of-sequence token where the text may end; none after it.
    #[must_use]
    pub fn allowed(&self) -> TokenSet {
        TokenSet(self.place.allowed(self.has_ended()))
    }

    /// Tokens that must follow. Not always all of them.
    #[must_use]
    pub fn forced(&self) -> Vec<Token> {
        if self.has_ended() {
            return Vec::new();
        }
        self.place.forced()
    }

    /// Whether the text has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.consumed.last() == Some(&eos_token())
    }

    /// What a controller decides that wants nothing but this grammar: stop when the text has ended, append what is forced,
    /// else sample.
    #[must_use]
    pub fn decide(&self) -> Decision {
        if self.has_ended() {
            return Decision::Stop;
        }
        let forced = self.forced();
        if forced.is_empty() || config("ff_tokens") == 0 {
            return self.allowed().into();
        }
        Decision::fast_forward(forced)
    }
}

impl Clone for Grammar {
    fn clone(&self) -> Self {
        Self {
            place: self.place.copy(&self.consumed),
            consumed: self.consumed.clone(),
        }
    }
}

/// A set of tokens that the model may choose from, and that the controller need not see: those that a [`Grammar`] allows, or
/// that begin with a text. A [`Mask`] is a set that it sees.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenSet(Set);

impl TokenSet {
    /// The tokens of text that start with these bytes, or are the start of them.
    #[must_use]
    pub fn prefix(bytes: impl AsRef<[u8]>) -> Self {
        Self(Set::prefix(bytes.as_ref()))
    }

    /// The tokens that are in both sets.
    #[must_use]
    pub fn and(self, other: &Self) -> Self {
        Self(self.0.and(&other.0))
    }

    /// The tokens that are in one of the sets, or in both.
    #[must_use]
    pub fn or(self, other: &Self) -> Self {
        Self(self.0.or(&other.0))
    }

    /// The other tokens of the vocabulary.
    #[must_use]
    #[expect(
        clippy::should_implement_trait,
        reason = "as in `Mask`, `and`, `or` and `not` read alike in a chain"
    )]
    pub fn not(self) -> Self {
        Self(self.0.not())
    }
}

impl From<TokenSet> for Branch {
    fn from(set: TokenSet) -> Self {
        Self::Sample(Sample::new(set))
    }
}

impl From<TokenSet> for Decision {
    fn from(set: TokenSet) -> Self {
        Sample::new(set).into()
    }
}

/// The tokens of a [`Sample`].
#[derive(Clone, Debug, PartialEq)]
pub enum Allowed {
    /// A set of the controller.
    Mask(Mask),
    /// A set that it need not see.
    Set(TokenSet),
}

impl From<Mask> for Allowed {
    fn from(mask: Mask) -> Self {
        Self::Mask(mask)
    }
}

impl From<TokenSet> for Allowed {
    fn from(set: TokenSet) -> Self {
        Self::Set(set)
    }
}

impl Allowed {
    /// Hands the set to the host; returns its handle.
    pub(crate) fn return_to_host(&self) -> u32 {
        match self {
            Self::Mask(mask) => crate::host::return_mask(mask.words()),
            Self::Set(set) => set.0.return_to_host(),
        }
    }

    /// The set, for those who are in the place of an engine.
    #[cfg(not(target_arch = "wasm32"))]
    #[must_use]
    pub fn mask(&self) -> &Mask {
        match self {
            Self::Mask(mask) => mask,
            Self::Set(set) => set.0.mask(),
        }
    }
}

#[cfg(test)]
mod tests;
