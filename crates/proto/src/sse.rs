//! Parses server-sent events.
//!
//! Strict where it matters: an event counts only with its blank line. Tolerant where servers differ: LF, CRLF or CR, a
//! space after the colon or none, comments, unknown fields, a byte order mark, any number of `data` lines.
//!
//! ```text
//!   bytes ──push──► lines ──► data: … ──blank line──► Event        the body's end ──finish──► whether one was cut off
//! ```

#[cfg(any(test, fuzzing))]
pub mod fuzz;

use bytes::{Buf, Bytes, BytesMut};

/// Limits of lines and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SseLimits {
    /// Bytes of one line.
    pub line_bytes: usize,
    /// Bytes of one event's data.
    pub event_bytes: usize,
}

impl Default for SseLimits {
    fn default() -> Self {
        Self {
            line_bytes: 8 << 20,
            event_bytes: 8 << 20,
        }
    }
}

/// Why an event stream cannot be read further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A line exceeds its limit.
    #[error("a line of the event stream is longer than {0} bytes")]
    LineTooLong(usize),
    /// An event exceeds its limit.
    #[error("an event has more than {0} bytes of data")]
    EventTooLarge(usize),
    /// The bytes ended within an event.
    #[error("the event stream ended within an event")]
    Cut,
}

/// One event that has data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SseEvent {
    /// Its type; empty if none was sent.
    pub name: Bytes,
    /// Its id, or that of the last event before it with an id; empty if there was none.
    pub id: Bytes,
    /// Its `data` lines, joined by line feeds. UTF-8 if the server conforms to the specification.
    pub data: Bytes,
}

/// Reads events from bytes. Pushed bytes are buffered until [`next`](Self::next) has returned everything before them.
#[derive(Clone, Debug, Default)]
pub struct SseReader {
    limits: SseLimits,
    buf: BytesMut,
    /// Number of bytes of `buf` known to contain no line end.
    scanned: usize,
    /// Whether a CR ended the last line: an LF that follows belongs to it.
    after_cr: bool,
    /// Whether the first line was read.
    begun: bool,
    name: Bytes,
    id: Bytes,
    data: EventData,
}

/// The data of the event being read; usually one line, which is not copied then.
#[derive(Clone, Debug, Default)]
enum EventData {
    #[default]
    None,
    One(Bytes),
    Many(BytesMut),
}

impl SseReader {
    /// Creates a reader with these limits.
    #[must_use]
    pub fn new(limits: SseLimits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Appends bytes of the body.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buf.extend_from_slice(bytes);
    }

    /// Returns the next event, if it is complete. An event without data is skipped, as in browsers.
    ///
    /// # Errors
    /// [`Violation`]; the reader cannot be used afterwards.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator's end is for ever, and this one goes on with the next bytes"
    )]
    pub fn next(&mut self) -> Result<Option<SseEvent>, Violation> {
        while let Some(line) = self.line()? {
            if !line.is_empty() {
                self.field(&line)?;
                continue;
            }
            // The type is of this event alone, even if it has no data; the id stays for the events that follow.
            let name = std::mem::take(&mut self.name);
            let data = match std::mem::take(&mut self.data) {
                EventData::None => continue,
                EventData::One(data) => data,
                EventData::Many(data) => data.freeze(),
            };
            let id = self.id.clone();
            return Ok(Some(SseEvent { name, id, data }));
        }
        Ok(None)
    }

    /// Checks that the body has not ended within an event.
    ///
    /// # Errors
    /// [`Violation::Cut`] if it ended within an event or a line.
    pub fn finish(&self) -> Result<(), Violation> {
        // A type or id without data is no loss: browsers drop such an event too.
        if self.buf.is_empty() && matches!(self.data, EventData::None) {
            Ok(())
        } else {
            Err(Violation::Cut)
        }
    }

    fn line(&mut self) -> Result<Option<Bytes>, Violation> {
        // The flag is taken only with a byte at hand: the LF of a CRLF may come with the next read.
        if let Some(first) = self.buf.first()
            && std::mem::take(&mut self.after_cr)
            && *first == b'\n'
        {
            self.buf.advance(1);
        }
        let end = self.buf[self.scanned..]
            .iter()
            .position(|byte| matches!(byte, b'\n' | b'\r'));
        let bytes = end.map_or(self.buf.len(), |end| self.scanned + end);
        // Also while no line end was found, or a line without one would fill the memory.
        if bytes > self.limits.line_bytes {
            return Err(Violation::LineTooLong(self.limits.line_bytes));
        }
        if end.is_none() {
            self.scanned = bytes;
            return Ok(None);
        }
        // Split off and not copied: the data of a usual event is a slice of what was read.
        let mut line = self.buf.split_to(bytes).freeze();
        self.scanned = 0;
        self.after_cr = self.buf.first() == Some(&b'\r');
        self.buf.advance(1);
        // Only before the first line; anywhere else it is data.
        if !std::mem::replace(&mut self.begun, true) && line.starts_with(BYTE_ORDER_MARK) {
            line.advance(BYTE_ORDER_MARK.len());
        }
        Ok(Some(line))
    }

    fn field(&mut self, line: &Bytes) -> Result<(), Violation> {
        let colon = line.iter().position(|byte| *byte == b':');
        let name = &line[..colon.unwrap_or(line.len())];
        let mut value = line.slice(colon.map_or(line.len(), |colon| colon + 1)..);
        if value.first() == Some(&b' ') {
            value.advance(1);
        }
        match name {
            b"data" => self.more(value),
            b"event" => {
                self.name = value;
                Ok(())
            }
            b"id" => {
                // The standard ignores an id with a NUL.
                if !value.contains(&0) {
                    self.id = value;
                }
                Ok(())
            }
            // Comments have an empty name; `retry` and unknown fields are ignored.
            _ => Ok(()),
        }
    }

    fn more(&mut self, line: Bytes) -> Result<(), Violation> {
        let retained = match &self.data {
            EventData::None => 0,
            // One more for the line feed that joins the next line.
            EventData::One(data) => data.len() + 1,
            EventData::Many(data) => data.len() + 1,
        };
        if retained + line.len() > self.limits.event_bytes {
            return Err(Violation::EventTooLarge(self.limits.event_bytes));
        }
        self.data = match std::mem::take(&mut self.data) {
            EventData::None => EventData::One(line),
            EventData::One(data) => {
                let mut both = BytesMut::with_capacity(retained + line.len());
                both.extend_from_slice(&data);
                EventData::Many(joined(both, &line))
            }
            EventData::Many(data) => EventData::Many(joined(data, &line)),
        };
        Ok(())
    }
}

fn joined(mut data: BytesMut, line: &[u8]) -> BytesMut {
    data.extend_from_slice(b"\n");
    data.extend_from_slice(line);
    data
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

#[cfg(test)]
mod tests;
