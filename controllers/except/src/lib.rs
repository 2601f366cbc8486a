//! One of several texts, but none that begins with a letter: `{"options": ["red", "green"], "letter": "r"}`.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::json::Json;
use sapwood_guest::prelude::*;

/// Allows the texts of its argument, but at the start no token with the letter.
#[derive(Clone)]
pub struct Except {
    options: Grammar,
    /// At the start: every token that does not begin with the letter.
    others: Option<TokenSet>,
}

impl Default for Except {
    fn default() -> Self {
        let argument: Json = arg();
        let options = argument
            .get("options")
            .map(Json::elements)
            .unwrap_or_default();
        let letter = argument
            .get("letter")
            .and_then(Json::as_str)
            .unwrap_or_default();
        assert!(!letter.is_empty(), "the argument must have a letter");
        let texts: Vec<String> = options
            .iter()
            .filter_map(Json::as_str)
            .map(quoted)
            .collect();
        // A panic here fails the request before its first token, with this text.
        let options = Grammar::new("options", format!("[{}]", texts.join(",")));
        Self {
            options: options.unwrap_or_else(|error| panic!("{error}")),
            others: Some(TokenSet::prefix(letter).not()),
        }
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

impl Controller for Except {
    fn step(&mut self, step: Step<'_>) -> Decision {
        if !self.options.follow(&step) {
            return Decision::Stop;
        }
        match self.others.take() {
            Some(others) => self.options.allowed().and(&others).into(),
            None => self.options.decide(),
        }
    }
}

sapwood_guest::export!(Except);

#[cfg(test)]
mod tests {
    use super::Except;
    use sapwood_guest::testing::{End, run};

    #[test]
    fn the_letter_is_avoided() {
        let argument = r#"{"options": ["red", "green", "say \"blue\""], "letter": "r"}"#;
        assert_eq!(run::<Except>(argument, "", "green").texts(), ["green"]);
        assert_eq!(run::<Except>(argument, "", "red").texts(), ["green"]);
        assert_eq!(run::<Except>(argument, "", "say").texts(), ["say \"blue\""]);
    }

    #[test]
    fn an_argument_without_texts_fails_the_request() {
        for (argument, why) in [("{}", "a letter"), (r#"{"letter": "r"}"#, "options")] {
            let run = run::<Except>(argument, "", "");
            assert!(
                matches!(&run.sequences[0].end, End::Failed(text) if text.contains(why)),
                "{argument}"
            );
        }
    }
}
