//! A request from submission to its last event.

use super::harness::{Bench, read, say};
use crate::api::{Finish, Kind, Reason, Stop, Usage};
use crate::scripted::{Config as Script, Script as Name};

#[test]
fn tr_1104_echo_answers_with_the_prompt_and_ends_with_usage() {
    let mut bench = Bench::new(Script::default());
    let answer = bench.answer(say("héllo"));
    assert_eq!(answer.text(), "héllo");
    let stop = Some(Stop::Token(257));
    assert_eq!(
        answer.choices[0].2,
        Some(Finish {
            reason: Reason::Stop,
            stop
        })
    );
    let seed = answer.usage.unwrap().seed;
    let usage = Usage {
        prompt_tokens: 7,
        completion_tokens: 7,
        cached_tokens: 0,
        seed,
    };
    assert_eq!(answer.usage, Some(usage));
}

#[test]
fn max_tokens_ends_a_choice_with_length_and_zero_generates_nothing() {
    let mut bench = Bench::new(Script::default());
    for (max, text) in [(0, ""), (1, "h"), (5, "hello")] {
        let mut request = say("hello there");
        request.max_tokens = Some(max);
        let answer = bench.answer(request);
        assert_eq!(answer.text(), text);
        assert_eq!(
            answer.choices[0].2,
            Some(Finish {
                reason: Reason::Length,
                stop: None
            })
        );
        assert_eq!(answer.usage.unwrap().completion_tokens, max);
    }
}

#[test]
fn each_step_is_one_event_per_choice_and_a_stop_text_is_never_leaked() {
    let script = Script {
        script: Name::Text,
        text: "one END two".to_owned(),
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let mut request = say("x");
    request.stop = vec!["END".to_owned()];
    let mut handle = bench.submit(request);
    let mut seen = String::new();
    loop {
        let report = bench.step();
        let mut token_events = 0;
        while let Some(event) = handle.try_next() {
            assert_eq!(event.step, report.step);
            if let Kind::Tokens(tokens) = event.kind {
                token_events += 1;
                seen.push_str(&tokens.text);
            }
        }
        assert!(token_events <= 1);
        assert!("one ".starts_with(&seen), "{seen:?}");
        if report.wake_at.is_none() {
            break;
        }
    }
    assert_eq!(seen, "one ");
}

#[test]
fn a_dropped_handle_leaves_the_batch_before_the_next_step() {
    let script = Script {
        script: Name::Tokens,
        count: 1000,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let (gone, mut stays) = (bench.submit(say("a")), bench.submit(say("b")));
    assert_eq!(bench.step().batch().count(), 2);
    drop(gone);
    let report = bench.step();
    assert_eq!(report.cancelled, [0]);
    assert_eq!(report.batch().collect::<Vec<_>>(), [1]);
    assert!(!read(&mut stays).choices.is_empty());
}
