//! [`CallArguments`]: the form in which a template expects the arguments of earlier calls.
//!
//! On the wire they are JSON texts. Most templates iterate over the members or print them with `tojson`, so they need
//! objects; those of DeepSeek append them to a text.

use std::borrow::Cow;

use minijinja::Error;
use serde_json::{Value, json};

use super::{Template, TemplateError, TemplatePiece, bounds};
use crate::api::{ChatMessage, ChatRequest};

/// The form of the arguments of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallArguments {
    Objects,
    Texts,
}

impl CallArguments {
    /// Returns the arguments of a call in this form.
    ///
    /// # Errors
    /// They are more than the budget allows.
    pub(super) fn of(self, arguments: &Value) -> Result<Cow<'_, Value>, Error> {
        match (self, arguments) {
            (Self::Objects, Value::String(text)) if text.trim_start().starts_with('{') => {
                // Each element or member takes one of these.
                let begins = |byte: &u8| matches!(byte, b',' | b':' | b'[' | b'{');
                let parts = text.bytes().filter(begins).count();
                bounds::check(parts.saturating_mul(bounds::MEMBER_BYTES))?;
                // Anything else stays a text: templates iterate over the members.
                let parsed = serde_json::from_str(text).ok();
                let parsed = parsed.filter(Value::is_object);
                Ok(parsed.map_or(Cow::Borrowed(arguments), Cow::Owned))
            }
            (Self::Texts, Value::Object(_)) => {
                bounds::check(0)?;
                Ok(Cow::Owned(arguments.to_string().into()))
            }
            _ => Ok(Cow::Borrowed(arguments)),
        }
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
