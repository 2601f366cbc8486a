//! [`PromptLookup`]: drafts the next tokens of a sequence by looking up where its last tokens occurred before, and
//! proposing what followed there (prompt lookup, or n-gram speculation).
//!
//! Answers that edit code, summarise or fill in a form repeat long parts of their prompt. A lookup costs a few
//! comparisons and no model.

use sapwood_proto::steer::Token;

use crate::ranking::mix;

/// Lengths of the matches that are looked up, longest first. A single common token says too little.
const MATCHES: [usize; 2] = [6, 3];

/// Tokens that one call adds to the index, so that a long prompt does not delay the other sequences of a step.
const INDEXED_MAX: usize = 4_096;

/// The sizes of a table, in entries of 4 bytes. A table that is full forgets the oldest matches.
const TABLE_MIN: usize = 1 << 10;
const TABLE_MAX: usize = 1 << 16;

/// Where the n-grams of one sequence occurred last. Its memory is fixed, and each token costs a constant time whatever the
/// tokens are: an entry is one place, and a collision replaces it.
#[derive(Debug)]
pub(crate) struct PromptLookup {
    /// At the hash of an n-gram, the index of the token that followed it; 0: none.
    table: Box<[u32]>,
    /// The n-grams that end before this token are in the table.
    indexed: usize,
    /// What the last draft was copied from, if it has been right so far.
    source: Option<DraftSource>,
}

/// Two places of a sequence that continue alike.
#[derive(Clone, Copy, Debug)]
struct DraftSource {
    /// The index of the token that is expected at `at`.
    from: usize,
    at: usize,
}

impl PromptLookup {
    /// Creates an index for a sequence that will have about so many tokens.
    pub(crate) fn new(tokens: usize) -> Self {
        let entries = tokens.saturating_mul(2 * MATCHES.len());
        let entries = entries.clamp(TABLE_MIN, TABLE_MAX).next_power_of_two();
        Self {
            table: vec![0; entries].into(),
            indexed: 0,
            source: None,
        }
    }

    /// Adds to `draft` at most `max` tokens that may follow `tokens`, which are those of the last call and more.
    pub(crate) fn draft(&mut self, tokens: &[Token], max: usize, draft: &mut Vec<Token>) {
        self.index(tokens);
        // A source that was right until now is a longer match than any that is looked up.
        self.source = self.followed(tokens).or_else(|| self.look_up(tokens));
        let Some(DraftSource { from, at }) = self.source else {
            return;
        };
        let begin = draft.len();
        for index in from..from + max {
            // Behind the known tokens come those of the draft itself: the text repeats itself.
            let drafted = |index: usize| draft.get(begin + index - at).copied();
            let token = tokens.get(index).copied().or_else(|| drafted(index));
            draft.extend(token);
        }
    }

    /// Adds the n-grams of new tokens to the table; not yet that at the end, which nothing follows.
    fn index(&mut self, tokens: &[Token]) {
        let until = tokens.len().saturating_sub(1);
        for end in (self.indexed..until).take(INDEXED_MAX) {
            self.indexed = end + 1;
            let Ok(next) = u32::try_from(end + 1) else {
                return;
            };
            for length in MATCHES {
                if let Some(entry) = self.entry(&tokens[..=end], length) {
                    self.table[entry] = next;
                }
            }
        }
    }

    /// Returns where the source goes on, if the tokens since the last draft were those of the source.
    fn followed(&self, tokens: &[Token]) -> Option<DraftSource> {
        let DraftSource { from, at } = self.source?;
        let since = tokens.get(at..)?;
        // `from` is before `at`, so there are as many tokens behind it.
        let is_same =
            since.len() <= INDEXED_MAX && since == tokens.get(from..from + since.len())?;
        is_same.then_some(DraftSource {
            from: from + since.len(),
            at: tokens.len(),
        })
    }

    /// Returns what followed the longest match of the last tokens.
    fn look_up(&self, tokens: &[Token]) -> Option<DraftSource> {
        let at = tokens.len();
        MATCHES.into_iter().find_map(|length| {
            let from = self.table[self.entry(tokens, length)?] as usize;
            let before = from.checked_sub(length)?;
            // Compared: other n-grams may have the same entry.
            let is_match = tokens[before..from] == tokens[at - length..];
            is_match.then_some(DraftSource { from, at })
        })
    }

    /// Returns the entry of the last `length` tokens.
    fn entry(&self, tokens: &[Token], length: usize) -> Option<usize> {
        let begin = tokens.len().checked_sub(length)?;
        let hash = tokens[begin..]
            .iter()
            .fold(length as u64, |hash, &token| mix(hash ^ u64::from(token)));
        // The length of the table is a power of two.
        Some(hash as usize & (self.table.len() - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<Token> {
        text.bytes().map(Token::from).collect()
    }

    /// Drafts after a text, as text.
    fn drafted(lookup: &mut PromptLookup, text: &str, max: usize) -> String {
        let mut draft = Vec::new();
        lookup.draft(&tokens(text), max, &mut draft);
        draft
            .iter()
            .map(|&token| char::from(u8::try_from(token).unwrap()))
            .collect()
    }

    #[test]
    fn what_followed_the_last_tokens_is_proposed() {
        for (text, max, draft) in [
            ("", 4, ""),
            ("a", 4, ""),
            ("abcd", 4, ""),
            ("abcdabc", 1, "d"),
            ("abcdabc", 4, "dabc"),
            // Text that repeats itself goes on so.
            ("xyzxyz", 7, "xyzxyzx"),
            ("aaaa", 5, "aaaaa"),
            // Two common tokens are too few.
            ("abcdxbc", 4, ""),
            // The last place counts, unless another one has more in common.
            ("abc1abc2abc", 1, "2"),
            ("012abcX_9abcY_012abc", 1, "X"),
            ("abcdabc", 0, ""),
        ] {
            let mut lookup = PromptLookup::new(text.len());
            assert_eq!(drafted(&mut lookup, text, max), draft, "{text}");
        }
    }

    #[test]
    fn a_place_that_was_right_is_followed() {
        let mut lookup = PromptLookup::new(40);
        let before = "012abcdef_9abcxyz_012";
        assert_eq!(drafted(&mut lookup, &format!("{before}abc"), 2), "de");
        // By the last tokens alone the other place would be found.
        assert_eq!(drafted(&mut lookup, &format!("{before}abcde"), 2), "f_");
        assert_eq!(drafted(&mut lookup, &format!("{before}abcdexyz"), 1), "_");
    }

    /// Each token costs the same whatever the text is, and no text takes more memory.
    #[test]
    fn long_texts_are_indexed_in_parts_and_bounded() {
        let mut lookup = PromptLookup::new(usize::MAX);
        assert_eq!(lookup.table.len(), TABLE_MAX);
        let mut text: Vec<Token> = (0..3 * INDEXED_MAX as Token).collect();
        let repeated = text[2 * INDEXED_MAX..2 * INDEXED_MAX + 8].to_vec();
        text.extend(&repeated);
        let mut draft = Vec::new();
        for part in 1..4 {
            lookup.draft(&text, 2, &mut draft);
            assert_eq!(lookup.indexed, part * INDEXED_MAX);
        }
        assert_eq!(draft, text[2 * INDEXED_MAX + 8..][..2]);
        assert_eq!(PromptLookup::new(0).table.len(), TABLE_MIN);
    }
}
