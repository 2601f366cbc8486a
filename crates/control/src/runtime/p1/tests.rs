//! P1 with scripted controllers and a virtual clock.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::scripted::*;
use super::super::sequence::{Callback, MidReturned, Pace, Returned};
use super::super::table::StepConfig;
use super::*;
use crate::host::{Group, VariablesLimits, Waiting};

/// An engine's view of a P1 main channel.
struct Engine {
    world: World,
    p1: P1<Scripted>,
}

impl Engine {
    fn new() -> Self {
        Self::with(config())
    }

    fn with(config: StepConfig) -> Self {
        Self {
            world: World::new(),
            p1: P1::new(config),
        }
    }

    /// With one bound sequence, 4, whose script goes on after its first `pre`.
    fn bound(script: impl IntoIterator<Item = Line>) -> Self {
        let mut engine = Self::new();
        engine.bind(4, [runs()].into_iter().chain(script));
        engine
    }

    fn bind(&mut self, id: u64, script: impl IntoIterator<Item = Line>) {
        let request = format!("r{id}");
        self.world.instance(&request, script);
        let bound = self.post_pre(json!({"pre_ops": [{"id": id, "req_id": request}]}));
        assert!(bound["pre_seqs"][id.to_string()].is_object(), "{bound}");
        self.world.take_calls();
    }

    fn try_post_pre(&mut self, request: Value) -> Result<Value, String> {
        let request = serde_json::from_value(request).unwrap();
        let answer = self
            .p1
            .post_pre_process(request, &self.world.pending, self.world.step());
        answer
            .map(|it| serde_json::to_value(it).unwrap())
            .map_err(|error| error.text)
    }

    fn post_pre(&mut self, request: Value) -> Value {
        self.try_post_pre(request).unwrap()
    }

    fn try_mid(&mut self, ops: Value) -> Result<Value, String> {
        let request = serde_json::from_value(json!({"ops": ops})).unwrap();
        let step = self.world.step();
        let answer = self.p1.mid_process(&request, &self.world.masks, step);
        answer
            .map(|it| serde_json::to_value(it).unwrap())
            .map_err(|error| error.text)
    }

    fn mid(&mut self, ops: Value) -> Value {
        self.try_mid(ops).unwrap()
    }
}

fn all() -> Vec<Token> {
    (0..VOCABULARY as Token).collect()
}

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
fn ai_405_fast_forward_tokens_are_posted_and_collected() {
    let mut engine = Engine::bound([
        pre(1, false, &[10, 11]),
        post(false),
        pre(1, false, &[12]),
        post(false),
        runs(),
    ]);
    let answer = engine.post_pre(json!({}));
    assert_eq!(
        answer["pre_seqs"]["4"]["result"],
        json!({"suspend": false, "num_forks": 1, "ff_tokens": [10, 11, 12]})
    );
    assert_eq!(answer["pre_seqs"]["4"]["micros"], 50);
    assert_eq!(answer["post_seqs"], json!({}));
    let posted = |tokens: &[Token]| {
        let tokens = tokens.to_vec();
        (
            4,
            Callback::Post {
                backtrack: 0,
                tokens,
            },
        )
    };
    assert_eq!(
        engine.world.take_calls(),
        [
            (4, Callback::Pre),
            posted(&[10, 11]),
            (4, Callback::Pre),
            posted(&[12]),
            (4, Callback::Pre)
        ]
    );
}

#[test]
fn ai_405_a_post_that_stops_ends_the_loop_and_the_sequence() {
    let mut engine = Engine::bound([pre(1, false, &[10]), post(true)]);
    let answer = engine.post_pre(json!({}));
    let result = &answer["pre_seqs"]["4"]["result"];
    assert_eq!(
        *result,
        json!({"suspend": false, "num_forks": 0, "ff_tokens": []})
    );
}

