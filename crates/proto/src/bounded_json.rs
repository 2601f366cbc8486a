//! Parses untrusted JSON into a tree, with limits that are enforced while it is parsed.
//!
//! A tree takes far more memory than its text: an array of `0,` takes 36 times its bytes, one of `{"a":0},` about 70
//! times. So the values are counted before they are allocated, not measured afterwards.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Limits of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonBounds {
    /// Total number of values: each array, string, number, boolean and null counts one, and an object counts eight,
    /// because it takes that much memory. A value takes 72 bytes, without its text.
    pub values: usize,
    /// Elements or members of the outermost array or object.
    pub entries: usize,
}

/// Why a text was not parsed.
#[derive(Debug, thiserror::Error)]
pub enum JsonUnread {
    /// It is not valid JSON.
    #[error("not JSON: {0}")]
    Syntax(serde_json::Error),
    /// It exceeds [`JsonBounds::values`].
    #[error("more than {0} JSON values")]
    Values(usize),
    /// It exceeds [`JsonBounds::entries`].
    #[error("more than {0} entries")]
    Entries(usize),
}

/// Parses a text.
///
/// # Errors
/// [`JsonUnread`]; parsing stops at the first value beyond a bound.
pub fn read(text: &[u8], bounds: JsonBounds) -> Result<Value, JsonUnread> {
    let state = ScanState {
        values: Cell::new(0),
        exceeded: Cell::new(None),
        bounds,
    };
    let tree = Tree {
        state: &state,
        entries: bounds.entries,
    };
    // The library's limit of 128 levels holds here too, because its reader makes every recursive call.
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = tree.deserialize(&mut reader);
    let value = value.and_then(|value| reader.end().map(|()| value));
    // The state first: to the parser, being stopped is an error like any other.
    value.map_err(|error| match state.exceeded.get() {
        Some(Exceeded::Values) => JsonUnread::Values(bounds.values),
        Some(Exceeded::Entries) => JsonUnread::Entries(bounds.entries),
        None => JsonUnread::Syntax(error),
    })
}

#[derive(Clone, Copy)]
enum Exceeded {
    Values,
    Entries,
}

/// State of parsing one text.
struct ScanState {
    values: Cell<usize>,
    /// Why parsing was stopped: the parser's error type can only carry text.
    exceeded: Cell<Option<Exceeded>>,
    bounds: JsonBounds,
}

impl ScanState {
    /// Counts `more` values.
    fn count<E: serde::de::Error>(&self, more: usize) -> Result<(), E> {
        let values = self.values.get() + more;
        self.values.set(values);
        if values > self.bounds.values {
            return Err(self.stop(Exceeded::Values));
        }
        Ok(())
    }

    fn stop<E: serde::de::Error>(&self, exceeded: Exceeded) -> E {
        self.exceeded.set(Some(exceeded));
        E::custom("too much")
    }
}

/// Parses one value.
#[derive(Clone, Copy)]
struct Tree<'a> {
    state: &'a ScanState,
    /// Maximum number of its entries.
    entries: usize,
}

impl Tree<'_> {
    const fn within(self) -> Self {
        Self {
            entries: usize::MAX,
            ..self
        }
    }

    fn entry<E: serde::de::Error>(self, before: usize) -> Result<(), E> {
        if before >= self.entries {
            return Err(self.state.stop(Exceeded::Entries));
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        self.state.count(1)?;
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Value, E> {
        let number = Number::from_f64(number);
        number
            .map(Value::Number)
            .ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element_seed(self.within())? {
            // Only reading an element shows that there is one, so one beyond the limit is parsed before it is refused.
            self.entry(list.len())?;
            list.push(element);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        // `deserialize` has counted the first one.
        self.state.count(OBJECT_VALUES - 1)?;
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            self.entry::<A::Error>(object.len())?;
            // Of equal names the last one stays, as in the library; each of their values counts.
            object.insert(name, members.next_value_seed(self.within())?);
        }
        Ok(Value::Object(object))
    }
}

/// What an object counts as.
const OBJECT_VALUES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: JsonBounds = JsonBounds {
        values: usize::MAX,
        entries: usize::MAX,
    };

    #[test]
    fn it_accepts_and_returns_the_same_as_serde_json() {
        for text in [
            "null",
            "true",
            "-1",
            "18446744073709551615",
            "0.5",
            "1e400",
            r#""a\n\u00e9""#,
            "[]",
            "{}",
            r#"[1, {"b": [null], "a": {}}, "x"]"#,
            r#"{"a": 1, "a": 2}"#,
            "[1",
            "[1] 2",
            "",
            r#""\ud800""#,
        ] {
            let theirs = serde_json::from_str::<Value>(text);
            let ours = read(text.as_bytes(), ANY);
            assert_eq!(ours.is_ok(), theirs.is_ok(), "{text}");
            if let (Ok(ours), Ok(theirs)) = (ours, theirs) {
                assert_eq!(ours, theirs, "{text}");
            }
        }
        let deep = "[".repeat(200) + &"]".repeat(200);
        assert!(matches!(
            read(deep.as_bytes(), ANY),
            Err(JsonUnread::Syntax(_))
        ));
    }

    #[test]
    fn d_47_values_and_entries_are_limited_while_they_are_parsed() {
        let check = |text: &str, values, entries, expect: Option<&str>| {
            let bounds = JsonBounds { values, entries };
            let error = read(text.as_bytes(), bounds).err();
            assert_eq!(error.map(|error| error.to_string()).as_deref(), expect);
        };
        let list = r#"[0, [0, 0], {"a": 0}]"#;
        check(list, 14, 3, None);
        check(list, 13, 3, Some("more than 13 JSON values"));
        check(list, 14, 2, Some("more than 2 entries"));
        check(r#"{"a": 0, "b": 0}"#, 10, 2, None);
        check(r#"{"a": 0, "b": 0}"#, 10, 1, Some("more than 1 entries"));
        // Parsing stops at the bound: the rest is not parsed.
        check("[0, 0, nonsense", 2, 9, Some("more than 2 JSON values"));
    }
}
