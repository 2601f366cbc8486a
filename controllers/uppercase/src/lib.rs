//! Words in capitals only: a mask from a test of single bytes.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::prelude::*;

/// Allows capitals, with one space between words. Ends where the model wants to.
#[derive(Clone, Default)]
pub struct Uppercase {
    text: Vec<u8>,
}

impl Controller for Uppercase {
    fn step(&mut self, step: Step<'_>) -> Decision {
        if step.sampled == Some(eos_token()) {
            return Decision::Stop;
        }
        self.text.extend(trie().decode(step.tokens));
        // A token may contain several bytes, so a space is allowed by what is before it, not by the position.
        let before = self.text.last().copied().unwrap_or(b' ');
        let mut mask = trie().mask_of(before, |&before, byte| {
            (byte.is_ascii_uppercase() || byte == b' ' && before != b' ').then_some(byte)
        });
        if !self.text.is_empty() {
            mask.allow(eos_token());
        }
        mask.into()
    }
}

sapwood_guest::export!(Uppercase);

#[cfg(test)]
mod tests {
    use super::Uppercase;
    use sapwood_guest::testing::{End, Scenario, run};

    #[test]
    fn only_capitals_are_sampled() {
        assert_eq!(
            run::<Uppercase>("", "Say hello: ", "HELLO WORLD").texts(),
            ["HELLO WORLD"]
        );
        let run = Scenario::new("").prefers(["a b"]).run::<Uppercase>();
        assert_eq!(
            (run.texts(), &run.sequences[0].end),
            (vec!["A "], &End::Stop)
        );
    }

    #[test]
    fn spaces_stand_between_words_alone() {
        let run = Scenario::new("").prefers(["A  B"]).run::<Uppercase>();
        assert_eq!(run.texts(), ["A "]);
    }
}
