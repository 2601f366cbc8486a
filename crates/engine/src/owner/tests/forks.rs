//! Forks at sampling: every branch goes on from the same output row.

use std::sync::Arc;

use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::{
    Branch, ConditionalSplice, Mask, Mid, Post, Pre, Sample, Splice, SteerFailure, Steered, Token,
};

use super::harness::{Bench, read};
use super::probe::{Probe, free, run};
use super::steering::{echo, error_of, letters, steered};
use crate::api::{EventKind, Tokens};
use crate::scripted::Config as Script;

fn allowing(letter: u8) -> Branch {
    Branch::Sample(Sample {
        mask: Some(Arc::new(letters(&[letter]))),
        ..Sample::default()
    })
}

/// Forks in its second round: samples x, forces "yz", waits, and takes back the first letter for "w".
fn forking() -> Probe {
    let mut probe = Probe::new();
    probe.mid = |round| {
        Ok(Some(match round {
            1 => Mid::Fork(vec![
                allowing(b'x'),
                Branch::Splice(Splice {
                    backtrack: 0,
                    tokens: vec![121, 122],
                }),
                Branch::Noop,
                Branch::Sample(Sample {
                    splices: vec![ConditionalSplice {
                        when_sampled: Vec::new(),
                        keeps_sampled: false,
                        splice: Splice {
                            backtrack: 1,
                            tokens: vec![119],
                        },
                    }],
                    ..Sample::default()
                }),
            ]),
            _ => free(),
        }))
    };
    probe
}

#[test]
fn ai_505_each_branch_of_a_fork_goes_on_from_the_same_row() {
    for (truncates, parallel) in [(true, 4), (true, 2), (false, 4), (false, 1)] {
        let mut bench = Bench::new(Script {
            truncates,
            parallel,
            ..Script::default()
        });
        let probe = forking();
        let mut request = steered("abcdef", &probe);
        request.params.max_tokens = Some(4);
        let mut handle = bench.submit(request);
        bench.settle();
        let answer = read(&mut handle);
        assert_eq!(answer.error, None);
        let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
        // The last one has appended the letter that it took back too.
        assert_eq!(
            texts,
            ["axcd", "ayzd", "abcd", "wbc"],
            "{truncates} {parallel}"
        );
        let log = probe.log.lock().unwrap();
        for (branch, line) in [
            ("", "post 0 [120] Some(120)"),
            ("1:", "post 0 [121, 122] None"),
            ("2:", "begin [1, 2, 3, 4]"),
            ("3:", "post 1 [119] Some(98)"),
        ] {
            let line = format!("{branch}{line}");
            assert!(log.contains(&line), "{line} is not in {log:?}");
        }
    }
}

#[test]
fn ai_914_the_first_event_of_a_branch_names_its_parent_and_what_it_inherits() {
    let mut bench = echo();
    let mut request = steered("abcdef", &forking());
    request.params.max_tokens = Some(4);
    let mut handle = bench.submit(request);
    bench.settle();
    let mut firsts: [Option<Tokens>; 4] = Default::default();
    while let Some(event) = handle.try_next() {
        if let EventKind::Tokens(tokens) = event.kind {
            let first = &mut firsts[event.choice as usize];
            match first {
                None => *first = Some(tokens),
                Some(_) => assert_eq!((tokens.inherited, tokens.fork_of), (0, None)),
            }
        }
    }
    let [parent, branches @ ..] = firsts.map(Option::unwrap);
    assert_eq!((parent.inherited, parent.fork_of), (0, None));
    for branch in branches {
        assert_eq!((branch.inherited, branch.fork_of), (1, Some(0)));
        assert_eq!((&*branch.text, branch.tokens.len()), ("a", 1));
    }
}

/// The logits of the fork are not computed for each branch.
#[test]
fn ai_821_a_fork_at_sampling_needs_no_decode_call_of_its_own() {
    let mut probe = Probe::new();
    probe.mid = |round| {
        Ok(Some(match round {
            0 => Mid::Fork(vec![allowing(b'x'), allowing(b'y'), allowing(b'z')]),
            _ => free(),
        }))
    };
    let mut bench = echo();
    let mut request = steered("ab", &probe);
    request.params.max_tokens = Some(1);
    let mut handle = bench.submit(request);
    let decodes = bench.settle();
    let decodes = decodes.iter().filter(|report| report.batch().count() > 0);
    assert_eq!(decodes.count(), 1);
    let answer = read(&mut handle);
    let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
    assert_eq!(texts, ["x", "y", "z"]);
    let usage = answer.usage.unwrap();
    assert_eq!((usage.completion_tokens, usage.sampled_tokens), (3, 3));
    assert_eq!(usage.processed_tokens, 3, "the prompt, once");
}

#[test]
fn a_request_forks_up_to_64_choices() {
    let mut probe = Probe::new();
    for (mid, fails) in [
        (
            (|_| Ok(Some(Mid::Fork(vec![Branch::Sample(Sample::default()); 64])))) as fn(u32) -> _,
            false,
        ),
        (
            |_| Ok(Some(Mid::Fork(vec![Branch::Sample(Sample::default()); 65]))),
            true,
        ),
    ] {
        probe.mid = mid;
        let mut request = steered("ab", &probe);
        request.params.max_tokens = Some(1);
        let answer = echo().answer(request);
        if fails {
            assert_eq!(error_of(&answer).0, "limit");
        } else {
            assert_eq!((answer.error.as_ref(), answer.choices.len()), (None, 64));
        }
    }
}

