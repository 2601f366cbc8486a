//! What a steered request is charged with and reports: splices in place of samples, ends, fuel, logs.

use std::sync::Arc;

use sapwood_proto::code::Code;
use sapwood_proto::steer::{
    Branch, ConditionalSplice, Mask, Mid, Post, Sample, Splice, StepReport, Token,
};

use super::harness::{Bench, read};
use super::probe::{Probe, free, masked, run, sample, splice};
use super::steering::{echo, error_of, letters, steered};
use crate::Config;
use crate::api::{ChoiceEnd, EventKind, FinishReason, GenerationRequest, StopCause};
use crate::scripted::{Config as Script, Script as Name};

const EOS: Token = 257;

fn when(when_sampled: &[Token], backtrack: u32, tokens: &[Token]) -> ConditionalSplice {
    ConditionalSplice {
        when_sampled: when_sampled.to_vec(),
        keeps_sampled: false,
        splice: Splice {
            backtrack,
            tokens: tokens.to_vec(),
        },
    }
}

#[test]
fn ai_505_the_first_splice_that_applies_replaces_the_sampled_token() {
    let mut probe = Probe::new();
    probe.mid = |_| {
        Ok(Some(sample(Sample {
            splices: vec![
                // Never sampled.
                when(&[1], 0, &[88]),
                when(&[99, 98], 1, &[120, 121, 122]),
                when(&[98], 0, &[89]),
                when(&[100], 0, &[]),
            ],
            ..Sample::default()
        })))
    };
    let mut request = steered("abcdef", &probe);
    request.params.max_tokens = Some(6);
    let answer = echo().answer(request);
    // a; b is sampled, and xyz replaces it and the a; d is dropped until the limit of fuel.
    assert_eq!(answer.text(), "xyz");
    let log = probe.log.lock().unwrap();
    let posts: Vec<&String> = log.iter().filter(|line| line.starts_with("post")).collect();
    assert_eq!(
        posts[..3],
        [
            "post 0 [97] Some(97)",
            "post 1 [120, 121, 122] Some(98)",
            "post 0 [] Some(100)"
        ]
    );
    let usage = answer.usage.unwrap();
    assert_eq!(usage.completion_tokens, 4, "dropped tokens do not count");
}

/// The sampled token is appended as the tokens after it are, so that it is not drawn again.
#[test]
fn ai_505_a_splice_that_keeps_the_sampled_token_appends_others_after_it() {
    let mut probe = Probe::new();
    probe.mid = |_| {
        let keeping = |when_sampled: &[Token], tokens: &[Token]| ConditionalSplice {
            keeps_sampled: true,
            ..when(when_sampled, 0, tokens)
        };
        Ok(Some(sample(Sample {
            splices: vec![
                keeping(&[97, 98], &[120, 121]),
                keeping(&[100], &[]),
                // The first that applies wins.
                keeping(&[97], &[122]),
            ],
            ..Sample::default()
        })))
    };
    let mut request = steered("abcdef", &probe);
    request.params.max_tokens = Some(5);
    let answer = echo().answer(request);
    // a, and x and y in the places of b and c.
    assert_eq!(answer.text(), "axyde");
    let log = probe.log.lock().unwrap();
    let posts: Vec<&String> = log.iter().filter(|line| line.starts_with("post")).collect();
    assert_eq!(
        posts,
        [
            "post 0 [97, 120, 121] Some(97)",
            "post 0 [100] Some(100)",
            "post 0 [101] Some(101)"
        ]
    );
}

#[test]
fn ai_824_a_splice_is_reported_as_far_as_it_fits() {
    let mut probe = Probe::new();
    probe.mid = |_| Ok(Some(splice(0, &[120, 121, 122])));
    let mut request = steered("abcdef", &probe);
    request.params.max_tokens = Some(2);
    let answer = echo().answer(request);
    assert_eq!(answer.text(), "xy");
    let log = probe.log.lock().unwrap();
    assert!(
        log.contains(&"post 0 [120, 121] None".to_owned()),
        "{log:?}"
    );
}

