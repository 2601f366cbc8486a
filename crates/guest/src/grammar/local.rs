//! Grammars and sets that are computed in the module, from the vocabulary's trie.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use crate::constraint::{Constraint, Pattern, Substring};
use crate::json::Json;
use crate::{Mask, Matcher, Step, Token, eos_token, host, tokenize, trie};

/// Where one is in a grammar. It follows the tokens before the end of the text.
#[derive(Clone, Debug)]
pub(super) enum Place {
    Options(Matcher<Pattern>),
    Substring(Matcher<Substring>),
}

impl Place {
    pub(super) fn new(kind: &str, pattern: &str) -> Result<Self, String> {
        match kind {
            "options" => Ok(Self::Options(Matcher::new(options(pattern)?))),
            // An empty piece is none.
            "substring" => Ok(Self::Substring(Matcher::new(Substring::new(pattern, 1)))),
            _ => Err(
                "only the host has grammars of this kind: build the module with the feature `host`"
                    .to_owned(),
            ),
        }
    }

    pub(super) fn consume(&mut self, token: Token) -> bool {
        match self {
            Self::Options(matcher) => consume(matcher, token),
            Self::Substring(matcher) => consume(matcher, token),
        }
    }

    pub(super) fn rollback(&mut self, taken_back: &[Token]) {
        let eos = eos_token();
        let followed = taken_back.iter().filter(|token| **token != eos).count();
        let step = Step {
            backtrack: u32::try_from(followed).unwrap_or(u32::MAX),
            ..Step::default()
        };
        // Without tokens there is nothing that might not be allowed.
        let _allowed = match self {
            Self::Options(matcher) => matcher.follow(&step),
            Self::Substring(matcher) => matcher.follow(&step),
        };
    }

    pub(super) fn allowed(&self, has_ended: bool) -> Set {
        Set(match self {
            _ if has_ended => Mask::none(),
            Self::Options(matcher) => matcher.mask(),
            Self::Substring(matcher) => matcher.mask(),
        })
    }

    pub(super) fn forced(&self) -> Vec<Token> {
        let bytes = match self {
            Self::Options(matcher) => matcher.forced(),
            Self::Substring(matcher) => matcher.forced(),
        };
        // Where nothing is forced the tokenizer need not be asked.
        if bytes.is_empty() {
            return Vec::new();
        }
        tokenize(bytes)
    }

    pub(super) fn copy(&self, _consumed: &[Token]) -> Self {
        self.clone()
    }
}

fn consume<C: Constraint>(matcher: &mut Matcher<C>, token: Token) -> bool {
    if token == eos_token() {
        return matcher.is_complete();
    }
    !trie().is_special(token) && matcher.push(token)
}

fn options(pattern: &str) -> Result<Pattern, String> {
    let wrong = || "invalid grammar: options are a JSON list of texts".to_owned();
    let list = Json::parse(pattern).map_err(|_| wrong())?;
    let Json::Array(list) = &list else {
        return Err(wrong());
    };
    let texts: Option<Vec<&str>> = list.iter().map(Json::as_str).collect();
    let texts = texts.ok_or_else(wrong)?;
    if texts.is_empty() || texts.len() > OPTIONS_MAX || texts.iter().any(|text| text.is_empty()) {
        return Err(
            "invalid grammar: without the host there are 1 to 64 options, and no empty one"
                .to_owned(),
        );
    }
    Ok(Pattern::new().one_of(texts))
}

/// What [`Pattern::one_of`] takes.
const OPTIONS_MAX: usize = 64;

/// A set of tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Set(Mask);

impl Set {
    pub(super) fn prefix(prefix: &[u8]) -> Self {
        let trie = trie();
        let mut mask = Mask::none();
        for token in 0..Token::try_from(trie.vocabulary_size()).unwrap_or(Token::MAX) {
            let bytes = trie.token_bytes(token);
            let fits = bytes.starts_with(prefix) || prefix.starts_with(bytes);
            if fits && !trie.is_special(token) {
                mask.allow(token);
            }
        }
        Self(mask)
    }

    pub(super) fn and(self, other: &Self) -> Self {
        Self(self.0.and(&other.0))
    }

    pub(super) fn or(self, other: &Self) -> Self {
        Self(self.0.or(&other.0))
    }

    pub(super) fn not(self) -> Self {
        Self(self.0.not())
    }

    pub(super) fn return_to_host(&self) -> u32 {
        host::return_mask(self.0.words())
    }

    #[cfg(not(target_arch = "wasm32"))]
    pub(super) const fn mask(&self) -> &Mask {
        &self.0
    }
}
