//! Vocabularies read from a `tokenizer.json`, for models that run on other servers (LM-712).

mod pieces;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::time::SystemTime;

use bytes::Bytes;
use sapwood_proto::steer::Token;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer as Machine};

use self::pieces::TokenPieces;
use crate::api::{ChatRequest, EngineError, Vocabulary};
use crate::control_names;
use crate::infill::InfillTokens;
use crate::stop;
use crate::template::{self, SpecialTexts, Template, no_template};

/// The files of a tokenizer, as read.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Bytes,
    /// `tokenizer_config.json`: BOS and EOS tokens, and usually the chat template.
    pub config: Value,
    /// `generation_config.json`: the EOG tokens.
    pub generation: Value,
    /// `chat_template.jinja`.
    pub template: Option<String>,
}

impl TokenizerFiles {
    /// Reads the files of a folder, or `tokenizer.json` alone if the path is that of a file. Blocks.
    ///
    /// # Errors
    /// The file does not exist, cannot be read or is larger than [`FILE_BYTES_MAX`]. Only `tokenizer.json` is required.
    pub fn read(path: &Path) -> io::Result<Self> {
        // A path that does not exist comes here too, and reading it gives the error of the system.
        if !path.is_dir() {
            return Ok(Self {
                tokenizer: whole(path)?.into(),
                ..Self::default()
            });
        }
        let beside = |name: &str| match whole(&path.join(name)) {
            Ok(data) => Ok(Some(data)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let json = |name: &str| {
            let read = beside(name)?.map(|data| serde_json::from_slice(&data));
            Ok::<Value, io::Error>(read.transpose()?.unwrap_or_default())
        };
        // Refused if it is not UTF-8, rather than repaired: a template with replaced characters would prompt the model
        // wrongly.
        let template = beside("chat_template.jinja")?.map(String::from_utf8);
        Ok(Self {
            tokenizer: whole(&path.join("tokenizer.json"))?.into(),
            config: json("tokenizer_config.json")?,
            generation: json("generation_config.json")?,
            template: template.transpose().map_err(io::Error::other)?,
        })
    }

    /// Returns the chat template of these files; of several named ones the default.
    fn template(&self) -> Option<&str> {
        let configured = self.config.get("chat_template");
        let listed = configured.and_then(Value::as_array).and_then(|list| {
            let is_default = |one: &&Value| one.get("name").is_some_and(|name| name == "default");
            list.iter().find(is_default)?.get("template")
        });
        let configured = listed.or(configured).and_then(Value::as_str);
        // The file of its own wins, as in Transformers, which writes newer templates there.
        self.template.as_deref().or(configured)
    }

    /// Returns the text of a token that the configuration names, as a string or as an object with its content.
    fn named(&self, key: &str) -> Option<&str> {
        let token = self.config.get(key)?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    }
}

fn whole(path: &Path) -> io::Result<Vec<u8>> {
    // Before reading, so that a wrong path to a huge file costs no memory.
    if std::fs::metadata(path)?.len() > FILE_BYTES_MAX as u64 {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "the file is larger than any tokenizer's: check the path",
        ));
    }
    std::fs::read(path)
}

/// Special tokens reported by a source that is more reliable than the files: the server that runs the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The BOS token, or `Some(None)` for no BOS token; if `None`, the files decide.
    pub bos: Option<Option<Token>>,
    /// EOG tokens, in addition to those of the files.
    pub ends: Vec<Token>,
    /// The tokens for fill in the middle and their order; if `None`, those with well-known texts.
    pub infill: Option<InfillTokens>,
}

/// Why no vocabulary could be built. The messages name what is wrong with a file, for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// The file cannot be parsed as a tokenizer.
    #[error("it is not a tokenizer.json: {0}")]
    Syntax(String),
    /// The bytes of its tokens cannot be determined.
    #[error(
        "the bytes of single tokens are not known for this kind of tokenizer: only byte-level and SentencePiece ones are \
         supported"
    )]
    Kind,
    /// It has no tokens, or ids that are larger than any model's.
    #[error("it has no tokens, or ids larger than those of any model")]
    Size,
    /// The chat template beside it is not usable.
    #[error("{0}")]
    Template(String),
}

