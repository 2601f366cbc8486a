//! The call sites of steerers, each tested with a small steerer.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{Mask, Mid, Post, Pre, Sample, SteerFailure, Token};

use super::harness::{Answer, Bench, read, request_for};
use super::probe::{Probe, forced, free, masked, noop, run, sample, splice};
use crate::Config;
use crate::api::{ChoiceEnd, FinishReason, GenerationRequest, Prompt};
use crate::scripted::{Config as Script, Script as Name};

pub(super) fn letters(allowed: &[u8]) -> Mask {
    let mut mask = Mask::none(258);
    allowed
        .iter()
        .for_each(|&letter| mask.allow(Token::from(letter)));
    mask
}

pub(super) fn steered(text: &str, probe: &Probe) -> GenerationRequest {
    let mut request = request_for(text);
    request.steer = Some(Box::new(probe.clone()));
    request
}

pub(super) fn echo() -> Bench {
    Bench::new(Script::default())
}

pub(super) fn controller() -> Option<ChoiceEnd> {
    Some(ChoiceEnd {
        reason: FinishReason::Controller,
        stop: None,
    })
}

pub(super) fn error_of(answer: &Answer) -> (&str, &str) {
    let cause = answer.error.as_ref().unwrap();
    assert_eq!(cause.code.name(), "controller-failed");
    (cause.reason.name(), &cause.message)
}

#[test]
fn ai_801_a_round_is_pre_begin_post_and_a_steerer_that_allows_all_changes_nothing() {
    let probe = Probe::new();
    let answer = echo().answer(steered("ab", &probe));
    let log = probe.log.lock().unwrap().clone();
    // An EOG token does not end a steered sequence (AI-804): the script then emits its EOG token again.
    assert_eq!(
        &log[..6],
        [
            "pre",
            "begin",
            "post 0 [97] Some(97)",
            "pre",
            "begin",
            "post 0 [98] Some(98)"
        ]
    );
    assert!(answer.text().starts_with("ab"));
}

#[test]
fn ai_854_steerers_are_flushed_when_all_sequences_of_a_step_have_been_asked() {
    let mut probe = Probe::new();
    probe.logs_flushes = true;
    let mut bench = echo();
    let handles = ["ab", "cd"].map(|text| bench.submit(steered(text, &probe)));
    bench.settle();
    drop(handles);
    let log = probe.log.lock().unwrap().clone();
    let step = [
        "pre", "pre", "flush", "flush", "begin", "begin", "flush", "flush",
    ];
    assert_eq!(log[..8], step);
}

#[test]
fn ai_802_a_mask_is_obeyed_and_the_script_yields_to_the_best_allowed() {
    let mut probe = Probe::new();
    probe.mid = |round| {
        let mask = (round == 1).then(|| Arc::new(letters(b"xyz")));
        Ok(Some(sample(Sample {
            mask,
            bias: vec![(Token::from(b'y'), 90.0)],
            ..Sample::default()
        })))
    };
    // A bias of 90 overrides the script wherever the mask allows it.
    let mut request = steered("ab", &probe);
    request.params.max_tokens = Some(3);
    assert_eq!(echo().answer(request).text(), "yyy");
    probe.mid = |round| {
        Ok(Some(if round == 1 {
            masked(letters(b"z"))
        } else {
            free()
        }))
    };
    let mut request = steered("abc", &probe);
    request.params.max_tokens = Some(3);
    assert_eq!(echo().answer(request).text(), "azc");
}

#[test]
fn lm_411_the_only_token_a_mask_leaves_has_logprob_zero() {
    let mut probe = Probe::new();
    probe.mid = |_| Ok(Some(masked(letters(b"q"))));
    let mut request = steered("ab", &probe);
    (request.params.max_tokens, request.params.top_logprobs) = (Some(1), Some(2));
    let mut bench = echo();
    let mut handle = bench.submit(request);
    bench.settle();
    let Some(crate::api::EventKind::Tokens(tokens)) = handle.try_next().map(|event| event.kind)
    else {
        panic!("no token")
    };
    assert_eq!(
        (tokens.tokens[0].logprob, &tokens.tokens[0].top[..]),
        (0.0, &[(113, 0.0)][..])
    );
}

