//! Decodes chunks as JSON values, split where values end (KE-203).
//!
//! ```text
//!   between values ── first byte ──► in a value ── it closes (or, for a bare word, white space) ──► item
//! ```

use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{FromChunks, Out};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::limits;
use crate::name::Mime;
use crate::want::Want;

/// A JSON value as a Rust value. When read, each item is one complete value; when written, it is one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Json<T>(pub T);

/// State of the splitter for the value being read.
#[derive(Debug, Default)]
pub struct Splitter {
    value: Vec<u8>,
    kind: JsonKind,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Number of completed values.
    index: usize,
    /// Number of bytes read.
    offset: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum JsonKind {
    #[default]
    Between,
    /// A number or a literal: only white space or the end of the stream shows that it is complete.
    Word,
    String,
    Nested,
}

impl Splitter {
    /// Consumes one byte. `true` if it completes the value.
    fn take(&mut self, byte: u8) -> Result<bool> {
        self.offset += 1;
        let space = matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        match self.kind {
            JsonKind::Between if space => return Ok(false),
            JsonKind::Between => {
                self.kind = match byte {
                    b'"' => JsonKind::String,
                    b'{' | b'[' => JsonKind::Nested,
                    _ => JsonKind::Word,
                };
            }
            // The space is not part of the value, and `1 2` are two values.
            JsonKind::Word if space => return Ok(true),
            JsonKind::Word | JsonKind::String | JsonKind::Nested => {}
        }
        // Checked for each byte: a value without an end must not grow with the stream.
        if self.value.len() == limits::JSON_VALUE_BYTES {
            return Err(self.wrong(format!("json_value_bytes is {}", limits::JSON_VALUE_BYTES)));
        }
        self.value.push(byte);
        if self.in_string {
            self.in_string = self.escaped || byte != b'"';
            self.escaped = byte == b'\\' && !self.escaped;
            // A string within an object does not end the value.
            return Ok(!self.in_string && self.depth == 0);
        }
        match byte {
            b'"' if self.kind != JsonKind::Word => self.in_string = true,
            b'{' | b'[' => {
                self.depth += 1;
                if self.depth > limits::JSON_DEPTH {
                    return Err(self.wrong(format!("json_depth is {}", limits::JSON_DEPTH)));
                }
            }
            b'}' | b']' => {
                // A bracket too many is left to the parser, whose message says where it is.
                self.depth = self.depth.saturating_sub(1);
                return Ok(self.depth == 0 && self.kind == JsonKind::Nested);
            }
            _ => {}
        }
        Ok(false)
    }

    /// Decodes the complete value as `T`.
    fn parse<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut reader = serde_json::Deserializer::from_slice(&self.value);
        // The splitter has already bounded the depth, at our own limit.
        reader.disable_recursion_limit();
        let parsed = T::deserialize(&mut reader).and_then(|value| reader.end().map(|()| value));
        let value = parsed.map_err(|error| self.wrong(error.to_string()))?;
        // Cleared and not replaced: the buffer serves the next value.
        self.value.clear();
        self.kind = JsonKind::Between;
        self.depth = 0;
        self.index += 1;
        Ok(value)
    }

    fn wrong(&self, why: String) -> Error {
        Error::Decode {
            wanted: "JSON".into(),
            why: format!("value {} before byte {}: {why}", self.index, self.offset),
        }
    }
}

impl<T> FromChunks for Json<T>
where
    T: DeserializeOwned + JsonSchema + Send + Unpin + 'static,
{
    type State = Splitter;
    type Acc = Vec<T>;
    type Whole = Vec<T>;

    fn want() -> Want {
        Want {
            schema: Some(Arc::new(schema_of::<T>())),
            ..Want::main([Mime::JSON, Mime::NDJSON, Mime::new("*+json")])
        }
    }

    fn push(splitter: &mut Splitter, chunk: Chunk, out: &mut Out<Self>) -> Result<()> {
        if chunk.choice != 0 {
            return Ok(());
        }
        for byte in chunk.data {
            if splitter.take(byte)? {
                out.push(Self(splitter.parse()?));
            }
        }
        Ok(())
    }

    fn end(splitter: &mut Splitter, out: &mut Out<Self>) -> Result<()> {
        match splitter.kind {
            JsonKind::Between => Ok(()),
            JsonKind::Word => {
                out.push(Self(splitter.parse()?));
                Ok(())
            }
            JsonKind::String | JsonKind::Nested => {
                Err(splitter.wrong("the value never ends".into()))
            }
        }
    }

    fn fold(acc: &mut Vec<T>, item: Self) -> Result<()> {
        acc.push(item.0);
        Ok(())
    }

    fn whole(acc: Vec<T>) -> Result<Vec<T>> {
        Ok(acc)
    }
}

/// The JSON Schema of `T`. It has `$defs` only if a type is recursive (KE-133).
pub(crate) fn schema_of<T: JsonSchema>() -> Value {
    let settings = schemars::generate::SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    settings
        .into_generator()
        .into_root_schema_for::<T>()
        .to_value()
}
