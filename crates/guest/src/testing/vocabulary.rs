//! A vocabulary for tests: all bytes, some words, and an end-of-sequence token.

use std::collections::BTreeMap;

use crate::native::Model;
use crate::{Token, TokenTrie};

/// A model without weights: a vocabulary and a tokenizer that takes the longest token at each place.
///
/// Tokens 0 to 254 are the bytes of that value, 255 is the end of the sequence, and the others are words of two bytes and
/// more.
#[derive(Clone, Debug)]
pub struct ToyModel {
    tokens: Vec<Vec<u8>>,
    by_bytes: BTreeMap<Vec<u8>, Token>,
    trie: TokenTrie,
}

/// Pieces of ordinary text, and of JSON.
const WORDS: &[&str] = &[
    "  ", "th", "the", " the", "er", "in", "ing", " a", " is", "es", "yes", "Yes", "no", "No",
    " and", "ou", "you", " you", "re", "at", "to", " to", "ll", "he", "she", "ed", "\",\"", "\":",
    "\":\"", "\"}", "{\"", ", ", ". ", ".\n", "\n\n", "1.", "10", "20", "AB", "HE", "LLO", " W",
    "OR", "LD", "red", "green", "blue",
];

impl ToyModel {
    /// The end-of-sequence token.
    pub const EOS: Token = 255;

    /// The model.
    #[must_use]
    pub fn new() -> Self {
        let mut tokens: Vec<Vec<u8>> = (0..=254).map(|byte| vec![byte]).collect();
        tokens.push(b"\xffeos".to_vec());
        tokens.extend(WORDS.iter().map(|word| word.as_bytes().to_vec()));
        let by_bytes = tokens.iter().cloned().zip(0..).collect();
        let trie = match TokenTrie::new(encode_trie(&tokens, Self::EOS)) {
            Ok(trie) => trie,
            Err(error) => unreachable!("{error}"),
        };
        Self {
            tokens,
            by_bytes,
            trie,
        }
    }

    /// The bytes of all tokens; special ones have 0xFF before their name.
    #[must_use]
    pub fn tokens(&self) -> &[Vec<u8>] {
        &self.tokens
    }

    /// The tokens of a text.
    #[must_use]
    pub fn tokenize_text(&self, mut text: &[u8]) -> Vec<Token> {
        let mut tokens = Vec::new();
        while !text.is_empty() {
            let longest = (1..=text.len().min(LONGEST)).rev();
            let found = longest
                .map(|len| &text[..len])
                .find_map(|start| Some((self.by_bytes.get(start)?, start.len())));
            // The byte 0xFF has no token, and no text has it.
            let (token, len) = found.map_or((0, 1), |(&token, len)| (token, len));
            tokens.push(token);
            text = &text[len..];
        }
        tokens
    }
}

/// Bytes of the longest word.
const LONGEST: usize = 8;

impl Default for ToyModel {
    fn default() -> Self {
        Self::new()
    }
}

impl Model for ToyModel {
    fn trie(&self) -> TokenTrie {
        self.trie.clone()
    }

    fn tokenize(&self, text: &[u8]) -> Vec<Token> {
        self.tokenize_text(text)
    }
}

/// A node while the trie is built.
#[derive(Default)]
struct Node {
    token: Option<Token>,
    children: BTreeMap<u8, Self>,
}

/// The bytes of a trie (AI-630).
pub(crate) fn encode_trie(tokens: &[Vec<u8>], eos: Token) -> Vec<u8> {
    let mut root = Node::default();
    for (bytes, token) in tokens.iter().zip(0..) {
        if bytes.is_empty() {
            continue;
        }
        let node = bytes.iter().fold(&mut root, |node, &byte| {
            node.children.entry(byte).or_default()
        });
        node.token.get_or_insert(token);
    }
    let mut nodes = Vec::new();
    push_node(&mut nodes, &root, 0xff, 0);
    let (mut offsets, mut data) = (Vec::new(), Vec::new());
    for bytes in tokens {
        offsets.push((data.len() as u32) << 8 | bytes.len() as u32);
        data.extend_from_slice(bytes);
    }
    let header = [
        0x558b_6fd3,
        28,
        nodes.len() as u32 * 8,
        offsets.len() as u32 * 4,
        data.len() as u32,
        tokens.len() as u32,
        eos,
    ];
    let words = header
        .into_iter()
        .chain(nodes.into_iter().flatten())
        .chain(offsets);
    words.flat_map(u32::to_le_bytes).chain(data).collect()
}

fn push_node(nodes: &mut Vec<[u32; 2]>, node: &Node, byte: u8, pops: u32) {
    let at = nodes.len();
    nodes.push([node.token.unwrap_or(0xff_ffff) << 8 | u32::from(byte), 0]);
    let last = node.children.len().wrapping_sub(1);
    for (index, (&byte, child)) in node.children.iter().enumerate() {
        push_node(nodes, child, byte, if index == last { pops + 1 } else { 1 });
    }
    nodes[at][1] = ((nodes.len() - at) as u32) << 8 | pops;
}
