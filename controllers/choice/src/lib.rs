//! One of the texts in the argument, a JSON list: `["red", "green", "blue"]`.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::json::Json;
use sapwood_guest::prelude::*;

/// Allows the texts of its argument.
#[derive(Clone)]
pub struct Choice(Matcher<Pattern>);

impl Default for Choice {
    fn default() -> Self {
        let argument: Json = arg();
        let texts: Option<Vec<&str>> = argument.elements().iter().map(Json::as_str).collect();
        let texts = texts.filter(|texts| !texts.is_empty());
        // A panic here fails the request before its first token, with this text.
        let texts = texts.unwrap_or_else(|| panic!("the argument must be a list of strings"));
        Self(Matcher::new(Pattern::new().one_of(texts)))
    }
}

impl Controller for Choice {
    fn step(&mut self, step: Step<'_>) -> Decision {
        if !self.0.follow(&step) {
            return Decision::Stop;
        }
        self.0.decide()
    }
}

sapwood_guest::export!(Choice);

#[cfg(test)]
mod tests {
    use super::Choice;
    use sapwood_guest::testing::{End, run};

    #[test]
    fn the_model_chooses_a_text() {
        let colours = r#"["red", "green", "grey-blue"]"#;
        assert_eq!(
            run::<Choice>(colours, "Leaves are ", "green and").texts(),
            ["green"]
        );
        // After "gre" only a letter decides; the rest is appended without the model.
        assert_eq!(
            run::<Choice>(colours, "The sky is ", "grey, often").texts(),
            ["grey-blue"]
        );
    }

    #[test]
    fn an_argument_that_is_no_list_of_texts_fails_the_request() {
        for argument in ["", "[]", "[1]", "{}"] {
            let run = run::<Choice>(argument, "", "");
            assert!(
                matches!(&run.sequences[0].end, End::Failed(why) if why.contains("argument")),
                "{argument}"
            );
        }
    }
}