/// Otherwise a controller that waits for another token would wait for ever.
#[test]
fn a_position_whose_sample_was_dropped_is_drawn_anew() {
    let mut probe = Probe::new();
    probe.mid = |_| {
        let splices = vec![when(&[97], 0, &[])];
        Ok(Some(sample(Sample {
            mask: Some(Arc::new(letters(b"ab"))),
            temperature: Some(100.0),
            splices,
            ..Sample::default()
        })))
    };
    let mut request = steered("aaaaaaaaaa", &probe);
    request.params.max_tokens = Some(10);
    request.params.seed = Some(3);
    let answer = echo().answer(request);
    assert_eq!(answer.text(), "bbbbbbbbbb");
    let usage = answer.usage.unwrap();
    assert!(usage.sampled_tokens > usage.completion_tokens);
}

#[test]
fn ai_505_a_temperature_holds_until_it_is_replaced() {
    let texts = |second: Option<f32>| {
        let mut probe = Probe::new();
        probe.mid = match second {
            None => |round| {
                Ok(Some(sample(Sample {
                    temperature: (round == 0).then_some(100.0),
                    ..Sample::default()
                })))
            },
            Some(_) => |round| {
                Ok(Some(sample(Sample {
                    temperature: match round {
                        0 => Some(100.0),
                        1 => Some(0.0),
                        _ => None,
                    },
                    ..Sample::default()
                })))
            },
        };
        let mut request = steered("abcdefghij", &probe);
        request.params.max_tokens = Some(10);
        request.params.seed = Some(1);
        echo().answer(request).choices[0].1.clone()
    };
    let plain: Vec<Token> = (97..107).collect();
    let hot = texts(None);
    let differ = hot.iter().zip(&plain).filter(|(a, b)| a != b).count();
    assert!(differ > 5, "{hot:?}");
    let cooled = texts(Some(0.0));
    assert_eq!(cooled[0], hot[0]);
    assert_eq!(cooled[1..], plain[1..]);
}

fn eos() -> Mask {
    let mut mask = Mask::none(258);
    mask.allow(EOS);
    mask
}

#[test]
fn ai_804_a_constraint_ends_at_eos_like_a_plain_generation() {
    let mut probe = Probe::new();
    probe.ends_at_eos = true;
    let answer = echo().answer(steered("ab", &probe));
    let stop = Some(StopCause::Tokens(vec![EOS]));
    let end = ChoiceEnd {
        reason: FinishReason::Stop,
        stop,
    };
    assert_eq!(
        answer.choices[0],
        ("ab".to_owned(), vec![97, 98, EOS], Some(end))
    );
    let log = probe.log.lock().unwrap();
    assert_eq!(
        log.last().unwrap(),
        "post 0 [257] Some(257)",
        "it sees the end"
    );
}

/// AI-804: a mask that allows nothing but EOG tokens wins over `min_tokens`, with a constraint and with a controller.
#[test]
fn lm_307_min_tokens_do_not_fail_a_constraint_that_is_complete() {
    for ends_at_eos in [true, false] {
        let mut probe = Probe::new();
        probe.ends_at_eos = ends_at_eos;
        probe.mid = |round| Ok(Some(if round < 2 { free() } else { masked(eos()) }));
        let mut request = steered("abcdef", &probe);
        request.params.min_tokens = Some(5);
        let answer = echo().answer(request);
        assert_eq!((answer.text(), answer.error.as_ref()), ("ab", None));
        let end = answer.choices[0].2.clone().unwrap();
        assert_eq!(end.reason, FinishReason::Stop);
        // If the mask leaves an alternative, the minimum applies.
        probe.mid = |round| {
            let mut mask = letters(b"q");
            mask.allow(EOS);
            Ok(Some(if round < 5 {
                masked(mask)
            } else {
                masked(eos())
            }))
        };
        let mut request = steered("", &probe);
        request.params.min_tokens = Some(3);
        let answer = echo().answer(request);
        assert!(answer.text().starts_with("qqq"), "{}", answer.text());
    }
}

