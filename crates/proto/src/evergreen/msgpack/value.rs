//! Reads and writes msgpack values as Action Engine 0.4.0 does.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use bytestring::ByteString;

/// The bytes are not a value, or not the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BadValue;

/// Reads values from the front of a byte string; payloads are views of it.
#[derive(Clone, Debug)]
pub(super) struct ValueReader {
    bytes: Bytes,
}

impl ValueReader {
    pub(super) const fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The first byte of the next value, which determines its type.
    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.first().copied()
    }

    /// Reads an integer in any of its forms.
    pub(super) fn int(&mut self) -> Result<i64, BadValue> {
        let marker = self.byte()?;
        Ok(match marker {
            0x00..=0x7f => i64::from(marker),
            0xe0..=0xff => i64::from(marker.cast_signed()),
            // Unsigned forms are accepted (EV-731), but never written (EV-730).
            0xcc => self.unsigned(1)?,
            0xcd => self.unsigned(2)?,
            0xce => self.unsigned(4)?,
            0xcf => self.unsigned(8)?,
            0xd0 => i64::from(self.fixed::<1>().map(i8::from_be_bytes)?),
            0xd1 => i64::from(self.fixed::<2>().map(i16::from_be_bytes)?),
            0xd2 => i64::from(self.fixed::<4>().map(i32::from_be_bytes)?),
            0xd3 => self.fixed::<8>().map(i64::from_be_bytes)?,
            _ => return Err(BadValue),
        })
    }

    /// Reads a value that may be absent.
    pub(super) fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, BadValue>,
    ) -> Result<Option<T>, BadValue> {
        if self.peek() == Some(NIL) {
            self.bytes.advance(1);
            return Ok(None);
        }
        read(self).map(Some)
    }

    pub(super) fn bool(&mut self) -> Result<bool, BadValue> {
        match self.byte()? {
            0xc2 => Ok(false),
            0xc3 => Ok(true),
            _ => Err(BadValue),
        }
    }

    /// Reads the bytes of a str, which may not be UTF-8: headers and attributes are arbitrary bytes encoded as str.
    pub(super) fn raw_text(&mut self) -> Result<Bytes, BadValue> {
        let marker = self.byte()?;
        let len = match marker {
            0xa0..=0xbf => usize::from(marker & 0x1f),
            0xd9 => self.length(1)?,
            0xda => self.length(2)?,
            0xdb => self.length(4)?,
            _ => return Err(BadValue),
        };
        self.take(len)
    }

    /// Reads a str that must be UTF-8.
    pub(super) fn text(&mut self) -> Result<ByteString, BadValue> {
        ByteString::try_from(self.raw_text()?).map_err(|_| BadValue)
    }

    /// Whether the next value is a str.
    pub(super) fn at_text(&self) -> bool {
        matches!(self.peek(), Some(0xa0..=0xbf | 0xd9..=0xdb))
    }

    pub(super) fn bin(&mut self) -> Result<Bytes, BadValue> {
        let len = match self.byte()? {
            0xc4 => self.length(1)?,
            0xc5 => self.length(2)?,
            0xc6 => self.length(4)?,
            _ => return Err(BadValue),
        };
        self.take(len)
    }

    /// Reads a struct: values within a bin.
    pub(super) fn inner(&mut self) -> Result<Self, BadValue> {
        self.bin().map(Self::new)
    }

    /// Reads the length of a list.
    pub(super) fn list(&mut self) -> Result<usize, BadValue> {
        let marker = self.byte()?;
        match marker {
            0x90..=0x9f => Ok(usize::from(marker & 0x0f)),
            0xdc => self.length(2),
            0xdd => self.length(4),
            _ => Err(BadValue),
        }
    }

    /// Reads a count of pairs.
    pub(super) fn count(&mut self) -> Result<usize, BadValue> {
        usize::try_from(self.int()?).map_err(|_| BadValue)
    }

    fn byte(&mut self) -> Result<u8, BadValue> {
        let byte = self.peek().ok_or(BadValue)?;
        self.bytes.advance(1);
        Ok(byte)
    }

    fn take(&mut self, len: usize) -> Result<Bytes, BadValue> {
        // `split_to` panics beyond the end, and the length is the peer's.
        if len > self.bytes.len() {
            return Err(BadValue);
        }
        Ok(self.bytes.split_to(len))
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], BadValue> {
        let (bytes, _) = self.bytes.split_first_chunk::<N>().ok_or(BadValue)?;
        let bytes = *bytes;
        self.bytes.advance(N);
        Ok(bytes)
    }

    fn unsigned(&mut self, bytes: usize) -> Result<i64, BadValue> {
        // `get_uint` panics beyond the end.
        if self.bytes.len() < bytes {
            return Err(BadValue);
        }
        // Values above 2^63 fit no field of the protocol, so one signed type is enough for all integers.
        i64::try_from(self.bytes.get_uint(bytes)).map_err(|_| BadValue)
    }

    fn length(&mut self, bytes: usize) -> Result<usize, BadValue> {
        usize::try_from(self.unsigned(bytes)?).map_err(|_| BadValue)
    }
}

