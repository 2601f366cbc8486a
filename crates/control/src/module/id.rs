//! [`ModuleId`]: the SHA-256 of a module's bytes as they were uploaded (AI-311).

use std::fmt;

use sha2::{Digest, Sha256};

/// Identifies a module: the SHA-256 of the uploaded bytes, never of the instrumented ones. Shown as 64 lower-case hex
/// digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModuleId([u8; 32]);

impl ModuleId {
    /// Returns the id of a module with these bytes.
    #[must_use]
    pub fn of(module: &[u8]) -> Self {
        Self(Sha256::digest(module).into())
    }

    /// Reads 64 hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let mut id = [0; 32];
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = hex_digit(pair[0])? << 4 | hex_digit(pair[1])?;
        }
        Some(Self(id))
    }

    /// An id that [`ModuleId::as_bytes`] has shown.
    #[cfg(target_os = "linux")]
    pub(crate) const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The digest.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for ModuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ModuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

const fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}
