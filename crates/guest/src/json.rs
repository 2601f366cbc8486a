//! A small reader of JSON, for controller arguments and for the ABI, and what is needed to write it.
//!
//! Numbers stay text until they are asked for, so that a module that reads no fractions has no code for them.

mod reader;

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

pub(crate) use reader::Reader;

/// Objects and lists that may be inside each other.
const DEPTH_MAX: usize = 64;

/// A JSON value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number, as it is written.
    Number(String),
    /// A string.
    String(String),
    /// A list.
    Array(Vec<Self>),
    /// An object, with its members in the order in which they are written.
    Object(Vec<(String, Self)>),
}

impl Json {
    /// Reads a value; nothing may follow it.
    ///
    /// # Errors
    /// The text is not JSON, or deeper than 64 levels.
    pub fn parse(text: &str) -> Result<Self, JsonError> {
        let mut reader = Reader::new(text.as_bytes());
        let value = reader.value()?;
        reader.end()?;
        Ok(value)
    }

    /// A member of an object; the last one of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Self::Object(members) = self else {
            return None;
        };
        members
            .iter()
            .rev()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value)
    }

    /// The string, if it is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self {
            Some(text)
        } else {
            None
        }
    }

    /// The number, if it is a natural number.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        if let Self::Number(digits) = self {
            digits.parse().ok()
        } else {
            None
        }
    }

    /// The number, if it is one.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        if let Self::Number(digits) = self {
            digits.parse().ok()
        } else {
            None
        }
    }

    /// The truth value, if it is one.
    #[must_use]
    pub const fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self {
            Some(*value)
        } else {
            None
        }
    }

    /// The elements; none if it is no list.
    #[must_use]
    pub fn elements(&self) -> &[Self] {
        if let Self::Array(elements) = self {
            elements
        } else {
            &[]
        }
    }
}

/// The text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonError {
    /// The byte at which reading stopped.
    pub at: usize,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid JSON at byte {}", self.at)
    }
}

impl core::error::Error for JsonError {}

/// Appends a number. Formatting by `core` would be a tenth of a small module.
pub(crate) fn push_number(json: &mut String, mut number: u32) {
    let mut digits = [0; 10];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    for &digit in &digits[start..] {
        json.push(char::from(digit));
    }
}

/// Appends a list of numbers.
pub(crate) fn push_numbers(json: &mut String, numbers: &[u32]) {
    json.push('[');
    for (index, number) in numbers.iter().enumerate() {
        if index > 0 {
            json.push(',');
        }
        push_number(json, *number);
    }
    json.push(']');
}

/// Appends a string with its quotes.
pub(crate) fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => {
                json.push('\\');
                json.push(letter);
            }
            '\0'..='\x1f' => {
                json.push_str("\\u00");
                push_hex(json, &[letter as u8]);
            }
            _ => json.push(letter),
        }
    }
    json.push('"');
}

/// Appends bytes in hexadecimal digits.
pub(crate) fn push_hex(text: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
}

/// Reads hexadecimal digits.
#[cfg(any(target_arch = "wasm32", test))]
pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else {
        return None;
    };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    pairs
        .iter()
        .map(|&[high, low]| Some((digit(high)? << 4 | digit(low)?) as u8))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read() {
        let value = Json::parse(
            r#" {"a":[1,-2.5e1,true,null,"x\n\u00e9\ud83d\ude00"],"b":{},"a":{"n":7}} "#,
        )
        .unwrap();
        assert_eq!(value.get("a").unwrap().get("n").unwrap().as_u64(), Some(7));
        let Json::Object(members) = &value else {
            panic!("{value:?}")
        };
        let list = members[0].1.elements();
        assert_eq!(list[1].as_f64(), Some(-25.0));
        assert_eq!(list[1].as_u64(), None);
        assert_eq!(list[2].as_bool(), Some(true));
        assert_eq!(list[4].as_str(), Some("x\n\u{e9}\u{1f600}"));
    }

    #[test]
    fn bad_texts_are_errors() {
        for (text, at) in [
            ("", 0),
            ("{", 1),
            ("[1,]", 3),
            ("\"a", 2),
            ("1 2", 2),
            ("{\"a\" 1}", 5),
            ("tru", 0),
            ("\"\\x\"", 2),
        ] {
            assert_eq!(Json::parse(text), Err(JsonError { at }), "{text}");
        }
        for text in [
            "\"\\ud800\"",
            "\"\\ud800\\u0041\"",
            "\"\\u12\"",
            "-",
            "01x",
            "\"\u{1}\"",
        ] {
            assert!(Json::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_skipped_is_checked() {
        let skipped = |text: &str| {
            let mut reader = Reader::new(text.as_bytes());
            reader.skip().and_then(|()| reader.end())
        };
        for text in [
            "null",
            "true",
            "false",
            "-1.5",
            r#"{"a":[1,{"b":"c"}],"d":null}"#,
        ] {
            assert_eq!(skipped(text), Ok(()), "{text}");
        }
        for text in ["nul", "[1,]", "{\"a\"}", "\"a", "1 2"] {
            assert!(skipped(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_are_written_in_digits() {
        let mut json = String::new();
        push_numbers(&mut json, &[0, 7, 10, u32::MAX]);
        assert_eq!(json, "[0,7,10,4294967295]");
        json.clear();
        push_numbers(&mut json, &[]);
        assert_eq!(json, "[]");
    }

    #[test]
    fn depth_has_a_limit() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(Json::parse(&nested(DEPTH_MAX)).is_ok());
        assert!(Json::parse(&nested(DEPTH_MAX + 1)).is_err());
    }

    #[test]
    fn strings_are_written_as_they_are_read() {
        let text = "a\"\\\n\u{1f}é";
        let mut json = String::new();
        push_string(&mut json, text);
        assert_eq!(json, r#""a\"\\\u000a\u001fé""#);
        assert_eq!(Json::parse(&json).unwrap().as_str(), Some(text));
    }

    #[test]
    fn hexadecimal_digits_go_both_ways() {
        let mut text = String::new();
        push_hex(&mut text, &[0, 0x9a, 0xff]);
        assert_eq!(text, "009aff");
        assert_eq!(from_hex(&text), Some(vec![0, 0x9a, 0xff]));
        assert_eq!(from_hex("abc"), None);
        assert_eq!(from_hex("0g"), None);
    }
}
