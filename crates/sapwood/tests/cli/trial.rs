//! Files that end the process that uses them, at a server that others use.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;

use rustix::fs::{CWD, Mode, mkfifoat};
use sapwood_engine::embedded::random::{self, RandomModelShape};

use crate::process::{Serving, folder, sapwood};

const SIZE: &str = r#"{"ctx":0,"threads":1,"threads_batch":0,"parallel":2,"kept_prefixes":0,"prefixes_asked":false,"cache_tokens":0,"speculation":"off","normalize":true,"memory_bytes":0}"#;

fn write(to: &Path, change: impl FnOnce(&mut RandomModelShape)) {
    let mut shape = RandomModelShape::tiny();
    change(&mut shape);
    let mut bytes = Vec::new();
    random::write(&mut bytes, &shape, 7).unwrap();
    std::fs::write(to, bytes).unwrap();
}

/// It passes every check, but llama.cpp asserts that this architecture rotates whole heads.
fn write_fatal(to: &Path) {
    write(to, |shape| {
        shape.architecture = "qwen3";
        let turned = ("qwen3.rope.dimension_count".to_owned(), 8);
        shape.numbers.push(turned);
    });
}

fn post(serving: &Serving, path: &str, body: &str) -> String {
    let mut socket = TcpStream::connect(serving.address()).unwrap();
    let length = body.len();
    write!(
        socket,
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn tr_706_a_file_that_ends_its_process_does_not_end_the_server() {
    let here = folder("trial-served");
    write(&here.join("good.gguf"), |_| {});
    write_fatal(&here.join("fatal.gguf"));
    let config = r#"
        engine = { threads = 1, parallel = 2, kept_prefixes = 0 }
        generate = { model_control = "explicit" }
        models = [
            { name = "steady", backend = "scripted" },
            { name = "good", path = "good.gguf", required = false },
            { name = "fatal", path = "fatal.gguf", required = false },
        ]
    "#;
    std::fs::write(here.join("sapwood.toml"), config).unwrap();
    let mut serving = Serving::start(&here, &[]);
    let line = serving.wait_for("a model could not be loaded; the server runs without it");
    assert_eq!(line["model"], "fatal");
    let why = line["failure"].as_str().unwrap();
    assert!(why.contains("GGML_ASSERT"), "{why}");
    let received = post(&serving, "/v2/repository/models/fatal/load", "");
    assert!(received.starts_with("HTTP/1.1 500 "), "{received}");
    let received = post(&serving, "/v2/repository/models/good/load", "");
    assert!(received.starts_with("HTTP/1.1 200 "), "{received}");
    let ask = r#"{"text_input": "hello", "max_tokens": 2}"#;
    for (model, status) in [("steady", 200), ("good", 200), ("fatal", 404)] {
        let received = post(&serving, &format!("/v2/models/{model}/generate"), ask);
        let expect = format!("HTTP/1.1 {status} ");
        assert!(received.starts_with(&expect), "{model}: {received}");
    }
}

#[test]
fn a_file_is_tried_and_the_reason_is_printed() {
    let here = folder("trial-alone");
    write(&here.join("good.gguf"), |_| {});
    write_fatal(&here.join("fatal.gguf"));
    write(&here.join("short.gguf"), |shape| shape.context_tokens = 1);
    write(&here.join("odd.gguf"), |shape| shape.token_types = 1);
    let mode = Mode::RUSR | Mode::WUSR;
    mkfifoat(CWD, here.join("pipe.gguf"), mode).unwrap();
    for (file, code, out, err) in [
        ("good.gguf", Some(0), "", ""),
        ("short.gguf", Some(0), "", ""),
        ("odd.gguf", Some(5), "token_type", ""),
        ("none.gguf", Some(5), "there is no file", ""),
        ("pipe.gguf", Some(5), "pipe.gguf is not a file", ""),
        ("fatal.gguf", None, "", "GGML_ASSERT"),
    ] {
        let mut command = sapwood(&here, &["try-model", "--size", SIZE, "--", file]);
        command.env("GGML_NO_BACKTRACE", "1").stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let _open = child.stdin.take();
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), code, "{file}: {ended:?}");
        for (reply, expect) in [(ended.stdout, out), (ended.stderr, err)] {
            let reply = String::from_utf8(reply).unwrap();
            assert!(reply.contains(expect), "{file}: {reply}");
        }
    }
}

/// It does not outlive the server that wants to know.
#[test]
fn a_trial_ends_with_its_parent_process() {
    let here = folder("trial-left");
    write(&here.join("large.gguf"), |shape| {
        (shape.width, shape.inner) = (512, 1024);
        (shape.vocabulary, shape.token_types) = (32_000, 32_000);
        shape.context_tokens = 1 << 17;
    });
    let mut command = sapwood(&here, &["try-model", "--size", SIZE, "--", "large.gguf"]);
    let ended = command.status().unwrap();
    assert_eq!(ended.code(), Some(130));
}
