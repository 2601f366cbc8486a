//! A JSON body as its members in order, including repeated ones, each with its text (TR-301 to TR-303).
//!
//! A value stays text until a caller reads it as a type, so that a large body needs no tree.

use std::borrow::Cow;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::limits::RequestLimits;
use super::refused::InvalidRequest;

/// A member's name and the text of its value.
pub(super) type NamedMember<'a> = (String, &'a str);

/// Validates a body and returns its members.
///
/// # Errors
/// `Syntax`, `Depth`, `NoObject` and `Members`.
pub(super) fn read<'a>(
    body: &'a [u8],
    limits: &RequestLimits,
) -> Result<Vec<NamedMember<'a>>, InvalidRequest> {
    let text = std::str::from_utf8(body).map_err(|error| InvalidRequest::Syntax {
        reason: "Invalid encoding in string.",
        offset: error.valid_up_to(),
    })?;
    // Validates the whole body without building anything, so that an error of syntax is reported before all others
    // (TR-203). The library skips values without recursion, which is why the depth can be checked afterwards.
    let whole: &RawValue =
        serde_json::from_str(text).map_err(|error| syntax(text, text.len(), &error))?;
    if too_deep(text, limits.json_depth) {
        return Err(InvalidRequest::Depth(limits.json_depth));
    }
    if !whole.get().starts_with('{') {
        return Err(InvalidRequest::NoObject);
    }
    members(whole.get(), limits)
}

/// Returns the members of an object that was validated before.
///
/// # Errors
/// `Members`; `Syntax` for a name that is not valid text.
pub(super) fn members<'a>(
    object: &'a str,
    limits: &RequestLimits,
) -> Result<Vec<NamedMember<'a>>, InvalidRequest> {
    let members = LimitedMembers {
        max: limits.json_members,
        too_many: false,
    };
    let mut reader = serde_json::Deserializer::from_str(object);
    let (list, too_many) = reader
        .deserialize_map(members)
        .map_err(|error| syntax(object, object.len(), &error))?;
    if too_many {
        return Err(InvalidRequest::Members(limits.json_members));
    }
    Ok(list)
}

/// Calls `each` with the names of the members of an object that are not null, at most `most` of them. The text is a
/// client's own: up to where it is no JSON, and nothing of what is no object.
pub(super) fn names(object: &[u8], most: usize, each: &mut dyn FnMut(&str)) {
    let names = MemberNames { most, each };
    // An error of syntax is found again, and reported, by the one who reads the values.
    let _ = (&mut serde_json::Deserializer::from_slice(object)).deserialize_any(names);
}

/// Decodes a string; borrowed from the JSON if it has no escapes.
///
/// # Errors
/// `Syntax` for an unpaired surrogate, which is not valid text.
pub(super) fn string(text: &str) -> Result<Cow<'_, str>, InvalidRequest> {
    #[derive(serde::Deserialize)]
    // `Cow` alone is always deserialized as owned; only a borrowed field keeps the text of the body.
    struct BorrowedText<'a>(#[serde(borrow)] Cow<'a, str>);
    let read = serde_json::from_str(text).map(|BorrowedText(text)| text);
    read.map_err(|error| syntax(text, text.len(), &error))
}

/// Reads the sizes of a shape, at most `max` of them.
///
/// # Errors
/// `Rank`; the result is `None` for a value that is not an array of integers.
pub(super) fn shape(text: &str, max: usize) -> Result<Option<Vec<i64>>, InvalidRequest> {
    if !text.starts_with('[') {
        return Ok(None);
    }
    let (mut sizes, mut sound) = (Vec::new(), true);
    elements(text, &mut |size| {
        if sizes.len() == max {
            return Err(InvalidRequest::Rank(max));
        }
        match size.parse() {
            Ok(size) => sizes.push(size),
            Err(_) => sound = false,
        }
        Ok(())
    })?;
    Ok(sound.then_some(sizes))
}

/// The text of a value without white space between its tokens; the value was validated before.
pub(super) fn compact(text: &str) -> String {
    let (mut in_string, mut escaped) = (false, false);
    let keep = |part: &char| {
        let retained = in_string || !matches!(part, ' ' | '\t' | '\n' | '\r');
        match part {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ => {}
        }
        retained
    };
    text.chars().filter(keep).collect()
}

/// The texts of the scalars in a value that was validated before, however its lists are nested. In one pass: an element
/// that is a list would have to be parsed again to be read (D-47). An object ends at its first comma or bracket, which is
/// enough to refuse it: no datatype is one.
pub(super) struct Scalars<'a> {
    rest: &'a str,
    depth: usize,
    /// Number of elements of the outermost list so far; 1 for a value that is no list.
    pub(super) outer: usize,
}

impl<'a> Scalars<'a> {
    pub(super) const fn new(value: &'a str) -> Self {
        Self {
            rest: value,
            depth: 0,
            outer: 0,
        }
    }
}

impl<'a> Iterator for Scalars<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        loop {
            self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r', ',']);
            let first = *self.rest.as_bytes().first()?;
            let (token, rest) = self.rest.split_at(token_len(self.rest));
            self.rest = rest;
            if first == b']' {
                self.depth = self.depth.saturating_sub(1);
                continue;
            }
            let list = first == b'[';
            self.outer += usize::from(self.depth == 1 || self.depth == 0 && !list);
            if !list {
                return Some(token);
            }
            self.depth += 1;
        }
    }
}

