//! [`LongestTokens`]: tokenises by the bytes of the tokens alone, for vocabularies whose rules are not known.

use std::collections::HashMap;

use sapwood_proto::steer::Token;

/// The tokens of text, by their bytes.
#[derive(Debug)]
pub(super) struct LongestTokens {
    by_bytes: HashMap<Box<[u8]>, Token>,
    /// Bytes of the longest token.
    longest: usize,
}

impl LongestTokens {
    /// Of these tokens; of equal ones the first.
    pub(super) fn new<'t>(tokens: impl Iterator<Item = (Token, &'t [u8])>) -> Self {
        let (mut by_bytes, mut longest) = (HashMap::new(), 0);
        for (id, bytes) in tokens.filter(|(_, bytes)| !bytes.is_empty()) {
            longest = longest.max(bytes.len());
            by_bytes.entry(bytes.into()).or_insert(id);
        }
        Self { by_bytes, longest }
    }

    /// The longest tokens from the left; bytes that no token begins with are dropped.
    pub(super) fn tokenize(&self, mut text: &[u8]) -> Vec<Token> {
        let mut tokens = Vec::new();
        while !text.is_empty() {
            let lengths = (1..=self.longest.min(text.len())).rev();
            let longest = lengths
                .filter_map(|length| Some((length, *self.by_bytes.get(&text[..length])?)))
                .next();
            let length = longest.map_or(1, |(length, token)| {
                tokens.push(token);
                length
            });
            text = &text[length..];
        }
        tokens
    }
}