/// A vocabulary from files. Immutable; reads nothing after it is built.
pub struct FileTokenizer {
    file: Bytes,
    /// Tokenises the texts of control tokens as plain text.
    plain: Machine,
    /// Tokenises the texts of control tokens as those tokens. A copy of the other, made when it is first needed.
    special: OnceLock<Machine>,
    pieces: TokenPieces,
    /// Bytes of the longest token.
    token_bytes_max: usize,
    bos: Option<Token>,
    /// The one that `tokenizer_config.json` names.
    eos: Option<Token>,
    ends: Vec<Token>,
    infill: Option<InfillTokens>,
    template: Option<Template>,
}

impl fmt::Debug for FileTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

impl FileTokenizer {
    /// Reads a vocabulary. Slow and blocking.
    ///
    /// # Errors
    /// [`VocabularyError`].
    pub fn new(files: &TokenizerFiles, reported: SpecialTokens) -> Result<Self, VocabularyError> {
        let syntax = |error: &dyn fmt::Display| VocabularyError::Syntax(error.to_string());
        let mut plain = Machine::from_bytes(&files.tokenizer).map_err(|error| syntax(&error))?;
        // A file may request padding or truncation to a fixed length; prompts here keep their own length.
        plain
            .with_truncation(None)
            .map_err(|error| syntax(&error))?;
        plain.with_padding(None);
        let pieces = TokenPieces::of(&plain, &files.tokenizer)?;
        // The server that runs the model knows its tokens better than files beside it.
        let bos = match reported.bos {
            Some(reported) => reported,
            None => bos(&plain, files, &pieces),
        };
        let mut ends = reported.ends;
        let named = files.named("eos_token");
        let eos = named.and_then(|text| plain.token_to_id(text));
        ends.extend(eos);
        // One id, or a list of them.
        let listed = files.generation.get("eos_token_id").map(|ids| {
            let list = ids.as_array().map(Vec::as_slice);
            list.unwrap_or_else(|| std::slice::from_ref(ids))
        });
        let listed = listed.into_iter().flatten().filter_map(Value::as_u64);
        ends.extend(listed.filter_map(|id| Token::try_from(id).ok()));
        // `generation_config.json` is a file of its own, and may list ids that this tokenizer does not have.
        ends.retain(|id| (*id as usize) < pieces.len());
        ends.sort_unstable();
        ends.dedup();
        let infill = infill(&plain, reported.infill, |token| {
            bos == Some(token) || ends.contains(&token)
        });
        let unmarked = mark_control_tokens(&mut plain).map_err(|error| syntax(&error))?;
        let template = files.template().map(|source| {
            let special = SpecialTexts {
                bos: files.named("bos_token").unwrap_or_default().to_owned(),
                end: files.named("eos_token").unwrap_or_default().to_owned(),
                all: pieces.names().map(str::to_owned).chain(unmarked).collect(),
            };
            Template::new(source, &special, SystemTime::now)
        });
        let template = template
            .transpose()
            .map_err(|error| VocabularyError::Template(error.to_string()))?;
        plain.set_encode_special_tokens(true);
        Ok(Self {
            file: files.tokenizer.clone(),
            infill,
            plain,
            special: OnceLock::new(),
            token_bytes_max: (0..pieces.len())
                .map(|id| pieces.bytes(id as Token).len())
                .max()
                .unwrap_or(0),
            pieces,
            bos,
            eos,
            ends,
            template,
        })
    }

    /// Returns whether conversations can be rendered.
    #[must_use]
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }
}

/// Marks added tokens that look like control tokens, so that they are not found in plain text. Files do not call all of them
/// special. Returns their texts.
fn mark_control_tokens(machine: &mut Machine) -> Result<Vec<String>, tokenizers::Error> {
    let added = machine.get_added_tokens_decoder().into_values();
    let unmarked = added
        .filter(|token| !token.special && control_names::looks_like_one(token.content.as_bytes()));
    let marked: Vec<AddedToken> = unmarked
        .map(|token| AddedToken {
            special: true,
            ..token
        })
        .collect();
    let texts = marked.iter().map(|token| token.content.clone()).collect();
    machine.add_special_tokens(marked)?;
    Ok(texts)
}