#[test]
fn ai_804_a_sole_eog_token_ends_and_any_other_becomes_a_space() {
    let mut probe = Probe::new();
    probe.mid = |round| {
        let mut mask = Mask::none(258);
        mask.allow(257);
        Ok(Some(if round == 2 { masked(mask) } else { free() }))
    };
    let answer = echo().answer(steered("abcdef", &probe));
    assert_eq!(
        (answer.text(), answer.choices[0].2.as_ref().unwrap().reason),
        ("ab", FinishReason::Stop)
    );
    probe = Probe::new();
    let mut request = steered("a", &probe);
    request.params.max_tokens = Some(3);
    let answer = echo().answer(request);
    assert_eq!(
        answer.choices[0].1,
        [97, 257, 257],
        "the EOG token is reported and the sequence continues"
    );
    probe.post = |_, tokens| {
        Ok(if tokens == [257] {
            Post::Stop
        } else {
            Post::Continue
        })
    };
    let answer = echo().answer(steered("a", &probe));
    assert_eq!(answer.choices[0].1, [97, 257]);
    assert_eq!(
        answer.choices[0].2,
        Some(ChoiceEnd {
            reason: FinishReason::Stop,
            stop: None
        })
    );
}

#[test]
fn ai_823_fast_forward_tokens_are_computed_in_one_decode_call_and_marked() {
    let mut probe = Probe::new();
    probe.pre = |round| {
        Ok(if round == 1 {
            forced(&[120, 121, 122])
        } else {
            run()
        })
    };
    probe.post = |_, _| Ok(Post::Continue);
    let mut bench = echo();
    let mut request = steered("abcdefgh", &probe);
    request.params.max_tokens = Some(6);
    let mut handle = bench.submit(request);
    let reports = bench.settle();
    assert_eq!(
        read(&mut handle).text(),
        "axyzef",
        "the script goes by position"
    );
    // The prompt; the first token with the three forced ones; then one token each.
    let passes: Vec<usize> = reports
        .iter()
        .map(|r| r.decoded.len() + r.prefilled.iter().map(|p| p.1 as usize).sum::<usize>())
        .collect();
    assert_eq!(&passes[..4], [9, 4, 1, 0]);
}

#[test]
fn ai_822_ai_824_a_splice_rolls_back_tokens_and_text_and_appends_others() {
    let mut probe = Probe::new();
    probe.mid = |round| {
        Ok(Some(match round {
            3 => splice(2, &[88]),
            5 => splice(1, &[]),
            7 => Mid::Stop,
            _ => free(),
        }))
    };
    for truncates in [true, false] {
        let mut bench = Bench::new(Script {
            truncates,
            ..Script::default()
        });
        let answer = bench.answer(steered("abcdefgh", &probe));
        // a b c, rewound to a, X; then by position: c, rewound; c again, stop.
        assert_eq!(
            (answer.text(), answer.choices[0].2.clone()),
            ("aXc", controller()),
            "{truncates}"
        );
        assert_eq!(
            answer.usage.unwrap().completion_tokens,
            6,
            "every token ever appended"
        );
    }
    let received = probe
        .log
        .lock()
        .unwrap()
        .iter()
        .filter(|line| line.contains("None"))
        .cloned()
        .collect::<Vec<_>>();
    assert_eq!(&received[..2], ["post 2 [88] None", "post 1 [] None"]);
}

#[test]
fn ai_826_a_splice_past_the_beginning_or_out_of_the_vocabulary_fails() {
    let mut probe = Probe::new();
    probe.mid = |round| Ok(Some(if round == 1 { splice(2, &[]) } else { free() }));
    assert_eq!(
        error_of(&echo().answer(steered("ab", &probe))),
        ("bad-result", "backtrack 2 past the beginning")
    );
    probe.mid = |_| Ok(Some(splice(0, &[258])));
    assert_eq!(
        error_of(&echo().answer(steered("ab", &probe))).0,
        "bad-result"
    );
    probe.mid = |_| Ok(Some(masked(Mask::all(7))));
    assert_eq!(
        error_of(&echo().answer(steered("ab", &probe))).0,
        "bad-result"
    );
    probe.mid = |_| Ok(Some(masked(Mask::none(258))));
    assert_eq!(
        error_of(&echo().answer(steered("ab", &probe))).0,
        "constraint_failed"
    );
}

/// AI-933.
#[test]
fn ai_821_forks_are_complete_independent_choices_that_share_the_cache() {
    let mut probe = Probe::new();
    probe.pre = |round| Ok(if round == 2 { Pre::Fork(3) } else { run() });
    probe.post = |_, tokens| {
        Ok(if tokens == [257] {
            Post::Stop
        } else {
            Post::Continue
        })
    };
    for truncates in [true, false] {
        let script = Script {
            truncates,
            ..Script::default()
        };
        let config = Config {
            prefix_tokens_min: 1,
            ..Config::default()
        };
        let mut bench = Bench::with(script, config);
        let mut handle = bench.submit(steered("abcd", &probe));
        let reports = bench.settle();
        let answer = read(&mut handle);
        let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
        assert_eq!(texts, ["abcd"; 3], "every choice is whole");
        assert_eq!(answer.usage.unwrap().completion_tokens, 5 + 3 + 3);
        let computed: u32 = reports
            .iter()
            .flat_map(|r| &r.prefilled)
            .map(|prefill| prefill.1)
            .sum();
        assert!(
            computed <= 5 + 3 * 3,
            "{truncates}: forks compute their prefix again: {computed}"
        );
    }
}