/// What the request has against EOG tokens does not fail an output that the mask ends. Where a bias leaves nothing of what a mask allows,
/// the request is at fault.
#[test]
fn ai_804_a_bias_against_eog_tokens_does_not_fail_a_complete_output() {
    for ends_at_eos in [true, false] {
        let mut probe = Probe::new();
        probe.ends_at_eos = ends_at_eos;
        probe.mid = |round| Ok(Some(if round < 2 { free() } else { masked(eos()) }));
        let mut request = steered("abcdef", &probe);
        request.params.logit_bias = vec![(EOS, f32::NEG_INFINITY)].into();
        let answer = echo().answer(request);
        assert_eq!((answer.text(), answer.error.as_ref()), ("ab", None));
        probe.mid = |_| Ok(Some(masked(letters(b"q"))));
        let mut request = steered("", &probe);
        request.params.logit_bias = vec![(Token::from(b'q'), f32::NEG_INFINITY)].into();
        let error = echo().answer(request).error.unwrap();
        assert_eq!(error.code, Code::InvalidRequest, "{error:?}");
        // A steerer that forbids all that its mask allows has failed by itself.
        probe.mid = |_| {
            Ok(Some(sample(Sample {
                mask: Some(Arc::new(letters(b"q"))),
                bias: vec![(Token::from(b'q'), f32::NEG_INFINITY)],
                ..Sample::default()
            })))
        };
        let answer = echo().answer(steered("", &probe));
        assert_eq!(
            error_of(&answer),
            ("constraint_failed", "no token is allowed")
        );
    }
}

/// An EOG token that a controller went past adds no text, so none is taken back with it.
#[test]
fn ai_804_the_text_before_an_eog_token_survives_its_rollback() {
    let mut probe = Probe::new();
    // The mask of the second round allows a letter as well.
    probe.mid = |round| {
        let mut both = eos();
        both.allow(Token::from(b'k'));
        Ok(Some(match round {
            1 => sample(Sample {
                mask: Some(Arc::new(both)),
                bias: vec![(EOS, 90.0)],
                ..Sample::default()
            }),
            3 => splice(1, &[120]),
            4 => Mid::Fork(vec![Branch::Noop, Branch::Noop]),
            5 => Mid::Stop,
            _ => free(),
        }))
    };
    for skip_special_tokens in [true, false] {
        let mut request = steered("abcdef", &probe);
        request.params.skip_special_tokens = Some(skip_special_tokens);
        let answer = echo().answer(request);
        assert_eq!(answer.error, None);
        let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
        assert_eq!(texts, ["ax", "ax"], "{skip_special_tokens}");
        assert_eq!(answer.choices[0].1, [97, EOS, 120]);
    }
}

fn fuelled(fuel: u64, probe: &Probe) -> (Bench, GenerationRequest) {
    let config = Config {
        fuel_tokens: Some(fuel),
        ..Config::default()
    };
    let script = Script {
        script: Name::Echo,
        ..Script::default()
    };
    (Bench::with(script, config), steered("abcdefghij", probe))
}

#[test]
fn ai_825_fuel_bounds_sampled_and_processed_tokens() {
    // The prompt has 11 tokens with BOS. Each token costs 2, and 1 when it is computed for the next one.
    let cost = |tokens: u64| 11 + 2 * tokens + (tokens - 1);
    for (fuel, tokens) in [(cost(4), 5), (cost(4) - 1, 4), (cost(5) - 1, 5)] {
        let (mut bench, request) = fuelled(fuel, &Probe::new());
        let answer = bench.answer(request);
        assert_eq!(answer.choices[0].1.len(), tokens, "{fuel}");
        let end = answer.choices[0].2.clone().unwrap();
        assert_eq!(end.reason, FinishReason::Fuel);
        let usage = answer.usage.unwrap();
        let spent = 2 * u64::from(usage.sampled_tokens) + u64::from(usage.processed_tokens);
        assert!(spent > fuel && spent <= fuel + 3, "{spent} of {fuel}");
    }
}

