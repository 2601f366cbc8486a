//! [`OutputSettings`]: what the parsers of a request's choices have in common, and where its output begins.

use std::sync::Arc;

use sapwood_engine::api::{ChatRequest, MARK_OPEN, Tokens};
use sapwood_proto::steer::Token;

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
}

/// Where an output begins: some templates open the reasoning, or the header of a message, themselves.
#[derive(Clone, Debug, Default)]
pub(super) enum OutputStart {
    #[default]
    Text,
    Reasoning,
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
            .is_some_and(|(last, (open, end))| last.content.rfind(open) > last.content.rfind(end));
        Self {
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
            && tail.trim_end().ends_with(format.texts.text(open))
        {
            self.start = OutputStart::Reasoning;
        }
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
