//! Replaces words while they are written: the argument is an object, `{"utilize": "use"}`.
//!
//! When a word is complete, the controller takes back its tokens and appends the replacement; the model goes on from
//! there and never sees the word.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::json::Json;
use sapwood_guest::prelude::*;

/// Watches the text of one sequence.
#[derive(Clone)]
pub struct Rewrite {
    words: Vec<(String, String)>,
    tokens: Vec<Token>,
    /// Bytes of the text that are good already.
    checked: usize,
    ended: bool,
}

impl Default for Rewrite {
    fn default() -> Self {
        let Json::Object(members) = arg() else {
            panic!("the argument must be an object: words and their replacements");
        };
        let replacement = |value: &Json| value.as_str().map(ToOwned::to_owned);
        let words = members
            .into_iter()
            .filter_map(|(word, value)| Some((word, replacement(&value)?)));
        Self {
            words: words.filter(|(word, _)| !word.is_empty()).collect(),
            tokens: Vec::new(),
            checked: 0,
            ended: false,
        }
    }
}

/// The first place from `start` on at which `word` stands as a word; one at the end counts only if the text has ended.
fn find_word(text: &[u8], start: usize, word: &[u8], ended: bool) -> Option<usize> {
    let is_letter = |at: usize| text.get(at).is_some_and(u8::is_ascii_alphanumeric);
    (start..text.len()).find(|&at| {
        let end = at + word.len();
        let is_whole =
            (at == 0 || !is_letter(at - 1)) && !is_letter(end) && (end < text.len() || ended);
        is_whole && text[at..].starts_with(word)
    })
}

impl Controller for Rewrite {
    fn step(&mut self, step: Step<'_>) -> Decision {
        let kept = self.tokens.len().saturating_sub(step.backtrack as usize);
        self.tokens.truncate(kept);
        self.tokens.extend_from_slice(step.tokens);
        if self.ended {
            return Decision::Stop;
        }
        self.ended = step.sampled == Some(eos_token());
        let trie = trie();
        let text = trie.decode(&self.tokens);
        let found = self.words.iter().find_map(|(word, replacement)| {
            Some((
                find_word(&text, self.checked, word.as_bytes(), self.ended)?,
                word,
                replacement,
            ))
        });
        let Some((at, word, replacement)) = found else {
            return if self.ended {
                Decision::Stop
            } else {
                Mask::all().into()
            };
        };
        // The first token that holds a byte of the word; it may begin before the word, and the last may end after it.
        let mut start = 0;
        let mut first = 0;
        while start + trie.decode(&self.tokens[first..=first]).len() <= at {
            start += trie.decode(&self.tokens[first..=first]).len();
            first += 1;
        }
        let rewritten = [
            &text[start..at],
            replacement.as_bytes(),
            &text[at + word.len()..],
        ]
        .concat();
        log!("{word} at {at}");
        // The replacement is not searched, so that it may contain the word.
        self.checked = at + replacement.len();
        Decision::Splice {
            backtrack: (self.tokens.len() - first) as u32,
            tokens: tokenize(rewritten),
        }
    }
}

sapwood_guest::export!(Rewrite);

#[cfg(test)]
mod tests {
    use super::Rewrite;
    use sapwood_guest::testing::{Scenario, run};

    #[test]
    fn words_are_replaced_as_soon_as_they_are_complete() {
        let words = r#"{"red": "blue", "the": "THE the"}"#;
        // The model goes on after as many bytes as there are, so replacements of another length would hide its text.
        let run = run::<Rewrite>(
            r#"{"red": "odd", "in": "at"}"#,
            "",
            "a red inner, in bred red",
        );
        assert_eq!(run.texts(), ["a odd inner, at bred odd"]);
        assert_eq!(run.sequences[0].logs, "red at 2\nin at 13\nred at 21\n");
        let run = Scenario::new("")
            .argument(words)
            .prefers([" the "])
            .run::<Rewrite>();
        assert_eq!(run.texts(), [" THE the "]);
    }

    #[test]
    fn other_text_stays() {
        assert_eq!(
            run::<Rewrite>("{}", "", "nothing to see").texts(),
            ["nothing to see"]
        );
    }
}
