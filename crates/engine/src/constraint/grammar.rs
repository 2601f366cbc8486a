//! [`GrammarText`]: a constraint in the languages that the compiler reads, Lark and JSON schema.
//!
//! It is also the key of the cache, so equal constraints must have equal texts: `"a"` as a pattern and `{"value":"a"}`
//! compile once.

use std::fmt::{self, Write as _};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use regex::RegexBuilder;
use serde_json::{Value, json};

use super::{gbnf, lark_work, schema_depth};

/// The kinds of native constraints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A regular expression that matches the whole output.
    Regex,
    /// A JSON schema.
    JsonSchema,
    /// A grammar in the Lark variant of `llguidance`.
    Lark,
    /// A grammar in the GBNF of llama.cpp.
    Gbnf,
    /// A contiguous, non-empty piece of a text.
    Substring,
    /// One of a list of strings.
    Options,
}

impl Kind {
    /// For messages.
    pub(super) const NAMES: &'static str = "sapwood:regex, sapwood:json-schema, sapwood:lark, \
        sapwood:gbnf, sapwood:substring, sapwood:options";

    /// The kind with this name, written without the prefix.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "regex" => Self::Regex,
            "json-schema" => Self::JsonSchema,
            "lark" => Self::Lark,
            "gbnf" => Self::Gbnf,
            "substring" => Self::Substring,
            "options" => Self::Options,
            _ => return None,
        })
    }
}

/// Why there is no grammar: a position, if there is one, and a reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct GrammarError(String);

/// Characters of an error that come from the compiler: it quotes the grammar, which may be long.
const MESSAGE_CHARS: usize = 400;

impl GrammarError {
    pub(super) const fn new(message: String) -> Self {
        Self(message)
    }

    /// From the text of an error of the compiler, without the source lines and backtraces that it may contain.
    pub(super) fn from_compiler(text: &str) -> Self {
        if let Some(panic) = text.strip_prefix("panic: ") {
            let panic = panic.lines().next().unwrap_or_default();
            tracing::warn!(panic, "a grammar made its compiler panic");
            return Self("the compiler cannot handle it; make it simpler".to_owned());
        }
        let shown = text.split("\n<").next().unwrap_or_default();
        let is_source = |line: &&str| {
            let line = line.trim_start();
            let digits = line.trim_start_matches(|c: char| c.is_ascii_digit());
            let numbered = digits.len() < line.len() && digits.starts_with(" |");
            !line.is_empty() && line != "^" && !numbered
        };
        let lines: Vec<&str> = shown.lines().filter(is_source).map(str::trim).collect();
        Self(lines.join(" ").chars().take(MESSAGE_CHARS).collect())
    }

    /// Writes the position as in the errors of this crate, or removes it if it is one in a text that the caller has
    /// not written.
    fn with_position(self, is_own_text: bool) -> Self {
        let text = self.0.strip_prefix("at ").unwrap_or(&self.0);
        let Some((position, reason)) = text.split_once("): ") else {
            return self;
        };
        let numbers = position
            .split_once('(')
            .map(|(line, column)| (line.parse(), column.parse()));
        let Some((Ok(line), Ok(column))) = numbers else {
            return self;
        };
        let (line, column): (usize, usize) = (line, column);
        Self(match is_own_text {
            true => format!("at line {line}, column {column}: {reason}"),
            false => reason.to_owned(),
        })
    }
}

/// A grammar that can be compiled, with the text that comes before its output.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct GrammarText {
    prefix: String,
    body: Body,
}

/// It is checked and translated by the compiling thread, because that is the only one whose time is limited, and of which
/// a caller has a share.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Body {
    /// Lark as the caller wrote it.
    Lark(String),
    /// Lark made from something else.
    Generated(String),
    Gbnf(String),
    Regex(String),
    /// JSON text, because a JSON value cannot be a key.
    Schema(String),
}

/// What the compiler reads.
pub(super) struct CompilerInput {
    pub(super) grammar: TopLevelGrammar,
    /// Bytes of its text.
    pub(super) bytes: usize,
}

impl fmt::Debug for GrammarText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarText").finish_non_exhaustive()
    }
}

