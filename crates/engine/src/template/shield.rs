//! Prevents message contents from forging special tokens.
//!
//! Each occurrence of a control token's text in a value is replaced by a mark before rendering and restored, as plain
//! text, afterwards. Templates may trim, split, compare and re-encode the rest of the value; a text without such an
//! occurrence, which is nearly every text, is unchanged. The search ignores letter case, so that a template that
//! lower-cases its input cannot complete a forgery. The characters of marks are themselves covered, so a value cannot
//! contain a mark.
//!
//! Some templates write the brackets of a token around a value: `'<|' + message.role + '|>'`. So a text that lacks only those at one side
//! or both (`<|im_end`, `im_end|>`, `|im_end|`) is covered as well. What is completed in other ways is [`super::guard`]'s.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

use super::{TemplateError, TemplatePiece};

/// Noncharacters: they are not used in text, but every text may contain them.
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';
/// Both, in UTF-16.
pub(super) const MARKS: [u16; 2] = [0xfdd0, 0xfdd1];

/// Marks the end of the message that is to be continued.
pub(super) const TAIL: &str = "\u{fdd0}tail\u{fdd1}";

/// The maximum of pieces of a rendering. A template can print a mark of few bytes a million times.
const PIECES_MAX: usize = 1 << 19;
/// The maximum of covered texts. A rendering that prints each of them once has as many pieces as it may have.
pub(super) const MARKS_MAX: usize = PIECES_MAX / 2;
/// The maximum of bytes that are looked for of a control token's text, which no vocabulary in use has. Where a text begins like a long one,
/// all of that is read again from its next byte.
const SPECIAL_BYTES_MAX: usize = 256;
/// The maximum of bytes of all those texts. What finds them takes some hundred bytes for each; vocabularies in use have 100,000 at most.
const SPECIALS_BYTES_MAX: usize = 1 << 20;

/// Finds the texts to cover.
#[derive(Clone, Debug)]
pub(super) struct SpecialTextShield(Arc<Finders>);

#[derive(Debug)]
struct Finders {
    /// Of texts of control tokens, their parts, and the characters of marks: the longest of each place.
    covered: AhoCorasick,
    /// Of texts of control tokens: all of them.
    tokens: AhoCorasick,
    /// The bytes of the longest one.
    longest: usize,
    /// The bytes that they begin with.
    begin: [bool; 256],
    /// Their words, in lower case.
    words: BTreeSet<String>,
    /// Whether the parts of all of them are covered, and not only those of roles.
    has_all_parts: bool,
}

/// The texts that one rendering has covered, by index.
#[derive(Debug, Default)]
pub(super) struct CoveredTexts {
    /// One after another: most have few bytes, of which each would take an allocation.
    texts: String,
    /// Where each of them ends.
    ends: Vec<usize>,
    /// Words of control tokens that are texts of the request.
    given: BTreeSet<String>,
}

impl SpecialTextShield {
    /// # Errors
    /// [`TemplateError::Syntax`]: they are too many.
    pub(super) fn new(specials: &[String]) -> Result<Self, TemplateError> {
        let too_many = || {
            let why = "the vocabulary has too many control tokens";
            TemplateError::Syntax(why.to_owned())
        };
        // Of a longer one its beginning is covered: what is left of it is no control token.
        let begins = |text: &String| text.floor_char_boundary(SPECIAL_BYTES_MAX);
        let texts = specials.iter().map(|text| &text[..begins(text)]);
        let texts: Vec<&str> = texts.filter(|text| !text.is_empty()).collect();
        let marks = [OPEN.to_string(), CLOSE.to_string()];
        let bytes = |texts: &[&str]| texts.iter().map(|text| text.len()).sum::<usize>();
        if bytes(&texts) > SPECIALS_BYTES_MAX {
            return Err(too_many());
        }
        let with_parts = |of: &dyn Fn(&str) -> bool| -> Vec<&str> {
            let of = texts.iter().copied().filter(|text| of(text));
            texts.iter().copied().chain(of.flat_map(parts)).collect()
        };
        let mut covered = with_parts(&|_| true);
        // Vocabularies of speech have tens of thousands of them.
        let has_all_parts = bytes(&covered) <= SPECIALS_BYTES_MAX;
        if !has_all_parts {
            covered = with_parts(&is_role);
        }
        let finder = |kind, texts: &[&str]| {
            let mut builder = AhoCorasick::builder();
            builder.ascii_case_insensitive(true).match_kind(kind);
            builder.build(texts).map_err(|_too_many| too_many())
        };
        let marks = marks.iter().map(String::as_str);
        let covered: Vec<&str> = covered.into_iter().chain(marks).collect();
        let mut begin = [false; 256];
        for byte in texts.iter().filter_map(|text| text.bytes().next()) {
            begin[usize::from(byte.to_ascii_lowercase())] = true;
            begin[usize::from(byte.to_ascii_uppercase())] = true;
        }
        let words = texts.iter().map(|text| word(text).to_ascii_lowercase());
        Ok(Self(Arc::new(Finders {
            // The longest, so that a token's text that begins with another's is covered as a whole.
            covered: finder(MatchKind::LeftmostLongest, &covered)?,
            tokens: finder(MatchKind::Standard, &texts)?,
            longest: texts.iter().map(|text| text.len()).max().unwrap_or(0),
            begin,
            words: words.filter(|word| !word.is_empty()).collect(),
            has_all_parts,
        })))
    }

