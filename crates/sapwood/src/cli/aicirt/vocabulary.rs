//! Loads the vocabulary of the engine's model.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sapwood_control::aicirt::WireConstraints;
use sapwood_control::trie::{HostModel, TokenView};
use sapwood_engine::api::SharedVocabulary;
use sapwood_engine::constraint::{ConstraintConfig, ConstraintSource, MaskWorkers};
use sapwood_engine::gguf_vocabulary::{self, GgufVocabulary};
use sapwood_engine::tokenizer::{FileTokenizer, SpecialTokens, TokenizerFiles};
use sapwood_proto::steer::Token;

use super::saved_trie::SavedTrie;
use super::wire_vocabulary::{GgufTokens, Tokens, WireVocabulary};
use crate::controllers::{ControlNames, host_model};
use crate::failure::CliError;

/// A vocabulary, and as controllers see it.
pub(super) struct LoadedVocabulary {
    pub(super) model: Arc<HostModel>,
    /// The token that begins a text prompt.
    pub(super) bos: Option<Token>,
    pub(super) constraints: WireConstraints,
}

impl LoadedVocabulary {
    fn new(vocabulary: &SharedVocabulary) -> Self {
        let constraints = Arc::new(ConstraintSource::new(
            Arc::clone(vocabulary),
            ConstraintConfig::default(),
            Arc::new(MaskWorkers::new()),
        ));
        let model =
            host_model(vocabulary, ControlNames::Tokens).with_constraints(constraints.clone());
        Self {
            model: Arc::new(model),
            bos: vocabulary.bos(),
            constraints: WireConstraints {
                sampling: Arc::new(constraints.with_fast_forward(false)),
                forwarding: constraints,
            },
        }
    }
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
    Ok(LoadedVocabulary::new(&read(given, folder, size)?))
}

/// As [`load`], for the template of controllers' processes: no call of the model leaves a thread behind (AI-702).
///
/// # Errors
/// As [`load`].
pub(super) fn load_to_be_cloned(
    given: &str,
    folder: &Path,
    size: Option<usize>,
) -> Result<Arc<HostModel>, CliError> {
    let vocabulary = read(given, folder, size)?;
    let constraints =
        ConstraintSource::of_cloned_processes(Arc::clone(&vocabulary), ConstraintConfig::default());
    let model =
        host_model(&vocabulary, ControlNames::Tokens).with_constraints(Arc::new(constraints));
    // What the tokenizer makes at its first use is made here once, and not in each process.
    let _made = model.tokenize(b"", TokenView::Plain);
    Ok(Arc::new(model))
}

fn read(given: &str, folder: &Path, size: Option<usize>) -> Result<SharedVocabulary, CliError> {
    let path = find(given, folder)?;
    let wrong = |what: &dyn std::fmt::Display| {
        CliError::usage(format!("--tokenizer {}: {what}", path.display()))
    };
    // A model's file may be larger than the memory: only its header is read.
    let tokens = if gguf_vocabulary::is_gguf(&path).map_err(|error| wrong(&error))? {
        let read = GgufVocabulary::read(&path).map_err(|error| wrong(&error))?;
        Tokens::Gguf(GgufTokens::new(read))
    } else {
        // Before it is read as JSON: a trie begins with its magic number.
        let bytes = std::fs::read(&path).map_err(|error| wrong(&error))?;
        match SavedTrie::read(&bytes) {
            Some(trie) => Tokens::Trie(trie.map_err(|error| wrong(&error))?),
            None => Tokens::File(Box::new(
                read_tokenizer(&path).map_err(|error| wrong(&error))?,
            )),
        }
    };
    let advice = match &tokens {
        Tokens::File(_) => "put its tokenizer_config.json beside it",
        Tokens::Gguf(_) | Tokens::Trie(_) => "give the tokenizer.json of the model",
    };
    let vocabulary = WireVocabulary::new(tokens, size).ok_or_else(|| {
        wrong(&format!(
            "it does not say which token ends a text: {advice}"
        ))
    })?;
    Ok(Arc::new(vocabulary))
}

fn read_tokenizer(path: &Path) -> Result<FileTokenizer, String> {
    // A file of the usual name has its configuration beside it, and that names the special tokens.
    let named = path
        .file_name()
        .is_some_and(|name| name == "tokenizer.json");
    let source = match path.parent() {
        Some(parent) if named && !parent.as_os_str().is_empty() => parent,
        Some(_) if named => Path::new("."),
        _ => path,
    };
    let files = TokenizerFiles::read(source).map_err(|error| error.to_string())?;
    FileTokenizer::new(&files, SpecialTokens::default()).map_err(|error| error.to_string())
}

fn find(given: &str, folder: &Path) -> Result<PathBuf, CliError> {
    let path = PathBuf::from(given);
    // A folder may have the name of a tokenizer.
    if path.is_file() {
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
