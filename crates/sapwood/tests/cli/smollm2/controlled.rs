//! The example controllers as modules.

use std::thread;

use serde_json::{Value, json};

use super::SmolLm2;

const QUESTION: &str = "What is the capital of France? Answer in one short sentence.";

/// What the model's chat template writes before a message, without the control tokens.
const SYSTEM: &str = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face";

/// The parameters of a request with a controller.
fn by(controller: &str, arg: &str, temperature: f64) -> Value {
    json!({
        "controller": controller, "controller_arg": arg, "temperature": temperature, "seed": 3, "max_tokens": 120,
    })
}

/// AI-823
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_931_controllers_steer_smollm2() {
    let model = SmolLm2::start("smollm2-controlled");
    model.upload(&[
        "yes",
        "yesno",
        "choice",
        "except",
        "json-object",
        "quote",
        "minimal",
    ]);
    let forced = "  T\u{14d}ky\u{14d} \u{2013} na\u{ef}ve <|im_end|> \u{1f980}\n";
    assert_eq!(model.text("Repeat.", by("yes", forced, 2.0)), forced);
    let three = model.text("Count.", by("minimal", "", 2.0));
    let (one, rest) = three.split_at(three.len() / 3);
    assert!(!one.is_empty() && rest == one.repeat(2), "{three}");
    for temperature in [0.0, 2.0] {
        let answer = model.text("Is water wet?", by("yesno", "", temperature));
        assert!(answer == "yes" || answer == "no", "{answer}");
        let colours = r#"["red", "green", "grey-blue"]"#;
        let colour = model.text("A colour?", by("choice", colours, temperature));
        assert!(colours.contains(&format!("\"{colour}\"")), "{colour}");
        let except = r#"{"options": ["red", "green", "blue"], "letter": "b"}"#;
        let colour = model.text("The sky is", by("except", except, temperature));
        assert!(colour == "red" || colour == "green", "{colour}");
        let object = model.text("Describe her.", by("json-object", "", temperature));
        let object: Value = serde_json::from_str(&object).unwrap();
        assert!(
            object["name"].is_string() && object["age"].is_u64(),
            "{object}"
        );
        let sentence = "The cat sat on the mat, and the dog lay under the table.";
        let quote = model.text(sentence, by("quote", "", temperature));
        let inside = quote.strip_prefix('"').unwrap().strip_suffix('"').unwrap();
        let prompt = format!("{SYSTEM}\nuser\n{sentence}\nassistant\n");
        assert!(prompt.contains(inside) && inside.len() >= 8, "{quote}");
    }
}

/// AI-821, AI-933
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_821_forks_of_smollm2_write_a_list() {
    let model = SmolLm2::start("smollm2-forks");
    model.upload(&["list-of-five", "best-of-n"]);
    let answer = model.answer("Name five animals.", by("list-of-five", "", 1.0));
    let texts = strings(&answer["text_output"]);
    let lines: Vec<&str> = texts[0].lines().collect();
    assert_eq!((texts.len(), lines.len()), (5, 5), "{answer}");
    for (index, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("{}. ", index + 1)), "{answer}");
        let item = if index == 0 {
            line
        } else {
            texts[index].trim_end_matches('\n')
        };
        assert_eq!(item, *line, "{answer}");
        assert!(line.len() > 3, "{answer}");
    }
    let answer = model.answer("Say something.", by("best-of-n", "3", 1.0));
    let texts = strings(&answer["text_output"]);
    assert_eq!(texts.len(), 3, "{answer}");
    assert!(texts.iter().all(|text| text.ends_with('\n')), "{answer}");
}

fn strings(list: &Value) -> Vec<String> {
    let list = list.as_array().unwrap_or_else(|| panic!("{list}"));
    let text = |text: &Value| text.as_str().unwrap().to_owned();
    list.iter().map(text).collect()
}

/// A controller that allows everything sees the end that the model samples, whichever of its ends that is, and its text is
/// that of the model alone.
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_804_controllers_see_the_end_that_smollm2_writes() {
    let model = SmolLm2::start("smollm2-end-seen");
    model.upload(&["rewrite", "uppercase"]);
    let alone = model.answer(QUESTION, json!({"temperature": 0, "max_tokens": 120}));
    let watched = model.answer(QUESTION, by("rewrite", "{}", 0.0));
    assert_eq!(alone["finish_reason"], "stop", "{alone}");
    assert_eq!(watched["text_output"], alone["text_output"]);
    assert_eq!(watched["finish_reason"], "stop", "{watched}");
    // Where it wants to write something else, it may go on in capitals for ever.
    let text = model.text("Say hello.", by("uppercase", "", 0.0));
    let allowed = |byte: u8| byte.is_ascii_uppercase() || byte == b' ';
    assert!(text.bytes().all(allowed) && !text.is_empty(), "{text}");
}

/// AI-936
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_822_smollm2_goes_on_from_what_a_controller_put_in_the_place_of_its_words() {
    let model = SmolLm2::start("smollm2-rewrite");
    model.upload(&["rewrite"]);
    let alone = model.text(QUESTION, json!({"temperature": 0, "max_tokens": 120}));
    assert!(
        alone.contains("France") && alone.contains("Paris"),
        "{alone}"
    );
    let words = r#"{"France": "Gaul", "Paris": "Lut\u00e8ce"}"#;
    let rewritten = model.answer(QUESTION, by("rewrite", words, 0.0));
    let text = rewritten["text_output"].as_str().unwrap();
    assert!(
        !text.contains("France") && !text.contains("Paris"),
        "{rewritten}"
    );
    assert!(
        text.contains("Gaul") && text.starts_with("The capital of Gaul"),
        "{rewritten}"
    );
    assert_eq!(rewritten["finish_reason"], "stop", "{rewritten}");
}

#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn ai_812_controllers_beside_a_request_do_not_change_its_text() {
    let model = SmolLm2::start("smollm2-beside");
    model.upload(&["list-of-five", "rewrite"]);
    let alone = || model.text(QUESTION, json!({"temperature": 0, "max_tokens": 24}));
    let expected = alone();
    thread::scope(|scope| {
        let list = scope.spawn(|| model.answer("Name five cities.", by("list-of-five", "", 1.0)));
        let words = r#"{"the": "a", "is": "was"}"#;
        let rewrite = scope.spawn(|| model.answer("Tell a story.", by("rewrite", words, 0.8)));
        for _ in 0..3 {
            assert_eq!(alone(), expected);
        }
        let list = list.join().unwrap();
        assert_eq!(
            strings(&list["text_output"])[0].lines().count(),
            5,
            "{list}"
        );
        let rewritten = rewrite.join().unwrap();
        let text = rewritten["text_output"].as_str().unwrap();
        assert!(!text.is_empty() && !text.contains(" the "), "{rewritten}");
    });
}
