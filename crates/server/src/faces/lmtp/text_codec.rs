//! The vocabulary of a model, for the text features of version 2 (LM-911, LM-915).

use sapwood_engine::api::{ChatMessage, ChatRequest, SharedVocabulary};
use sapwood_engine::infill::infill_prompt;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::lmtp::{LmtpError, LmtpReason, TextCodec};
use sapwood_proto::steer::Token;
use serde_json::Value;

/// The vocabulary of a loaded model.
pub(super) struct EngineTextCodec(pub(super) SharedVocabulary);

impl TextCodec for EngineTextCodec {
    fn tokenize(&self, text: &str) -> Vec<Token> {
        // D-24: special tokens are not parsed in a raw text. The session adds the BOS where `add_bos` says so.
        self.0.tokenize(text, false)
    }

    fn bos(&self) -> Option<Token> {
        self.0.bos()
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.0.bytes(token)
    }

    fn infill(
        &self,
        bos: Option<Token>,
        prefix: &str,
        suffix: &str,
    ) -> Result<Vec<Token>, LmtpError> {
        infill_prompt(&*self.0, bos, prefix, suffix).map_err(|error| {
            let reason = if error.reason == ErrorReason::NO_INFILL {
                LmtpReason::UnsupportedOperation
            } else {
                LmtpReason::InvalidValue
            };
            LmtpError::new(reason, error.message)
        })
    }

    fn chat(&self, messages: &Value, add_generation_prompt: bool) -> Result<Vec<Token>, LmtpError> {
        let messages = messages.as_array().into_iter().flatten();
        let chat = ChatRequest {
            messages: messages.map(turn).collect::<Result<_, _>>()?,
            // Without a generation prompt the last turn is left open, for the model to continue.
            continue_last: !add_generation_prompt,
            ..ChatRequest::default()
        };
        self.0.chat(&chat).map_err(|error| {
            // A model without a template cannot do this at all; any other error is one of these messages.
            let reason = if error.reason == ErrorReason::NO_TEMPLATE {
                LmtpReason::UnsupportedOperation
            } else {
                LmtpReason::InvalidValue
            };
            LmtpError::new(reason, error.message)
        })
    }
}

fn turn(message: &Value) -> Result<ChatMessage, LmtpError> {
    let text = |key: &str| message.get(key).and_then(Value::as_str).map(str::to_owned);
    let role = text("role").ok_or_else(|| {
        let wrong = "'messages': each needs a role and, unless it calls tools, a content of text";
        LmtpError::new(LmtpReason::InvalidValue, wrong)
    })?;
    let tool_calls = message.get("tool_calls").cloned().unwrap_or(Value::Null);
    // An assistant's turn that calls tools has no content, or null, as in the OpenAI API.
    let content = match (text("content"), tool_calls.is_null()) {
        (Some(content), _) => content,
        (None, false) => String::new(),
        (None, true) => {
            let wrong = "'messages': each needs a content, and it must be text";
            return Err(LmtpError::new(LmtpReason::InvalidValue, wrong));
        }
    };
    Ok(ChatMessage {
        role,
        content,
        reasoning: text("reasoning_content").or_else(|| text("reasoning")),
        name: text("name"),
        tool_calls,
        tool_call_id: text("tool_call_id"),
    })
}