    /// The bytes of the longest text of a control token.
    pub(super) fn longest(&self) -> usize {
        self.0.longest
    }

    /// Whether no value has a text that is this token but for its brackets.
    pub(super) fn has_parts_covered(&self, token: &str) -> bool {
        self.0.has_all_parts && bar(token).is_some()
    }

    /// Returns all texts of control tokens in a text, which may overlap.
    pub(super) fn tokens<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let found = self.0.tokens.find_overlapping_iter(text);
        found.map(|found| &text[found.range()])
    }

    /// Returns the bytes that `right` has of texts of control tokens that `left` begins. `on_purpose`: whether one, joined at this byte of
    /// it, is not counted.
    pub(super) fn completed(
        &self,
        left: &str,
        right: &str,
        on_purpose: impl Fn(&str, usize) -> bool,
    ) -> Option<usize> {
        let most = self.0.longest.saturating_sub(1);
        let left = &left[left.ceil_char_boundary(left.len().saturating_sub(most))..];
        // Nearly all texts end here.
        let first = |byte: &u8| self.0.begin[usize::from(*byte)];
        let left = &left[left.as_bytes().iter().position(first)?..];
        let right = &right[..right.floor_char_boundary(most)];
        let both = [left, right].concat();
        let found = self.0.tokens.find_overlapping_iter(&both);
        let across = found.filter(|it| it.start() < left.len() && left.len() < it.end());
        let counted = across.filter(|it| !on_purpose(&both[it.range()], left.len() - it.start()));
        counted.map(|it| it.end() - left.len()).max()
    }

    /// Keeps in mind whether a text of the request is the word of a control token.
    pub(super) fn note(&self, text: &str, covered: &mut CoveredTexts) {
        // Without what a template may trim: white space, and more than that.
        let word = word(text);
        if word.len() > self.0.longest {
            return;
        }
        let word = word.to_ascii_lowercase();
        if self.0.words.contains(&word) {
            covered.given.insert(word);
        }
    }

    /// Returns `text` with marks in place of the texts of control tokens, or `None` if all those of `covered` would be more than
    /// [`MARKS_MAX`].
    pub(super) fn cover<'a>(
        &self,
        text: &'a str,
        covered: &mut CoveredTexts,
    ) -> Option<Cow<'a, str>> {
        let mut out = String::new();
        let mut from = 0;
        let mut all = self.0.covered.find_iter(text).peekable();
        while let Some(first) = all.next() {
            let mut end = first.end();
            // Those that follow one another have one mark, as they are one piece.
            while let Some(next) = all.next_if(|next| next.start() == end) {
                end = next.end();
            }
            out.push_str(&text[from..first.start()]);
            covered.mark(&text[first.start()..end], &mut out)?;
            from = end;
        }
        if from == 0 {
            return Some(Cow::Borrowed(text));
        }
        out.push_str(&text[from..]);
        Some(Cow::Owned(out))
    }

    /// As [`Self::cover`], but a text that has too many is covered as a whole.
    pub(super) fn cover_all<'a>(&self, text: &'a str, covered: &mut CoveredTexts) -> Cow<'a, str> {
        let (texts, ends) = (covered.texts.len(), covered.ends.len());
        if let Some(marked) = self.cover(text, covered) {
            return marked;
        }
        covered.texts.truncate(texts);
        covered.ends.truncate(ends);
        let mut out = String::new();
        covered.add(text, &mut out);
        Cow::Owned(out)
    }
}

