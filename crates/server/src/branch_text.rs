//! The text of the branches of a steered request, for faces that show what a controller does step by step.
//!
//! The first event of a fork repeats what it has in common with its parent (AI-933). These faces have sent that already,
//! and a fork begins there at the fork (AI-914, LM-973).

use std::collections::BTreeMap;

use sapwood_engine::api::{Sampled, Tokens};

/// How much text of each branch was sent.
#[derive(Debug, Default)]
pub(crate) struct BranchTexts(BTreeMap<u32, SentText>);

/// The part of a step's tokens that was not sent before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NewOutput<'t> {
    pub(crate) tokens: &'t [Sampled],
    pub(crate) text: &'t str,
}

#[derive(Clone, Debug, Default)]
struct SentText {
    /// In bytes.
    length: usize,
    /// The length after each token. Bounded by the context, as the tokens are.
    after: Vec<usize>,
}

impl BranchTexts {
    /// Takes the tokens of a step of this branch.
    pub(crate) fn take<'t>(&mut self, branch: u32, step: &'t Tokens) -> NewOutput<'t> {
        let mut text = &*step.text;
        let inherited = (step.inherited as usize).min(step.tokens.len());
        if let Some(parent) = step.fork_of {
            let parent = self.0.get(&parent);
            let common = parent.map(|parent| parent.up_to(inherited));
            let common = common.unwrap_or_default();
            // At a border of characters in any case: `split_at` panics elsewhere.
            let begin = text.floor_char_boundary(common.length);
            text = &text[begin..];
            self.0.insert(branch, common);
        }
        let sent = self.0.entry(branch).or_default();
        sent.withdraw(step.backtrack as usize, step.withdrawn as usize);
        let tokens = &step.tokens[inherited..];
        sent.append(tokens.len(), text.len());
        NewOutput { tokens, text }
    }
}

impl SentText {
    /// What was sent with the first `tokens`.
    fn up_to(&self, tokens: usize) -> Self {
        let after = &self.after[..tokens.min(self.after.len())];
        Self {
            length: after.last().copied().unwrap_or_default(),
            after: after.to_vec(),
        }
    }

    fn withdraw(&mut self, tokens: usize, bytes: usize) {
        let rest = self.after.len().saturating_sub(tokens);
        self.after.truncate(rest);
        self.length = self.length.saturating_sub(bytes);
        // Of two tokens of one step, the last one had the text of both.
        if let Some(last) = self.after.last_mut() {
            *last = self.length;
        }
    }

    /// The text of a step is that of its tokens together, so the last one has it.
    fn append(&mut self, tokens: usize, bytes: usize) {
        if let Some(others) = tokens.checked_sub(1) {
            self.after.resize(self.after.len() + others, self.length);
            self.after.push(self.length + bytes);
        }
        self.length += bytes;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A step that appends one token for each letter.
    pub(crate) fn step(text: &str) -> Tokens {
        let sampled = |byte: u8| Sampled {
            id: byte.into(),
            logprob: -0.5,
            rank: None,
            top: Vec::new(),
            special: false,
            forced: false,
        };
        Tokens {
            tokens: text.bytes().map(sampled).collect(),
            text: text.into(),
            ..Tokens::default()
        }
    }

    fn fork(of: u32, inherited: u32, text: &str) -> Tokens {
        Tokens {
            inherited,
            fork_of: Some(of),
            ..step(text)
        }
    }

    #[test]
    fn ai_914_the_text_of_a_fork_begins_at_the_fork() {
        let mut texts = BranchTexts::default();
        texts.take(0, &step("ab"));
        texts.take(0, &step("c"));
        // The parent has gone on since.
        texts.take(0, &step("d"));
        let forked = fork(0, 3, "abcX");
        let new = texts.take(1, &forked);
        assert_eq!((new.text, new.tokens.len()), ("X", 1));
        // A fork of a fork has what that one inherited.
        let forked = fork(1, 4, "abcXY");
        assert_eq!(texts.take(2, &forked).text, "Y");
        let forked = fork(1, 0, "Z");
        assert_eq!(texts.take(3, &forked).text, "Z");
        // Of an unknown parent nothing was sent.
        let forked = fork(9, 1, "ab");
        assert_eq!(texts.take(4, &forked).text, "ab");
    }

    #[test]
    fn ai_822_what_was_taken_back_is_not_in_common() {
        let mut texts = BranchTexts::default();
        texts.take(0, &step("abc"));
        let backtrack = Tokens {
            backtrack: 2,
            withdrawn: 2,
            ..step("xy")
        };
        assert_eq!(texts.take(0, &backtrack).text, "xy");
        let forked = fork(0, 3, "axyZ");
        assert_eq!(texts.take(1, &forked).text, "Z");
        // Nothing follows what was taken back.
        let backtrack = Tokens {
            backtrack: 2,
            withdrawn: 2,
            ..step("")
        };
        assert_eq!(texts.take(0, &backtrack).text, "");
        let forked = fork(0, 1, "aZ");
        assert_eq!(texts.take(2, &forked).text, "Z");
        // Counts beyond what there is change nothing else.
        let wild = Tokens {
            backtrack: 99,
            withdrawn: 99,
            inherited: 99,
            ..step("q")
        };
        assert_eq!(texts.take(0, &wild).tokens.len(), 0);
    }
}
