//! Sequences that wait for variables.

use super::*;

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
