//! [`LiteralMachine`]: follows arguments that are written as literals, character by character, and writes them as JSON.
//!
//! The literals are those of Python, and those of Gemma, whose texts stand between markers. A model writes both with pieces
//! of JSON among them, and no text is both JSON and another literal, so one machine reads all.

use std::borrow::Cow;

use sapwood_engine::api::{MARK_CLOSE, MARK_OPEN};
use serde::de::IgnoredAny;

use super::call::{CallOutput, CallPart};
use super::markers::{Marker, MarkerTexts};
use crate::limits;

/// Levels of nesting, those that `serde_json` reads.
const DEPTH_MAX: usize = 120;
/// Bytes of a `\u` escape's digits, of a `\U` escape's, of a `\x` escape's, and the maximum of an octal one's.
const UNICODE_DIGITS: u8 = 4;
const LONG_DIGITS: usize = 8;
const BYTE_DIGITS: u8 = 2;
const OCTAL_DIGITS: u8 = 3;

/// The character is no part of the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotLiteral;

/// How a family writes a list of arguments.
#[derive(Debug)]
pub(super) struct LiteralSyntax {
    /// What stands around texts, beside quotes.
    pub(super) quote: Option<Marker>,
    /// What stands around all arguments.
    pub(super) brackets: [char; 2],
    /// What stands between the name and the value of an argument.
    pub(super) assign: char,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    /// The arguments themselves.
    Arguments,
    Object,
    List,
    Tuple,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    KeyOrEnd,
    Assign,
    Value,
    ValueOrEnd,
    CommaOrEnd,
}

#[derive(Debug)]
enum Lexeme {
    None,
    /// A key, a number or a word, which the next character ends.
    Bare(String),
    /// Behind the quote that begins a text.
    Begun(char),
    /// A text between quotes.
    Quoted(char, Escape),
    /// Behind two quotes, which are an empty text or two of three.
    Empty(char),
    /// A text between three quotes each, and how many of those that may end it were read.
    Tripled(char, Escape, usize),
    /// Behind a quote that ends a text, unless it is an apostrophe.
    Closing,
    /// The opening marker of a text, as far as it was read.
    Opening(String),
    /// A text between markers; what may begin the second one.
    Marked(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    None,
    Begun,
    /// Hexadecimal digits that are left.
    Digits(u8),
    /// Those behind `\U`, as far as they were read, and how many these are.
    Long([u8; LONG_DIGITS], usize),
    /// The number so far, and the octal digits that may follow.
    Octal(u32, u8),
}

/// The state of one list of arguments, from behind its opening bracket.
#[derive(Debug)]
pub(super) struct LiteralMachine {
    syntax: &'static LiteralSyntax,
    /// The open containers, and whether each has a member.
    open: Vec<(Container, bool)>,
    expected: Expected,
    lexeme: Lexeme,
    /// The lexeme is a key.
    in_key: bool,
}

impl Escape {
    /// Behind one more digit of an octal number, of which so many may come with this one.
    fn octal(digit: char, before: u32, left: u8) -> Self {
        Self::Octal(before * 8 + digit.to_digit(8).unwrap_or_default(), left - 1)
    }

    /// Writes the character of a number that ends before this character.
    fn ended_by(self, c: char, out: &mut CallOutput) -> Self {
        match self {
            Self::Octal(_, left) if left > 0 && matches!(c, '0'..='7') => self,
            Self::Octal(number, _) => {
                push_code(number, out);
                Self::None
            }
            // It is `C:\Users`, whose backslash should have had one before it.
            Self::Long(digits, count) if !c.is_ascii_hexdigit() => {
                push_long(&digits[..count], out);
                Self::None
            }
            other => other,
        }
    }

