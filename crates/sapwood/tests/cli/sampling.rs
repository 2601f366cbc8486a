//! Sampling defaults of the configuration and the command line, as clients of each protocol meet them.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::process::{Serving, folder, run};

/// `short` ends after three tokens, and `wild` is so hot that its script is lost, unless a request says otherwise. Of the
/// values for all models, `short` has its own `max_tokens`.
const MODELS: &str = r#"
[engine.sampling]
max_tokens = 8
seed = 5
[[models]]
name = "short"
backend = "scripted"
scripted = { script = "echo" }
sampling = { max_tokens = 3 }
[[models]]
name = "wild"
backend = "scripted"
scripted = { script = "echo", gap = 1.0 }
sampling = { temperature = 100 }
"#;

/// Asks one server by one protocol.
struct Client {
    serving: Serving,
}

impl Client {
    fn post(&self, path: &str, content_type: &str, body: &str) -> String {
        let mut socket = TcpStream::connect(self.serving.address()).unwrap();
        write!(
            socket,
            "POST {path} HTTP/1.0\r\nhost: localhost\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    fn json(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, "application/json", &body.to_string());
        serde_json::from_str(&answer).unwrap()
    }

    /// The text that a model makes of twelve letters, with these parameters.
    fn generate(&self, model: &str, parameters: &Value) -> String {
        let body = json!({"text_input": LETTERS, "parameters": parameters});
        let answer = self.json(&format!("/v2/models/{model}/generate"), &body);
        let text = answer["text_output"].as_str();
        text.unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    fn infer(&self, model: &str, parameters: &Value) -> String {
        let input =
            json!({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [LETTERS]});
        let body = json!({"inputs": [input], "parameters": parameters});
        let answer = self.json(&format!("/v2/models/{model}/infer"), &body);
        let mut outputs = answer["outputs"].as_array().into_iter().flatten();
        let output = outputs.find(|output| output["name"] == "text_output");
        let output = output.unwrap_or_else(|| panic!("{answer}"));
        output["data"][0].as_str().unwrap().to_owned()
    }

    fn evergreen(&self, model: &str, parameters: &Value) -> String {
        let (prompt, config) = (format!("prompt={LETTERS}"), format!("config={parameters}"));
        let call = ["run", "GENERATE", "--server", &self.serving.url];
        let inputs = ["--input", &prompt, "--input", &config, "--target", model];
        let ended = run(&folder("sampling-client"), &[&call[..], &inputs].concat());
        assert_eq!(ended.code, 0, "{ended:?}");
        ended.out
    }

    fn controllers(&self, model: &str, parameters: &Value) -> String {
        let mut body = json!({"model": model, "controller": "none", "prompt": LETTERS});
        let members = body.as_object_mut().unwrap();
        members.extend(parameters.as_object().unwrap().clone());
        let answer = self.post("/v1/run", "application/json", &body.to_string());
        let events = answer
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        let events = events.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let texts = events.filter_map(|event| Some(event["forks"][0]["text"].as_str()?.to_owned()));
        texts.collect()
    }

    /// As text, because a model of bytes has its tokens in their order.
    fn lmtp(&self, model: &str, parameters: &Value) -> String {
        let mut members = json!({"stream_id": 1, "model": model, "prompt": LETTERS.as_bytes()});
        let members_of = members.as_object_mut().unwrap();
        members_of.extend(parameters.as_object().unwrap().clone());
        let answer = self.post("/lmtp", "text/plain", &format!("GENERATE {members}\n"));
        let mut text = String::new();
        for line in answer
            .lines()
            .filter_map(|line| line.strip_prefix("TOKEN "))
        {
            let items: Value = serde_json::from_str(line).unwrap();
            for item in items.as_array().unwrap() {
                let token = item["token"].as_u64().unwrap();
                text.extend(u8::try_from(token).ok().map(char::from));
            }
        }
        text
    }
}

/// Asks a model by the protocol of one face.
type Ask = fn(&Client, &str, &Value) -> String;

const LETTERS: &str = "abcdefghijkl";

#[test]
fn defaults_of_a_model_hold_at_every_face_and_requests_win() {
    let here = folder("sampling-defaults");
    std::fs::write(here.join("sapwood.toml"), MODELS).unwrap();
    let mut serving = Serving::start(&here, &[]);
    for _ in 0..2 {
        serving.wait_for("loaded");
    }
    let client = Client { serving };
    let faces: [(&str, Ask); 5] = [
        ("generate", Client::generate),
        ("infer", Client::infer),
        ("evergreen", Client::evergreen),
        ("controllers", Client::controllers),
        ("lmtp", Client::lmtp),
    ];
    for (name, ask) in faces {
        // At each face's own temperature the script is certain.
        assert_eq!(ask(&client, "short", &json!({})), "abc", "{name}");
        let longer = json!({"max_tokens": 5});
        assert_eq!(ask(&client, "short", &longer), "abcde", "{name}");
        let cold = json!({"temperature": 0});
        assert_eq!(ask(&client, "wild", &cold), "abcdefgh", "{name}");
        let hot = ask(&client, "wild", &json!({}));
        assert!(
            !hot.is_empty() && !hot.starts_with("abc"),
            "{name}: {hot:?}"
        );
    }
    // With the default seed a request without one is repeated.
    let hot = |seed: Value| client.generate("wild", &seed);
    assert_eq!(hot(json!({})), hot(json!({"seed": 5})));
    assert_ne!(hot(json!({})), hot(json!({"seed": 6})));
}

#[test]
fn a_request_that_does_not_go_with_a_default_is_told_both() {
    let here = folder("sampling-conflict");
    std::fs::write(here.join("sapwood.toml"), MODELS).unwrap();
    let mut serving = Serving::start(&here, &[]);
    for _ in 0..2 {
        serving.wait_for("loaded");
    }
    let client = Client { serving };
    let body = json!({"text_input": "a", "parameters": {"min_tokens": 4}});
    let answer = client.json("/v2/models/short/generate", &body);
    let error = answer["error"].as_str().unwrap();
    assert!(
        error.contains("min_tokens") && error.contains("which is 3"),
        "{error}"
    );
}

/// The servers of the model get what the caller has not set.
#[test]
fn lm_712_defaults_of_a_model_of_an_upstream_are_sent_to_it() {
    let here = folder("sampling-back");
    std::fs::write(here.join("sapwood.toml"), MODELS).unwrap();
    let mut back = Serving::start(&here, &[]);
    for _ in 0..2 {
        back.wait_for("loaded");
    }
    let here = folder("sampling-front");
    let config = format!(
        "[engine.sampling]\nmax_tokens = 1\n[[models]]\nname = \"short\"\nbackend = \"upstream\"\nupstream = {{ endpoints = \
         [\"{}\"] }}\nsampling = {{ max_tokens = 2 }}\n",
        back.address()
    );
    std::fs::write(here.join("sapwood.toml"), config).unwrap();
    let mut front = Serving::start(&here, &[]);
    front.wait_for("joined an upstream");
    let client = Client { serving: front };
    assert_eq!(client.generate("short", &json!({})), "ab");
    assert_eq!(client.lmtp("short", &json!({"max_tokens": 4})), "abcd");
}

#[test]
fn flags_of_llama_server_set_defaults_and_parameters() {
    let here = folder("sampling-flags");
    let models = MODELS.replace("[engine.sampling]\nmax_tokens = 8\nseed = 5\n", "");
    std::fs::write(here.join("sapwood.toml"), models).unwrap();
    let mut serving = Serving::start(&here, &["-n", "4", "--temp", "0", "--stop", "c"]);
    for _ in 0..2 {
        serving.wait_for("loaded");
    }
    let client = Client { serving };
    assert_eq!(client.generate("short", &json!({})), "ab");
    assert_eq!(
        client.generate("wild", &json!({"stop": "d", "temperature": 0})),
        "abc"
    );
    let away = folder("sampling-flags-away");
    let call = [
        "run",
        "GENERATE",
        "--server",
        &client.serving.url,
        "--target",
        "wild",
        "--input",
        "prompt=abcdefghijkl",
        "--temp",
        "0",
        "--stop",
        "x",
    ];
    for (more, code, expected) in [
        (&["-n", "6"][..], 0, "abcdef"),
        (
            &["-n", "6", "--input", "config={\"maxTokens\": 2}"],
            2,
            "both set max_tokens",
        ),
        (&["--top-p", "2"], 2, "(0, 1]"),
    ] {
        let ended = run(&away, &[&call[..], more].concat());
        assert_eq!(ended.code, code, "{ended:?}");
        assert!((ended.out + &ended.err).contains(expected), "{more:?}");
    }
    let no_model = [
        "run",
        "echo",
        "--server",
        &client.serving.url,
        "--top-k",
        "1",
    ];
    let ended = run(&away, &no_model);
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(ended.err.contains("--top-k is for GENERATE"), "{ended:?}");
}

#[test]
fn config_show_has_each_parameter_with_its_origin() {
    let here = folder("sampling-shown");
    std::fs::write(here.join("sapwood.toml"), MODELS).unwrap();
    let ended = run(&here, &["config", "show", "--json"]);
    let shown: Value = serde_json::from_str(&ended.out).unwrap();
    let of = |key: &str| shown[format!("engine.sampling.{key}")].clone();
    assert_eq!(
        of("seed"),
        json!({"value": 5, "origin": "file sapwood.toml"})
    );
    assert_eq!(of("min_p"), json!({"value": null, "origin": "default"}));
    let models = &shown["models"]["value"];
    assert_eq!(models[0]["sampling"], json!({"max_tokens": 3}));
}
