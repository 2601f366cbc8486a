//! Text instead of token ids: prompts, TOKENIZE, DETOKENIZE (LM-911 to LM-915).

use std::sync::Arc;

use bytestring::ByteString;

use super::LmtpSession;
use super::extended::TextMode;
use crate::bounded_json::{self, JsonBounds, JsonUnread};
use crate::lmtp::json::RawValue;
use crate::lmtp::read::{self, PayloadMembers};
use crate::lmtp::write::{self, member};
use crate::lmtp::{LmtpError, LmtpModelInfo, LmtpReason, ModelLookup, StreamId, TextCodec};
use crate::steer::Token;
use crate::time::Time;

/// Maximum size of an answer with tokens: every token takes several bytes, and a message has a size limit (LM-1202).
const ANSWER_BYTES_MAX: usize = 4_000_000;

/// The model that a request is about, with the name in the request.
#[derive(Clone, Copy)]
pub(super) struct RequestSubject<'a> {
    pub(super) name: &'a ByteString,
    pub(super) model: &'a Arc<LmtpModelInfo>,
    pub(super) vocabulary: Option<&'a Arc<dyn TextCodec>>,
}

impl<'a> RequestSubject<'a> {
    /// The vocabulary, or an error if the request needs one and there is none.
    pub(super) fn vocabulary(&self) -> Result<&'a dyn TextCodec, LmtpError> {
        let vocabulary = self.vocabulary.map(|vocabulary| &**vocabulary);
        vocabulary.ok_or_else(|| {
            let message = "this model has no tokenizer here; send token ids";
            LmtpError::new(LmtpReason::UnsupportedOperation, message)
        })
    }
}

