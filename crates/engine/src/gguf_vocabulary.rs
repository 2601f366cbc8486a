//! Vocabularies read from the header of a GGUF file, without its weights and without llama.cpp (AI-102).
//!
//! Tokens have the bytes that the embedded engine gives them; tests compare the two. Text is tokenised as there if the
//! vocabulary is byte-level and its pre-tokenizer is known (the module `byte_pairs`).

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use sapwood_proto::steer::Token;
use serde_json::Value;

use crate::api::Vocabulary as _;
use crate::byte_pairs::{self, PairTokens};
use crate::gguf::{GgufHeader, MAGIC, TokenList};
use crate::infill::InfillTokens;
use crate::infill::tokens::INFILL_TEXTS;
use crate::token_bytes::TokenBytes;
use crate::tokenizer::{FileTokenizer, SpecialTokens, TokenizerFiles};
use crate::tokenizer_json::{AddedToken, alphabet};

/// Whether a file begins as a GGUF file.
///
/// # Errors
/// It cannot be read.
pub fn is_gguf(path: &Path) -> io::Result<bool> {
    let mut begin = Vec::new();
    File::open(path)?
        .take(MAGIC.len() as u64)
        .read_to_end(&mut begin)?;
    Ok(begin == MAGIC)
}

/// The vocabulary of a GGUF file.
pub struct GgufVocabulary {
    bytes: TokenBytes,
    /// The names of control tokens.
    controls: HashMap<Token, String>,
    ends: BTreeSet<Token>,
    eos: Option<Token>,
    bos: Option<Token>,
    infill: Option<InfillTokens>,
    tokenizer: Option<Box<FileTokenizer>>,
}

/// Why there is no vocabulary. The messages follow the name of the file.
#[derive(Debug, thiserror::Error)]
pub enum GgufVocabularyError {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Read(#[from] io::Error),
    /// It is no GGUF file, or damaged.
    #[error("it is not usable: {0}")]
    Damaged(String),
    /// The bytes of such tokens are not known.
    #[error(
        "a GGUF vocabulary of the kind {0:?} is not read here, only `gpt2` and `llama` are: give the tokenizer.json of the model"
    )]
    Kind(String),
}

impl GgufVocabulary {
    /// Reads the header of a file. Blocks.
    ///
    /// # Errors
    /// [`GgufVocabularyError`].
    pub fn read(path: &Path) -> Result<Self, GgufVocabularyError> {
        Self::of_header(BufReader::new(File::open(path)?))
    }

    /// Reads a header; `bytes` may continue after it.
    pub(crate) fn of_header(bytes: impl Read) -> Result<Self, GgufVocabularyError> {
        let damaged = |why: String| GgufVocabularyError::Damaged(why);
        let (header, list) =
            GgufHeader::read_vocabulary(bytes).map_err(|error| damaged(error.to_string()))?;
        let kind = Kind::of(&header)?;
        let size = list.texts.len();
        if size == 0 {
            return Err(damaged("it has no tokens".to_owned()));
        }
        if !list.types.is_empty() && list.types.len() < size {
            let types = list.types.len();
            return Err(damaged(format!("it has {types} types of {size} tokens")));
        }
        let table = TokenTable::new(&header, kind, &list);
        let mut bytes = TokenBytes::default();
        let mut controls = HashMap::new();
        let mut added = 0;
        for (id, text) in (0..).zip(&list.texts) {
            let token = table.types[id as usize];
            if text.len() > TOKEN_BYTES_MAX {
                let length = text.len();
                return Err(damaged(format!(
                    "its token {id} has {length} bytes, and {TOKEN_BYTES_MAX} is the most"
                )));
            }
            let decoded = token.bytes(kind, text);
            added += decoded.len().saturating_sub(text.len());
            if added > ADDED_BYTES_MAX {
                return Err(damaged(format!(
                    "its tokens up to {id} have too many letters that are no bytes"
                )));
            }
            bytes.push(&decoded);
            if token == TokenType::Control {
                controls.insert(id, String::from_utf8_lossy(text).into_owned());
            }
        }
        let bos = table.bos(&header, kind);
        let tokenizer = tokenizer(&header, &table, list, bos);
        Ok(Self {
            bytes,
            controls,
            eos: table.eos,
            ends: table.ends,
            bos,
            infill: table
                .infill
                .and_then(|infill| infill.unless_any(|id| bos == Some(id))),
            tokenizer,
        })
    }

