//! Controllers in a process of their own, through the real binary.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use sapwood_control::trie::{HostModel, TokenEntry, TokenView};
use serde_json::{Value, json};

use crate::controllers::THREE_STARS;
use crate::process::{Ended, Serving, folder, run};

/// Runs `BEFORE` and returns `BRANCHES` in its first step, and stops in the second.
const TWO_STEPS: &str = r#"
(module
  (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
  (import "env" "aici_host_return_logit_bias" (func $bias (param i32) (result i32)))
  (memory (export "memory") 2)
  (global $n (mut i32) (i32.const 0))
  (data (i32.const 0) "{\"prompt\":[104]}")
  (data (i32.const 64) "BRANCHES")
  (data (i32.const 256) "{\"branches\":[]}")
  (func (export "aici_create") (result i32) (i32.const 1))
  (func (export "aici_init_prompt") (param i32) (call $ret (i32.const 0) (i32.const 16)))
  (func (export "aici_mid_process") (param i32)
    (global.set $n (i32.add (global.get $n) (i32.const 1)))
    (if (i32.eq (global.get $n) (i32.const 1))
      (then
        BEFORE
        (call $ret (i32.const 64) (i32.const LENGTH)))
      (else (call $ret (i32.const 256) (i32.const 15))))))
"#;

/// Forks into a sequence that writes `*` and one that writes `+`, each of which then stops.
fn fork() -> String {
    let masks = "(i32.store (i32.const 1028) (i32.const 0x400))
        (drop (call $bias (i32.const 1024)))
        (i32.store (i32.const 1028) (i32.const 0x800))
        (drop (call $bias (i32.const 1024)))";
    let branch = |mask| json!({"sample_mask": mask, "temperature": null, "splices": []});
    two_steps(masks, &json!({"branches": [branch(0), branch(1)]}))
}

/// Waits for a variable that nobody writes, and stops when it is asked again.
fn waits() -> String {
    let splice = json!({"backtrack": 0, "ff_tokens": []});
    two_steps(
        "",
        &json!({"branches": [{"splices": [splice], "wait": ["x"]}]}),
    )
}

fn two_steps(before: &str, branches: &Value) -> String {
    let branches = branches.to_string();
    // It ends where the next text begins.
    assert!(branches.len() <= 192);
    TWO_STEPS
        .replace("BEFORE", before)
        .replace("BRANCHES", &branches.replace('"', "\\\""))
        .replace("LENGTH", &branches.len().to_string())
}

/// Flags of a runtime: a machine that is busy with other tests makes no step late.
pub(crate) const PATIENT: &str =
    r#""--wasm-max-pre-step-time", "5000", "--wasm-max-step-time", "5000""#;

/// A server whose controllers run elsewhere.
pub(crate) struct Isolated {
    here: PathBuf,
    serving: Serving,
}

impl Isolated {
    /// `controllers`: further settings of that table. `model`: those of the scripted model.
    pub(crate) fn start(name: &str, controllers: &str, model: &str) -> Self {
        let here = folder(name);
        let store = here.join("store");
        let text = format!(
            "[drain]\ngrace = \"0s\"\n[controllers]\ndir = \"{}\"\nhold = 0\nstep_ms = 1000\n{controllers}\n[[models]]\nname = \"parrot\"\nbackend = \"scripted\"\n\
             scripted = {{ script = \"echo\", {model} }}\n",
            store.display()
        );
        std::fs::write(here.join("sapwood.toml"), text).unwrap();
        for (name, count) in [("three", "3"), ("endless", "1000000")] {
            let module = THREE_STARS.replace("(i32.const 3)", &format!("(i32.const {count})"));
            let file = here.join(format!("{name}.wasm"));
            std::fs::write(file, wat::parse_str(module).unwrap()).unwrap();
        }
        std::fs::write(here.join("fork.wasm"), wat::parse_str(fork()).unwrap()).unwrap();
        std::fs::write(here.join("waits.wasm"), wat::parse_str(waits()).unwrap()).unwrap();
        // 768 KiB, of which one fits into a MiB.
        let big = THREE_STARS.replace(
            "(memory (export \"memory\") 2)",
            "(memory (export \"memory\") 12)",
        );
        assert_ne!(big, THREE_STARS);
        let big = big.replace("(i32.const 3)", "(i32.const 1000000)");
        std::fs::write(here.join("big.wasm"), wat::parse_str(big).unwrap()).unwrap();
        let serving = Serving::start(&here, &[]);
        let server = Self { here, serving };
        for name in ["three", "endless", "fork", "waits", "big"] {
            let file = format!("{name}.wasm");
            let uploaded = server.command(&["controller", "upload", &file, "--tag", name]);
            assert_eq!(uploaded.code, 0, "{uploaded:?}");
        }
        server
    }

    fn command(&self, arguments: &[&str]) -> Ended {
        let mut all = vec![arguments[0], "--server", &self.serving.url];
        all.extend(&arguments[1..]);
        run(&self.here, &all)
    }

    /// Starts a stream; its lines follow the head.
    pub(crate) fn stream(&self, body: &Value) -> BufReader<TcpStream> {
        self.post("/v2/models/parrot/generate_stream", body)
    }

    fn post(&self, path: &str, body: &Value) -> BufReader<TcpStream> {
        self.send(path, "application/json", &body.to_string())
    }

    fn send(&self, path: &str, content_type: &str, body: &str) -> BufReader<TcpStream> {
        let mut socket = TcpStream::connect(self.serving.address()).unwrap();
        write!(
            socket,
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        BufReader::new(socket)
    }

    /// Runs the controller that writes three stars.
    pub(crate) fn three_stars(&self) {
        let ran = self.command(&["controller", "run", "three", "--prompt", "hello"]);
        assert_eq!((ran.code, ran.out.trim()), (0, "***"), "{ran:?}");
    }

    /// The answer to one LMTP stream.
    fn lmtp(&self, generate: &Value) -> String {
        let asked = json!({"lmtp": {"version": 2, "features": ["controllers", "samples"]}});
        let info = json!({"stream_id": 9, "model": "parrot", "data": asked});
        let lines = format!("MODEL_INFO {info}\nGENERATE {generate}\n");
        let mut answer = String::new();
        let mut reader = self.send("/lmtp", "text/plain", &lines);
        reader.read_to_string(&mut answer).unwrap();
        answer
    }

    /// The texts of the sequences of a run.
    fn run_texts(&self, controller: &str) -> Vec<String> {
        let body = json!({"controller": controller, "prompt": "hello", "max_tokens": 9});
        let mut lines = String::new();
        let mut answer = self.post("/v1/run", &body);
        answer.read_to_string(&mut lines).unwrap();
        let mut texts: Vec<String> = Vec::new();
        for line in lines.lines().filter_map(|line| line.strip_prefix("data: ")) {
            let event: Value = serde_json::from_str(line).unwrap_or_default();
            for fork in event["forks"].as_array().into_iter().flatten() {
                assert_eq!(fork["error"], "", "{lines}");
                let index = fork["index"].as_u64().unwrap() as usize;
                texts.resize(texts.len().max(index + 1), String::new());
                texts[index].push_str(fork["text"].as_str().unwrap());
            }
        }
        assert!(lines.contains("[DONE]"), "{lines}");
        texts
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.serving.id()).unwrap()).unwrap()
    }

    /// A number of the metrics, of all labels together.
    fn metric(&self, name: &str) -> f64 {
        self.serving.metric(name)
    }

    /// The process that runs its controllers.
    fn runtime(&self) -> Pid {
        self.find_runtime().unwrap()
    }

    /// The process that runs its controllers, if there is one at the moment.
    pub(crate) fn find_runtime(&self) -> Option<Pid> {
        let server = self.serving.id().to_string();
        let mut found = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let path = entry.unwrap().path();
            let pid = path.file_name()?.to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(path.join("stat")).ok()?;
            let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?;
            let command = std::fs::read_to_string(path.join("cmdline")).ok()?;
            (parent == server && command.contains("aicirt")).then_some(pid)
        });
        Pid::from_raw(found.next()?)
    }

    /// Kills the server.
    pub(crate) fn kill(self) {
        // Dropped, it is killed and reaped.
        drop(self.serving);
    }

    /// Ends the server; nothing is left in shared memory.
    fn end(self) {
        let prefix = format!("sw{}.", self.serving.id());
        self.serving.signal(Signal::TERM);
        let (code, log) = self.serving.end();
        assert_eq!(code, 0, "{log}");
        assert_eq!(shared_objects(&prefix), Vec::<String>::new());
    }
}