#[test]
fn ai_405_ten_rounds_pass_and_the_eleventh_fails() {
    let rounds = |count| {
        let round = || [pre(1, false, &[10]), post(false)];
        (0..count).flat_map(move |_| round()).chain([runs()])
    };
    let mut engine = Engine::bound(rounds(10));
    let answer = engine.post_pre(json!({}));
    let tokens = answer["pre_seqs"]["4"]["result"]["ff_tokens"].as_array();
    assert_eq!(tokens.unwrap().len(), 10);
    let mut engine = Engine::bound(rounds(11));
    let answer = engine.post_pre(json!({}));
    assert_eq!(
        answer["pre_seqs"]["4"]["error"],
        "Error (pre0): too many ff_tokens rounds from pre_process"
    );
}

#[test]
fn ai_405_fork_suspend_and_fast_forward_exclude_each_other() {
    for (line, error) in [
        (pre(2, false, &[1]), "can't fork when returning ff_tokens"),
        (pre(1, true, &[1]), "can't suspend when returning ff_tokens"),
        (pre(2, true, &[]), "can't fork when suspending"),
    ] {
        let mut engine = Engine::bound([line]);
        let answer = engine.post_pre(json!({}));
        assert_eq!(
            answer["pre_seqs"]["4"]["error"],
            format!("Error (pre0): {error}")
        );
    }
    // An engine that skips suspended sequences would lose the tokens of the round before.
    let mut engine = Engine::bound([pre(1, false, &[1]), post(false), pre(1, true, &[])]);
    let answer = engine.post_pre(json!({}));
    assert_eq!(
        answer["pre_seqs"]["4"]["error"],
        "Error (pre0): can't suspend when returning ff_tokens"
    );
}

/// Fixed text and then a fork are the beginning of many controllers.
#[test]
fn ai_405_a_fork_may_follow_forwarded_tokens() {
    let mut engine = Engine::bound([
        pre(1, false, &[1]),
        post(false),
        pre(1, false, &[2]),
        post(false),
        pre(3, false, &[]),
    ]);
    let answer = engine.post_pre(json!({}));
    assert_eq!(answer["pre_seqs"]["4"]["error"], "");
    assert_eq!(
        answer["pre_seqs"]["4"]["result"],
        json!({"suspend": false, "num_forks": 3, "ff_tokens": [1, 2]})
    );
}