    /// The number of tokens.
    #[must_use]
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes of a token; none of a control token, and of ids beyond the vocabulary.
    #[must_use]
    pub fn bytes(&self, token: Token) -> &[u8] {
        self.bytes.get(token)
    }

    /// The name of a control token; `None` for others.
    #[must_use]
    pub fn name(&self, token: Token) -> Option<&str> {
        self.controls.get(&token).map(String::as_str)
    }

    /// Whether a text ends with this token.
    #[must_use]
    pub fn is_end(&self, token: Token) -> bool {
        self.ends.contains(&token)
    }

    /// The EOS token, else the first of the tokens that end a text.
    #[must_use]
    pub fn eos(&self) -> Option<Token> {
        // Some names of tokens say that the one that the header names does not end a text (see `ends`).
        let named = self.eos.filter(|eos| self.ends.contains(eos));
        named.or_else(|| self.ends.first().copied())
    }

    /// The BOS token, if the model wants one before a text.
    #[must_use]
    pub const fn bos(&self) -> Option<Token> {
        self.bos
    }

    /// The tokens for fill in the middle, if it has them.
    #[must_use]
    pub const fn infill(&self) -> Option<InfillTokens> {
        self.infill
    }

    /// The tokens of a text, in which names of control tokens are plain text. `None`: the file does not say how it is
    /// tokenised, or not in a way that is known here.
    #[must_use]
    pub fn tokenize(&self, text: &str) -> Option<Vec<Token>> {
        Some(self.tokenizer.as_ref()?.tokenize(text, false))
    }
}

impl std::fmt::Debug for GgufVocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GgufVocabulary")
            .field("size", &self.size())
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// The tokenizer of the vocabulary, if its file can be written.
fn tokenizer(
    header: &GgufHeader,
    table: &TokenTable,
    list: TokenList,
    bos: Option<Token>,
) -> Option<Box<FileTokenizer>> {
    let added = (0..).zip(&table.types).filter_map(|(token, kind)| {
        kind.is_added().then_some(AddedToken {
            token,
            control: *kind == TokenType::Control,
            takes_left: false,
            takes_right: false,
        })
    });
    let file = byte_pairs::file(header, || PairTokens {
        added: added.collect(),
        texts: list
            .texts
            .into_iter()
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .collect(),
        bos,
    });
    let read = file.map_err(|why| why.to_string()).and_then(|tokenizer| {
        let files = TokenizerFiles {
            tokenizer,
            config: Value::Null,
            generation: Value::Null,
            template: None,
        };
        FileTokenizer::new(&files, SpecialTokens::default()).map_err(|why| why.to_string())
    });
    match read {
        Ok(tokenizer) => Some(Box::new(tokenizer)),
        Err(why) => {
            tracing::info!(%why, "text becomes the longest tokens that match");
            None
        }
    }
}

/// Bytes of a token's text in the file. The longest of known models are runs of some hundred spaces, of two or three bytes each.
const TOKEN_BYTES_MAX: usize = 4 << 10;
/// Bytes that all tokens may have more than their texts: a letter that stands for no byte becomes a text with the whole token
/// in it ([`byte_level`]), so that a token grows with the square of its length.
const ADDED_BYTES_MAX: usize = 16 << 20;

/// The kinds of vocabularies that are read, by GGUF's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// `gpt2`: one character per byte.
    ByteLevel,
    /// `llama`, of SentencePiece: as text, with a mark in place of a space.
    Marked,
}

impl Kind {
    fn of(header: &GgufHeader) -> Result<Self, GgufVocabularyError> {
        let pre = header.text("tokenizer.ggml.pre").unwrap_or_default();
        match header.text("tokenizer.ggml.model").unwrap_or_default() {
            "llama" => Ok(Self::Marked),
            "gpt2" if MARKED_PAIRS.contains(&pre) => Err(GgufVocabularyError::Kind(pre.to_owned())),
            "gpt2" => Ok(Self::ByteLevel),
            other => Err(GgufVocabularyError::Kind(other.to_owned())),
        }
    }

    /// The ids that llama.cpp takes for BOS and EOS if the file does not name them.
    const fn defaults(self) -> (Token, Token) {
        match self {
            Self::ByteLevel => (11, 11),
            Self::Marked => (1, 2),
        }
    }
}

/// Pre-tokenizers of byte-pair vocabularies that are not byte-level.
const MARKED_PAIRS: [&str; 4] = ["gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe"];
/// What stands for a space in text.
const SPACE_MARK: &str = "\u{2581}";

