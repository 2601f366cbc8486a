//! The AICI runtime as an engine has it: another process behind shared memory.

mod engine;
mod flags;
mod gguf;
mod processes;

use std::os::unix::process::CommandExt as _;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use sapwood_control::wire::{NamedSemaphore, SharedRegion, Synchronisation};
use serde_json::{Value, json};

use self::engine::{
    Engine, EngineSetup, ISOLATIONS, SYNCHRONISATIONS, YES, YES_P2, left, vocabulary,
};
use crate::process::{folder, interrupt, run, run_with, sapwood};

/// The transcript of the page, over both kinds of shared memory and in both isolation modes. AI-101, AI-103, AI-201, AI-231, AI-303,
/// AI-311, AI-315, AI-701
#[test]
fn ai_401_the_transcript_of_the_page_between_two_processes() {
    let modes = SYNCHRONISATIONS.map(|synchronisation| {
        ISOLATIONS.map(|isolation| EngineSetup {
            isolation: Some(isolation),
            ..EngineSetup::new(synchronisation)
        })
    });
    for setup in modes.iter().flatten() {
        let (synchronisation, isolation) = (setup.synchronisation, setup.isolation.unwrap());
        let folder = folder(&format!(
            "aicirt_transcript_{synchronisation:?}_{isolation}"
        ));
        let mut engine = Engine::start(&folder, setup);
        assert_eq!(
            engine.main(r#"{"op":"ping"}"#),
            r#"{"type":"ok","data":{"pong":1}}"#
        );
        assert_eq!(
            engine.main(r#"{"op":"tokens"}"#),
            r#"{"type":"ok","data":{"vocab_size":4000}}"#
        );
        let module_id = engine.install("yes-latest", YES);
        assert_eq!(
            engine.side(r#"{"$rid":"a1","op":"instantiate","req_id":"r7","prompt":[1],"module_id":"yes-latest","module_arg":""}"#),
            r#"{"$rid":"a1","type":"ok","data":{}}"#
        );
        let pre = r#"{"error":"","result":{"suspend":false,"num_forks":1,"ff_tokens":[]},"storage":[],"logs":"","micros":0}"#;
        assert_eq!(
            engine.main(r#"{"op":"post_pre_process","post_ops":[],"pre_ops":[{"id":4,"req_id":"r7"}],"freed":[]}"#),
            format!(r#"{{"type":"ok","data":{{"post_seqs":{{}},"pre_seqs":{{"4":{pre}}}}}}}"#)
        );
        assert_eq!(
            engine.main(r#"{"op":"mid_process","ops":[{"id":4}]}"#),
            r#"{"type":"ok","data":{"seqs":{"4":{"error":"","result":null,"storage":[],"logs":"","micros":0}},"num_seqs":1}}"#
        );
        let row = engine.masks(0, 4 * 4000);
        for (token, element) in row.chunks(4).enumerate() {
            let expected: &[u8] = if token == 3582 {
                &[0; 4]
            } else {
                &[0, 0, 0xc8, 0xc2]
            };
            assert_eq!(element, expected, "token {token}");
        }
        assert_eq!(
            engine.main(r#"{"op":"post_pre_process","post_ops":[{"id":4,"tokens":[3582],"backtrack":0}],"pre_ops":[],"freed":[]}"#),
            format!(
                r#"{{"type":"ok","data":{{"post_seqs":{{"4":{{"error":"","result":{{"stop":true}},"storage":[],"logs":"","micros":0}}}},"pre_seqs":{{"4":{pre}}}}}}}"#
            )
        );
        assert_eq!(
            engine.main(r#"{"op":"post_pre_process","post_ops":[{"id":99,"tokens":[1]}],"pre_ops":[],"freed":[4]}"#),
            r#"{"type":"error","error":"invalid id 99","is_user_error":true}"#
        );
        // The module is on disk, under the hash of its bytes.
        assert!(
            folder
                .join("cache")
                .join(format!("{module_id}.wasm"))
                .exists()
        );
        let prefix = engine.prefix().to_owned();
        assert_eq!(engine.stop(), 0);
        assert_eq!(left(&prefix), Vec::<String>::new());
    }
}

/// AI-103, AI-104, AI-233, AI-504
#[test]
fn ai_501_a_p2_engine_finds_its_rows_where_the_answer_says() {
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_p2_{isolation}"));
        let setup = EngineSetup {
            flags: &["--cap-fork", "--bias-dtype", "f16"],
            ..EngineSetup::isolated(isolation)
        };
        let mut engine = Engine::start(&folder, &setup);
        assert_eq!(
            engine.main(r#"{"op":"tokens"}"#),
            r#"{"type":"ok","data":{"vocab_size":4000,"eos_token_id":2}}"#
        );
        engine.install("yes-latest", YES_P2);
        let begun = engine.side_json(&json!({
            "op": "instantiate", "req_id": "r", "prompt": [1], "module_id": "yes-latest", "module_arg": "",
        }));
        assert_eq!(begun["data"]["result"], json!({"prompt": [1]}));
        let answer = engine.main_json(&json!({
            "op": "mid_process", "ops": [{"id": 4, "req_id": "r", "tokens": [], "sampled": null}], "freed": [],
        }));
        let data = &answer["data"];
        let branches = &data["seqs"]["4"]["result"]["branches"];
        assert_eq!(branches[0]["sample_mask"], 0, "{answer}");
        assert_eq!(
            (&data["dtype"], &data["num_masks"]),
            (&json!("f16"), &json!(1))
        );
        let number = |name: &str| data[name].as_u64().unwrap() as usize;
        let row = engine.masks(number("first_mask_byte_offset"), number("mask_num_bytes"));
        assert_eq!(number("mask_num_bytes"), 2 * number("mask_num_elts"));
        for (token, element) in row.chunks(2).enumerate() {
            let expected: &[u8] = if token == 3582 { &[0, 0] } else { &[0, 0xfc] };
            assert_eq!(element, expected, "token {token}");
        }
        assert_eq!(engine.masks(0, 4), [0xb7, 0x91, 0x12, 0xf0]);
        let refused = engine.main_json(&json!({"op": "post_pre_process"}));
        assert_eq!(refused["error"], "bad op");
    }
}

/// AI-1001, AI-1002
#[test]
fn ai_316_an_engine_of_p1i_has_the_first_pre_and_asks_for_bits() {
    let folder = folder("aicirt_p1i");
    let setup = EngineSetup {
        flags: &["--dialect=p1i"],
        ..EngineSetup::new(Synchronisation::Futex)
    };
    let mut engine = Engine::start(&folder, &setup);
    let hello = json!({"op": "hello", "features": ["bitmask", "compact", "wait", "later"]});
    let answer = engine.side_json(&hello);
    let features = json!(["bitmask", "compact", "wait"]);
    assert_eq!(answer["data"]["features"], features, "{answer}");
    // Both generations of modules.
    for (id, module) in [(4, YES), (5, YES_P2)] {
        engine.install("yes-latest", module);
        let begun = engine.side_json(&json!({
            "op": "instantiate", "req_id": id.to_string(), "prompt": [1], "module_id": "yes-latest", "module_arg": "",
        }));
        assert_eq!(begun["type"], "ok", "{begun}");
        assert_eq!(begun["data"].get("error"), None, "{begun}");
        let pre = json!([{"id": id, "req_id": id.to_string()}]);
        let bound = engine.main_json(&json!({"op": "post_pre_process", "pre_ops": pre}));
        let result = &bound["data"]["pre_seqs"][id.to_string()];
        assert_eq!(result.get("result"), None, "{bound}");
        let answer = engine.main_json(&json!({"op": "mid_process", "ops": [{"id": id}]}));
        let data = &answer["data"];
        assert_eq!(data["dtype"], "bool", "{answer}");
        let bytes = data["mask_num_bytes"].as_u64().unwrap() as usize;
        let row = engine.masks(0, bytes);
        let set = row.iter().map(|byte| byte.count_ones()).sum::<u32>();
        assert_eq!((set, row[3582 / 8] >> (3582 % 8) & 1), (1, 1), "{answer}");
    }
}

/// A module's constraint is over the engine's vocabulary, padding included. AI-701
#[test]
fn ai_1007_modules_follow_constraints_of_the_runtime() {
    const MODULE: &str = r#"(module
      (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
      (import "sapwood" "constraint_new" (func $new (param i32 i32 i32 i32) (result i32)))
      (import "sapwood" "constraint_consume" (func $consume (param i32 i32) (result i32)))
      (import "sapwood" "constraint_mask" (func $mask (param i32) (result i32)))
      (import "sapwood" "mask_return" (func $return (param i32) (result i32)))
      (memory (export "memory") 1)
      (data (i32.const 0) "{\"prompt\":[1]}")
      (data (i32.const 64) "{\"branches\":[{\"sample_mask\":0}]}")
      (data (i32.const 128) "regex(t12|yes)(t7|t80|yes)")
      (func (export "aici_create") (result i32)
        (call $new (i32.const 128) (i32.const 5) (i32.const 133) (i32.const 21)))
      (func (export "aici_init_prompt") (param $h i32)
        (if (i32.eqz (call $consume (local.get $h) (i32.const 12))) (then (unreachable)))
        (call $ret (i32.const 0) (i32.const 14)))
      (func (export "aici_mid_process") (param $h i32)
        (drop (call $return (call $mask (local.get $h))))
        (call $ret (i32.const 64) (i32.const 32))))"#;
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_constraints_{isolation}"));
        let setup = EngineSetup {
            flags: &["--bias-dtype", "bool", "--logits-size", "4100"],
            ..EngineSetup::isolated(isolation)
        };
        let mut engine = Engine::start(&folder, &setup);
        engine.install("follows", MODULE);
        engine.instantiate("r", "follows");
        let answer = engine.main_json(&json!({
            "op": "mid_process", "ops": [{"id": 4, "req_id": "r", "tokens": []}], "freed": [],
        }));
        let data = &answer["data"];
        assert_eq!(data["seqs"]["4"]["error"], "", "{answer}");
        let number = |name: &str| data[name].as_u64().unwrap() as usize;
        let row = engine.masks(number("first_mask_byte_offset"), number("mask_num_bytes"));
        let allows = |token: &usize| row[token / 8] >> (token % 8) & 1 == 1;
        assert_eq!(
            (0..row.len() * 8).filter(allows).collect::<Vec<_>>(),
            [7, 8, 80, 3582]
        );
    }
}

/// What a grammar that takes a while has compiled is there for the clones, and the thread on which it did is not. AI-702,
/// AI-711
#[test]
fn ai_1007_a_controller_forks_as_soon_as_its_constraint_has_compiled() {
    const MODULE: &str = r#"(module
      (import "env" "aici_host_return_process_result" (func $ret (param i32 i32)))
      (import "env" "aici_host_self_seq_id" (func $id (result i32)))
      (import "sapwood" "constraint_new" (func $new (param i32 i32 i32 i32) (result i32)))
      (import "sapwood" "constraint_consume" (func $consume (param i32 i32) (result i32)))
      (import "sapwood" "constraint_mask" (func $mask (param i32) (result i32)))
      (import "sapwood" "mask_return" (func $return (param i32) (result i32)))
      (memory (export "memory") 1)
      (data (i32.const 0) "{}")
      (data (i32.const 8) "{\"num_forks\":1,\"suspend\":false,\"ff_tokens\":[]}")
      (data (i32.const 64) "{\"SampleWithBias\":{}}")
      (data (i32.const 112) "{\"stop\":false}")
      (data (i32.const 128) "regex(t13t9|t14t7|t15t8|z(a?){60}a{60})")
      (func (export "aici_create") (result i32)
        (call $new (i32.const 128) (i32.const 5) (i32.const 133) (i32.const 34)))
      (func (export "aici_init_prompt") (param i32) (call $ret (i32.const 0) (i32.const 2)))
      (func (export "aici_pre_process") (param i32) (call $ret (i32.const 8) (i32.const 46)))
      (func (export "aici_mid_process") (param $h i32)
        (if (i32.eqz (call $consume (local.get $h) (i32.add (i32.const 12) (call $id))))
          (then (unreachable)))
        (drop (call $return (call $mask (local.get $h))))
        (call $ret (i32.const 64) (i32.const 21)))
      (func (export "aici_post_process") (param i32) (call $ret (i32.const 112) (i32.const 14))))"#;
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_constraint_forks_{isolation}"));
        let mut engine = Engine::start(&folder, &EngineSetup::isolated(isolation));
        engine.install("follows", MODULE);
        engine.instantiate("r", "follows");
        let bind = json!([{"id": 1, "req_id": "r"}]);
        engine.main_json(&json!({"op": "post_pre_process", "pre_ops": bind}));
        let answer = engine.main_json(&json!({
            "op": "mid_process", "ops": [{"id": 1}, {"id": 2, "clone_id": 1}, {"id": 3, "clone_id": 1}],
        }));
        for (row, (id, token)) in [("1", 9), ("2", 7), ("3", 8)].into_iter().enumerate() {
            assert_eq!(answer["data"]["seqs"][id]["error"], "", "{answer}");
            let row = engine.masks(row * 4 * 4000, 4 * 4000);
            let allowed = (0..4000).filter(|token| row[4 * token + 2] == 0);
            assert_eq!(allowed.collect::<Vec<_>>(), [token], "{isolation} {id}");
        }
        if isolation == "sequence" {
            assert_eq!(processes::threads(engine.pid()), [1; 4]);
        }
    }
}

fn constraint() -> Value {
    json!({
        "op": "instantiate", "req_id": "r", "prompt": [1], "module_id": "sapwood:regex",
        "module_arg": {"value": "(t7|t80|yes)", "prefix": "t5", "store_var": "said"},
    })
}

#[test]
fn ai_840_native_constraints_are_controllers_of_a_p1_engine() {
    let folder = folder("aicirt_native");
    let mut p1 = Engine::start(&folder, &EngineSetup::new(Synchronisation::Futex));
    p1.side_json(&constraint());
    let bound =
        p1.main_json(&json!({"op": "post_pre_process", "pre_ops": [{"id": 4, "req_id": "r"}]}));
    let pre = json!({"suspend": false, "num_forks": 1, "ff_tokens": [5]});
    assert_eq!(bound["data"]["pre_seqs"]["4"]["result"], pre, "{bound}");
    let answer = p1.main_json(&json!({"op": "mid_process", "ops": [{"id": 4}]}));
    assert_eq!(answer["data"]["seqs"]["4"]["error"], "", "{answer}");
    let row = p1.masks(0, 4 * 4000);
    let allowed = (0..4000).filter(|token| row[4 * token + 2] == 0);
    assert_eq!(allowed.collect::<Vec<_>>(), [7, 8, 80, 3582]);
    let stops = json!({"suspend": false, "num_forks": 0, "ff_tokens": []});
    for (token, expected) in [(3582, &pre_runs()), (2, &stops)] {
        let answer = p1.main_json(&json!({
            "op": "post_pre_process", "post_ops": [{"id": 4, "tokens": [token]}],
        }));
        let sequence = &answer["data"]["pre_seqs"]["4"];
        assert_eq!(&sequence["result"], expected, "{answer}");
        if token == 2 {
            let stored = &sequence["storage"][0]["WriteVar"];
            assert_eq!(
                (&stored["name"], &stored["value"]),
                (&json!("said"), &json!("796573"))
            );
        } else {
            p1.main_json(&json!({"op": "mid_process", "ops": [{"id": 4}]}));
        }
    }
}

#[test]
fn ai_841_what_is_no_constraint_is_a_user_error() {
    let folder = folder("aicirt_no_constraint");
    let mut p1 = Engine::start(&folder, &EngineSetup::new(Synchronisation::Futex));
    for (constraint, argument, error) in [
        ("sapwood:regex", "(", "invalid grammar: "),
        ("sapwood:regexp", "a", "there is no constraint of this name"),
    ] {
        let refused = p1.side(
            &json!({
                "op": "instantiate", "req_id": "x", "prompt": [1],
                "module_id": constraint, "module_arg": argument,
            })
            .to_string(),
        );
        let refused: Value = serde_json::from_str(&refused).unwrap();
        assert!(
            refused["error"].as_str().unwrap().starts_with(error),
            "{refused}"
        );
        assert_eq!(refused["is_user_error"], true);
    }
}

/// An engine that cannot append tokens samples what is forced, as the only one. AI-842
#[test]
fn ai_840_native_constraints_are_controllers_of_a_p2_engine() {
    let folder = folder("aicirt_native_p2");
    let setup = EngineSetup {
        flags: &["--dialect", "p2", "--bias-dtype", "bool"],
        ..EngineSetup::new(Synchronisation::Futex)
    };
    let mut p2 = Engine::start(&folder, &setup);
    p2.side_json(&constraint());
    let ops = [
        json!({"id": 4, "req_id": "r", "tokens": []}),
        json!({"id": 4, "tokens": [5], "sampled": 5}),
        json!({"id": 4, "tokens": [80], "sampled": 80}),
    ];
    for (op, allowed) in ops.into_iter().zip([&[5][..], &[7, 8, 80, 3582], &[2]]) {
        let answer = p2.main_json(&json!({"op": "mid_process", "ops": [op], "freed": []}));
        let data = &answer["data"];
        let number = |name: &str| data[name].as_u64().unwrap() as usize;
        let row = p2.masks(number("first_mask_byte_offset"), number("mask_num_bytes"));
        let tokens = (0..4000).filter(|token| row[token / 8] >> (token % 8) & 1 == 1);
        assert_eq!(tokens.collect::<Vec<_>>(), allowed, "{answer}");
    }
    let last = json!({"id": 4, "tokens": [2], "sampled": 2});
    let answer = p2.main_json(&json!({"op": "mid_process", "ops": [last], "freed": [4]}));
    assert_eq!(
        answer["data"]["seqs"]["4"]["result"],
        json!({"branches": []}),
        "{answer}"
    );
}

fn pre_runs() -> Value {
    json!({"suspend": false, "num_forks": 1, "ff_tokens": []})
}

#[test]
fn ai_602_either_generation_of_modules_runs_on_either_wire() {
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_generations_{isolation}"));
        let mut p1 = Engine::start(&folder, &EngineSetup::isolated(isolation));
        p1.install("yes-latest", YES_P2);
        p1.instantiate("r", "yes-latest");
        let bound =
            p1.main_json(&json!({"op": "post_pre_process", "pre_ops": [{"id": 4, "req_id": "r"}]}));
        let pre = json!({"suspend": false, "num_forks": 1, "ff_tokens": []});
        assert_eq!(bound["data"]["pre_seqs"]["4"]["result"], pre, "{bound}");
        let answer = p1.main_json(&json!({"op": "mid_process", "ops": [{"id": 4}]}));
        assert_eq!(answer["data"]["seqs"]["4"]["error"], "", "{answer}");
        assert_eq!(p1.masks(3582 * 4, 8), [0, 0, 0, 0, 0, 0, 0xc8, 0xc2]);

        let setup = EngineSetup {
            flags: &["--dialect", "p2"],
            ..EngineSetup::isolated(isolation)
        };
        let mut p2 = Engine::start(&folder, &setup);
        p2.install("yes-latest", YES);
        p2.instantiate("r", "yes-latest");
        let answer = p2.main_json(&json!({
            "op": "mid_process", "ops": [{"id": 4, "req_id": "r", "tokens": []}], "freed": [],
        }));
        let branches = json!([{"sample_mask": 0, "temperature": null, "splices": []}]);
        assert_eq!(
            answer["data"]["seqs"]["4"]["result"]["branches"], branches,
            "{answer}"
        );
        assert_eq!(p2.masks(4096 + 3582 * 4, 8), [0, 0, 0, 0, 0, 0, 0x80, 0xff]);
        // Its post stops.
        let answer = p2.main_json(&json!({
            "op": "mid_process", "ops": [{"id": 4, "sampled": 3582, "tokens": [3582]}],
        }));
        assert_eq!(
            answer["data"]["seqs"]["4"]["result"]["branches"],
            json!([]),
            "{answer}"
        );
    }
}

/// AI-731
#[test]
fn ai_441_an_endless_loop_among_others_costs_them_nothing() {
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_loop_{isolation}"));
        let mut engine = Engine::start(&folder, &EngineSetup::isolated(isolation));
        engine.install("yes-latest", YES);
        engine.install("loop-latest", &YES.replace("(;MID;)", "(loop $l (br $l))"));
        for (id, tag) in [(1, "yes-latest"), (2, "loop-latest"), (3, "yes-latest")] {
            engine.instantiate(&format!("r{id}"), tag);
        }
        let bind: Vec<_> = (1..4)
            .map(|id| json!({"id": id, "req_id": format!("r{id}")}))
            .collect();
        engine.main_json(&json!({"op": "post_pre_process", "pre_ops": bind}));
        let answer = engine.main_json(&json!({
            "op": "mid_process", "ops": [{"id": 1}, {"id": 2}, {"id": 3}],
        }));
        let seqs = &answer["data"]["seqs"];
        assert_eq!(seqs["2"]["error"], "Worker: timeout", "{answer}");
        for (row, id) in [(0, "1"), (2, "3")] {
            assert_eq!(seqs[id]["error"], "", "{answer}");
            let token = engine.masks(row * 4 * 4000 + 3582 * 4, 8);
            assert_eq!(token, [0, 0, 0, 0, 0, 0, 0xc8, 0xc2]);
        }
        // The looping callback is gone, and the next step is as quick as ever.
        let answer = engine.main_json(&json!({"op": "post_pre_process", "freed": [2]}));
        assert_eq!(answer["data"]["pre_seqs"]["2"]["error"], "Worker: timeout");
        assert_eq!(
            engine.main(r#"{"op":"ping"}"#),
            r#"{"type":"ok","data":{"pong":1}}"#
        );
    }
}

/// The host, which could interrupt it earlier, lets it go on until the last of its late steps.
#[test]
fn ai_441_a_callback_goes_on_until_its_tenth_late_step() {
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_late_{isolation}"));
        let mut engine = Engine::start(
            &folder,
            &EngineSetup {
                default_times: true,
                ..EngineSetup::isolated(isolation)
            },
        );
        let pre = "\"aici_pre_process\") (param i32)";
        assert!(YES.contains(pre));
        let looping = YES.replace(pre, &format!("{pre} (loop $l (br $l))"));
        engine.install("loop-latest", &looping);
        engine.instantiate("r4", "loop-latest");
        let bind = json!({"op": "post_pre_process", "pre_ops": [{"id": 4, "req_id": "r4"}]});
        let mut answer = engine.main_json(&bind);
        for step in 1..10 {
            let log = format!("⏲ timeout [deadline: 4ms; step {step}/10]\n");
            assert_eq!(answer["data"]["pre_seqs"]["4"]["logs"], log, "{answer}");
            answer = engine.main_json(&json!({"op": "post_pre_process"}));
        }
        assert_eq!(answer["data"]["pre_seqs"]["4"]["error"], "Worker: timeout");
    }
}

#[test]
fn ai_412_forks_share_nothing_but_their_past() {
    for isolation in ISOLATIONS {
        let folder = folder(&format!("aicirt_fork_{isolation}"));
        let mut engine = Engine::start(&folder, &EngineSetup::isolated(isolation));
        engine.install("yes-latest", YES);
        engine.instantiate("r", "yes-latest");
        engine.main_json(&json!({"op": "post_pre_process", "pre_ops": [{"id": 1, "req_id": "r"}]}));
        let answer = engine.main_json(&json!({
            "op": "mid_process", "ops": [{"id": 1}, {"id": 2, "clone_id": 1}, {"id": 3, "clone_id": 1}],
        }));
        for (row, id) in ["1", "2", "3"].iter().enumerate() {
            assert_eq!(answer["data"]["seqs"][id]["error"], "", "{answer}");
            assert_eq!(engine.masks(row * 4 * 4000 + 3582 * 4, 4), [0; 4]);
        }
        // Only 2 has seen a token; the others go on.
        let answer = engine.main_json(&json!({
            "op": "post_pre_process", "post_ops": [{"id": 2, "tokens": [3582]}],
        }));
        assert_eq!(answer["data"]["post_seqs"], {
            let mut expected =
                json!({"2": {"error": "", "result": {"stop": true}, "storage": [], "logs": ""}});
            expected["2"]["micros"] = answer["data"]["post_seqs"]["2"]["micros"].clone();
            expected
        });
        assert_eq!(answer["data"]["pre_seqs"].as_object().unwrap().len(), 3);
    }
}

/// AI-205, AI-221, AI-222, AI-302, AI-304, AI-312
#[test]
fn ai_204_nonsense_is_answered_and_wedges_nothing() {
    let folder = folder("aicirt_nonsense");
    let mut engine = Engine::start(&folder, &EngineSetup::new(Synchronisation::Semaphores));
    let pong = r#"{"type":"ok","data":{"pong":1}}"#;
    for nonsense in [
        &b""[..],
        b"\0\0\0",
        b"{",
        b"[1,2]",
        b"{\"op\":\"ping\"",
        b"\xff\xfe",
    ] {
        let answer: Value = serde_json::from_slice(&engine.main_bytes(nonsense)).unwrap();
        assert_eq!(answer["type"], "json-error", "{answer}");
        assert_eq!(engine.main(r#"{"op":"ping"}"#), pong);
    }
    // A length that no region of this size can have, in the way of an engine that is mistaken.
    let region = SharedRegion::open(&format!("{}cmd-shm", engine.prefix()), 1 << 20).unwrap();
    let full = NamedSemaphore::open(&format!("{}cmd-rd", engine.prefix()), 0).unwrap();
    let free = NamedSemaphore::open(&format!("{}cmd-wr", engine.prefix()), 1).unwrap();
    assert!(free.wait(Some(Instant::now() + Duration::from_secs(10))));
    let word = region.word(0).unwrap();
    word.store(1 << 20, std::sync::atomic::Ordering::Release);
    full.post();
    let answer: Value = serde_json::from_slice(&engine.receive_main()).unwrap();
    assert_eq!(answer["error"], "msg too large; 1048576 + 4 > 1048576");
    assert_eq!(engine.main(r#"{"op":"ping"}"#), pong);
    for (request, error) in [
        (r#"{"op":"mk_module","binary":"!"}"#, "invalid module: "),
        (
            r#"{"op":"mk_module","binary":"AGFzbQEAAAA="}"#,
            "invalid module: ",
        ),
        (
            r#"{"op":"set_tags","module_id":"00","tags":"local.x"}"#,
            "invalid module_id",
        ),
        (
            r#"{"op":"instantiate","req_id":"q","prompt":[1],"module_id":"no-such"}"#,
            "tag no-such not found",
        ),
        (
            r#"{"op":"instantiate","req_id":"q","prompt":[4000],"module_id":"no-such"}"#,
            "prompt token out of range (4000 >= 4000)",
        ),
        (
            r#"{"op":"instantiate","req_id":"q","prompt":[1],"module_id":"sapwood:regex","module_arg":"("}"#,
            "invalid grammar: ",
        ),
        (r#"{"op":"dance"}"#, "bad op"),
    ] {
        let answer: Value = serde_json::from_str(&engine.side(request)).unwrap();
        assert_eq!(answer["type"], "error", "{answer}");
        assert!(
            answer["error"].as_str().unwrap().starts_with(error),
            "{answer}"
        );
        assert_eq!(answer["is_user_error"], true, "{answer}");
    }
}

#[test]
fn ai_105_signals_and_stop_end_it_with_0() {
    let folder = folder("aicirt_signals");
    for signal in [Signal::TERM, Signal::INT, Signal::USR1] {
        let mut engine = Engine::start(&folder, &EngineSetup::new(Synchronisation::Futex));
        engine.main(r#"{"op":"ping"}"#);
        // The group, as engines do; only its leader is in it.
        rustix::process::kill_process_group(engine.pid(), signal).unwrap();
        assert_eq!(engine.wait(), Some(0), "{signal:?}");
    }
}

#[test]
fn ai_223_a_region_that_shrinks_ends_it_with_3() {
    let folder = folder("aicirt_shrink");
    let mut engine = Engine::start(&folder, &EngineSetup::new(Synchronisation::Semaphores));
    engine.main(r#"{"op":"ping"}"#);
    let path = format!("/dev/shm{}cmd-shm", engine.prefix());
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(0).unwrap();
    NamedSemaphore::open(&format!("{}cmd-rd", engine.prefix()), 0)
        .unwrap()
        .post();
    assert_eq!(engine.wait(), Some(3));
    assert!(engine.log().contains("made smaller"), "{}", engine.log());
}

#[test]
fn ai_202_a_crash_of_either_side_leaves_what_the_rules_promise() {
    let folder = folder("aicirt_crash");
    for synchronisation in SYNCHRONISATIONS {
        let mut engine = Engine::start(&folder, &EngineSetup::new(synchronisation));
        engine.main(r#"{"op":"ping"}"#);
        let prefix = engine.prefix().to_owned();
        if synchronisation == Synchronisation::Futex {
            // An engine that is killed now leaves the masks alone.
            assert_eq!(left(&prefix), [format!("{}bin-shm", &prefix[1..])]);
        }
        engine.kill();
        drop(engine);
        assert_eq!(left(&prefix), Vec::<String>::new(), "{synchronisation:?}");
    }
}

#[test]
fn ai_106_it_ends_with_its_parent() {
    let folder = folder("aicirt_parent");
    let mut engine = Engine::start(
        &folder,
        &EngineSetup {
            under_shell: true,
            ..EngineSetup::new(Synchronisation::Futex)
        },
    );
    engine.main(r#"{"op":"ping"}"#);
    // The shell that started it, which has no part in the exchange.
    let runtime = engine.runtime_of_shell();
    let ended = rustix::process::pidfd_open(runtime, rustix::process::PidfdFlags::empty()).unwrap();
    engine.kill();
    let mut polled = [rustix::event::PollFd::new(
        &ended,
        rustix::event::PollFlags::IN,
    )];
    let two_seconds = rustix::event::Timespec {
        tv_sec: 2,
        tv_nsec: 0,
    };
    assert_eq!(
        rustix::event::poll(&mut polled, Some(&two_seconds)).unwrap(),
        1
    );
}

/// AI-107
#[test]
fn ai_102_wrong_flags_have_their_exit_codes() {
    let folder = folder("aicirt_flags");
    vocabulary(&folder);
    std::fs::create_dir_all(folder.join("tokenizers")).unwrap();
    std::fs::write(folder.join("tokenizers/phi.json"), "{}").unwrap();
    for (arguments, code, message) in [
        (&[][..], 1, "missing --server"),
        (&["--name", "x"], 1, "must begin with /"),
        (&["--server", "--dance"], 2, "--dance"),
        (&["--server", "--isolation", "none"], 2, "--isolation"),
        (&["--server", "-t", "no-such"], 2, "phi"),
        (
            &["--server", "-t", "tokenizers/phi.json"],
            2,
            "tokenizer.json",
        ),
        (
            &["--server", "-t", "vocabulary.bin", "--name", "/a/b-"],
            2,
            "/a/b-",
        ),
    ] {
        let ended = run(&folder, &[&["aicirt"], arguments].concat());
        assert_eq!(ended.code, code, "{arguments:?} {}", ended.err);
        assert!(ended.err.contains(message), "{arguments:?} {}", ended.err);
        assert_eq!(ended.out, "", "{arguments:?}");
    }
    // Under a name that ends in `aicirt` there is no subcommand.
    let mut command = sapwood(&folder, &[]);
    command.arg0("/opt/aici/aicirt");
    let ended = run_with(command, "");
    assert_eq!(ended.code, 1, "{}", ended.err);
    assert!(ended.err.contains("missing --server"), "{}", ended.err);
}

#[test]
fn ai_103_another_size_than_the_flags_say_is_an_error() {
    let folder = folder("aicirt_size");
    let setup = EngineSetup {
        flags: &["--bin-size", "2"],
        ..EngineSetup::new(Synchronisation::Semaphores)
    };
    let mut engine = Engine::start(&folder, &setup);
    assert_eq!(engine.wait(), Some(2));
    let log = engine.log();
    assert!(
        log.contains("bin-shm") && log.contains("1048576") && log.contains("2097152"),
        "{log}"
    );
}

/// AI-102
#[test]
fn ai_630_a_saved_trie_is_a_tokenizer() {
    let folder = folder("aicirt_trie");
    vocabulary(&folder);
    let saved = [
        "aicirt",
        "-t",
        "vocabulary.bin",
        "--save-tokenizer",
        "saved.bin",
    ];
    let ended = run(&folder, &saved);
    assert_eq!((ended.code, ended.out.as_str()), (0, ""), "{}", ended.err);
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert_eq!(bytes("saved.bin"), bytes("vocabulary.bin"));
}

#[test]
fn ai_102_modules_are_installed_without_an_engine() {
    let folder = folder("aicirt_install");
    vocabulary(&folder);
    std::fs::write(folder.join("yes.wasm"), wat::parse_str(YES).unwrap()).unwrap();
    let ended = run(
        &folder,
        &["aicirt", "-m", "yes.wasm", "--tag", "yes-latest"],
    );
    assert_eq!(ended.code, 0, "{}", ended.err);
    let id = ended.out.trim();
    assert_eq!(id.len(), 64);
    assert!(folder.join(format!("cache/{id}.wasm")).exists());
    let again = run(&folder, &["aicirt", "-m", "yes-latest"]);
    assert_eq!((again.code, again.out.trim()), (0, id), "{}", again.err);
    let unknown = run(&folder, &["aicirt", "-m", "nothing-latest"]);
    assert_eq!(unknown.code, 2, "{}", unknown.err);
    // A file that is a release is found by the release's name (AI-331).
    let release = ["--gh-module", "gh:microsoft/aici/pyctrl/v0.0.10-rc1"];
    let installed = run(
        &folder,
        &[&["aicirt", "-m", "yes.wasm"], &release[..]].concat(),
    );
    assert_eq!(installed.code, 0, "{}", installed.err);
    let found = run(
        &folder,
        &["aicirt", "--gh-module", "gh:microsoft/aici/pyctrl"],
    );
    assert_eq!((found.code, found.out.trim()), (0, id), "{}", found.err);
}

/// AI-105. The variable is the engine's, and its filter may be one for another program.
#[test]
fn ai_102_a_filter_that_cannot_be_read_does_not_end_the_runtime() {
    let folder = folder("aicirt_filter");
    vocabulary(&folder);
    std::fs::write(folder.join("yes.wasm"), wat::parse_str(YES).unwrap()).unwrap();
    for (filter, warned) in [("info, rllm=debug", false), ("info,,=/=", true)] {
        let mut command = sapwood(&folder, &["aicirt", "-m", "yes.wasm"]);
        command.env("RUST_LOG", filter);
        let ended = run_with(command, "");
        assert_eq!(ended.code, 0, "{}", ended.err);
        assert_eq!(
            ended.err.contains("cannot be read"),
            warned,
            "{filter} {}",
            ended.err
        );
    }
}

/// Its compiler is a child of the same name.
#[test]
fn ai_102_a_runtime_under_its_own_name_compiles() {
    let folder = folder("aicirt_name");
    vocabulary(&folder);
    std::fs::write(folder.join("yes.wasm"), wat::parse_str(YES).unwrap()).unwrap();
    let given = sapwood(&folder, &["-m", "yes.wasm"]);
    let name = folder.join("my-aicirt");
    std::fs::hard_link(given.get_program(), &name).unwrap();
    let mut command = std::process::Command::new(name);
    command
        .args(given.get_args())
        .current_dir(&folder)
        .env_clear()
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let ended = run_with(command, "");
    assert_eq!(ended.code, 0, "{}", ended.err);
    assert_eq!(ended.out.trim().len(), 64);
}

#[test]
fn ai_105_a_stopped_runtime_can_be_interrupted_before_its_first_message() {
    let folder = folder("aicirt_early");
    let mut engine = Engine::start(&folder, &EngineSetup::new(Synchronisation::Futex));
    interrupt(engine.child(), Signal::TERM);
    // Whether the handler is there yet or not, it ends.
    assert!(matches!(engine.wait(), Some(0) | None));
}
