//! [`OpenCalls`]: the place in an output where calls are read, and what becomes of it.

use sapwood_engine::api::{MARK_CLOSE, MARK_OPEN};

use super::call::{CallContext, CallMachine, CallOutput, CallPart, Verdict};
use super::format::OutputFormat;
use super::markers::{MarkerTexts, begun_marker};
use super::reasoning::ReasoningText;
#[cfg(test)]
use super::work;
use super::{Marker, Out, OutputPart, emit_text};
use crate::chunk::Text;
use crate::limits;

/// A place where calls are read.
#[derive(Debug)]
pub(super) struct OpenCalls {
    pub(super) machine: Box<dyn CallMachine>,
    pub(super) output: CallOutput,
    /// What came since the last complete call, in case it is no call.
    pub(super) source: String,
    /// The reasoning in which they stand, which goes on behind them.
    pub(super) reasoning: Option<ReasoningText>,
}

impl OpenCalls {
    /// Reads text, up to where the calls end. Returns how many bytes were taken.
    pub(super) fn read(&mut self, text: &str, context: CallContext<'_>) -> (usize, Verdict) {
        for (at, c) in text.char_indices() {
            #[cfg(test)]
            work::add(1);
            if self.source.len() + c.len_utf8() > limits::TOOL_CALL_BYTES {
                return (at, Verdict::Refused);
            }
            let before = self.output.ended();
            let verdict = self.machine.push(c, context, &mut self.output);
            let mut ends_call = false;
            if self.output.ended() > before {
                let next = self.output.take_next();
                ends_call = next.is_none();
                self.source = next.unwrap_or_default();
            }
            if self.output.is_full() {
                return (at, Verdict::Refused);
            }
            match verdict {
                Verdict::Taken if ends_call => {}
                Verdict::Taken => self.source.push(c),
                Verdict::Settled => self.source.clear(),
                Verdict::Last => return (at + c.len_utf8(), Verdict::Last),
                Verdict::Refused | Verdict::Over => return (at, verdict),
            }
        }
        (text.len(), Verdict::Taken)
    }

    pub(super) fn emit(&mut self, out: Out<'_>) {
        for part in self.output.take() {
            out(match part {
                CallPart::Begin { name, id } => OutputPart::CallBegin { name, id },
                CallPart::Arguments(text) => OutputPart::CallArguments(text),
                CallPart::End { arguments } => OutputPart::CallEnd { arguments },
            });
        }
    }

    /// Removes a marker that has begun and not ended: it is no part of the call. Any control token is one.
    pub(super) fn take_open_marker(&mut self, markers: &[Marker], texts: &MarkerTexts) -> String {
        if let Some(at) = self.source.rfind([MARK_OPEN, MARK_CLOSE])
            && self.source[at..].starts_with(MARK_OPEN)
        {
            return self.source.split_off(at);
        }
        // What opened the calls was read as a marker already.
        let is_opening = self.output.ended() == 0;
        let at = begun_marker(&self.source, markers, texts);
        if is_opening && at == 0 {
            return String::new();
        }
        self.source.split_off(at)
    }

    /// What came since the last complete call is text, or reasoning.
    pub(super) fn give_back(&mut self, format: &OutputFormat, out: Out<'_>) {
        let source = format.texts.visible(std::mem::take(&mut self.source));
        match &mut self.reasoning {
            Some(reasoning) => {
                if self.output.is_open() {
                    // Its source is no part of the answer.
                    out(OutputPart::CallBroken {
                        source: String::new(),
                    });
                }
                reasoning.emit(&source, out);
            }
            None if self.output.is_open() => out(OutputPart::CallBroken { source }),
            None => emit_text(Text::from(source), out),
        }
    }
}
