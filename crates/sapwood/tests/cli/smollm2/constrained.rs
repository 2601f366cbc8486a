//! Native constraints: whatever the sampler draws, the text has its form.

use std::thread;

use serde_json::{Value, json};

use super::SmolLm2;

/// High enough that the model alone would write anything but the form.
const TEMPERATURES: [f64; 2] = [1.0, 2.0];

/// Asks for each seed and temperature at once, so that the sequences share batches.
fn for_each_draw(check: impl Fn(Value) + Sync) {
    thread::scope(|scope| {
        for seed in 1..=2 {
            for temperature in TEMPERATURES {
                let check = &check;
                scope.spawn(move || {
                    check(json!({
                        "seed": seed, "temperature": temperature, "max_tokens": 200,
                    }));
                });
            }
        }
    });
}

/// The parameters of a draw, with others.
fn with(draw: &Value, parameters: Value) -> Value {
    let mut all = draw.clone();
    let more = parameters.as_object().unwrap().clone();
    all.as_object_mut().unwrap().extend(more);
    all
}

fn is_person(text: &str) {
    let person: Value = serde_json::from_str(text).unwrap_or_else(|why| panic!("{why}: {text}"));
    assert_eq!(person.as_object().unwrap().len(), 4, "{text}");
    let letters = person["name"].as_str().unwrap().chars().count();
    assert!((1..=12).contains(&letters), "{text}");
    assert!(
        (18..=120).contains(&person["age"].as_u64().unwrap()),
        "{text}"
    );
    assert!(person["married"].is_boolean(), "{text}");
    let pets = person["pets"].as_array().unwrap();
    assert!(pets.len() <= 2, "{text}");
    assert!(
        pets.iter().all(|pet| pet == "cat" || pet == "dog"),
        "{text}"
    );
}

#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_840_smollm2_writes_what_a_constraint_allows_whatever_the_sampler() {
    let model = SmolLm2::start("smollm2-constrained");
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age", "married", "pets"],
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 18, "maximum": 120},
            "married": {"type": "boolean"},
            "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
        },
    });
    let source = "The sky over the bay is blue, and the grass on the hill is green.";
    let roll = "root ::= [1-6] \"d\" (\"4\" | \"20\") (\" + \" [1-9])?";
    for_each_draw(|draw| {
        let text = |message: &str, parameters: Value| model.text(message, with(&draw, parameters));
        let steered = |message: &str, kind: &str, arg: Value| {
            text(message, json!({"controller": kind, "controller_arg": arg}))
        };
        is_person(&text("Describe a person.", json!({"json_schema": schema})));

        let plate = text("A number plate?", json!({"regex": "[A-C]{2}-[0-9]{3}"}));
        let (letters, digits) = plate.split_once('-').unwrap();
        assert!(letters.len() == 2 && digits.len() == 3, "{plate}");
        assert!(
            letters.bytes().all(|byte| b"ABC".contains(&byte)),
            "{plate}"
        );
        assert!(digits.bytes().all(|byte| byte.is_ascii_digit()), "{plate}");

        let rolled = text("Roll a die.", json!({"grammar": roll}));
        let (count, rest) = rolled.split_once('d').unwrap();
        assert!(matches!(count.parse(), Ok(1..=6)), "{rolled}");
        let (sides, plus) = rest.split_once(" + ").unwrap_or((rest, "1"));
        assert!(sides == "4" || sides == "20", "{rolled}");
        assert!(matches!(plus.parse(), Ok(1..=9)), "{rolled}");

        let lark = "start: /[1-6]/ (\", \" /[1-6]/){2}";
        let rolls = steered("Roll three dice.", "sapwood:lark", lark.into());
        assert_eq!(rolls.split(", ").count(), 3, "{rolls}");
        assert!(
            rolls
                .split(", ")
                .all(|roll| matches!(roll.parse(), Ok(1..=6))),
            "{rolls}"
        );

        let cities = ["Tokyo", "Toronto", "S\u{e3}o Paulo"];
        let city = steered("A city?", "sapwood:options", json!(cities));
        assert!(cities.contains(&&*city), "{city}");

        let piece = steered(source, "sapwood:substring", source.into());
        assert!(!piece.is_empty() && source.contains(&piece), "{piece}");
    });
}

/// Some of these characters have no token and are written byte by byte.
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_840_smollm2_writes_characters_of_several_tokens_whole() {
    let model = SmolLm2::start("smollm2-characters");
    for_each_draw(|draw| {
        for (class, range) in [
            ("[\u{4e00}-\u{4fff}]{4}", '\u{4e00}'..='\u{4fff}'),
            ("[\u{1f980}-\u{1f98f}]{4}", '\u{1f980}'..='\u{1f98f}'),
            ("[\u{e0}-\u{ff}]{4}", '\u{e0}'..='\u{ff}'),
        ] {
            let pieces = model.pieces("Go on.", with(&draw, json!({"regex": class})));
            let text = pieces.concat();
            assert_eq!(text.chars().count(), 4, "{class}: {pieces:?}");
            assert!(
                text.chars().all(|c| range.contains(&c)),
                "{class}: {pieces:?}"
            );
        }
        let any = model.text("Go on.", with(&draw, json!({"regex": "(?s:.{8})"})));
        assert_eq!(any.chars().count(), 8, "{any:?}");
        assert!(!any.contains('\u{fffd}'), "{any:?}");
    });
}

/// A text may end where the constraint is complete, and the model ends it with its own token.
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_842_smollm2_ends_an_open_constraint_where_it_wants_to() {
    let model = SmolLm2::start("smollm2-ends");
    let question = "What is the capital of France? Answer in one short sentence.";
    let free = model.answer(question, json!({"temperature": 0, "max_tokens": 60}));
    let any = json!({"temperature": 0, "max_tokens": 60, "regex": "(?s:.*)"});
    let constrained = model.answer(question, any);
    assert_eq!(free["finish_reason"], "stop", "{free}");
    assert_eq!(constrained["text_output"], free["text_output"]);
    assert_eq!(constrained["finish_reason"], "stop", "{constrained}");
    let text = free["text_output"].as_str().unwrap();
    assert!(text.contains("Paris") && !text.contains("<|"), "{text}");
}
