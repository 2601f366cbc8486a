//! [`ReasoningText`]: reasoning that is emitted as it comes, without the line feeds around it.

use super::{Out, OutputPart};
use crate::chunk::Text;

/// Where in reasoning the parser is.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReasoningText {
    /// Line feeds directly after a marker belong to it.
    pub(super) after_marker: bool,
    /// So do those directly before one: so many were not emitted yet.
    line_feeds: usize,
    /// The present line has nothing but white space.
    is_line_blank: bool,
}

impl ReasoningText {
    /// Begins behind a marker.
    pub(super) const fn begun() -> Self {
        Self {
            after_marker: true,
            line_feeds: 0,
            is_line_blank: true,
        }
    }

    /// Begins behind a header of harmony, to which no line feeds belong.
    pub(super) const fn in_message() -> Self {
        Self {
            after_marker: false,
            ..Self::begun()
        }
    }

    /// Goes on behind a call.
    pub(super) const fn behind_call(self) -> Self {
        Self {
            line_feeds: self.line_feeds,
            ..Self::begun()
        }
    }

    /// Whether what comes next begins a line, but for white space.
    pub(super) const fn is_line_blank(&self) -> bool {
        self.is_line_blank
    }

    /// Emits text, all but the line feeds at its end.
    pub(super) fn emit(&mut self, text: &str, out: Out<'_>) {
        let kept = text.trim_end_matches('\n');
        if !kept.is_empty() {
            let before = "\n".repeat(std::mem::take(&mut self.line_feeds));
            out(OutputPart::Reasoning(Text::from(before + kept)));
        }
        // Counted instead of kept, so that a model that writes nothing else costs no memory.
        self.line_feeds += text.len() - kept.len();
        let (line, is_blank) = match text.rsplit_once('\n') {
            Some((_, line)) => (line, true),
            None => (text, self.is_line_blank),
        };
        self.is_line_blank = is_blank && line.trim_ascii().is_empty();
    }
}
