//! [`DeclaredTools`]: the tools of a request, as far as a parser needs them.

use std::collections::HashMap;

use serde_json::Value;

/// The names of the tools, and the types of their parameters.
///
/// Formats that write arguments without quotes do not tell the text `5` from the number; the schema does.
#[derive(Debug, Default)]
pub(crate) struct DeclaredTools(HashMap<String, HashMap<String, ParameterTypes>>);

/// The JSON types that a schema allows; empty if it does not say.
#[derive(Debug, Default)]
struct ParameterTypes(Vec<String>);

impl DeclaredTools {
    /// Reads definitions in OpenAI's shape.
    pub(crate) fn of(tools: &Value) -> Self {
        let tools = tools.as_array().map(Vec::as_slice).unwrap_or_default();
        let all = tools.iter().filter_map(|tool| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?;
            let properties = function.pointer("/parameters/properties");
            let properties = properties.and_then(Value::as_object);
            let types = properties.into_iter().flatten();
            let types = types.map(|(name, schema)| (name.clone(), ParameterTypes::of(schema)));
            Some((name.to_owned(), types.collect()))
        });
        Self(all.collect())
    }

    /// Whether there is a tool of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The JSON text of an argument that was written as bare text.
    pub(super) fn json(&self, function: &str, parameter: &str, text: &str) -> String {
        let types = self.0.get(function).and_then(|all| all.get(parameter));
        let allowed = types.map(|types| &types.0[..]).unwrap_or_default();
        let is_allowed = |kind: &str| allowed.iter().any(|allowed| allowed == kind);
        let bare = text.trim();
        // Python's spellings, which models fall into.
        let bare = match bare {
            "True" if is_allowed("boolean") => "true",
            "False" if is_allowed("boolean") => "false",
            "None" if is_allowed("null") => "null",
            // What has no items has no tags either.
            "" if is_allowed("array") && !is_allowed("string") => "[]",
            "" if is_allowed("object") && !is_allowed("string") => "{}",
            other => other,
        };
        if let Ok(value) = serde_json::from_str::<Value>(bare)
            && (allowed.is_empty() || kinds(&value).iter().any(|kind| is_allowed(kind)))
            // A text that may be a text stays as it is, with its quotes.
            && (allowed.is_empty() || !value.is_string())
        {
            return bare.to_owned();
        }
        Value::from(text).to_string()
    }
}

impl ParameterTypes {
    fn of(schema: &Value) -> Self {
        let named = |of: &Value| -> Vec<String> {
            let list = of.as_array().map(Vec::as_slice);
            let list = list.unwrap_or_else(|| std::slice::from_ref(of));
            let names = list.iter().filter_map(Value::as_str);
            names.map(str::to_owned).collect()
        };
        if let Some(kind) = schema.get("type") {
            return Self(named(kind));
        }
        let any = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key));
        let any = any.and_then(Value::as_array).into_iter().flatten();
        Self(
            any.filter_map(|one| one.get("type"))
                .flat_map(named)
                .collect(),
        )
    }
}

/// The names of a value's type in JSON Schema.
fn kinds(value: &Value) -> &'static [&'static str] {
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
            ("text", "", "\"\""),
            ("any", "5", "5"),
            ("any", "\"a\"", "\"a\""),
            ("any", "a", "\"a\""),
            ("unknown", "{\"a\": 1}", "{\"a\": 1}"),
        ] {
            assert_eq!(
                tools.json("f", parameter, text),
                expect,
                "{parameter} {text:?}"
            );
        }
        assert_eq!(tools.json("g", "text", "5"), "5");
        assert!(tools.has("f") && !tools.has("g"));
    }
}