#[test]
fn too_many_forks_fail() {
    let mut probe = Probe::new();
    probe.pre = |_| Ok(Pre::Fork(65));
    assert_eq!(error_of(&echo().answer(steered("ab", &probe))).0, "limit");
}

#[test]
fn further_choices_get_forks_of_the_steerer() {
    let probe = Probe::new();
    let mut request = steered("ab", &probe);
    (request.params.n, request.params.max_tokens) = (Some(3), Some(2));
    let answer = echo().answer(request);
    assert_eq!(
        answer
            .choices
            .iter()
            .map(|choice| &*choice.0)
            .collect::<Vec<_>>(),
        ["ab"; 3]
    );
    let log = probe.log.lock().unwrap();
    assert_eq!(
        log.iter().filter(|line| line.starts_with("2:post")).count(),
        2
    );
}

#[test]
fn a_steerer_that_fails_or_panics_ends_its_request_only() {
    let mut probes = vec![Probe::new(); 6];
    probes[0].pre = |_| {
        Err(SteerFailure {
            reason: ErrorReason::TRAP,
            message: "the controller panicked".to_owned(),
        })
    };
    probes[1].mid = |_| {
        Err(SteerFailure {
            reason: ErrorReason::TRAP,
            message: "the controller panicked".to_owned(),
        })
    };
    probes[2].post = |_, _| {
        Err(SteerFailure {
            reason: ErrorReason::TRAP,
            message: "the controller panicked".to_owned(),
        })
    };
    probes[3].pre = |_| panic!("broken");
    probes[4].mid = |_| panic!("broken");
    probes[5].post = |_, _| panic!("broken");
    // The log of calls shows which of them panicked.
    for (index, probe) in probes.into_iter().enumerate() {
        let mut bench = echo();
        let (mut failing, mut mate) = (
            bench.submit(steered("ab", &probe)),
            bench.submit(request_for("fine")),
        );
        bench.settle();
        assert_eq!(error_of(&read(&mut failing)).0, "trap");
        assert_eq!(read(&mut mate).text(), "fine");
        assert_eq!(bench.engine.stats().panics.get(), u64::from(index >= 3));
    }
}

#[test]
fn ai_505_pre_and_mid_can_stop_and_noop_waits_without_a_decode_call() {
    let mut probe = Probe::new();
    probe.pre = |round| Ok(if round == 2 { Pre::Stop } else { run() });
    let answer = echo().answer(steered("abcd", &probe));
    assert_eq!(
        (answer.text(), answer.choices[0].2.clone()),
        ("ab", controller())
    );
    let mut probe = Probe::new();
    probe.mid = |round| Ok(Some(if round % 2 == 0 { noop() } else { free() }));
    let mut bench = echo();
    let mut request = steered("abcd", &probe);
    request.params.max_tokens = Some(4);
    let mut handle = bench.submit(request);
    let passes: usize = bench
        .settle()
        .iter()
        .map(|report| report.batch().count())
        .sum();
    assert_eq!((read(&mut handle).text(), passes), ("abcd", 4));
}

#[test]
fn a_steered_sequence_survives_preemption() {
    let mut probe = Probe::new();
    probe.mid = |round| {
        Ok(Some(if round % 3 == 0 {
            masked(letters(b"k"))
        } else {
            free()
        }))
    };
    let alone = {
        let mut request = GenerationRequest::new(Prompt::Text("steady".to_owned()));
        request.params.temperature = Some(0.0);
        request.params.max_tokens = Some(30);
        request.steer = Some(Box::new(probe.clone()));
        echo().answer(request)
    };
    let script = Script {
        script: Name::Echo,
        context_tokens: 64,
        cells: Some(64),
        parallel: 4,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let mut first = request_for(&"x".repeat(25));
    first.params.priority = Some(1);
    let mut other = bench.submit(first);
    let mut request = steered("steady", &probe);
    request.params.max_tokens = Some(30);
    let mut handle = bench.submit(request);
    let preempted: usize = bench
        .settle()
        .iter()
        .map(|report| report.preempted.len())
        .sum();
    assert!(preempted > 0, "the test needs a full cache");
    assert_eq!(read(&mut handle).choices, alone.choices);
    assert_eq!(read(&mut other).text(), "x".repeat(25));
}
