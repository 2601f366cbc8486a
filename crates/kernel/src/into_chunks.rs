//! Encodes the results of plain Rust code as chunks.
//!
//! One plain value is exactly one chunk of choice 0; a stream of values is one chunk each, lazily.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::stream::{empty, iter, once};
use futures::{Stream, StreamExt};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::chunk::{Chunk, Part, Text};
use crate::error::Error;
use crate::from_chunks::{Json, schema_of};
use crate::meta::Meta;
use crate::name::Mime;
use crate::node::finite;
use crate::{Chunks, Result};

/// Types that a function may return.
pub trait IntoChunks: Send + 'static {
    /// The mimetypes that it may produce, preferred first.
    fn mimes() -> Vec<Mime>;

    /// The JSON Schema of its values, if they are JSON.
    fn schema() -> Option<Value>;

    /// Whether it may produce several parts.
    #[must_use]
    fn many() -> bool {
        false
    }

    /// The chunks.
    fn into_chunks(self) -> Chunks;
}

/// Types that the items of a stream may have.
pub trait IntoChunk: Send + 'static {
    /// The mimetypes it may have.
    fn mimes() -> Vec<Mime>;

    /// The JSON Schema of the value, if it is JSON.
    fn schema() -> Option<Value>;

    /// The chunk; `None` if there is nothing to send.
    ///
    /// # Errors
    /// `Decode` if the value cannot be encoded; the value's own error if it is one.
    fn into_chunk(self) -> Result<Option<Chunk>>;
}

/// A stream of values: one chunk per item, in order, each delivered before the next is polled (KE-212).
///
/// Items of text and bytes are pieces of one output; JSON values are NDJSON records; [`Part`]s are parts.
#[derive(Clone, Debug)]
pub struct StreamOf<S>(pub S);

/// Forwards the spec of one type to another: to the value within, or to the same value under the other trait.
macro_rules! promises_as {
    ($type:ty, $trait:ident) => {
        fn mimes() -> Vec<Mime> {
            <$type as $trait>::mimes()
        }
        fn schema() -> Option<Value> {
            <$type as $trait>::schema()
        }
    };
}

/// Both traits for a value that always gives one chunk.
macro_rules! plain {
    ([$($generics:tt)*] $type:ty, $mime:expr, $schema:expr, $value:ident => $chunk:expr) => {
        impl<$($generics)*> IntoChunk for $type {
            fn mimes() -> Vec<Mime> {
                vec![$mime]
            }
            fn schema() -> Option<Value> {
                $schema
            }
            fn into_chunk(self) -> Result<Option<Chunk>> {
                let $value = self;
                $chunk.map(Some)
            }
        }
        impl<$($generics)*> IntoChunks for $type {
            promises_as!(Self, IntoChunk);
            fn into_chunks(self) -> Chunks {
                one(self.into_chunk())
            }
        }
    };
}

macro_rules! json {
    ($($type:ty),*) => {$(
        plain!([] $type, Mime::JSON, Some(schema_of::<$type>()), value => Chunk::json(&value));
    )*};
}

plain!([] String, Mime::TEXT, None, text => Ok(Chunk::text(text)));
plain!([] &'static str, Mime::TEXT, None, text => Ok(Chunk::text(text)));
plain!([] Text, Mime::TEXT, None, text => Ok(Chunk::text(text)));
plain!([] Bytes, Mime::BYTES, None, bytes => Ok(Chunk::bytes(bytes)));
plain!([] Vec<u8>, Mime::BYTES, None, bytes => Ok(Chunk::bytes(bytes)));
plain!([] Chunk, Mime::ANY, None, chunk => Ok::<_, Error>(chunk));
json!(
    bool, i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize
);
plain!([] f64, Mime::JSON, Some(schema_of::<f64>()), number => finite(number));
plain!([] f32, Mime::JSON, Some(schema_of::<f32>()), number => finite_f32(number));
plain!([] Value, Mime::JSON, Some(Value::Bool(true)), value => Chunk::json(&value));
plain!([] Part, Mime::ANY, None, part => Ok::<_, Error>(part_chunk(part)));
plain!(
    [T: Serialize + JsonSchema + Send + 'static] Json<T>,
    Mime::JSON, Some(schema_of::<T>()), value => Chunk::json(&value.0)
);

impl IntoChunks for Chunks {
    fn mimes() -> Vec<Mime> {
        vec![Mime::ANY]
    }

    fn schema() -> Option<Value> {
        None
    }

    fn many() -> bool {
        true
    }

    fn into_chunks(self) -> Chunks {
        self
    }
}

impl IntoChunks for () {
    fn mimes() -> Vec<Mime> {
        // A spec has a main output (KE-134), also if nothing ever comes on it.
        vec![Mime::TEXT]
    }

    fn schema() -> Option<Value> {
        None
    }

    fn into_chunks(self) -> Chunks {
        empty().boxed()
    }
}

impl<V: IntoChunks> IntoChunks for Option<V> {
    promises_as!(V, IntoChunks);

    fn many() -> bool {
        V::many()
    }

    fn into_chunks(self) -> Chunks {
        self.map_or_else(|| empty().boxed(), V::into_chunks)
    }
}

impl<V, E> IntoChunks for Result<V, E>
where
    V: IntoChunks,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    promises_as!(V, IntoChunks);

    fn many() -> bool {
        V::many()
    }

    fn into_chunks(self) -> Chunks {
        match self {
            Ok(value) => value.into_chunks(),
            Err(error) => one(Err(Error::function(error))),
        }
    }
}

impl<V: IntoChunk> IntoChunk for Option<V> {
    promises_as!(V, IntoChunk);

    fn into_chunk(self) -> Result<Option<Chunk>> {
        self.map_or(Ok(None), V::into_chunk)
    }
}

impl<V, E> IntoChunk for Result<V, E>
where
    V: IntoChunk,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    promises_as!(V, IntoChunk);

    fn into_chunk(self) -> Result<Option<Chunk>> {
        self.map_err(Error::function)?.into_chunk()
    }
}