/// The length of the bracket, string or other scalar at the start of valid JSON.
fn token_len(text: &str) -> usize {
    let end = match text.as_bytes().first() {
        Some(b'[' | b']') => Some(1),
        Some(b'"') => {
            let mut escaped = false;
            let end = text.bytes().skip(1).position(|byte| {
                let end = byte == b'"' && !escaped;
                escaped = byte == b'\\' && !escaped;
                end
            });
            end.map(|quote| quote + 2)
        }
        _ => text.find([',', ']', ' ', '\t', '\n', '\r']),
    };
    end.unwrap_or(text.len())
}

/// Calls `each` with the text of every element of an array, until it fails.
///
/// # Errors
/// The error of `each`.
pub(super) fn elements(
    array: &str,
    each: &mut dyn FnMut(&str) -> Result<(), InvalidRequest>,
) -> Result<(), InvalidRequest> {
    let mut refused = None;
    let visiting = ArrayElements {
        each,
        refused: &mut refused,
    };
    let read = visiting.deserialize(&mut serde_json::Deserializer::from_str(array));
    // The parser's error type carries only text, so an error of `each` is passed out separately.
    match (refused, read) {
        (Some(refused), _) => Err(refused),
        (None, read) => read.map_err(|error| syntax(array, array.len(), &error)),
    }
}

/// An object's members, up to the limit.
struct LimitedMembers {
    max: usize,
    too_many: bool,
}

impl<'de> Visitor<'de> for LimitedMembers {
    type Value = (Vec<NamedMember<'de>>, bool);

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
            // Reads on to the end of the object: stopping here would be an error of syntax to the parser.
            if list.len() < self.max {
                list.push((name, value.get()));
            } else {
                self.too_many = true;
            }
        }
        Ok((list, self.too_many))
    }
}

struct MemberNames<'a> {
    most: usize,
    each: &'a mut dyn FnMut(&str),
}

impl<'de> Visitor<'de> for MemberNames<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        for _ in 0..self.most {
            let Some(name) = map.next_key::<String>()? else {
                break;
            };
            // The library skips a value without recursion.
            if map.next_value::<Option<IgnoredAny>>()?.is_some() {
                (self.each)(&name);
            }
        }
        Ok(())
    }
}

struct ArrayElements<'a> {
    each: &'a mut dyn FnMut(&str) -> Result<(), InvalidRequest>,
    refused: &'a mut Option<InvalidRequest>,
}

impl<'de> DeserializeSeed<'de> for ArrayElements<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ArrayElements<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(element) = seq.next_element::<&'de RawValue>()? {
            if self.refused.is_none()
                && let Err(refused) = (self.each)(element.get())
            {
                *self.refused = Some(refused);
            }
        }
        Ok(())
    }
}

/// Whether valid JSON is nested deeper than `max`. One pass, no recursion.
fn too_deep(text: &str, max: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                if depth > max {
                    return true;
                }
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

/// The parser's error, in RapidJSON's wording (TR-301) and with a byte offset.
fn syntax(text: &str, end: usize, error: &serde_json::Error) -> InvalidRequest {
    // The library does not expose its kinds of errors, only their texts. A text that is not listed, as after an update
    // of the library, becomes `Invalid value.`
    const WORDS: [(&str, &str); 14] = [
        (
            "EOF while parsing an object",
            "Missing a name for object member.",
        ),
        ("key must be a string", "Missing a name for object member."),
        (
            "EOF while parsing a list",
            "Missing a comma or ']' after an array element.",
        ),
        (
            "expected `,` or `]`",
            "Missing a comma or ']' after an array element.",
        ),
        (
            "expected `,` or `}`",
            "Missing a comma or '}' after an object member.",
        ),
        (
            "expected `:`",
            "Missing a colon after a name of object member.",
        ),
        (
            "EOF while parsing a string",
            "Missing a closing quotation mark in string.",
        ),
        (
            "trailing characters",
            "The document root must not be followed by other values.",
        ),
        (
            "number out of range",
            "Number too big to be stored in double.",
        ),
        (
            "lone leading surrogate",
            "The surrogate pair in string is invalid.",
        ),
        (
            "unexpected end of hex",
            "Incorrect hex digit after \\u escape in string.",
        ),
        ("invalid escape", "Invalid escape character in string."),
        ("control character", "Invalid encoding in string."),
        ("trailing comma", "Missing a name for object member."),
    ];
    if text.trim_ascii().is_empty() {
        return InvalidRequest::Syntax {
            reason: "The document is empty.",
            offset: end,
        };
    }
    let sent = error.to_string();
    let known = WORDS.iter().find(|(theirs, _)| sent.starts_with(theirs));
    let offset = if error.is_eof() {
        end
    } else {
        // The library counts lines and columns from 1, clients get one offset from 0.
        let before = error.line().saturating_sub(1);
        let line: usize = text.split_inclusive('\n').take(before).map(str::len).sum();
        (line + error.column().saturating_sub(1)).min(end)
    };
    InvalidRequest::Syntax {
        reason: known.map_or("Invalid value.", |(_, rapid)| rapid),
        offset,
    }
}
