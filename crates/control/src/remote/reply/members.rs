//! JSON of a runtime, in the two ways in which it may be read: member by member without keeping any, and as a tree of a
//! limited number of values.

use std::borrow::Cow;
use std::fmt;

use sapwood_proto::bounded_json::{self, JsonBounds, JsonUnread};
use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// Passes each member of a JSON object to `take`, in order; of equal names the last one is the valid one. The values are
/// pieces of `text`, and valid JSON.
///
/// # Errors
/// `text` is no JSON object.
pub(super) fn each_member<'m>(
    text: &'m [u8],
    take: impl FnMut(&str, &'m RawValue),
) -> Result<(), serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    reader.deserialize_map(EachMember(take))?;
    reader.end()
}

struct EachMember<F>(F);

impl<'m, F: FnMut(&str, &'m RawValue)> Visitor<'m> for EachMember<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'m>>(mut self, mut members: A) -> Result<(), A::Error> {
        while let Some(name) = members.next_key::<Cow<'m, str>>()? {
            (self.0)(&name, members.next_value()?);
        }
        Ok(())
    }
}

/// Parses a value.
///
/// # Errors
/// It has more than `values` values, of which an object counts eight.
pub(super) fn tree(value: &RawValue, values: usize) -> Result<Value, JsonUnread> {
    let bounds = JsonBounds {
        values,
        entries: usize::MAX,
    };
    bounded_json::read(value.get().as_bytes(), bounds)
}
