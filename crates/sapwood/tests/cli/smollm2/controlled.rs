//! The example controllers as modules.

use serde_json::{Value, json};

use super::SmolLm2;

const QUESTION: &str = "What is the capital of France? Answer in one short sentence.";

/// The parameters of a request with a controller.
fn by(controller: &str, arg: &str, temperature: f64) -> Value {
    json!({
        "controller": controller, "controller_arg": arg, "temperature": temperature, "seed": 3, "max_tokens": 120,
    })
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
