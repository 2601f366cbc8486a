//! Prevents message contents from forging special tokens.
//!
//! Each occurrence of a control token's text in a value is replaced by a mark before rendering and restored, as plain
//! text, afterwards. Templates may trim, split, compare and re-encode the rest of the value; a text without such an
//! occurrence, which is nearly every text, is unchanged. The search ignores letter case, so that a template that
//! lower-cases its input cannot complete a forgery. The characters of marks are themselves covered, so a value cannot
//! contain a mark.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, MatchKind};

use super::{TemplateError, TemplatePiece};

/// Noncharacters: they are not used in text, but every text may contain them.
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

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
pub(super) struct SpecialTextShield(AhoCorasick);

/// The texts that one rendering has covered, by index.
#[derive(Debug, Default)]
pub(super) struct CoveredTexts {
    /// One after another: most have few bytes, of which each would take an allocation.
    texts: String,
    /// Where each of them ends.
    ends: Vec<usize>,
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
        if specials.iter().map(begins).sum::<usize>() > SPECIALS_BYTES_MAX {
            return Err(too_many());
        }
        let marks = [OPEN.to_string(), CLOSE.to_string()];
        let specials = specials.iter().chain(&marks);
        let specials = specials.map(|text| &text[..begins(text)]);
        let specials = specials.filter(|text| !text.is_empty());
        let finder = AhoCorasick::builder()
            .ascii_case_insensitive(true)
            // The longest, so that a token's text that begins with another's is covered as a whole.
            .match_kind(MatchKind::LeftmostLongest)
            .build(specials);
        finder.map(Self).map_err(|_too_many| too_many())
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
        let mut all = self.0.find_iter(text).peekable();
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
    fn mark(&mut self, text: &str, out: &mut String) -> Option<()> {
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

    fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.texts[start..end])
    }

    /// Returns the rendered text with the covered texts restored. Broken marks (a template cut a value in the middle of
    /// one) are removed.
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
                _ => inside,
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

/// Returns a message for people, without marks.
pub(super) fn without_marks(message: &str) -> String {
    message.replace([OPEN, CLOSE], "")
}
