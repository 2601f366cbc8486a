//! The file format of compiled artefacts: `ID-KEY.cwasm` (AI-321).
//!
//! Running an artefact is running machine code, so its bytes are handed out only if everything matches: the module, the
//! key of compiler and options, the length, and a checksum over all of it. The checksum finds damage, not malice:
//! against that the folder and the file must belong to this user alone ([`Folder::read_private`]).
//!
//! ```text
//! magic 8 | module id 32 | key 32 | length 8 (little-endian) | SHA-256 of these 80 bytes and the artefact 32 | artefact
//! ```
//!
//! [`Folder::read_private`]: super::folder::Folder::read_private

use std::fmt;

use sha2::{Digest, Sha256};

use crate::module::{INSTRUMENTATION_VERSION, ModuleId};

/// Names everything that a compiled artefact depends on beside its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArtefactKey([u8; 32]);

impl ArtefactKey {
    /// Derives the key from the compiler's description of itself: version, options, processor features.
    #[must_use]
    pub fn of(compiler: impl AsRef<[u8]>) -> Self {
        let mut hash = Sha256::new();
        hash.update(INSTRUMENTATION_VERSION.to_le_bytes());
        hash.update(compiler);
        Self(hash.finalize().into())
    }
}

/// The part in file names: 32 hex digits.
impl fmt::Display for ArtefactKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..16]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Returns what stands before an artefact in its file.
pub(super) fn header(id: &ModuleId, key: &ArtefactKey, artefact: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(id.as_bytes());
    header.extend_from_slice(&key.0);
    header.extend_from_slice(&(artefact.len() as u64).to_le_bytes());
    let checksum = Sha256::new()
        .chain_update(&header)
        .chain_update(artefact)
        .finalize();
    header.extend_from_slice(&checksum);
    header
}

/// Returns the artefact of a file, if it is whole, of this module, and made under this key.
pub(super) fn verified<'a>(id: &ModuleId, key: &ArtefactKey, file: &'a [u8]) -> Option<&'a [u8]> {
    let (found, artefact) = file.split_at_checked(HEADER_BYTES)?;
    (found == header(id, key, artefact)).then_some(artefact)
}

const MAGIC: &[u8; 8] = b"sapwoodA";

/// Bytes before the artefact.
pub(super) const HEADER_BYTES: usize = 8 + 32 + 32 + 8 + 32;
