//! The demo model, steered: whatever it would have written, what it writes has the form that was asked for.

use std::io::{Read, Write};
use std::net::TcpStream;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::process::{Serving, folder, run};

/// High enough that the model alone would write anything but the form.
const TEMPERATURE: f64 = 2.0;

/// A server whose model is loaded, which it is a moment after the server listens.
fn serving(here: &std::path::Path) -> Serving {
    serving_with(here, &[])
}

fn serving_with(here: &std::path::Path, arguments: &[&str]) -> Serving {
    let serving = Serving::start(here, arguments);
    let is_ready = || {
        let answer = serving.get("/v2/models/demo/ready", "");
        answer.starts_with("HTTP/1.1 200")
    };
    while !is_ready() {
        std::thread::yield_now();
    }
    serving
}

/// The text that the demo model writes for this request.
fn generate(serving: &Serving, mut request: Value) -> String {
    request["max_tokens"] = json!(300);
    request["temperature"] = json!(TEMPERATURE);
    let body = request.to_string();
    let mut socket = TcpStream::connect(serving.address()).unwrap();
    let length = body.len();
    write!(
        socket,
        "POST /v2/models/demo/generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let body: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"));
    body["text_output"]
        .as_str()
        .unwrap_or_else(|| panic!("{answer}"))
        .to_owned()
}

#[test]
fn ai_840_the_demo_model_writes_what_a_constraint_allows_whatever_the_sampler() {
    let here = folder("demo-constrained");
    let serving = serving(&here);
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 12},
            "inhabitants": {"type": "integer", "minimum": 10, "maximum": 99_999},
            "capital": {"type": "boolean"},
            "rivers": {"type": "array", "items": {"enum": ["Elbe", "Seine"]}, "maxItems": 2},
        },
        "required": ["city", "inhabitants", "capital", "rivers"],
        "additionalProperties": false,
    });
    let text = "Quote one clause of: the sky is blue, the grass is green";
    for seed in 1..=5 {
        let asked = |member: &str, value: Value| {
            generate(
                &serving,
                json!({"text_input": text, "seed": seed, member: value}),
            )
        };
        let written = asked("json_schema", schema.clone());
        let object: Value = serde_json::from_str(&written).unwrap();
        assert!(
            object["city"].as_str().unwrap().chars().count() <= 12,
            "{written}"
        );
        let inhabitants = object["inhabitants"].as_u64().unwrap();
        assert!((10..=99_999).contains(&inhabitants), "{written}");
        assert!(object["capital"].is_boolean(), "{written}");
        assert!(object["rivers"].as_array().unwrap().len() <= 2, "{written}");
        assert_eq!(object.as_object().unwrap().len(), 4, "{written}");

        let written = asked("regex", "[A-C]{2}-[0-9]{3}".into());
        let (letters, digits) = written.split_once('-').unwrap();
        assert!(
            letters.bytes().all(|byte| (b'A'..=b'C').contains(&byte)),
            "{written}"
        );
        assert_eq!((letters.len(), digits.len()), (2, 3), "{written}");
        assert!(digits.parse::<u16>().is_ok(), "{written}");

        let written = asked("grammar", "root ::= [1-6] \"d\" (\"4\" | \"20\")".into());
        let (count, sides) = written.split_once('d').unwrap();
        assert!((1..=6).contains(&count.parse::<u8>().unwrap()), "{written}");
        assert!(["4", "20"].contains(&sides), "{written}");

        let steered = |kind: &str, arg: Value| {
            let request = json!({
                "text_input": text, "seed": seed, "controller": kind, "controller_arg": arg,
            });
            generate(&serving, request)
        };
        let written = steered("sapwood:options", json!(["Tokyo", "Toronto", "Oslo"]));
        assert!(
            ["Tokyo", "Toronto", "Oslo"].contains(&&*written),
            "{written}"
        );
        let quoted = "the sky is blue, the grass is green";
        let written = steered("sapwood:substring", quoted.into());
        assert!(quoted.contains(&written), "{written}");
    }
}

#[test]
fn ai_931_an_uploaded_controller_steers_the_demo_model() {
    let here = folder("demo-steered");
    let text = format!(
        "[controllers]\ndir = \"{}\"\n",
        here.join("store").display()
    );
    std::fs::write(here.join("sapwood.toml"), text).unwrap();
    let minimal = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../controllers/wat/minimal.wat"
    );
    std::fs::write(here.join("minimal.wasm"), wat::parse_file(minimal).unwrap()).unwrap();
    let serving = serving(&here);
    let command = |arguments: &[&str]| {
        let mut all = vec![arguments[0], "--server", &serving.url];
        all.extend(&arguments[1..]);
        run(&here, &all)
    };
    let uploaded = command(&["controller", "upload", "minimal.wasm", "--tag", "minimal"]);
    assert_eq!(uploaded.code, 0, "{uploaded:?}");
    let ran = command(&["controller", "run", "minimal", "--prompt", "Is water wet?"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    // Which text token 42 has is the vocabulary's business; it came three times.
    let third = ran.out.trim_end_matches('\n').len() / 3;
    let (one, rest) = ran.out.split_at(third);
    assert!(
        !one.is_empty() && rest.starts_with(&one.repeat(2)),
        "{ran:?}"
    );
    let request = json!({"text_input": "Is water wet?", "controller": "minimal"});
    assert_eq!(generate(&serving, request), one.repeat(3));
}

/// What the facts of the demo model say about equal answers.
fn deterministic(serving: &Serving) -> bool {
    let answer = serving.get("/v2/models/demo/config", "");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let config: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"));
    let value = &config["parameters"]["deterministic"]["string_value"];
    match value.as_str() {
        Some("true") => true,
        Some("false") => false,
        _ => panic!("{answer}"),
    }
}

#[test]
fn d_21_the_demo_model_says_whether_answers_are_equal() {
    let here = folder("demo-facts");
    let usual = serving(&here);
    // Where neither processor nor GPU is against it.
    let promises = deterministic(&usual);
    assert!(
        usual.metric("sapwood_engine_threads") >= 3.0,
        "one of each kind"
    );
    usual.signal(Signal::TERM);
    let (_, log) = usual.end();
    assert!(log.contains("equal_answers"), "{log}");
    assert_eq!(!promises, log.contains("not promised"), "{log}");
    let other = serving_with(&here, &["--flash-attn", "off"]);
    assert!(!deterministic(&other));
}
