//! The vocabulary of scripted models: bytes, special tokens, and optionally words.
//!
//! A conversation is `BEGIN role "\n" content END` for each message and an open `BEGIN "assistant\n"` after the last.
//! Contents are tokenised as plain bytes and words, so they cannot open or close a message.

use std::collections::HashMap;

use bytes::Bytes;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use super::config::{Config, Script, ScriptedTokenizer};
use crate::api::{ChatRequest, EngineError, Vocabulary};
use crate::infill::InfillTokens;
use crate::template::no_template;
use crate::token_bytes::TokenBytes;
use crate::tokenizer_json::{AddedToken, ByteLevel, shown};

/// Begins a text (BOS) or a turn.
pub(super) const BEGIN: Token = 256;
/// Ends a turn and a generation (EOG).
pub(super) const END: Token = 257;
/// The first of the three tokens for fill in the middle, or of the words if there are none.
const AFTER_END: Token = 258;
/// The names of the tokens for fill in the middle: of the prefix, the suffix and the middle.
const INFILL: [&str; 3] = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
/// The smallest vocabulary with words: the common ones fit.
const WITH_WORDS_MIN: u32 = 1024;

/// Words that are frequent in prompts and answers of tests; each is in the vocabulary with and without a leading space.
/// None is a single byte: that is a token already, and a file cannot give one text two ids.
const COMMON: &str = "the of and to in is you that it he was for on are as with his they yes at be this have from or \
    one had by word but not what all were we when your can said there use an each which she do how their if will up \
    other about out many then them these so some her would make like him into time has look two more write go see \
    number no way could people my than first water been call who am its now find long down day did get come made may \
    part over new sound take only little work know place year live me back give most very after thing our just name \
    good sentence man think say great where help through much before line right too mean old any same tell boy follow \
    came want show also around form three small set put end does another well large must big even such because turn \
    here why ask went men read need land different home us move try kind hand picture again change off play spell air \
    away animal house point page letter mother answer found study still learn should America world Hello hello there \
    one two three four five six seven eight nine ten capital Japan Tokyo France Paris stream token node tree sap wood";

/// Syllables of the made-up words that fill the rest of a vocabulary.
const SYLLABLES: [&str; 16] = [
    "ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "za",
];

/// Tokens of a scripted model.
#[derive(Debug)]
pub struct ScriptedVocabulary {
    /// The first 256 tokens are the bytes themselves; the special tokens have none; then come the words.
    bytes: TokenBytes,
    tokens: HashMap<Box<[u8]>, Token>,
    /// The first word.
    words: Token,
    chat: bool,
}

impl ScriptedVocabulary {
    pub(crate) fn new(config: &Config) -> Self {
        let words = match &config.tokenizer {
            Some(tokenizer) => *tokenizer == ScriptedTokenizer::Words,
            None => matches!(config.script, Script::Words | Script::Tokens),
        };
        let first_word = AFTER_END + if config.infill { 3 } else { 0 };
        let count = if words {
            // Bounded, because the configuration may ask for any number and each word is made and stored.
            config.vocab.clamp(WITH_WORDS_MIN, 1 << 20)
        } else {
            first_word
        };
        let mut vocabulary = Self {
            bytes: TokenBytes::default(),
            tokens: HashMap::new(),
            words: first_word,
            chat: config.chat,
        };
        (0..=u8::MAX).for_each(|byte| vocabulary.bytes.push(&[byte]));
        (BEGIN..first_word).for_each(|_special| vocabulary.bytes.push(&[]));
        let common = COMMON.split_ascii_whitespace();
        let common = common.flat_map(|word| [format!(" {word}"), word.to_owned()]);
        let made_up = (0..).map(made_up_word);
        for word in common.chain(made_up) {
            if vocabulary.len() >= count {
                break;
            }
            vocabulary.add(word.as_bytes());
        }
        vocabulary
    }

    fn add(&mut self, word: &[u8]) {
        let token = self.len();
        // The list of common words repeats some, and a made-up word may be one of them.
        if !self.tokens.contains_key(word) {
            self.tokens.insert(word.into(), token);
            self.bytes.push(word);
        }
    }

    /// The tokens that begin and end a text.
    pub(crate) const fn around() -> (Token, Token) {
        (BEGIN, END)
    }

    pub(crate) fn len(&self) -> u32 {
        // At most 2^20, see `new`.
        u32::try_from(self.bytes.len()).unwrap_or(u32::MAX)
    }

    /// Returns a pseudo-random word, or a letter if there are only bytes.
    pub(super) fn word(&self, key: u64) -> Token {
        let pick = |count: u32| u32::try_from(key % u64::from(count)).unwrap_or(0);
        match self.len() - self.words {
            0 => u32::from(b'a') + pick(26),
            count => self.words + pick(count),
        }
    }

