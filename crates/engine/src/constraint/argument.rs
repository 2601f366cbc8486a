//! [`Argument`]: what a request writes after the name of a native constraint (AI-840).
//!
//! There are two forms. An **object** has the member `value` and otherwise only members of this list:
//!
//! | member | type | meaning |
//! |---|---|---|
//! | `value` | string; for options a list, for schemas anything | the pattern |
//! | `prefix` | string | comes first in the output; not part of the matched text |
//! | `max_tokens` | number | the sequence ends after as many tokens, those of the prefix not counted |
//! | `stop` | string | the sequence ends when the matched text contains it |
//! | `store_var` | string | the variable that gets the matched text, without `stop` and what follows it |
//!
//! Everything else is **the pattern itself**, character by character: a regex in quotes matches quotes. A schema is then
//! JSON text, and options are a JSON list of strings. An object with `value` and a member that is not in the list is a
//! pattern if it can be one, that is, for a schema and for a substring; for other kinds it is an error, because it is a
//! misspelled member rather than a grammar.

use serde_json::{Map, Value};

use super::grammar::{GrammarError, GrammarText, Kind};
use super::steerer::Ending;

const MEMBERS: [&str; 5] = ["value", "prefix", "max_tokens", "stop", "store_var"];

/// Bytes that the name of a variable may have (AI-953).
const VARIABLE_NAME_BYTES: usize = 256;

/// An argument, read but not compiled.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Argument {
    pattern: Pattern,
    prefix: String,
    ending: Ending,
}

/// A pattern as it was written.
#[derive(Clone, Debug, PartialEq)]
enum Pattern {
    Text(String),
    Json(Value),
}

impl Argument {
    /// Reads the argument of a constraint of this kind.
    pub(super) fn parse(kind: Kind, text: &str) -> Result<Self, GrammarError> {
        match object_form(kind, text)? {
            Some(members) => Self::from_members(members),
            None => Ok(Self::of_pattern(text)),
        }
    }

    /// The pattern itself, in whatever form the text is.
    pub(super) fn of_pattern(text: &str) -> Self {
        Self {
            pattern: Pattern::Text(text.to_owned()),
            prefix: String::new(),
            ending: Ending::default(),
        }
    }

    fn from_members(mut members: Map<String, Value>) -> Result<Self, GrammarError> {
        let prefix = string(&mut members, "prefix")?.unwrap_or_default();
        let ending = Ending {
            prefix_bytes: prefix.len(),
            max_tokens: count(&mut members, "max_tokens")?,
            stop: string(&mut members, "stop")?,
            store_var: string(&mut members, "store_var")?,
        };
        if ending.stop.as_ref().is_some_and(String::is_empty) {
            return Err(GrammarError::new(
                "`stop` is empty: leave it out".to_owned(),
            ));
        }
        if let Some(name) = &ending.store_var
            && !(1..=VARIABLE_NAME_BYTES).contains(&name.len())
        {
            return Err(GrammarError::new(format!(
                "`store_var` must have 1 to {VARIABLE_NAME_BYTES} bytes"
            )));
        }
        let pattern = match members.remove("value") {
            Some(Value::String(text)) => Pattern::Text(text),
            Some(value) => Pattern::Json(value),
            None => return Err(GrammarError::new("`value` is missing".to_owned())),
        };
        Ok(Self {
            pattern,
            prefix,
            ending,
        })
    }

    /// Returns when the sequence ends, besides the end of the grammar.
    pub(super) fn ending(&self) -> Ending {
        self.ending.clone()
    }

    /// Returns the grammar, in the language of the compiler.
    pub(super) fn grammar(&self, kind: Kind) -> Result<GrammarText, GrammarError> {
        match (kind, &self.pattern) {
            (Kind::JsonSchema, Pattern::Text(text)) => {
                GrammarText::schema(read_json(text)?, &self.prefix)
            }
            (Kind::JsonSchema, Pattern::Json(value)) => {
                GrammarText::schema(value.clone(), &self.prefix)
            }
            (Kind::Options, Pattern::Text(text)) => {
                GrammarText::options(&options(&read_json(text)?)?, &self.prefix)
            }
            (Kind::Options, Pattern::Json(value)) => {
                GrammarText::options(&options(value)?, &self.prefix)
            }
            (_, Pattern::Json(_)) => Err(GrammarError::new("`value` must be a string".to_owned())),
            (Kind::Regex, Pattern::Text(text)) => Ok(GrammarText::regex(text, &self.prefix)),
            (Kind::Lark, Pattern::Text(text)) => Ok(GrammarText::lark(text, &self.prefix)),
            (Kind::Gbnf, Pattern::Text(text)) => Ok(GrammarText::gbnf(text, &self.prefix)),
            (Kind::Substring, Pattern::Text(text)) => GrammarText::substring(text, &self.prefix),
        }
    }
}

/// Returns the members if the argument is in the form of an object.
fn object_form(kind: Kind, text: &str) -> Result<Option<Map<String, Value>>, GrammarError> {
    if !text.trim_start().starts_with('{') {
        return Ok(None);
    }
    let Ok(Value::Object(members)) = serde_json::from_str(text) else {
        // Not JSON, so the pattern itself; if it was meant as JSON, the reader of the pattern finds the position.
        return Ok(None);
    };
    if !members.contains_key("value") {
        return Ok(None);
    }
    let unknown = members.keys().find(|key| !MEMBERS.contains(&key.as_str()));
    match unknown {
        None => Ok(Some(members)),
        Some(_) if matches!(kind, Kind::JsonSchema | Kind::Substring) => Ok(None),
        Some(unknown) => Err(GrammarError::new(format!(
            "unknown member `{}`; an argument may have {}",
            unknown.chars().take(64).collect::<String>(),
            MEMBERS.join(", "),
        ))),
    }
}

fn read_json(text: &str) -> Result<Value, GrammarError> {
    // `serde_json` bounds the depth, and everything after it recurses at most as deep.
    serde_json::from_str(text).map_err(|error| GrammarError::new(error.to_string()))
}

fn options(value: &Value) -> Result<Vec<String>, GrammarError> {
    let wrong = |at: String| GrammarError::new(format!("{at}: options are a list of strings"));
    let list = value
        .as_array()
        .ok_or_else(|| wrong("at option 0".to_owned()))?;
    let text = |(index, option): (usize, &Value)| match option {
        Value::String(text) => Ok(text.clone()),
        _ => Err(wrong(format!("at option {index}"))),
    };
    list.iter().enumerate().map(text).collect()
}

fn string(members: &mut Map<String, Value>, name: &str) -> Result<Option<String>, GrammarError> {
    match members.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(GrammarError::new(format!("`{name}` must be a string"))),
    }
}

fn count(members: &mut Map<String, Value>, name: &str) -> Result<Option<usize>, GrammarError> {
    let wrong = || GrammarError::new(format!("`{name}` must be a whole number of at least 1"));
    match members.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().map(usize::try_from) {
            Some(Ok(count)) if count > 0 => Ok(Some(count)),
            _ => Err(wrong()),
        },
    }
}
