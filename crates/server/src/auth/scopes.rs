//! Scopes of callers and access requirements of routes: plain values that know no keys or requests.

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

/// What a key may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyScope {
    /// Call functions.
    Infer,
    /// Store and run controllers.
    Control,
    /// Load and unload models, read logs.
    Admin,
    /// Read `/metrics`.
    Metrics,
}

impl KeyScope {
    /// Every scope.
    pub const ALL: [Self; 4] = [Self::Infer, Self::Control, Self::Admin, Self::Metrics];

    /// The name used in key files and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Infer => "infer",
            Self::Control => "control",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
        }
    }

    /// The scope of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scope| scope.name() == name)
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// A set of scopes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// All of them: what a caller has when no keys are configured.
    // One bit for each of `KeyScope::ALL`; a fifth scope has to be added here too.
    pub const ALL: Self = Self(0b1111);

    /// This scope alone.
    pub(super) const fn of(scope: KeyScope) -> Self {
        Self(scope.bit())
    }

    /// Whether `scope` is in the set.
    #[must_use]
    pub const fn has(self, scope: KeyScope) -> bool {
        self.0 & scope.bit() != 0
    }
}

impl FromIterator<KeyScope> for Scopes {
    fn from_iter<I: IntoIterator<Item = KeyScope>>(scopes: I) -> Self {
        Self(scopes.into_iter().fold(0, |bits, scope| bits | scope.bit()))
    }
}

/// SHA-256 of a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyFingerprint([u8; 32]);

impl KeyFingerprint {
    /// The digest of `secret`.
    #[must_use]
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret.as_bytes()).into())
    }

    /// Compares in constant time.
    pub(super) fn ct_eq(&self, other: &Self) -> Choice {
        self.0.ct_eq(&other.0)
    }

    /// Reads 64 hex digits.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let high = char::from(pair[0]).to_digit(16)?;
            let low = char::from(pair[1]).to_digit(16)?;
            *byte = u8::try_from(high * 16 + low).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for KeyFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the digest: from the digest of a short secret the secret can be searched for.
        f.write_str("KeyFingerprint(…)")
    }
}

/// The access that a route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteAccess {
    /// Nothing: probes reach it without a key (OA-905).
    Open,
    /// A caller with this scope.
    Needs(KeyScope),
}