    /// Takes the next character of a text, which does not end it.
    fn next(self, c: char, out: &mut CallOutput) -> Result<Self, NotLiteral> {
        Ok(match (self, c) {
            // The name of a control token is no part of a text.
            (_, MARK_OPEN | MARK_CLOSE) => return Err(NotLiteral),
            (Self::None, '\\') => Self::Begun,
            (Self::None, c) => {
                push_escaped(c, out);
                Self::None
            }
            (Self::Begun, 'u') => {
                out.push_str("\\u");
                Self::Digits(UNICODE_DIGITS)
            }
            (Self::Begun, 'x') => {
                out.push_str("\\u00");
                Self::Digits(BYTE_DIGITS)
            }
            (Self::Begun, 'U') => Self::Long([0; LONG_DIGITS], 0),
            (Self::Begun, '0'..='7') => Self::octal(c, 0, OCTAL_DIGITS),
            (Self::Begun, c) => {
                push_unescaped(c, out);
                Self::None
            }
            (Self::Octal(number, left), _) => Self::octal(c, number, left),
            (Self::Digits(left), c) if c.is_ascii_hexdigit() => {
                out.push(c);
                match left {
                    1 => Self::None,
                    _ => Self::Digits(left - 1),
                }
            }
            (Self::Digits(_), _) => return Err(NotLiteral),
            (Self::Long(mut digits, count), c) => {
                digits[count] = c as u8;
                match count + 1 {
                    LONG_DIGITS => {
                        push_long(&digits, out);
                        Self::None
                    }
                    more => Self::Long(digits, more),
                }
            }
        })
    }
}

impl LiteralMachine {
    /// Begins behind the opening bracket.
    pub(super) fn new(syntax: &'static LiteralSyntax, out: &mut CallOutput) -> Self {
        out.push('{');
        Self {
            syntax,
            open: vec![(Container::Arguments, false)],
            expected: Expected::KeyOrEnd,
            lexeme: Lexeme::None,
            in_key: false,
        }
    }

    /// Whether the closing bracket was read.
    pub(super) fn is_complete(&self) -> bool {
        self.open.is_empty()
    }

    /// Takes the next character.
    pub(super) fn push(
        &mut self,
        c: char,
        texts: &MarkerTexts,
        out: &mut CallOutput,
    ) -> Result<(), NotLiteral> {
        match std::mem::replace(&mut self.lexeme, Lexeme::None) {
            Lexeme::None => self.structure(c, texts, out),
            Lexeme::Bare(mut word) if self.is_bare(c) => {
                word.push(c);
                // No number and no word is that long, and names are as bounded as those of functions.
                let fits = word.len() <= limits::TOOL_NAME_BYTES;
                self.lexeme = Lexeme::Bare(word);
                fits.then_some(()).ok_or(NotLiteral)
            }
            Lexeme::Bare(word) => {
                self.word(&word, out)?;
                self.structure(c, texts, out)
            }
            Lexeme::Begun(quote) if c == quote => {
                self.lexeme = Lexeme::Empty(quote);
                Ok(())
            }
            Lexeme::Begun(quote) => self.quoted(c, quote, Escape::None, out),
            Lexeme::Quoted(quote, escape) => self.quoted(c, quote, escape, out),
            Lexeme::Empty(quote) if c == quote => {
                self.lexeme = Lexeme::Tripled(quote, Escape::None, 0);
                Ok(())
            }
            Lexeme::Tripled(quote, escape, seen) => self.tripled(c, (quote, escape, seen), out),
            // Templates write texts between quotes without escaping those within.
            Lexeme::Closing | Lexeme::Empty('\'') if c.is_alphanumeric() => {
                out.push('\'');
                self.lexeme = Lexeme::Quoted('\'', Escape::None);
                self.quoted(c, '\'', Escape::None, out)
            }
            Lexeme::Closing | Lexeme::Empty(_) => {
                self.text_ends(out);
                self.structure(c, texts, out)
            }
            Lexeme::Opening(mut seen) => {
                seen.push(c);
                let wanted = self.syntax.quote.map_or("", |quote| texts.text(quote));
                if !wanted.starts_with(&seen) {
                    return Err(NotLiteral);
                }
                if seen.len() < wanted.len() {
                    self.lexeme = Lexeme::Opening(seen);
                } else {
                    self.text_begins(Lexeme::Marked(String::new()), out);
                }
                Ok(())
            }
            Lexeme::Marked(seen) => self.marked(c, seen, texts, out),
        }
    }

    /// A word is complete: a key, or a value of one word.
    fn word(&mut self, word: &str, out: &mut CallOutput) -> Result<(), NotLiteral> {
        if self.in_key {
            self.text_begins(Lexeme::None, out);
            for c in word.trim_end().chars() {
                push_escaped(c, out);
            }
            self.text_ends(out);
            return Ok(());
        }
        let json = match word {
            "true" | "True" => "true",
            "false" | "False" => "false",
            "null" | "None" => "null",
            number => &*number_json(number).ok_or(NotLiteral)?,
        };
        self.member(out);
        out.push_str(json);
        self.expected = Expected::CommaOrEnd;
        Ok(())
    }

