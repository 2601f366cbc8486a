//! Splits the bytes of a line transport into lines.

use bytes::{Buf as _, BytesMut};
use bytestring::ByteString;

/// What stands between two line ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WireLine {
    /// A line that is not empty.
    Text(ByteString),
    /// A line that is not UTF-8.
    BadText,
    /// A line above the limit; what is left of it is skipped (LM-112).
    TooLong,
}

/// Cuts bytes into lines ended by `\n` or `\r\n`; blank ones are skipped (LM-110).
///
/// Take [`Self::next_line`] until it gives nothing before pushing more: then no more than one line and one push is held.
#[derive(Debug)]
pub struct LineSplitter {
    buffer: BytesMut,
    /// How far there is no line end.
    searched: usize,
    /// Inside a line that was too long.
    skipping: bool,
    max: usize,
}

impl LineSplitter {
    /// Lines of at most `max` bytes, their ends not counted.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            searched: 0,
            skipping: false,
            max,
        }
    }

    /// Takes in what was read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next line, if it is whole or too long.
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
            let skipped = std::mem::take(&mut self.skipping);
            if let Some(line) = self.read(line).filter(|_| !skipped) {
                return Some(line);
            }
        }
    }

    /// The line that was not ended when the input ended.
    pub fn last_line(&mut self) -> Option<WireLine> {
        let line = self.buffer.split();
        self.searched = 0;
        let skipped = std::mem::take(&mut self.skipping);
        self.read(line).filter(|_| !skipped)
    }

    /// A line without an end that is too long by now.
    fn overflow(&mut self) -> Option<WireLine> {
        let retained = self.buffer.len();
        // The last byte may be half of a line end.
        let half = usize::from(self.buffer.last() == Some(&b'\r'));
        if !self.skipping && retained - half <= self.max {
            return None;
        }
        self.buffer.clear();
        self.searched = 0;
        (!std::mem::replace(&mut self.skipping, true)).then_some(WireLine::TooLong)
    }

    fn read(&self, mut line: BytesMut) -> Option<WireLine> {
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
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
