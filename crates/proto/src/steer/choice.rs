//! [`ControllerChoice`] and [`ConstraintChoice`]: which steerer a request asks for, as every face decodes it.
//!
//! Both become a [`SteerCall`](super::SteerCall): a controller by its name, a native constraint as `sapwood:KIND`
//! (AI-840). A request may have one of each; their masks are then intersected (D-38).

use serde_json::{Map, Value, json};

use crate::clip::shown;

/// Bytes of a controller's argument, at most.
pub const CONTROLLER_ARG_BYTES_MAX: usize = 1 << 20;
/// Bytes of a controller's name, at most: a tag has 50, a hash 64, an address of a release more.
const CONTROLLER_ID_BYTES_MAX: usize = 256;

/// The controller of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerChoice {
    /// A module id, a tag, or `sapwood:KIND`.
    pub id: String,
    /// The argument, as the controller gets it.
    pub arg: String,
}

/// The native constraint of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintChoice {
    /// The kind of its pattern.
    pub kind: ConstraintKind,
    /// The pattern: a regular expression, a JSON Schema, a grammar, or a text. For [`ConstraintKind::Options`] a JSON list
    /// of strings.
    pub value: String,
}

/// The kinds of native constraints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConstraintKind {
    /// A regular expression.
    Regex,
    /// A JSON Schema.
    JsonSchema,
    /// A Lark grammar.
    Lark,
    /// A grammar in llama.cpp's GBNF.
    Gbnf,
    /// A contiguous piece of a text.
    Substring,
    /// One of a list of texts.
    Options,
}

/// A choice that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {why}")]
pub struct InvalidChoice {
    /// The member: `controller`, `controller_arg` or `response_format`.
    pub field: &'static str,
    /// What is wrong with it, and what would be valid.
    pub why: String,
}

type Read<T> = Result<T, InvalidChoice>;

impl ControllerChoice {
    /// The native constraint that it names (AI-840), which gives the form of the output.
    #[must_use]
    pub fn native(&self) -> Option<ConstraintKind> {
        ConstraintKind::from_name(self.id.strip_prefix("sapwood:")?)
    }

    /// Reads the members `controller` and `controller_arg` of a request: a name with the argument beside it, or an object
    /// of `id` (Evergreen's `module`) and `arg`. An argument that is a string is taken as it is, other JSON as its text
    /// (AI-911).
    ///
    /// # Errors
    /// Members of the wrong type, an argument given twice, or one that is too long.
    pub fn from_json(controller: &Value, beside: Option<&Value>) -> Read<Self> {
        let beside = beside.filter(|arg| !arg.is_null());
        let (id, arg) = match controller {
            Value::String(id) => (id.clone(), beside.map(argument)),
            Value::Object(members) => {
                let (id, arg) = members_of_controller(members)?;
                if arg.is_some() && beside.is_some() {
                    let why = "repeats the argument that `controller` has";
                    return Err(InvalidChoice::new(ARG, why));
                }
                (id, arg.or(beside).map(argument))
            }
            _ => return Err(InvalidChoice::new(CONTROLLER, SHAPE)),
        };
        Self::new(id, arg.unwrap_or_default())
    }

    /// A controller with its argument.
    ///
    /// # Errors
    /// The name is empty or too long, or the argument is too long.
    pub fn new(id: impl Into<String>, arg: impl Into<String>) -> Read<Self> {
        let (id, arg) = (id.into(), arg.into());
        if id.is_empty() || id.len() > CONTROLLER_ID_BYTES_MAX {
            let why = format!("must be a name of 1 to {CONTROLLER_ID_BYTES_MAX} bytes");
            return Err(InvalidChoice::new(CONTROLLER, why));
        }
        if arg.len() > CONTROLLER_ARG_BYTES_MAX {
            let why = format!("must have at most {CONTROLLER_ARG_BYTES_MAX} bytes");
            return Err(InvalidChoice::new(ARG, why));
        }
        Ok(Self { id, arg })
    }

    /// The object of EV-602, for another server.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({"module": self.id, "arg": self.arg})
    }
}