#[test]
fn ai_406_backtrack_counts_the_sampled_token_unless_it_answers_our_splice() {
    let own = |tokens: &[Token], reported: u32, spliced: bool| {
        let splice = MidReturned::Splice {
            backtrack: 3,
            ff_tokens: vec![20, 21],
        };
        let returned = if spliced { splice } else { only(1) };
        let mut engine = Engine::bound([mid(returned), post(false), runs()]);
        engine.mid(json!([{"id": 4}]));
        engine.world.take_calls();
        engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": tokens, "backtrack": reported}]}));
        match engine.world.take_calls().swap_remove(0) {
            (4, Callback::Post { backtrack, .. }) => backtrack,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(own(&[7], 0, false), 0);
    assert_eq!(own(&[7], 1, false), 0);
    assert_eq!(own(&[7], 3, false), 2);
    // Either convention of an engine.
    assert_eq!(own(&[20, 21], 4, true), 3);
    assert_eq!(own(&[20, 21], 3, true), 3);
    assert_eq!(own(&[20], 4, true), 3);
}

#[test]
fn ai_411_rows_are_in_the_order_of_the_ops() {
    let mut engine = Engine::bound([runs(), runs(), mid(only(7))]);
    engine.bind(5, [runs(), runs(), mid(only(9))]);
    engine.bind(6, [runs()]);
    let answer = engine.mid(json!([{"id": 5, "clone_id": null}, {"id": 8}, {"id": 4}]));
    assert_eq!(answer["num_seqs"], 3);
    assert_eq!(answer["seqs"]["5"]["result"], Value::Null);
    assert_eq!(answer["seqs"]["8"]["error"], "Worker: invalid id 8");
    assert_eq!(engine.world.row(0), [9]);
    assert_eq!(engine.world.row(1), all());
    assert_eq!(engine.world.row(2), [7]);
    assert_eq!(engine.mid(json!([])), json!({"seqs": {}, "num_seqs": 0}));
    assert_eq!(
        engine.try_mid(json!([{"id": 5}, {"id": 5}])),
        Err("duplicate id 5".into())
    );
}

#[test]
fn ai_232_more_rows_than_fit_are_a_whole_request_error() {
    let mut engine = Engine::bound([mid(only(7))]);
    let ops: Vec<_> = (4..9).map(|id| json!({"id": id})).collect();
    assert_eq!(engine.try_mid(json!(ops)), Err("shm size too small".into()));
    assert_eq!(engine.world.take_calls(), []);
    engine.try_mid(json!(ops[..4])).unwrap();
}

/// AI-404
#[test]
fn ai_412_clones_are_made_before_anything_runs() {
    let script = [pre(3, false, &[]), mid(only(7)), post(false), runs()];
    let mut engine = Engine::bound(script);
    let answer = engine.post_pre(json!({}));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["num_forks"], 3);
    engine.world.take_calls();
    // A clone may be the parent of a later op.
    let answer = engine.mid(json!([
        {"id": 4}, {"id": 5, "clone_id": 4}, {"id": 6, "clone_id": 4}, {"id": 7, "clone_id": 6},
    ]));
    for id in ["4", "5", "6", "7"] {
        assert_eq!(answer["seqs"][id]["error"], "");
    }
    let group = |ids: &[u32]| Callback::Mid {
        fork_group: ids.to_vec(),
    };
    assert_eq!(
        engine.world.take_calls(),
        [
            (4, group(&[4, 5, 6])),
            (5, group(&[4, 5, 6])),
            (6, group(&[4, 5, 6])),
            (7, group(&[7]))
        ]
    );
    let answer = engine.post_pre(json!({"post_ops": [{"id": 6, "tokens": [1]}], "freed": [4]}));
    assert_eq!(answer["post_seqs"]["6"]["result"]["stop"], false);
}

#[test]
fn ai_413_errors_of_clones_harm_nobody() {
    let mut engine = Engine::bound([runs(), mid(only(7)), mid(only(8)), mid(only(9))]);
    engine.bind(5, [runs(), mid(only(1))]);
    let answer = engine.mid(json!([{"id": 5, "clone_id": 4}, {"id": 6, "clone_id": 33}]));
    assert_eq!(
        answer["seqs"]["5"]["error"],
        "Worker: duplicate id 5 (cloning 4)"
    );
    assert_eq!(answer["seqs"]["6"]["error"], "Worker: invalid id 33");
    let answer = engine.mid(json!([{"id": 5}, {"id": 4}]));
    assert_eq!(
        (engine.world.row(0), engine.world.row(1)),
        (vec![1], vec![7])
    );
    assert_eq!(answer["seqs"]["5"]["error"], "");
    // 15 clones are 16 sequences; one more is one too many.
    for id in 10..25 {
        engine.world.masks.write(0, &[0; 4]);
        let answer = engine.mid(json!([{"id": id, "clone_id": 4}]));
        assert_eq!(answer["seqs"][id.to_string()]["error"], "");
    }
    let answer = engine.mid(json!([{"id": 25, "clone_id": 4}]));
    assert_eq!(
        answer["seqs"]["25"]["error"],
        "Worker: too many forks (max=16)"
    );
}

/// AI-231
#[test]
fn ai_414_results_and_rows_by_what_the_controller_returned() {
    let splice = |backtrack, ff_tokens: &[Token]| MidReturned::Splice {
        backtrack,
        ff_tokens: ff_tokens.to_vec(),
    };
    let empty = MidReturned::Sample(Some(Arc::new(sapwood_proto::steer::Mask::none(VOCABULARY))));
    for (returned, result, row, logs) in [
        (only(42), Value::Null, vec![42], ""),
        (MidReturned::Sample(None), Value::Null, vec![], ""),
        (MidReturned::Stop, Value::Null, vec![EOS], ""),
        (
            splice(0, &[5, 6]),
            json!({"ff_tokens": [5, 6], "backtrack": 0}),
            vec![5],
            "",
        ),
        (
            splice(2, &[5]),
            json!({"ff_tokens": [5], "backtrack": 3}),
            all(),
            "",
        ),
        (
            splice(1, &[]),
            json!({"ff_tokens": [], "backtrack": 2}),
            all(),
            "",
        ),
        // AI-237
        (
            empty,
            Value::Null,
            vec![EOS],
            "empty mask: only EOS allowed\n",
        ),
    ] {
        let mut engine = Engine::bound([mid(returned.clone())]);
        let answer = engine.mid(json!([{"id": 4}]));
        let answered = &answer["seqs"]["4"];
        assert_eq!(
            (&answered["result"], &answered["logs"]),
            (&result, &json!(logs))
        );
        assert_eq!(engine.world.row(0), row, "{returned:?}");
    }
}

#[test]
fn ai_421_an_error_ends_the_logs() {
    let mut engine = Engine::new();
    let script = [runs(), Line::Fails("boom")];
    let sequence = Scripted::new(&engine.world, script).printing("log\n");
    engine.world.add("r", sequence);
    engine.post_pre(json!({"pre_ops": [{"id": 4, "req_id": "r"}]}));
    let answer = engine.mid(json!([{"id": 4}]));
    let failed = &answer["seqs"]["4"];
    assert_eq!(failed["logs"], "log\nError (mid): boom");
    assert_eq!(failed["error"], "Error (mid): boom");
}

fn pre_at(at: u64) -> Line {
    Line::At(
        at,
        Returned::Pre {
            num_forks: 1,
            suspend: false,
            ff_tokens: vec![],
            wait: None,
        },
    )
}

/// AI-401
#[test]
fn ai_441_one_late_sequence_costs_the_others_nothing_but_time() {
    let mut engine = Engine::bound([runs(), pre_at(1_000)]);
    engine.bind(5, [runs(), runs()]);
    engine.world.take_calls();
    let begun = engine.world.clock.now();
    let answer = engine.post_pre(json!({}));
    // The deadline and the grace, both from the arrival.
    assert_eq!(engine.world.clock.now() - begun, Duration::from_millis(24));
    let late = &answer["pre_seqs"]["4"];
    assert_eq!(
        late["result"],
        json!({"suspend": true, "num_forks": 1, "ff_tokens": []})
    );
    assert_eq!(late["logs"], "⏲ timeout [deadline: 4ms; step 1/10]\n");
    assert_eq!(answer["pre_seqs"]["5"]["result"]["suspend"], false);
}

#[test]
fn ai_441_others_wait_for_a_late_pre_once() {
    let mut engine = Engine::bound([runs(), pre_at(1_000)]);
    engine.bind(5, (0..100).map(|_| runs()));
    engine.post_pre(json!({}));
    let begun = engine.world.clock.now();
    let log = |step| format!("⏲ timeout [deadline: 4ms; step {step}/10]\n");
    for step in [1, 1, 2] {
        let answer = engine.post_pre(json!({}));
        assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], true);
        assert_eq!(answer["pre_seqs"]["4"]["logs"], log(step));
        assert_eq!(answer["pre_seqs"]["5"]["result"]["suspend"], false);
        engine.world.clock.advance(Duration::from_millis(12));
    }
    assert_eq!(engine.world.clock.now() - begun, Duration::from_millis(36));
    engine.world.clock.advance(Duration::from_secs(1));
    let answer = engine.post_pre(json!({}));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], false);
}

