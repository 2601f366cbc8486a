//! [`JsonMachine`]: follows one JSON value character by character, and refuses the first character that cannot belong to it.
//!
//! It is strict, so that text that is no JSON is text again at once, and not at the end of the output.

use sapwood_engine::api::{MARK_CLOSE, MARK_OPEN};

/// Levels of nesting, those that `serde_json` reads.
const DEPTH_MAX: usize = 120;

/// The character is no part of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotJson;

/// Where in the outermost value a character stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonPlace {
    /// Its brackets, colons and commas, and the white space between them.
    Frame,
    /// A key of the outermost object.
    Key,
    /// The value of one of its members.
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lexeme {
    None,
    Text {
        key: bool,
        escape: Escape,
    },
    /// What is left of `true`, `false` or `null`.
    Word(&'static str),
    Number(NumberPart),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    None,
    Begun,
    /// Hexadecimal digits that are left.
    Unicode(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberPart {
    Sign,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

/// The state of one value, which is an object or an array.
#[derive(Debug)]
pub(super) struct JsonMachine {
    /// The open containers: whether each is an object.
    open: Vec<bool>,
    expected: Expected,
    lexeme: Lexeme,
}

impl Default for JsonMachine {
    fn default() -> Self {
        Self {
            open: Vec::new(),
            expected: Expected::Value,
            lexeme: Lexeme::None,
        }
    }
}

impl JsonMachine {
    /// Whether the value is complete.
    pub(super) fn is_complete(&self) -> bool {
        self.expected == Expected::Nothing
    }

    /// Whether only the last bracket is missing.
    pub(super) fn may_end(&self) -> bool {
        self.open.len() == 1 && self.expected == Expected::CommaOrEnd && self.lexeme == Lexeme::None
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char) -> Result<JsonPlace, NotJson> {
        let lexeme = self.lexeme;
        match lexeme {
            Lexeme::Text { key, escape } => {
                self.text(c, key, escape)?;
                return Ok(self.place(key));
            }
            Lexeme::Word(rest) => {
                let rest = rest.strip_prefix(c).ok_or(NotJson)?;
                self.lexeme = Lexeme::Word(rest);
                if rest.is_empty() {
                    self.value_ends();
                }
                return Ok(self.place(false));
            }
            Lexeme::Number(part) => {
                if let Some(next) = part.followed_by(c) {
                    self.lexeme = Lexeme::Number(next);
                    return Ok(self.place(false));
                }
                // Nothing in a number says that it is its last character, so the next one does.
                if !part.may_end() {
                    return Err(NotJson);
                }
                self.value_ends();
            }
            Lexeme::None => {}
        }
        self.structure(c)
    }

    /// The place of a character within a lexeme.
    fn place(&self, key: bool) -> JsonPlace {
        if key && self.open.len() == 1 {
            JsonPlace::Key
        } else {
            JsonPlace::Value
        }
    }

    fn text(&mut self, c: char, key: bool, escape: Escape) -> Result<(), NotJson> {
        let escape = match (escape, c) {
            (Escape::None, '"') => {
                if key {
                    self.lexeme = Lexeme::None;
                    self.expected = Expected::Colon;
                } else {
                    self.value_ends();
                }
                return Ok(());
            }
            (Escape::None, '\\') => Escape::Begun,
            // The name of a control token is no part of a text.
            (Escape::None, MARK_OPEN | MARK_CLOSE) => return Err(NotJson),
            (Escape::None, c) if c >= ' ' => Escape::None,
            (Escape::Begun, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::None,
            (Escape::Begun, 'u') => Escape::Unicode(4),
            (Escape::Unicode(left), c) if c.is_ascii_hexdigit() => match left {
                1 => Escape::None,
                _ => Escape::Unicode(left - 1),
            },
            _ => return Err(NotJson),
        };
        self.lexeme = Lexeme::Text { key, escape };
        Ok(())
    }

    fn structure(&mut self, c: char) -> Result<JsonPlace, NotJson> {
        use Expected::{Colon, CommaOrEnd, Key, KeyOrEnd, Nothing, Value, ValueOrEnd};
        let outermost = self.open.len() <= 1;
        let here = |place| if outermost { place } else { JsonPlace::Value };
        match (self.expected, c) {
            (Nothing, _) => Err(NotJson),
            (_, ' ' | '\n' | '\r' | '\t') => Ok(here(JsonPlace::Frame)),
            (Key | KeyOrEnd, '"') => {
                self.lexeme = Lexeme::Text {
                    key: true,
                    escape: Escape::None,
                };
                Ok(here(JsonPlace::Key))
            }
            (Colon, ':') => {
                self.expected = Value;
                Ok(here(JsonPlace::Frame))
            }
            (CommaOrEnd, ',') => {
                let in_object = self.open.last() == Some(&true);
                self.expected = if in_object { Key } else { Value };
                Ok(here(JsonPlace::Frame))
            }
            (CommaOrEnd | KeyOrEnd | ValueOrEnd, '}' | ']') => {
                if self.open.pop() != Some(c == '}') {
                    return Err(NotJson);
                }
                self.value_ends();
                Ok(here(JsonPlace::Frame))
            }
            (Value | ValueOrEnd, _) => self.value_begins(c),
            _ => Err(NotJson),
        }
    }

    fn value_begins(&mut self, c: char) -> Result<JsonPlace, NotJson> {
        let place = if self.open.is_empty() {
            JsonPlace::Frame
        } else {
            JsonPlace::Value
        };
        self.lexeme = match c {
            '{' | '[' if self.open.len() < DEPTH_MAX => {
                self.open.push(c == '{');
                self.expected = match c {
                    '{' => Expected::KeyOrEnd,
                    _ => Expected::ValueOrEnd,
                };
                return Ok(place);
            }
            // The outermost value is an object or an array.
            _ if self.open.is_empty() => return Err(NotJson),
            '"' => Lexeme::Text {
                key: false,
                escape: Escape::None,
            },
            't' => Lexeme::Word("rue"),
            'f' => Lexeme::Word("alse"),
            'n' => Lexeme::Word("ull"),
            '-' => Lexeme::Number(NumberPart::Sign),
            '0' => Lexeme::Number(NumberPart::Zero),
            '1'..='9' => Lexeme::Number(NumberPart::Whole),
            _ => return Err(NotJson),
        };
        Ok(place)
    }

    fn value_ends(&mut self) {
        self.lexeme = Lexeme::None;
        self.expected = if self.open.is_empty() {
            Expected::Nothing
        } else {
            Expected::CommaOrEnd
        };
    }
}

impl NumberPart {
    fn followed_by(self, c: char) -> Option<Self> {
        match (self, c) {
            (Self::Sign, '0') => Some(Self::Zero),
            (Self::Sign, '1'..='9') | (Self::Whole, '0'..='9') => Some(Self::Whole),
            (Self::Zero | Self::Whole, '.') => Some(Self::Point),
            (Self::Point | Self::Fraction, '0'..='9') => Some(Self::Fraction),
            (Self::Zero | Self::Whole | Self::Fraction, 'e' | 'E') => Some(Self::Exponent),
            (Self::Exponent, '+' | '-') => Some(Self::ExponentSign),
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => {
                Some(Self::ExponentDigits)
            }
            _ => None,
        }
    }

    const fn may_end(self) -> bool {
        matches!(
            self,
            Self::Zero | Self::Whole | Self::Fraction | Self::ExponentDigits
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// The number of characters of the value at the start of a text; `None` if there is no complete one.
    fn length(text: &str) -> Option<usize> {
        let mut machine = JsonMachine::default();
        for (at, c) in text.chars().enumerate() {
            machine.push(c).ok()?;
            if machine.is_complete() {
                return Some(at + 1);
            }
        }
        None
    }

    fn places(text: &str) -> String {
        let mut machine = JsonMachine::default();
        text.chars()
            .map(|c| match machine.push(c).unwrap() {
                JsonPlace::Frame => '.',
                JsonPlace::Key => 'k',
                JsonPlace::Value => 'v',
            })
            .collect()
    }

    #[test]
    fn members_of_the_outermost_object_are_told_apart() {
        let text = r#"{ "a" : {"b": [1]}, "c":-1.5e3 }"#;
        let seen = "..kkk...vvvvvvvvvv..kkk.vvvvvv..";
        assert_eq!(places(text), seen, "{text}");
    }

    #[test]
    fn the_first_character_that_is_no_json_is_refused() {
        for good in [
            "{}",
            "[]",
            r#"{"a":"\u00e9\"}"}"#,
            "[1,2.5e-1,true,null,[{}]]",
        ] {
            assert_eq!(length(good), Some(good.chars().count()), "{good}");
            assert_eq!(length(&format!("{good}]")), Some(good.chars().count()));
        }
        for bad in [
            "1",
            "\"a\"",
            "{a",
            "{'a'",
            "[1,]",
            r#"{"a":}"#,
            r#"{"a" 1"#,
            "[01",
            "[1.]",
            "[-]",
            "[trye",
            "{]",
            r#"["\x"#,
            "[\"\n\"",
            r#"["\u12g"#,
            r#"{"a":1,}"#,
        ] {
            assert_eq!(length(bad), None, "{bad}");
        }
        let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        assert!(length(&deep(DEPTH_MAX)).is_some());
        assert!(length(&deep(DEPTH_MAX + 1)).is_none());
    }

    proptest! {
        /// As `serde_json` reads it, but for what a grammar cannot say: lone surrogates and huge numbers.
        #[test]
        fn a_value_is_complete_where_serde_says_so(text in r#"[\[{]([\[\]{}:, ]|"a|"|\\n|\\u0041|1|-|\.5|e2|true|null){0,12}"#) {
            let read = serde_json::Deserializer::from_str(&text).into_iter::<Value>().next();
            let complete = matches!(read, Some(Ok(_)));
            prop_assert_eq!(length(&text).is_some(), complete, "{}", text);
        }
    }
}
