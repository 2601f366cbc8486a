//! The input of transports whose messages are lines (LM-110, LM-113).

use sapwood_proto::lmtp::{LineSplitter, Unreadable, WireLine};

use super::driver::LmtpInput;

/// Lines, as far as they have arrived.
pub(super) struct LineInput {
    splitter: LineSplitter,
    /// The end of input was read.
    pub(super) ended: bool,
}

impl LineInput {
    /// Of lines of at most `max` bytes.
    pub(super) fn new(max: usize) -> Self {
        Self {
            splitter: LineSplitter::new(max),
            ended: false,
        }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.splitter.push(bytes);
    }

    /// The next line, or the end behind the last one; `None` where more has to be read first.
    pub(super) fn next_input(&mut self) -> Option<LmtpInput> {
        let mut line = self.splitter.next_line();
        if line.is_none() && self.ended {
            // The last line need not have a line feed.
            line = self.splitter.last_line();
        }
        match line {
            Some(WireLine::Text(text)) => Some(LmtpInput::Text(text)),
            Some(WireLine::BadText) => Some(LmtpInput::Unreadable(Unreadable::BadText)),
            Some(WireLine::TooLong) => Some(LmtpInput::Unreadable(Unreadable::TooLarge)),
            None => self.ended.then_some(LmtpInput::End),
        }
    }
}
