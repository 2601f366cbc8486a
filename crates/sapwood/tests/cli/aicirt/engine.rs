//! An engine without a model: it creates the shared objects and starts the runtime.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use sapwood_control::trie::{HostModel, TokenEntry, TokenView};
use sapwood_control::wire::{EngineWire, MessageSlot, Received, Synchronisation, WireConfig};
use serde_json::{Value, json};

use crate::process::sapwood;

pub(super) const SYNCHRONISATIONS: [Synchronisation; 2] =
    [Synchronisation::Semaphores, Synchronisation::Futex];

pub(super) const ISOLATIONS: [&str; 2] = ["sequence", "shared"];

/// Allows only token 3582, "yes", and stops after it.
pub(super) const YES: &str = r#"(module
  (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
  (import "env" "aici_host_return_logit_bias" (func $bias (param i32)))
  (memory (export "memory") 2)
  (data (i32.const 0) "{}")
  (data (i32.const 8) "{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}")
  (data (i32.const 64) "{\"SampleWithBias\":{}}")
  (data (i32.const 112) "{\"stop\":true}")
  (func (export "aici_create") (result i32) (i32.const 1))
  (func (export "aici_init_prompt") (param i32) (call $ret (i32.const 0) (i32.const 2)))
  (func (export "aici_pre_process") (param i32) (call $ret (i32.const 8) (i32.const 46)))
  (func (export "aici_mid_process") (param i32)
    (;MID;)
    (i32.store (i32.const 1468) (i32.const 0x40000000))
    (call $bias (i32.const 1024)) (call $ret (i32.const 64) (i32.const 21)))
  (func (export "aici_post_process") (param i32) (call $ret (i32.const 112) (i32.const 13))))"#;

/// The same for P2, without the stop.
pub(super) const YES_P2: &str = r#"(module
  (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
  (import "env" "aici_host_return_logit_bias" (func $bias (param i32) (result i32)))
  (memory (export "memory") 2)
  (data (i32.const 0) "{\"prompt\":[1]}")
  (data (i32.const 64) "{\"branches\":[{\"sample_mask\":0,\"temperature\":null,\"splices\":[]}]}")
  (func (export "aici_create") (result i32) (i32.const 1))
  (func (export "aici_init_prompt") (param i32) (call $ret (i32.const 0) (i32.const 14)))
  (func (export "aici_mid_process") (param i32)
    (i32.store (i32.const 1468) (i32.const 0x40000000))
    (drop (call $bias (i32.const 1024)))
    (call $ret (i32.const 64) (i32.const 64))))"#;

/// Writes `vocabulary.bin`: 4,000 tokens, of which 3582 is "yes" and 2 ends a text.
pub(super) fn vocabulary(folder: &Path) {
    let mut tokens: Vec<_> = (0..4000)
        .map(|id| TokenEntry::text(format!("t{id}")))
        .collect();
    tokens[2] = TokenEntry::special("</s>");
    tokens[3582] = TokenEntry::text("yes");
    let model = HostModel::new(tokens, 2, |_: &str| Vec::new());
    std::fs::write(folder.join("vocabulary.bin"), model.trie(TokenView::Named)).unwrap();
}

/// The shared objects under a prefix.
pub(super) fn left(prefix: &str) -> Vec<String> {
    let names = std::fs::read_dir("/dev/shm").unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains(&prefix[1..])).collect()
}

/// How an engine is started.
pub(super) struct EngineSetup<'a> {
    pub(super) synchronisation: Synchronisation,
    /// Without one, the default.
    pub(super) isolation: Option<&'a str>,
    /// The time limits are those by default; else a busy machine keeps them too.
    pub(super) default_times: bool,
    /// Further flags of the runtime.
    pub(super) flags: &'a [&'a str],
    /// The runtime's parent is a shell.
    pub(super) under_shell: bool,
}

