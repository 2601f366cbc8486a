//! Controllers written as text, run by a host.

#[cfg(target_os = "linux")]
mod in_processes;
mod in_threads;

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{StepWaker, Token};

use super::*;
use crate::module::{ModuleLimits, check};
use crate::trie::{HostModel, TokenEntry};

/// Text of a P1 module, callback by callback.
pub(crate) struct P1<'t> {
    pub(crate) globals: &'t str,
    pub(crate) functions: &'t str,
    pub(crate) create: &'t str,
    pub(crate) init_prompt: &'t str,
    pub(crate) pre: &'t str,
    pub(crate) mid: &'t str,
    pub(crate) post: &'t str,
}

impl Default for P1<'_> {
    fn default() -> Self {
        Self {
            globals: "(memory (export \"memory\") 2)",
            functions: "",
            create: "(i32.const 7)",
            init_prompt: "(call $ret (i32.const 0) (i32.const 2))",
            pre: "(call $ret (i32.const 8) (i32.const 46))",
            mid: "(call $ret (i32.const 64) (i32.const 21))",
            post: "(call $ret (i32.const 96) (i32.const 14))",
        }
    }
}

impl P1<'_> {
    pub(crate) fn text(&self) -> String {
        let Self {
            globals,
            functions,
            create,
            init_prompt,
            pre,
            mid,
            post,
        } = self;
        format!(
            r#"(module {IMPORTS}
            (import "env" "aici_host_return_logit_bias" (func $bias (param i32)))
            {globals} {DATA} {PRINT}
            {functions}
            (func (export "aici_create") (result i32) {create})
            (func (export "aici_init_prompt") (param i32) {init_prompt})
            (func (export "aici_pre_process") (param i32) {pre})
            (func (export "aici_mid_process") (param i32) {mid})
            (func (export "aici_post_process") (param i32) {post}))"#
        )
    }
}

/// Text of a P2 module. `process`: the body of its callback; `data`: data segments.
pub(crate) fn p2(data: &str, process: &str) -> String {
    format!(
        r#"(module {IMPORTS}
        (import "env" "aici_host_return_logit_bias" (func $bias (param i32) (result i32)))
        (memory (export "memory") 2) {PRINT} {data}
        (func (export "aici_create") (result i32) (i32.const 7))
        (func (export "aici_init_prompt") (param i32)
            (call $ret (i32.const 8192) (call $blob (i32.const 4) (i32.const 8192) (i32.const 8192))))
        (func (export "aici_mid_process") (param i32) {process}))"#
    )
}

/// A P2 module whose callback ends by returning `json`.
pub(crate) fn p2_returning(data: &str, process: &str, json: &str) -> String {
    let len = json.len();
    let data = format!(
        "{data} (data (i32.const 2048) \"{}\")",
        json.replace('"', "\\\"")
    );
    p2(
        &data,
        &format!("{process} (call $ret (i32.const 2048) (i32.const {len}))"),
    )
}

