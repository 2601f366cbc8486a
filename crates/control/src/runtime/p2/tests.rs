//! P2 with scripted controllers and a virtual clock.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::rows::MaskType;
use super::super::scripted::*;
use super::super::sequence::{Callback, Pace as _, Returned};
use super::super::table::StepConfig;
use sapwood_proto::steer::Token;

use super::*;
use crate::host::{Group, VariablesLimits, Waiting};

const ROW: usize = 4 * 1_088;

const EVERYTHING: Capabilities = Capabilities {
    fork: true,
    backtrack: true,
    ff_tokens: true,
    logits: false,
};

struct Engine {
    world: World,
    p2: P2<Scripted>,
}

impl Engine {
    fn new() -> Self {
        Self::with(EVERYTHING)
    }

    fn with(capabilities: Capabilities) -> Self {
        let world = World::with_masks(4096 + 4 * ROW);
        let rows = P2Rows::new(MaskType::F32, VOCABULARY, 0, &world.masks).unwrap();
        let config = StepConfig {
            step_time: Duration::from_millis(25),
            ..config()
        };
        Self {
            p2: P2::new(config, capabilities, rows),
            world,
        }
    }

    fn bound(script: impl IntoIterator<Item = Line>) -> Self {
        let mut engine = Self::new();
        engine.world.instance("r", script);
        engine.op(json!({"id": 4, "req_id": "r"}));
        engine
    }

    fn try_mid(&mut self, request: Value) -> Result<Value, String> {
        let request = serde_json::from_value(request).unwrap();
        let World { pending, masks, .. } = &self.world;
        let answer = self
            .p2
            .mid_process(request, pending, masks, self.world.step());
        answer
            .map(|it| serde_json::to_value(it).unwrap())
            .map_err(|error| error.text)
    }

    fn mid(&mut self, ops: Value) -> Value {
        self.try_mid(json!({"ops": ops})).unwrap()
    }

    /// The result of one op.
    fn op(&mut self, op: Value) -> Value {
        let id = op["id"].to_string();
        self.mid(json!([op]))["seqs"][id].clone()
    }

    /// The tokens that a row of an answer allows.
    fn row(&self, index: u64) -> Vec<Token> {
        let mut bytes = Vec::new();
        assert!(
            self.world
                .masks
                .read(4096 + index as usize * ROW, ROW, &mut bytes)
        );
        let elements = (0..).zip(bytes.chunks(4));
        let allowed = elements.filter(|(_, element)| *element == [0; 4]);
        allowed.map(|(token, _)| token).collect()
    }
}

fn mask(token: Token) -> Option<sapwood_proto::steer::SharedMask> {
    match only(token) {
        super::super::sequence::MidReturned::Sample(mask) => mask,
        other => panic!("{other:?}"),
    }
}

fn sample(token: Token) -> ReturnedBranch {
    ReturnedBranch {
        mask: mask(token),
        temperature: None,
        splices: Vec::new(),
        wait: None,
    }
}

fn splice(mask: bool, backtrack: u32, ff_tokens: &[Token]) -> ReturnedBranch {
    ReturnedBranch {
        mask: mask.then(|| self::mask(7)).flatten(),
        temperature: None,
        splices: vec![ReturnedSplice {
            when_sampled: Vec::new(),
            backtrack,
            ff_tokens: ff_tokens.to_vec(),
        }],
        wait: None,
    }
}

fn branches(branches: &[ReturnedBranch]) -> Line {
    Line::Returns(Returned::Branches(branches.to_vec()))
}

fn input(group: &[u32], sampled: Option<Token>, tokens: &[Token]) -> Callback {
    Callback::Process {
        backtrack: 0,
        tokens: tokens.to_vec(),
        sampled,
        fork_group: group.to_vec(),
    }
}

