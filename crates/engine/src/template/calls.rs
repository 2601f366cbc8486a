//! [`CallArguments`]: the form in which a template expects the arguments of earlier calls.
//!
//! On the wire they are JSON texts. Most templates iterate over the members or print them with `tojson`, so they need
//! objects; those of DeepSeek append them to a text.

use serde_json::{Value, json};

use super::{Template, TemplateError, TemplatePiece};
use crate::api::{ChatMessage, ChatRequest};

/// The form of the arguments of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallArguments {
    Objects,
    Texts,
}

impl CallArguments {
    /// Returns the calls with their arguments in this form.
    pub(super) fn of(self, calls: &Value) -> Value {
        let mut calls = calls.clone();
        for call in calls.as_array_mut().into_iter().flatten() {
            let Some(arguments) = call.pointer_mut("/function/arguments") else {
                continue;
            };
            match (self, &*arguments) {
                (Self::Objects, Value::String(text)) => {
                    let parsed = serde_json::from_str::<Value>(text);
                    // Anything else stays a text: templates iterate over the members.
                    if let Ok(parsed @ Value::Object(_)) = parsed {
                        *arguments = parsed;
                    }
                }
                (Self::Texts, Value::Object(_)) => *arguments = arguments.to_string().into(),
                _ => {}
            }
        }
        calls
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
