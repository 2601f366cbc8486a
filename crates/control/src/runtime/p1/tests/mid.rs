//! The results and rows of `mid`, clones, and what `post` is told of a splice.

use super::*;

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
