//! Markers: the texts that models put around reasoning and calls, and how they are found in an output.
//!
//! Most vocabularies have them as control tokens, which add nothing to a text. The engine writes those that a parser
//! needs between two noncharacters ([`MARK_OPEN`], [`MARK_CLOSE`]); text that only spells such a marker is then none.

use sapwood_engine::api::{MARK_CLOSE, MARK_OPEN, Vocabulary};
use sapwood_proto::steer::Token;

/// The tokens that markers contain which are no tokens themselves.
pub(super) const PARTS: [Marker; 7] = [
    DSML,
    MINIMAX,
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|role_sep|>",
    "<|begin|>",
];
/// In each tag of DeepSeek V3.2.
pub(super) const DSML: Marker = "｜DSML｜";
/// Before each tag of MiniMax M3.
pub(super) const MINIMAX: Marker = "]<]minimax[>[";

/// A marker, by its name in model files, or with the names of tokens in it.
pub(super) type Marker = &'static str;

/// How the markers of a format look in the text of one model.
#[derive(Debug, Default)]
pub(super) struct MarkerTexts(Vec<(Marker, String)>);

impl MarkerTexts {
    /// Looks the markers up in a vocabulary. Also returns the tokens that the engine has to write.
    pub(super) fn find(
        markers: impl IntoIterator<Item = Marker>,
        vocabulary: &dyn Vocabulary,
    ) -> (Self, Vec<Token>) {
        let mut texts = Self::default();
        let mut tokens = Vec::new();
        let mut markers: Vec<Marker> = markers.into_iter().collect();
        // The tokens that they contain are markers too, so that no reader gets to see one out of place.
        let mut parts = PARTS.to_vec();
        parts.retain(|part| {
            let is_part = |marker: &Marker| marker != part && marker.contains(part);
            !markers.contains(part) && markers.iter().any(is_part)
        });
        markers.extend(parts);
        for marker in markers {
            let control = control_token(marker, vocabulary);
            let text = match control {
                Some(_) => marked(marker),
                None => marker.to_owned(),
            };
            tokens.extend(control);
            texts.0.push((marker, text));
        }
        // A marker that is no token may contain some.
        let controls: Vec<Marker> = texts.controls().collect();
        for (marker, text) in &mut texts.0 {
            if !text.starts_with(MARK_OPEN) {
                let parts = controls.iter().filter(|part| PARTS.contains(*part));
                *text = parts.fold((*marker).to_owned(), |text, part| {
                    text.replace(part, &marked(part))
                });
            }
        }
        (texts, tokens)
    }

    /// The text of a marker.
    pub(super) fn text(&self, marker: Marker) -> &str {
        let found = self.0.iter().find(|(name, _)| *name == marker);
        found.map_or(marker, |(_, text)| text)
    }

    /// All markers.
    #[cfg(any(test, fuzzing))]
    pub(super) fn names(&self) -> impl Iterator<Item = Marker> {
        self.0.iter().map(|(marker, _)| *marker)
    }

    /// The markers that are control tokens. No reader gets to see one.
    pub(super) fn controls(&self) -> impl Iterator<Item = Marker> {
        self.0
            .iter()
            .filter(|(marker, text)| is_marked(marker, text))
            .map(|(marker, _)| *marker)
    }

    /// Returns the text without control tokens.
    pub(super) fn visible(&self, text: String) -> String {
        if !text.contains(MARK_OPEN) {
            return text;
        }
        let controls: Vec<Marker> = self.controls().collect();
        let mut shown = String::with_capacity(text.len());
        let mut rest = &text[..];
        while let Find::Marker { at, end, .. } = find(rest, &controls, self) {
            shown.push_str(&rest[..at]);
            rest = &rest[end..];
        }
        shown.push_str(rest);
        shown
    }
}

/// Whether a marker is a control token as a whole.
fn is_marked(marker: Marker, text: &str) -> bool {
    text.strip_prefix(MARK_OPEN)
        .and_then(|text| text.strip_suffix(MARK_CLOSE))
        == Some(marker)
}