    /// A key, or a value without one, begins.
    fn member(&mut self, out: &mut CallOutput) {
        if let Some((container, has_member)) = self.open.last_mut() {
            let is_keyed = matches!(container, Container::Arguments | Container::Object);
            // The value behind a key is no member of its own.
            let is_member = self.in_key || !is_keyed;
            if is_member && std::mem::replace(has_member, true) {
                out.push_str(", ");
            }
        }
    }

    fn text_begins(&mut self, lexeme: Lexeme, out: &mut CallOutput) {
        self.member(out);
        out.push('"');
        self.lexeme = lexeme;
    }

    fn text_ends(&mut self, out: &mut CallOutput) {
        out.push('"');
        self.expected = if std::mem::take(&mut self.in_key) {
            Expected::Assign
        } else {
            Expected::CommaOrEnd
        };
    }

    fn quoted(
        &mut self,
        c: char,
        quote: char,
        escape: Escape,
        out: &mut CallOutput,
    ) -> Result<(), NotLiteral> {
        let escape = escape.ended_by(c, out);
        match (escape, quote) {
            (Escape::None, '\'') if quote == c => self.lexeme = Lexeme::Closing,
            (Escape::None, _) if quote == c => self.text_ends(out),
            _ => self.lexeme = Lexeme::Quoted(quote, escape.next(c, out)?),
        }
        Ok(())
    }

    /// In a text between three quotes, of which so many were just read.
    fn tripled(
        &mut self,
        c: char,
        (quote, escape, seen): (char, Escape, usize),
        out: &mut CallOutput,
    ) -> Result<(), NotLiteral> {
        let escape = escape.ended_by(c, out);
        if escape == Escape::None && c == quote {
            match seen {
                2 => self.text_ends(out),
                _ => self.lexeme = Lexeme::Tripled(quote, escape, seen + 1),
            }
            return Ok(());
        }
        for _ in 0..seen {
            push_escaped(quote, out);
        }
        self.lexeme = Lexeme::Tripled(quote, escape.next(c, out)?, 0);
        Ok(())
    }

    /// In a text between markers, where nothing is escaped.
    fn marked(
        &mut self,
        c: char,
        mut seen: String,
        texts: &MarkerTexts,
        out: &mut CallOutput,
    ) -> Result<(), NotLiteral> {
        let wanted = self.syntax.quote.map_or("", |quote| texts.text(quote));
        seen.push(c);
        if seen == wanted {
            self.text_ends(out);
            return Ok(());
        }
        if !wanted.starts_with(&seen) {
            // The first character of a marker occurs in it once, so only the last one may begin it.
            let from = if wanted.starts_with(c) {
                seen.len() - c.len_utf8()
            } else {
                seen.len()
            };
            for c in seen.drain(..from) {
                if matches!(c, MARK_OPEN | MARK_CLOSE) {
                    return Err(NotLiteral);
                }
                push_escaped(c, out);
            }
        }
        self.lexeme = Lexeme::Marked(seen);
        Ok(())
    }

    fn structure(
        &mut self,
        c: char,
        texts: &MarkerTexts,
        out: &mut CallOutput,
    ) -> Result<(), NotLiteral> {
        use Expected::{Assign, CommaOrEnd, KeyOrEnd, Value, ValueOrEnd};
        let Some((container, _)) = self.open.last().copied() else {
            return Err(NotLiteral);
        };
        if c.is_ascii_whitespace() {
            return Ok(());
        }
        match self.expected {
            KeyOrEnd | ValueOrEnd | CommaOrEnd if c == self.close(container) => {
                self.ends(container, out);
                Ok(())
            }
            CommaOrEnd if c == ',' => {
                self.expected = match container {
                    Container::Arguments | Container::Object => KeyOrEnd,
                    Container::List | Container::Tuple => ValueOrEnd,
                };
                Ok(())
            }
            Assign if c == self.assign(container) => {
                out.push_str(": ");
                self.expected = Value;
                Ok(())
            }
            KeyOrEnd => {
                self.in_key = true;
                self.scalar_begins(c, texts, out)
            }
            Value | ValueOrEnd => self.value_begins(c, texts, out),
            Assign | CommaOrEnd => Err(NotLiteral),
        }
    }