/// A sequence whose `pre` does not run, because it waits for a variable, is not held up by one that is late.
#[test]
fn ai_441_a_late_pre_beside_one_that_waits_is_waited_for() {
    let (_, line) = waits_for("go");
    let mut engine = Engine::bound([line]);
    engine.post_pre(json!({}));
    engine.bind(5, [pre_at(1_000)]);
    let begun = engine.world.clock.now();
    let answer = engine.post_pre(json!({}));
    assert_eq!(engine.world.clock.now() - begun, Duration::from_millis(24));
    assert_eq!(
        answer["pre_seqs"]["5"]["logs"],
        "⏲ timeout [deadline: 4ms; step 2/10]\n"
    );
}

#[test]
fn ai_441_a_late_pre_is_not_waited_for_while_another_has_the_time_of_mid() {
    let mut engine = Engine::bound([runs(), pre_at(1_000)]);
    let script = [runs(), pre_at(50)];
    let other = Scripted::new(&engine.world, script).with_mid_time();
    engine.world.add("r5", other);
    engine.post_pre(json!({"pre_ops": [{"id": 5, "req_id": "r5"}]}));
    let begun = engine.world.clock.now();
    let answer = engine.post_pre(json!({}));
    assert_eq!(engine.world.clock.now() - begun, Duration::from_millis(50));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], true);
    assert_eq!(answer["pre_seqs"]["5"]["result"]["suspend"], false);
}

