//! A quotation from the prompt: what stands between the quotation marks occurs there, letter for letter.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::prelude::*;

/// Shorter pieces prove nothing.
const LEN_MIN: u32 = 8;

/// The quotation so far.
#[derive(Clone, Default)]
pub struct Quote {
    source: Option<Matcher<Substring>>,
    opened: bool,
    closed: bool,
}

impl Controller for Quote {
    fn init(&mut self, prompt: &[Token]) -> Init {
        self.source = Some(Matcher::new(Substring::new(trie().decode(prompt), LEN_MIN)));
        Init::default()
    }

    fn step(&mut self, step: Step<'_>) -> Decision {
        let mark = tokenize("\"");
        let Some(source) = self.source.as_mut().filter(|_| !self.closed) else {
            return Decision::Stop;
        };
        if !self.opened {
            self.opened = true;
            return Decision::fast_forward(mark);
        }
        // What the first step appended is the mark, which is no part of the quotation.
        if step.sampled.is_some() && step.tokens != mark && !source.follow(&step) {
            return Decision::Stop;
        }
        if step.sampled.is_some() && step.tokens == mark {
            return Decision::Stop;
        }
        let mut mask = source.mask();
        mask.forbid(eos_token());
        if source.is_complete() {
            if mask.is_empty() {
                // The prompt ends here.
                self.closed = true;
                return Decision::fast_forward(mark);
            }
            mask.allow(mark[0]);
        }
        mask.into()
    }
}

sapwood_guest::export!(Quote);

#[cfg(test)]
mod tests {
    use super::Quote;
    use sapwood_guest::testing::run;

    const PROMPT: &str = "The cat sat on the mat. What sat?";

    #[test]
    fn the_quotation_is_in_the_prompt() {
        assert_eq!(
            run::<Quote>("", PROMPT, "\"cat sat on\" and so on").texts(),
            ["\"cat sat on\""]
        );
    }

    #[test]
    fn other_words_of_the_model_are_not_sampled() {
        for preferred in ["\"the dog sat\"", "\"\"", "\"What sat? What?", "nothing"] {
            let run = run::<Quote>("", PROMPT, preferred);
            let text = run.texts()[0].to_owned();
            let quotation = text.strip_prefix('"').unwrap().strip_suffix('"').unwrap();
            assert!(PROMPT.contains(quotation) && quotation.len() >= 8, "{text}");
        }
    }
}