impl CoveredTexts {
    /// The bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.texts.len() + self.ends.len() * size_of::<usize>()
    }

    /// Appends the mark of one more text, or returns `None` if there are too many.
    pub(super) fn mark(&mut self, text: &str, out: &mut String) -> Option<()> {
        (self.ends.len() < MARKS_MAX).then(|| self.add(text, out))
    }

    fn add(&mut self, text: &str, out: &mut String) {
        out.push(OPEN);
        // An index and not the text: the template may change the letter case of a value, or escape it.
        out.push_str(&self.ends.len().to_string());
        out.push(CLOSE);
        self.texts.push_str(text);
        self.ends.push(self.texts.len());
    }

    /// Whether the request has the word of this token as a text of its own.
    pub(super) fn is_given(&self, token: &str) -> bool {
        self.given.contains(&word(token).to_ascii_lowercase())
    }

    fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.texts[start..end])
    }

    /// Returns the rendered text with the covered texts restored. Broken marks (a template cut a value in the middle of
    /// one) are removed, and a piece ends where they were: what they have kept apart stays apart.
    pub(super) fn pieces(&self, rendered: &str) -> Vec<TemplatePiece> {
        // There is none only where there is a limit.
        let pieces = self.restored(rendered, usize::MAX, usize::MAX);
        pieces.unwrap_or_default()
    }

    /// As [`Self::pieces`], or `None` if they are more than `bytes_max`, or too many.
    pub(super) fn pieces_within(
        &self,
        rendered: &str,
        bytes_max: usize,
    ) -> Option<Vec<TemplatePiece>> {
        self.restored(rendered, bytes_max, PIECES_MAX)
    }

    fn restored(
        &self,
        rendered: &str,
        bytes_max: usize,
        pieces_max: usize,
    ) -> Option<Vec<TemplatePiece>> {
        let mut pieces = Vec::new();
        let mut text = String::new();
        let mut left = bytes_max.checked_sub(rendered.len())?;
        let mut rest = rendered;
        while let Some(start) = rest.find(OPEN) {
            text.push_str(&rest[..start]);
            let inside = &rest[start + OPEN.len_utf8()..];
            let digits = inside.find(|c: char| !c.is_ascii_digit());
            let (index, after) = inside.split_at(digits.unwrap_or(inside.len()));
            let original = index.parse().ok().and_then(|at| self.get(at));
            rest = match (original, after.strip_prefix(CLOSE)) {
                (Some(original), Some(after)) => {
                    left = left.checked_sub(original.len())?;
                    if pieces.len() > pieces_max {
                        return None;
                    }
                    let before = std::mem::take(&mut text);
                    push(&mut pieces, TemplatePiece::Template(before));
                    push(&mut pieces, TemplatePiece::Plain(original.to_owned()));
                    after
                }
                // Only the opening character is removed; what follows it may be the rest of another mark.
                _ => {
                    if pieces.len() > pieces_max {
                        return None;
                    }
                    let before = std::mem::take(&mut text);
                    push(&mut pieces, TemplatePiece::Template(before));
                    inside
                }
            };
        }
        text.push_str(rest);
        push(&mut pieces, TemplatePiece::Template(text));
        Some(pieces)
    }
}

fn push(pieces: &mut Vec<TemplatePiece>, piece: TemplatePiece) {
    match (pieces.last_mut(), piece) {
        (_, TemplatePiece::Template(text)) if text.is_empty() => {}
        // Adjacent plain texts are tokenised as one, as they were in the value.
        (Some(TemplatePiece::Plain(before)), TemplatePiece::Plain(text)) => before.push_str(&text),
        (_, piece) => pieces.push(piece),
    }
}

/// The bars in the brackets of control tokens: `<|im_end|>`, and those of DeepSeek.
const BARS: [char; 2] = ['|', '｜'];

/// Returns the bar that a token has within its angle brackets.
fn bar(token: &str) -> Option<char> {
    let inside = token.strip_prefix('<')?.strip_suffix('>')?;
    let is_bar = |bar: &char| inside.starts_with(*bar) && inside.ends_with(*bar);
    // Two letters at least: the parts of a shorter one are in many texts.
    let bar = BARS.into_iter().find(is_bar)?;
    (inside.chars().count() > 3).then_some(bar)
}

/// The roles that templates put into brackets.
const ROLES: &[&str] = &[
    "assistant",
    "context",
    "developer",
    "environment",
    "function",
    "ipython",
    "model",
    "observation",
    "system",
    "tool",
    "tool_response",
    "user",
];

/// Whether a token is a role in brackets.
pub(super) fn is_role(token: &str) -> bool {
    ROLES.contains(&word(token).to_ascii_lowercase().as_str())
}

/// Returns what lacks nothing of a token but brackets. None of tokens without bars: `INST` and `s>` are in many texts.
fn parts(token: &str) -> impl Iterator<Item = &str> {
    let parts = bar(token).map(|bar| {
        let (first, last) = (1 + bar.len_utf8(), token.len() - 1 - bar.len_utf8());
        [&token[..last], &token[first..], &token[1..token.len() - 1]]
    });
    parts.into_iter().flatten()
}

/// Returns a token's text without its brackets.
pub(super) fn word(token: &str) -> &str {
    token.trim_matches(|c: char| !c.is_alphanumeric())
}

/// Returns the brackets that a token begins with.
pub(super) fn opening(token: &str) -> &str {
    let word = word(token);
    token
        .split(word)
        .next()
        .filter(|_| !word.is_empty())
        .unwrap_or(token)
}

/// Returns the brackets that a token ends with.
pub(super) fn closing(token: &str) -> &str {
    let word = word(token);
    token
        .rsplit(word)
        .next()
        .filter(|_| !word.is_empty())
        .unwrap_or(token)
}

/// Returns a message for people, without marks.
pub(super) fn without_marks(message: &str) -> String {
    message.replace([OPEN, CLOSE], "")
}
