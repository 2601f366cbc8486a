//! A controller from its upload to every protocol, through the real binary.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::process::{Ended, Serving, folder, run};

/// The smallest controller of the examples: token 42 alone, three times. With the bytes of a scripted model it writes `***`.
pub(crate) const THREE_STARS: &str = include_str!("../../../../controllers/wat/minimal.wat");

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
        let mut serving = Serving::start(&here, &[]);
        serving.wait_for("loaded");
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

/// What a histogram without other labels has counted for the only model.
fn counted(server: &Steered, name: &str) -> u64 {
    let text = server.serving.get("/metrics", "");
    let sample = format!("{name}_count{{model=\"parrot\"}} ");
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix(&sample));
    count
        .unwrap_or_else(|| panic!("no {name}: {text}"))
        .parse()
        .unwrap()
}

#[test]
fn oa_801_the_times_of_controllers_and_constraints_are_measured() {
    let server = Steered::start("controllers-measured");
    let [step, mask, compile] = [
        "sapwood_controller_step_seconds",
        "sapwood_constraint_mask_seconds",
        "sapwood_constraint_compile_seconds",
    ];
    let ran = |arguments: &[&str]| {
        let ran = server.command(&[&["controller", "run"], arguments].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
    };
    let uploaded = server.command(&["controller", "upload", "stars.wasm", "--tag", "stars"]);
    assert_eq!(uploaded.code, 0, "{uploaded:?}");
    ran(&["stars", "--prompt", "x"]);
    // Three stars, and the step that ends: of each `pre`, `mid` and `post`. The start is none of them.
    let steps = counted(&server, step);
    assert!((6..=12).contains(&steps), "{steps}");
    assert_eq!([mask, compile].map(|it| counted(&server, it)), [0; 2]);
    for _ in 0..2 {
        ran(&[
            "sapwood:regex",
            "--arg",
            "a+b",
            "--prompt",
            "x",
            "--max-tokens",
            "4",
        ]);
    }
    assert!(counted(&server, mask) >= 2);
    assert_eq!(counted(&server, compile), 1, "the second finds it compiled");
    assert_eq!(counted(&server, step), steps);
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

/// The compiler's process has the allocator of the program, which reserves memory in advance; what it reserves must not
/// count against the limit for the module.
#[test]
fn ai_732_one_module_after_the_other_compiles_in_a_process_of_the_program() {
    let server = Steered::start("controller-compiler");
    for number in 0..12 {
        let functions: String = (0..200)
            .map(|index| {
                format!("(func (param i32) (result i32) (i32.mul (local.get 0) (i32.const {index}{number})))")
            })
            .collect();
        let text = THREE_STARS.replace("(memory (export", &format!("{functions} (memory (export"));
        let file = format!("module-{number}.wasm");
        std::fs::write(server.here.join(&file), wat::parse_str(&text).unwrap()).unwrap();
        let uploaded = server.command(&["controller", "upload", &file]);
        assert_eq!(uploaded.code, 0, "{number}: {uploaded:?}");
    }
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
        (
            &["controller", "upload", "lib.rs"][..],
            2,
            "controller build",
        ),
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

/// Allows any token until the variable `go` exists, and then stops. It reads the variable in `pre`: the response to that
/// begins with `{"V` if there is none, and with `{"R` if there is.
const UNTIL_GO: &str = r#"
(module
  (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
  (import "env" "aici_host_return_logit_bias" (func $bias (param i32)))
  (import "env" "aici_host_storage_cmd" (func $storage (param i32 i32) (result i32)))
  (import "env" "aici_host_read_blob" (func $blob (param i32 i32 i32) (result i32)))
  (memory (export "memory") 2)
  (data (i32.const 0) "{}")
  (data (i32.const 8) "{\"num_forks\":1}")
  (data (i32.const 32) "{\"num_forks\":0}")
  (data (i32.const 64) "{\"SampleWithBias\":{}}")
  (data (i32.const 96) "{\"stop\":false}")
  (data (i32.const 128) "{\"ReadVar\":{\"name\":\"go\"}}")
  (func (export "aici_create") (result i32) (i32.const 1))
  (func (export "aici_init_prompt") (param i32) (call $ret (i32.const 0) (i32.const 2)))
  (func (export "aici_pre_process") (param i32)
    (drop (call $blob (call $storage (i32.const 128) (i32.const 25)) (i32.const 256) (i32.const 3)))
    (if (i32.eq (i32.load8_u (i32.const 258)) (i32.const 82))
      (then (call $ret (i32.const 32) (i32.const 15)))
      (else (call $ret (i32.const 8) (i32.const 15)))))
  (func (export "aici_mid_process") (param i32)
    (i32.store (i32.const 1028) (i32.const 0x400))
    (call $bias (i32.const 1024)) (call $ret (i32.const 64) (i32.const 21)))
  (func (export "aici_post_process") (param i32) (call $ret (i32.const 96) (i32.const 14))))
"#;

#[test]
fn ai_1006_a_controller_reads_what_its_caller_writes() {
    let here = folder("controller-variables");
    let text = format!(
        "[controllers]\ndir = \"{}\"\n[[models]]\nname = \"slow\"\nbackend = \"scripted\"\nscripted = {{ script = \
         \"tokens\", tokens_per_s = 100.0, tokenizer = \"bytes\" }}\n",
        here.join("store").display()
    );
    std::fs::write(here.join("sapwood.toml"), text).unwrap();
    std::fs::write(here.join("go.wasm"), wat::parse_str(UNTIL_GO).unwrap()).unwrap();
    let serving = Serving::start(&here, &[]);
    let server = Steered { here, serving };
    let uploaded = server.command(&["controller", "upload", "go.wasm", "--tag", "go"]);
    assert_eq!(uploaded.code, 0, "{uploaded:?}");
    // Set before it starts: it stops at once.
    let body = json!({"controller": "go", "vars": {"go": ""}, "max_tokens": 3000}).to_string();
    let ran = server.post("/v1/run", "application/json", &body);
    assert!(
        ran.contains(r#""sampled_tokens":0"#) && ran.contains("aici-stop"),
        "{ran}"
    );
    let long = json!({"controller": "go", "vars": {"n".repeat(257): ""}}).to_string();
    let refused = server.post("/v1/run", "application/json", &long);
    assert!(
        refused.starts_with("HTTP/1.1 400 ") && refused.contains("storage limit: name"),
        "{refused}"
    );
    // Set while it runs.
    let mut socket = TcpStream::connect(server.serving.address()).unwrap();
    let body = json!({"controller": "go", "max_tokens": 3000}).to_string();
    write!(
        socket,
        "POST /v1/run HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let (mut answer, mut piece) = (String::new(), [0; 256]);
    let id = loop {
        let bytes = socket.read(&mut piece).unwrap();
        assert_ne!(bytes, 0, "{answer}");
        answer.push_str(&String::from_utf8_lossy(&piece[..bytes]));
        if let Some(at) = answer.find("\"run-")
            && answer.len() > at + 50
        {
            break answer[at + 1..at + 41].to_owned();
        }
    };
    let listed = server.serving.get(&format!("/v1/run/{id}/vars"), "");
    assert!(listed.ends_with(r#"{"vars":{}}"#), "{listed}");
    let mut other = TcpStream::connect(server.serving.address()).unwrap();
    write!(
        other,
        "PUT /v1/run/{id}/vars/go HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 3\r\n\r\nnow"
    )
    .unwrap();
    let mut written = String::new();
    other.read_to_string(&mut written).unwrap();
    assert!(written.ends_with(r#"{"version":1}"#), "{written}");
    socket.read_to_string(&mut answer).unwrap();
    assert!(
        answer.contains(r#""finish_reason":"aici-stop""#),
        "{answer}"
    );
}

/// The path of an executable file that does this.
fn script(here: &Path, name: &str, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    let path = here.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
}

#[test]
fn ai_1017_a_module_is_tested_against_a_scripted_model() {
    let here = folder("controller-test");
    std::fs::write(
        here.join("stars.wasm"),
        wat::parse_str(THREE_STARS).unwrap(),
    )
    .unwrap();
    let tests = r#"[
        {"prompt": "hello", "preferred": "no stars", "expected": "***"},
        {"prompt": "", "expected": ["***"], "argument": {"any": "thing"}, "max_tokens": 9},
        {"expected": "**", "max_tokens": 2}
    ]"#;
    std::fs::write(here.join("tests.json"), tests).unwrap();
    let tested = run(&here, &["controller", "test", "stars.wasm", "tests.json"]);
    assert_eq!(tested.code, 0, "{tested:?}");
    let lines: Vec<&str> = tested.out.lines().collect();
    assert!(
        lines[0].starts_with("ok   \"hello\"  3 steps, median "),
        "{tested:?}"
    );
    // Each of them in both modes.
    assert_eq!(lines.len(), 6, "{tested:?}");
    for (mode, lines) in ["(shared)", "(sequence)"].iter().zip(lines.chunks(3)) {
        assert!(lines.iter().all(|line| line.ends_with(mode)), "{tested:?}");
    }
    let tests = r#"[{"expected": "*"}, {"error": "trap"}, {"expected": "***"}]"#;
    std::fs::write(here.join("tests.json"), tests).unwrap();
    let tested = run(&here, &["controller", "test", "stars.wasm", "tests.json"]);
    assert_eq!(tested.code, 1, "{tested:?}");
    assert!(tested.err.contains("4 of 6 tests failed"), "{tested:?}");
    assert!(
        tested
            .out
            .contains("     expected \"*\"\n     found    \"***\"\n"),
        "{tested:?}"
    );
    assert!(
        tested.out.contains("     expected the error trap\n"),
        "{tested:?}"
    );
    let tested = run(
        &here,
        &[
            "controller",
            "test",
            "--json",
            "--isolation",
            "sequence",
            "stars.wasm",
            "tests.json",
        ],
    );
    let results: Value = serde_json::from_str(&tested.out).unwrap();
    assert_eq!(results.as_array().unwrap().len(), 3);
    assert_eq!(
        (&results[0]["passed"], &results[0]["isolation"]),
        (&json!(false), &json!("sequence"))
    );
    assert_eq!(results[2]["texts"], json!(["***"]));
    assert_eq!(results[2]["steps"], 3);
}

/// A module that fails, one that is none, and tests that are none.
#[test]
fn ai_1017_a_module_that_cannot_be_tested_is_refused() {
    let here = folder("controller-test-refused");
    std::fs::write(
        here.join("stars.wasm"),
        wat::parse_str(THREE_STARS).unwrap(),
    )
    .unwrap();
    let traps = THREE_STARS.replace(
        "(i32.store (i32.const 1028)",
        "unreachable (i32.store (i32.const 1028)",
    );
    std::fs::write(here.join("traps.wasm"), wat::parse_str(traps).unwrap()).unwrap();
    std::fs::write(here.join("tests.json"), r#"[{"error": "trap"}]"#).unwrap();
    let tested = run(&here, &["controller", "test", "traps.wasm", "tests.json"]);
    assert_eq!(
        (tested.code, &*tested.out),
        (0, "ok   \"\"  (shared)\nok   \"\"  (sequence)\n"),
        "{tested:?}"
    );
    let none = run(&here, &["controller", "test", "tests.json", "tests.json"]);
    assert_eq!(none.code, 2, "{none:?}");
    std::fs::write(here.join("tests.json"), r#"[{"expect": "x"}]"#).unwrap();
    let wrong = run(&here, &["controller", "test", "stars.wasm", "tests.json"]);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(wrong.err.contains("expect"), "{wrong:?}");
}

#[test]
fn ai_1017_a_project_is_built_with_the_cargo_that_is_there() {
    let here = folder("controller-build");
    std::fs::create_dir(here.join("project")).unwrap();
    let cargo = r#"
        [ "$(basename "$PWD") $*" = "project build --release --target wasm32-unknown-unknown --message-format=json-render-diagnostics --features p1" ] || exit 9
        echo '{"reason":"compiler-artifact","filenames":["/target/lib.rlib","/target/my_first.wasm"]}'
        echo 'Finished' >&2"#;
    script(&here, "cargo", cargo);
    let build = |arguments: &[&str]| {
        let all = [&["controller", "build"], arguments].concat();
        let mut command = crate::process::sapwood(&here, &all);
        command.env("PATH", format!("{}:/usr/bin:/bin", here.display()));
        crate::process::run_with(command, "")
    };
    let built = build(&["project", "--features", "p1"]);
    assert_eq!(
        (built.code, &*built.out),
        (0, "/target/my_first.wasm\n"),
        "{built:?}"
    );
    assert!(built.err.contains("Finished"), "{built:?}");
    let failed = build(&["project"]);
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(failed.err.contains("rustup target add"), "{failed:?}");
    script(&here, "cargo", "exit 0");
    let empty = build(&["project"]);
    assert!(empty.code == 1 && empty.err.contains("cdylib"), "{empty:?}");
    assert_eq!(build(&["no-such-folder"]).code, 1);
    let missing = run(&here, &["controller", "build", "project"]);
    assert!(
        missing.code == 1 && missing.err.contains("rustup.rs"),
        "{missing:?}"
    );
}
