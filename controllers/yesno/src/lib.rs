//! "yes" or "no": the model chooses, and can write nothing else.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::prelude::*;

/// Follows a pattern; the pattern decides everything.
#[derive(Clone)]
pub struct YesNo(Matcher<Pattern>);

impl Default for YesNo {
    fn default() -> Self {
        Self(Matcher::new(Pattern::new().one_of(["yes", "no"])))
    }
}

impl Controller for YesNo {
    fn step(&mut self, step: Step<'_>) -> Decision {
        if !self.0.follow(&step) {
            return Decision::Stop;
        }
        self.0.decide()
    }
}

sapwood_guest::export!(YesNo);

#[cfg(test)]
mod tests {
    use super::YesNo;
    use sapwood_guest::testing::run;

    #[test]
    fn the_model_chooses_between_two_answers() {
        assert_eq!(
            run::<YesNo>("", "Is water wet? ", "yes, it is").texts(),
            ["yes"]
        );
        assert_eq!(run::<YesNo>("", "Is water dry? ", "no way").texts(), ["no"]);
        assert_eq!(run::<YesNo>("", "Is water? ", "maybe").texts(), ["no"]);
    }
}
