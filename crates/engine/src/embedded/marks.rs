//! Finds special tokens in a text, at which the text is split before llama.cpp tokenises it.
//!
//! llama.cpp searches for each token of a fixed text (control tokens and added tokens) in each part that it has already
//! found, and each search runs to the end of the whole text. The time is quadratic in the number of matches: 20,000
//! turns of one letter took minutes. llama.cpp splits a text at these tokens anyway, so splitting there first does not
//! change the result.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

/// The minimum of bytes that are passed to llama.cpp at once, if the text has a border.
const PART_BYTES: usize = 4096;

/// Finds tokens of a fixed text.
#[derive(Debug)]
pub(super) struct MarkFinder {
    finder: Option<AhoCorasick>,
    /// For each token, whether the text before it stays unchanged: some tokens include the spaces before them.
    borders: Vec<bool>,
}

impl MarkFinder {
    /// Creates a finder of these texts, each with whether it includes the spaces before it.
    pub(super) fn new(texts: impl IntoIterator<Item = (String, bool)>) -> Self {
        let texts = texts.into_iter().filter(|(text, _)| !text.is_empty());
        let (texts, takes_left): (Vec<_>, Vec<_>) = texts.unzip();
        let mut finder = AhoCorasick::builder();
        let finder = finder.match_kind(MatchKind::Standard).build(texts);
        if let Err(why) = &finder {
            tracing::warn!(%why, "special tokens cannot be searched for: prompts of many turns will be slow to tokenise");
        }
        Self {
            finder: finder.ok(),
            borders: takes_left.into_iter().map(|takes| !takes).collect(),
        }
    }

    /// Splits a text into parts that give the same tokens one by one as the whole text does. Usually there is one part;
    /// a part without such tokens may have any length.
    pub(super) fn parts<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut parts = Vec::new();
        let mut from = 0;
        if text.len() > PART_BYTES {
            for at in self.borders(text) {
                // A mark consists of whole characters, but a damaged file may contain anything.
                if at - from >= PART_BYTES && text.is_char_boundary(at) {
                    parts.push(&text[from..at]);
                    from = at;
                }
            }
        }
        if from < text.len() {
            parts.push(&text[from..]);
        }
        parts
    }

    /// Returns where a mark begins that no other mark overlaps, except within it. Which of several overlapping marks is
    /// matched depends on all of them, so a cut there might change the match.
    fn borders(&self, text: &str) -> Vec<usize> {
        let Some(finder) = &self.finder else {
            return Vec::new();
        };
        let mut found: Vec<Range<usize>> = Vec::new();
        for hit in finder.find_overlapping_iter(text) {
            let mut hit = hit.range();
            // Hits are ordered by their ends; overlapping ones are merged into one range.
            while let Some(last) = found.pop_if(|last| last.end > hit.start) {
                hit = last.start.min(hit.start)..last.end.max(hit.end);
            }
            found.push(hit);
        }
        // If a mark is as long as its whole group, it is the longest mark and therefore the one that is matched.
        let whole = |group: &Range<usize>| {
            let mut hits = finder.find_overlapping_iter(&text.as_bytes()[group.clone()]);
            hits.any(|hit| hit.range() == (0..group.len()) && self.borders[hit.pattern()])
        };
        found
            .into_iter()
            .filter(whole)
            .map(|group| group.start)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(texts: &[&str]) -> MarkFinder {
        MarkFinder::new(
            texts
                .iter()
                .map(|text| ((*text).to_owned(), *text == "<mask>")),
        )
    }

    #[test]
    fn borders_are_at_marks_that_no_other_mark_overlaps() {
        let turns = marks(&["<s>", "</s>", "<start>"]);
        assert_eq!(turns.borders("a<s>b</s><start>"), [1, 5, 9]);
        let overlapping = marks(&["ab", "bcd", "\n", "\n\n"]);
        assert_eq!(overlapping.borders("xabcd"), [0; 0]);
        assert_eq!(overlapping.borders("xabx\n\nx"), [1, 4]);
        assert_eq!(marks(&[]).borders("abc"), [0; 0]);
        assert_eq!(marks(&["<mask>", "<s>"]).borders("a <mask> b <s>"), [11]);
    }

    #[test]
    fn parts_concatenate_to_the_text_and_are_short() {
        let turns = marks(&["<|im_start|>", "<|im_end|>"]);
        let text = "<|im_start|>user\na<|im_end|>\n".repeat(1000);
        let parts = turns.parts(&text);
        assert_eq!(parts.concat(), text);
        assert!(parts.len() > 5 && parts.iter().all(|part| part.len() < 2 * PART_BYTES));
        assert_eq!(turns.parts(""), [""; 0]);
        let plain = "word ".repeat(5000);
        assert_eq!(turns.parts(&plain), [&plain]);
    }
}
