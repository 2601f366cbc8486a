//! A JSON scanner that reads in place and accepts what LMTP peers write.
//!
//! Needed because the protocol requires what JSON crates reject or lose: the bare words `NaN`, `Infinity` and
//! `-Infinity` as Python writes them (LM-205), ids echoed byte for byte (LM-206), a second message behind the value
//! (LM-204), and a million biases without a string for each (LM-1307). One tolerant pass replaces the strict parse and
//! the repair that LM-706 describes.

use std::borrow::Cow;

/// Maximum nesting depth of a message (LM-205).
pub(super) const DEPTH_MAX: usize = 64;

/// A parse error, without a quotation of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BadJson(pub(super) &'static str);

/// A checked value as it was sent, without surrounding white space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawValue<'a>(&'a str);

/// Reads the value at the beginning of `text`; returns it with the rest of the text.
pub(super) fn value(text: &str) -> Result<(RawValue<'_>, &str), BadJson> {
    let mut scan = Scan { text, at: 0 };
    let value = scan.value(0)?;
    Ok((value, &text[scan.at..]))
}

impl<'a> RawValue<'a> {
    /// The text as sent.
    pub(super) const fn as_str(self) -> &'a str {
        self.0
    }

    pub(super) fn is_null(self) -> bool {
        self.0 == "null"
    }

    pub(super) fn boolean(self) -> Option<bool> {
        match self.0 {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        }
    }

    /// A number, including the bare words.
    pub(super) fn number(self) -> Option<f64> {
        match self.0 {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            text if text.starts_with(|first: char| first == '-' || first.is_ascii_digit()) => {
                text.parse().ok()
            }
            _ => None,
        }
    }

    /// An integer, including integral floats (LM-205). Values beyond the type saturate.
    pub(super) fn integer(self) -> Option<i128> {
        // The fast path: nearly all are plain digits. A float beyond the type saturates and fails every range check.
        self.0.parse().ok().or_else(|| {
            let number = self.number()?;
            let whole = number.is_finite() && number.fract() == 0.0;
            whole.then_some(number as i128)
        })
    }

    /// A string; `None` also for an unpaired surrogate, which is not valid text.
    pub(super) fn string(self) -> Option<Cow<'a, str>> {
        let inner = self.0.strip_prefix('"')?.strip_suffix('"')?;
        // Most strings have no escape and are borrowed: a bias object has a million names (LM-1307).
        if inner.contains('\\') {
            serde_json::from_str(self.0).ok().map(Cow::Owned)
        } else {
            Some(Cow::Borrowed(inner))
        }
    }

    /// The elements of an array; `None` for any other value.
    pub(super) fn elements(self) -> Option<JsonElements<'a>> {
        self.0.starts_with('[').then_some(JsonElements(Scan {
            text: self.0,
            at: 1,
        }))
    }

    /// The members of an object, in the order sent, including repeated ones; `None` for any other value.
    pub(super) fn members(self) -> Option<ObjectMembers<'a>> {
        self.0.starts_with('{').then_some(ObjectMembers(Scan {
            text: self.0,
            at: 1,
        }))
    }
}

/// Iterator over the elements of an array.
#[derive(Debug)]
pub(super) struct JsonElements<'a>(Scan<'a>);

impl<'a> Iterator for JsonElements<'a> {
    type Item = RawValue<'a>;

    fn next(&mut self) -> Option<RawValue<'a>> {
        self.0.skip(|byte| byte == b',' || is_space(byte));
        self.0.checked()
    }
}

/// Iterator over the members of an object.
#[derive(Debug)]
pub(super) struct ObjectMembers<'a>(Scan<'a>);

impl<'a> Iterator for ObjectMembers<'a> {
    /// Name and value. A name that is not valid text is empty, and no known member has an empty name.
    type Item = (Cow<'a, str>, RawValue<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        self.0.skip(|byte| byte == b',' || is_space(byte));
        let name = self.0.checked()?.string().unwrap_or_default();
        self.0.skip(|byte| byte == b':' || is_space(byte));
        Some((name, self.0.checked()?))
    }
}

