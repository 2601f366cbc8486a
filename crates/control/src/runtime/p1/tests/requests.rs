//! Which sequences a request is about, and what a wrong request, or a wrong op of it, does.

use super::*;

#[test]
fn ai_401_post_then_pre_of_every_live_sequence() {
    let mut engine = Engine::bound([runs(), post(false), runs()]);
    engine.bind(5, [runs(), runs()]);
    engine.world.take_calls();
    let answer = engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [7]}]}));
    assert_eq!(
        answer["post_seqs"],
        json!({"4": {"error": "", "result": {"stop": false}, "storage": [], "logs": "", "micros": 10}})
    );
    let result = json!({
        "error": "", "result": {"suspend": false, "num_forks": 1, "ff_tokens": []},
        "storage": [], "logs": "", "micros": 10,
    });
    assert_eq!(answer["pre_seqs"], json!({"4": result, "5": result}));
    let mut calls = engine.world.take_calls();
    calls.sort_by_key(|(id, _)| *id);
    let post = Callback::Post {
        backtrack: 0,
        tokens: vec![7],
    };
    assert_eq!(calls, [(4, post), (4, Callback::Pre), (5, Callback::Pre)]);
}

#[test]
fn ai_401_a_freed_sequence_has_its_results_in_this_answer() {
    let mut engine = Engine::bound([post(true), runs()]);
    let answer = engine.post_pre(json!({
        "post_ops": [{"id": 4, "tokens": [7]}], "freed": [4, 77],
    }));
    assert_eq!(answer["post_seqs"]["4"]["result"], json!({"stop": true}));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["num_forks"], 1);
    assert_eq!(
        engine.post_pre(json!({})),
        json!({"post_seqs": {}, "pre_seqs": {}})
    );
}

/// AI-305
#[test]
fn ai_402_a_wrong_request_does_nothing() {
    let mut engine = Engine::bound([]);
    engine.world.instance("r9", [runs()]);
    for (request, error) in [
        (
            json!({"post_ops": [{"id": 99, "tokens": [1]}], "freed": [4]}),
            "invalid id 99",
        ),
        (
            json!({"post_ops": [{"id": 4}, {"id": 4}]}),
            "duplicate id 4",
        ),
        (
            json!({"pre_ops": [{"id": 4, "req_id": "r9"}]}),
            "duplicate id 4",
        ),
        (
            json!({"pre_ops": [{"id": 6, "req_id": "r9"}, {"id": 6, "req_id": "r8"}]}),
            "duplicate id 6",
        ),
        (
            json!({"pre_ops": [{"id": 6, "req_id": "r9"}, {"id": 7, "req_id": "r9"}]}),
            "invalid req_id r9",
        ),
        (
            json!({"pre_ops": [{"id": 6, "req_id": "r4"}]}),
            "invalid req_id r4",
        ),
        (
            json!({"pre_ops": [{"id": 6, "req_id": "x"}]}),
            "invalid req_id x",
        ),
        (
            json!({"freed": [9_007_199_254_740_992_u64]}),
            "id 9007199254740992 is larger than 2^53 - 1",
        ),
    ] {
        assert_eq!(engine.try_post_pre(request), Err(error.into()));
    }
    assert_eq!(engine.world.take_calls(), []);
    assert!(engine.world.pending.is_ready("r9"));
    // The largest id, and it is 32 bits for the controller.
    let answer = engine
        .try_mid(json!([{"id": 9_007_199_254_740_991_u64}]))
        .unwrap();
    let error = &answer["seqs"]["9007199254740991"]["error"];
    assert_eq!(error, "Worker: invalid id 9007199254740991");
}

/// AI-422
#[test]
fn ai_402_a_failed_sequence_answers_for_itself_until_it_is_freed() {
    let mut engine = Engine::bound([Line::Fails("boom")]);
    let answer = engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [7]}]}));
    let failed = &answer["post_seqs"]["4"];
    assert_eq!(failed["error"], "Error (post): boom");
    assert_eq!(failed["result"], json!({"stop": true}));
    let previous = "Error (pre0): Previous WASM Error";
    let pre = json!({
        "error": previous, "result": {"suspend": false, "num_forks": 1, "ff_tokens": []},
        "storage": [], "logs": previous, "micros": 0,
    });
    assert_eq!(answer["pre_seqs"]["4"], pre);
    let answer = engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [7]}]}));
    let post = &answer["post_seqs"]["4"];
    assert_eq!(post["error"], "Error (post): Previous WASM Error");
    assert_eq!(answer["pre_seqs"]["4"], pre);
    let answer = engine.mid(json!([{"id": 4}, {"id": 5, "clone_id": 4}]));
    for id in ["4", "5"] {
        assert_eq!(
            answer["seqs"][id]["error"],
            "Error (mid): Previous WASM Error"
        );
        assert_eq!(answer["seqs"][id]["result"], Value::Null);
    }
    // The clone that was never made is a tombstone too: a post op for it harms nobody.
    let answer = engine.post_pre(json!({"post_ops": [{"id": 5}], "freed": [4, 5]}));
    assert_eq!(
        answer["post_seqs"]["5"]["error"],
        "Error (post): Previous WASM Error"
    );
    assert_eq!(
        engine.try_post_pre(json!({"post_ops": [{"id": 5}]})),
        Err("invalid id 5".into())
    );
}

#[test]
fn ai_402_an_op_for_a_sequence_that_is_still_running_fails_it() {
    let mut engine = Engine::bound([pre_at(100_000)]);
    engine.post_pre(json!({}));
    let answer = engine.mid(json!([{"id": 4}]));
    assert_eq!(
        answer["seqs"]["4"]["error"],
        "Worker: sequence 4 is still running"
    );
    let answer = engine.post_pre(json!({}));
    assert_eq!(
        answer["pre_seqs"]["4"]["error"],
        "Worker: sequence 4 is still running"
    );
}