#[test]
fn ai_441_a_late_post_has_its_entry_in_the_answer_in_which_it_ends() {
    let late_post = Line::At(30, Returned::Post { stop: false });
    let mut engine = Engine::bound([late_post, runs()]);
    let answer = engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [1]}]}));
    assert_eq!(answer["post_seqs"], json!({}));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], true);
    let answer = engine.post_pre(json!({}));
    assert_eq!(answer["post_seqs"]["4"]["result"]["stop"], false);
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], false);
    assert_eq!(engine.world.take_calls().len(), 2);
}

#[test]
fn ai_441_the_tenth_late_step_in_a_row_fails_the_sequence() {
    let mut engine = Engine::bound([pre_at(100_000)]);
    for step in 1..10 {
        let answer = engine.post_pre(json!({}));
        let log = format!("⏲ timeout [deadline: 4ms; step {step}/10]\n");
        assert_eq!(answer["pre_seqs"]["4"]["logs"], log);
    }
    let answer = engine.post_pre(json!({}));
    let failed = &answer["pre_seqs"]["4"];
    assert_eq!(
        (&failed["error"], &failed["result"]),
        (&json!("Worker: timeout"), &Value::Null)
    );
    let answer = engine.mid(json!([{"id": 4}]));
    assert_eq!(answer["seqs"]["4"]["error"], "Worker: timeout");
}

#[test]
fn ai_441_a_late_pre_that_ends_between_two_requests_is_not_asked_again() {
    let late = Line::At(
        30,
        Returned::Pre {
            num_forks: 1,
            suspend: false,
            ff_tokens: vec![],
            wait: None,
        },
    );
    let mut engine = Engine::bound([late, runs()]);
    engine.bind(5, [runs(), Line::At(50, Returned::Mid(only(1))), runs()]);
    // 4 is late in the step that binds 5 and one more; its result comes during the mid of 5.
    let answer = engine.mid(json!([{"id": 5}]));
    assert_eq!(answer["seqs"]["5"]["error"], "");
    engine.world.take_calls();
    let answer = engine.post_pre(json!({"post_ops": []}));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], false);
    assert_eq!(engine.world.take_calls(), [(5, Callback::Pre)]);
}

