//! [`MadeVocabulary`]: a vocabulary of any size, made by a recipe and a seed, with the shape of those of models: bytes,
//! numbers, the punctuation of JSON and code, words in four forms, and some words of other scripts.

use std::collections::HashMap;
use std::sync::Arc;

use sapwood_control::trie::{HostModel, TokenEntry};
use sapwood_engine::api::{ChatRequest, EngineError, SharedVocabulary, Vocabulary};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

/// A vocabulary. Its tokenizer takes the longest token that fits.
#[derive(Debug)]
pub struct MadeVocabulary {
    tokens: Vec<Vec<u8>>,
    ids: HashMap<Vec<u8>, Token>,
    longest: usize,
}

/// Begins a text.
const BEGIN: Token = 256;
/// Ends a text.
const END: Token = 257;

const PUNCTUATION: &[&str] = &[
    "\": ", "\",", "\", \"", "\":\"", "\": \"", "{\"", "\"}", "\"},", "},{", "[\"", "\"]", "],",
    "[{", "}]", ": ", ", ", "  ", "    ", "        ", "\n\n", ",\n", "{\n", "};\n", ");\n", "();",
    "()", "((", "))", "->", "=>", "==", "!=", "<=", ">=", "&&", "||", "//", "/*", "*/", "...",
    "--", "++", "::", "##", "###", "\\n", "\\\"", "':", "',", "' ", "</", "/>", ". ", "! ", "? ",
    "; ", ".\n", " \"", " (", " {", " [", " =", " +", " -", " *", " /", "%)", "\r\n", "\t\t",
];
const SYLLABLES: &[&str] = &[
    "a", "e", "i", "o", "u", "an", "er", "in", "on", "re", "ti", "es", "al", "en", "st", "or",
    "ar", "te", "ing", "ion", "the", "co", "de", "con", "pro", "ment", "ly", "ed", "ab", "ex",
    "com", "per", "man", "ter", "ver", "sh", "ch", "tion", "able", "ness", "un", "di", "mi", "lo",
    "ra", "se", "ta", "vi", "wa", "po", "ma", "ne", "li", "bo", "ca", "fu", "gr", "pl", "tr",
];
const CYRILLIC: &[&str] = &[
    "по", "на", "ра", "ко", "то", "не", "ст", "но", "ни", "во", "ре", "ла", "ет", "ия",
];
const IDEOGRAPHS: u32 = 0x4e00;

impl MadeVocabulary {
    /// A vocabulary of `size` tokens, at least 4,096.
    #[must_use]
    pub fn new(size: usize, seed: u64) -> Arc<Self> {
        let mut made = Self {
            tokens: Vec::with_capacity(size),
            ids: HashMap::with_capacity(size),
            longest: 0,
        };
        (0..=u8::MAX).for_each(|byte| made.push(vec![byte]));
        // Special tokens have no bytes.
        made.tokens.extend([Vec::new(), Vec::new()]);
        let numbers = (0..1_000).map(|number| number.to_string());
        let fixed = PUNCTUATION.iter().map(|&it| it.to_owned()).chain(numbers);
        fixed.for_each(|text| made.push(text.into_bytes()));
        let mut random = Random(seed);
        while made.tokens.len() < size.max(4_096) {
            made.push_word(&mut random, size);
        }
        made.tokens.truncate(size.max(4_096));
        Arc::new(made)
    }

    fn push_word(&mut self, random: &mut Random, size: usize) {
        let word = match random.below(20) {
            0 => random.word(CYRILLIC, 2),
            1 => (0..=random.below(2))
                .filter_map(|_| char::from_u32(IDEOGRAPHS + random.below(4_000) as u32))
                .collect(),
            _ => random.word(SYLLABLES, 4),
        };
        let mut letters = word.chars();
        let first = letters.next().into_iter().flat_map(char::to_uppercase);
        let capital: String = first.chain(letters).collect();
        for form in [format!(" {word}"), word, format!(" {capital}"), capital] {
            if self.tokens.len() < size {
                self.push(form.into_bytes());
            }
        }
    }

    fn push(&mut self, bytes: Vec<u8>) {
        if !self.ids.contains_key(&bytes) {
            self.longest = self.longest.max(bytes.len());
            self.ids.insert(bytes.clone(), self.tokens.len() as Token);
            self.tokens.push(bytes);
        }
    }

    /// The vocabulary as controllers see it.
    #[must_use]
    pub fn host_model(self: &Arc<Self>) -> Arc<HostModel> {
        let special = |id| id == BEGIN || id == END;
        let entries = (0..).zip(&self.tokens).map(|(id, bytes)| {
            if special(id) {
                TokenEntry::special(if id == BEGIN { "<s>" } else { "</s>" })
            } else {
                TokenEntry::text(bytes.clone())
            }
        });
        let tokenizer = Arc::clone(self);
        let tokenize = move |text: &str| tokenizer.tokenize(text, false);
        Arc::new(HostModel::new(entries.collect(), END, tokenize))
    }

    /// The vocabulary as the engine sees it.
    #[must_use]
    pub fn shared(self: &Arc<Self>) -> SharedVocabulary {
        Arc::clone(self) as _
    }
}

impl Vocabulary for MadeVocabulary {
    fn size(&self) -> usize {
        self.tokens.len()
    }

    fn tokenize(&self, text: &str, _special: bool) -> Vec<Token> {
        let mut rest = text.as_bytes();
        let mut tokens = Vec::new();
        while !rest.is_empty() {
            let found = (1..=self.longest.min(rest.len()))
                .rev()
                .find_map(|len| self.ids.get(&rest[..len]).map(|&id| (id, len)));
            // Each byte is a token.
            let Some((id, len)) = found else { break };
            tokens.push(id);
            rest = &rest[len..];
        }
        tokens
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.tokens.get(token as usize).map_or(&[], Vec::as_slice)
    }

    fn is_special(&self, token: Token) -> bool {
        token == BEGIN || token == END
    }

    fn name(&self, token: Token) -> Option<String> {
        match token {
            BEGIN => Some("<s>".to_owned()),
            END => Some("</s>".to_owned()),
            _ => None,
        }
    }

    fn is_end(&self, token: Token) -> bool {
        token == END
    }

    fn bos(&self) -> Option<Token> {
        Some(BEGIN)
    }

    fn end_of_turn(&self) -> Option<Token> {
        None
    }

    fn chat(&self, _chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        Err(EngineError::internal(ErrorReason::NONE, "no chat template"))
    }
}

/// A small generator of pseudo-random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 33) as usize % limit
    }

    /// One of some things.
    pub fn pick<'t, T>(&mut self, things: &'t [T]) -> &'t T {
        &things[self.below(things.len())]
    }

    fn word(&mut self, parts: &[&str], most: usize) -> String {
        (0..=self.below(most)).map(|_| *self.pick(parts)).collect()
    }

    /// A word of Latin letters.
    pub fn latin(&mut self) -> String {
        self.word(SYLLABLES, 3)
    }
}
