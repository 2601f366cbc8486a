//! Text instead of token ids: prompts, TOKENIZE, DETOKENIZE (LM-911 to LM-915).

use std::borrow::Cow;
use std::sync::Arc;

use bytes::BytesMut;
use bytestring::ByteString;

use super::extended::TextMode;
use crate::bounded_json::{self, JsonBounds, JsonUnread};
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::write::member;
use crate::lmtp::{ConnectionLimits, LmtpError, LmtpModelInfo, LmtpReason, TextCodec};
use crate::steer::Token;

/// Maximum size of an answer with tokens: every token takes several bytes, and a message has a size limit (LM-1202).
const ANSWER_BYTES_MAX: usize = 4_000_000;

/// What a request is about: the model, the name for it in the request, and what it takes to read text for it.
pub(super) struct RequestSubject {
    pub(super) name: ByteString,
    pub(super) model: Arc<LmtpModelInfo>,
    /// `None` if the model has no tokenizer here.
    pub(super) vocabulary: Option<Arc<dyn TextCodec>>,
    pub(super) limits: Arc<ConnectionLimits>,
}

impl RequestSubject {
    /// The vocabulary, or an error if the request needs one and there is none.
    fn vocabulary(&self) -> Result<&dyn TextCodec, LmtpError> {
        self.vocabulary.as_deref().ok_or_else(|| {
            let message = "this model has no tokenizer here; send token ids";
            LmtpError::new(LmtpReason::UnsupportedOperation, message)
        })
    }

    /// Tokenizes a text. `begins`: the text is at the beginning, so the tokenizer's BOS is added by default.
    pub(super) fn text(
        &self,
        members: &PayloadMembers<'_>,
        name: &str,
        begins: bool,
    ) -> Result<Vec<Token>, LmtpError> {
        let text = self.short_text(members, name)?;
        let bos = self.bos(members, begins)?;
        let mut tokens: Vec<_> = bos.into_iter().collect();
        tokens.extend(self.vocabulary()?.tokenize(&text));
        Ok(tokens)
    }

    /// The tokens of `prompt_text`, or of the prompt for fill in the middle between it and a `suffix` that is not empty.
    pub(super) fn prompt_text(
        &self,
        members: &PayloadMembers<'_>,
        begins: bool,
    ) -> Result<Vec<Token>, LmtpError> {
        let name = "prompt_text";
        let Some(behind) = members.suffix() else {
            return self.text(members, name, begins);
        };
        let suffix = self.short_text(members, "suffix")?;
        let prefix = self.short_text(members, name)?;
        // Both are one prompt.
        let before = members.value(name).map_or(0, |value| value.as_str().len());
        let bytes = before.saturating_add(behind.as_str().len());
        self.is_short("'prompt_text' with 'suffix'", bytes)?;
        let bos = self.bos(members, begins)?;
        self.vocabulary()?.infill(bos, &prefix, &suffix)
    }

