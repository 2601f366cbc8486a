//! [`CallArguments`]: the form in which a template expects the arguments of earlier calls.
//!
//! On the wire they are JSON texts. Most templates iterate over the members or print them with `tojson`, so they need
//! objects; those of DeepSeek append them to a text.
//!
//! A [`Value`] has no integers of more than 64 bits, which arguments have where they are amounts or ids. So a text with such a one is
//! read as [`JsonMembers`] and [`serde_json::value::RawValue`], which keep the texts of numbers.

use std::borrow::Cow;
use std::fmt;

use minijinja::Error;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{Template, TemplateError, TemplatePiece, bounds};
use crate::api::{ChatMessage, ChatRequest};

/// The form of the arguments of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallArguments {
    Objects,
    Texts,
}

/// The arguments of one call, in the form that a template expects.
pub(super) enum FormedArguments<'a> {
    Value(Cow<'a, Value>),
    /// The text of an object with integers that no [`Value`] has.
    Exact(&'a RawValue),
}

/// The members of a JSON object, in order, with their texts.
pub(super) struct JsonMembers<'a>(pub(super) Vec<(String, &'a RawValue)>);

/// Digits of an integer that may be too large for a [`Value`].
const WIDE_DIGITS: usize = 19;

impl CallArguments {
    /// Returns the arguments of a call in this form.
    ///
    /// # Errors
    /// They are more than the budget allows.
    pub(super) fn of(self, arguments: &Value) -> Result<FormedArguments<'_>, Error> {
        match (self, arguments) {
            (Self::Objects, Value::String(text)) if text.trim_start().starts_with('{') => {
                // Each element or member takes one of these.
                let begins = |byte: &u8| matches!(byte, b',' | b':' | b'[' | b'{');
                let parts = text.bytes().filter(begins).count();
                bounds::check(parts.saturating_mul(bounds::MEMBER_BYTES))?;
                // Anything else stays a text: templates iterate over the members.
                let parsed = serde_json::from_str(text).ok();
                let Some(parsed) = parsed.filter(Value::is_object) else {
                    return Ok(FormedArguments::Value(Cow::Borrowed(arguments)));
                };
                // A raw value is looked at again at each level, so only few are read as such. A value is stricter, so it is read in any case.
                let exact = has_wide_integer(text)
                    .then(|| serde_json::from_str(text).ok())
                    .flatten();
                Ok(exact.map_or_else(
                    || FormedArguments::Value(Cow::Owned(parsed)),
                    FormedArguments::Exact,
                ))
            }
            (Self::Texts, Value::Object(_)) => {
                bounds::check(0)?;
                let text = arguments.to_string();
                Ok(FormedArguments::Value(Cow::Owned(text.into())))
            }
            _ => Ok(FormedArguments::Value(Cow::Borrowed(arguments))),
        }
    }
}

fn has_wide_integer(text: &str) -> bool {
    let runs = text.as_bytes().split(|byte| !byte.is_ascii_digit());
    runs.into_iter().any(|digits| digits.len() >= WIDE_DIGITS)
}

impl<'de> Deserialize<'de> for JsonMembers<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = JsonMembers<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(JsonMembers(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// What a text contains that prints the argument of the trial as JSON. The schema of its tool has another value there.
const PRINTED: &str = "{\"sapwood\":\"x\"";
/// What a text contains that prints it as Python prints a dictionary, which no model was trained on.
const PRINTED_BY_PYTHON: &str = "{'sapwood':'x'";

/// Finds out the form that a template expects, from how it renders a call in either.
///
/// # Errors
/// [`TemplateError::TooLong`]: nothing was found out.
pub(super) fn expected(template: &Template) -> Result<CallArguments, TemplateError> {
    // `None` if the template fails on this form.
    let printed = |form: CallArguments| -> Result<Option<String>, TemplateError> {
        let pieces = match template.render_with(&trial(), form) {
            Err(TemplateError::TooLong) => return Err(TemplateError::TooLong),
            Err(_) => return Ok(None),
            Ok(pieces) => pieces,
        };
        let text = pieces.iter().map(|piece| match piece {
            TemplatePiece::Template(text) | TemplatePiece::Plain(text) => text.as_str(),
        });
        Ok(Some(text.collect::<String>().replace(": ", ":")))
    };
    let objects = printed(CallArguments::Objects)?;
    // As JSON, or member by member, each in the syntax of the model.
    if let Some(text) = &objects
        && (text.contains(PRINTED) || !text.contains(PRINTED_BY_PYTHON))
    {
        return Ok(CallArguments::Objects);
    }
    Ok(match printed(CallArguments::Texts)? {
        // It fails on objects, which cannot be appended to a text, or prints them as Python does.
        Some(text) if objects.is_none() || text.contains(PRINTED) => CallArguments::Texts,
        _ => CallArguments::Objects,
    })
}

/// A conversation with one call. Its id is one that the templates of Mistral accept.
fn trial() -> ChatRequest {
    let message = |role: &str, content: &str| ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..ChatMessage::default()
    };
    let id = "sapwood01";
    let function = json!({"name": "trial", "arguments": {"sapwood": "x"}});
    let calls = json!([{"id": id, "type": "function", "function": function}]);
    let parameters = json!({"type": "object", "properties": {"sapwood": {"type": "string"}}});
    let tool = json!({"name": "trial", "description": "A trial.", "parameters": parameters});
    ChatRequest {
        messages: vec![
            message("user", "Hello"),
            ChatMessage {
                tool_calls: calls,
                ..message("assistant", "")
            },
            ChatMessage {
                name: Some("trial".to_owned()),
                tool_call_id: Some(id.to_owned()),
                ..message("tool", "y")
            },
        ],
        tools: json!([{"type": "function", "function": tool}]),
        ..ChatRequest::default()
    }
}
