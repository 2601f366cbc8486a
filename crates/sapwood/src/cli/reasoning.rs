//! Shows the reasoning of a model on standard error, apart from the answer on standard output.
//!
//! ```text
//!   closed ── reasoning that is not blank ──► open: dimmed, or after a line `--- thinking ---`
//!      ▲                                        │
//!      └── an answer, or the end ───────────────┘ a blank line, or a line `--- answer ---`
//! ```

use crate::output;
use crate::plain::PrintableBytes;

/// The reasoning of one answer.
#[derive(Debug, Default)]
pub(super) struct ReasoningView {
    is_open: bool,
    /// The last text ended a line.
    ends_line: bool,
    /// There was any.
    pub(super) seen: bool,
    /// Reasoning that comes as bytes.
    bytes: PrintableBytes,
}

impl ReasoningView {
    /// Shows more reasoning; a character may be cut at the end.
    pub(super) fn show_bytes(&mut self, bytes: &[u8]) {
        let text = self.bytes.next(bytes);
        self.show(&text);
    }

    /// Shows more reasoning.
    pub(super) fn show(&mut self, text: &str) {
        let mut text = text;
        if !self.is_open {
            // Models put line breaks behind their marker, and many write an empty block where they do not think.
            text = text.trim_start();
            if text.is_empty() {
                return;
            }
            (self.is_open, self.seen) = (true, true);
            if !output::dims() {
                output::message("--- thinking ---");
            }
        }
        if !text.is_empty() {
            self.ends_line = text.ends_with('\n');
            output::aside(text);
        }
    }

    /// Ends the reasoning that is open, before something else is shown. `answers`: that is the answer.
    pub(super) fn close(&mut self, answers: bool) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let line_end = if self.ends_line { "" } else { "\n" };
        if output::dims() {
            output::aside(&format!("{line_end}{}", if answers { "\n" } else { "" }));
        } else {
            let heading = if answers { "answer" } else { "end" };
            output::aside(&format!("{line_end}--- {heading} ---\n"));
        }
    }
}
