//! [`SavedTrie`]: a vocabulary from the token trie that `--save-tokenizer` writes (AI-630).
//!
//! The trie has the bytes of the tokens and no rules of a tokenizer, so text becomes the longest tokens that match.

use sapwood_proto::steer::Token;

use super::longest_tokens::LongestTokens;

/// The tokens of a file.
#[derive(Debug)]
pub(super) struct SavedTrie {
    tokens: Vec<Vec<u8>>,
    tokenizer: LongestTokens,
    pub(super) eos: Token,
}

impl SavedTrie {
    /// Reads a file. `None`: it does not begin as a trie.
    pub(super) fn read(bytes: &[u8]) -> Option<Result<Self, &'static str>> {
        bytes
            .starts_with(&MAGIC)
            .then(|| Self::parse(bytes).ok_or("the saved trie is damaged"))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |index: usize| {
            Some(u32::from_le_bytes(*bytes.get(4 * index..)?.first_chunk()?) as usize)
        };
        let (header, trie, offsets, size, eos) = (word(1)?, word(2)?, word(3)?, word(5)?, word(6)?);
        let places = header.checked_add(trie)?;
        let data = places.checked_add(offsets)?;
        if size > TOKENS_MAX || offsets != 4 * size || eos >= size {
            return None;
        }
        let data = bytes.get(data..)?;
        let places = bytes.get(places..places + offsets)?;
        let tokens: Vec<Vec<u8>> = places
            .chunks_exact(4)
            .map(|place| {
                let place = u32::from_le_bytes(*place.first_chunk()?);
                let (length, offset) = ((place & 255) as usize, (place >> 8) as usize);
                data.get(offset..offset + length).map(<[u8]>::to_vec)
            })
            .collect::<Option<_>>()?;
        let text = (0..)
            .zip(&tokens)
            .filter(|(_, token)| token.first().is_some_and(|first| *first != SPECIAL));
        Some(Self {
            tokenizer: LongestTokens::new(text.map(|(id, token)| (id, &token[..]))),
            eos: Token::try_from(eos).ok()?,
            tokens,
        })
    }

    /// How many tokens it has.
    pub(super) const fn size(&self) -> usize {
        self.tokens.len()
    }

    /// The bytes of a token; none of a special one, and of those that there are not.
    pub(super) fn bytes(&self, token: Token) -> &[u8] {
        match self.tokens.get(token as usize).map(Vec::as_slice) {
            Some([SPECIAL, _, ..]) | None => &[],
            Some(bytes) => bytes,
        }
    }

    /// The name of a special token.
    pub(super) fn name(&self, token: Token) -> Option<String> {
        match self.tokens.get(token as usize)?.split_first()? {
            (&SPECIAL, name) if !name.is_empty() => Some(String::from_utf8_lossy(name).into()),
            _ => None,
        }
    }

    /// The longest tokens from the left.
    pub(super) fn tokenize(&self, text: &[u8]) -> Vec<Token> {
        self.tokenizer.tokenize(text)
    }
}

/// The first bytes of a trie.
const MAGIC: [u8; 4] = [0xd3, 0x6f, 0x8b, 0x55];
/// The first byte of a special token's name.
const SPECIAL: u8 = 0xff;
/// The most tokens that a trie can name (AI-631).
const TOKENS_MAX: usize = (1 << 24) - 2;

#[cfg(test)]
mod tests {
    use sapwood_control::trie::{HostModel, TokenEntry, TokenView};

    use super::*;

    fn saved() -> Vec<u8> {
        let mut tokens: Vec<TokenEntry> =
            (0..=127_u8).map(|byte| TokenEntry::text([byte])).collect();
        tokens.extend(["ab", "abc", "xy"].map(TokenEntry::text));
        tokens.push(TokenEntry::special("<|end|>"));
        let model = HostModel::new(tokens, 131, |_: &str| Vec::new());
        model.trie(TokenView::Named).to_vec()
    }

    #[test]
    fn ai_630_a_saved_trie_is_read_back() {
        let saved = saved();
        let trie = SavedTrie::read(&saved).unwrap().unwrap();
        assert_eq!((trie.eos, trie.tokens.len()), (131, 132));
        assert_eq!((trie.bytes(129), trie.name(129)), (&b"abc"[..], None));
        let end = Some("<|end|>".to_owned());
        assert_eq!((trie.bytes(131), trie.name(131)), (&b""[..], end));
        assert_eq!((trie.bytes(132), trie.name(132)), (&b""[..], None));
        assert_eq!(
            trie.tokenize("abcabx\u{e9}y".as_bytes()),
            [129, 128, 120, 121]
        );
    }

    #[test]
    fn a_damaged_trie_is_refused() {
        assert!(SavedTrie::read(b"{}").is_none());
        let saved = saved();
        for length in 0..saved.len() {
            if let Some(read) = SavedTrie::read(&saved[..length]) {
                assert!(read.is_err(), "{length} bytes");
            }
        }
        for place in 4..28 {
            let mut damaged = saved.clone();
            damaged[place] ^= 0xff;
            // Whatever comes out of it, reading ends.
            let _ = SavedTrie::read(&damaged);
        }
    }
}
