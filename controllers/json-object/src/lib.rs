//! A JSON object with fixed members: a string, a number and a choice.

#![cfg_attr(target_arch = "wasm32", no_std)]

use sapwood_guest::prelude::*;

/// Allows `{"name":"…","age":…,"colour":"…"}`. What can be only one text is appended without the model.
#[derive(Clone)]
pub struct JsonObject(Matcher<Pattern>);

impl Default for JsonObject {
    fn default() -> Self {
        let object = Pattern::new()
            .text(r#"{"name":""#)
            .some_of(ByteClass::JSON_TEXT, 1..=40)
            .text(r#"","age":"#)
            .some_of(ByteClass::range(b'1'..=b'9'), 1..=1)
            .some_of(ByteClass::DIGIT, 0..=2)
            .text(r#","colour":""#)
            .one_of(["red", "green", "blue"])
            .text(r#""}"#);
        Self(Matcher::new(object))
    }
}

impl Controller for JsonObject {
    fn step(&mut self, step: Step<'_>) -> Decision {
        if !self.0.follow(&step) {
            return Decision::Stop;
        }
        self.0.decide()
    }
}

sapwood_guest::export!(JsonObject);

#[cfg(test)]
mod tests {
    use super::JsonObject;
    use sapwood_guest::json::Json;
    use sapwood_guest::testing::run;

    #[test]
    fn the_answer_is_the_object() {
        let preferred = r#"{"name":"Ann \"A\" Lee","age":042,"colour":"pink"}"#;
        let run = run::<JsonObject>("", "Describe her: ", preferred);
        let object = Json::parse(run.texts()[0]).unwrap();
        assert!(
            object
                .get("name")
                .unwrap()
                .as_str()
                .unwrap()
                .starts_with("Ann ")
        );
        assert!(matches!(object.get("age").unwrap().as_u64(), Some(1..=999)));
        let colour = object.get("colour").unwrap().as_str().unwrap();
        assert!(["red", "green", "blue"].contains(&colour));
    }

    #[test]
    fn what_the_model_prefers_stays_where_it_is_allowed() {
        let preferred = r#"{"name":"Bo","age":20,"colour":"green"}"#;
        assert_eq!(
            run::<JsonObject>("", "Describe him: ", preferred).texts(),
            [preferred]
        );
    }
}