impl LmtpSession {
    /// The prompt of GENERATE or SCORE in any form, after its prefix if it has one (LM-911, LM-942), and whether it was
    /// text.
    pub(super) fn prompt(
        &mut self,
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
        now: Time,
    ) -> Result<(Vec<Token>, bool), LmtpError> {
        let given = ["prompt", "prompt_text", "messages"];
        let given: Vec<_> = given
            .into_iter()
            .filter(|name| members.value(name).is_some())
            .collect();
        let prefix = self.prefix(members, about, now)?;
        if given.len() > 1 {
            let message = "'prompt', 'prompt_text' and 'messages' exclude each other; send one";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let continues = prefix.as_ref().is_some_and(|prefix| !prefix.is_empty());
        let (own, is_text) = match given.first() {
            Some(&"prompt_text") => (self.text(members, "prompt_text", about, !continues)?, true),
            Some(&"messages") => (self.messages(members, about)?, true),
            None if prefix.is_some() => (Vec::new(), false),
            _ => (members.tokens("prompt", about.model)?, false),
        };
        let Some(mut prompt) = prefix else {
            return Ok((own, is_text));
        };
        prompt.extend(own);
        Ok((prompt, is_text))
    }

    /// Tokenizes a text. `begins`: the text is at the beginning, so the tokenizer's BOS is added by default.
    pub(super) fn text(
        &self,
        members: &PayloadMembers<'_>,
        name: &str,
        about: RequestSubject<'_>,
        begins: bool,
    ) -> Result<Vec<Token>, LmtpError> {
        let value = members.value(name).ok_or_else(|| {
            LmtpError::new(
                LmtpReason::MissingRequiredParameter,
                format!("'{name}' is required: a text"),
            )
        })?;
        let wrong = || LmtpError::new(LmtpReason::InvalidType, format!("'{name}' must be a text"));
        let text = value.string().ok_or_else(wrong)?;
        self.is_short(name, value)?;
        let vocabulary = about.vocabulary()?;
        let bos = match members.flag("add_bos")? {
            None if begins => vocabulary.bos(),
            Some(true) => about.model.bos,
            None | Some(false) => None,
        };
        let mut tokens: Vec<_> = bos.into_iter().collect();
        tokens.extend(vocabulary.tokenize(&text));
        Ok(tokens)
    }

    fn messages(
        &self,
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
    ) -> Result<Vec<Token>, LmtpError> {
        let wrong = || {
            let message = "'messages' must be a list of messages, each with role and content";
            LmtpError::new(LmtpReason::InvalidType, message)
        };
        let value = members.value("messages").ok_or_else(wrong)?;
        self.is_short("messages", value)?;
        let bounds = JsonBounds {
            values: self.config.limits.max_message_values,
            entries: self.config.limits.max_messages,
        };
        let messages = bounded_json::read(value.as_str().as_bytes(), bounds);
        let messages = messages.map_err(|unread| match unread {
            JsonUnread::Syntax(_) => wrong(),
            _ => LmtpError::new(LmtpReason::InvalidValue, format!("'messages' has {unread}")),
        })?;
        let generation = members.flag("add_generation_prompt")?.unwrap_or(true);
        about.vocabulary()?.chat(&messages, generation)
    }

    fn is_short(&self, name: &str, value: RawValue<'_>) -> Result<(), LmtpError> {
        let max = self.config.limits.max_text_bytes;
        if value.as_str().len() <= max {
            return Ok(());
        }
        let message = format!("'{name}' must have at most {max} bytes");
        Err(LmtpError::new(LmtpReason::InvalidValue, message))
    }

    /// Reads which text the items shall have (LM-911 to LM-913).
    pub(super) fn shown(
        members: &PayloadMembers<'_>,
        about: RequestSubject<'_>,
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
        if shown.text || shown.top {
            about.vocabulary()?;
        }
        Ok(shown)
    }

    /// Answered at once, without the engine.
    pub(super) fn tokenize(
        &mut self,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
    ) {
        let tokens = self.about(members, models, |session, about| {
            let given = (members.value("text"), members.value("messages"));
            match given {
                (Some(_), Some(_)) => {
                    let message = "'text' and 'messages' exclude each other; send one";
                    Err(LmtpError::new(LmtpReason::InvalidValue, message))
                }
                (None, Some(_)) => session.messages(members, about),
                _ => session.text(members, "text", about, true),
            }
        });
        match tokens {
            Ok(tokens) => self.answer(id, "tokens", &tokens),
            Err(error) => self.request_failed(id, &error),
        }
    }

    /// Answered at once; bytes that are not UTF-8 become U+FFFD.
    pub(super) fn detokenize(
        &mut self,
        id: &StreamId,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
    ) {
        let text = self.about(members, models, |session, about| {
            let vocabulary = about.vocabulary()?;
            let tokens = members.tokens("tokens", about.model)?;
            let mut bytes = Vec::new();
            for token in tokens {
                bytes.extend_from_slice(vocabulary.bytes(token));
                if bytes.len() > session.config.limits.max_text_bytes {
                    let message = "the text of 'tokens' is too long; ask for it in parts";
                    return Err(LmtpError::new(LmtpReason::InvalidValue, message));
                }
            }
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        });
        match text {
            Ok(text) => self.answer(id, "text", &text),
            Err(error) => self.request_failed(id, &error),
        }
    }

    /// Looks up the model that a request is about.
    pub(super) fn about<T>(
        &mut self,
        members: &PayloadMembers<'_>,
        models: &dyn ModelLookup,
        then: impl FnOnce(&mut Self, RequestSubject<'_>) -> Result<T, LmtpError>,
    ) -> Result<T, LmtpError> {
        let (name, model) = self.model(members, models)?;
        let vocabulary = models.vocabulary(&name);
        let about = RequestSubject {
            name: &name,
            model: &model,
            vocabulary: vocabulary.as_ref(),
        };
        then(self, about)
    }

    fn answer<T: serde::Serialize + ?Sized>(&mut self, id: &StreamId, name: &str, value: &T) {
        let mut body = bytes::BytesMut::new();
        member(&mut body, name, value);
        if body.len() > ANSWER_BYTES_MAX {
            let message = "the answer does not fit a message; ask for it in parts";
            return self.request_failed(id, &LmtpError::new(LmtpReason::InvalidValue, message));
        }
        self.outbound
            .notice(|out| write::answer(out, id, |out| out.extend_from_slice(&body)));
    }
}

/// The tokens of a SCORE: ids or text, as one list or several (LM-914, LM-973).
pub(super) fn scored(
    session: &LmtpSession,
    members: &PayloadMembers<'_>,
    about: RequestSubject<'_>,
) -> Result<Vec<Vec<Token>>, LmtpError> {
    let given = ["scored", "scored_text", "scored_many"];
    let given: Vec<_> = given
        .into_iter()
        .filter(|name| members.value(name).is_some())
        .collect();
    let lists = match given[..] {
        ["scored_text"] => vec![session.text(members, "scored_text", about, false)?],
        ["scored_many"] => {
            let max = session.config.limits.max_scored_many;
            read::token_lists(members, "scored_many", about.model, max)?
        }
        [] | ["scored"] => vec![members.tokens("scored", about.model)?],
        _ => {
            let message = "'scored', 'scored_text' and 'scored_many' exclude each other; send one";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
    };
    Ok(lists)
}
