use sapwood_engine::api::EngineError;

use super::*;
use crate::branch_text::tests::step;

fn event(step: u64, choice: u32, kind: EventKind) -> EngineEvent {
    EngineEvent { step, choice, kind }
}

fn tokens(number: u64, choice: u32, tokens: Tokens) -> EngineEvent {
    event(number, choice, EventKind::Tokens(tokens))
}

fn forced(text: &str) -> Tokens {
    let mut tokens = step(text);
    for token in &mut tokens.tokens {
        token.forced = true;
    }
    tokens
}

fn end(number: u64, choice: u32, reason: FinishReason) -> EngineEvent {
    event(
        number,
        choice,
        EventKind::Finish(ChoiceEnd { reason, stop: None }),
    )
}

/// The example of the specification: a prompt of 7 tokens, and two digits.
#[test]
fn ai_914_usage_counts_what_was_sampled_and_what_went_through_the_model() {
    let mut steps = RunSteps::default();
    steps.prompt(7);
    steps.add(tokens(1, 0, step("4")));
    let first = steps.take().unwrap();
    assert_eq!(
        first.to_string(),
        r#"{"object":"run","forks":[{"index":0,"text":"4","error":"","logs":"","storage":[],"micros":0}],"usage":{"sampled_tokens":1,"ff_tokens":7,"cost":9}}"#
    );
    steps.add(tokens(2, 0, step("2")));
    steps.add(end(2, 0, FinishReason::Controller));
    let second = steps.take().unwrap().to_string();
    assert!(second.contains(r#""text":"2""#) && second.contains(r#""finish_reason":"aici-stop""#));
    assert!(second.ends_with(r#""usage":{"sampled_tokens":2,"ff_tokens":8,"cost":12}}"#));
    assert_eq!((steps.take(), steps.last()), (None, None));
}

#[test]
fn ai_914_forced_tokens_are_counted_when_the_model_has_seen_them() {
    let mut steps = RunSteps::default();
    steps.prompt(3);
    steps.add(tokens(1, 0, forced("abc")));
    let usage = |steps: &mut RunSteps| steps.take().unwrap()["usage"]["ff_tokens"].clone();
    assert_eq!(usage(&mut steps), 3);
    steps.add(tokens(2, 0, step("d")));
    assert_eq!(usage(&mut steps), 6);
    let backtrack = Tokens {
        backtrack: 1,
        withdrawn: 1,
        ..forced("xy")
    };
    steps.add(tokens(3, 0, backtrack));
    steps.add(tokens(4, 0, step("z")));
    assert_eq!(usage(&mut steps), 8);
}

#[test]
fn ai_914_a_backtrack_is_shown_before_the_new_text() {
    let mut steps = RunSteps::default();
    steps.add(tokens(1, 0, step("ab")));
    steps.take();
    let backtrack = Tokens {
        backtrack: 1,
        withdrawn: 1,
        ..step("c")
    };
    steps.add(tokens(2, 0, backtrack));
    assert_eq!(steps.take().unwrap()["forks"][0]["text"], " ↩ c");
}

#[test]
fn ai_914_forks_begin_at_the_fork_and_only_those_with_something_are_listed() {
    let mut steps = RunSteps::default();
    steps.add(tokens(1, 0, step("ab")));
    steps.take();
    let fork = Tokens {
        inherited: 2,
        fork_of: Some(0),
        ..step("abX")
    };
    steps.add(tokens(2, 1, fork));
    steps.add(tokens(2, 0, step("")));
    let second = steps.take().unwrap();
    let forks = second["forks"].as_array().unwrap();
    assert_eq!(
        (forks.len(), &forks[0]["index"], &forks[0]["text"]),
        (1, &json!(1), &json!("X"))
    );
    // Two sequences in one step are one event.
    steps.add(tokens(3, 0, step("c")));
    assert!(!steps.begins_later(&tokens(3, 1, step("Y"))));
    assert!(steps.begins_later(&tokens(4, 1, step("Y"))));
    steps.add(tokens(3, 1, step("Y")));
    assert_eq!(steps.take().unwrap()["forks"].as_array().unwrap().len(), 2);
}

/// AI-916: what the client looks for in logs passes unchanged.
#[test]
fn ai_912_a_report_has_logs_storage_and_time() {
    let write = VariableWrite {
        name: "n".into(),
        value: vec![1, 0xab],
        append: true,
        when_version_is: None,
    };
    let report = StepReport {
        logs: "JSON-OUT: {\"a\":1}\nPrevious WASM Error".into(),
        storage: vec![write],
        micros: 40,
    };
    let mut steps = RunSteps::default();
    steps.add(event(1, 0, EventKind::Report(report)));
    let written = steps.take().unwrap()["forks"][0].to_string();
    let storage =
        r#"[{"WriteVar":{"name":"n","value":"01ab","op":"Append","when_version_is":null}}]"#;
    assert_eq!(
        written,
        format!(
            r#"{{"index":0,"text":"","error":"","logs":"JSON-OUT: {{\"a\":1}}\nPrevious WASM Error","storage":{storage},"micros":40}}"#
        )
    );
    // Time alone is nothing to report.
    let report = StepReport {
        micros: 9,
        ..StepReport::default()
    };
    steps.add(event(2, 0, EventKind::Report(report)));
    assert_eq!(steps.take(), None);
}

#[test]
fn ai_915_a_failure_ends_the_sequences_that_have_not_ended() {
    let error = |reason| Error::Engine {
        code: Code::ControllerFailed,
        reason,
        message: "it trapped".into(),
        retry_after: None,
    };
    // Before the first step.
    let mut steps = RunSteps::default();
    steps.fail(&error(ErrorReason::INIT));
    let first = steps.take().unwrap()["forks"].to_string();
    assert_eq!(
        first,
        r#"[{"index":0,"text":"","error":"it trapped","logs":"","storage":[],"micros":0,"finish_reason":"fail"}]"#
    );
    let mut steps = RunSteps::default();
    steps.add(tokens(1, 0, step("a")));
    steps.add(tokens(1, 1, step("b")));
    steps.add(end(1, 0, FinishReason::Stop));
    steps.take();
    steps.fail(&error(ErrorReason::DEADLOCK));
    let last = steps.take().unwrap();
    let forks = last["forks"].as_array().unwrap();
    assert_eq!((forks.len(), &forks[0]["index"]), (1, &json!(1)));
    assert_eq!(forks[0]["finish_reason"], "deadlock");
}

#[test]
fn ai_915_a_fork_that_fails_has_its_error_and_the_others_go_on() {
    let mut steps = RunSteps::default();
    steps.add(tokens(1, 0, step("a")));
    steps.add(tokens(1, 1, step("b")));
    let error = EngineError::new(Code::ControllerFailed, ErrorReason::TRAP, "it trapped");
    steps.add(event(1, 1, EventKind::Failed(error)));
    let forks = steps.take().unwrap()["forks"].clone();
    assert_eq!(forks[0].get("finish_reason"), None);
    assert_eq!(forks[1]["error"], "it trapped");
    assert_eq!(forks[1]["finish_reason"], "fail");
    // Another failure, of the request, is not that of a fork that has ended.
    steps.add(tokens(2, 0, step("c")));
    steps.add(end(2, 0, FinishReason::Controller));
    let forks = steps.take().unwrap()["forks"].clone();
    assert_eq!(forks.as_array().unwrap().len(), 1);
    assert_eq!(forks[0]["finish_reason"], "aici-stop");
}

#[test]
fn ai_913_a_run_without_events_has_one_all_the_same() {
    let mut steps = RunSteps::default();
    let last = steps.last().unwrap().to_string();
    assert_eq!(
        last,
        r#"{"object":"run","forks":[{"index":0,"text":"","error":"","logs":"","storage":[],"micros":0}],"usage":{"sampled_tokens":0,"ff_tokens":0,"cost":0}}"#
    );
    assert_eq!(steps.last(), None);
}
