//! The metadata of a leaf, and the check of metadata after its first fragment.

use bytestring::ByteString;
use prost_types::{Any, Timestamp};

use super::mimetype;

/// Metadata of a chunk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// Empty means `application/octet-stream` (EV-406).
    pub mimetype: ByteString,
    /// The role of the speaker; if empty, the consumer decides (EV-409).
    pub role: ByteString,
    /// A name for humans, never a path; see [`file_name`].
    pub file_name: ByteString,
    /// When the content was captured; it does not define an order (EV-408).
    pub capture_time: Option<Timestamp>,
    /// Opaque values, retained with the chunk (EV-408).
    pub experimental: Vec<Any>,
}

impl Metadata {
    /// Metadata with only this mimetype.
    #[must_use]
    pub fn of(mimetype: impl Into<ByteString>) -> Self {
        Self {
            mimetype: mimetype.into(),
            ..Self::default()
        }
    }

    /// The same with a role.
    #[must_use]
    pub fn with_role(self, role: impl Into<ByteString>) -> Self {
        Self {
            role: role.into(),
            ..self
        }
    }

    /// The mimetype, with the default in place of the empty one (EV-406).
    #[must_use]
    pub fn mimetype(&self) -> &str {
        if self.mimetype.is_empty() {
            mimetype::OCTET_STREAM
        } else {
            &self.mimetype
        }
    }

    /// Whether `later`, found after the first fragment, agrees with this (EV-405, lenient).
    #[must_use]
    pub fn agrees_with(&self, later: &Self) -> bool {
        let role = later.role.is_empty() || later.role == self.role;
        let mimetype = later.mimetype.is_empty() || mimetype::same(&later.mimetype, &self.mimetype);
        role && mimetype
    }

    /// Bytes of `experimental`, which has a limit of its own.
    #[must_use]
    pub fn experimental_bytes(&self) -> usize {
        self.experimental
            .iter()
            .map(|any| any.type_url.len() + any.value.len())
            .sum()
    }

    /// Bytes that the session retains for it.
    #[must_use]
    pub fn len(&self) -> usize {
        let text = self.mimetype.len() + self.role.len() + self.file_name.len();
        text + self.experimental_bytes()
    }

    /// Whether all members are empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0 && self.capture_time.is_none()
    }
}

/// How a session handles metadata after the first fragment of a leaf (EV-405).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetadataMode {
    /// Any such metadata aborts the session.
    Strict,
    /// Metadata that agrees with the first is ignored, other metadata aborts the session. The default of gRPC and
    /// WebSocket protobuf.
    #[default]
    Lenient,
    /// It begins a new chunk of the node. The default of WebSocket JSON and msgpack.
    PerChunk,
    /// As per chunk, but metadata equal to that of the chunk before continues it: for a client of a msgpack server, which
    /// repeats the metadata on every fragment (EV-972).
    PerItem,
}

impl MetadataMode {
    /// Whether metadata after the first fragment may differ from it.
    #[must_use]
    pub const fn is_per_chunk(self) -> bool {
        matches!(self, Self::PerChunk | Self::PerItem)
    }
}

/// `name` reduced to its last path component, without control characters, at most 255 bytes; `.` and `..` become
/// empty (EV-407).
#[must_use]
pub fn file_name(name: &str) -> String {
    // Both separators on every platform: the name may come from another one.
    let last = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let mut retained = String::new();
    for c in last.chars().filter(|c| !c.is_control()) {
        if retained.len() + c.len_utf8() > FILE_NAME_BYTES {
            break;
        }
        retained.push(c);
    }
    if retained == "." || retained == ".." {
        String::new()
    } else {
        retained
    }
}

const FILE_NAME_BYTES: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ev_407_a_file_name_is_its_last_component_and_never_a_path() {
        let long = "é".repeat(200);
        for (name, retained) in [
            ("cat.png", "cat.png"),
            ("/etc/passwd", "passwd"),
            ("C:\\tmp\\a b.txt", "a b.txt"),
            ("a/b\\..", ""),
            (".", ""),
            ("dir/", ""),
            ("x\u{7}\n\u{85}y", "xy"),
            (long.as_str(), &"é".repeat(127)),
        ] {
            assert_eq!(file_name(name), retained, "{name:?}");
        }
    }

    #[test]
    fn ev_405_lenient_compares_type_case_insensitively_and_parameters_as_pairs() {
        let first = Metadata::of("text/plain; charset=utf-8; x=\"a b\"").with_role("USER");
        for (mimetype, role, agrees) in [
            ("", "", true),
            ("TEXT/Plain;X=\"a b\" ;charset=utf-8", "USER", true),
            ("text/plain;charset=UTF-8;x=\"a b\"", "", false),
            ("text/plain", "USER", false),
            ("text/plain; charset=utf-8; x=\"a b\"", "user", false),
            ("text/html; charset=utf-8; x=\"a b\"", "", false),
        ] {
            let later = Metadata::of(mimetype).with_role(role);
            assert_eq!(first.agrees_with(&later), agrees, "{mimetype} {role}");
        }
    }
}
