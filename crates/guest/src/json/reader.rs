//! A pull parser: the caller says what it expects. It reads from bytes and stops at the first that does not fit.

use alloc::string::String;
use alloc::vec::Vec;

use super::{DEPTH_MAX, Json, JsonError};

/// Reads one JSON text.
pub(crate) struct Reader<'t> {
    text: &'t [u8],
    at: usize,
    depth: usize,
}

type Read<T> = Result<T, JsonError>;

impl<'t> Reader<'t> {
    pub(crate) const fn new(text: &'t [u8]) -> Self {
        Self {
            text,
            at: 0,
            depth: 0,
        }
    }

    /// Nothing but white space follows.
    pub(crate) fn end(&mut self) -> Read<()> {
        if self.peek().is_none() {
            Ok(())
        } else {
            self.fail()
        }
    }

    /// Reads an object: calls `member` with each name, which must read the value.
    ///
    /// A trait object, because a copy of the loop for each caller would make modules larger.
    pub(crate) fn members(
        &mut self,
        member: &mut dyn FnMut(&mut Self, &str) -> Read<()>,
    ) -> Read<()> {
        self.list(b'{', b'}', &mut |reader| {
            let name = reader.string()?;
            reader.expect(b':')?;
            member(reader, &name)
        })
    }

    /// Reads a list: calls `element` at each element, which must read it.
    pub(crate) fn elements(&mut self, element: &mut dyn FnMut(&mut Self) -> Read<()>) -> Read<()> {
        self.list(b'[', b']', element)
    }

    fn list(
        &mut self,
        open: u8,
        close: u8,
        element: &mut dyn FnMut(&mut Self) -> Read<()>,
    ) -> Read<()> {
        self.expect(open)?;
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return self.fail();
        }
        if self.peek() != Some(close) {
            loop {
                element(self)?;
                if self.peek() != Some(b',') {
                    break;
                }
                self.at += 1;
            }
        }
        self.depth -= 1;
        self.expect(close)
    }

    /// Reads a list of numbers.
    pub(crate) fn numbers(&mut self) -> Read<Vec<u32>> {
        let mut numbers = Vec::new();
        self.elements(&mut |reader| {
            numbers.push(reader.number()?);
            Ok(())
        })?;
        Ok(numbers)
    }

    /// Reads a natural number.
    pub(crate) fn number<N: TryFrom<u64>>(&mut self) -> Read<N> {
        let start = self.skip_space();
        let mut number = 0u64;
        while let Some(digit @ b'0'..=b'9') = self.text.get(self.at) {
            let next = number
                .checked_mul(10)
                .and_then(|number| number.checked_add(u64::from(digit - b'0')));
            let Some(next) = next else { return self.fail() };
            number = next;
            self.at += 1;
        }
        match N::try_from(number) {
            Ok(number) if self.at > start => Ok(number),
            _ => self.fail(),
        }
    }

    /// Reads `null`, if that is next; returns whether it was.
    pub(crate) fn null(&mut self) -> bool {
        self.word(b"null")
    }

    /// Reads a string.
    pub(crate) fn string(&mut self) -> Read<String> {
        self.expect(b'"')?;
        let mut bytes = Vec::new();
        loop {
            let Some(&byte) = self.text.get(self.at) else {
                return self.fail();
            };
            match byte {
                b'"' => break,
                b'\\' => {
                    self.at += 1;
                    let letter = self.escape()?;
                    bytes.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
                }
                0..0x20 => return self.fail(),
                _ => {
                    bytes.push(byte);
                    self.at += 1;
                }
            }
        }
        self.at += 1;
        String::from_utf8(bytes).or_else(|_| self.fail())
    }

    fn escape(&mut self) -> Read<char> {
        let Some(&byte) = self.text.get(self.at) else {
            return self.fail();
        };
        let letter = match byte {
            b'"' | b'\\' | b'/' => char::from(byte),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                self.at += 1;
                return self.escaped_code_point();
            }
            _ => return self.fail(),
        };
        self.at += 1;
        Ok(letter)
    }

    fn escaped_code_point(&mut self) -> Read<char> {
        let mut code = self.four_digits()?;
        // Code points beyond 16 bits are two escapes, of which the first is in this range.
        if (0xd800..0xdc00).contains(&code) {
            if self.text.get(self.at..self.at + 2) != Some(b"\\u") {
                return self.fail();
            }
            self.at += 2;
            let low = self.four_digits()?;
            if !(0xdc00..0xe000).contains(&low) {
                return self.fail();
            }
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        char::from_u32(code).map_or_else(|| self.fail(), Ok)
    }

    fn four_digits(&mut self) -> Read<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self
                .text
                .get(self.at)
                .and_then(|&byte| char::from(byte).to_digit(16));
            let Some(digit) = digit else {
                return self.fail();
            };
            code = code << 4 | digit;
            self.at += 1;
        }
        Ok(code)
    }

    /// Reads any value.
    pub(crate) fn value(&mut self) -> Read<Json> {
        match self.peek() {
            Some(b'{') => {
                let mut members = Vec::new();
                self.members(&mut |reader, name| {
                    members.push((name.into(), reader.value()?));
                    Ok(())
                })?;
                Ok(Json::Object(members))
            }
            Some(b'[') => {
                let mut elements = Vec::new();
                self.elements(&mut |reader| {
                    elements.push(reader.value()?);
                    Ok(())
                })?;
                Ok(Json::Array(elements))
            }
            Some(b'"') => self.string().map(Json::String),
            Some(b'-' | b'0'..=b'9') => self.digits().map(|digits| Json::Number(digits.into())),
            _ if self.null() => Ok(Json::Null),
            _ if self.word(b"true") => Ok(Json::Bool(true)),
            _ if self.word(b"false") => Ok(Json::Bool(false)),
            _ => self.fail(),
        }
    }

    /// Reads any value and drops it. Not by way of [`Json`]: a module that never has one needs no code for it.
    pub(crate) fn skip(&mut self) -> Read<()> {
        match self.peek() {
            Some(b'{') => self.members(&mut |reader, _| reader.skip()),
            Some(b'[') => self.elements(&mut Self::skip),
            Some(b'"') => self.string().map(drop),
            Some(b'-' | b'0'..=b'9') => self.digits().map(drop),
            _ if [&b"null"[..], b"true", b"false"]
                .iter()
                .any(|word| self.word(word)) =>
            {
                Ok(())
            }
            _ => self.fail(),
        }
    }

    fn digits(&mut self) -> Read<&'t str> {
        let start = self.at;
        while let Some(b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E') = self.text.get(self.at) {
            self.at += 1;
        }
        let digits = &self.text[start..self.at];
        // Exact enough: what is no number becomes none where it is asked for.
        match core::str::from_utf8(digits) {
            Ok(digits) if digits.ends_with(|last: char| last.is_ascii_digit()) => Ok(digits),
            _ => self.fail(),
        }
    }

    fn word(&mut self, word: &[u8]) -> bool {
        self.skip_space();
        let is_next = self.text[self.at..].starts_with(word);
        if is_next {
            self.at += word.len();
        }
        is_next
    }

    fn expect(&mut self, byte: u8) -> Read<()> {
        if self.peek() != Some(byte) {
            return self.fail();
        }
        self.at += 1;
        Ok(())
    }

    fn peek(&mut self) -> Option<u8> {
        let at = self.skip_space();
        self.text.get(at).copied()
    }

    fn skip_space(&mut self) -> usize {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.text.get(self.at) {
            self.at += 1;
        }
        self.at
    }

    const fn fail<T>(&self) -> Read<T> {
        Err(JsonError { at: self.at })
    }
}