#[test]
fn ai_441_a_late_mid_fails_its_sequence_alone() {
    let mut engine = Engine::bound([runs(), Line::At(1_000, Returned::Mid(only(1)))]);
    engine.bind(5, [runs(), mid(only(9))]);
    let answer = engine.mid(json!([{"id": 4}, {"id": 5}]));
    assert_eq!(answer["seqs"]["4"]["error"], "Worker: timeout");
    assert_eq!(answer["seqs"]["5"]["error"], "");
    assert_eq!(engine.world.row(1), [9]);
}

#[test]
fn ai_441_with_late_mid_skip_the_step_is_taken_back() {
    let mut engine = Engine::with(StepConfig {
        late_mid_skips: true,
        ..config()
    });
    engine.bind(4, [runs(), Line::At(300, Returned::Mid(only(7)))]);
    let answer = engine.mid(json!([{"id": 4}]));
    let skipped = &answer["seqs"]["4"];
    assert_eq!(skipped["result"], json!({"ff_tokens": [], "backtrack": 1}));
    assert_eq!(skipped["logs"], "⏲ timeout [deadline: 150ms; step 1/10]\n");
    assert_eq!(engine.world.row(0), all());
    // The engine took the sampled token back; there is nothing for the controller in that.
    let answer = engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [], "backtrack": 1}]}));
    assert_eq!(answer["post_seqs"]["4"]["result"]["stop"], false);
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], false);
    engine.mid(json!([{"id": 4}]));
    assert_eq!(engine.world.row(0), [7]);
    assert_eq!(engine.world.take_calls().len(), 1);
}

#[test]
fn ai_441_others_wait_for_a_skipped_mid_once() {
    let mut engine = Engine::with(StepConfig {
        late_mid_skips: true,
        ..config()
    });
    engine.bind(4, [runs(), runs(), Line::At(1_000, Returned::Mid(only(7)))]);
    let quick = (0..10).flat_map(|_| [mid(only(8)), runs()]);
    engine.bind(5, [runs()].into_iter().chain(quick));
    let both = || json!([{"id": 4}, {"id": 5}]);
    engine.mid(both());
    let begun = engine.world.clock.now();
    for _ in 0..3 {
        engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [], "backtrack": 1}]}));
        let answer = engine.mid(both());
        assert_eq!(
            answer["seqs"]["4"]["logs"],
            "⏲ timeout [deadline: 150ms; step 1/10]\n"
        );
        assert_eq!(engine.world.row(1), [8]);
    }
    assert_eq!(engine.world.clock.now(), begun);
}

#[test]
fn ai_441_a_skipped_mid_that_ends_between_two_requests_is_not_called_again() {
    let mut engine = Engine::with(StepConfig {
        late_mid_skips: true,
        ..config()
    });
    engine.bind(4, [runs(), runs(), Line::At(200, Returned::Mid(only(7)))]);
    engine.bind(5, [runs(), Line::At(250, Returned::Mid(only(1))), runs()]);
    engine.mid(json!([{"id": 4}]));
    // Its result comes during the mid of another sequence, before anything is asked of it.
    let answer = engine.mid(json!([{"id": 5}]));
    assert_eq!(answer["seqs"]["5"]["error"], "");
    engine.world.take_calls();
    let answer = engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [], "backtrack": 1}]}));
    assert_eq!(answer["post_seqs"]["4"]["result"]["stop"], false);
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], false);
    assert_eq!(engine.world.take_calls(), [(5, Callback::Pre)]);
    // A clone would have a state that its engine has not seen.
    let answer = engine.mid(json!([{"id": 6, "clone_id": 4}]));
    assert_eq!(
        answer["seqs"]["6"]["error"],
        "Worker: sequence 4 is still running"
    );
    let answer = engine.mid(json!([{"id": 4}]));
    assert_eq!(answer["seqs"]["4"]["result"], Value::Null);
    assert_eq!(engine.world.row(0), [7]);
    assert_eq!(engine.world.take_calls(), []);
}

