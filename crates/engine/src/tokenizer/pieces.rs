//! The bytes of each token, by the encoding of its tokenizer.

use std::collections::HashMap;

use sapwood_proto::steer::Token;
use serde_json::Value;
use tokenizers::Tokenizer as Machine;

use super::VocabularyError;
use crate::token_bytes::TokenBytes;
use crate::tokenizer_json::alphabet;

/// The bytes and names of a vocabulary's tokens.
pub(super) struct TokenPieces {
    bytes: TokenBytes,
    /// Control tokens and their names.
    controls: HashMap<Token, String>,
}

/// How a file encodes tokens.
enum PieceEncoding {
    /// One character per byte.
    ByteLevel(HashMap<char, u8>),
    /// As text, with this string in place of a space.
    Marked(String),
}

impl TokenPieces {
    /// Reads the tokens of `machine`, which was built from `file`.
    pub(super) fn of(machine: &Machine, file: &[u8]) -> Result<Self, VocabularyError> {
        let encoding_of = encoding(file)?;
        let added = machine.get_added_tokens_decoder();
        let named = machine.get_vocab(true);
        let size = named.values().max().map_or(0, |last| *last as usize + 1);
        // Before the tables are allocated: ids come from the file, and one huge id would make huge tables.
        if size == 0 || size > TOKENS_MAX {
            return Err(VocabularyError::Size);
        }
        let mut texts = vec![String::new(); size];
        for (text, id) in named {
            texts[id as usize] = text;
        }
        let (mut bytes, mut controls) = (TokenBytes::default(), HashMap::new());
        for (id, text) in (0..).zip(texts) {
            match added.get(&id) {
                Some(token) if token.special => {
                    controls.insert(id, text);
                    bytes.push(&[]);
                }
                // Added tokens are plain text in the file, not in its encoding.
                Some(_) => bytes.push(text.as_bytes()),
                None => bytes.push(&encoding_of.bytes(&text)),
            }
        }
        Ok(Self { bytes, controls })
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the bytes of a token; none for a control token.
    pub(super) fn bytes(&self, token: Token) -> &[u8] {
        self.bytes.get(token)
    }

    pub(super) fn is_control(&self, token: Token) -> bool {
        self.controls.contains_key(&token)
    }

    pub(super) fn name(&self, token: Token) -> Option<&str> {
        self.controls.get(&token).map(String::as_str)
    }

    /// Returns the names of the control tokens.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.controls.values().map(String::as_str)
    }
}

/// Finds the encoding in the decoder of the file.
fn encoding(file: &[u8]) -> Result<PieceEncoding, VocabularyError> {
    let file: Value =
        serde_json::from_slice(file).map_err(|error| VocabularyError::Syntax(error.to_string()))?;
    let decoder = file.get("decoder").unwrap_or(&Value::Null);
    let listed = decoder.get("decoders").and_then(Value::as_array);
    // A decoder is a single step, or a sequence of steps.
    let steps = listed.map_or_else(|| std::slice::from_ref(decoder), Vec::as_slice);
    let step = |kind: &str| {
        let mut steps = steps.iter();
        steps.find(|step| step.get("type").is_some_and(|name| name == kind))
    };
    if step("ByteLevel").is_some() {
        return Ok(PieceEncoding::ByteLevel(
            alphabet().zip(0..=u8::MAX).collect(),
        ));
    }
    let mark = match (step("Metaspace"), step("Replace")) {
        (Some(step), _) => step.get("replacement"),
        (None, Some(step)) => step.pointer("/pattern/String"),
        (None, None) => None,
    };
    let mark = mark.and_then(Value::as_str).filter(|mark| !mark.is_empty());
    mark.map(|mark| PieceEncoding::Marked(mark.to_owned()))
        .ok_or(VocabularyError::Kind)
}

impl PieceEncoding {
    fn bytes(&self, text: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel(alphabet) => {
                let mut bytes = Vec::with_capacity(text.len());
                for shown in text.chars() {
                    match alphabet.get(&shown) {
                        Some(byte) => bytes.push(*byte),
                        // A character outside the alphabet stands for itself, as in Transformers' decoder.
                        None => bytes.extend(shown.encode_utf8(&mut [0; 4]).bytes()),
                    }
                }
                bytes
            }
            // SentencePiece spells bytes without a token of their own as `<0x0A>`.
            Self::Marked(mark) => match byte(text) {
                Some(byte) => vec![byte],
                None => text.replace(mark, " ").into_bytes(),
            },
        }
    }
}

/// Parses `<0x0A>`.
fn byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The maximum of tokens; the largest known vocabularies have a quarter of a million.
const TOKENS_MAX: usize = 1 << 22;