#[derive(Debug)]
struct Scan<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Scan<'a> {
    /// Scans one value, nested in `depth` others.
    fn value(&mut self, depth: usize) -> Result<RawValue<'a>, BadJson> {
        self.skip(is_space);
        let from = self.at;
        match self.peek() {
            // The wording of serde_json, as in the example of section 4.
            None => return Err(BadJson("EOF while parsing a value")),
            Some(b'{') => self.object(depth)?,
            Some(b'[') => self.array(depth)?,
            Some(b'"') => self.string()?,
            Some(b'-' | b'0'..=b'9') => self.number()?,
            Some(_) => self.word(&["true", "false", "null", "NaN", "Infinity"])?,
        }
        Ok(RawValue(&self.text[from..self.at]))
    }

    /// Reads one value of a text that [`Scan::value`] has checked; `None` at the end of the enclosing value.
    fn checked(&mut self) -> Option<RawValue<'a>> {
        let from = self.at;
        match self.peek()? {
            b'}' | b']' => return None,
            b'"' => self.checked_string(),
            b'{' | b'[' => self.checked_nest()?,
            // A number or word: it was checked, so only its end is wanted.
            _ => self.skip(|byte| !matches!(byte, b',' | b':' | b'}' | b']') && !is_space(byte)),
        }
        Some(RawValue(&self.text[from..self.at]))
    }

    fn checked_string(&mut self) {
        self.at += 1;
        loop {
            self.skip(|byte| byte != b'"' && byte != b'\\');
            if self.next() != Some(b'\\') {
                return;
            }
            // The escaped byte may be a quotation mark. It is ASCII, so `at` stays on a character boundary.
            self.at += 1;
        }
    }

    fn checked_nest(&mut self) -> Option<()> {
        // No recursion, and kinds of brackets are not compared: the first scan has matched them.
        let mut depth = 0_usize;
        loop {
            match self.peek()? {
                b'"' => {
                    self.checked_string();
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return Some(());
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<(), BadJson> {
        self.enter(depth)?;
        if self.closes(b'}') {
            return Ok(());
        }
        loop {
            self.skip(is_space);
            match self.peek() {
                Some(b'"') => self.string()?,
                None => return Err(BadJson("EOF while parsing an object")),
                Some(_) => return Err(BadJson("a member's name must be a string")),
            }
            self.skip(is_space);
            if !self.takes(b':') {
                return Err(self.missing("expected `:` behind a member's name"));
            }
            self.value(depth + 1)?;
            if self.closes(b'}') {
                return Ok(());
            }
            if !self.takes(b',') {
                return Err(self.missing("expected `,` or `}` in an object"));
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<(), BadJson> {
        self.enter(depth)?;
        if self.closes(b']') {
            return Ok(());
        }
        loop {
            self.value(depth + 1)?;
            if self.closes(b']') {
                return Ok(());
            }
            if !self.takes(b',') {
                return Err(self.missing("expected `,` or `]` in a list"));
            }
        }
    }

    /// Enters an object or list.
    const fn enter(&mut self, depth: usize) -> Result<(), BadJson> {
        // This bounds the recursion: a message of brackets alone must not overflow the stack.
        if depth >= DEPTH_MAX {
            return Err(BadJson("nested deeper than 64 levels"));
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<(), BadJson> {
        self.at += 1;
        loop {
            // By byte: those of longer characters are all above 0x7f, so `at` always stops on a character boundary.
            self.skip(|byte| byte >= 0x20 && byte != b'"' && byte != b'\\');
            match self.next() {
                Some(b'"') => return Ok(()),
                Some(b'\\') => match self.next() {
                    Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {}
                    Some(b'u') => {
                        for _ in 0..4 {
                            if !self.next().is_some_and(|byte| byte.is_ascii_hexdigit()) {
                                return Err(BadJson("invalid escape in a string"));
                            }
                        }
                    }
                    _ => return Err(BadJson("invalid escape in a string")),
                },
                Some(_) => return Err(BadJson("a string contains a control character")),
                None => return Err(BadJson("EOF while parsing a string")),
            }
        }
    }

    fn number(&mut self) -> Result<(), BadJson> {
        if self.takes(b'-') && self.peek() == Some(b'I') {
            return self.word(&["Infinity"]);
        }
        if !self.takes(b'0') {
            self.digits()?;
        }
        if self.takes(b'.') {
            self.digits()?;
        }
        if self.takes(b'e') || self.takes(b'E') {
            let _ = self.takes(b'+') || self.takes(b'-');
            self.digits()?;
        }
        // `01` and `1x` are one invalid number, not a number followed by something else.
        match self.peek() {
            Some(byte) if byte.is_ascii_alphanumeric() => Err(BadJson("invalid number")),
            _ => Ok(()),
        }
    }

    fn digits(&mut self) -> Result<(), BadJson> {
        let from = self.at;
        self.skip(|byte| byte.is_ascii_digit());
        if self.at > from {
            Ok(())
        } else {
            Err(BadJson("invalid number"))
        }
    }

    fn word(&mut self, words: &[&str]) -> Result<(), BadJson> {
        let from = self.at;
        self.skip(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if words.contains(&&self.text[from..self.at]) {
            Ok(())
        } else {
            Err(BadJson("expected a value"))
        }
    }

    fn closes(&mut self, with: u8) -> bool {
        self.skip(is_space);
        self.takes(with)
    }

    fn takes(&mut self, wanted: u8) -> bool {
        let takes = self.peek() == Some(wanted);
        self.at += usize::from(takes);
        takes
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip(&mut self, which: impl Fn(u8) -> bool) {
        while self.peek().is_some_and(&which) {
            self.at += 1;
        }
    }

    fn missing(&self, what: &'static str) -> BadJson {
        // At the end of the text the cause is that it was cut off, whatever was expected there.
        if self.at == self.text.len() {
            BadJson("EOF while parsing a value")
        } else {
            BadJson(what)
        }
    }
}

/// White space of JSON.
pub(super) const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

#[cfg(test)]
mod tests;
