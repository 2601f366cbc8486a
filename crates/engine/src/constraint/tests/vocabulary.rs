//! A vocabulary of bytes, some longer tokens, control tokens and two EOG tokens.

use std::collections::HashMap;
use std::sync::Arc;

use sapwood_proto::steer::Token;

use crate::api::{ChatRequest, EngineError, SharedVocabulary, Vocabulary};

/// The first EOG token.
pub(super) const END: Token = 256;
/// The second one.
pub(super) const END_OF_TURN: Token = 257;
/// A control token that ends nothing.
pub(super) const CONTROL: Token = 258;

const WORDS: [&str; 28] = [
    "ab", "abc", "bc", "{\"", "\":", "\",\"", "\"}", " \"", "true", "false", "null", "name", "age",
    "12", "hello", " world", "hel", "é", "né", "日本", "},", "[[", "]]", "\n", "an", "ana", "nas",
    " is",
];

/// How a tokenizer treats the beginning of a text.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    Plain,
    /// A space comes before it, as in SentencePiece.
    Spaced,
}

pub(super) struct SmallVocabulary {
    words: Vec<Vec<u8>>,
    ids: HashMap<Vec<u8>, Token>,
    beginning: Beginning,
    has_ends: bool,
}

/// The vocabulary of most tests.
pub(super) fn small() -> SharedVocabulary {
    vocabulary(Beginning::Plain, true)
}

pub(super) fn vocabulary(beginning: Beginning, has_ends: bool) -> SharedVocabulary {
    let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.resize(CONTROL as usize + 1, Vec::new());
    words.extend(WORDS.map(|word| word.as_bytes().to_vec()));
    let numbered = words.iter().zip(0..).filter(|(word, _)| !word.is_empty());
    // The last one of equal words is the one that the tokenizer uses.
    let ids = numbered.map(|(word, id)| (word.clone(), id)).collect();
    Arc::new(SmallVocabulary {
        words,
        ids,
        beginning,
        has_ends,
    })
}

impl Vocabulary for SmallVocabulary {
    fn size(&self) -> usize {
        self.words.len()
    }

    fn tokenize(&self, text: &str, _special: bool) -> Vec<Token> {
        let spaced = format!(" {text}");
        let mut rest = match self.beginning {
            Beginning::Plain => text.as_bytes(),
            Beginning::Spaced => spaced.as_bytes(),
        };
        let mut tokens = Vec::new();
        while !rest.is_empty() {
            // The longest token first.
            let len = (1..=rest.len().min(8))
                .rev()
                .find(|&len| self.ids.contains_key(&rest[..len]));
            let len = len.unwrap();
            tokens.push(self.ids[&rest[..len]]);
            rest = &rest[len..];
        }
        tokens
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.words.get(token as usize).map_or(&[], Vec::as_slice)
    }

    fn is_special(&self, token: Token) -> bool {
        (END..=CONTROL).contains(&token)
    }

    fn name(&self, token: Token) -> Option<String> {
        match token {
            END => Some("<|end|>".to_owned()),
            END_OF_TURN => Some("<|turn|>".to_owned()),
            CONTROL => Some("<|tool|>".to_owned()),
            _ => None,
        }
    }

    fn is_end(&self, token: Token) -> bool {
        self.has_ends && matches!(token, END | END_OF_TURN)
    }

    fn bos(&self) -> Option<Token> {
        None
    }

    fn end_of_turn(&self) -> Option<Token> {
        Some(END_OF_TURN)
    }

    fn chat(&self, _chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        unreachable!("constraints use no templates")
    }
}
