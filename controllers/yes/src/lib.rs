//! Answers a fixed text: the argument, or "yes". The smallest useful controller.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::prelude::*;

/// Appends its text and stops.
#[derive(Clone, Default)]
pub struct Yes {
    done: bool,
}

impl Controller for Yes {
    fn step(&mut self, _step: Step<'_>) -> Decision {
        if self.done {
            return Decision::Stop;
        }
        self.done = true;
        let text: String = arg();
        Decision::fast_forward(tokenize(if text.is_empty() { "yes" } else { &text }))
    }
}

sapwood_guest::export!(Yes);

#[cfg(test)]
mod tests {
    use super::Yes;
    use sapwood_guest::testing::run;

    #[test]
    fn it_answers_its_text_whatever_the_model_prefers() {
        assert_eq!(run::<Yes>("", "Is water wet? ", "no").texts(), ["yes"]);
        assert_eq!(
            run::<Yes>("maybe", "Is water wet? ", "no").texts(),
            ["maybe"]
        );
    }
}