impl<S> IntoChunks for StreamOf<S>
where
    S: Stream + Send + 'static,
    S::Item: IntoChunk,
{
    fn mimes() -> Vec<Mime> {
        let mimes = <S::Item as IntoChunk>::mimes();
        mimes
            .into_iter()
            .map(|mime| {
                if mime == Mime::JSON {
                    Mime::NDJSON
                } else {
                    mime
                }
            })
            .collect()
    }

    fn schema() -> Option<Value> {
        <S::Item as IntoChunk>::schema()
    }

    fn many() -> bool {
        // Only a type that may have any mimetype sets parts itself.
        <S::Item as IntoChunk>::mimes().contains(&Mime::ANY)
    }

    fn into_chunks(self) -> Chunks {
        ItemChunks {
            items: Some(Box::pin(self.0)),
            next_part: 0,
        }
        .boxed()
    }
}

/// The chunk stream of [`StreamOf`].
struct ItemChunks<S> {
    items: Option<Pin<Box<S>>>,
    next_part: u32,
}

impl<S> Stream for ItemChunks<S>
where
    S: Stream,
    S::Item: IntoChunk,
{
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Numbered here: a stream of parts is one output, and its items do not know their position (KE-113).
        let is_part = std::any::TypeId::of::<S::Item>() == std::any::TypeId::of::<Part>();
        loop {
            let Some(items) = self.items.as_mut() else {
                return Poll::Ready(None);
            };
            let Some(item) = ready!(items.as_mut().poll_next(cx)) else {
                self.items = None;
                return Poll::Ready(None);
            };
            match item.into_chunk() {
                Ok(None) => {}
                Ok(Some(mut chunk)) => {
                    if is_part {
                        chunk.part = self.next_part;
                        self.next_part += 1;
                    }
                    return Poll::Ready(Some(Ok(record(chunk))));
                }
                Err(error) => {
                    // Nothing follows an error, and the source is dropped with it (KE-311).
                    self.items = None;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}

/// A JSON value in a stream is a line of its own (KE-112).
fn record(mut chunk: Chunk) -> Chunk {
    if chunk.mime == Mime::JSON {
        let mut line = Vec::with_capacity(chunk.data.len() + 1);
        line.extend_from_slice(&chunk.data);
        line.push(b'\n');
        chunk.data = line.into();
        chunk.mime = Mime::NDJSON;
    }
    chunk
}

fn one(chunk: Result<Option<Chunk>>) -> Chunks {
    match chunk {
        Ok(Some(chunk)) => iter([Ok(chunk)]).boxed(),
        Ok(None) => empty().boxed(),
        Err(error) => once(std::future::ready(Err(error))).boxed(),
    }
}

fn finite_f32(number: f32) -> Result<Chunk> {
    // Converts through the shortest decimal text, so that 0.1 stays 0.1.
    if number.is_finite() {
        Chunk::json(&number)
    } else {
        finite(f64::from(number))
    }
}

fn part_chunk(part: Part) -> Chunk {
    let mut chunk = Chunk::bytes(part.data).with_mime(part.mime);
    if !part.role.is_empty() || !part.name.is_empty() {
        let mut meta = Meta::default();
        if !part.role.is_empty() {
            meta = meta.with_role(part.role);
        }
        if !part.name.is_empty() {
            meta = meta.with_extra("file_name", part.name.as_str());
        }
        chunk = chunk.with_meta(meta);
    }
    chunk
}

#[cfg(test)]
mod tests;
