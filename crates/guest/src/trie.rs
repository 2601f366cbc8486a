//! Reader of the vocabulary's trie (AI-630), which is walked in the form in which it travels.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::{Mask, Token};

/// The vocabulary as a trie of bytes. Clones share it.
///
/// Special tokens have the byte 0xFF before their name, which no text contains; for controllers with the feature `p1`
/// they have no bytes.
#[derive(Clone)]
pub struct TokenTrie {
    bytes: Arc<Vec<u8>>,
    nodes_end: usize,
    offsets_end: usize,
    vocabulary: usize,
    eos: Token,
}

/// Words of the header.
const HEADER_WORDS: usize = 7;
/// Bytes of the header.
pub(crate) const HEADER_BYTES: usize = HEADER_WORDS * 4;
const MAGIC: u32 = 0x558b_6fd3;
/// A node's token if none ends there.
const NO_TOKEN: u32 = 0xff_ffff;

/// The bytes are no trie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrieError;

impl fmt::Display for TrieError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the host's token trie has an unknown form")
    }
}

impl core::error::Error for TrieError {}

/// One node: `token << 8 | byte`, and `nodes of the subtree << 8 | pops`.
#[derive(Clone, Copy)]
struct Node {
    byte: u8,
    token: u32,
    subtree: usize,
    pops: usize,
}

impl Node {
    const fn of(&[a, b, c, d, e, f, g, h]: &[u8; 8]) -> Self {
        Self {
            byte: a,
            token: u32::from_le_bytes([b, c, d, 0]),
            subtree: u32::from_le_bytes([f, g, h, 0]) as usize,
            pops: e as usize,
        }
    }
}

impl TokenTrie {
    /// Reads a trie.
    ///
    /// # Errors
    /// The bytes are no trie.
    pub fn new(bytes: Vec<u8>) -> Result<Self, TrieError> {
        let header = Header::of(&bytes).ok_or(TrieError)?;
        let nodes_end = HEADER_BYTES
            .checked_add(header.node_bytes)
            .ok_or(TrieError)?;
        let offsets_end = nodes_end
            .checked_add(header.offset_bytes)
            .ok_or(TrieError)?;
        let fits = offsets_end <= bytes.len() && header.offset_bytes / 4 >= header.vocabulary;
        if !fits || header.node_bytes % 8 != 0 || header.node_bytes == 0 {
            return Err(TrieError);
        }
        Ok(Self {
            bytes: Arc::new(bytes),
            nodes_end,
            offsets_end,
            vocabulary: header.vocabulary,
            eos: header.eos,
        })
    }

    /// How many tokens the vocabulary has.
    #[must_use]
    pub const fn vocabulary_size(&self) -> usize {
        self.vocabulary
    }

    /// The end-of-sequence token.
    #[must_use]
    pub const fn eos_token(&self) -> Token {
        self.eos
    }

    /// The bytes of a token; none for tokens beyond the vocabulary.
    #[must_use]
    pub fn token_bytes(&self, token: Token) -> &[u8] {
        let offsets = self.bytes[self.nodes_end..self.offsets_end]
            .as_chunks::<4>()
            .0;
        let Some(&offset) = offsets.get(token as usize) else {
            return &[];
        };
        let offset = u32::from_le_bytes(offset);
        let (start, len) = ((offset >> 8) as usize, (offset & 0xff) as usize);
        let data = &self.bytes[self.offsets_end..];
        data.get(start..start + len).unwrap_or(&[])
    }

    /// Whether a token is special: it has no bytes, or the byte 0xFF before its name.
    #[must_use]
    pub fn is_special(&self, token: Token) -> bool {
        self.token_bytes(token)
            .first()
            .is_none_or(|&byte| byte == SPECIAL)
    }

    /// The bytes of tokens, joined; without special tokens.
    #[must_use]
    pub fn decode(&self, tokens: &[Token]) -> Vec<u8> {
        let text = tokens.iter().filter(|&&token| !self.is_special(token));
        text.flat_map(|&token| self.token_bytes(token))
            .copied()
            .collect()
    }

    /// The tokens whose bytes an automaton accepts one after another from `start`; `next` returns the state after a byte,
    /// or `None` if the byte is not allowed there.
    pub fn mask_of<S>(&self, start: S, next: impl Fn(&S, u8) -> Option<S>) -> Mask {
        let nodes = self.bytes[HEADER_BYTES..self.nodes_end].as_chunks::<8>().0;
        let mut mask = Mask::none_of(self.vocabulary);
        let mut states = Vec::with_capacity(STATES);
        states.push(start);
        // Nodes are in pre-order. `pops` of a node without children is the number of states that end with it: its own, and
        // those of the nodes whose last descendant it is. A rejected node ends the same ones, without one of its own.
        let mut at = 1;
        while let Some(node) = nodes.get(at).map(Node::of) {
            let Some(state) = states.last() else { break };
            let ended = match next(state, node.byte) {
                Some(state) => {
                    if node.token != NO_TOKEN {
                        mask.allow(node.token);
                    }
                    states.push(state);
                    at += 1;
                    if node.subtree == 1 { node.pops } else { 0 }
                }
                None => {
                    at += node.subtree.max(1);
                    node.pops.saturating_sub(1)
                }
            };
            states.truncate(states.len().saturating_sub(ended));
        }
        mask
    }
}

/// The first byte of special tokens.
const SPECIAL: u8 = 0xff;
/// Most tokens are shorter.
const STATES: usize = 64;

impl fmt::Debug for TokenTrie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenTrie")
            .field("vocabulary", &self.vocabulary)
            .finish_non_exhaustive()
    }
}

/// The start of a trie. Enough to know the vocabulary's size.
pub(crate) struct Header {
    node_bytes: usize,
    offset_bytes: usize,
    pub(crate) vocabulary: usize,
    eos: Token,
}

impl Header {
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        let words = bytes.as_chunks::<4>().0.first_chunk::<HEADER_WORDS>()?;
        let [magic, size, node_bytes, offset_bytes, _, vocabulary, eos] =
            words.map(u32::from_le_bytes);
        (magic == MAGIC && size as usize == HEADER_BYTES).then_some(Self {
            node_bytes: node_bytes as usize,
            offset_bytes: offset_bytes as usize,
            vocabulary: vocabulary as usize,
            eos,
        })
    }
}
