//! [`DeclaredTools`]: the tools of a request, as far as a parser needs them.

use std::collections::HashMap;

use serde_json::Value;

use super::literal::python_json;

/// The schemas of the arguments of the tools, by the names of these.
///
/// Formats that write arguments without quotes do not tell the text `5` from the number; the schema does.
#[derive(Debug, Default)]
pub(crate) struct DeclaredTools(HashMap<String, Value>);

/// What a schema allows, as far as a parser needs to know: the alternatives of which it consists, behind all references.
#[derive(Debug)]
pub(super) struct Schema<'a> {
    /// What references refer to.
    root: &'a Value,
    alternatives: Vec<Alternative<'a>>,
}

#[derive(Clone, Debug)]
struct Alternative<'a> {
    schema: &'a Value,
    /// The types that it names. None: it may be anything.
    kinds: Vec<&'static str>,
}

/// Schemas that are looked at to find the alternatives of one, because references may lead in circles; and values, of
/// which most are of one type.
const SCHEMAS_MAX: usize = 64;
/// Bytes of a reference. They are read for every argument.
const POINTER_BYTES_MAX: usize = 1_024;
/// Up to here, numbers with a fraction are those that they seem to be.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
/// The types of JSON Schema.
const KINDS: [&str; 7] = [
    "null", "boolean", "integer", "number", "string", "array", "object",
];

impl DeclaredTools {
    /// Reads definitions in OpenAI's shape.
    pub(crate) fn of(tools: &Value) -> Self {
        let tools = tools.as_array().map(Vec::as_slice).unwrap_or_default();
        let all = tools.iter().filter_map(|tool| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?;
            let parameters = function.get("parameters").cloned().unwrap_or_default();
            Some((name.to_owned(), parameters))
        });
        Self(all.collect())
    }

    /// Whether there is a tool of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Whether the name of a tool begins so.
    pub(super) fn has_prefix(&self, prefix: &str) -> bool {
        self.0.keys().any(|name| name.starts_with(prefix))
    }

    /// The schema of a function's arguments.
    pub(super) fn arguments(&self, function: &str) -> Option<Schema<'_>> {
        self.0.get(function).map(|root| Schema::new(root, [root]))
    }

    /// The JSON text of an argument that was written as bare text.
    pub(super) fn json(&self, function: &str, parameter: &str, text: &str) -> String {
        let arguments = self.arguments(function);
        let schema = arguments.and_then(|all| all.member(parameter));
        Schema::json_of(schema.as_ref(), text)
    }
}

impl<'a> Schema<'a> {
    /// What any of these allows.
    fn new(root: &'a Value, schemas: impl IntoIterator<Item = &'a Value>) -> Self {
        let alternatives = each(root, schemas, &mut { SCHEMAS_MAX }).concat();
        Self { root, alternatives }
    }

    /// The schema of a member.
    pub(super) fn member(&self, name: &str) -> Option<Self> {
        self.within(|schema| schema.get("properties")?.get(name))
    }

    /// The schema of what a list has.
    pub(super) fn item(&self) -> Option<Self> {
        self.within(|schema| schema.get("items"))
    }

