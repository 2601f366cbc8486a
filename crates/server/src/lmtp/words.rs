//! A model's vocabulary as version 2's text mode needs it (LM-911, LM-915).
//!
//! Owns: [`Words`], and messages in the shape of OpenAI's as a conversation. Refuses to know: who asks.

use sapwood_engine::api::{Chat, Message, SharedVocabulary};
use sapwood_proto::lmtp::{Fault, Reason, Vocabulary};
use sapwood_proto::steer::Token;
use serde_json::Value;

/// The vocabulary of a loaded model.
pub(super) struct Words(pub(super) SharedVocabulary);

impl Vocabulary for Words {
    fn tokenize(&self, text: &str) -> Vec<Token> {
        self.0.tokenize(text, false)
    }

    fn beginning(&self) -> Option<Token> {
        self.0.beginning()
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.0.bytes(token)
    }

    fn chat(&self, messages: &Value, add_generation_prompt: bool) -> Result<Vec<Token>, Fault> {
        let messages = messages.as_array().into_iter().flatten();
        let chat = Chat {
            messages: messages.map(turn).collect::<Result<_, _>>()?,
            continue_last: !add_generation_prompt,
            ..Chat::default()
        };
        self.0.chat(&chat).map_err(|fault| {
            let reason = if fault.reason == "NO_TEMPLATE" {
                Reason::UnsupportedOperation
            } else {
                Reason::InvalidValue
            };
            Fault::new(reason, fault.message)
        })
    }
}

fn turn(message: &Value) -> Result<Message, Fault> {
    let text = |key: &str| message.get(key).and_then(Value::as_str).map(str::to_owned);
    let role = text("role").ok_or_else(|| {
        let wrong = "'messages': each needs a role and, unless it calls tools, a content of text";
        Fault::new(Reason::InvalidValue, wrong)
    })?;
    let tool_calls = message.get("tool_calls").cloned().unwrap_or(Value::Null);
    let content = match (text("content"), tool_calls.is_null()) {
        (Some(content), _) => content,
        (None, false) => String::new(),
        (None, true) => {
            let wrong = "'messages': each needs a content, and it must be text";
            return Err(Fault::new(Reason::InvalidValue, wrong));
        }
    };
    Ok(Message {
        role,
        content,
        name: text("name"),
        tool_calls,
        tool_call_id: text("tool_call_id"),
    })
}