/// Refuses a Lark grammar over which the compiler may recurse too deeply. It recurses into rules and groups, of which a line
/// may have any number.
fn check_parts(lark: &str) -> Result<(), GrammarError> {
    let deeper = |c: char| matches!(c, ':' | '(' | '[');
    match lark.match_indices(deeper).nth(PARTS_MAX) {
        None => Ok(()),
        Some((at, _)) => {
            let line = lark[..at].matches('\n').count() + 1;
            Err(GrammarError::new(format!(
                "at line {line}, column 1: a grammar may have {PARTS_MAX} rules and groups"
            )))
        }
    }
}

/// Refuses a Lark grammar over which the compiler may recurse too deeply, or of which one step of it could be without
/// bounds.
fn check_lark(text: &str) -> Result<(), GrammarError> {
    // A definition begins its line; no other line begins with a letter, but for one within a regex.
    let begins = |line: &str| {
        line.trim_start()
            .starts_with(|c: char| c.is_ascii_alphabetic() || "!?_".contains(c))
    };
    let mut definitions = text.lines().zip(1..).filter(|(line, _)| begins(line));
    if let Some((_, line)) = definitions.nth(RULES_MAX) {
        return Err(GrammarError::new(format!(
            "at line {line}, column 1: a grammar may have {RULES_MAX} rules and terminals"
        )));
    }
    check_parts(text)?;
    lark_work::check(text)?;
    // A schema within a grammar recurses as one alone does.
    for (at, key) in text.match_indices("%json") {
        let schema = serde_json::Deserializer::from_str(&text[at + key.len()..]);
        if let Some(Ok(schema)) = schema.into_iter::<Value>().next() {
            schema_depth::check(&schema)?;
        }
    }
    Ok(())
}

impl GrammarText {
    pub(super) fn lark(text: &str, prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            body: Body::Lark(text.to_owned()),
        }
    }

    fn generated(lark: String, prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            body: Body::Generated(lark),
        }
    }

    pub(super) fn regex(pattern: &str, prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            body: Body::Regex(pattern.to_owned()),
        }
    }

    pub(super) fn gbnf(text: &str, prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            body: Body::Gbnf(text.to_owned()),
        }
    }

    pub(super) fn substring(text: &str, prefix: &str) -> Result<Self, GrammarError> {
        if text.is_empty() {
            return Err(GrammarError::new("the text is empty".to_owned()));
        }
        // The compiler counts the empty piece as one, and a model could end at once.
        let pieces = json!({ "substring_chars": text });
        let lark = format!("start: PIECE\nPIECE: %regex {pieces} & /(?s:.+)/");
        Ok(Self::generated(lark, prefix))
    }

    pub(super) fn options(options: &[String], prefix: &str) -> Result<Self, GrammarError> {
        if options.is_empty() {
            return Err(GrammarError::new(
                "at option 0: there are no options".to_owned(),
            ));
        }
        // One terminal for all: as terminals of their own they would each be a part of the lexer's state.
        let mut lark = "start: OPTION\nOPTION: ".to_owned();
        for (index, option) in options.iter().enumerate() {
            let bar = if index == 0 { "" } else { " | " };
            lark.push_str(bar);
            quote(option, &mut lark);
        }
        Ok(Self::generated(lark, prefix))
    }

    pub(super) fn schema(schema: Value, prefix: &str) -> Result<Self, GrammarError> {
        let mut schema = match schema {
            Value::Object(members) => members,
            // Allows every value; as an object it can carry the compiler's options.
            Value::Bool(true) => serde_json::Map::new(),
            _ => return Err(GrammarError::new("a schema is a JSON object".to_owned())),
        };
        // Without a bound a model that prefers spaces writes them until its tokens are used up.
        let options = || json!({ "whitespace_pattern": WHITESPACE });
        schema.entry("x-guidance").or_insert_with(options);
        Ok(Self {
            prefix: prefix.to_owned(),
            body: Body::Schema(Value::Object(schema).to_string()),
        })
    }

    /// The error for a message of the compiler about it.
    pub(super) fn error(&self, message: &str) -> GrammarError {
        let is_own_text = matches!(self.body, Body::Lark(_));
        GrammarError::from_compiler(message).with_position(is_own_text)
    }

    /// Checks the text and makes the input of the compiler. Takes milliseconds for a long text.
    pub(super) fn to_input(&self) -> Result<CompilerInput, GrammarError> {
        let of_lark = |lark: String| (lark.len(), GrammarWithLexer::from_lark(lark));
        let (bytes, mut body) = match &self.body {
            Body::Lark(text) => {
                check_lark(text)?;
                of_lark(text.clone())
            }
            Body::Generated(text) => of_lark(text.clone()),
            Body::Gbnf(text) => of_lark(gbnf_to_lark(text)?),
            Body::Regex(pattern) => of_lark(regex_to_lark(pattern)?),
            Body::Schema(text) => {
                let schema = serde_json::from_str(text);
                let schema = schema.map_err(|error| GrammarError::new(error.to_string()))?;
                schema_depth::check(&schema)?;
                (text.len(), GrammarWithLexer::from_json_schema(schema))
            }
        };
        let mut grammars = Vec::new();
        if !self.prefix.is_empty() {
            // Part of the grammar and not a text before it: forced tokens may then cross the border, as the tokens
            // of the joined text do.
            let mut outer = "start: ".to_owned();
            quote(&self.prefix, &mut outer);
            outer.push_str(" @body");
            grammars.push(GrammarWithLexer::from_lark(outer));
            body.name = Some("body".to_owned());
        }
        grammars.push(body);
        Ok(CompilerInput {
            grammar: TopLevelGrammar {
                grammars,
                max_tokens: None,
            },
            bytes: self.prefix.len() + bytes,
        })
    }
}