/// A request fails at its row and another one forks: the branch gets the place of a sequence whose row comes later.
#[test]
fn a_branch_does_not_take_the_row_of_a_sequence_that_ended_in_the_same_step() {
    let mut failing = Probe::new();
    failing.pre = |round| Ok(if round == 1 { Pre::Fork(2) } else { run() });
    failing.mid = |round| match round {
        2 => panic!("scripted panic"),
        _ => Ok(Some(free())),
    };
    let mut forking = Probe::new();
    forking.mid = |round| {
        Ok(Some(match round {
            2 => Mid::Fork(vec![allowing(b'x'), allowing(b'y')]),
            _ => free(),
        }))
    };
    forking.post = |_, _| Ok(Post::Continue);
    let mut bench = echo();
    let mut bad = bench.submit(steered("mnop", &failing));
    let mut request = steered("abcdef", &forking);
    request.params.max_tokens = Some(5);
    let mut good = bench.submit(request);
    bench.settle();
    assert_eq!(error_of(&read(&mut bad)).0, "trap");
    let answer = read(&mut good);
    let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
    assert_eq!(texts, ["abxde", "abyde"]);
}

#[test]
fn an_invalid_branch_fails_the_request() {
    let mut probe = Probe::new();
    probe.mid = |_| {
        let sample = Sample {
            mask: Some(Arc::new(Mask::all(7))),
            ..Sample::default()
        };
        Ok(Some(Mid::Fork(vec![Branch::Noop, Branch::Sample(sample)])))
    };
    assert_eq!(
        error_of(&echo().answer(steered("ab", &probe))).0,
        "bad-result"
    );
}

fn trap() -> SteerFailure {
    SteerFailure {
        reason: ErrorReason::TRAP,
        message: "scripted failure".to_owned(),
    }
}

/// Forks at once into branches that sample x, y and z.
fn three_letters(post: fn(u32, &[Token]) -> Steered<Post>) -> Probe {
    let mut probe = Probe::new();
    probe.mid = |round| {
        Ok(Some(match round {
            0 => Mid::Fork(vec![allowing(b'x'), allowing(b'y'), allowing(b'z')]),
            _ => free(),
        }))
    };
    probe.post = post;
    probe
}

#[test]
fn ai_915_the_failure_of_a_fork_ends_its_choice_and_no_other() {
    let mut request = steered(
        "ab",
        &three_letters(|_, tokens| match tokens {
            [121] => Err(trap()),
            _ => Ok(Post::Continue),
        }),
    );
    request.params.max_tokens = Some(2);
    let answer = echo().answer(request);
    let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
    assert_eq!(texts, ["xb", "y", "zb"]);
    let ended = answer.choices.iter().map(|choice| choice.2.is_some());
    assert!(ended.eq([true, false, true]));
    let failed: Vec<_> = answer
        .failed
        .iter()
        .map(|(choice, error)| (*choice, error.reason))
        .collect();
    assert_eq!(failed, [(1, ErrorReason::TRAP)]);
    assert!(answer.usage.is_some() && answer.error.is_none());
}

#[test]
fn ai_915_the_last_choice_decides_whether_the_request_has_failed() {
    // All fail: the first two are choices that failed, the last one takes the request with it.
    let mut request = steered("ab", &three_letters(|_, _| Err(trap())));
    request.params.max_tokens = Some(2);
    let answer = echo().answer(request);
    assert_eq!(error_of(&answer).0, "trap");
    assert_eq!(answer.failed.len(), 2);
    // One has ended well before the others fail: the request has not failed.
    let post = |_: u32, tokens: &[Token]| match tokens {
        [120] => Ok(Post::Stop),
        _ => Err(trap()),
    };
    let answer = echo().answer(steered("ab", &three_letters(post)));
    assert!(answer.usage.is_some() && answer.error.is_none());
    let failed: Vec<u32> = answer.failed.iter().map(|(choice, _)| *choice).collect();
    assert_eq!(failed, [1, 2]);
}

#[test]
fn ai_714_a_copy_that_fails_is_an_error_of_the_new_sequence() {
    let mut probe = three_letters(|_, _| Ok(Post::Continue));
    probe.fork = |index| if index == 1 { Err(trap()) } else { Ok(()) };
    let mut request = steered("ab", &probe);
    request.params.max_tokens = Some(2);
    let answer = echo().answer(request);
    let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
    assert_eq!(texts, ["xb", "", "zb"]);
    let failed: Vec<u32> = answer.failed.iter().map(|(choice, _)| *choice).collect();
    assert_eq!(failed, [1]);
    // The place of a sequence in its group tells which branch it is.
    let log = probe.log.lock().unwrap();
    assert!(log.contains(&"2:begin [1, 2, 3]".to_owned()), "{log:?}");
}