fn members_of_controller(members: &Map<String, Value>) -> Read<(String, Option<&Value>)> {
    let (mut id, mut arg) = (None, None);
    for (name, value) in members {
        match (name.as_str(), value) {
            (_, Value::Null) => {}
            ("id" | "module", Value::String(text)) if id.is_none() => id = Some(text.clone()),
            ("arg", value) => arg = Some(value),
            _ => {
                let why = format!("cannot have the member {:?}; it {SHAPE}", shown(name));
                return Err(InvalidChoice::new(CONTROLLER, why));
            }
        }
    }
    // Without a name there is nothing to run, and an empty object is more likely a mistake than "no controller".
    let id = id.ok_or_else(|| InvalidChoice::new(CONTROLLER, SHAPE))?;
    Ok((id, arg))
}

/// A controller's argument: a string as it is, other JSON as its text (AI-911).
fn argument(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

impl ConstraintKind {
    /// Every kind.
    pub const ALL: [Self; 6] = [
        Self::Regex,
        Self::JsonSchema,
        Self::Lark,
        Self::Gbnf,
        Self::Substring,
        Self::Options,
    ];

    /// The name behind `sapwood:`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Regex => "regex",
            Self::JsonSchema => "json-schema",
            Self::Lark => "lark",
            Self::Gbnf => "gbnf",
            Self::Substring => "substring",
            Self::Options => "options",
        }
    }

    /// The kind of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Its name among controllers: `sapwood:KIND` (AI-331).
    #[must_use]
    pub fn controller(self) -> String {
        format!("sapwood:{}", self.name())
    }

    /// Its name as a type of `response_format`.
    const fn format(self) -> &'static str {
        match self {
            Self::JsonSchema => "json_schema",
            Self::Options => "choice",
            other => other.name(),
        }
    }
}

impl ConstraintChoice {
    /// A constraint of this kind.
    #[must_use]
    pub fn new(kind: ConstraintKind, value: impl Into<String>) -> Self {
        let value = value.into();
        Self { kind, value }
    }

    /// Any JSON object.
    #[must_use]
    pub fn json_object() -> Self {
        Self::new(ConstraintKind::JsonSchema, r#"{"type":"object"}"#)
    }

    /// A grammar: GBNF if it has `::=`, which Lark has not, else Lark (OA-508).
    #[must_use]
    pub fn grammar(text: impl Into<String>) -> Self {
        let text = text.into();
        let kind = if text.contains("::=") {
            ConstraintKind::Gbnf
        } else {
            ConstraintKind::Lark
        };
        Self::new(kind, text)
    }

    /// One of these texts.
    #[must_use]
    pub fn options(texts: &[String]) -> Self {
        Self::new(ConstraintKind::Options, json!(texts).to_string())
    }

    /// Reads a `response_format`; `None` for text. The pattern is in the member that OpenAI's API or vLLM has for it, or
    /// in Evergreen's `schema` (EV-602, OA-508).
    ///
    /// # Errors
    /// An unknown type, or a pattern that is missing or of the wrong type.
    pub fn from_response_format(format: &Value) -> Read<Option<Self>> {
        let wrong = |why: &str| Err(InvalidChoice::new(FORMAT, why));
        let Some(members) = format.as_object() else {
            return wrong("must be an object with a member `type`");
        };
        let kind = match members.get("type").filter(|kind| !kind.is_null()) {
            None => return Ok(None),
            Some(kind) => kind.as_str().unwrap_or_default(),
        };
        let pattern = Pattern { members, kind };
        let kind = match kind {
            "text" => return Ok(None),
            "json_object" => return Ok(Some(Self::json_object())),
            "json_schema" => return pattern.schema().map(Some),
            "choice" | "options" => return pattern.options().map(Some),
            "grammar" => return Ok(Some(Self::grammar(pattern.text()?))),
            "regex" => ConstraintKind::Regex,
            "lark" => ConstraintKind::Lark,
            "gbnf" => ConstraintKind::Gbnf,
            "substring" => ConstraintKind::Substring,
            _ => {
                return wrong(
                    "has an unknown type; there are text, json_object, json_schema, regex, choice, lark, gbnf, \
                     grammar and substring",
                );
            }
        };
        Ok(Some(Self::new(kind, pattern.text()?)))
    }

    /// The `response_format` of EV-602, for another server: the inverse of [`Self::from_response_format`].
    #[must_use]
    pub fn to_response_format(&self) -> Value {
        let kind = self.kind.format();
        match self.kind {
            ConstraintKind::Options => {
                let choices: Value = serde_json::from_str(&self.value).unwrap_or_default();
                json!({"type": kind, "choices": choices})
            }
            _ => json!({"type": kind, "schema": self.value}),
        }
    }

    /// The argument for `sapwood:KIND`: an object of one member, so that no pattern is mistaken for such an object
    /// (AI-840).
    #[must_use]
    pub fn argument(&self) -> String {
        let value = match self.kind {
            ConstraintKind::Options => serde_json::from_str(&self.value).unwrap_or_default(),
            _ => Value::from(self.value.as_str()),
        };
        json!({"value": value}).to_string()
    }
}

/// The members of a `response_format` that may hold its pattern.
struct Pattern<'a> {
    members: &'a Map<String, Value>,
    kind: &'a str,
}

