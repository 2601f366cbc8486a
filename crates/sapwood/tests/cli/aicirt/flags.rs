//! What single flags of the runtime do, and what a module can do to an engine within them.

use rustix::process::Signal;
use sapwood_control::wire::Synchronisation;
use serde_json::json;

use super::engine::{Engine, EngineSetup, ISOLATIONS, YES, vocabulary};
use crate::process::{folder, run};

#[test]
fn ai_102_a_folder_is_no_tokenizer() {
    let folder = folder("aicirt_tokenizer_folder");
    vocabulary(&folder);
    std::fs::create_dir_all(folder.join("phi")).unwrap();
    std::fs::create_dir_all(folder.join("tokenizers")).unwrap();
    let trie = folder.join("vocabulary.bin");
    std::fs::copy(trie, folder.join("tokenizers/phi.json")).unwrap();
    let saved = ["aicirt", "-t", "phi", "--save-tokenizer", "saved.bin"];
    let ended = run(&folder, &saved);
    assert_eq!(ended.code, 0, "{}", ended.err);
    // And not a name either, if there is none.
    std::fs::create_dir_all(folder.join("gemma")).unwrap();
    let ended = run(&folder, &["aicirt", "-t", "gemma", "--save-tokenizer", "x"]);
    assert_eq!(ended.code, 2, "{}", ended.err);
    assert!(ended.err.contains("it has: phi"), "{}", ended.err);
}

#[test]
fn ai_102_flags_that_do_nothing_print_a_line() {
    let folder = folder("aicirt_nothing");
    for flag in ["--bench", "--fork"] {
        let ended = run(&folder, &["aicirt", flag]);
        assert_eq!((ended.code, ended.out.lines().count()), (0, 1), "{flag}");
    }
}