pub(crate) fn shared_objects(prefix: &str) -> Vec<String> {
    let names = std::fs::read_dir("/dev/shm").unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains(prefix)).collect()
}

/// Reads on until a line contains `part`; returns everything that was read.
fn read_until(lines: &mut impl BufRead, part: &str) -> String {
    let mut read = String::new();
    while !read.contains(part) {
        assert_ne!(lines.read_line(&mut read).unwrap(), 0, "no {part}: {read}");
    }
    read
}

/// Compiles, loads and counts by the setting, wherever controllers run.
#[test]
fn ai_733_fuel_of_the_configuration_ends_a_callback() {
    const ENDLESS: &str = r#"(module
      (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
      (memory (export "memory") 1)
      (data (i32.const 0) "{\"prompt\":[104]}")
      (func (export "aici_create") (result i32) (i32.const 1))
      (func (export "aici_init_prompt") (param i32) (call $ret (i32.const 0) (i32.const 16)))
      (func (export "aici_mid_process") (param i32) (loop $l (br $l))))"#;
    for (name, isolation) in [
        ("fuel-shared", "isolation = \"shared\""),
        ("fuel-process", "isolation = \"process\""),
    ] {
        let controllers = format!("fuel = 100000\n{isolation}");
        let server = Isolated::start(name, &controllers, "parallel = 4");
        server.three_stars();
        let file = server.here.join("loop.wasm");
        std::fs::write(file, wat::parse_str(ENDLESS).unwrap()).unwrap();
        let uploaded = server.command(&["controller", "upload", "loop.wasm", "--tag", "loop"]);
        assert_eq!(uploaded.code, 0, "{uploaded:?}");
        let ran = server.command(&["controller", "run", "loop", "--prompt", "x"]);
        assert_ne!(ran.code, 0, "{ran:?}");
        assert!(ran.err.contains("fuel exhausted"), "{ran:?}");
    }
}

