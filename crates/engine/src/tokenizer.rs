//! Vocabularies read from a `tokenizer.json`, for models that run on other servers (LM-712).

mod pieces;

use std::fmt;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use bytes::Bytes;
use sapwood_proto::steer::Token;
use serde_json::Value;
use tokenizers::Tokenizer as Machine;

use self::pieces::TokenPieces;
use crate::api::{ChatRequest, EngineError, Vocabulary};
use crate::stop;
use crate::template::{self, SpecialTexts, Template, no_template};

/// The files of a tokenizer, read.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Bytes,
    /// `tokenizer_config.json`: what begins and ends a text, and usually the chat template.
    pub config: Value,
    /// `generation_config.json`: what ends an answer.
    pub generation: Value,
    /// `chat_template.jinja`.
    pub template: Option<String>,
}

impl TokenizerFiles {
    /// Reads them, where blocking is allowed: from a folder, or `tokenizer.json` alone if the path is that of a file.
    ///
    /// # Errors
    /// No such file, or one that cannot be read or is larger than [`FILE_BYTES_MAX`]. Only `tokenizer.json` has to be there.
    pub fn read(path: &Path) -> io::Result<Self> {
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
        let template = beside("chat_template.jinja")?.map(String::from_utf8);
        Ok(Self {
            tokenizer: whole(&path.join("tokenizer.json"))?.into(),
            config: json("tokenizer_config.json")?,
            generation: json("generation_config.json")?,
            template: template.transpose().map_err(io::Error::other)?,
        })
    }

    /// The template of these files; of several named ones the default.
    fn template(&self) -> Option<&str> {
        let configured = self.config.get("chat_template");
        let listed = configured.and_then(Value::as_array).and_then(|list| {
            let is_default = |one: &&Value| one.get("name").is_some_and(|name| name == "default");
            list.iter().find(is_default)?.get("template")
        });
        let configured = listed.or(configured).and_then(Value::as_str);
        self.template.as_deref().or(configured)
    }

    /// The text of a token that the configuration names, as a string or as an object with its content.
    fn named(&self, key: &str) -> Option<&str> {
        let token = self.config.get(key)?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    }
}

fn whole(path: &Path) -> io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.len() > FILE_BYTES_MAX as u64 {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "it is larger than any tokenizer's",
        ));
    }
    std::fs::read(path)
}

/// Facts about special tokens from a source that knows better than the files: the server that runs the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// What stands before a text: a token, or nothing; not set, the files say it.
    pub bos: Option<Option<Token>>,
    /// What ends an answer, beside what the files say.
    pub ends: Vec<Token>,
}

/// Why there is no vocabulary. The messages name what is wrong with a file, for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// The file does not read as a tokenizer.
    #[error("it is no tokenizer: {0}")]
    Syntax(String),
    /// It has tokens whose bytes are unknown.
    #[error(
        "tokens of this kind cannot be made text again piece by piece; there are byte-level and SentencePiece ones"
    )]
    Kind,
    /// It has no tokens, or ids beyond any model's.
    #[error("it has no tokens, or more than any model")]
    Size,
    /// The chat template beside it is none.
    #[error("{0}")]
    Template(String),
}

/// A vocabulary from files. Immutable, and never asks for anything again.
pub struct FileTokenizer {
    file: Bytes,
    /// Texts of control tokens are plain text to it.
    plain: Machine,
    /// They stand for those tokens to it; only where there is a template that writes them.
    special: Option<Machine>,
    pieces: TokenPieces,
    /// Bytes of the longest token.
    token_bytes_max: usize,
    bos: Option<Token>,
    ends: Vec<Token>,
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
    /// Reads a vocabulary. Slow: call it where blocking is allowed.
    ///
    /// # Errors
    /// [`VocabularyError`].
    pub fn new(files: &TokenizerFiles, reported: SpecialTokens) -> Result<Self, VocabularyError> {
        let syntax = |error: &dyn fmt::Display| VocabularyError::Syntax(error.to_string());
        let mut plain = Machine::from_bytes(&files.tokenizer).map_err(|error| syntax(&error))?;
        // A file may ask for prompts of one length; ours have theirs.
        plain
            .with_truncation(None)
            .map_err(|error| syntax(&error))?;
        plain.with_padding(None);
        let pieces = TokenPieces::of(&plain, &files.tokenizer)?;
        let bos = match reported.bos {
            Some(reported) => reported,
            None => bos(&plain, files, &pieces),
        };
        let mut ends = reported.ends;
        ends.extend(
            files
                .named("eos_token")
                .and_then(|text| plain.token_to_id(text)),
        );
        let listed = files.generation.get("eos_token_id");
        let listed = listed.map(|ids| {
            ids.as_array()
                .map_or_else(|| std::slice::from_ref(ids), Vec::as_slice)
        });
        let listed = listed.into_iter().flatten().filter_map(Value::as_u64);
        ends.extend(listed.filter_map(|id| Token::try_from(id).ok()));
        ends.retain(|id| (*id as usize) < pieces.len());
        ends.sort_unstable();
        ends.dedup();
        let template = files.template().map(|source| {
            let special = SpecialTexts {
                bos: files.named("bos_token").unwrap_or_default().to_owned(),
                end: files.named("eos_token").unwrap_or_default().to_owned(),
                all: pieces.names().map(str::to_owned).collect(),
            };
            Template::new(source, &special, SystemTime::now)
        });
        let template = template
            .transpose()
            .map_err(|error| VocabularyError::Template(error.to_string()))?;
        let special = template.is_some().then(|| plain.clone());
        plain.set_encode_special_tokens(true);
        Ok(Self {
            file: files.tokenizer.clone(),
            plain,
            special,
            token_bytes_max: (0..pieces.len())
                .map(|id| pieces.bytes(id as Token).len())
                .max()
                .unwrap_or(0),
            pieces,
            bos,
            ends,
            template,
        })
    }

    /// Whether conversations can be rendered.
    #[must_use]
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }
}

/// What the files put before a text: what they say of it, or else what the tokenizer does by itself.
fn bos(machine: &Machine, files: &TokenizerFiles, pieces: &TokenPieces) -> Option<Token> {
    match files.config.get("add_bos_token").and_then(Value::as_bool) {
        Some(true) => machine.token_to_id(files.named("bos_token")?),
        Some(false) => None,
        None => {
            let added = machine.encode_fast("", true).ok()?;
            let first = added.get_ids().first().copied()?;
            pieces.is_control(first).then_some(first)
        }
    }
}

/// The tokens of a text. What a tokenizer cannot take at once, because of its pattern, it may take in halves.
fn tokens(machine: &Machine, text: &str) -> Vec<Token> {
    if stop::stopped() {
        return Vec::new();
    }
    if let Ok(encoded) = machine.encode_fast(text, false) {
        return encoded.get_ids().to_vec();
    }
    let middle = text
        .char_indices()
        .map(|(at, _)| at)
        .find(|at| *at > 0 && *at >= text.len() / 2);
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
        match &self.special {
            Some(machine) if special => tokens(machine, text),
            _ => tokens(&self.plain, text),
        }
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

    fn end_of_turn(&self) -> Option<Token> {
        self.ends.first().copied()
    }

    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        let template = self.template.as_ref().ok_or_else(no_template)?;
        Ok(template::tokens(&template.render(chat)?, self))
    }
}

/// The largest known file has half of it.
pub const FILE_BYTES_MAX: usize = 64 << 20;

#[cfg(test)]
mod tests;
