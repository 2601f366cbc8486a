//! [`ContextBuilder`]: the variables of one rendering, with all texts of a conversation covered.
//!
//! What they take beyond the texts themselves is charged: `[[],[],..]` is a few bytes for each list, and each mark is longer than the
//! shortest control token.

use std::borrow::Cow;

use minijinja::value::Value;
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;
use serde_json::value::RawValue;

use super::bounds::{self, ELEMENT_BYTES, MEMBER_BYTES, OBJECT_BYTES};
use super::calls::{CallArguments, FormedArguments, JsonMembers};
use super::shield::{self, CoveredTexts, SpecialTextShield};
use crate::api::{ChatMessage, ChatRequest};

/// Converts a conversation, under the budget of its rendering.
pub(super) struct ContextBuilder<'a> {
    shield: &'a SpecialTextShield,
    arguments: CallArguments,
    covered: CoveredTexts,
}

impl<'a> ContextBuilder<'a> {
    /// `arguments`: the form of the arguments of calls.
    pub(super) fn new(shield: &'a SpecialTextShield, arguments: CallArguments) -> Self {
        Self {
            shield,
            arguments,
            covered: CoveredTexts::default(),
        }
    }

    /// Takes the texts that were covered.
    pub(super) fn take_covered(&mut self) -> CoveredTexts {
        std::mem::take(&mut self.covered)
    }

    /// Returns the variables of a conversation, and those of the vocabulary.
    ///
    /// # Errors
    /// They are more than the budget allows, or have too many texts of control tokens.
    pub(super) fn variables(
        &mut self,
        chat: &ChatRequest,
        bos: &str,
        end: &str,
    ) -> Result<Value, Error> {
        let mut pairs = Vec::new();
        if let Json::Object(arguments) = &chat.template_args {
            for (name, value) in arguments {
                bounds::charge(MEMBER_BYTES)?;
                pairs.push((Value::from(name.as_str()), self.value(value)?));
            }
        }
        // A template argument may override this variable, but never the ones set below.
        if !pairs
            .iter()
            .any(|(name, _)| name.as_str() == Some("add_generation_prompt"))
        {
            pairs.push(("add_generation_prompt".into(), (!chat.continue_last).into()));
        }
        // Without messages no index is equal to it.
        let last = chat.messages.len().wrapping_sub(1);
        let messages = chat.messages.iter().enumerate().map(|(index, message)| {
            let tail = chat.continue_last && index == last;
            self.message(message, tail)
        });
        let messages: Vec<Value> = messages.collect::<Result<_, _>>()?;
        pairs.push(("messages".into(), messages.into()));
        pairs.push(("tools".into(), self.value(&chat.tools)?));
        pairs.push(("documents".into(), ().into()));
        pairs.push(("bos_token".into(), bos.into()));
        pairs.push(("eos_token".into(), end.into()));
        Ok(Value::from_pairs(pairs))
    }

    /// `tail`: it is to be continued.
    fn message(&mut self, message: &ChatMessage, tail: bool) -> Result<Value, Error> {
        bounds::charge(ELEMENT_BYTES + OBJECT_BYTES)?;
        let mut content = self.cover(&message.content)?;
        if tail {
            let content = content.to_mut();
            content.push_str(shield::TAIL);
            // A space after the mark shows whether the template trims contents; see `Template::render`.
            content.push(' ');
        }
        let mut pairs = vec![
            ("role", self.text(&message.role)?),
            ("content", content.into()),
        ];
        if let Some(name) = &message.name {
            pairs.push(("name", self.text(name)?));
        }
        if let Some(reasoning) = &message.reasoning {
            let text = self.text(reasoning)?;
            // The names of most templates, and that of gpt-oss, whose template refuses it beside content and calls.
            pairs.push(("reasoning_content", text.clone()));
            pairs.push(("reasoning", text.clone()));
            if message.content.is_empty() || message.tool_calls.is_null() {
                pairs.push(("thinking", text));
            }
        }
        if !message.tool_calls.is_null() {
            pairs.push(("tool_calls", self.calls(&message.tool_calls)?));
        }
        if let Some(id) = &message.tool_call_id {
            pairs.push(("tool_call_id", self.text(id)?));
        }
        bounds::charge(pairs.len() * MEMBER_BYTES)?;
        Ok(Value::from_pairs(pairs))
    }