/// Returns the BOS token as `add_bos_token` in the configuration decides; without it, the one that the tokenizer adds
/// by itself.
fn bos(machine: &Machine, files: &TokenizerFiles, pieces: &TokenPieces) -> Option<Token> {
    match files.config.get("add_bos_token").and_then(Value::as_bool) {
        Some(true) => machine.token_to_id(files.named("bos_token")?),
        Some(false) => None,
        None => {
            // The post-processor of the file tells what it adds: encoding nothing yields only that.
            let added = machine.encode_fast("", true).ok()?;
            let first = added.get_ids().first().copied()?;
            pieces.is_control(first).then_some(first)
        }
    }
}

/// Returns the reported tokens for fill in the middle if they are usable with this tokenizer, or those with well-known texts.
fn infill(
    machine: &Machine,
    reported: Option<InfillTokens>,
    is_taken: impl Fn(Token) -> bool,
) -> Option<InfillTokens> {
    // The server may have another vocabulary than these files.
    let is_unusable = |token| is_taken(token) || machine.id_to_token(token).is_none();
    let added = machine.get_added_tokens_decoder();
    let usable = |infill: InfillTokens| {
        let text = |token| machine.id_to_token(token).unwrap_or_default();
        let infill = infill.unless_any(is_unusable)?;
        infill.if_marks(|token| added.contains_key(&token), text)
    };
    let named = || InfillTokens::named(|text| machine.token_to_id(text));
    reported
        .and_then(usable)
        .or_else(|| named().and_then(usable))
}

/// Tokenises a text. If the tokenizer fails on it because of its pattern, tokenises its halves.
fn tokens(machine: &Machine, text: &str) -> Vec<Token> {
    if stop::stopped() {
        return Vec::new();
    }
    // No special tokens are added: BOS is the caller's decision.
    if let Ok(encoded) = machine.encode_fast(text, false) {
        return encoded.get_ids().to_vec();
    }
    let middle = text
        .char_indices()
        .map(|(at, _)| at)
        .find(|at| *at > 0 && *at >= text.len() / 2);
    // A single character that cannot be tokenised is dropped.
    let Some(middle) = middle else {
        return Vec::new();
    };
    let (first, second) = text.split_at(middle);
    let mut all = tokens(machine, first);
    all.extend(tokens(machine, second));
    all
}

impl Vocabulary for FileTokenizer {
    fn size(&self) -> usize {
        self.pieces.len()
    }

    fn file(&self) -> Option<Bytes> {
        Some(self.file.clone())
    }

    fn token_bytes_max(&self) -> usize {
        self.token_bytes_max
    }

    fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        if !special {
            return tokens(&self.plain, text);
        }
        let machine = self.special.get_or_init(|| {
            let mut machine = self.plain.clone();
            machine.set_encode_special_tokens(false);
            machine
        });
        tokens(machine, text)
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.pieces.bytes(token)
    }

    fn is_special(&self, token: Token) -> bool {
        self.pieces.is_control(token)
    }

    fn name(&self, token: Token) -> Option<String> {
        self.pieces.name(token).map(str::to_owned)
    }

    fn is_end(&self, token: Token) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    fn bos(&self) -> Option<Token> {
        self.bos
    }

    fn infill(&self) -> Option<InfillTokens> {
        self.infill
    }

    fn end_of_turn(&self) -> Option<Token> {
        // Other programs know that one alone; the list of the others is in no order.
        self.eos.or_else(|| self.ends.first().copied())
    }

    fn chat_template(&self) -> Option<&str> {
        self.template.as_ref().map(Template::source)
    }

    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        let template = self.template.as_ref().ok_or_else(no_template)?;
        Ok(template::tokens(&template.render(chat)?, self))
    }
}

/// The maximum of bytes of a file; twice the largest known one.
pub const FILE_BYTES_MAX: usize = 64 << 20;

#[cfg(test)]
mod tests;