impl<'a> Pattern<'a> {
    /// The pattern: of the member that is named like the type, or one of the others that clients use.
    fn value(&self) -> Option<&'a Value> {
        let names = [self.kind, "schema", "pattern", "grammar"];
        let mut values = names.iter().filter_map(|name| self.members.get(*name));
        values.find(|value| !value.is_null())
    }

    fn missing(&self, what: &str) -> InvalidChoice {
        let why = format!("of type {} needs {what}", self.kind);
        InvalidChoice::new(FORMAT, why)
    }

    fn text(&self) -> Read<String> {
        let text = self.value().and_then(Value::as_str);
        let text = text.filter(|text| !text.is_empty());
        text.map(str::to_owned)
            .ok_or_else(|| self.missing("a pattern: a string in the member `schema`"))
    }

    /// A schema: JSON or its text, in `schema` or in `json_schema.schema`.
    fn schema(&self) -> Read<ConstraintChoice> {
        let schema = match self.members.get("json_schema") {
            Some(Value::Object(outer)) => outer.get("schema"),
            _ => self.value(),
        };
        let text = match schema {
            Some(Value::String(text)) if !text.is_empty() => text.clone(),
            Some(schema @ (Value::Object(_) | Value::Bool(_))) => schema.to_string(),
            _ => return Err(self.missing("a JSON Schema in the member `json_schema.schema`")),
        };
        Ok(ConstraintChoice::new(ConstraintKind::JsonSchema, text))
    }

    fn options(&self) -> Read<ConstraintChoice> {
        let list = self.members.get("choices").or_else(|| self.value());
        let texts = list.and_then(Value::as_array).and_then(|list| {
            let texts = list.iter().map(|text| text.as_str().map(str::to_owned));
            texts.collect::<Option<Vec<_>>>()
        });
        let texts = texts.filter(|texts| !texts.is_empty());
        let texts = texts.ok_or_else(|| self.missing("a list of strings in the member `choices`"));
        Ok(ConstraintChoice::options(&texts?))
    }
}

impl InvalidChoice {
    fn new(field: &'static str, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { field, why }
    }
}

const CONTROLLER: &str = "controller";
const ARG: &str = "controller_arg";
const FORMAT: &str = "response_format";
const SHAPE: &str = "must be a name, or an object of `id` and `arg`";

#[cfg(test)]
mod tests {
    use super::*;