/// AI-850, AI-854: a killed runtime costs the streams that it steers, once each, and nothing else.
#[test]
fn ai_852_a_killed_runtime_ends_its_streams_and_the_next_request_has_a_new_one() {
    let server = Isolated::start(
        "isolated-killed",
        "isolation = \"process\"",
        "tokens_per_s = 40.0",
    );
    server.three_stars();
    assert_eq!(server.run_texts("fork"), ["*", "+"]);
    let text = "the other stream is whole, whatever happens beside it: ".repeat(2);
    let plain = json!({"text_input": text, "parameters": {"stream": true, "max_tokens": 500}});
    let mut plain = server.stream(&plain);
    let steered = json!({"text_input": "x", "parameters": {"stream": true, "max_tokens": 3000, "controller": "endless"}});
    let mut steered = server.stream(&steered);
    read_until(&mut steered, "\"text_output\":\"*\"");
    read_until(&mut plain, "\"text_output\":\"t\"");
    let killed = server.runtime();
    kill_process(killed, Signal::KILL).unwrap();
    let mut rest = String::new();
    steered.read_to_string(&mut rest).unwrap();
    assert_eq!(rest.matches("runtime-lost").count(), 1, "{rest}");
    assert_eq!(rest.matches("\"error\"").count(), 1, "{rest}");

    server.three_stars();
    assert_ne!(server.runtime(), killed);
    let stat = format!("/proc/{}/stat", killed.as_raw_nonzero());
    assert!(!Path::new(&stat).exists(), "it was not reaped");

    let mut rest = String::new();
    plain.read_to_string(&mut rest).unwrap();
    // The first event was read above.
    let texts = rest.lines().filter_map(|line| {
        let event: Value = serde_json::from_str(line.strip_prefix("data:")?.trim()).ok()?;
        Some(event["text_output"].as_str()?.to_owned())
    });
    assert_eq!(texts.collect::<String>(), text[1..], "{rest}");
    server.end();
}

/// AI-812: past its limit it is killed, and what it steers ends with that. AI-245
#[test]
fn ai_851_a_runtime_that_stops_is_ended_in_time() {
    let server = Isolated::start(
        "isolated-stopped",
        "isolation = \"process\"",
        "tokens_per_s = 40.0",
    );
    let steered = json!({"text_input": "x", "parameters": {"stream": true, "max_tokens": 3000, "controller": "endless"}});
    let mut steered = server.stream(&steered);
    read_until(&mut steered, "\"text_output\":\"*\"");
    kill_process(server.runtime(), Signal::STOP).unwrap();
    let mut rest = String::new();
    steered.read_to_string(&mut rest).unwrap();
    assert_eq!(rest.matches("runtime-lost").count(), 1, "{rest}");
    server.three_stars();
    server.end();
}

/// OA-801
#[test]
fn ai_701_metrics_and_limits_are_those_of_the_process_that_runs_controllers() {
    let server = Isolated::start(
        "isolated-metrics",
        "isolation = \"process\"\nmemory_bytes_total = 1048576\nmemory_bytes = 1048576",
        "tokens_per_s = 40.0",
    );
    assert_eq!(server.metric("sapwood_controllers_live"), 0.0);
    let steered = |controller: &str| json!({"text_input": "x", "parameters": {"stream": true, "max_tokens": 3000, "controller": controller}});
    let mut big = server.stream(&steered("big"));
    read_until(&mut big, "\"text_output\":\"*\"");
    assert_eq!(server.metric("sapwood_controllers_live"), 1.0);
    assert!(server.metric("sapwood_controller_step_seconds_count") >= 1.0);
    // A second one would take more than all may have, and a small one does not.
    let mut refused = String::new();
    server
        .stream(&steered("big"))
        .read_to_string(&mut refused)
        .unwrap();
    assert!(refused.contains("controller memory exhausted"), "{refused}");
    server.three_stars();
    // Asked for every other second, and there are 40 tokens in one.
    while server.metric("sapwood_controller_memory_bytes") == 0.0 {
        read_until(&mut big, "\"text_output\":\"*\"");
    }
    assert_eq!(server.metric("sapwood_controller_memory_bytes"), 786_432.0);
    assert_eq!(server.metric("sapwood_runtime_restarts_total"), 0.0);
    kill_process(server.runtime(), Signal::KILL).unwrap();
    big.read_to_string(&mut refused).unwrap();
    server.three_stars();
    assert_eq!(server.metric("sapwood_runtime_restarts_total"), 1.0);
    assert_eq!(server.metric("sapwood_controller_memory_bytes"), 0.0);
    server.end();
}

