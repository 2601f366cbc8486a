//! Writes a `tokenizer.json` of the vocabulary in a GGUF file (LM-951).
//!
//! A vocabulary is written only if the file is known to tokenise alike: a wrong file is worse than none. Supported are
//! byte-pair vocabularies whose pre-tokenizer is in [`split`]; tests compare each of them with llama.cpp.

use std::collections::HashSet;

use bytes::Bytes;
use sapwood_proto::steer::Token;

use crate::gguf::GgufHeader;
use crate::tokenizer_json::{AddedToken, ByteLevel, alphabet};

/// Why no file can be written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoTokenizerFile {
    /// It is not a byte-pair vocabulary.
    #[error("a vocabulary of the kind {0:?} cannot be written as a tokenizer.json")]
    Kind(String),
    /// Its pre-tokenizer is not supported.
    #[error("the pre-tokenizer {0:?} is not supported")]
    Split(String),
    /// Two tokens have the same text, or a token contains a byte that has no token.
    #[error("two of its tokens have the same text, or a token contains a byte that has no token")]
    Tokens,
    /// The result of a merge is not a token.
    #[error("the result of one of its merges is not a token")]
    Merge,
}

/// The tokens of a byte-pair vocabulary, in the order of their ids.
pub(crate) struct PairTokens {
    /// As the GGUF file has them.
    pub(crate) texts: Vec<String>,
    /// Those that are found in a text before it is split.
    pub(crate) added: Vec<AddedToken>,
    /// The BOS token that the model wants before a text.
    pub(crate) bos: Option<Token>,
}

/// Returns the bytes of the file. The tokens are asked for only if they may be written.
pub(crate) fn file(
    header: &GgufHeader,
    tokens: impl FnOnce() -> PairTokens,
) -> Result<Bytes, NoTokenizerFile> {
    let kind = header.text("tokenizer.ggml.model").unwrap_or_default();
    if kind != "gpt2" {
        return Err(NoTokenizerFile::Kind(kind.to_owned()));
    }
    let name = header.text("tokenizer.ggml.pre").unwrap_or_default();
    // An unknown pre-tokenizer is not guessed: the file would tokenise nearly alike, and the difference would go
    // unnoticed.
    let split = split(name).ok_or_else(|| NoTokenizerFile::Split(name.to_owned()))?;
    let tokens = tokens();
    let known: HashSet<&str> = tokens.texts.iter().map(String::as_str).collect();
    // The format maps texts to ids, so two tokens of the same text cannot both be in it.
    if known.len() != tokens.texts.len() {
        return Err(NoTokenizerFile::Tokens);
    }
    let merges = merges(header.merges(), &known)?;
    let lacking = lacking(&known, header.merges())?;
    let vocabulary = ByteLevel {
        added: tokens.added,
        patterns: split.patterns.to_vec(),
        merges,
        lacking,
        whole_pieces: split.whole_pieces,
        bos: tokens.bos,
        tokens: tokens.texts,
    };
    Ok(vocabulary.file())
}

/// Returns the characters of the bytes that have no token. llama.cpp drops them from a text, but would match a token or
/// a merge that contains such a byte, which the file format cannot express.
fn lacking(known: &HashSet<&str>, merges: &[String]) -> Result<Vec<char>, NoTokenizerFile> {
    let has_token = |shown: &char| known.contains(shown.encode_utf8(&mut [0; 4]) as &str);
    let lacking: Vec<char> = alphabet().filter(|shown| !has_token(shown)).collect();
    // A missing byte whose character is ASCII would be looked up byte by byte, and other missing bytes would not.
    let is_used = |text: &str| text.contains(&lacking[..]);
    let is_sent = known.iter().any(|token| is_used(token));
    if !lacking.is_empty() && (is_sent || merges.iter().any(|merge| is_used(merge))) {
        return Err(NoTokenizerFile::Tokens);
    }
    Ok(lacking)
}

/// Returns the merges that can occur, each once.
fn merges(all: &[String], known: &HashSet<&str>) -> Result<Vec<String>, NoTokenizerFile> {
    let mut seen = HashSet::new();
    let mut merges = Vec::new();
    for merge in all {
        // The first character may itself be a space.
        let border = merge
            .char_indices()
            .skip(1)
            .find(|(_, letter)| *letter == ' ');
        // Without a second part it is no merge, and llama.cpp never applies it.
        let Some((border, _)) = border else { continue };
        let (left, right) = (&merge[..border], &merge[border + 1..]);
        // llama.cpp ignores merges that can never apply; readers of the file refuse them.
        if !known.contains(left) || !known.contains(right) || !seen.insert((left, right)) {
            continue;
        }
        if !known.contains(&*[left, right].concat()) {
            return Err(NoTokenizerFile::Merge);
        }
        merges.push(merge.clone());
    }
    Ok(merges)
}

/// A pre-tokenizer: how texts are split into the pieces within which pairs are merged.
struct Split {
    /// Applied in this order, each to the pieces of those before it.
    patterns: &'static [&'static str],
    /// A piece that is a token becomes that token, without merges.
    whole_pieces: bool,
}

/// Returns llama.cpp's pre-tokenizer of this name, as GGUF files contain it.
fn split(name: &str) -> Option<Split> {
    let (patterns, whole_pieces): (&[&str], bool) = match name {
        "" | "default" => (&[SIGNS_APART, WORDS, NUMBERS, THREE_DIGITS], false),
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling"
        | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" => (&[WORDS], false),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => (&[NUMBER, WORDS], false),
        "falcon" => (&[SIGNS_AND_TICKS_APART, WORDS, THREE_DIGITS], false),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
        | "lfm2" | "glm4" | "glm5" => (&[BY_THREES], true),
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => (&[BY_THREES], false),
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "stablelm2" | "hunyuan"
        | "solar-open" | "megrez" | "grok-2" => (&[BY_ONES], false),
        "deepseek-v3" | "hunyuan-dense" => {
            (&[UP_TO_THREE, HAN_AND_KANA, SIGNS_WITH_LETTERS], false)
        }
        _ => return None,
    };
    Some(Split {
        patterns,
        whole_pieces,
    })
}

/// English endings, then letters, numbers and other signs, each with one space before; white space except its last
/// character, which belongs to what follows.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// As [`WORDS`], with any sign before letters, at most three digits together, and separate line ends.
const BY_THREES: &str = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As [`BY_THREES`], with every digit on its own.
const BY_ONES: &str = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const NUMBER: &str = r"\p{N}";
const NUMBERS: &str = r"\p{N}+";
const UP_TO_THREE: &str = r"\p{N}{1,3}";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";
const SIGNS_APART: &str = r"[\p{P}\$\+<=>\^~\|]+";
const SIGNS_AND_TICKS_APART: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const HAN_AND_KANA: &str = "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
const SIGNS_WITH_LETTERS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
