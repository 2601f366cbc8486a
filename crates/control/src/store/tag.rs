//! [`TagFile`]: a tag on disk, `tags/TAG.json`, and what a tag's name may be (AI-312, AI-321).

use sapwood_proto::steer::TagInfo;
use serde::{Deserialize, Serialize};

use crate::module::ModuleId;

/// The file of a tag: the reference's members, and `public`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TagFile {
    tag: String,
    module_id: String,
    updated_at: u64,
    updated_by: String,
    wasm_size: u64,
    compiled_size: u64,
    /// Absent if false, as in files that the reference wrote.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    public: bool,
}

impl From<TagInfo> for TagFile {
    fn from(info: TagInfo) -> Self {
        Self {
            tag: info.tag,
            module_id: info.module_id,
            updated_at: info.updated_at,
            updated_by: info.updated_by,
            wasm_size: info.wasm_size,
            compiled_size: info.compiled_size,
            public: info.public,
        }
    }
}

impl TagFile {
    /// Reads the file of the tag `name`. `None` if it is broken or of another tag.
    pub(super) fn parse(name: &str, json: &[u8]) -> Option<TagInfo> {
        let file: Self = serde_json::from_slice(json).ok()?;
        if file.tag != name {
            return None;
        }
        Some(TagInfo {
            module_id: ModuleId::parse(&file.module_id)?.to_string(),
            tag: file.tag,
            updated_at: file.updated_at,
            updated_by: file.updated_by,
            wasm_size: file.wasm_size,
            compiled_size: file.compiled_size,
            public: file.public,
        })
    }

    /// Encodes the file.
    pub(super) fn json(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(self)
    }
}

/// What is wrong with a tag's name; checked in this order (AI-312).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TagNameError {
    /// More than 50 bytes.
    #[error("tag name too long")]
    TooLong,
    /// It could be taken for a module id.
    #[error("tag name looks too hex")]
    TooHex,
    /// Not a letter and then letters, digits, `_`, `-` and `.`.
    #[error("tag name not identifier")]
    NotIdentifier,
}

/// Checks a tag's name. One that passes is a safe file name.
///
/// # Errors
/// The first rule that it breaks.
pub fn check_tag_name(name: &str) -> Result<(), TagNameError> {
    if name.len() > NAME_BYTES_MAX {
        return Err(TagNameError::TooLong);
    }
    if looks_hex(name) {
        return Err(TagNameError::TooHex);
    }
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    let rest = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if first && bytes.all(rest) {
        Ok(())
    } else {
        Err(TagNameError::NotIdentifier)
    }
}

/// Whether a name is long and of hex digits alone, so that it is meant as a module id.
pub(crate) fn looks_hex(name: &str) -> bool {
    name.len() > HEX_BYTES_MAX && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

const NAME_BYTES_MAX: usize = 50;

/// The longest tag of hex digits alone.
const HEX_BYTES_MAX: usize = 20;
