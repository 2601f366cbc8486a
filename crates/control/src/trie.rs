//! What controllers may ask about the model: its tokens, its end of sequence, its tokenizer, and the token trie.

mod blob;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use sapwood_proto::steer::{HostConstraintSource, Mask, Token};

use self::blob::TrieTokens;

/// One entry of the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenEntry {
    /// The true bytes of the token, byte fallback and byte-level spelling undone. Ignored for special tokens.
    pub bytes: Vec<u8>,
    /// The name of a special token, `<|end|>` for example; `None` for text.
    pub special: Option<String>,
}

impl TokenEntry {
    /// A token of text.
    #[must_use]
    pub fn text(bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            bytes: bytes.into(),
            special: None,
        }
    }

    /// A special token.
    #[must_use]
    pub fn special(name: impl Into<String>) -> Self {
        Self {
            bytes: Vec::new(),
            special: Some(name.into()),
        }
    }
}

impl TokenEntry {
    fn seen(&self, view: TokenView) -> Cow<'_, [u8]> {
        match (&self.special, view) {
            (None, _) => Cow::Borrowed(&self.bytes),
            (Some(_), TokenView::Plain) => Cow::Borrowed(&[]),
            (Some(name), TokenView::Named) => Cow::Owned([&[0xFF], name.as_bytes()].concat()),
        }
    }
}

/// Tokenizes text for controllers: no special tokens, no begin token, no prepended space (AI-605).
pub trait TextTokenizer: Send + Sync {
    /// The tokens of `text`.
    fn tokenize(&self, text: &str) -> Vec<Token>;
}

impl<F: Fn(&str) -> Vec<Token> + Send + Sync> TextTokenizer for F {
    fn tokenize(&self, text: &str) -> Vec<Token> {
        self(text)
    }
}

/// How the two generations of controllers see special tokens and broken text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenView {
    /// P1: special tokens are empty, invalid UTF-8 is replaced.
    Plain,
    /// P2: special tokens are 0xFF and their name, invalid bytes are byte tokens.
    Named,
}

/// A model as controllers see it. Built once per model and shared.
pub struct HostModel {
    tokens: Vec<TokenEntry>,
    eos: Token,
    tokenizer: Box<dyn TextTokenizer>,
    /// Tokens of exactly one byte, for text that is not UTF-8.
    byte_tokens: HashMap<u8, Token>,
    /// Built when a controller asks for them: most never do, and each takes up to 8 MB.
    tries: [OnceLock<Arc<[u8]>>; 2],
    constraints: Option<Arc<dyn HostConstraintSource>>,
}

impl HostModel {
    /// A model with these tokens; the id of a token is its place in the list.
    #[must_use]
    pub fn new(
        tokens: Vec<TokenEntry>,
        eos: Token,
        tokenizer: impl TextTokenizer + 'static,
    ) -> Self {
        let mut byte_tokens = HashMap::new();
        for (id, entry) in (0..).zip(&tokens) {
            if let (None, [byte]) = (&entry.special, &entry.bytes[..]) {
                byte_tokens.entry(*byte).or_insert(id);
            }
        }
        Self {
            tokens,
            eos,
            tokenizer: Box::new(tokenizer),
            byte_tokens,
            tries: [OnceLock::new(), OnceLock::new()],
            constraints: None,
        }
    }

    /// Adds constraints that controllers follow through host functions (AI-1007), over the same tokens.
    #[must_use]
    pub fn with_constraints(mut self, constraints: Arc<dyn HostConstraintSource>) -> Self {
        self.constraints = Some(constraints);
        self
    }

    pub(crate) fn constraints(&self) -> Option<&Arc<dyn HostConstraintSource>> {
        self.constraints.as_ref()
    }

    /// The size of the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.tokens.len()
    }

    /// The end-of-sequence token.
    #[must_use]
    pub const fn eos(&self) -> Token {
        self.eos
    }

    /// Tokenizes `text`, which need not be UTF-8 (AI-605).
    #[must_use]
    pub fn tokenize(&self, text: &[u8], view: TokenView) -> Vec<Token> {
        self.tokenize_until(text, view, &|| false)
    }

    /// As [`HostModel::tokenize`]; ends early, with some of the tokens, once it is `late`.
    pub(crate) fn tokenize_until(
        &self,
        text: &[u8],
        view: TokenView,
        late: &dyn Fn() -> bool,
    ) -> Vec<Token> {
        if view == TokenView::Plain {
            return self.tokenizer.tokenize(&String::from_utf8_lossy(text));
        }
        let mut tokens = Vec::new();
        for chunk in text.utf8_chunks() {
            if late() {
                return tokens;
            }
            if !chunk.valid().is_empty() {
                tokens.extend(self.tokenizer.tokenize(chunk.valid()));
            }
            // A vocabulary without byte tokens cannot express them; the rest of the text is still worth having.
            let invalid = chunk.invalid().iter();
            tokens.extend(invalid.filter_map(|byte| self.byte_tokens.get(byte)));
        }
        tokens
    }

    /// The token trie as controllers read it from blob 100 (AI-630). The first call builds it.
    #[must_use]
    pub fn trie(&self, view: TokenView) -> &Arc<[u8]> {
        let place = match view {
            TokenView::Plain => 0,
            TokenView::Named => 1,
        };
        self.tries[place].get_or_init(|| {
            let bytes = self
                .tokens
                .iter()
                .map(|entry| entry.seen(view).into_owned());
            TrieTokens::new(bytes).blob(self.eos).into()
        })
    }

    /// The bytes of a token as controllers see them; none for ids beyond the vocabulary.
    pub(crate) fn token_bytes(&self, token: Token, view: TokenView) -> Cow<'_, [u8]> {
        let entry = self.tokens.get(token as usize);
        entry.map_or(Cow::Borrowed(&[]), |entry| entry.seen(view))
    }

    /// The tokens of text that start with these bytes, or are the start of them.
    pub(crate) fn prefix_mask(&self, prefix: &[u8]) -> Mask {
        let mut mask = Mask::none(self.vocabulary());
        for (id, entry) in (0..).zip(&self.tokens) {
            let bytes = &entry.bytes[..];
            let is_text = entry.special.is_none() && !bytes.is_empty();
            if is_text && (bytes.starts_with(prefix) || prefix.starts_with(bytes)) {
                mask.allow(id);
            }
        }
        mask
    }
}

impl fmt::Debug for HostModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostModel")
            .field("vocabulary", &self.vocabulary())
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}
