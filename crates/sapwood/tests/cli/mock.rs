//! `sapwood mock check`, and signatures in configuration files.

use crate::process::{folder, run};

#[test]
fn tr_1108_a_file_of_scripted_models_is_checked_and_summarised() {
    let here = folder("mock-told");
    let foreign = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/foreign/triton_http/sapwood.toml"
    );
    let ended = run(&here, &["mock", "check", foreign]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(
        ended
            .out
            .contains("parrot  echo  QUESTION, LIVE, hints -> ANSWER"),
        "{ended:?}"
    );
    assert!(
        ended.out.contains("load  tokens  union signature"),
        "{ended:?}"
    );
}

/// TR-105, TR-1101
#[test]
fn tr_1108_errors_in_a_file_are_reported() {
    let here = folder("mock-check");
    let tensor = |text: &str| format!("inputs = [{text}]");
    let prompt = r#"{ name = "q", datatype = "BYTES", shape = [1], role = "prompt" }"#;
    for (keys, received) in [
        (
            tensor(r#"{ name = "q", datatype = "TEXT", shape = [1] }"#),
            "tensor `q`: there is no datatype `TEXT`",
        ),
        (
            tensor(r#"{ name = "q", datatype = "BYTES", shape = [1], role = "x" }"#),
            "tensor `q`: there is no role `x`",
        ),
        (
            tensor(r#"{ name = "q", datatype = "BYTES", shape = [1] }"#),
            "no input has the role prompt",
        ),
        (
            tensor(&prompt.replace("\"q\"", "\"id\"")),
            "tensor `id` has a name that is reserved",
        ),
        (
            tensor(&format!("{prompt}, {prompt}")),
            "tensor `q` is declared twice",
        ),
        (
            "versions = [0]".to_owned(),
            "versions must be integers of 1 and more",
        ),
        (
            "mock = { controls = { dance = \"D\" } }".to_owned(),
            "scripted.controls.dance: there are: repeat",
        ),
        (
            "mock = { tokens_per_chunk = 0 }".to_owned(),
            "tokens_per_chunk must be 1 or more",
        ),
        (
            "mock = { tokenizer = \"tokenizer.json\" }".to_owned(),
            "tokenizer files are not supported; \"bytes\" and \"words\" are built in",
        ),
        ("required = \"often\"".to_owned(), "required"),
        (
            "mock = { script = \"steps\", rules = [{ match = \"(\", steps = [] }] }".to_owned(),
            "does not parse",
        ),
        ("odd = 1".to_owned(), "odd"),
    ] {
        let file = here.join("m.toml");
        let text = format!("[[models]]\nname = \"m\"\nbackend = \"mock\"\n{keys}\n");
        std::fs::write(&file, text).unwrap();
        let ended = run(&here, &["mock", "check", "m.toml"]);
        assert_eq!(ended.code, 2, "{keys}: {ended:?}");
        assert!(ended.err.contains(received), "{keys}: {ended:?}");
        assert!(
            ended.err.contains("`m`") || ["odd", "required"].contains(&received),
            "{keys}: {ended:?}"
        );
    }
}

/// Every setting of a scripted model is in the page, and its example makes sense.
#[test]
fn tr_1108_the_settings_of_scripted_models_are_documented() {
    let page = include_str!("../../../../docs/cli.md");
    let here = folder("mock-docs");
    let (_, example) = page.split_once("```toml\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    std::fs::write(here.join("m.toml"), example).unwrap();
    let ended = run(&here, &["mock", "check", "m.toml"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.out.contains("moody  steps"), "{ended:?}");
    // The error of a misspelt setting lists all of them.
    std::fs::write(
        here.join("m.toml"),
        example.replace("tokens_per_s", "qqqqqq"),
    )
    .unwrap();
    let ended = run(&here, &["mock", "check", "m.toml"]);
    assert_eq!(ended.code, 2, "{ended:?}");
    let (_, known) = ended.err.split_once("expected").unwrap();
    let is_name = |part: &&str| {
        let mut letters = part.chars();
        !part.is_empty() && letters.all(|letter| letter.is_ascii_lowercase() || letter == '_')
    };
    let known: Vec<&str> = known.split('`').filter(is_name).collect();
    assert!(known.len() > 15, "{ended:?}");
    for setting in known {
        assert!(page.contains(&format!("`{setting}`")), "{setting}");
    }
}