    /// The calls of a message, with their arguments in the form that the template expects.
    fn calls(&mut self, calls: &Json) -> Result<Value, Error> {
        let Json::Array(calls) = calls else {
            return self.value(calls);
        };
        self.list(calls, |it, call| {
            it.with_member(call, "function", |it, function| {
                it.with_member(function, "arguments", |it, arguments| {
                    match it.arguments.of(arguments)? {
                        FormedArguments::Value(arguments) => it.value(&arguments),
                        FormedArguments::Exact(arguments) => it.exact(arguments),
                    }
                })
            })
        })
    }

    /// As [`Self::value`], but for one member of an object.
    fn with_member(
        &mut self,
        json: &Json,
        name: &str,
        convert: impl Fn(&mut Self, &Json) -> Result<Value, Error>,
    ) -> Result<Value, Error> {
        let Json::Object(members) = json else {
            return self.value(json);
        };
        self.object(members, |it, key, value| {
            if *key == name {
                convert(it, value)
            } else {
                it.value(value)
            }
        })
    }

    /// Converts a JSON value, with all its texts covered. Its depth is bounded by the decoders that produced it.
    fn value(&mut self, json: &Json) -> Result<Value, Error> {
        Ok(match json {
            Json::Null => ().into(),
            Json::Bool(value) => (*value).into(),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => value.into(),
                (None, Some(value)) => value.into(),
                (None, None) => number.as_f64().into(),
            },
            Json::String(text) => self.text(text)?,
            Json::Array(items) => self.list(items, Self::value)?,
            Json::Object(members) => self.object(members, |it, _, value| it.value(value))?,
        })
    }

    /// As [`Self::value`] for the text of a value, whose integers may have up to 128 bits. It was read as a [`Json`] before, which bounds its
    /// depth.
    fn exact(&mut self, json: &RawValue) -> Result<Value, Error> {
        let unreadable =
            |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
        let text = json.get();
        // Each level reads all of those within it again.
        bounds::check(0)?;
        if text.starts_with('{') {
            let JsonMembers(members) = serde_json::from_str(text).map_err(unreadable)?;
            return self.object(members, |it, _, value| it.exact(value));
        }
        if text.starts_with('[') {
            let items: Vec<&RawValue> = serde_json::from_str(text).map_err(unreadable)?;
            return self.list(items, Self::exact);
        }
        let value: Json = serde_json::from_str(text).map_err(unreadable)?;
        match text.parse::<i128>() {
            Ok(integer) if value.is_f64() => Ok(integer.into()),
            _ => self.value(&value),
        }
    }

    fn list<T>(
        &mut self,
        items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
        convert: impl Fn(&mut Self, T) -> Result<Value, Error>,
    ) -> Result<Value, Error> {
        let items = items.into_iter();
        bounds::charge(items.len().saturating_mul(ELEMENT_BYTES) + OBJECT_BYTES)?;
        let items: Result<Vec<Value>, Error> = items.map(|it| convert(self, it)).collect();
        Ok(items?.into())
    }

    fn object<K: AsRef<str>, T>(
        &mut self,
        members: impl IntoIterator<Item = (K, T), IntoIter: ExactSizeIterator>,
        convert: impl Fn(&mut Self, &K, T) -> Result<Value, Error>,
    ) -> Result<Value, Error> {
        let members = members.into_iter();
        bounds::charge(members.len().saturating_mul(MEMBER_BYTES) + OBJECT_BYTES)?;
        let pairs = members.map(|(key, value)| {
            let name = self.text(key.as_ref())?;
            Ok::<_, Error>((name, convert(self, &key, value)?))
        });
        let pairs: Vec<(Value, Value)> = pairs.collect::<Result<_, _>>()?;
        Ok(Value::from_pairs(pairs))
    }

    fn text(&mut self, text: &str) -> Result<Value, Error> {
        Ok(Value::from(&*self.cover(text)?))
    }

    /// Covers a text, and charges what is kept beside it.
    fn cover<'t>(&mut self, text: &'t str) -> Result<Cow<'t, str>, Error> {
        let before = self.covered.bytes();
        self.shield.note(text, &mut self.covered);
        let Some(covered) = self.shield.cover(text, &mut self.covered) else {
            let most = shield::MARKS_MAX;
            let message = format!("texts of control tokens occur in it more than {most} times");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        };
        let marked = match &covered {
            Cow::Borrowed(_) => 0,
            Cow::Owned(marked) => marked.len(),
        };
        bounds::charge(marked + self.covered.bytes() - before)?;
        Ok(covered)
    }
}