#[test]
fn ai_441_a_mid_that_is_skipped_again_and_again_fails_at_the_tenth_step() {
    let mut engine = Engine::with(StepConfig {
        late_mid_skips: true,
        ..config()
    });
    engine.bind(4, [runs(), Line::At(100_000, Returned::Mid(only(7)))]);
    for step in 1..10 {
        let answer = engine.mid(json!([{"id": 4}]));
        let log = format!("⏲ timeout [deadline: 150ms; step {step}/10]\n");
        assert_eq!(answer["seqs"]["4"]["logs"], log);
        engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [], "backtrack": 1}]}));
    }
    let answer = engine.mid(json!([{"id": 4}]));
    assert_eq!(answer["seqs"]["4"]["error"], "Worker: timeout");
}

#[test]
fn ai_406_a_splice_that_no_post_answered_is_over_with_the_next_mid() {
    let splice = MidReturned::Splice {
        backtrack: 3,
        ff_tokens: vec![20],
    };
    let mut engine = Engine::bound([mid(splice), mid(only(20)), post(false), runs()]);
    engine.mid(json!([{"id": 4}]));
    engine.mid(json!([{"id": 4}]));
    engine.world.take_calls();
    engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [20], "backtrack": 0}]}));
    let sampled = Callback::Post {
        backtrack: 0,
        tokens: vec![20],
    };
    assert_eq!(engine.world.take_calls()[0], (4, sampled));
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

/// A sequence in the group whose `pre` suspends and waits for a variable.
fn waits_for(name: &str) -> (Arc<Group>, Line) {
    let group = Group::new(4, VariablesLimits::default());
    let wait = Some(Waiting::of_test(&group, &[name]));
    let line = Line::Returns(Returned::Pre {
        num_forks: 1,
        suspend: true,
        ff_tokens: vec![],
        wait,
    });
    (group, line)
}

#[test]
fn ai_1005_pre_is_not_run_while_its_sequence_waits() {
    let (group, line) = waits_for("go");
    let mut engine = Engine::bound([line, runs()]);
    let suspended = json!({"suspend": true, "num_forks": 1, "ff_tokens": [], "wait": ["go"]});
    for calls in [1, 0, 0] {
        let answer = engine.post_pre(json!({}));
        assert_eq!(answer["pre_seqs"]["4"]["result"], suspended);
        assert_eq!(engine.world.take_calls().len(), calls);
    }
    write(&group, "other");
    let answer = engine.post_pre(json!({}));
    assert_eq!(answer["pre_seqs"]["4"]["result"], suspended);
    write(&group, "go");
    let answer = engine.post_pre(json!({}));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], false);
    assert_eq!(engine.world.take_calls(), [(4, Callback::Pre)]);
}

#[test]
fn ai_1005_a_wait_ends_with_what_happens_to_its_sequence_and_after_a_second() {
    let (_, line) = waits_for("go");
    let mut engine = Engine::bound([line.clone(), post(false), line.clone(), runs()]);
    engine.post_pre(json!({}));
    engine.world.take_calls();
    engine.post_pre(json!({"post_ops": [{"id": 4, "tokens": [7]}]}));
    assert_eq!(engine.world.take_calls().len(), 2, "post and pre");
    engine.post_pre(json!({}));
    assert_eq!(engine.world.take_calls(), []);
    engine.world.clock.advance(Duration::from_secs(1));
    let answer = engine.post_pre(json!({}));
    assert_eq!(answer["pre_seqs"]["4"]["result"]["suspend"], false);
    // An engine may run it all the same, and a clone of it does not wait.
    let mut engine = Engine::bound([line, mid(only(7)), mid(only(8)), runs(), runs()]);
    engine.post_pre(json!({}));
    engine.mid(json!([{"id": 4}, {"id": 5, "clone_id": 4}]));
    engine.world.take_calls();
    engine.post_pre(json!({}));
    assert_eq!(engine.world.take_calls().len(), 2);
}
