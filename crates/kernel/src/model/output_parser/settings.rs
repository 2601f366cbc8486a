//! [`OutputSettings`]: what the parsers of a request's choices have in common, and where its output begins.

use std::collections::HashSet;
use std::sync::Arc;

use sapwood_engine::api::{ChatMessage, ChatRequest, MARK_OPEN, Tokens};
use sapwood_proto::steer::{ConstraintKind, Token};

use super::format::OutputFormat;
use super::harmony;
use super::tools::DeclaredTools;

/// What the parsers of a request have in common.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputSettings {
    /// The format of the model; `None` if its output is text and nothing else.
    pub(super) format: Option<Arc<OutputFormat>>,
    /// The tools of the request; `None` if calls are text.
    pub(super) tools: Option<Arc<DeclaredTools>>,
    /// Where the output begins.
    pub(super) start: OutputStart,
    /// The ids of the calls in the conversation, if the model gives ids.
    pub(super) used_ids: Arc<HashSet<String>>,
    /// The last message, if it ends as if it opened the reasoning.
    pub(super) deceptive: Option<Arc<str>>,
}

/// Where an output begins: some templates open the reasoning, or the header of a message, themselves.
#[derive(Clone, Debug, Default)]
pub(super) enum OutputStart {
    #[default]
    Text,
    Reasoning,
    /// In the reasoning, behind its label.
    Labelled,
    /// In the header of a message, after this text.
    Header(Arc<str>),
}

impl OutputSettings {
    /// Of an output that is not parsed.
    pub(crate) fn plain() -> Self {
        Self::default()
    }

    /// Of the answer in a conversation.
    pub(crate) fn of_chat(
        format: Arc<OutputFormat>,
        tools: Option<Arc<DeclaredTools>>,
        chat: &ChatRequest,
    ) -> Self {
        let continued = chat.messages.last().filter(|_| chat.continue_last);
        let is_reasoning = continued
            .zip(format.think())
            // Its contents are plain text, whatever its markers are in the output.
            .is_some_and(|(last, (open, end))| {
                let ended = last.content.rsplit_once(end).map(|(_, answer)| answer);
                let may_reason = ended.is_none() || !format.reasons_once();
                // Elsewhere the marker is a word of the answer.
                let rest = ended.unwrap_or(&last.content).trim_start();
                may_reason && rest.starts_with(open)
            });
        let last = chat.messages.last().filter(|_| !chat.continue_last);
        let last = last.map(|last| last.content.trim_end());
        let label = format.label().unwrap_or_default().trim_end();
        let opens = |text: &&str| {
            let text = text.strip_suffix(label).unwrap_or(text);
            format.think().is_some_and(|(open, _)| text.ends_with(open))
        };
        Self {
            deceptive: last.filter(opens).map(Arc::from),
            used_ids: Arc::new(if format.has_given_ids() {
                used_ids(chat)
            } else {
                HashSet::new()
            }),
            format: Some(format),
            tools,
            start: if is_reasoning {
                OutputStart::Reasoning
            } else {
                OutputStart::Text
            },
        }
    }

    /// The control tokens whose names the engine has to write into the text.
    pub(crate) fn marked(&self) -> Arc<[Token]> {
        let format = self.format.as_ref();
        format.map_or_else(|| Arc::from([]), |format| format.tokens())
    }

    /// Looks at the end of the rendered prompt, which the output continues.
    pub(crate) fn continue_prompt(&mut self, tail: &str) {
        let Some(format) = &self.format else {
            return;
        };
        if format.is_harmony() {
            let start = format.texts.text(harmony::START);
            if let Some(at) = tail.rfind(start) {
                self.start = OutputStart::Header(tail[at + start.len()..].into());
            }
        } else if let Some((open, _)) = format.think()
            && let tail = tail.trim_end()
            && let open = format.texts.text(open)
            && let label = format.label().unwrap_or_default().trim_end()
            && let bare = tail.strip_suffix(label).unwrap_or(tail)
            && bare.ends_with(open)
            && !self.is_message(tail, &tail[bare.len() - open.len()..])
        {
            self.start = if bare.len() < tail.len() {
                OutputStart::Labelled
            } else {
                OutputStart::Reasoning
            };
        }
    }

    /// Whether the pattern of a constraint writes the end of the reasoning, so that the output begins with that.
    pub(crate) fn ends_reasoning(&self, kind: ConstraintKind, pattern: &str) -> bool {
        // The others are answers alone: a schema has words for people too, which may speak of the marker.
        if !matches!(
            kind,
            ConstraintKind::Regex | ConstraintKind::Lark | ConstraintKind::Gbnf
        ) {
            return false;
        }
        let end = self
            .format
            .as_ref()
            .and_then(|format| match format.is_harmony() {
                true => Some(harmony::MESSAGE),
                false => format.think().map(|(_, end)| end),
            });
        // Patterns may escape what the marker is made of.
        end.is_some_and(|end| pattern.replace('\\', "").contains(end))
    }

    /// The output has a form that the request asks for, from its first token on. So there is neither reasoning before it nor a header,
    /// although the template may have opened one: the constrained text would be all reasoning, and the answer empty.
    pub(crate) fn begin_with_answer(&mut self) {
        self.start = OutputStart::Text;
    }

    /// Whether the prompt ends with the last message, and not with what the template writes for the answer.
    fn is_message(&self, tail: &str, open: &str) -> bool {
        self.deceptive.as_deref().is_some_and(|message| {
            // The marker alone follows a control token, which ends every message.
            tail.ends_with(message) && message != open
                || message.ends_with(tail) && tail.trim_start() != open
        })
    }

    /// Whether the id that a model gave a call can serve as one. Models copy ids from the conversation, and of two calls
    /// with one id clients would lose one.
    pub(crate) fn takes_id(&self, id: &str) -> bool {
        let Some(format) = self.format.as_ref().filter(|format| format.has_given_ids()) else {
            return false;
        };
        let has_form = !format.has_short_ids()
            || id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        // The ids of this server begin so.
        has_form && !id.starts_with("call_") && !self.used_ids.contains(id)
    }

    /// Whether the ids of calls have nine letters and digits.
    pub(crate) fn has_short_ids(&self) -> bool {
        let format = self.format.as_ref();
        format.is_some_and(|format| format.has_short_ids())
    }

    /// Removes the names of control tokens, which are no text, from the text of a step.
    pub(crate) fn hide_marks(&self, tokens: &mut Tokens) {
        if let Some(format) = &self.format
            && tokens.text.contains(MARK_OPEN)
        {
            tokens.text = format.texts.visible(tokens.text.to_string()).into();
        }
    }

    pub(super) fn finds_calls(&self, format: &OutputFormat) -> bool {
        self.tools.is_some() && format.finds_calls()
    }
}

/// The ids of all calls in a conversation, and of their results.
fn used_ids(chat: &ChatRequest) -> HashSet<String> {
    let of = |message: &ChatMessage| {
        let calls = message.tool_calls.as_array().into_iter().flatten();
        let ids = calls.filter_map(|call| call.get("id")?.as_str().map(str::to_owned));
        ids.chain(message.tool_call_id.clone())
            .collect::<Vec<String>>()
    };
    chat.messages.iter().flat_map(of).collect()
}