/// AI-501, AI-502, AI-505
#[test]
fn ai_504_the_exchange_of_the_page() {
    let mut engine = Engine::new();
    let hot = ReturnedBranch {
        temperature: Some(0.5),
        ..sample(99)
    };
    engine.world.instance(
        "r8",
        [branches(&[sample(17), hot]), branches(&[]), branches(&[])],
    );
    let answer = engine.mid(json!([
        {"id": 4, "req_id": "r8", "tokens": [], "backtrack": 0, "sampled": null},
    ]));
    assert_eq!(
        answer,
        json!({
            "seqs": {"4": {
                "error": "",
                "result": {"branches": [
                    {"sample_mask": 0, "temperature": null, "splices": []},
                    {"sample_mask": 1, "temperature": 0.5, "splices": []},
                ]},
                "storage": [], "logs": "", "micros": 10,
            }},
            "dtype": "f32", "first_mask_byte_offset": 4096, "mask_num_bytes": ROW,
            "mask_num_elts": 1_088, "num_masks": 2,
        })
    );
    assert_eq!((engine.row(0), engine.row(1)), (vec![17], vec![99]));
    let answer = engine.mid(json!([
        {"id": 4, "sampled": 17, "tokens": [17], "backtrack": 0},
        {"id": 5, "clone_id": 4, "clone_idx": 1, "sampled": 99, "tokens": [99], "backtrack": 0},
    ]));
    assert_eq!(answer["seqs"]["5"]["result"], json!({"branches": []}));
    assert_eq!(answer["num_masks"], 1);
    assert_eq!(
        engine.world.take_calls(),
        [
            (4, input(&[4], None, &[])),
            (4, input(&[4, 5], Some(17), &[17])),
            (5, input(&[4, 5], Some(99), &[99])),
        ]
    );
}

/// Each refused op would have changed the group, had it counted.
#[test]
fn ai_503_a_fork_group_has_the_clones_that_were_made_at_their_indices() {
    let go_on = || branches(&[sample(2)]);
    let mut engine = Engine::bound([branches(&[sample(1)]), go_on(), go_on()]);
    engine.world.instance("q", [go_on()]);
    engine.world.take_calls();
    let ops = json!([
        {"id": 4, "tokens": [1]},
        {"id": 5, "clone_id": 4, "clone_idx": 1, "tokens": [1]},
        {"id": 7, "clone_id": 4, "clone_idx": 3, "tokens": [1]},
        // Indices that are taken, the parent's own, beyond the limit of forks, and beyond any list.
        {"id": 15, "clone_id": 4, "clone_idx": 1, "tokens": [1]},
        {"id": 13, "clone_id": 4, "clone_idx": 0, "tokens": [1]},
        {"id": 14, "clone_id": 4, "clone_idx": 16, "tokens": [1]},
        {"id": 17, "clone_id": 4, "clone_idx": u32::MAX, "tokens": [1]},
        {"id": 10, "req_id": "q", "clone_id": 4, "clone_idx": 2, "tokens": [1]},
    ]);
    let answer = engine.mid(ops);
    for refused in ["15", "13", "14", "17", "10"] {
        assert_ne!(answer["seqs"][refused]["error"], "", "{refused}");
    }
    for (id, index) in [("15", 1), ("13", 0), ("14", 16), ("17", u32::MAX)] {
        let error = format!("Worker: invalid clone_idx {index} (cloning 4)");
        assert_eq!(answer["seqs"][id]["error"], error);
    }
    // There is no clone 2.
    let group = [4, 5, 4, 7];
    assert_eq!(
        engine.world.take_calls(),
        [4, 5, 7].map(|id| (id, input(&group, None, &[1])))
    );
}