/// What a token is to llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Normal,
    /// Control tokens and the unknown token: no text of an output.
    Control,
    /// Text as it is, found before a text is split.
    UserDefined,
    /// One byte, by its name `<0x0A>`.
    Byte,
    /// Neither: it has no text.
    Unused,
}

impl TokenType {
    const fn of(number: u8) -> Self {
        match number {
            1 => Self::Normal,
            2 | 3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Unused,
        }
    }

    /// Whether it is found before a text is split.
    const fn is_added(self) -> bool {
        matches!(self, Self::Control | Self::UserDefined)
    }

    /// The bytes of a token of this type.
    fn bytes(self, kind: Kind, text: &[u8]) -> Vec<u8> {
        match (self, kind) {
            (Self::Control | Self::Unused, _) => Vec::new(),
            (Self::UserDefined, _) => text.to_vec(),
            (Self::Byte, _) => vec![byte_of_name(text)],
            (Self::Normal, Kind::ByteLevel) => byte_level(text),
            (Self::Normal, Kind::Marked) => unmarked(text),
        }
    }
}

/// The byte of the name `<0x0A>`; 0 for others, as in llama.cpp.
fn byte_of_name(name: &[u8]) -> u8 {
    let digits = name
        .get(3..5)
        .and_then(|digits| std::str::from_utf8(digits).ok());
    digits
        .and_then(|digits| u8::from_str_radix(digits, 16).ok())
        .unwrap_or(0)
}

