//! Callbacks that are late.

use super::*;

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
