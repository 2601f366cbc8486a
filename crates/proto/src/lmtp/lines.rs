//! Splits the input of a line transport into lines.

use bytes::{Buf as _, BytesMut};
use bytestring::ByteString;

/// A line, or the reason why it cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WireLine {
    /// A non-empty line.
    Text(ByteString),
    /// A line that is not UTF-8.
    BadText,
    /// A line above the limit; the rest of it is skipped (LM-112).
    TooLong,
}

/// Splits bytes into lines ended by `\n` or `\r\n`; blank lines are skipped (LM-110).
///
/// Call [`Self::next_line`] until it returns `None` before pushing more: then at most one line and one push are
/// buffered.
#[derive(Debug)]
pub struct LineSplitter {
    buffer: BytesMut,
    /// Number of bytes known to contain no line end.
    searched: usize,
    /// Whether the rest of a line that was too long is being skipped.
    skipping: bool,
    max: usize,
}

impl LineSplitter {
    /// Creates a splitter for lines of at most `max` bytes, without their ends.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            searched: 0,
            skipping: false,
            max,
        }
    }

    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next line, once it is complete or too long.
    pub fn next_line(&mut self) -> Option<WireLine> {
        loop {
            let rest = &self.buffer[self.searched..];
            let Some(end) = memchr::memchr(b'\n', rest) else {
                self.searched = self.buffer.len();
                return self.overflow();
            };
            let end = self.searched + end;
            self.searched = 0;
            let line = self.buffer.split_to(end);
            self.buffer.advance(1);
            // If set, this is the tail of a line that was reported as too long.
            let skipped = std::mem::take(&mut self.skipping);
            if let Some(line) = self.read(line).filter(|_| !skipped) {
                return Some(line);
            }
        }
    }

    /// Returns the line that was not ended when the input ended.
    pub fn last_line(&mut self) -> Option<WireLine> {
        let line = self.buffer.split();
        self.searched = 0;
        let skipped = std::mem::take(&mut self.skipping);
        self.read(line).filter(|_| !skipped)
    }

    /// Handles a buffered line that is too long and has no end yet.
    fn overflow(&mut self) -> Option<WireLine> {
        let retained = self.buffer.len();
        // The last byte may be the first half of a line end.
        let half = usize::from(self.buffer.last() == Some(&b'\r'));
        if !self.skipping && retained - half <= self.max {
            return None;
        }
        // Dropped as it arrives, so that a line without an end takes no more memory than `max` and one push.
        self.buffer.clear();
        self.searched = 0;
        (!std::mem::replace(&mut self.skipping, true)).then_some(WireLine::TooLong)
    }

    fn read(&self, mut line: BytesMut) -> Option<WireLine> {
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        // A line that arrived together with its end has not passed through `overflow`.
        if line.len() > self.max {
            return Some(WireLine::TooLong);
        }
        match ByteString::try_from(line.freeze()) {
            Ok(text) => (!text.trim().is_empty()).then_some(WireLine::Text(text)),
            Err(_) => Some(WireLine::BadText),
        }
    }
}

#[cfg(test)]
mod tests;
