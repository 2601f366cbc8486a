//! [`TokenBytes`]: the bytes of every token of a vocabulary, in two allocations.

use sapwood_proto::steer::Token;

/// The bytes of the tokens 0, 1, 2 and so on.
#[derive(Debug, Default)]
pub(crate) struct TokenBytes {
    /// The bytes of all tokens, concatenated; those of token `t` end at `ends[t]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl TokenBytes {
    /// Appends the bytes of the next token.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        // Does not overflow: tokens are short, and 2^32 bytes would be 1 KiB for each of 2^22.
        let end = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.ends.push(end);
    }

    /// Returns the number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the bytes of a token; none for ids that were not pushed.
    pub(crate) fn get(&self, token: Token) -> &[u8] {
        let token = token as usize;
        let Some(&end) = self.ends.get(token) else {
            return &[];
        };
        let start = token.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..end as usize]
    }
}