/// Rules and terminals of a grammar. The compiler recurses from each into those that it refers to, so this bounds its
/// stack, which the limits of the library do not.
pub(super) const RULES_MAX: usize = 2000;
/// Colons and opening brackets of a grammar: it has no more rules and groups than that.
pub(super) const PARTS_MAX: usize = 10_000;

/// What may stand between the parts of a JSON text: nothing, a space, or a new line with an indentation.
const WHITESPACE: &str = r" |\n[ \t]{0,40}";

/// Writes a string of Lark, whose escapes are those of JSON.
pub(super) fn quote(text: &str, lark: &mut String) {
    lark.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => lark.extend(['\\', character]),
            // Lark refuses DEL in a string, which JSON does not escape.
            '\0'..='\x1f' | '\x7f' => {
                // Writing to a string cannot fail.
                let _written = write!(lark, "\\u{:04x}", u32::from(character));
            }
            _ => lark.push(character),
        }
    }
    lark.push('"');
}

fn gbnf_to_lark(text: &str) -> Result<String, GrammarError> {
    let lark = gbnf::to_lark(text)?;
    check_parts(&lark)?;
    lark_work::check(&lark)?;
    Ok(lark)
}

fn regex_to_lark(pattern: &str) -> Result<String, GrammarError> {
    check_regex(pattern)?;
    lark_work::check_regex(pattern)?;
    Ok(match pattern {
        // Nothing has no spelling between slashes.
        "" => "start: \"\"".to_owned(),
        _ => format!("start: /{}/", llguidance::regex_to_lark(pattern, "")),
    })
}

/// Finds syntax errors with their position; the compiler reports none for a regex, and drops a backslash at its end.
fn check_regex(pattern: &str) -> Result<(), GrammarError> {
    // A pattern that is too big to compile here is not wrong: the compiler works in another way, within its own limits.
    // So the smallest limit is the best: the syntax has been checked when it is reached.
    let parsed = RegexBuilder::new(pattern).size_limit(1).build();
    let Err(regex::Error::Syntax(message)) = parsed else {
        return Ok(());
    };
    let reason = message
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("error: "));
    let reason = reason.unwrap_or("this is not a regular expression");
    // The message marks the position below the pattern, which it shows indented by four.
    let column = message.lines().find_map(|line| {
        let marked = line.trim_end_matches('^');
        (marked.len() < line.len() && marked.trim().is_empty())
            .then(|| marked.len().saturating_sub(3))
    });
    Err(GrammarError::new(match column {
        Some(column) if !pattern.contains('\n') => format!("at character {column}: {reason}"),
        _ => reason.to_owned(),
    }))
}