/// A control token as the engine writes it.
fn marked(name: &str) -> String {
    format!("{MARK_OPEN}{name}{MARK_CLOSE}")
}

/// The control token of this name.
fn control_token(name: &str, vocabulary: &dyn Vocabulary) -> Option<Token> {
    if !vocabulary.has_text() {
        return None;
    }
    let [token] = vocabulary.tokenize(name, true)[..] else {
        return None;
    };
    let is_named = || vocabulary.name(token).as_deref() == Some(name);
    // An EOG token ends the output before its name could be written.
    let is_written = vocabulary.is_special(token) && !vocabulary.is_end(token);
    (is_written && is_named()).then_some(token)
}

/// Where the first marker of a text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Find {
    /// From `at` to `end`.
    Marker {
        at: usize,
        end: usize,
        marker: Marker,
    },
    /// None; but one may begin after so many bytes.
    None { safe: usize },
}

/// Finds the first of these markers, none of which may begin with an earlier one.
pub(super) fn find(text: &str, markers: &[Marker], texts: &MarkerTexts) -> Find {
    let bytes = text.as_bytes();
    for at in 0..bytes.len() {
        #[cfg(test)]
        super::work::add(1);
        for &marker in markers {
            let wanted = texts.text(marker).as_bytes();
            if wanted[0] != bytes[at] {
                continue;
            }
            let rest = &bytes[at..];
            if rest.starts_with(wanted) {
                let end = at + wanted.len();
                return Find::Marker { at, end, marker };
            }
            if wanted.starts_with(rest) {
                return Find::None { safe: at };
            }
        }
    }
    Find::None { safe: bytes.len() }
}

/// Where a marker begins that a text ends within; the length of the text if none does.
pub(super) fn begun_marker(text: &str, markers: &[Marker], texts: &MarkerTexts) -> usize {
    let begins = |marker: &Marker| {
        let wanted = texts.text(marker);
        let mut ends = (1..wanted.len()).rev();
        let longest = ends.find(|&at| wanted.is_char_boundary(at) && text.ends_with(&wanted[..at]));
        longest.unwrap_or_default()
    };
    text.len() - markers.iter().map(begins).max().unwrap_or_default()
}

/// Whether the last character of a text begins or ends the name of a control token other than the one that ends it, or
/// stands in what ends it.
pub(super) fn is_foreign_mark(c: char, text: &str, end: &str) -> bool {
    let is_mark = matches!(c, MARK_OPEN | MARK_CLOSE);
    // Up to each of the same marks in the end.
    let mut begun = end
        .match_indices(c)
        .map(|(at, _)| &end[..at + c.len_utf8()]);
    is_mark && !begun.any(|begun| text.ends_with(begun))
}

/// Matches one of several texts, character by character.
#[derive(Debug, Default)]
pub(super) struct Alternatives {
    seen: String,
}

/// The result of [`Alternatives::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matched {
    /// One may follow.
    Open,
    /// This one is complete.
    Whole(Marker),
    /// None of them.
    Nothing,
}

impl Alternatives {
    /// Takes the next character; white space before the marker is skipped.
    pub(super) fn push(&mut self, c: char, markers: &[Marker], texts: &MarkerTexts) -> Matched {
        if self.seen.is_empty() && c.is_ascii_whitespace() {
            return Matched::Open;
        }
        self.seen.push(c);
        let mut open = false;
        for &marker in markers {
            let wanted = texts.text(marker);
            if wanted == self.seen {
                self.seen.clear();
                return Matched::Whole(marker);
            }
            open |= wanted.starts_with(&self.seen);
        }
        if open {
            Matched::Open
        } else {
            Matched::Nothing
        }
    }

    /// Whether a marker has begun.
    pub(super) fn is_begun(&self) -> bool {
        !self.seen.is_empty()
    }
}
