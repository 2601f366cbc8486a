//! Prevents message contents from forging special tokens.
//!
//! Each occurrence of a control token's text in a value is replaced by a mark before rendering and restored, as plain
//! text, afterwards. Templates may trim, split, compare and re-encode the rest of the value; a text without such an
//! occurrence, which is nearly every text, is unchanged. The search ignores letter case, so that a template that
//! lower-cases its input cannot complete a forgery. The characters of marks are themselves covered, so a value cannot
//! contain a mark.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, BuildError, MatchKind};

use super::TemplatePiece;

/// Noncharacters: they are not used in text, but every text may contain them.
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

/// Marks the end of the message that is to be continued.
pub(super) const TAIL: &str = "\u{fdd0}tail\u{fdd1}";

/// The maximum of pieces of a rendering. A template can print a mark of few bytes a million times.
const PIECES_MAX: usize = 1 << 19;

/// Finds the texts to cover.
#[derive(Clone, Debug)]
pub(super) struct SpecialTextShield(AhoCorasick);

/// The texts that one rendering has covered, by index.
#[derive(Debug, Default)]
pub(super) struct CoveredTexts(Vec<String>);

impl SpecialTextShield {
    pub(super) fn new(specials: &[String]) -> Result<Self, BuildError> {
        let marks = [OPEN.to_string(), CLOSE.to_string()];
        let specials = specials
            .iter()
            .chain(&marks)
            .filter(|text| !text.is_empty());
        let finder = AhoCorasick::builder()
            .ascii_case_insensitive(true)
            // The longest, so that a token's text that begins with another's is covered as a whole.
            .match_kind(MatchKind::LeftmostLongest)
            .build(specials)?;
        Ok(Self(finder))
    }

    /// Returns `text` with marks in place of the texts of control tokens.
    pub(super) fn cover<'a>(&self, text: &'a str, covered: &mut CoveredTexts) -> Cow<'a, str> {
        let mut out = String::new();
        let mut from = 0;
        for found in self.0.find_iter(text) {
            out.push_str(&text[from..found.start()]);
            out.push(OPEN);
            // An index and not the text: the template may change the letter case of a value, or escape it.
            out.push_str(&covered.0.len().to_string());
            out.push(CLOSE);
            covered.0.push(text[found.range()].to_owned());
            from = found.end();
        }
        if from == 0 {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[from..]);
        Cow::Owned(out)
    }
}

impl CoveredTexts {
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
            let original = index.parse().ok().and_then(|at: usize| self.0.get(at));
            rest = match (original, after.strip_prefix(CLOSE)) {
                (Some(original), Some(after)) => {
                    left = left.checked_sub(original.len())?;
                    if pieces.len() > pieces_max {
                        return None;
                    }
                    let before = std::mem::take(&mut text);
                    push(&mut pieces, TemplatePiece::Template(before));
                    push(&mut pieces, TemplatePiece::Plain(original.clone()));
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
