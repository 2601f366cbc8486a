//! A controller from its upload to every protocol, through the real binary.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::process::{Ended, Serving, folder, run};

/// Allows token 42 alone, three times (the example of AI-609's section). With the bytes of a scripted model it writes `***`.
const THREE_STARS: &str = r#"
(module
  (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
  (import "env" "aici_host_return_logit_bias" (func $bias (param i32)))
  (memory (export "memory") 2)
  (global $n (mut i32) (i32.const 0))
  (data (i32.const 0) "{}")
  (data (i32.const 8) "{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}")
  (data (i32.const 64) "{\"SampleWithBias\":{}}")
  (data (i32.const 96) "{\"stop\":false}")
  (data (i32.const 112) "{\"stop\":true}")
  (func (export "aici_create") (result i32) (i32.const 1))
  (func (export "aici_init_prompt") (param i32) (call $ret (i32.const 0) (i32.const 2)))
  (func (export "aici_pre_process") (param i32) (call $ret (i32.const 8) (i32.const 46)))
  (func (export "aici_mid_process") (param i32)
    (i32.store (i32.const 1028) (i32.const 0x400))
    (call $bias (i32.const 1024)) (call $ret (i32.const 64) (i32.const 21)))
  (func (export "aici_post_process") (param i32)
    (global.set $n (i32.add (global.get $n) (i32.const 1)))
    (if (i32.lt_u (global.get $n) (i32.const 3))
      (then (call $ret (i32.const 96) (i32.const 14)))
      (else (call $ret (i32.const 112) (i32.const 13))))))
"#;

/// A server with one scripted model, and a folder of its own for controllers.
struct Steered {
    here: PathBuf,
    serving: Serving,
}

impl Steered {
    fn start(name: &str) -> Self {
        let here = folder(name);
        let text = format!(
            "[controllers]\ndir = \"{}\"\n[[models]]\nname = \"parrot\"\nbackend = \"scripted\"\nscripted = {{ script = \
             \"echo\" }}\n",
            here.join("store").display()
        );
        std::fs::write(here.join("sapwood.toml"), text).unwrap();
        std::fs::write(
            here.join("stars.wasm"),
            wat::parse_str(THREE_STARS).unwrap(),
        )
        .unwrap();
        let serving = Serving::start(&here, &[]);
        Self { here, serving }
    }

    /// A command of `sapwood` against this server.
    fn command(&self, arguments: &[&str]) -> Ended {
        let mut all = vec![arguments[0], "--server", &self.serving.url];
        all.extend(&arguments[1..]);
        run(&self.here, &all)
    }

    fn post(&self, path: &str, content_type: &str, body: &str) -> String {
        let mut socket = TcpStream::connect(self.serving.address()).unwrap();
        write!(
            socket,
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: {content_type}\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    }
}

fn stored(here: &Path) -> Vec<String> {
    let files = std::fs::read_dir(here.join("store")).unwrap();
    files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// AI-911: one upload, and the same text through each protocol.
#[test]
fn ai_931_an_uploaded_controller_steers_through_every_protocol() {
    let server = Steered::start("controller-everywhere");
    let uploaded = server.command(&["controller", "upload", "stars.wasm", "--tag", "stars"]);
    assert_eq!(uploaded.code, 0, "{uploaded:?}");
    let id = uploaded.out.trim();
    assert_eq!(id.len(), 64, "{uploaded:?}");
    assert!(stored(&server.here).contains(&format!("{id}.wasm")));
    let listed = server.command(&["controller", "list", "--json"]);
    let tags: Value = serde_json::from_str(&listed.out).unwrap();
    assert_eq!(tags[0]["tag"], "stars", "{listed:?}");
    assert_eq!(tags[0]["module_id"], id, "{listed:?}");

    let ran = server.command(&["controller", "run", "stars", "--prompt", "hello"]);
    assert_eq!((ran.code, ran.out.trim()), (0, "***"), "{ran:?}");
    let config = format!("config={}", json!({"controller": id}));
    let evergreen = server.command(&[
        "run",
        "GENERATE",
        "--input",
        "prompt=hello",
        "--input",
        &config,
    ]);
    assert_eq!(
        (evergreen.code, evergreen.out.trim()),
        (0, "***"),
        "{evergreen:?}"
    );
    let body = json!({"text_input": "hello", "parameters": {"controller": "stars"}}).to_string();
    let generate = server.post("/v2/models/parrot/generate", "application/json", &body);
    assert!(generate.contains("\"text_output\":\"***\""), "{generate}");
    let line = json!({"stream_id": 1, "model": "parrot", "prompt": [104], "max_tokens": 9, "controller": "stars"});
    let asked = json!({"lmtp": {"version": 2, "features": ["controllers"]}});
    let info = json!({"stream_id": 9, "model": "parrot", "data": asked});
    let lines = format!("MODEL_INFO {info}\nGENERATE {line}\n");
    let lmtp = server.post("/lmtp", "text/plain", &lines);
    assert_eq!(lmtp.matches("\"token\":42").count(), 3, "{lmtp}");
}

#[test]
fn ai_840_a_constraint_is_a_controller_of_every_server() {
    let server = Steered::start("constraint-everywhere");
    let ran = server.command(&[
        "controller",
        "run",
        "sapwood:regex",
        "--arg",
        "[ab]{3}c",
        "--prompt",
        "x",
    ]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let text = ran.out.trim();
    assert_eq!(text.len(), 4, "{ran:?}");
    assert!(
        text.ends_with('c') && text[..3].chars().all(|c| "ab".contains(c)),
        "{ran:?}"
    );
    // What is forced is written once.
    for (kind, arg, expect) in [
        (
            "sapwood:options",
            "[\"alpha beta gamma\"]",
            "alpha beta gamma",
        ),
        (
            "sapwood:json-schema",
            r#"{"type":"object","properties":{"name":{"const":"sap"}},"required":["name"],"additionalProperties":false}"#,
            r#"{"name":"sap"}"#,
        ),
    ] {
        let ran = server.command(&["controller", "run", kind, "--arg", arg, "--prompt", "x"]);
        let text: String = ran.out.split_whitespace().collect();
        let expect: String = expect.split_whitespace().collect();
        assert_eq!((ran.code, text), (0, expect), "{ran:?}");
    }
    let bad = server.command(&["controller", "run", "sapwood:regex", "--arg", "("]);
    assert_eq!(bad.code, 1, "{bad:?}");
    assert!(bad.err.contains("invalid grammar"), "{bad:?}");
}

#[test]
fn ai_901_refusals_name_the_remedy() {
    let server = Steered::start("controller-refusals");
    std::fs::write(server.here.join("lib.rs"), "fn main() {}").unwrap();
    std::fs::write(server.here.join("empty.wasm"), b"\0asm\x01\0\0\0").unwrap();
    for (arguments, code, part) in [
        (&["controller", "upload", "lib.rs"][..], 2, "cargo build"),
        (&["controller", "upload", "missing.wasm"], 2, "missing.wasm"),
        (
            &["controller", "upload", "empty.wasm"],
            1,
            "invalid module: ",
        ),
        (&["controller", "run", "nobody"], 1, "nobody"),
        (&["controller", "rm", "nobody"], 1, "nobody"),
    ] {
        let ended = server.command(arguments);
        assert_eq!(ended.code, code, "{arguments:?}: {ended:?}");
        assert!(ended.err.contains(part), "{arguments:?}: {ended:?}");
    }
    // Nothing but the folders was stored.
    assert!(
        !stored(&server.here)
            .iter()
            .any(|name| name.ends_with(".wasm"))
    );
}