    fn within(&self, find: impl Fn(&'a Value) -> Option<&'a Value>) -> Option<Self> {
        let schemas = self.alternatives.iter().map(|one| one.schema);
        let mut found = schemas.filter_map(find).peekable();
        found.peek()?;
        Some(Self::new(self.root, found))
    }

    /// Whether a list is no value of it, but an object is.
    pub(super) fn is_object(&self) -> bool {
        let (kinds, is_open) = self.kinds();
        kinds.contains(&"object") && !kinds.contains(&"array") && !is_open
    }

    /// The types that it names, and whether others are allowed too, because an alternative names none.
    fn kinds(&self) -> (Vec<&'static str>, bool) {
        let kinds = self.alternatives.iter().flat_map(|one| &one.kinds);
        let is_open = self.alternatives.iter().any(|one| one.kinds.is_empty());
        (kinds.copied().collect(), is_open)
    }

    /// The JSON text of a value that was written as bare text.
    pub(super) fn json_of(schema: Option<&Self>, text: &str) -> String {
        let (kinds, is_open) = schema.map_or((Vec::new(), true), Self::kinds);
        let names = |kind: &str| kinds.contains(&kind);
        let bare = match text.trim() {
            // Python's spellings, which models fall into.
            "True" if names("boolean") => "true",
            "False" if names("boolean") => "false",
            "None" if names("null") => "null",
            // What has no items has no tags either.
            "" if names("array") && !names("string") => "[]",
            "" if names("object") && !names("string") => "{}",
            other => other,
        };
        let Ok(value) = serde_json::from_str::<Value>(bare) else {
            // A model that has read much Python writes `{'a': True}`.
            let is_text = is_open || names("string");
            let literal = Some(bare).filter(|_| !is_text && bare.starts_with(['[', '{', '(']));
            let json = literal.and_then(python_json).filter(|json| {
                let value: Option<Value> = serde_json::from_str(json).ok();
                value.is_some_and(|value| kinds_of(&value).iter().any(|kind| names(kind)))
            });
            return json.unwrap_or_else(|| Value::from(text).to_string());
        };
        // A text that may be a text stays as it is, with its quotes.
        let keeps_quotes = value.is_string() && (!is_open || names("string"));
        if !keeps_quotes && (is_open || kinds_of(&value).iter().any(|kind| names(kind))) {
            return bare.to_owned();
        }
        let whole = names("integer").then(|| whole_number(&value, bare));
        whole
            .flatten()
            .unwrap_or_else(|| Value::from(text).to_string())
    }
}

/// The alternatives of which a schema consists. So many schemas may be looked at, which bounds the depth too.
fn alternatives<'a>(root: &'a Value, schema: &'a Value, left: &mut usize) -> Vec<Alternative<'a>> {
    let Some(rest) = left.checked_sub(1) else {
        return vec![Alternative::of(&Value::Null)];
    };
    *left = rest;
    let reference = schema.get("$ref").and_then(Value::as_str);
    let pointer = reference.and_then(|reference| reference.strip_prefix('#'));
    let pointer = pointer.filter(|pointer| pointer.len() <= POINTER_BYTES_MAX);
    if let Some(target) = pointer.and_then(|pointer| root.pointer(pointer)) {
        return alternatives(root, target, left);
    }
    let own = Alternative::of(schema);
    let list = |key: &str| schema.get(key)?.as_array();
    if !own.kinds.is_empty() {
        vec![own]
    } else if let Some(list) = list("anyOf").or_else(|| list("oneOf")) {
        each(root, list, left).concat()
    } else if let Some(list) = list("allOf") {
        intersection(each(root, list, left))
    } else {
        vec![own]
    }
}

/// The alternatives of each of these.
fn each<'a>(
    root: &'a Value,
    schemas: impl IntoIterator<Item = &'a Value>,
    left: &mut usize,
) -> Vec<Vec<Alternative<'a>>> {
    let mut parts = Vec::new();
    for schema in schemas {
        let is_over = *left == 0;
        parts.push(alternatives(root, schema, left));
        // What is not looked at may be anything, and so are all others together.
        if is_over {
            break;
        }
    }
    parts
}

/// What all parts allow. Of those that are objects all remain: each may have some of the properties.
fn intersection(parts: Vec<Vec<Alternative<'_>>>) -> Vec<Alternative<'_>> {
    // A part that names no types, such as a description, allows what the others do.
    let is_closed = |part: &&Vec<Alternative<'_>>| part.iter().all(|one| !one.kinds.is_empty());
    let closed: Vec<Vec<&str>> = parts
        .iter()
        .filter(is_closed)
        .map(|part| part.iter().flat_map(|one| &one.kinds).copied().collect())
        .collect();
    let has = |kinds: &[&str], kind: &str| {
        kinds.contains(&kind) || kind == "integer" && kinds.contains(&"number")
    };
    let is_allowed = |one: &Alternative<'_>| {
        let mut kinds = one.kinds.iter();
        kinds.any(|kind| closed.iter().all(|part| has(part, kind)))
    };
    let all = parts.concat();
    let allowed = all.iter().filter(|one| is_allowed(one)).cloned();
    let allowed: Vec<Alternative<'_>> = allowed.collect();
    // Where no part is closed, or nothing is allowed, what the model wrote tells more than the schema.
    if closed.is_empty() || allowed.is_empty() {
        return all;
    }
    allowed
}