    fn value_begins(
        &mut self,
        c: char,
        texts: &MarkerTexts,
        out: &mut CallOutput,
    ) -> Result<(), NotLiteral> {
        let (container, bracket, expected) = match c {
            '{' => (Container::Object, '{', Expected::KeyOrEnd),
            '[' => (Container::List, '[', Expected::ValueOrEnd),
            '(' => (Container::Tuple, '[', Expected::ValueOrEnd),
            _ => return self.scalar_begins(c, texts, out),
        };
        if self.open.len() >= DEPTH_MAX {
            return Err(NotLiteral);
        }
        self.member(out);
        out.push(bracket);
        self.open.push((container, false));
        self.expected = expected;
        Ok(())
    }

    /// A key begins, or a value without brackets.
    fn scalar_begins(
        &mut self,
        c: char,
        texts: &MarkerTexts,
        out: &mut CallOutput,
    ) -> Result<(), NotLiteral> {
        let quote = self.syntax.quote;
        if quote.is_some_and(|quote| texts.text(quote).starts_with(c)) {
            self.lexeme = Lexeme::Opening(c.to_string());
        } else if matches!(c, '"' | '\'') {
            self.text_begins(Lexeme::Begun(c), out);
        } else if self.is_bare(c) {
            self.lexeme = Lexeme::Bare(c.to_string());
        } else {
            return Err(NotLiteral);
        }
        Ok(())
    }

    fn ends(&mut self, container: Container, out: &mut CallOutput) {
        let is_keyed = matches!(container, Container::Arguments | Container::Object);
        out.push(if is_keyed { '}' } else { ']' });
        self.open.pop();
        self.expected = Expected::CommaOrEnd;
    }

    /// Whether a key, a number or a word may have this character.
    fn is_bare(&self, c: char) -> bool {
        // Templates with texts between markers print keys as they are.
        let in_any_key = self.in_key && self.syntax.quote.is_some();
        let ends_key =
            c.is_control() || matches!(c, ':' | ',' | '{' | '}' | '"' | MARK_OPEN | MARK_CLOSE);
        is_bare(c) || in_any_key && !ends_key
    }

    const fn close(&self, container: Container) -> char {
        match container {
            Container::Arguments => self.syntax.brackets[1],
            Container::Object => '}',
            Container::List => ']',
            Container::Tuple => ')',
        }
    }

    fn assign(&self, container: Container) -> char {
        if container == Container::Arguments {
            self.syntax.assign
        } else {
            ':'
        }
    }
}

/// The JSON text of a literal of Python; `None` if it is none.
pub(super) fn python_json(text: &str) -> Option<String> {
    const ARGUMENT: LiteralSyntax = LiteralSyntax {
        quote: None,
        brackets: ['(', ')'],
        assign: '=',
    };
    let mut out = CallOutput::new(1);
    out.begin(String::new(), None);
    let mut machine = LiteralMachine::new(&ARGUMENT, &mut out);
    let texts = MarkerTexts::default();
    for c in "a=".chars().chain(text.chars()).chain([')']) {
        // After the last bracket it takes nothing.
        machine.push(c, &texts, &mut out).ok()?;
    }
    let Some(CallPart::Arguments(json)) = out.take().pop() else {
        return None;
    };
    let json = json.strip_prefix("{\"a\": ")?.strip_suffix('}')?;
    // With a second argument it is none.
    let is_json = machine.is_complete() && serde_json::from_str::<IgnoredAny>(json).is_ok();
    is_json.then(|| json.to_owned())
}

/// A number as JSON, without the underscores that Python has between digits; `None` if it is none.
fn number_json(word: &str) -> Option<Cow<'_, str>> {
    let json = if word.contains('_') {
        let is_digit = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_digit);
        let bytes = word.as_bytes();
        let between =
            |at: usize| is_digit(bytes.get(at.wrapping_sub(1))) && is_digit(bytes.get(at + 1));
        let mut underscores = word.match_indices('_');
        if !underscores.all(|(at, _)| between(at)) {
            return None;
        }
        Cow::Owned(word.replace('_', ""))
    } else {
        Cow::Borrowed(word)
    };
    let is_number = serde_json::from_str::<serde_json::Number>(&json).is_ok();
    is_number.then_some(json)
}