#[test]
fn ai_503_faults_are_those_of_one_sequence() {
    let mut engine = Engine::bound([branches(&[sample(1)]), branches(&[sample(2)])]);
    engine.world.instance("q", [branches(&[])]);
    let answer = engine.mid(json!([
        {"id": 10, "req_id": "q", "clone_id": 4, "clone_idx": 1},
        {"id": 11, "clone_id": 4},
        {"id": 12, "clone_idx": 1},
        {"id": 13, "clone_id": 4, "clone_idx": 0},
        {"id": 14, "req_id": "x"},
        {"id": 15},
        {"id": 16, "clone_id": 77, "clone_idx": 1},
        {"id": 4, "tokens": [1]},
    ]));
    for (id, error) in [
        ("10", "Worker: both req_id and clone_id"),
        ("11", "Worker: clone_id and clone_idx need each other"),
        ("12", "Worker: clone_id and clone_idx need each other"),
        ("13", "Worker: invalid clone_idx 0 (cloning 4)"),
        ("14", "Worker: invalid req_id x"),
        ("15", "Worker: invalid id 15"),
        ("16", "Worker: invalid id 77"),
        ("4", ""),
    ] {
        assert_eq!(answer["seqs"][id]["error"], error, "{id}");
    }
    assert!(engine.world.pending.is_ready("q"));
    let error = engine.op(json!({"id": 4, "req_id": "q"}))["error"].clone();
    assert_eq!(error, "Worker: duplicate id 4");
    let error = engine.op(json!({"id": 4, "clone_id": 4, "clone_idx": 1}))["error"].clone();
    assert_eq!(error, "Worker: duplicate id 4 (cloning 4)");
    let doubled = json!({"ops": [{"id": 4}, {"id": 4}]});
    assert_eq!(engine.try_mid(doubled), Err("duplicate id 4".into()));
}

#[test]
fn ai_503_an_index_is_used_once_and_the_parent_may_be_freed_with_it() {
    let mut engine = Engine::bound([branches(&[sample(1), sample(2)]), branches(&[])]);
    let answer = engine
        .try_mid(json!({
            "ops": [
                {"id": 5, "clone_id": 4, "clone_idx": 1},
                {"id": 6, "clone_id": 4, "clone_idx": 1},
            ],
            "freed": [4],
        }))
        .unwrap();
    assert_eq!(answer["seqs"]["5"]["error"], "");
    let error = &answer["seqs"]["6"]["error"];
    assert_eq!(error, "Worker: invalid clone_idx 1 (cloning 4)");
    let error = engine.op(json!({"id": 4}))["error"].clone();
    assert_eq!(error, "Worker: invalid id 4");
}

#[test]
fn ai_506_what_the_engine_cannot_do_is_refused() {
    let none = Capabilities {
        fork: false,
        backtrack: false,
        ff_tokens: false,
        logits: false,
    };
    let only = |name| Capabilities {
        backtrack: name == "backtrack",
        ff_tokens: name == "ff_tokens",
        fork: name == "fork",
        logits: false,
    };
    for (capabilities, returned, error) in [
        (
            none,
            vec![sample(1), sample(2)],
            "Worker: forking not enabled in this host",
        ),
        (only("fork"), vec![sample(1), sample(2)], ""),
        (
            only("ff_tokens"),
            vec![splice(true, 2, &[])],
            "Worker: backtracking not enabled in this host",
        ),
        (
            only("ff_tokens"),
            vec![splice(false, 1, &[])],
            "Worker: backtracking not enabled in this host",
        ),
        (
            only("backtrack"),
            vec![splice(true, 2, &[])],
            "Worker: ff_tokens not enabled in this host",
        ),
        (
            none,
            vec![splice(true, 1, &[5])],
            "Worker: ff_tokens not enabled in this host",
        ),
        (only("ff_tokens"), vec![splice(true, 1, &[5])], ""),
        // A noop, and a splice of exactly the sampled token.
        (none, vec![splice(false, 0, &[])], ""),
        (none, vec![splice(true, 1, &[])], ""),
    ] {
        let mut engine = Engine::with(capabilities);
        engine.world.instance("r", [branches(&returned)]);
        let result = engine.op(json!({"id": 4, "req_id": "r"}));
        assert_eq!(result["error"], error, "{returned:?}");
        // Its rows are free again.
        if !error.is_empty() {
            assert_eq!(engine.p2.rows.used(), 0);
        }
    }
}

