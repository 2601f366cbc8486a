//! A request from submission to its last event.

use std::time::Duration;

use super::harness::{Bench, read, request_for};
use crate::api::{ChoiceEnd, EventKind, FinishReason, StopCause, TokenUsage};
use crate::scripted::{Config as Script, Script as Name};

#[test]
fn tr_1104_echo_answers_with_the_prompt_and_ends_with_usage() {
    let mut bench = Bench::new(Script::default());
    let answer = bench.answer(request_for("héllo"));
    assert_eq!(answer.text(), "héllo");
    let stop = Some(StopCause::Tokens(vec![257]));
    assert_eq!(
        answer.choices[0].2,
        Some(ChoiceEnd {
            reason: FinishReason::Stop,
            stop
        })
    );
    let seed = answer.usage.unwrap().seed;
    let usage = TokenUsage {
        prompt_tokens: 7,
        completion_tokens: 7,
        cached_tokens: 0,
        sampled_tokens: 7,
        processed_tokens: 13,
        seed,
        // It ran from the first step on, and time does not advance within a step.
        queued: Duration::ZERO,
        prefill: Duration::ZERO,
    };
    assert_eq!(answer.usage, Some(usage));
}

#[test]
fn max_tokens_ends_a_choice_with_length_and_zero_generates_nothing() {
    let mut bench = Bench::new(Script::default());
    for (max, text) in [(0, ""), (1, "h"), (5, "hello")] {
        let mut request = request_for("hello there");
        request.params.max_tokens = Some(max);
        let answer = bench.answer(request);
        assert_eq!(answer.text(), text);
        assert_eq!(
            answer.choices[0].2,
            Some(ChoiceEnd {
                reason: FinishReason::Length,
                stop: None
            })
        );
        assert_eq!(answer.usage.unwrap().completion_tokens, max);
    }
}

