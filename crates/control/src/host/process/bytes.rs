//! [`ByteWriter`] and [`ByteReader`]: values as bytes, for messages between processes of one program.

use std::time::Duration;

use sapwood_proto::steer::Token;

/// Builds a message: its length, its kind, and values.
#[derive(Debug)]
pub(super) struct ByteWriter(Vec<u8>);

impl ByteWriter {
    pub(super) fn of_kind(kind: u8) -> Self {
        Self(vec![0, 0, 0, 0, kind])
    }

    pub(super) fn byte(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(super) fn flag(&mut self, value: bool) -> &mut Self {
        self.byte(u8::from(value))
    }

    pub(super) fn word(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn long(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn size(&mut self, value: usize) -> &mut Self {
        self.long(value as u64)
    }

    pub(super) fn time(&mut self, value: Duration) -> &mut Self {
        self.long(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(super) fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.size(value.len());
        self.0.extend_from_slice(value);
        self
    }

    pub(super) fn words(&mut self, values: &[u32]) -> &mut Self {
        self.size(values.len());
        for value in values {
            self.word(*value);
        }
        self
    }

    pub(super) fn optional<T>(
        &mut self,
        value: Option<T>,
        write: impl FnOnce(&mut Self, T),
    ) -> &mut Self {
        self.flag(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
        self
    }

    /// The whole message.
    pub(super) fn finish(self) -> Vec<u8> {
        self.finish_before(0)
    }

    /// The message but for its last bytes, which are sent after it.
    pub(super) fn finish_before(mut self, following: usize) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - 4 + following).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_le_bytes());
        self.0
    }
}

/// Reads the values of a message. Every method returns `None` where the bytes end too early.
#[derive(Debug)]
pub(super) struct ByteReader<'m>(&'m [u8]);

impl<'m> ByteReader<'m> {
    /// A reader of what follows the kind.
    pub(super) const fn new(message: &'m [u8]) -> Self {
        Self(message)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (value, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*value)
    }

    pub(super) fn byte(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    pub(super) fn flag(&mut self) -> Option<bool> {
        match self.byte()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub(super) fn word(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn long(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn size(&mut self) -> Option<usize> {
        usize::try_from(self.long()?).ok()
    }

    pub(super) fn time(&mut self) -> Option<Duration> {
        self.long().map(Duration::from_nanos)
    }

    pub(super) fn bytes(&mut self) -> Option<&'m [u8]> {
        let length = self.size()?;
        let (value, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(value)
    }

    pub(super) fn text(&mut self) -> Option<&'m str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    pub(super) fn words(&mut self) -> Option<Vec<u32>> {
        let length = self.size()?.checked_mul(4)?;
        let (values, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        let (values, _) = values.as_chunks();
        Some(values.iter().copied().map(u32::from_le_bytes).collect())
    }

    /// Ids of a vocabulary of this size.
    pub(super) fn tokens(&mut self, vocabulary: usize) -> Option<Vec<Token>> {
        let tokens = self.words()?;
        let known = |token: &Token| (*token as usize) < vocabulary;
        tokens.iter().all(known).then_some(tokens)
    }

    #[expect(
        clippy::option_option,
        reason = "whether it could be read, and whether it is there"
    )]
    pub(super) fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Option<T>,
    ) -> Option<Option<T>> {
        Some(match self.flag()? {
            true => Some(read(self)?),
            false => None,
        })
    }

    /// `None` if anything is left.
    pub(super) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}