impl EngineSetup<'_> {
    /// In a given mode.
    pub(super) const fn isolated(isolation: &'static str) -> Self {
        Self {
            isolation: Some(isolation),
            ..Self::new(Synchronisation::Futex)
        }
    }

    pub(super) const fn new(synchronisation: Synchronisation) -> Self {
        Self {
            synchronisation,
            isolation: None,
            default_times: false,
            flags: &[],
            under_shell: false,
        }
    }
}

/// The engine and its runtime, which is killed at the latest when this is dropped.
pub(super) struct Engine {
    wire: EngineWire,
    child: Child,
    /// What the shell prints: the number of its child.
    out: BufReader<ChildStdout>,
    log: String,
    rids: u32,
}

impl Engine {
    pub(super) fn start(folder: &Path, setup: &EngineSetup<'_>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        vocabulary(folder);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("/swe{}.{number}-", std::process::id());
        let config = WireConfig {
            synchronisation: setup.synchronisation,
            message_bytes: 1 << 20,
            mask_bytes: 1 << 20,
            ..WireConfig::new(&prefix)
        };
        let wire = EngineWire::create(&config).unwrap();
        let mut flags = vec![
            "aicirt",
            "--server",
            "-t",
            "vocabulary.bin",
            "--name",
            &prefix,
        ];
        flags.extend(["--json-size=1", "--bin-size", "1"]);
        if setup.synchronisation == Synchronisation::Futex {
            flags.push("--futex");
        }
        if !setup.default_times {
            flags.extend(["--wasm-max-pre-step-time", "10000"]);
            flags.extend(["--wasm-max-step-time", "2000"]);
            flags.extend(["--wasm-max-init-time", "10000"]);
        }
        if let Some(isolation) = setup.isolation {
            flags.extend(["--isolation", isolation]);
        }
        // The last of a flag wins nowhere: a flag of the test replaces ours.
        for given in setup.flags {
            if let Some(at) = flags.iter().position(|flag| flag == given) {
                flags.drain(at..at + 2);
            }
        }
        flags.extend(setup.flags);
        let mut command = if setup.under_shell {
            let mut shell = Command::new("/bin/sh");
            shell
                .args([
                    "-c",
                    "\"$0\" \"$@\" & echo $!; wait",
                    env!("CARGO_BIN_EXE_sapwood"),
                ])
                .args(flags)
                .current_dir(folder)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            shell
        } else {
            sapwood(folder, &flags)
        };
        let mut child = command.spawn().unwrap();
        Self {
            wire,
            out: BufReader::new(child.stdout.take().unwrap()),
            child,
            log: String::new(),
            rids: 0,
        }
    }

    pub(super) fn prefix(&self) -> &str {
        self.wire.prefix()
    }