/// What keys, numbers and words consist of.
fn is_bare(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | '+' | '/' | '$')
}

/// Writes a character of a text as JSON.
fn push_escaped(c: char, out: &mut CallOutput) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
        c => out.push(c),
    }
}

/// Writes what a backslash and this character stand for.
fn push_unescaped(c: char, out: &mut CallOutput) {
    match c {
        'n' | 'r' | 't' | 'b' | 'f' | '"' | '\\' => {
            out.push('\\');
            out.push(c);
        }
        '\'' | '/' => out.push(c),
        'a' => push_escaped('\u{7}', out),
        'v' => push_escaped('\u{b}', out),
        // A line that goes on.
        '\n' => {}
        // To Python it is a backslash, and what follows it; but for `\N{BULLET}`, which takes the names of all characters.
        c => {
            out.push_str("\\\\");
            push_escaped(c, out);
        }
    }
}

/// Writes the character of this number.
fn push_code(number: u32, out: &mut CallOutput) {
    // Octal escapes are below the surrogates.
    push_escaped(char::from_u32(number).unwrap_or_default(), out);
}

/// Writes what `\U` and these digits stand for: a character, or themselves if there is none.
fn push_long(digits: &[u8], out: &mut CallOutput) {
    let digits = str::from_utf8(digits).unwrap_or_default();
    let number = u32::from_str_radix(digits, 16).ok();
    let number = number.filter(|_| digits.len() == LONG_DIGITS);
    match number.and_then(char::from_u32) {
        Some(c) => push_escaped(c, out),
        None => {
            out.push_str("\\\\U");
            out.push_str(digits);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PYTHON: LiteralSyntax = LiteralSyntax {
        quote: None,
        brackets: ['(', ')'],
        assign: '=',
    };
    const MARKED: LiteralSyntax = LiteralSyntax {
        quote: Some("<|\"|>"),
        brackets: ['{', '}'],
        assign: ':',
    };

    /// The JSON of arguments; `None` if they are none, or go on.
    fn json(syntax: &'static LiteralSyntax, text: &str) -> Option<String> {
        let mut out = CallOutput::new(1);
        out.begin("f".to_owned(), None);
        let mut machine = LiteralMachine::new(syntax, &mut out);
        for c in text.chars() {
            machine.push(c, &MarkerTexts::default(), &mut out).ok()?;
        }
        let parts = out.take();
        let [_, CallPart::Arguments(json)] = &parts[..] else {
            return None;
        };
        machine.is_complete().then(|| json.clone())
    }

    #[test]
    fn arguments_of_python_become_json() {
        for (text, expect) in [
            (")", "{}"),
            ("a=1)", r#"{"a": 1}"#),
            (" a = 1 , )", r#"{"a": 1}"#),
            (
                "a=True, b=None, c=-1.5e+3, d=false)",
                r#"{"a": true, "b": null, "c": -1.5e+3, "d": false}"#,
            ),
            (
                r#"a='x "y"', b="it's")"#,
                r#"{"a": "x \"y\"", "b": "it's"}"#,
            ),
            ("a='it's so')", r#"{"a": "it's so"}"#),
            (
                r"a='it\'s\n\\', b='\x41\u00e9\d')",
                r#"{"a": "it's\n\\", "b": "\u0041\u00e9\\d"}"#,
            ),
            ("a='two\nlines\u{1}')", r#"{"a": "two\nlines\u0001"}"#),
            (
                r"a='\U0001F600\U0000000a', b='\a\v\b', c='\0\41\1012\78\377')",
                "{\"a\": \"😀\\n\", \"b\": \"\\u0007\\u000b\\b\", \"c\": \"\\u0000!A2\\u00078ÿ\"}",
            ),
            ("a=1_000, b=-1_0.2_5e1_0)", r#"{"a": 1000, "b": -10.25e10}"#),
            (
                "a=\"\"\"it's \"so\"\n\\\"\"\"\", b='''''x''', c=\"\", d='')",
                r#"{"a": "it's \"so\"\n\"", "b": "''x", "c": "", "d": ""}"#,
            ),
            // These are none, or not known.
            (
                r"a='C:\Users\N{BULLET}\8', b='\Uffffffff\U00', c='\0')",
                r#"{"a": "C:\\Users\\N{BULLET}\\8", "b": "\\Uffffffff\\U00", "c": "\u0000"}"#,
            ),
            (
                r#"a={"b": [1, 'c', (True,)], 'd': {}})"#,
                r#"{"a": {"b": [1, "c", [true]], "d": {}}}"#,
            ),
            ("a=['x)', \"y]\"])", r#"{"a": ["x)", "y]"]}"#),
            ("naïve-key=1)", r#"{"naïve-key": 1}"#),
        ] {
            let found = json(&PYTHON, text);
            assert_eq!(found.as_deref(), Some(expect), "{text}");
            let read = serde_json::from_str::<serde_json::Value>(expect);
            assert!(read.is_ok_and(|read| read.is_object()), "{expect}");
        }
        for bad in [
            "a=b)",
            "a=1.)",
            "a:1)",
            "1)",
            "a=1 b=2)",
            "a=,)",
            ",)",
            "a=[1)",
            "a='b' 'c')",
            "a=f(1))",
            "a=_1)",
            "a=1_)",
            "a=1__0)",
            "a=1_.5)",
            "a='''b''c')",
            "a=\"\"\"b\"\"\"\")",
            "a=1})",
            "a='\\u12g4')",
            "a=1))",
        ] {
            assert_eq!(json(&PYTHON, bad), None, "{bad}");
        }
    }

    #[test]
    fn texts_between_markers_become_json() {
        for (text, expect) in [
            ("}", "{}"),
            (
                "city:<|\"|>Bodø \"N\" <&>\\n'<|\"|>,days:3}",
                r#"{"city": "Bodø \"N\" <&>\\n'", "days": 3}"#,
            ),
            ("a:<|\"|><<|\"<|\"|>}", r#"{"a": "<<|\""}"#),
            (
                "at:{lat:67.28,tags:[<|\"|>a<|\"|>,<|\"|>b<|\"|>]},none:[],wind:None,rain:true}",
                r#"{"at": {"lat": 67.28, "tags": ["a", "b"]}, "none": [], "wind": null, "rain": true}"#,
            ),
            (
                "<|\"|>key<|\"|>:\"json \\u0041\"}",
                r#"{"key": "json \u0041"}"#,
            ),
            (
                "first name :1,@type:{it's [0]:<|\"|>x<|\"|>},\n 'a b':2}",
                r#"{"first name": 1, "@type": {"it's [0]": "x"}, "a b": 2}"#,
            ),
        ] {
            assert_eq!(json(&MARKED, text).as_deref(), Some(expect), "{text}");
        }
        for bad in [
            "{a:1}}",
            "a b,c:1}",
            "a\nb:1}",
            "a:x y}",
            "a:<|x}",
            "a=1}",
            "a:b}",
            "a:<|\"|>open}",
        ] {
            assert_eq!(json(&MARKED, bad), None, "{bad}");
        }
    }

    #[test]
    fn a_literal_of_python_becomes_json() {
        for (text, expect) in [
            (
                "{'a': True, \"b\": [None, 'it\\'s']}",
                Some(r#"{"a": true, "b": [null, "it's"]}"#),
            ),
            (" ['a', ('b', 1)]\n", Some(r#"["a", ["b", 1]]"#)),
            ("{}", Some("{}")),
            ("[]", Some("[]")),
            ("", None),
            ("'a', b=1", None),
            ("[1), a=(1]", None),
            ("{'a'}", None),
            ("[a]", None),
            ("[1]) ", None),
        ] {
            assert_eq!(python_json(text).as_deref(), expect, "{text}");
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let deep = |levels: usize| format!("a={}{})", "[".repeat(levels), "]".repeat(levels));
        assert!(json(&PYTHON, &deep(DEPTH_MAX - 1)).is_some());
        assert!(json(&PYTHON, &deep(DEPTH_MAX)).is_none());
        let name = |bytes: usize| format!("{}=1)", "n".repeat(bytes));
        assert!(json(&PYTHON, &name(limits::TOOL_NAME_BYTES)).is_some());
        assert!(json(&PYTHON, &name(limits::TOOL_NAME_BYTES + 1)).is_none());
    }
}