    fn controller(controller: Value, beside: Value) -> Result<(String, String), &'static str> {
        match ControllerChoice::from_json(&controller, Some(&beside)) {
            Ok(choice) => Ok((choice.id, choice.arg)),
            Err(error) => Err(error.field),
        }
    }

    /// AI-911
    #[test]
    fn ai_931_a_controller_is_a_name_or_an_object() {
        let read = |id: &str, arg: &str| Ok((id.to_owned(), arg.to_owned()));
        for (given, beside, expect) in [
            (json!("tag"), Value::Null, read("tag", "")),
            (json!("tag"), json!("as {it} is"), read("tag", "as {it} is")),
            (json!("tag"), json!({"a": [1]}), read("tag", r#"{"a":[1]}"#)),
            (json!({"id": "tag"}), json!(7), read("tag", "7")),
            (
                json!({"module": "tag", "arg": false}),
                Value::Null,
                read("tag", "false"),
            ),
            (
                json!({"id": "tag", "arg": null}),
                json!("x"),
                read("tag", "x"),
            ),
            (
                json!({"id": "tag", "arg": "a"}),
                json!("b"),
                Err("controller_arg"),
            ),
            (
                json!({"id": "a", "module": "b"}),
                Value::Null,
                Err("controller"),
            ),
            (
                json!({"id": "a", "colour": 1}),
                Value::Null,
                Err("controller"),
            ),
            (json!({"arg": "a"}), Value::Null, Err("controller")),
            (json!({}), Value::Null, Err("controller")),
            (json!(""), Value::Null, Err("controller")),
            (json!(["tag"]), Value::Null, Err("controller")),
        ] {
            assert_eq!(
                controller(given.clone(), beside.clone()),
                expect,
                "{given} {beside}"
            );
        }
    }

    #[test]
    fn ai_1090_a_controllers_name_and_argument_have_limits() {
        let of = |id: usize, arg: usize| {
            ControllerChoice::new("i".repeat(id), "a".repeat(arg)).map_err(|error| error.field)
        };
        assert!(of(CONTROLLER_ID_BYTES_MAX, CONTROLLER_ARG_BYTES_MAX).is_ok());
        assert_eq!(of(CONTROLLER_ID_BYTES_MAX + 1, 0), Err(CONTROLLER));
        assert_eq!(of(1, CONTROLLER_ARG_BYTES_MAX + 1), Err(ARG));
    }

    /// EV-602
    #[test]
    fn oa_508_a_response_format_names_a_constraint() {
        use ConstraintKind::{Gbnf, JsonSchema, Lark, Options, Regex, Substring};
        for (format, expect) in [
            (
                json!({"type": "json_object"}),
                (JsonSchema, r#"{"type":"object"}"#),
            ),
            (
                json!({"type": "json_schema", "schema": "{\"type\":\"null\"}"}),
                (JsonSchema, r#"{"type":"null"}"#),
            ),
            (
                json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}),
                (JsonSchema, r#"{"type":"null"}"#),
            ),
            (json!({"type": "regex", "schema": "a+"}), (Regex, "a+")),
            (json!({"type": "regex", "regex": "a+"}), (Regex, "a+")),
            (json!({"type": "regex", "pattern": "a+"}), (Regex, "a+")),
            (
                json!({"type": "choice", "choices": ["yes", "no"]}),
                (Options, r#"["yes","no"]"#),
            ),
            (
                json!({"type": "choice", "choice": ["yes"]}),
                (Options, r#"["yes"]"#),
            ),
            (
                json!({"type": "lark", "grammar": "start: \"a\""}),
                (Lark, "start: \"a\""),
            ),
            (
                json!({"type": "grammar", "grammar": "root ::= \"a\""}),
                (Gbnf, "root ::= \"a\""),
            ),
            (
                json!({"type": "substring", "schema": "a b"}),
                (Substring, "a b"),
            ),
        ] {
            let choice = ConstraintChoice::from_response_format(&format).unwrap();
            let choice = choice.unwrap();
            assert_eq!((choice.kind, choice.value.as_str()), expect, "{format}");
            let again = ConstraintChoice::from_response_format(&choice.to_response_format());
            assert_eq!(again, Ok(Some(choice)), "{format}");
        }
        for none in [json!({}), json!({"type": "text"}), json!({"type": null})] {
            assert_eq!(ConstraintChoice::from_response_format(&none), Ok(None));
        }
        for bad in [
            json!("regex"),
            json!({"type": "haiku"}),
            json!({"type": 1}),
            json!({"type": "regex"}),
            json!({"type": "regex", "schema": ""}),
            json!({"type": "regex", "schema": 1}),
            json!({"type": "json_schema"}),
            json!({"type": "json_schema", "json_schema": {"name": "n"}}),
            json!({"type": "choice", "choices": []}),
            json!({"type": "choice", "choices": ["a", 1]}),
        ] {
            let error = ConstraintChoice::from_response_format(&bad).unwrap_err();
            assert_eq!(error.field, FORMAT, "{bad}");
        }
    }

    #[test]
    fn ai_840_a_pattern_is_never_mistaken_for_an_object_of_options() {
        let tricky = r#"{"value":"x"}"#;
        let argument = ConstraintChoice::new(ConstraintKind::Regex, tricky).argument();
        let read: Value = serde_json::from_str(&argument).unwrap();
        assert_eq!(read, json!({"value": tricky}));
        let options = ConstraintChoice::options(&["a".to_owned(), "b".to_owned()]);
        assert_eq!(options.argument(), r#"{"value":["a","b"]}"#);
        for kind in ConstraintKind::ALL {
            assert_eq!(ConstraintKind::from_name(kind.name()), Some(kind));
        }
        assert_eq!(
            ConstraintKind::JsonSchema.controller(),
            "sapwood:json-schema"
        );
    }
}