    /// Returns the text of a prompt without control tokens.
    pub(super) fn text(&self, prompt: &[Token]) -> String {
        let mut bytes = Vec::new();
        for &token in prompt {
            bytes.extend_from_slice(self.bytes(token));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the part of a prompt that scripts answer: of a conversation the content of the last message that is not
    /// from the assistant; else all tokens but control tokens.
    pub(super) fn subject(&self, prompt: &[Token]) -> Vec<Token> {
        // The last part is the open turn of the assistant, which has no end yet.
        let closed = prompt.split(|&token| token == END).rev().skip(1);
        for message in closed {
            let Some(message) = message.strip_prefix(&[BEGIN]) else {
                continue;
            };
            let Some(line) = message.iter().position(|&token| token == u32::from(b'\n')) else {
                continue;
            };
            if self.text(&message[..line]) != "assistant" {
                return message[line + 1..].to_vec();
            }
        }
        prompt
            .iter()
            .copied()
            .filter(|&token| !self.is_special(token))
            .collect()
    }

    fn tokenize_word(&self, word: &[u8], tokens: &mut Vec<Token>) {
        match self.tokens.get(word) {
            Some(&token) => tokens.push(token),
            // The first 256 tokens are the bytes themselves.
            None => tokens.extend(word.iter().map(|&byte| Token::from(byte))),
        }
    }
}

/// Returns a space and at least three syllables, different for each number.
fn made_up_word(number: usize) -> String {
    let mut word = String::from(" ");
    let mut left = number;
    for syllable in 0.. {
        word.push_str(SYLLABLES[left % 16]);
        left /= 16;
        if left == 0 && syllable >= 2 {
            break;
        }
    }
    word
}

impl Vocabulary for ScriptedVocabulary {
    fn size(&self) -> usize {
        self.len() as usize
    }

    fn file(&self) -> Option<Bytes> {
        let text = |token| self.name(token).unwrap_or_else(|| shown(self.bytes(token)));
        let tokens = (0..self.len()).map(text).collect();
        let control = |token| AddedToken {
            token,
            control: true,
            takes_left: false,
            takes_right: false,
        };
        let vocabulary = ByteLevel {
            lacking: Vec::new(),
            tokens,
            added: (BEGIN..self.words).map(control).collect(),
            // A word is one piece and matched whole; the parts between words are bytes, because there are no merges.
            patterns: Vec::from_iter((self.len() > self.words).then_some(" ?[A-Za-z0-9]+")),
            merges: Vec::new(),
            whole_pieces: true,
            bos: self.bos(),
        };
        Some(vocabulary.file())
    }

    fn tokenize(&self, text: &str, _special: bool) -> Vec<Token> {
        let bytes = text.as_bytes();
        if self.len() == self.words {
            return bytes.iter().map(|&byte| Token::from(byte)).collect();
        }
        let mut tokens = Vec::new();
        let mut start = 0;
        for at in 1..=bytes.len() {
            // A piece is a run of letters and digits with one space before it, or a single other byte.
            let inside = at < bytes.len()
                && bytes[at].is_ascii_alphanumeric()
                && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b' ');
            if !inside {
                self.tokenize_word(&bytes[start..at], &mut tokens);
                start = at;
            }
        }
        tokens
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.bytes.get(token)
    }

    fn is_special(&self, token: Token) -> bool {
        (BEGIN..self.words).contains(&token)
    }

    fn name(&self, token: Token) -> Option<String> {
        match token {
            BEGIN => Some("<s>".to_owned()),
            END => Some("</s>".to_owned()),
            token if self.is_special(token) => {
                let name = INFILL.get((token - AFTER_END) as usize);
                name.map(|name| (*name).to_owned())
            }
            _ => None,
        }
    }

    fn is_end(&self, token: Token) -> bool {
        token == END
    }

    fn bos(&self) -> Option<Token> {
        Some(BEGIN)
    }

    fn infill(&self) -> Option<InfillTokens> {
        InfillTokens::named(|text| {
            let at = INFILL.iter().position(|name| *name == text)?;
            let token = AFTER_END + Token::try_from(at).ok()?;
            self.is_special(token).then_some(token)
        })
    }

    fn end_of_turn(&self) -> Option<Token> {
        Some(END)
    }

    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        if !self.chat {
            return Err(no_template());
        }
        let mut tokens = Vec::new();
        for message in &chat.messages {
            if !["system", "user", "assistant", "tool"].contains(&message.role.as_str()) {
                let text = "roles are system, user, assistant and tool";
                return Err(EngineError::invalid(ErrorReason::BAD_ROLE, text));
            }
            tokens.push(BEGIN);
            tokens.extend(message.role.bytes().map(Token::from));
            tokens.push(Token::from(b'\n'));
            tokens.extend(self.tokenize(&message.content, false));
            tokens.push(END);
        }
        let last_is_answer = chat
            .messages
            .last()
            .is_some_and(|last| last.role == "assistant");
        if chat.continue_last && last_is_answer {
            // Takes the END of the last message away, so that the model continues it (EV-606).
            tokens.pop();
        } else {
            tokens.push(BEGIN);
            tokens.extend(b"assistant\n".iter().map(|&byte| Token::from(byte)));
        }
        Ok(tokens)
    }
}
