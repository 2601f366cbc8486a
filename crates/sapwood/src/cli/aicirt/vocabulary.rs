//! Loads the vocabulary of the engine's model.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sapwood_control::trie::{HostModel, TokenEntry};
use sapwood_engine::api::Vocabulary as _;
use sapwood_engine::tokenizer::{FileTokenizer, SpecialTokens, TokenizerFiles};
use sapwood_proto::steer::Token;

use super::saved_trie::SavedTrie;
use crate::failure::CliError;

/// A vocabulary as controllers see it.
pub(super) struct LoadedVocabulary {
    pub(super) model: Arc<HostModel>,
    /// The token that begins a text prompt.
    pub(super) bos: Option<Token>,
}

/// Loads a file, or `NAME.json` of `folder`, padded to at least `size` tokens. Nothing is ever downloaded.
///
/// # Errors
/// Exit code 2: there is no such file, or it is no vocabulary.
pub(super) fn load(
    given: &str,
    folder: &Path,
    size: Option<usize>,
) -> Result<LoadedVocabulary, CliError> {
    let path = find(given, folder)?;
    let wrong = |what: &dyn std::fmt::Display| {
        CliError::usage(format!("--tokenizer {}: {what}", path.display()))
    };
    if path
        .extension()
        .is_some_and(|extension| extension == "gguf")
    {
        return Err(wrong(
            &"give the tokenizer.json of the model: .gguf files are not read here yet",
        ));
    }
    // Before it is read as JSON: a trie begins with its magic number.
    let bytes = std::fs::read(&path).map_err(|error| wrong(&error))?;
    if let Some(trie) = SavedTrie::read(&bytes) {
        let trie = trie.map_err(|error| wrong(&error))?;
        let (mut tokens, eos) = (trie.entries(), trie.eos);
        pad(&mut tokens, size);
        let model = HostModel::new(tokens, eos, move |text: &str| {
            trie.tokenize(text.as_bytes())
        });
        return Ok(LoadedVocabulary {
            model: Arc::new(model),
            bos: None,
        });
    }
    // A file of the usual name has its configuration beside it, and that names the special tokens.
    let named = path
        .file_name()
        .is_some_and(|name| name == "tokenizer.json");
    let source = match path.parent() {
        Some(parent) if named && !parent.as_os_str().is_empty() => parent,
        Some(_) if named => Path::new("."),
        _ => &path,
    };
    let files = TokenizerFiles::read(source).map_err(|error| wrong(&error))?;
    let tokenizer = FileTokenizer::new(&files, SpecialTokens::default());
    let tokenizer = tokenizer.map_err(|error| wrong(&error))?;
    let mut ids = 0..Token::try_from(tokenizer.size()).unwrap_or(Token::MAX);
    let mut tokens: Vec<TokenEntry> = ids
        .clone()
        .map(|id| match tokenizer.is_special(id) {
            true => TokenEntry::special(tokenizer.name(id).unwrap_or_default()),
            false => TokenEntry::text(tokenizer.bytes(id)),
        })
        .collect();
    let eos = ids
        .find(|id| tokenizer.is_end(*id))
        .or_else(|| named_end(&tokens))
        .ok_or_else(|| {
            wrong(
                &"it does not say which token ends a text: put its tokenizer_config.json beside it",
            )
        })?;
    pad(&mut tokens, size);
    let bos = tokenizer.bos();
    let model = HostModel::new(tokens, eos, move |text: &str| {
        tokenizer.tokenize(text, false)
    });
    Ok(LoadedVocabulary {
        model: Arc::new(model),
        bos,
    })
}

/// A token with one of the names that end a text in known vocabularies, for a file without a configuration.
fn named_end(tokens: &[TokenEntry]) -> Option<Token> {
    ENDS.iter().find_map(|end| {
        let at = tokens
            .iter()
            .position(|token| token.special.as_deref() == Some(end))?;
        Token::try_from(at).ok()
    })
}

fn pad(tokens: &mut Vec<TokenEntry>, size: Option<usize>) {
    if let Some(size) = size
        && size > tokens.len()
    {
        tokens.resize(size.min(TOKENS_MAX), TokenEntry::default());
    }
}

fn find(given: &str, folder: &Path) -> Result<PathBuf, CliError> {
    let path = PathBuf::from(given);
    if path.exists() {
        return Ok(path);
    }
    let named = folder.join(format!("{given}.json"));
    if named.is_file() {
        return Ok(named);
    }
    let names = names(folder).unwrap_or_default();
    let there = if names.is_empty() {
        "it has no tokenizers".to_owned()
    } else {
        format!("it has: {}", names.join(", "))
    };
    Err(CliError::usage(format!(
        "--tokenizer {given}: no such file, and no {given}.json in {}; {there}",
        folder.display()
    )))
}

fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
            && let Some(stem) = path.file_stem()
        {
            names.push(stem.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Names of tokens that end a text, the more telling first.
const ENDS: [&str; 7] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|end|>",
];
/// The most tokens that a trie can name (AI-631).
const TOKENS_MAX: usize = (1 << 24) - 2;