#[test]
fn ai_236_without_a_free_slot_one_sequence_fails() {
    let five: Vec<_> = (0..5).map(sample).collect();
    let mut engine = Engine::new();
    engine.world.instance("a", [branches(&five)]);
    engine.world.instance("b", [branches(&five[..4])]);
    let answer = engine.mid(json!([{"id": 1, "req_id": "a"}, {"id": 2, "req_id": "b"}]));
    assert_eq!(answer["seqs"]["1"]["error"], "Worker: no free slots");
    assert_eq!(answer["seqs"]["2"]["error"], "");
    assert_eq!(answer["num_masks"], 4);
}

/// AI-441
#[test]
fn ai_236_the_forks_of_some_take_no_row_from_the_others() {
    let three: Vec<_> = (10..13).map(sample).collect();
    let two: Vec<_> = (20..22).map(sample).collect();
    let mut engine = Engine::new();
    for (request, branches) in [
        ("a", &three[..]),
        ("b", &two[..]),
        ("c", &[sample(30)]),
        ("d", &[sample(31)]),
        ("e", &two[..]),
    ] {
        engine.world.instance(request, [self::branches(branches)]);
    }
    let ops = ["a", "b", "c", "d", "e"].iter().zip(1..);
    let ops: Vec<_> = ops
        .map(|(request, id)| json!({"id": id, "req_id": request}))
        .collect();
    let answer = engine.mid(json!(ops));
    for (id, error) in [
        ("1", "Worker: no free slots"),
        ("2", ""),
        ("3", ""),
        ("4", ""),
        ("5", "Worker: no free slots"),
    ] {
        assert_eq!(answer["seqs"][id]["error"], error, "{id}");
    }
    // The rows are in the order of the ops all the same.
    assert_eq!(answer["num_masks"], 4);
    let rows: Vec<_> = (0..4).map(|row| engine.row(row)).collect();
    assert_eq!(rows, [[20], [21], [30], [31]]);
}

#[test]
fn ai_236_branches_with_the_same_mask_need_one_row() {
    let same = sample(9);
    let mut engine = Engine::new();
    engine.world.instance("a", [branches(&vec![same; 10])]);
    let three: Vec<_> = (0..3).map(sample).collect();
    engine.world.instance("b", [branches(&three)]);
    let answer = engine.mid(json!([{"id": 1, "req_id": "a"}, {"id": 2, "req_id": "b"}]));
    assert_eq!(answer["seqs"]["1"]["error"], "");
    assert_eq!(answer["seqs"]["2"]["error"], "");
    assert_eq!(answer["num_masks"], 4);
}

#[test]
fn ai_237_an_empty_mask_allows_only_eos() {
    let none = ReturnedBranch {
        mask: Some(Arc::new(sapwood_proto::steer::Mask::none(VOCABULARY))),
        ..sample(1)
    };
    let mut engine = Engine::new();
    engine.world.instance("r", [branches(&[none])]);
    let result = engine.op(json!({"id": 4, "req_id": "r"}));
    assert_eq!(result["logs"], "empty mask: only EOS allowed\n");
    assert_eq!(engine.row(0), [EOS]);
}

#[test]
fn ai_507_a_late_callback_is_a_noop_until_its_result_is_there() {
    let late = Line::At(60, Returned::Branches(vec![sample(9)]));
    let mut engine = Engine::bound([late]);
    let noop = json!({"branches": [{
        "sample_mask": null, "temperature": null,
        "splices": [{"when_sampled": [], "backtrack": 0, "ff_tokens": []}],
    }]});
    // The op that bound it was late, too.
    let result = engine.op(json!({"id": 4, "tokens": [], "backtrack": 0}));
    assert_eq!(result["result"], noop);
    assert_eq!(result["logs"], "⏲ timeout [deadline: 25ms; step 2/10]\n");
    let result = engine.op(json!({"id": 4}));
    assert_eq!(result["result"]["branches"][0]["sample_mask"], 0);
    assert_eq!(engine.row(0), [9]);
    assert_eq!(engine.world.take_calls().len(), 1);
}