impl<'a> Alternative<'a> {
    fn of(schema: &'a Value) -> Self {
        Self {
            schema,
            kinds: named_kinds(schema),
        }
    }
}

/// A number that was written with a fraction, or is too large for an integer of 64 bits, as an integer if it is whole.
fn whole_number(value: &Value, bare: &str) -> Option<String> {
    let number = value.as_f64()?;
    let digits = bare.strip_prefix('-').unwrap_or(bare);
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(bare.to_owned());
    }
    let is_whole = number.fract() == 0.0 && number.abs() <= EXACT_MAX;
    // Zero has a sign otherwise.
    is_whole.then(|| format!("{:.0}", number + 0.0))
}

/// The types that a schema names, or that its values have; empty if it does not say.
fn named_kinds(schema: &Value) -> Vec<&'static str> {
    let is_named = |kind: &&str| match (schema.get("type"), schema.get("enum")) {
        (Some(Value::Array(named)), _) => {
            let mut named = named.iter().take(SCHEMAS_MAX);
            named.any(|named| named == *kind)
        }
        (Some(named), _) => named == *kind,
        (None, Some(Value::Array(values))) => {
            let mut values = values.iter().take(SCHEMAS_MAX);
            values.any(|value| kinds_of(value).contains(kind))
        }
        (None, _) => match *kind {
            "array" if schema.get("items").is_some() => true,
            "object" if schema.get("properties").is_some() => true,
            kind => schema
                .get("const")
                .is_some_and(|value| kinds_of(value).contains(&kind)),
        },
    };
    KINDS.into_iter().filter(is_named).collect()
}