    /// Reads a text, if the model has a tokenizer here.
    fn short_text<'m>(
        &self,
        members: &PayloadMembers<'m>,
        name: &str,
    ) -> Result<Cow<'m, str>, LmtpError> {
        let value = members.value(name).ok_or_else(|| {
            LmtpError::new(
                LmtpReason::MissingRequiredParameter,
                format!("'{name}' is required: a text"),
            )
        })?;
        let wrong = || LmtpError::new(LmtpReason::InvalidType, format!("'{name}' must be a text"));
        let text = value.string().ok_or_else(wrong)?;
        // Before the tokenizer runs, whose time grows with the text (D-47).
        self.is_short(&format!("'{name}'"), value.as_str().len())?;
        self.vocabulary()?;
        Ok(text)
    }

    /// The BOS token of a text, if it gets one.
    fn bos(&self, members: &PayloadMembers<'_>, begins: bool) -> Result<Option<Token>, LmtpError> {
        Ok(match members.flag("add_bos")? {
            // By default the tokenizer decides; a client that asks gets the model's BOS even if the tokenizer adds
            // none.
            None if begins => self.vocabulary()?.bos(),
            Some(true) => self.model.bos,
            None | Some(false) => None,
        })
    }

    /// The tokens of a conversation, by the model's chat template.
    pub(super) fn messages(&self, members: &PayloadMembers<'_>) -> Result<Vec<Token>, LmtpError> {
        let wrong = || {
            let message = "'messages' must be a list of messages, each with role and content";
            LmtpError::new(LmtpReason::InvalidType, message)
        };
        let value = members.value("messages").ok_or_else(wrong)?;
        self.is_short("'messages'", value.as_str().len())?;
        // The message was only scanned, which bounds bytes and depth. A tree of values costs many times its text
        // (D-47).
        let bounds = JsonBounds {
            values: self.limits.max_message_values,
            entries: self.limits.max_messages,
        };
        let messages = bounded_json::read(value.as_str().as_bytes(), bounds);
        let messages = messages.map_err(|unread| match unread {
            JsonUnread::Syntax(_) => wrong(),
            _ => LmtpError::new(LmtpReason::InvalidValue, format!("'messages' has {unread}")),
        })?;
        let generation = members.flag("add_generation_prompt")?.unwrap_or(true);
        self.vocabulary()?.chat(&messages, generation)
    }

    fn is_short(&self, what: &str, bytes: usize) -> Result<(), LmtpError> {
        let max = self.limits.max_text_bytes;
        if bytes <= max {
            return Ok(());
        }
        let message = format!("{what} must have at most {max} bytes");
        Err(LmtpError::new(LmtpReason::InvalidValue, message))
    }

    /// Reads which text the items shall have (LM-911 to LM-913).
    pub(super) fn shown(
        &self,
        members: &PayloadMembers<'_>,
        is_text: bool,
    ) -> Result<TextMode, LmtpError> {
        let text = match members.value("text") {
            Some(value) if value.string().as_deref() == Some("bytes") => Some("bytes"),
            Some(_) => members.flag("text")?.map(|on| if on { "text" } else { "" }),
            None => is_text.then_some("text"),
        };
        let shown = TextMode {
            text: matches!(text, Some("text" | "bytes")),
            bytes: text == Some("bytes"),
            top: members.flag("top_text")?.unwrap_or(false),
            prompt: members.flag("echo_prompt_tokens")?.unwrap_or(false),
        };
        // Refused now, because items without the requested text would look like empty text.
        if shown.text || shown.top {
            self.vocabulary()?;
        }
        Ok(shown)
    }

    /// Handles TOKENIZE, without the engine. Returns the members of the answer.
    pub(super) fn tokenize(&self, members: &PayloadMembers<'_>) -> Result<BytesMut, LmtpError> {
        // Ignored, it would give the tokens of another prompt.
        if members.suffix().is_some() {
            let message =
                "'suffix' goes with the 'prompt_text' of GENERATE and SCORE: leave it out";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let tokens = match members.one_of(&["text", "messages"])? {
            Some("messages") => self.messages(members)?,
            // Also if neither is present: the error then names `text`.
            _ => self.text(members, "text", true)?,
        };
        answer("tokens", &tokens)
    }

    /// Handles DETOKENIZE, without the engine; bytes that are not UTF-8 become U+FFFD. Returns the members of the
    /// answer.
    pub(super) fn detokenize(&self, members: &PayloadMembers<'_>) -> Result<BytesMut, LmtpError> {
        let vocabulary = self.vocabulary()?;
        let tokens = members.tokens("tokens", &self.model)?;
        let mut bytes = Vec::new();
        for token in tokens {
            bytes.extend_from_slice(vocabulary.bytes(token));
            // Checked for each token: one may have many bytes, and a message has room for a million of them.
            if bytes.len() > self.limits.max_text_bytes {
                let message = "the text of 'tokens' is too long; ask for it in parts";
                return Err(LmtpError::new(LmtpReason::InvalidValue, message));
            }
        }
        answer("text", &*String::from_utf8_lossy(&bytes))
    }

    /// The tokens of a SCORE: ids or text, as one list or several (LM-914, LM-973).
    pub(super) fn scored(
        &self,
        members: &PayloadMembers<'_>,
    ) -> Result<Vec<Vec<Token>>, LmtpError> {
        Ok(
            match members.one_of(&["scored", "scored_text", "scored_many"])? {
                Some("scored_text") => vec![self.text(members, "scored_text", false)?],
                Some("scored_many") => {
                    let max = self.limits.max_scored_many;
                    read::token_lists(members, "scored_many", &self.model, max)?
                }
                // An absent member fails there, with the name `scored` (LM-313).
                _ => vec![members.tokens("scored", &self.model)?],
            },
        )
    }
}

/// An answer of one member, if it fits a message.
fn answer<T: serde::Serialize + ?Sized>(name: &str, value: &T) -> Result<BytesMut, LmtpError> {
    let mut body = BytesMut::new();
    member(&mut body, name, value);
    // Only the encoded length is exact: ids have one to ten digits.
    if body.len() > ANSWER_BYTES_MAX {
        let message = "the answer does not fit a message; ask for it in parts";
        return Err(LmtpError::new(LmtpReason::InvalidValue, message));
    }
    Ok(body)
}