/// With one sequence that is late and one that never is.
fn late_beside_another(late: u64) -> Engine {
    let mut engine = Engine::new();
    let late = Line::At(late, Returned::Branches(vec![sample(9)]));
    engine.world.instance("a", [late]);
    let quick = std::iter::repeat_with(|| branches(&[sample(8)]));
    engine.world.instance("b", quick.take(100));
    let begun = engine.world.clock.now();
    let answer = engine.mid(json!([{"id": 4, "req_id": "a"}, {"id": 5, "req_id": "b"}]));
    assert_eq!(
        answer["seqs"]["4"]["logs"],
        "⏲ timeout [deadline: 25ms; step 1/10]\n"
    );
    assert_eq!(engine.world.clock.now() - begun, Duration::from_millis(25));
    engine
}

#[test]
fn ai_507_others_wait_for_a_late_sequence_once() {
    let mut engine = late_beside_another(1_000);
    let begun = engine.world.clock.now();
    let both = || json!([{"id": 4}, {"id": 5, "tokens": [8], "sampled": 8}]);
    for _ in 0..3 {
        let answer = engine.mid(both());
        assert_eq!(answer["seqs"]["5"]["error"], "");
        assert_eq!(
            answer["seqs"]["4"]["logs"],
            "⏲ timeout [deadline: 25ms; step 1/10]\n"
        );
    }
    assert_eq!(engine.world.clock.now(), begun);
    // Its result is collected when it is there.
    engine.world.clock.advance(Duration::from_secs(1));
    let answer = engine.mid(both());
    assert_eq!(answer["seqs"]["4"]["error"], "");
    assert_eq!(engine.row(0), [9]);
}

/// A step that was not waited for is as long as its engine is quick, and is no measure of a callback.
#[test]
fn ai_507_ten_late_steps_take_ten_time_limits_however_many_requests_are_in_them() {
    let mut engine = late_beside_another(100_000);
    for elapsed in (5..250).step_by(5) {
        engine.world.clock.advance(Duration::from_millis(5));
        let answer = engine.mid(json!([{"id": 4}, {"id": 5, "tokens": [8], "sampled": 8}]));
        let step = 1 + elapsed / 25;
        assert_eq!(
            answer["seqs"]["4"]["logs"],
            format!("⏲ timeout [deadline: 25ms; step {step}/10]\n")
        );
    }
    engine.world.clock.advance(Duration::from_millis(5));
    let answer = engine.mid(json!([{"id": 4}, {"id": 5, "tokens": [8], "sampled": 8}]));
    assert_eq!(answer["seqs"]["4"]["error"], "Worker: timeout");
    assert_eq!(answer["seqs"]["5"]["error"], "");
}

#[test]
fn ai_507_late_sequences_alone_are_waited_for_until_one_of_them_ends() {
    let mut engine = Engine::new();
    for (request, at) in [("a", 40), ("b", 1_000)] {
        let late = Line::At(at, Returned::Branches(vec![sample(9)]));
        engine.world.instance(request, [late]);
    }
    engine.mid(json!([{"id": 4, "req_id": "a"}, {"id": 5, "req_id": "b"}]));
    let begun = engine.world.clock.now();
    let answer = engine.mid(json!([{"id": 4}, {"id": 5}]));
    assert_eq!(engine.world.clock.now() - begun, Duration::from_millis(15));
    assert_eq!(
        answer["seqs"]["4"]["result"]["branches"][0]["sample_mask"],
        0
    );
}

