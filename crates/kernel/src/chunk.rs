//! [`Chunk`]: one typed piece of a stream.
//!
//! Cloning a chunk counts references and copies nothing.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;

use crate::Result;
use crate::error::Error;
use crate::meta::Meta;
use crate::name::{Mime, Name, Port};

/// A `str` over shared bytes.
pub type Text = bytestring::ByteString;

/// One piece of one output.
///
/// For one (port, choice) the concatenation of `data` in order is the whole output; chunk boundaries carry no meaning
/// (KE-111). `data` is at most `chunk_bytes_max`, 8 MiB.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Which output of the function; `""` is the main one.
    pub port: Port,
    /// Which of n parallel answers.
    pub choice: u32,
    /// Which leaf of the output; starts at 0 and rises by 1 (KE-113).
    pub part: u32,
    /// The type of `data`; constant within a part.
    pub mime: Mime,
    /// The bytes. Empty is legal: it carries meta, or announces an empty part (KE-114).
    pub data: Bytes,
    /// Metadata of the request.
    pub meta: Option<Arc<Meta>>,
    /// The raw object of the producer; local only (KE-115).
    pub inner: Option<Arc<dyn Any + Send + Sync>>,
}

// KE-117: a chunk is moved once per stage, so it must stay small.
const _: () = assert!(size_of::<Chunk>() <= 128);

impl Chunk {
    fn of(mime: Mime, data: Bytes) -> Self {
        Self {
            port: Port::MAIN,
            choice: 0,
            part: 0,
            mime,
            data,
            meta: None,
            inner: None,
        }
    }

    /// Plain text on the main port.
    pub fn text(text: impl Into<Text>) -> Self {
        Self::of(Mime::TEXT, text.into().into_bytes())
    }

    /// Bytes of no known type on the main port.
    pub fn bytes(bytes: impl Into<Bytes>) -> Self {
        Self::of(Mime::BYTES, bytes.into())
    }

    /// A JSON value on the main port.
    ///
    /// # Errors
    /// `Decode` if the value cannot be written as JSON (KE-116).
    pub fn json<T: Serialize + ?Sized>(value: &T) -> Result<Self> {
        match serde_json::to_vec(value) {
            Ok(data) => Ok(Self::of(Mime::JSON, data.into())),
            Err(error) => Err(Error::Decode {
                wanted: "JSON".into(),
                why: format!("the value cannot be written as JSON: {error}"),
            }),
        }
    }

    /// An empty chunk on the main port; carries metadata.
    #[must_use]
    pub fn empty() -> Self {
        Self::of(Mime::TEXT, Bytes::new())
    }

    /// Sets the port.
    #[must_use]
    pub fn on(mut self, port: impl Into<Port>) -> Self {
        self.port = port.into();
        self
    }

    /// Sets the choice.
    #[must_use]
    pub const fn with_choice(mut self, choice: u32) -> Self {
        self.choice = choice;
        self
    }

    /// Sets the part.
    #[must_use]
    pub const fn with_part(mut self, part: u32) -> Self {
        self.part = part;
        self
    }

    /// Sets the mimetype.
    #[must_use]
    pub fn with_mime(mut self, mime: impl Into<Mime>) -> Self {
        self.mime = mime.into();
        self
    }

    /// Sets the metadata.
    #[must_use]
    pub fn with_meta(mut self, meta: Meta) -> Self {
        self.meta = Some(Arc::new(meta));
        self
    }

    /// Sets the raw object.
    #[must_use]
    pub fn with_inner<X: Any + Send + Sync>(mut self, inner: X) -> Self {
        self.inner = Some(Arc::new(inner));
        self
    }

    /// The raw object, if it is of type `X`.
    #[must_use]
    pub fn inner<X: Any>(&self) -> Option<&X> {
        self.inner.as_deref().and_then(|inner| inner.downcast_ref())
    }
}

/// The data as text, lossy; for people. To assemble text, read as `String` instead (KE-116).
impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.data))
    }
}

/// One complete leaf of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The type of `data`.
    pub mime: Mime,
    /// The role, or `""`.
    pub role: Name,
    /// The file's name, or `""`.
    pub name: Name,
    /// The bytes.
    pub data: Bytes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ke_116_an_unserialisable_value_is_an_error() {
        let odd: std::collections::BTreeMap<(u8, u8), u8> = [((1, 2), 3)].into();
        assert!(matches!(Chunk::json(&odd), Err(Error::Decode { .. })));
        assert_eq!(
            Chunk::json(&[1, 2]).map(|c| c.to_string()).ok(),
            Some("[1,2]".into())
        );
        assert_eq!(Chunk::bytes(&b"a\xff"[..]).to_string(), "a\u{fffd}");
    }

    #[test]
    fn ke_117_a_chunk_is_small_and_a_clone_shares() {
        assert!(size_of::<Chunk>() <= 128);
        let chunk = Chunk::text(String::from("shared")).with_inner(7_u8);
        let clone = chunk.clone();
        assert_eq!(chunk.data.as_ptr(), clone.data.as_ptr());
        assert_eq!(clone.inner::<u8>(), Some(&7));
        assert_eq!(clone.inner::<u16>(), None);
    }

    /// KE-R9
    #[test]
    fn ke_r9_every_chunk_has_a_string_form() {
        assert_eq!(Chunk::text("Hi").to_string(), "Hi");
        assert_eq!(Chunk::empty().to_string(), "");
    }

    #[test]
    fn ke_r8_a_chunk_has_a_choice_index_and_starts_at_zero() {
        assert_eq!(Chunk::text("x").choice, 0);
        assert_eq!(Chunk::text("x").with_choice(3).choice, 3);
    }
}