/// Writes an integer, in the only forms that 0.4.0 reads correctly: fixint, d0, d1, d2.
pub(super) fn put_int(out: &mut BytesMut, value: i32) {
    match value {
        // 0.4.0 misreads cc to cf and d3 without an error and loses its place in the message (EV-730); other encoders
        // choose cc from 128 on. The conversions cannot fail: each arm's range fits its type.
        -32..=127 => out.put_i8(i8::try_from(value).unwrap_or_default()),
        -128..=-33 => {
            out.put_u8(0xd0);
            out.put_i8(i8::try_from(value).unwrap_or_default());
        }
        -32_768..=32_767 => {
            out.put_u8(0xd1);
            out.put_i16(i16::try_from(value).unwrap_or_default());
        }
        _ => {
            out.put_u8(0xd2);
            out.put_i32(value);
        }
    }
}

pub(super) const fn int_len(value: i32) -> usize {
    match value {
        -32..=127 => 1,
        -128..=-33 => 2,
        -32_768..=32_767 => 3,
        _ => 5,
    }
}

/// Writes a count as a plain integer; no count exceeds 2^31.
pub(super) fn put_count(out: &mut BytesMut, count: usize) {
    put_int(out, i32::try_from(count).unwrap_or(i32::MAX));
}

pub(super) fn count_len(count: usize) -> usize {
    int_len(i32::try_from(count).unwrap_or(i32::MAX))
}

/// The d3 form, which is only used within a timestamp.
pub(super) fn put_micros(out: &mut BytesMut, micros: i64) {
    put_bin_head(out, MICROS_LEN);
    out.put_u8(0xd3);
    out.put_i64(micros);
}

/// Bytes of a timestamp without its head.
pub(super) const MICROS_LEN: usize = 9;

pub(super) fn put_nil(out: &mut BytesMut) {
    out.put_u8(NIL);
}

pub(super) fn put_bool(out: &mut BytesMut, value: bool) {
    out.put_u8(if value { 0xc3 } else { 0xc2 });
}

pub(super) fn put_text(out: &mut BytesMut, text: &[u8]) {
    match text.len() {
        // A str has a short form for up to 31 bytes, a bin has none: the two head lengths differ.
        len @ 0..=31 => out.put_u8(0xa0 | low_byte(len)),
        len => put_head(out, [0xd9, 0xda, 0xdb], len),
    }
    out.put_slice(text);
}

pub(super) const fn text_len(text: &[u8]) -> usize {
    let len = text.len();
    len + if len <= 31 { 1 } else { head_len(len) }
}

pub(super) fn put_bin_head(out: &mut BytesMut, len: usize) {
    put_head(out, [0xc4, 0xc5, 0xc6], len);
}

/// The length of a struct of `len` bytes with its head.
pub(super) const fn wrapped(len: usize) -> usize {
    len + head_len(len)
}

pub(super) fn put_list(out: &mut BytesMut, len: usize) {
    match len {
        0..=15 => out.put_u8(0x90 | low_byte(len)),
        16..=0xffff => {
            out.put_u8(0xdc);
            out.put_uint(len as u64, 2);
        }
        _ => {
            out.put_u8(0xdd);
            out.put_uint(len as u64, 4);
        }
    }
}

pub(super) const fn list_len(len: usize) -> usize {
    match len {
        0..=15 => 1,
        16..=0xffff => 3,
        _ => 5,
    }
}

fn put_head(out: &mut BytesMut, markers: [u8; 3], len: usize) {
    let (marker, bytes) = match len {
        0..=0xff => (markers[0], 1),
        0x100..=0xffff => (markers[1], 2),
        _ => (markers[2], 4),
    };
    out.put_u8(marker);
    out.put_uint(len as u64, bytes);
}

const fn head_len(len: usize) -> usize {
    match len {
        0..=0xff => 2,
        0x100..=0xffff => 3,
        _ => 5,
    }
}

/// The low byte of a length that the caller knows to be small.
const fn low_byte(len: usize) -> u8 {
    (len & 0xff) as u8
}

/// An absent value.
const NIL: u8 = 0xc0;