const IMPORTS: &str = r#"
    (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
    (import "env" "aici_host_read_blob" (func $blob (param i32 i32 i32) (result i32)))
    (import "env" "aici_host_module_arg" (func $module_arg (result i32)))
    (import "env" "aici_host_process_arg" (func $process_arg (result i32)))
    (import "env" "aici_host_tokens" (func $tokens (result i32)))
    (import "env" "aici_host_token_trie" (func $trie (result i32)))
    (import "env" "aici_host_tokenize" (func $tokenize (param i32 i32) (result i32)))
    (import "env" "aici_host_self_seq_id" (func $id (result i32)))
    (import "env" "aici_host_storage_cmd" (func $storage (param i32 i32) (result i32)))
    (import "env" "aici_host_eos_token" (func $eos (result i32)))
    (import "env" "aici_host_get_config" (func $config (param i32 i32) (result i32)))
    (import "env" "aici_host_stop" (func $stop))
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
    (import "wasi_snapshot_preview1" "clock_time_get" (func $clock (param i32 i64 i32) (result i32)))
    (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_fdstat_get" (func $fdstat (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "args_sizes_get" (func $args (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_seek" (func $seek (param i32 i64 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_tell" (func $tell (param i32 i32) (result i32)))
"#;

const DATA: &str = r#"
    (data (i32.const 0) "{}")
    (data (i32.const 8) "{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}")
    (data (i32.const 64) "{\"SampleWithBias\":{}}")
    (data (i32.const 96) "{\"stop\":false}")
    (data (i32.const 112) "{\"stop\":true}")
"#;

/// `$print` prints bytes, `$hex` a number and a space.
const PRINT: &str = r#"
    (func $print (param $at i32) (param $len i32)
        (i32.store (i32.const 256) (local.get $at))
        (i32.store (i32.const 260) (local.get $len))
        (drop (call $write (i32.const 1) (i32.const 256) (i32.const 1) (i32.const 264))))
    (func $hex (param $n i32) (local $i i32) (local $d i32)
        (loop $next
            (local.set $d (i32.and (i32.shr_u (local.get $n)
                (i32.sub (i32.const 28) (i32.shl (local.get $i) (i32.const 2)))) (i32.const 15)))
            (i32.store8 (i32.add (i32.const 272) (local.get $i)) (i32.add (local.get $d)
                (select (i32.const 48) (i32.const 87) (i32.lt_u (local.get $d) (i32.const 10)))))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $next (i32.lt_u (local.get $i) (i32.const 8))))
        (i32.store8 (i32.const 280) (i32.const 32))
        (call $print (i32.const 272) (i32.const 9)))
"#;

/// The smallest complete controller of the specification: token 42, three times.
pub(crate) fn token_42() -> String {
    P1 {
        globals: "(memory (export \"memory\") 2) (global $n (mut i32) (i32.const 0))",
        mid: "(i32.store (i32.const 1028) (i32.const 0x400))
              (call $bias (i32.const 1024)) (call $ret (i32.const 64) (i32.const 21))",
        post: "(global.set $n (i32.add (global.get $n) (i32.const 1)))
               (if (i32.lt_u (global.get $n) (i32.const 3))
                 (then (call $ret (i32.const 96) (i32.const 14)))
                 (else (call $ret (i32.const 112) (i32.const 13))))",
        ..P1::default()
    }
    .text()
}

/// Limits for tests: one thread, so that waiting behind each other shows, and time limits that a busy machine keeps.
pub(crate) fn small() -> HostConfig {
    HostConfig {
        instances: 64,
        memory_bytes: 4 << 20,
        threads: Some(1),
        init_time: Duration::from_secs(10),
        pre_step_time: Duration::from_secs(10),
        step_time: Duration::from_secs(10),
        ..HostConfig::default()
    }
}

pub(crate) fn host() -> Host {
    Host::new(small()).unwrap()
}

pub(crate) fn load(host: &Host, text: &str) -> Program {
    let bytes = wat::parse_str(text).unwrap();
    let checked = check(&bytes, &ModuleLimits::default()).unwrap();
    let artefact = host.compile(&checked).unwrap();
    host.load(&checked, &artefact).unwrap()
}

/// 100 tokens: id 0 begins a text, 1 ends it, id 2 and up are the bytes 0, 1 and so on.
pub(crate) fn model() -> Arc<HostModel> {
    Arc::new(bare_model())
}

pub(crate) fn bare_model() -> HostModel {
    let special = ["<s>", "</s>"].map(TokenEntry::special);
    let bytes = (0..98_u8).map(|byte| TokenEntry::text([byte]));
    let tokens = special.into_iter().chain(bytes).collect();
    let tokenizer = |text: &str| -> Vec<Token> {
        assert_ne!(text, "defect", "a defect of the tokenizer");
        text.bytes().map(|byte| Token::from(byte) + 2).collect()
    };
    HostModel::new(tokens, 1, tokenizer)
}

/// Wakes a test that waits.
#[derive(Default)]
pub(crate) struct Bell(Mutex<u64>, Condvar);

impl StepWaker for Bell {
    fn wake(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_all();
    }
}

impl Bell {
    /// Calls `poll` after each wake-up, until it has a value.
    pub(crate) fn wait<T>(&self, mut poll: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut rung = self.0.lock().unwrap();
        loop {
            let before = *rung;
            drop(rung);
            if let Some(value) = poll() {
                return value;
            }
            assert!(Instant::now() < deadline, "nothing happened for a minute");
            rung = self.0.lock().unwrap();
            if *rung == before {
                // What has no waker, as the end of a discarded instance, is polled.
                let wait = self.1.wait_timeout(rung, Duration::from_millis(5));
                rung = wait.unwrap().0;
            }
        }
    }
}

/// A sequence of a test.
pub(crate) struct Sequence {
    pub(crate) instance: Instance,
    bell: Arc<Bell>,
}

impl Sequence {
    pub(crate) fn start(host: &Host, program: &Program) -> Self {
        let limits = VariablesLimits::default();
        Self::start_in(host, program, &Group::new(16, limits))
    }

    pub(crate) fn start_in(host: &Host, program: &Program, group: &Arc<Group>) -> Self {
        Self::start_with(host, program, group, "arg")
    }

    pub(crate) fn start_with(
        host: &Host,
        program: &Program,
        group: &Arc<Group>,
        arg: &str,
    ) -> Self {
        Self::start_of(host, program, group, (model(), arg))
    }

    pub(crate) fn start_of(
        host: &Host,
        program: &Program,
        group: &Arc<Group>,
        (model, arg): (Arc<HostModel>, &str),
    ) -> Self {
        let bell = Arc::new(Bell::default());
        let start = Start {
            model,
            arg: arg.into(),
            prompt: vec![0, 50],
            group: Arc::clone(group),
            capabilities: Capabilities::ALL,
            waker: Arc::clone(&bell) as _,
        };
        let instance = Instance::start(host, program, start);
        Self { instance, bell }
    }

    /// The next outcome.
    pub(crate) fn outcome(&mut self) -> Outcome {
        let instance = &mut self.instance;
        self.bell.wait(|| instance.poll())
    }

    pub(crate) fn begun(mut self) -> Self {
        let begun = self.outcome().result.unwrap();
        assert!(matches!(begun, Returned::Begun { .. }), "{begun:?}");
        self
    }

    pub(crate) fn call(&mut self, callback: Callback) -> Outcome {
        self.instance.call(callback);
        self.outcome()
    }

    pub(crate) fn pre(&mut self) -> Outcome {
        self.call(Callback::Pre)
    }

    pub(crate) fn mid(&mut self) -> Outcome {
        let fork_group = vec![3];
        self.call(Callback::Mid { fork_group })
    }

    pub(crate) fn post(&mut self, tokens: &[Token]) -> Outcome {
        self.call(Callback::Post {
            backtrack: 0,
            tokens: tokens.to_vec(),
        })
    }

    pub(crate) fn process(&mut self) -> Outcome {
        self.call(Callback::Process {
            backtrack: 0,
            tokens: Vec::new(),
            sampled: None,
            fork_group: vec![3],
        })
    }

    pub(crate) fn fork(&mut self) -> Self {
        let instance = self.instance.fork().unwrap();
        let bell = Arc::clone(&self.bell);
        Self { instance, bell }
    }
}

/// The command that runs a test of this binary as a template.
#[cfg(target_os = "linux")]
pub(crate) fn template_command(test: &str) -> Vec<std::ffi::OsString> {
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", test, "--nocapture", "--test-threads=1"];
    let command = std::iter::once(program.into_os_string());
    command.chain(arguments.map(Into::into)).collect()
}

/// Whether this process was started by [`template_command`], with a socket as standard input.
#[cfg(target_os = "linux")]
pub(crate) fn is_template() -> bool {
    let stat = rustix::fs::fstat(std::io::stdin()).unwrap();
    let is_socket = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_socket();
    is_socket && std::env::args().any(|argument| argument == "--test-threads=1")
}

/// What the tests of both modes have in common beyond this module: hosts of their mode, made by `new_host`.
macro_rules! in_this_mode {
    () => {
        fn host() -> Host {
            new_host(small())
        }

        /// Runs the `mid` of a P1 module once.
        fn mid_of(module: P1<'_>) -> Outcome {
            let host = host();
            let program = load(&host, &module.text());
            Sequence::start(&host, &program).begun().mid()
        }

        fn mid(body: &str) -> Outcome {
            let mid = format!("{body} (call $ret (i32.const 64) (i32.const 21))");
            mid_of(P1 {
                mid: &mid,
                ..P1::default()
            })
        }
    };
}
use in_this_mode;

fn failure(outcome: Outcome) -> CallFailure {
    outcome.result.unwrap_err()
}

/// Waits until every instance has been freed.
fn wait_until_free(host: &Host) {
    Bell::default().wait(|| (host.live() == 0 && host.memory_bytes() == 0).then_some(()));
}
