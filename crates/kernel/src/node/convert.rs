//! Conversions into nodes (KE-129).
//!
//! Strings become text, bytes become bytes, everything else becomes JSON; a JSON string becomes text.

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use super::Node;
use crate::chunk::{Chunk, Text};
use crate::error::Error;
use crate::from_chunks::Json;

macro_rules! text {
    ($($type:ty),*) => {$(
        impl From<$type> for Node {
            fn from(text: $type) -> Self {
                Self::of(Ok(Chunk::text(text)))
            }
        }
    )*};
}

macro_rules! json {
    ($($type:ty),*) => {$(
        impl From<$type> for Node {
            fn from(value: $type) -> Self {
                Self::of(Chunk::json(&value))
            }
        }
    )*};
}

text!(String, Text);
json!(
    bool, i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize
);

impl From<&str> for Node {
    fn from(text: &str) -> Self {
        Self::of(Ok(Chunk::text(text)))
    }
}

impl From<Bytes> for Node {
    fn from(bytes: Bytes) -> Self {
        Self::of(Ok(Chunk::bytes(bytes)))
    }
}

impl From<Chunk> for Node {
    fn from(chunk: Chunk) -> Self {
        Self::of(Ok(chunk))
    }
}

/// A number that JSON cannot represent is an error when the node is read.
impl From<f64> for Node {
    fn from(number: f64) -> Self {
        Self::of(finite(number))
    }
}

impl From<Value> for Node {
    fn from(value: Value) -> Self {
        match value {
            Value::String(text) => text.into(),
            other => Self::of(Chunk::json(&other)),
        }
    }
}

impl<T: Serialize> From<Json<T>> for Node {
    fn from(value: Json<T>) -> Self {
        Self::of(Chunk::json(&value.0))
    }
}

impl From<&Self> for Node {
    fn from(node: &Self) -> Self {
        node.clone()
    }
}

/// A number as JSON; `NaN` and the infinities have no JSON form.
pub(crate) fn finite(number: f64) -> crate::Result<Chunk> {
    if number.is_finite() {
        Chunk::json(&number)
    } else {
        Err(Error::Decode {
            wanted: "JSON".into(),
            why: "JSON cannot represent a number that is not finite".into(),
        })
    }
}