    pub(super) fn child(&self) -> &Child {
        &self.child
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The process that the shell started.
    pub(super) fn runtime_of_shell(&mut self) -> Pid {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        Pid::from_raw(line.trim().parse().unwrap()).unwrap()
    }

    /// Bytes of the region of masks.
    pub(super) fn masks(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let mut read = Vec::new();
        assert!(self.wire.masks.read(offset, bytes, &mut read));
        read
    }

    /// Exchanges one message of the main channel.
    pub(super) fn main_bytes(&mut self, request: &[u8]) -> Vec<u8> {
        self.wire.requests.send(request).unwrap();
        self.receive_main()
    }

    pub(super) fn receive_main(&mut self) -> Vec<u8> {
        receive(&mut self.wire.responses, &mut self.child)
    }

    /// Waits for a message of the main channel that must not come.
    pub(super) fn receive_nothing(&mut self, time: Duration) {
        let until = Instant::now() + time;
        let received = self.wire.responses.receive(&mut Vec::new(), Some(until));
        assert_eq!(received.unwrap(), Received::Nothing);
    }

    /// The same as text, with processor times as 0.
    pub(super) fn main(&mut self, request: &str) -> String {
        without_times(String::from_utf8(self.main_bytes(request.as_bytes())).unwrap())
    }

    pub(super) fn main_json(&mut self, request: &Value) -> Value {
        serde_json::from_slice(&self.main_bytes(request.to_string().as_bytes())).unwrap()
    }

    /// Sends a request of the main channel, whose answer is not waited for.
    pub(super) fn send_main(&mut self, request: &Value) {
        let request = request.to_string();
        self.wire.requests.send(request.as_bytes()).unwrap();
    }

    /// Exchanges one message of the side channel.
    pub(super) fn side(&mut self, request: &str) -> String {
        self.wire.side_requests.send(request.as_bytes()).unwrap();
        let answer = receive(&mut self.wire.side_responses, &mut self.child);
        String::from_utf8(answer).unwrap()
    }

    /// The same with an `$rid`, for an admin.
    pub(super) fn side_json(&mut self, request: &Value) -> Value {
        self.rids += 1;
        let mut request = request.clone();
        request["$rid"] = json!(self.rids.to_string());
        request["$auth"] = json!({"user": "localhost", "is_admin": true});
        let answer: Value = serde_json::from_str(&self.side(&request.to_string())).unwrap();
        assert_eq!(answer["$rid"], request["$rid"], "{answer}");
        assert_eq!(answer["type"], "ok", "{answer}");
        answer
    }

    /// Uploads and tags a module; returns its id.
    pub(super) fn install(&mut self, tag: &str, module: &str) -> String {
        let module = wat::parse_str(module).unwrap();
        let uploaded = self.side_json(&json!({"op": "mk_module", "binary": base64(&module)}));
        let data = &uploaded["data"];
        assert_eq!(data["wasm_size"], module.len(), "{uploaded}");
        let id = data["module_id"].as_str().unwrap().to_owned();
        let tagged = self.side_json(&json!({"op": "set_tags", "module_id": id, "tags": [tag]}));
        assert_eq!(tagged["data"]["tags"][0]["updated_by"], "localhost");
        id
    }

    pub(super) fn instantiate(&mut self, request: &str, tag: &str) {
        self.side_json(&json!({
            "op": "instantiate", "req_id": request, "prompt": [1], "module_id": tag, "module_arg": "",
        }));
    }

    /// Asks the runtime to stop; returns its exit code.
    pub(super) fn stop(mut self) -> i32 {
        self.wire.requests.send(br#"{"op":"stop"}"#).unwrap();
        self.wait().unwrap()
    }

    /// Waits for the end of the process; `None` if a signal ended it.
    pub(super) fn wait(&mut self) -> Option<i32> {
        // Until the end of its log, which comes with the end of the process.
        if let Some(mut log) = self.child.stderr.take() {
            let _ = log.read_to_string(&mut self.log);
        }
        self.child.wait().unwrap().code()
    }

    pub(super) fn log(&self) -> &str {
        &self.log
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn receive(slot: &mut MessageSlot, child: &mut Child) -> Vec<u8> {
    let mut message = Vec::new();
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let soon = Instant::now() + Duration::from_millis(200);
        match slot.receive(&mut message, Some(soon)).unwrap() {
            Received::Message => return message,
            other => assert_eq!(other, Received::Nothing),
        }
        if let Some(status) = child.try_wait().unwrap() {
            let mut log = String::new();
            if let Some(stderr) = &mut child.stderr {
                let _ = stderr.read_to_string(&mut log);
            }
            panic!("the runtime ended: {status}\n{log}");
        }
        assert!(Instant::now() < until, "no answer");
    }
}

fn without_times(mut text: String) -> String {
    let mut from = 0;
    while let Some(at) = text[from..].find("\"micros\":") {
        let start = from + at + "\"micros\":".len();
        let digits = text[start..].bytes().take_while(u8::is_ascii_digit).count();
        text.replace_range(start..start + digits, "0");
        from = start;
    }
    text
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for piece in bytes.chunks(3) {
        let mut whole = [0; 3];
        whole[..piece.len()].copy_from_slice(piece);
        let bits = u32::from_be_bytes([0, whole[0], whole[1], whole[2]]);
        for at in 0..4 {
            if at <= piece.len() {
                text.push(char::from(DIGITS[(bits >> (18 - 6 * at) & 63) as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}
