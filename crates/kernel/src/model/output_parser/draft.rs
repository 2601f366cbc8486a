//! [`DraftCalls`]: calls in reasoning whose markers are ordinary text.
//!
//! Models draft calls while they reason, and some make them there and never end the reasoning. A model stops after its
//! calls: those at which it ends the output are calls. Those that anything follows are drafts, which are reasoning, and so are those
//! at which something else ends the output: the model might have gone on.

use std::sync::Arc;

use super::format::OutputFormat;
use super::reasoning::ReasoningText;
use super::settings::{OutputSettings, OutputStart};
use super::tools::DeclaredTools;
use super::{Out, OutputEnd, OutputParser, OutputPart};
use crate::limits;

/// Calls in reasoning, from an opening marker on.
#[derive(Debug)]
pub(super) struct DraftCalls {
    /// Reads them as those of an answer.
    parser: OutputParser,
    tools: Arc<DeclaredTools>,
    /// What it found.
    parts: Vec<OutputPart>,
    complete: usize,
    /// All that was read, at most [`limits::TOOL_CALL_BYTES`].
    source: String,
    reasoning: ReasoningText,
}

impl DraftCalls {
    /// Begins before an opening marker in this reasoning, behind so many calls.
    pub(super) fn new(settings: &OutputSettings, calls: usize, reasoning: ReasoningText) -> Self {
        let mut parser = OutputParser::new(OutputSettings {
            start: OutputStart::Text,
            ..settings.clone()
        });
        parser.calls = calls;
        parser.at_start = false;
        Self {
            parser,
            tools: settings.tools.clone().unwrap_or_default(),
            parts: Vec::new(),
            complete: 0,
            source: String::new(),
            reasoning,
        }
    }

    /// Takes the next character. `false` if all of it is reasoning.
    #[must_use]
    pub(super) fn push(&mut self, c: char, format: &OutputFormat) -> bool {
        self.source.push(c);
        self.source.len() <= limits::TOOL_CALL_BYTES
            && self.collect(|parser, out| parser.feed(c.encode_utf8(&mut [0; 4]), format, out))
            // Otherwise drafts could be nested without an end.
            && self.parser.is_in_answer()
            && !self.ends_reasoning(format)
    }

    /// Whether the last character ends the marker behind the reasoning, which an answer hides if it is a control token.
    fn ends_reasoning(&self, format: &OutputFormat) -> bool {
        let end = format.think().map(|(_, end)| format.texts.text(end));
        self.parser.is_in_text() && end.is_some_and(|end| self.source.ends_with(end))
    }

    /// The model ended the output. `false` if all of it is reasoning.
    #[must_use]
    pub(super) fn end(&mut self) -> bool {
        self.collect(|parser, out| parser.end(OutputEnd::Model, out));
        self.complete > 0
    }

    /// Whether there is a complete call in it.
    pub(super) fn has_call(&self) -> bool {
        self.complete > 0
    }

    /// All that was read, and the reasoning in which it stands.
    pub(super) fn into_source(self) -> (String, ReasoningText) {
        (self.source, self.reasoning)
    }

    /// Emits the calls. What follows the last complete one is reasoning.
    pub(super) fn emit(mut self, out: Out<'_>) {
        for part in self.parts {
            match part {
                OutputPart::Text(text) => self.reasoning.emit(&text, out),
                OutputPart::CallBroken { source } => {
                    out(OutputPart::CallBroken {
                        source: String::new(),
                    });
                    self.reasoning.emit(&source, out);
                }
                part => out(part),
            }
        }
    }

    /// Runs the parser and keeps what it emits. `false` if there is anything but calls.
    fn collect(&mut self, feed: impl FnOnce(&mut OutputParser, Out<'_>)) -> bool {
        let Self {
            parser,
            tools,
            parts,
            complete,
            ..
        } = self;
        let mut is_call = true;
        feed(parser, &mut |part| {
            match &part {
                OutputPart::Text(text) if text.trim_ascii().is_empty() => return,
                OutputPart::CallBegin { name, .. } => is_call &= tools.has(name),
                OutputPart::CallArguments(json) => {
                    // Each character comes alone.
                    if let Some(OutputPart::CallArguments(last)) = parts.last_mut() {
                        last.push_str(json);
                        return;
                    }
                }
                OutputPart::CallEnd { .. } => *complete += 1,
                OutputPart::Text(_) | OutputPart::Reasoning(_) | OutputPart::CallBroken { .. } => {
                    is_call = false;
                }
            }
            parts.push(part);
        });
        is_call
    }
}
