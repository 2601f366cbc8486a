//! Finds special tokens in a text, at which it is split before llama.cpp tokenises it.
//!
//! llama.cpp looks for each token of a fixed text (control tokens, and those that a model's maker added) in each part that it has
//! already found, and each search runs to the end of the whole text: the time grows with the square of their number, 20,000
//! turns of one letter took minutes. It cuts a text at these tokens anyway, so that cutting there first changes nothing.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

/// Bytes that are given to llama.cpp at once, where there is a border.
const PART_BYTES: usize = 4096;

/// Finds tokens of a fixed text.
#[derive(Debug)]
pub(super) struct MarkFinder {
    finder: Option<AhoCorasick>,
    /// Of each, whether what stands before it stays as it is: some tokens take the spaces before them.
    borders: Vec<bool>,
}

impl MarkFinder {
    /// Of texts, each with whether it takes the spaces before it.
    pub(super) fn new(texts: impl IntoIterator<Item = (String, bool)>) -> Self {
        let texts = texts.into_iter().filter(|(text, _)| !text.is_empty());
        let (texts, takes_left): (Vec<_>, Vec<_>) = texts.unzip();
        let mut finder = AhoCorasick::builder();
        let finder = finder.match_kind(MatchKind::Standard).build(texts);
        if let Err(why) = &finder {
            tracing::warn!(%why, "prompts of many turns will be slow to tokenise");
        }
        Self {
            finder: finder.ok(),
            borders: takes_left.into_iter().map(|takes| !takes).collect(),
        }
    }

    /// The text in parts that give the same tokens one by one as the whole does. Mostly one; a part without such tokens may
    /// have any length.
    pub(super) fn parts<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut parts = Vec::new();
        let mut from = 0;
        if text.len() > PART_BYTES {
            for at in self.borders(text) {
                // A mark is whole characters, but a file may say anything.
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

    /// Where a mark begins that no other overlaps but within it: which of several wins there depends on all marks, so that a
    /// cut might let another one win.
    fn borders(&self, text: &str) -> Vec<usize> {
        let Some(finder) = &self.finder else {
            return Vec::new();
        };
        let mut found: Vec<Range<usize>> = Vec::new();
        for hit in finder.find_overlapping_iter(text) {
            let mut hit = hit.range();
            // Hits come by their ends; what overlaps is kept as one, from its first byte to its last.
            while let Some(last) = found.pop_if(|last| last.end > hit.start) {
                hit = last.start.min(hit.start)..last.end.max(hit.end);
            }
            found.push(hit);
        }
        // A group whose whole length is a mark begins where that mark does, and no other can win there: it is the longest.
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
    fn borders_stand_where_one_mark_wins_whatever_stands_around() {
        let turns = marks(&["<s>", "</s>", "<start>"]);
        assert_eq!(turns.borders("a<s>b</s><start>"), [1, 5, 9]);
        let overlapping = marks(&["ab", "bcd", "\n", "\n\n"]);
        assert_eq!(overlapping.borders("xabcd"), [0; 0]);
        assert_eq!(overlapping.borders("xabx\n\nx"), [1, 4]);
        assert_eq!(marks(&[]).borders("abc"), [0; 0]);
        assert_eq!(marks(&["<mask>", "<s>"]).borders("a <mask> b <s>"), [11]);
    }

    #[test]
    fn parts_are_the_text_and_no_longer_than_they_have_to_be() {
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
