//! Decodes chunks as text, never split within a character (KE-202).
//!
//! The decoders of `Text` and `String`. Invalid UTF-8 is an error; no replacement character is ever inserted.

use bytes::{Bytes, BytesMut};

use super::raw::Joined;
use super::{FromChunks, Out};
use crate::Result;
use crate::chunk::{Chunk, Text};
use crate::error::Error;
use crate::name::Mime;
use crate::want::Want;

/// The first bytes of a character whose rest has not arrived.
#[derive(Debug, Default)]
pub struct PartialChar {
    bytes: [u8; 3],
    len: usize,
    /// Bytes of the output before the held ones.
    offset: usize,
}

impl PartialChar {
    /// The text that is complete with a chunk: whole characters of choice 0, never empty.
    fn take(&mut self, chunk: Chunk) -> Result<Option<Text>> {
        if chunk.choice != 0 || chunk.data.is_empty() {
            return Ok(None);
        }
        Ok(Some(self.next(chunk.data)?).filter(|text| !text.is_empty()))
    }

    /// The longest text that is complete with `data`. The remaining bytes are held.
    fn next(&mut self, data: Bytes) -> Result<Text> {
        if self.len == 0 {
            return self.split(data);
        }
        // Only where a character was cut; all other text stays a view of the chunk's bytes.
        let mut joined = BytesMut::with_capacity(self.len + data.len());
        joined.extend_from_slice(&self.bytes[..self.len]);
        joined.extend_from_slice(&data);
        self.len = 0;
        self.split(joined.freeze())
    }

    fn split(&mut self, mut data: Bytes) -> Result<Text> {
        let complete = match std::str::from_utf8(&data) {
            Ok(_) => data.len(),
            // No length: the bytes end within a character that is right so far. The rest is held for the next chunk.
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(error) => return Err(wrong(self.offset + error.valid_up_to(), "is not UTF-8")),
        };
        let rest = data.split_off(complete);
        self.hold(&rest);
        self.offset += complete;
        // The bytes were validated above; the view checks again, at the speed of memory.
        Text::try_from(data).map_err(|_| wrong(self.offset, "is not UTF-8"))
    }

    /// Holds the first bytes of a character: at most 3, because an incomplete sequence is no longer.
    fn hold(&mut self, rest: &[u8]) {
        self.len = rest.len().min(self.bytes.len());
        self.bytes[..self.len].copy_from_slice(&rest[..self.len]);
    }

    /// Appends the text that is complete with `data` to `acc`.
    fn append(&mut self, data: &Bytes, acc: &mut String) -> Result<()> {
        // The usual chunk: validated once and appended, without a view in between (KE-206).
        if self.len == 0
            && let Ok(text) = std::str::from_utf8(data)
        {
            acc.push_str(text);
            self.offset += text.len();
            return Ok(());
        }
        acc.push_str(&self.next(data.clone())?);
        Ok(())
    }

    fn end(&self) -> Result<()> {
        if self.len == 0 {
            Ok(())
        } else {
            Err(wrong(
                self.offset,
                "is the beginning of a character that never ends",
            ))
        }
    }
}

fn wrong(offset: usize, what: &str) -> Error {
    Error::Decode {
        wanted: "text".into(),
        why: format!("byte {offset} {what}"),
    }
}

fn want() -> Want {
    Want::main([
        Mime::new("text/*"),
        Mime::JSON,
        Mime::NDJSON,
        Mime::new("*+json"),
        Mime::new("*+xml"),
        Mime::new("application/xml"),
    ])
}

impl FromChunks for Text {
    type State = PartialChar;
    type Acc = Joined;
    type Whole = Self;

    fn want() -> Want {
        want()
    }

    fn push(retained: &mut PartialChar, chunk: Chunk, out: &mut Out<Self>) -> Result<()> {
        if let Some(text) = retained.take(chunk)? {
            out.push(text);
        }
        Ok(())
    }

    fn end(retained: &mut PartialChar, _out: &mut Out<Self>) -> Result<()> {
        retained.end()
    }

    fn fold(acc: &mut Joined, item: Self) -> Result<()> {
        acc.add(item.into_bytes());
        Ok(())
    }

    fn whole(acc: Joined) -> Result<Self> {
        // Every piece consists of whole characters.
        Self::try_from(acc.done()).map_err(|_| wrong(0, "is not UTF-8"))
    }
}

impl FromChunks for String {
    type State = PartialChar;
    type Acc = Self;
    type Whole = Self;

    fn want() -> Want {
        want()
    }

    fn push(retained: &mut PartialChar, chunk: Chunk, out: &mut Out<Self>) -> Result<()> {
        if let Some(text) = retained.take(chunk)? {
            out.push(text.to_string());
        }
        Ok(())
    }

    fn end(retained: &mut PartialChar, _out: &mut Out<Self>) -> Result<()> {
        retained.end()
    }

    fn fold(acc: &mut Self, item: Self) -> Result<()> {
        acc.push_str(&item);
        Ok(())
    }

    fn push_fold(retained: &mut PartialChar, acc: &mut Self, chunk: Chunk) -> Result<()> {
        if chunk.choice == 0 {
            retained.append(&chunk.data, acc)?;
        }
        Ok(())
    }

    fn whole(acc: Self) -> Result<Self> {
        Ok(acc)
    }
}
