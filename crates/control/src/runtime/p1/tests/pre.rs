//! Forwarded tokens, forks and suspensions.

use super::*;

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