#[test]
fn ai_507_tokens_for_a_late_sequence_and_an_eleventh_late_step_fail_it() {
    let never = || Line::At(100_000, Returned::Branches(vec![sample(9)]));
    let mut engine = Engine::bound([never()]);
    let result = engine.op(json!({"id": 4, "tokens": [1], "sampled": 1}));
    assert_eq!(result["error"], "Worker: sequence 4 is still running");
    let mut engine = Engine::bound([never()]);
    for step in 2..=10 {
        let logs = engine.op(json!({"id": 4}))["logs"].clone();
        assert_eq!(
            logs,
            format!("⏲ timeout [deadline: 25ms; step {step}/10]\n")
        );
    }
    let result = engine.op(json!({"id": 4}));
    assert_eq!(
        (&result["error"], &result["result"]),
        (&json!("Worker: timeout"), &Value::Null)
    );
    let result = engine.op(json!({"id": 4}));
    assert_eq!(result["error"], "Worker: timeout");
}

#[test]
fn ai_422_a_failed_sequence_answers_until_it_is_freed() {
    let mut engine = Engine::bound([Line::Fails("boom")]);
    let result = engine.op(json!({"id": 4, "tokens": [1]}));
    assert_eq!(result["error"], "Error (mid): Previous WASM Error");
    engine.try_mid(json!({"ops": [], "freed": [4]})).unwrap();
    assert_eq!(engine.op(json!({"id": 4}))["error"], "Worker: invalid id 4");
}

fn waits_for(group: &Arc<Group>, name: &str) -> ReturnedBranch {
    ReturnedBranch {
        wait: Some(Waiting::of_test(group, &[name])),
        ..splice(false, 0, &[])
    }
}

#[test]
fn ai_1005_the_callback_is_not_run_while_its_sequence_waits() {
    let group = Group::new(4, VariablesLimits::default());
    let wait = branches(&[waits_for(&group, "go")]);
    let mut engine = Engine::bound([wait.clone(), wait, branches(&[sample(7)])]);
    let noop = json!([{
        "sample_mask": null, "temperature": null,
        "splices": [{"when_sampled": [], "backtrack": 0, "ff_tokens": []}], "wait": ["go"],
    }]);
    engine.world.take_calls();
    for _ in 0..2 {
        let result = engine.op(json!({"id": 4}));
        assert_eq!(result["result"]["branches"], noop);
        assert_eq!(engine.world.take_calls(), []);
    }
    // What happened to the sequence is reported at once.
    engine.op(json!({"id": 4, "tokens": [9], "sampled": 9}));
    assert_eq!(engine.world.take_calls(), [(4, input(&[4], Some(9), &[9]))]);
    write(&group, "go");
    let result = engine.op(json!({"id": 4}));
    assert_eq!(result["result"]["branches"][0]["sample_mask"], 0);
}

#[test]
fn ai_1005_a_branch_of_a_fork_waits_and_learns_its_group_afterwards() {
    let group = Group::new(4, VariablesLimits::default());
    let fork = branches(&[sample(7), waits_for(&group, "go")]);
    let mut engine = Engine::bound([fork, branches(&[sample(8)]), branches(&[sample(9)])]);
    engine.world.take_calls();
    let answer = engine.mid(json!([
        {"id": 4, "tokens": [7], "sampled": 7},
        {"id": 5, "clone_id": 4, "clone_idx": 1},
    ]));
    let waits = &answer["seqs"]["5"]["result"]["branches"][0];
    assert_eq!(waits["wait"], json!(["go"]));
    let calls = engine.world.take_calls();
    assert_eq!(calls, [(4, input(&[4, 5], Some(7), &[7]))]);
    write(&group, "go");
    engine.op(json!({"id": 5}));
    let calls = engine.world.take_calls();
    assert_eq!(calls, [(5, input(&[4, 5], None, &[]))]);
}