/// Its `aici_main` prints the argument, or traps where there is none.
#[test]
fn ai_102_a_module_is_run_once_with_its_argument() {
    const MAIN: &str = r#"(module
      (import "env" "aici_host_read_blob" (func $blob (param i32 i32 i32) (result i32)))
      (import "env" "aici_host_module_arg" (func $arg (result i32)))
      (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
      (memory (export "memory") 1)
      (func (export "aici_create") (result i32) (i32.const 7))
      (func (export "aici_main") (param i32)
        (if (i32.ne (local.get 0) (i32.const 7)) (then (unreachable)))
        (i32.store (i32.const 0) (i32.const 64))
        (i32.store (i32.const 4) (call $blob (call $arg) (i32.const 64) (i32.const 100)))
        (if (i32.eqz (i32.load (i32.const 4))) (then (unreachable)))
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))))"#;
    let folder = folder("aicirt_run");
    vocabulary(&folder);
    std::fs::write(folder.join("main.wasm"), wat::parse_str(MAIN).unwrap()).unwrap();
    std::fs::write(folder.join("arg.txt"), "printed\n").unwrap();
    let command = ["aicirt", "-t", "vocabulary.bin", "-m", "main.wasm"];
    let of = |flags: &[&str]| run(&folder, &[&command, flags].concat());
    let ran = of(&["--run", "--run-arg", "arg.txt"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let (printed, id) = ran.out.split_once('\n').unwrap();
    assert_eq!((printed, id.trim().len()), ("printed", 64), "{}", ran.out);
    // Without the flag it is installed alone.
    let installed = of(&[]);
    assert_eq!((installed.code, &*installed.out), (0, id));
    let failed = of(&["-r"]);
    assert_eq!((failed.code, &*failed.out), (1, ""), "{}", failed.err);
    assert!(failed.err.contains("unreachable"), "{}", failed.err);
    let missing = of(&["--run", "--run-arg", "no.txt"]);
    assert_eq!(missing.code, 2, "{}", missing.err);
    assert!(missing.err.contains("no.txt"), "{}", missing.err);
}

#[test]
fn ai_102_a_restricted_runtime_takes_no_upload_and_runs_what_is_there() {
    let folder = folder("aicirt_restricted");
    vocabulary(&folder);
    std::fs::write(folder.join("yes.wasm"), wat::parse_str(YES).unwrap()).unwrap();
    let installed = run(
        &folder,
        &["aicirt", "-m", "yes.wasm", "--tag", "yes-latest"],
    );
    assert_eq!(installed.code, 0, "{}", installed.err);
    let setup = EngineSetup {
        flags: &["--restricted"],
        ..EngineSetup::new(Synchronisation::Futex)
    };
    let mut engine = Engine::start(&folder, &setup);
    assert_eq!(
        engine.side(r#"{"op":"mk_module","binary":"AGFzbQEAAAA="}"#),
        r#"{"type":"error","error":"module upload disabled","is_user_error":true}"#
    );
    engine.instantiate("r", "yes-latest");
}

/// The other flag, for realtime priority, is refused by most systems, and that costs nothing.
#[test]
fn ai_106_a_kept_runtime_outlives_its_parent() {
    let folder = folder("aicirt_kept");
    let setup = EngineSetup {
        under_shell: true,
        flags: &["--keep", "--realtime"],
        ..EngineSetup::new(Synchronisation::Futex)
    };
    let mut engine = Engine::start(&folder, &setup);
    let pong = r#"{"type":"ok","data":{"pong":1}}"#;
    assert_eq!(engine.main(r#"{"op":"ping"}"#), pong);
    let runtime = engine.runtime_of_shell();
    let ended = rustix::process::pidfd_open(runtime, rustix::process::PidfdFlags::empty()).unwrap();
    let ends_within = |seconds: i64| {
        let within = rustix::event::Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        };
        let mut polled = [rustix::event::PollFd::new(
            &ended,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut polled, Some(&within)).unwrap() == 1
    };
    engine.kill();
    assert!(!ends_within(1));
    rustix::process::kill_process(runtime, Signal::TERM).unwrap();
    assert!(ends_within(60));
}

#[test]
fn ai_441_a_late_mid_is_skipped_if_the_flag_says_so() {
    let folder = folder("aicirt_late_mid");
    for (policy, skips) in [("skip", true), ("fail", false)] {
        let setup = EngineSetup {
            flags: &["--late-mid", policy, "--wasm-max-step-time", "50"],
            ..EngineSetup::isolated("shared")
        };
        let mut engine = Engine::start(&folder, &setup);
        engine.install("loop-latest", &YES.replace("(;MID;)", "(loop $l (br $l))"));
        engine.instantiate("r", "loop-latest");
        let bind = json!({"op": "post_pre_process", "pre_ops": [{"id": 4, "req_id": "r"}]});
        engine.main_json(&bind);
        let answer = engine.main_json(&json!({"op": "mid_process", "ops": [{"id": 4}]}));
        let it = &answer["data"]["seqs"]["4"];
        if skips {
            assert_eq!(
                it["result"],
                json!({"ff_tokens": [], "backtrack": 1}),
                "{it}"
            );
            let log = "⏲ timeout [deadline: 50ms; step 1/10]\n";
            assert_eq!((&it["error"], &it["logs"]), (&json!(""), &json!(log)));
        } else {
            assert_eq!(it["error"], "Worker: timeout", "{it}");
        }
    }
}

#[test]
fn ai_733_fuel_ends_a_callback_whatever_time_it_has() {
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_fuel_{isolation}"));
        let setup = EngineSetup {
            flags: &["--wasm-max-fuel", "100000", "--wasm-max-step-time", "60000"],
            ..EngineSetup::isolated(isolation)
        };
        let mut engine = Engine::start(&folder, &setup);
        engine.install("yes-latest", YES);
        engine.install("loop-latest", &YES.replace("(;MID;)", "(loop $l (br $l))"));
        engine.instantiate("r4", "loop-latest");
        engine.instantiate("r5", "yes-latest");
        let bind = json!([{"id": 4, "req_id": "r4"}, {"id": 5, "req_id": "r5"}]);
        engine.main_json(&json!({"op": "post_pre_process", "pre_ops": bind}));
        let answer = engine.main_json(&json!({"op": "mid_process", "ops": [{"id": 4}, {"id": 5}]}));
        let seqs = &answer["data"]["seqs"];
        let error = seqs["4"]["error"].as_str().unwrap();
        assert!(error.starts_with("Error (mid): "), "{error}");
        assert!(error.ends_with("fuel exhausted"), "{error}");
        assert_eq!(seqs["5"]["error"], "", "{answer}");
    }
}

/// On the P2 wire something is made for each fork. AI-413, AI-742
#[test]
fn ai_1090_a_module_that_asks_for_all_forks_there_are_costs_its_sequence_alone() {
    let runs = r#"{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}"#;
    assert!(YES.contains(runs));
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_forks_{isolation}"));
        for (flags, p2) in [(&["--cap-fork"][..], true), (&[][..], false)] {
            let setup = EngineSetup {
                flags,
                ..EngineSetup::isolated(isolation)
            };
            let mut engine = Engine::start(&folder, &setup);
            engine.install("yes-latest", YES);
            for (id, forks) in [(4, 16), (5, 17), (6, 2_000_000), (7, u32::MAX)] {
                // As many bytes as before, which the module counts.
                let json = format!("{{\"num_forks\":{forks}}}");
                let wants = format!("{json:<46}").replace('"', "\\\"");
                engine.install("forks-latest", &YES.replace(runs, &wants));
                engine.instantiate(&format!("r{id}"), "forks-latest");
            }
            engine.instantiate("r8", "yes-latest");
            let bind: Vec<_> = (4..9)
                .map(|id| json!({"id": id, "req_id": format!("r{id}")}))
                .collect();
            let (request, member) = if p2 {
                (
                    json!({"op": "mid_process", "ops": bind, "freed": []}),
                    "seqs",
                )
            } else {
                (
                    json!({"op": "post_pre_process", "pre_ops": bind}),
                    "pre_seqs",
                )
            };
            let answer = engine.main_json(&request);
            let seqs = &answer["data"][member];
            for id in ["5", "6", "7"] {
                let label = if p2 { "mid" } else { "pre0" };
                let error = format!("Error ({label}): too many forks (max=16)");
                assert_eq!(seqs[id]["error"], error, "{answer}");
            }
            for id in ["4", "8"] {
                assert_eq!(seqs[id]["error"], "", "{answer}");
            }
            if p2 {
                let branches = seqs["4"]["result"]["branches"].as_array().unwrap();
                assert_eq!(branches.len(), 16);
                assert_eq!(seqs["8"]["result"]["branches"][0]["sample_mask"], 0);
            } else {
                assert_eq!(seqs["4"]["result"]["num_forks"], 16);
            }
        }
    }
}

/// AI-421
#[test]
fn ai_315_what_a_start_that_traps_has_printed_stands_once_in_its_logs() {
    const BAD: &str = r#"(module
      (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
      (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
      (memory (export "memory") 1)
      (data (i32.const 64) "last words\n")
      (data (i32.const 0) "\40\00\00\00\0b\00\00\00")
      (func (export "aici_create") (result i32) (i32.const 1))
      (func (export "aici_init_prompt") (param i32)
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
        (unreachable))
      (func (export "aici_mid_process") (param i32) (unreachable)))"#;
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_last_words_{isolation}"));
        let setup = EngineSetup {
            flags: &["--cap-fork"],
            ..EngineSetup::isolated(isolation)
        };
        let mut engine = Engine::start(&folder, &setup);
        engine.install("bad-latest", BAD);
        let begun = engine.side_json(&json!({
            "op": "instantiate", "req_id": "r", "prompt": [1], "module_id": "bad-latest", "module_arg": "",
        }));
        let error = begun["data"]["error"].as_str().unwrap();
        assert!(error.starts_with("Error (setup): last words\n"), "{error}");
        assert_eq!(begun["data"]["logs"], error);
    }
}

/// The check of uploads has the limit of the flag, in either direction.
#[test]
fn ai_102_a_module_may_begin_with_as_much_memory_as_the_flag_says() {
    let folder = folder("aicirt_memory");
    vocabulary(&folder);
    let module = |pages: u32| {
        let text = YES.replace("\"memory\") 2", &format!("\"memory\") {pages}"));
        let file = format!("pages-{pages}.wasm");
        std::fs::write(folder.join(&file), wat::parse_str(text).unwrap()).unwrap();
        file
    };
    // A page has 64 KiB.
    for (flag, pages, code) in [
        (None, 1_024, 0),
        (None, 1_025, 2),
        (Some("--wasm-max-memory=80"), 1_280, 0),
        (Some("--wasm-max-memory=80"), 1_281, 2),
        (Some("--wasm-max-memory=1"), 16, 0),
        (Some("--wasm-max-memory=1"), 17, 2),
    ] {
        let file = module(pages);
        let arguments: Vec<_> = ["aicirt", "-m", &file].into_iter().chain(flag).collect();
        let ended = run(&folder, &arguments);
        assert_eq!(ended.code, code, "{arguments:?} {}", ended.err);
        let refused = ended.err.contains("invalid module: ");
        assert_eq!(refused, code == 2, "{arguments:?} {}", ended.err);
    }
    // As an engine uploads it, and the instance has that much.
    let setup = EngineSetup {
        flags: &["--wasm-max-memory", "80"],
        ..EngineSetup::new(Synchronisation::Futex)
    };
    let mut engine = Engine::start(&folder, &setup);
    engine.install("large", &YES.replace("\"memory\") 2", "\"memory\") 1280"));
    engine.instantiate("r", "large");
}