/// Where it waits for what does not come, it is asked again after a second, and that is no deadlock.
#[test]
fn ai_1005_a_controller_in_another_process_waits_as_one_in_this_does() {
    for isolation in ["process", "shared"] {
        let server = Isolated::start(
            &format!("isolated-waits-{isolation}"),
            &format!("isolation = \"{isolation}\""),
            "parallel = 4",
        );
        assert_eq!(server.run_texts("waits"), [""], "{isolation}");
        server.end();
    }
}

/// AI-303: either dialect, over either kind of shared memory, by this program under another name.
#[test]
fn ai_850_a_configured_runtime_gets_the_modules_of_the_server() {
    for (dialect, sync) in [
        ("auto", "semaphores"),
        ("p2", "semaphores"),
        ("auto", "futex"),
    ] {
        let name = format!("isolated-{dialect}-{sync}");
        let here = folder(&format!("{name}-runtime"));
        bytes_vocabulary(&here.join("vocabulary.bin"));
        let runtime = format!(
            "runtime = {{ command = \"{}\", dialect = \"{dialect}\", sync = \"{sync}\", args = [\"aicirt\", \
             \"--tokenizer\", \"{}\", \"--cache-dir\", \"{}\", {PATIENT}] }}",
            env!("CARGO_BIN_EXE_sapwood"),
            here.join("vocabulary.bin").display(),
            here.join("cache").display(),
        );
        let server = Isolated::start(&name, &runtime, "parallel = 4");
        server.three_stars();
        assert!(here.join("cache").read_dir().unwrap().count() > 0);
        assert_eq!(server.run_texts("fork"), ["*", "+"]);
        for choices in [1, 3] {
            let line = json!({"stream_id": 1, "model": "parrot", "prompt": [104], "max_tokens": 9, "n": choices,
                              "controller": "three"});
            let lmtp = server.lmtp(&line);
            assert_eq!(lmtp.matches("\"token\":42").count(), 3 * choices, "{lmtp}");
        }
        server.end();
    }
}

/// Writes a trie of the vocabulary that scripted models have by default.
pub(crate) fn bytes_vocabulary(path: &Path) {
    trie_of(258, path);
}

/// Writes a trie of bytes, of which the last two tokens are special.
fn trie_of(tokens: u16, path: &Path) {
    let bytes = (0..tokens - 2).map(|byte| TokenEntry::text([byte.to_le_bytes()[0]]));
    let special = ["<|begin|>", "<|end|>"].map(TokenEntry::special);
    let end = u32::from(tokens) - 1;
    let model = HostModel::new(bytes.chain(special).collect(), end, |_: &str| Vec::new());
    std::fs::write(path, model.trie(TokenView::Named)).unwrap();
}

/// A vocabulary of another size, a program that is no runtime, and none at all.
#[test]
fn ai_850_a_runtime_that_does_not_fit_keeps_its_model_from_starting() {
    let here = folder("isolated-refused");
    let trie = here.join("vocabulary.bin");
    trie_of(10, &trie);
    let own = env!("CARGO_BIN_EXE_sapwood");
    let args = format!("[\"aicirt\", \"--tokenizer\", \"{}\"]", trie.display());
    for (command, args, part) in [
        (own, args.as_str(), "its vocabulary has 10 tokens"),
        ("/bin/false", "[]", "exit status: 1"),
        ("/nowhere/aicirt", "[]", "cannot be started"),
    ] {
        let text = format!(
            "[controllers]\ndir = \"{}\"\nruntime = {{ command = \"{command}\", args = {args} }}\n[[models]]\nname = \
             \"parrot\"\nbackend = \"scripted\"\n",
            here.join("store").display(),
        );
        std::fs::write(here.join("sapwood.toml"), text).unwrap();
        let ended = run(&here, &["serve", "--listen", "127.0.0.1:0"]);
        assert_eq!(ended.code, 5, "{ended:?}");
        assert!(ended.err.contains(part), "{part}: {ended:?}");
    }
}
