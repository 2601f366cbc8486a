//! [`GgufReader`]: reads the numbers and texts of a header, no more bytes than [`HEADER_BYTES_MAX`].

use std::io::{self, Read};

use super::{Error, HEADER_BYTES_MAX, TEXT_BYTES_MAX};

/// Reads a header and counts its bytes.
pub(super) struct GgufReader<R> {
    bytes: R,
    read: u64,
}

impl<R: Read> GgufReader<R> {
    pub(super) fn new(bytes: R) -> Self {
        Self { bytes, read: 0 }
    }

    /// Returns how many bytes were read, at most [`HEADER_BYTES_MAX`].
    pub(super) fn position(&self) -> u64 {
        self.read
    }

    /// Fills a buffer.
    pub(super) fn exact(&mut self, into: &mut [u8]) -> Result<(), Error> {
        self.advance(into.len() as u64)?;
        self.bytes
            .read_exact(into)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => Error::Short,
                kind => Error::Read(kind),
            })
    }

    /// Counts bytes that are read next.
    fn advance(&mut self, bytes: u64) -> Result<(), Error> {
        // Counted before reading, so that a length beyond the limit is refused without reading a byte of it.
        self.read = self.read.saturating_add(bytes);
        if self.read > HEADER_BYTES_MAX {
            return Err(Error::Excessive(format!(
                "it is itself longer than {HEADER_BYTES_MAX} bytes"
            )));
        }
        Ok(())
    }

    /// Reads a number of 32 bits.
    pub(super) fn u32(&mut self) -> Result<u32, Error> {
        let mut bytes = [0; 4];
        self.exact(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads a number of 64 bits.
    pub(super) fn u64(&mut self) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads a number that counts something, and refuses one above a limit.
    pub(super) fn count(&mut self, most: u64, what: &str) -> Result<u64, Error> {
        match self.u64()? {
            count if count <= most => Ok(count),
            count => Err(Error::Excessive(format!("{count} {what}"))),
        }
    }

    /// Reads a text of at most so many bytes; what is not UTF-8 is replaced.
    pub(super) fn text(&mut self, most: u64) -> Result<String, Error> {
        let bytes = self.bytes(most)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Reads the bytes of a text, at most so many.
    pub(super) fn bytes(&mut self, most: u64) -> Result<Vec<u8>, Error> {
        let length = self.count(most, "bytes in a text")?;
        let mut bytes = Vec::new();
        self.advance(length)?;
        // `take` grows the buffer only as bytes arrive: a length alone allocates nothing.
        let got = self.bytes.by_ref().take(length).read_to_end(&mut bytes);
        match got {
            Ok(got) if got as u64 == length => Ok(bytes),
            Ok(_) => Err(Error::Short),
            Err(error) => Err(Error::Read(error.kind())),
        }
    }

    /// Reads past a text.
    pub(super) fn skip_text(&mut self) -> Result<(), Error> {
        let length = self.count(TEXT_BYTES_MAX, "bytes in a text")?;
        self.advance(length)?;
        match io::copy(&mut self.bytes.by_ref().take(length), &mut io::sink()) {
            Ok(copied) if copied == length => Ok(()),
            Ok(_) => Err(Error::Short),
            Err(error) => Err(Error::Read(error.kind())),
        }
    }
}