fn unmarked(text: &[u8]) -> Vec<u8> {
    let mark = SPACE_MARK.as_bytes();
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(mark) {
            bytes.push(b' ');
            rest = after;
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    bytes
}

/// The bytes of byte-level characters. Another character gives what llama.cpp makes of it: the text of an output is to be
/// the same, however useless.
fn byte_level(text: &[u8]) -> Vec<u8> {
    use std::sync::LazyLock;
    static BYTES: LazyLock<HashMap<char, u8>> =
        LazyLock::new(|| alphabet().zip(0..=u8::MAX).collect());
    let mut bytes = Vec::with_capacity(text.len());
    for letter in String::from_utf8_lossy(text).chars() {
        match BYTES.get(&letter) {
            Some(&byte) => bytes.push(byte),
            None => {
                bytes.extend_from_slice(b"[UNK_BYTE_0x");
                for byte in letter.encode_utf8(&mut [0; 4]).bytes() {
                    bytes.extend(format!("{byte:02x}").bytes());
                }
                bytes.extend_from_slice(text);
                bytes.push(b']');
            }
        }
    }
    bytes
}

/// The types of all tokens, and those with a role, after what llama.cpp infers from their texts.
struct TokenTable {
    types: Vec<TokenType>,
    ends: BTreeSet<Token>,
    eos: Option<Token>,
    infill: Option<InfillTokens>,
}

impl TokenTable {
    fn new(header: &GgufHeader, kind: Kind, list: &TokenList) -> Self {
        let types = (0..list.texts.len())
            .map(|id| TokenType::of(list.types.get(id).copied().unwrap_or(1)))
            .collect();
        let mut table = Self {
            types,
            ends: BTreeSet::new(),
            eos: None,
            infill: None,
        };
        let ids: HashMap<&[u8], Token> = list.texts.iter().map(Vec::as_slice).zip(0..).collect();
        let find = |text: &&str| ids.get(text.as_bytes()).copied();
        let (_, default) = kind.defaults();
        table.eos = table
            .named(header, "eos")
            .or_else(|| table.known(u64::from(default)));
        for role in END_ROLES {
            let token = table.role(header, role, find);
            table.ends.extend(token);
        }
        let infill = [0, 1, 2].map(|part| {
            let role = Role {
                keys: &INFILL_KEYS[part],
                texts: INFILL_TEXTS[part],
            };
            table.role(header, &role, find)
        });
        for token in ENDS.iter().filter_map(find) {
            table.set(token, TokenType::Control);
            table.ends.insert(token);
        }
        for token in SHOWN.iter().filter_map(find) {
            table.set(token, TokenType::UserDefined);
        }
        table.ends.extend(table.eos);
        let is_end = |text: &str| find(&text).filter(|token| table.ends.contains(token));
        // In vocabularies that have these, `<|end|>` and `</s>` are something else.
        let calls = is_end("<|call|>").or_else(|| is_end("<|calls|>")).is_some();
        let returns = is_end("<|return|>")
            .or_else(|| is_end("<|flush|>"))
            .is_some();
        let part = is_end("<|end|>").filter(|_| calls && returns);
        let marks = ["<|tool_response>", "<|plamo:eos|>"];
        let normal = is_end("</s>").filter(|_| marks.iter().any(|text| is_end(text).is_some()));
        if let Some(token) = part {
            table.ends.remove(&token);
            table.set(token, TokenType::UserDefined);
        }
        if let Some(token) = normal {
            table.ends.remove(&token);
            table.set(token, TokenType::Normal);
        }
        let infill = InfillTokens::of(infill);
        let infill = infill.and_then(|infill| infill.unless_any(|id| table.ends.contains(&id)));
        table.infill = infill.and_then(|infill| {
            let is_added = |id: Token| table.types[id as usize].is_added();
            infill.if_marks(is_added, |id| {
                String::from_utf8_lossy(&list.texts[id as usize])
            })
        });
        table
    }

    /// The token of a role: the one that the file names, or one that is found by its text, which makes it a control token.
    fn role(
        &mut self,
        header: &GgufHeader,
        role: &Role,
        find: impl Fn(&&str) -> Option<Token>,
    ) -> Option<Token> {
        let named = role.keys.iter().find_map(|key| self.named(header, key));
        let found = || role.texts.iter().find_map(find);
        let token = named.or_else(found);
        if let (None, Some(found)) = (named, token) {
            self.set(found, TokenType::Control);
        }
        token
    }

    fn set(&mut self, token: Token, to: TokenType) {
        if let Some(of) = self.types.get_mut(token as usize) {
            *of = to;
        }
    }

    /// The token that the file names for a role.
    fn named(&self, header: &GgufHeader, role: &str) -> Option<Token> {
        self.known(header.number(&format!("tokenizer.ggml.{role}_token_id"))?)
    }

    fn known(&self, id: u64) -> Option<Token> {
        let is_known = |id: &Token| (*id as usize) < self.types.len();
        Token::try_from(id).ok().filter(is_known)
    }

    /// The BOS token, if the model wants one before a text.
    fn bos(&self, header: &GgufHeader, kind: Kind) -> Option<Token> {
        let pre = header.text("tokenizer.ggml.pre").unwrap_or_default();
        let default = match kind {
            Kind::Marked => true,
            Kind::ByteLevel => BEGUN.contains(&pre),
        };
        let wanted = header
            .number("tokenizer.ggml.add_bos_token")
            .map_or(default, |wanted| wanted != 0);
        let (default, _) = kind.defaults();
        let named = self.named(header, "bos");
        named
            .or_else(|| self.known(u64::from(default)))
            .filter(|_| wanted)
    }
}

/// Pre-tokenizers of models that want a BOS token unless the file says otherwise.
const BEGUN: [&str; 11] = [
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
    "chameleon",
];

/// What a token is used for.
struct Role {
    /// Where the file may name the token: `tokenizer.ggml.KEY_token_id`.
    keys: &'static [&'static str],
    /// The texts by which llama.cpp finds a token that is not named.
    texts: &'static [&'static str],
}

/// The roles of tokens that end a text.
const END_ROLES: &[Role] = &[
    Role {
        keys: &["eot"],
        // They are all in `ENDS`.
        texts: &[],
    },
    Role {
        keys: &["eom"],
        texts: &["<|eom_id|>"],
    },
    Role {
        keys: &["fim_pad"],
        texts: &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    },
    Role {
        keys: &["fim_rep"],
        texts: &[
            "<|fim_repo|>",
            "<|repo_name|>",
            "<fim-repo>",
            "<REPO>",
            "<reponame>",
        ],
    },
    Role {
        keys: &["fim_sep"],
        texts: &["<|file_sep|>"],
    },
];

/// Where the file may name the tokens of a prefix, a suffix and the middle, the older key first, as llama.cpp has it.
const INFILL_KEYS: [[&str; 2]; 3] = [
    ["prefix", "fim_pre"],
    ["suffix", "fim_suf"],
    ["middle", "fim_mid"],
];

/// Texts of tokens that end a text, whatever the file says. All texts by which llama.cpp finds an EOT token are among them.
const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
];

/// Texts of control tokens that are part of an output.
const SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

#[cfg(test)]
mod tests;