/// The names of a value's type in JSON Schema.
fn kinds_of(value: &Value) -> &'static [&'static str] {
    match value {
        Value::Null => &["null"],
        Value::Bool(_) => &["boolean"],
        Value::Number(number) if number.is_f64() => &["number"],
        Value::Number(_) => &["integer", "number"],
        Value::String(_) => &["string"],
        Value::Array(_) => &["array"],
        Value::Object(_) => &["object"],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bare_arguments_get_the_type_of_their_schema() {
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": {
            "text": {"type": "string"}, "count": {"type": "integer"}, "flag": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "list": {"type": ["array", "null"]}, "any": {},
            "share": {"type": "number"},
        }}}}]);
        let tools = DeclaredTools::of(&tools);
        for (parameter, text, expect) in [
            ("text", "5", "\"5\""),
            ("text", "\"quoted\"", "\"\\\"quoted\\\"\""),
            ("text", " a\n", "\" a\\n\""),
            ("count", " 5 ", "5"),
            ("count", "five", "\"five\""),
            ("flag", "True", "true"),
            ("flag", "5", "\"5\""),
            ("maybe", "null", "null"),
            ("maybe", "None", "null"),
            ("maybe", "5", "\"5\""),
            ("list", "[1, 2]", "[1, 2]"),
            ("list", "", "[]"),
            ("list", "['a', True]", "[\"a\", true]"),
            ("list", "{'a': 1}", "\"{'a': 1}\""),
            ("list", "['a'", "\"['a'\""),
            ("maybe", "['a']", "\"['a']\""),
            ("any", "['a']", "\"['a']\""),
            ("text", "", "\"\""),
            ("any", "5", "5"),
            ("any", "\"a\"", "\"a\""),
            ("any", "a", "\"a\""),
            ("unknown", "{\"a\": 1}", "{\"a\": 1}"),
            // Whole numbers are integers, however they are written.
            ("count", "5.0", "5"),
            ("count", "-5e1", "-50"),
            ("count", "-0.0", "0"),
            ("count", "5.5", "\"5.5\""),
            ("count", "123456789012345678901", "123456789012345678901"),
            ("share", "5.0", "5.0"),
        ] {
            assert_eq!(
                tools.json("f", parameter, text),
                expect,
                "{parameter} {text:?}"
            );
        }
        assert_eq!(tools.json("g", "text", "5"), "5");
        assert!(tools.has("f") && !tools.has("g"));
        assert!(tools.has_prefix("") && !tools.has_prefix("fg"));
    }

    /// Schemas as generators of them write them: with references, and with alternatives that name no type.
    #[test]
    fn references_and_alternatives_are_followed() {
        let parameters = json!({
            "$defs": {
                "Point": {"properties": {"x": {"type": "integer"}, "name": {"type": "string"}}},
                "Colour": {"enum": ["1", "2"]},
                "Zip": {"type": "string", "pattern": "[0-9]{5}"},
                "Loop": {"$ref": "#/$defs/Loop"},
                "Wide": {"anyOf": [{"$ref": "#/$defs/Wide"}, {"$ref": "#/$defs/Wide"}, {"$ref": "#/$defs/Wide"}]},
            },
            "properties": {
                "at": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
                "elsewhere": {"anyOf": [{"$ref": "other.json"}, {"type": "null"}]},
                "either": {"anyOf": [{"$ref": "other.json"}, {"type": "string"}]},
                "colour": {"allOf": [{"$ref": "#/$defs/Colour"}]},
                "one": {"const": 1},
                "points": {"items": {"$ref": "#/$defs/Point"}},
                "loop": {"$ref": "#/$defs/Loop"},
                "wide": {"$ref": "#/$defs/Wide"},
                "zip": {"allOf": [{"$ref": "#/$defs/Zip"}, {"description": "zip code"}]},
                "short": {"allOf": [{"type": "string"}, {"maxLength": 5}]},
                "some": {"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "string"}]},
                "known": {"allOf": [{"anyOf": [{"type": "string"}, {"$ref": "other.json"}]}, {"type": "boolean"}]},
                "whole": {"allOf": [{"type": "number"}, {"type": "integer"}]},
                "both": {"allOf": [{"$ref": "#/$defs/Point"}, {"properties": {"z": {"type": "string"}}}]},
                "said": {"allOf": [{"description": "anything"}, {"maxLength": 5}]},
                "never": {"allOf": [{"type": "string"}, {"type": "boolean"}]},
            },
        });
        let tools = json!([{"function": {"name": "f", "parameters": parameters}}]);
        let tools = DeclaredTools::of(&tools);
        for (parameter, text, expect) in [
            ("at", "{\"x\": 1}", "{\"x\": 1}"),
            ("at", "None", "null"),
            ("at", "5", "\"5\""),
            ("elsewhere", "{\"x\": 1}", "{\"x\": 1}"),
            ("elsewhere", "null", "null"),
            ("elsewhere", "None", "null"),
            ("elsewhere", "\"a\"", "\"a\""),
            ("elsewhere", "far", "\"far\""),
            ("either", "[1]", "[1]"),
            ("either", "\"a\"", "\"\\\"a\\\"\""),
            ("colour", "1", "\"1\""),
            ("one", "1", "1"),
            ("points", "[{}]", "[{}]"),
            ("points", "", "[]"),
            ("loop", "5", "5"),
            ("wide", "{}", "{}"),
            // All of its schemas hold at once.
            ("zip", "90210", "\"90210\""),
            ("short", "90210", "\"90210\""),
            ("some", "None", "\"None\""),
            ("known", "True", "true"),
            ("known", "5", "\"5\""),
            ("whole", "5.0", "5"),
            ("both", "{\"x\": 1}", "{\"x\": 1}"),
            ("both", "5", "\"5\""),
            ("said", "5", "5"),
            ("never", "5", "\"5\""),
            ("never", "true", "true"),
        ] {
            let found = tools.json("f", parameter, text);
            assert_eq!(found, expect, "{parameter} {text:?}");
        }
        let arguments = tools.arguments("f").unwrap();
        let point = arguments.member("points").and_then(|points| points.item());
        let x = point.and_then(|point| point.member("x"));
        assert_eq!(Schema::json_of(x.as_ref(), "1.0"), "1");
        let both = arguments.member("both").expect("it is declared");
        let json = |name: &str| Schema::json_of(both.member(name).as_ref(), "1");
        assert_eq!((json("x"), json("z")), ("1".to_owned(), "\"1\"".to_owned()));
        let is_object = |name: &str| arguments.member(name).is_some_and(|it| it.is_object());
        assert!(is_object("at") && !is_object("elsewhere") && !is_object("points"));
    }
}