#[test]
fn each_step_is_one_event_per_choice_and_stop_strings_are_not_sent() {
    let script = Script {
        script: Name::Text,
        text: "one END two".to_owned(),
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let mut request = request_for("x");
    request.params.stop = vec!["END".to_owned()];
    let mut handle = bench.submit(request);
    let mut seen = String::new();
    loop {
        let report = bench.step();
        let mut token_events = 0;
        while let Some(event) = handle.try_next() {
            assert_eq!(event.step, report.step);
            if let EventKind::Tokens(tokens) = event.kind {
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
    let (removed, mut stays) = (
        bench.submit(request_for("a")),
        bench.submit(request_for("b")),
    );
    assert_eq!(bench.step().batch().count(), 2);
    drop(removed);
    let report = bench.step();
    assert_eq!(report.cancelled, [0]);
    assert_eq!(report.batch().collect::<Vec<_>>(), [1]);
    assert!(!read(&mut stays).choices.is_empty());
}

#[test]
fn stop_tokens_are_reported_without_text() {
    let mut request = request_for("abcd");
    request.params.stop_sequences = vec![vec![99]];
    let answer = Bench::new(Script::default()).answer(request);
    assert_eq!(
        (answer.text(), &answer.choices[0].1[..]),
        ("ab", &[97, 98, 99][..])
    );
    let stop = Some(StopCause::Tokens(vec![99]));
    assert_eq!(
        answer.choices[0].2,
        Some(ChoiceEnd {
            reason: FinishReason::Stop,
            stop
        })
    );
}

/// The prompt is BOS and `abab`, and the script repeats it.
#[test]
fn lm_307_stop_sequences_match_the_output_and_the_last_token_is_reported() {
    // Stops, the minimum of tokens, the output, and the stop that ended it.
    type Case<'a> = (&'a [&'a [u32]], u32, &'a [u32], &'a [u32]);
    let cases: [Case<'_>; 8] = [
        (&[&[98, 97]], 0, &[97, 98, 97], &[98, 97]),
        // Of two stops that are complete at once, the first in the list counts.
        (&[&[97, 98, 97], &[97]], 0, &[97], &[97]),
        // The prompt does not count.
        (&[&[98, 97, 98, 97]], 0, &[97, 98, 97, 98, 257], &[257]),
        (&[&[256, 97]], 0, &[97, 98, 97, 98, 257], &[257]),
        // A stop ends the output with the last token of the minimum at the earliest; a stop of a single token is masked
        // before.
        (&[&[97, 98]], 3, &[97, 98, 97, 98], &[97, 98]),
        (&[&[98, 257]], 0, &[97, 98, 97, 98, 257], &[98, 257]),
        (&[&[98, 98]], 0, &[97, 98, 97, 98, 257], &[257]),
        (&[], 0, &[97, 98, 97, 98, 257], &[257]),
    ];
    for (stops, min_tokens, ids, stop) in cases {
        let mut request = request_for("abab");
        request.params.stop_sequences = stops.iter().map(|stop| stop.to_vec()).collect();
        request.params.min_tokens = Some(min_tokens);
        let answer = Bench::new(Script::default()).answer(request);
        assert_eq!(answer.choices[0].1, ids, "{stops:?}");
        let finish = answer.choices[0].2.as_ref().unwrap();
        let stop = Some(StopCause::Tokens(stop.to_vec()));
        assert_eq!((finish.reason, &finish.stop), (FinishReason::Stop, &stop));
    }
}

#[test]
fn min_tokens_suppresses_stops_and_ignore_eos_the_eog_token() {
    let script = Script {
        script: Name::Text,
        text: "ab".to_owned(),
        ..Script::default()
    };
    let mut request = request_for("x");
    (
        request.params.min_tokens,
        request.params.max_tokens,
        request.params.stop,
    ) = (Some(5), Some(9), vec!["a".to_owned()]);
    let answer = Bench::new(script.clone()).answer(request);
    assert!(answer.text().starts_with("ab"));
    assert!(answer.choices[0].1.len() >= 5 && !answer.choices[0].1[..5].contains(&257));
    for (skip_special_tokens, text) in [(true, "ab"), (false, "ab</s></s>")] {
        let mut request = request_for("x");
        (request.params.ignore_eos, request.params.max_tokens) = (Some(true), Some(4));
        request.params.skip_special_tokens = Some(skip_special_tokens);
        let answer = Bench::new(script.clone()).answer(request);
        assert_eq!(answer.choices[0].1, [97, 98, 257, 257]);
        assert_eq!(answer.text(), text);
        assert_eq!(
            answer.choices[0].2,
            Some(ChoiceEnd {
                reason: FinishReason::Length,
                stop: None
            })
        );
    }
}

#[test]
fn lm_411_a_bias_of_100_wins_with_logprob_zero() {
    let mut bench = Bench::new(Script::default());
    let mut request = request_for("ab");
    request.params.logit_bias = [(257, 100.0)].into();
    request.params.top_logprobs = Some(3);
    let mut handle = bench.submit(request);
    bench.settle();
    let Some(EventKind::Tokens(tokens)) = handle.try_next().map(|event| event.kind) else {
        panic!("no token")
    };
    assert_eq!((tokens.tokens[0].id, tokens.tokens[0].logprob), (257, 0.0));
    assert_eq!(tokens.tokens[0].top.len(), 3);
}

/// The script chooses `a`; every other token is 40 below it, so a bias of more than 40 decides.
#[test]
fn lm_305_a_bias_is_added_as_sent_and_minus_infinity_forbids() {
    let first = |bias: &[(u32, f32)]| {
        let mut request = request_for("a");
        (request.params.logit_bias, request.params.max_tokens) = (bias.into(), Some(1));
        Bench::new(Script::default()).answer(request).choices[0].1[0]
    };
    assert_eq!(first(&[(98, 30.0)]), 97);
    assert_eq!(first(&[(98, 60.0)]), 98);
    assert_eq!(first(&[(98, 30.0), (98, 30.0)]), 98, "several add up");
    assert_eq!(first(&[(97, -30.0)]), 97);
    assert_ne!(first(&[(97, f32::NEG_INFINITY)]), 97);
    // Two tokens as unlikely as possible without being forbidden: a bias of -100 is a number like any other.
    let all: Vec<_> = (0..258).map(|token| (token, -100.0)).collect();
    assert_eq!(first(&all), 97);
}

#[test]
fn lm_305_a_bias_that_forbids_every_token_fails_only_its_request() {
    let mut bench = Bench::new(Script::default());
    let mut beside = bench.submit(request_for("ab"));
    let mut request = request_for("ab");
    request.params.logit_bias = (0..258).map(|token| (token, f32::NEG_INFINITY)).collect();
    let cause = bench.answer(request).error.unwrap();
    assert_eq!(cause.reason, "constraint_failed");
    assert_eq!(read(&mut beside).text(), "ab");
}

/// LM-602: limits and sampling are per sequence, whatever else is in the step.
#[test]
fn lm_603_every_row_of_a_step_may_differ() {
    let script = || Script {
        script: Name::Tokens,
        gap: 1.0,
        vocab: 1024,
        ..Script::default()
    };
    let request = |index: u32| {
        let mut request = request_for("once");
        request.params.temperature = Some(index as f32 / 8.0);
        request.params.seed = Some(u64::from(index));
        (request.params.top_k, request.params.max_tokens) = (Some(index), Some(index + 1));
        request.params.logit_bias = [(index, 3.0)].into();
        request.params.ignore_eos = Some(true);
        // Some have samplers with a state or a history of their own.
        request.params.mirostat = Some(if index.is_multiple_of(3) { 2 } else { 0 });
        request.params.dry_multiplier = (index % 4 == 1).then_some(2.0);
        request.params.presence_penalty = (index % 5 == 2).then_some(1.0);
        request.params.penalty_last_n = Some(3);
        request.params.xtc_probability = (index % 2 == 1).then_some(0.5);
        request
    };
    let mut bench = Bench::new(script());
    let mut together: Vec<_> = (0..16).map(|index| bench.submit(request(index))).collect();
    bench.settle();
    for (index, handle) in (0..16).zip(&mut together) {
        let (seen, alone) = (read(handle), Bench::new(script()).answer(request(index)));
        assert_eq!(seen.choices, alone.choices, "{index}");
        assert_eq!(seen.choices[0].1.len(), index as usize + 1);
    }
}

#[test]
fn tr_1105_scripted_pauses_hangs_errors_and_cuts() {
    let script = r#"{"script": "steps", "rules": [
        {"match": "hang", "steps": [{"text": "a"}, {"hang": true}]},
        {"match": "cut", "steps": [{"text": "a"}, {"cut": "close"}]},
        {"match": "fail", "steps": [{"error": {"code": "upstream-failed", "message": "no"}}]},
        {"match": "slow", "steps": [{"text": "a"}, {"sleep_ms": 500}, {"text": "b"}, {"finish": "length"}]}]}"#;
    let script: Script = serde_json::from_str(script).unwrap();
    let mut bench = Bench::new(script);
    let mut hangs = bench.submit(request_for("hang"));
    let before = bench.now;
    let slow = bench.answer(request_for("slow"));
    assert_eq!(
        (slow.text(), slow.choices[0].2.as_ref().unwrap().reason),
        ("ab", FinishReason::Length)
    );
    assert!(bench.now.since(before).as_millis() >= 500);
    let cut = bench.answer(request_for("cut"));
    assert_eq!(
        (cut.text(), cut.error.as_ref().unwrap().reason.name()),
        ("a", "cut_close")
    );
    assert_eq!(
        bench.answer(request_for("fail")).error.unwrap().code.name(),
        "upstream-failed"
    );
    assert_eq!(
        bench.answer(request_for("else")).error.unwrap().reason,
        "NO_RULE"
    );
    assert!(read(&mut hangs).usage.is_none(), "it hangs on");
    drop(hangs);
    assert_eq!(bench.step().cancelled.len(), 1);
    assert!(bench.owner.is_empty());
}

#[test]
fn invalid_utf8_is_replaced_and_no_character_is_split() {
    let script = Script {
        script: Name::Echo,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let mut prompt = vec![256, 0xe2, 0x82];
    prompt.extend([0xac, 0xff, u32::from(b'a'), 0xc3]);
    let mut request = request_for("");
    request.prompt = crate::api::Prompt::Tokens(prompt);
    request.params.max_tokens = Some(6);
    assert_eq!(bench.answer(request).text(), "€\u{fffd}a\u{fffd}");
}
