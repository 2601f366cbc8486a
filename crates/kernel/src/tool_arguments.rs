//! [`ToolArguments`]: the arguments of a call of a tool, as JSON text.

use std::fmt;

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// The arguments of a complete call: JSON text on one line, without white space between its parts.
///
/// It is a text because [`Value`] has numbers of 64 bits: `123456789012345678901` would become `1.2345678901234568e+20`.
/// `serde_json::from_str` reads it as any type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolArguments(Box<str>);

impl ToolArguments {
    /// `None` if it is no JSON to all readers.
    pub(crate) fn of_text(json: &str) -> Option<Self> {
        // A raw value would do with less: half a surrogate pair, and a number beyond all floats.
        serde_json::from_str::<Value>(json).ok()?;
        Some(Self(one_line(json)))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<Value> for ToolArguments {
    fn from(value: Value) -> Self {
        Self(value.to_string().into())
    }
}

impl fmt::Display for ToolArguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ToolArguments {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        Ok(Self(one_line(raw.get())))
    }
}

/// JSON text without the white space between its parts. A line feed there would end the line of the call.
fn one_line(json: &str) -> Box<str> {
    let mut line = json.to_owned();
    let (mut in_text, mut is_escaped) = (false, false);
    line.retain(|c| {
        if !in_text {
            in_text = c == '"';
            return !c.is_ascii_whitespace();
        }
        in_text = is_escaped || c != '"';
        is_escaped = c == '\\' && !is_escaped;
        true
    });
    line.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_as_they_are_and_white_space_goes() {
        for (json, expect) in [
            (
                "{\n \"wei\" : 123456789012345678901,\r\n\t\"share\": 0.12345678901234567890 }",
                Some("{\"wei\":123456789012345678901,\"share\":0.12345678901234567890}"),
            ),
            (
                r#"{"a \" b": "c \\", "d": " "}"#,
                Some(r#"{"a \" b":"c \\","d":" "}"#),
            ),
            ("[1, 2]", Some("[1,2]")),
            (r#"{"a": "\ud800"}"#, None),
            (r#"{"a": 1e999}"#, None),
            ("{\"a\": 1", None),
        ] {
            let arguments = ToolArguments::of_text(json);
            assert_eq!(
                arguments.as_ref().map(ToolArguments::as_str),
                expect,
                "{json}"
            );
            if let Some(arguments) = arguments {
                let read: ToolArguments = serde_json::from_str(json).unwrap();
                assert_eq!(read, arguments);
            }
        }
    }
}