#[test]
fn ai_825_a_controller_that_drops_every_sample_runs_out_of_fuel() {
    let mut probe = Probe::new();
    probe.mid = |_| {
        Ok(Some(sample(Sample {
            splices: vec![when(&[], 0, &[])],
            ..Sample::default()
        })))
    };
    let (mut bench, request) = fuelled(100, &probe);
    let answer = bench.answer(request);
    assert_eq!(answer.text(), "");
    assert_eq!(answer.usage.unwrap().sampled_tokens, 45);
    // Forks spend together.
    probe.mid = |round| {
        Ok(Some(match round {
            0 => Mid::Fork(vec![Branch::Noop; 4]),
            _ => free(),
        }))
    };
    let (mut bench, mut request) = fuelled(100, &probe);
    request.params.ignore_eos = Some(true);
    let answer = bench.answer(request);
    assert_eq!(answer.choices.len(), 4);
    let usage = answer.usage.unwrap();
    let spent = 2 * usage.sampled_tokens + usage.processed_tokens;
    assert!((101..=112).contains(&spent), "{spent}");
    // Plain requests have no fuel.
    let (mut bench, mut plain) = fuelled(1, &probe);
    plain.steer = None;
    assert_eq!(bench.answer(plain).text(), "abcdefghij");
}

#[test]
fn ai_608_a_watched_request_reports_each_step_before_its_end() {
    let mut probe = Probe::new();
    probe.report = |round| {
        let logs = if round == 2 {
            String::new()
        } else {
            format!("{round}.")
        };
        Some(StepReport {
            logs,
            storage: Vec::new(),
            micros: 10,
        })
    };
    probe.post = |_, tokens| {
        Ok(if tokens == [99] {
            Post::Stop
        } else {
            Post::Continue
        })
    };
    for watched in [true, false] {
        let mut bench = echo();
        let mut request = steered("abcdef", &probe);
        request.watched = watched;
        let mut handle = bench.submit(request);
        bench.settle();
        let mut events = Vec::new();
        while let Some(event) = handle.try_next() {
            events.push(match event.kind {
                EventKind::Tokens(tokens) => tokens.text.to_string(),
                EventKind::Report(report) => format!("{} {}", report.logs, report.micros),
                EventKind::Finish(_) => "finish".to_owned(),
                other => format!("{other:?}"),
            });
        }
        events.pop();
        let expected: &[&str] = if watched {
            // The second step printed nothing, so the third report has its time.
            &["a", "1. 10", "b", "c", "3. 20", "finish"]
        } else {
            &["a", "b", "c", "finish"]
        };
        assert_eq!(events, expected);
    }
}

#[test]
fn ai_608_a_request_that_fails_reports_what_was_printed_last() {
    let mut probe = Probe::new();
    probe.report = |_| {
        Some(StepReport {
            logs: "last words".to_owned(),
            ..StepReport::default()
        })
    };
    probe.mid = |_| Ok(Some(masked(Mask::none(258))));
    let mut bench = echo();
    let mut request = steered("ab", &probe);
    request.watched = true;
    let mut handle = bench.submit(request);
    bench.settle();
    let first = handle.try_next().map(|event| event.kind);
    assert!(matches!(first, Some(EventKind::Report(report)) if report.logs == "last words"));
    assert_eq!(error_of(&read(&mut handle)).0, "constraint_failed");
}

/// Nobody reads them, so they are bounded like tokens.
#[test]
fn ai_608_unread_reports_park_a_sequence() {
    let mut probe = Probe::new();
    probe.report = |_| {
        Some(StepReport {
            logs: "again".to_owned(),
            ..StepReport::default()
        })
    };
    probe.mid = |round| {
        Ok(Some(if round % 2 == 0 {
            super::probe::noop()
        } else {
            free()
        }))
    };
    probe.pre = |_| Ok(run());
    let config = Config {
        outbox_events: 4,
        ..Config::default()
    };
    let mut bench = Bench::with(Script::default(), config);
    let mut request = steered(&"x".repeat(100), &probe);
    request.watched = true;
    let mut handle = bench.submit(request);
    bench.settle();
    let mut unread = 0;
    while handle.try_next().is_some() {
        unread += 1;
    }
    assert!((4..=6).contains(&unread), "{unread}");
}
