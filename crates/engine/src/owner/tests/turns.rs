//! Turns of callers: what one of them sends, and with which priorities, costs others no more than its turns.

use super::harness::{Bench, read, request_for};
use crate::Config;
use crate::api::{EventKind, GenerationRequest, Prompt};
use crate::scripted::{Config as Script, Script as Name};

fn of(caller: u64, priority: i32) -> GenerationRequest {
    let mut request = request_for("0123456789");
    request.caller = caller;
    request.params.priority = Some(priority);
    request
}

/// One caller has requests of the highest priority in the queue at all times.
#[test]
fn lm_962_a_priority_takes_no_turns_of_other_callers() {
    let script = Script {
        script: Name::Tokens,
        count: 2,
        parallel: 1,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let mut handles = vec![bench.submit(of(1, i32::MAX)), bench.submit(of(1, i32::MAX))];
    for _ in 0..20 {
        handles.push(bench.submit(of(2, 0)));
    }
    let (mut theirs, mut admitted) = (0, 0);
    while admitted < 20 {
        let report = bench.step();
        for number in report.admitted {
            admitted += 1;
            theirs += usize::from((2..22).contains(&number));
            handles.push(bench.submit(of(1, i32::MAX)));
        }
    }
    assert!(theirs >= 9, "{theirs} of {admitted}");
}

/// Two callers with more streams than there are KV cells for.
#[test]
fn lm_962_a_priority_preempts_no_streams_of_other_callers() {
    let script = Script {
        script: Name::Tokens,
        count: 60,
        context_tokens: 100,
        parallel: 3,
        cells: Some(110),
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let handles = [of(1, 0), of(2, 10), of(2, 10)].map(|request| bench.submit(request));
    let reports = bench.settle();
    let mut preempted = reports.iter().flat_map(|report| &report.preempted);
    assert_eq!(preempted.next(), Some(&2), "its caller holds more");
    assert!(!preempted.any(|&number| number == 0), "the oldest goes on");
    for mut handle in handles {
        assert_eq!(read(&mut handle).usage.unwrap().completion_tokens, 61);
    }
}

/// A stream whose reader was slow, and newer requests of its caller of a higher priority without end.
#[test]
fn a_parked_stream_goes_on_beside_newer_requests_of_a_higher_priority() {
    let script = Script {
        script: Name::Tokens,
        count: 40,
        parallel: 1,
        ..Script::default()
    };
    let config = Config {
        outbox_events: 8,
        ..Config::default()
    };
    let mut bench = Bench::with(script, config);
    let mut stream = bench.submit(of(1, 0));
    while bench.step().parked.is_empty() {}
    let newer = |bench: &Bench| {
        let mut request = of(1, 5);
        request.params.max_tokens = Some(2);
        bench.submit(request)
    };
    let mut others = Vec::new();
    let (mut tokens, mut ended, mut steps) = (0, false, 0);
    while !ended {
        others.push(newer(&bench));
        bench.step();
        while let Some(event) = stream.try_next() {
            tokens += 1;
            ended |= matches!(event.kind, EventKind::Usage(_));
        }
        steps += 1;
        assert!(steps < 1_000, "{tokens} events in {steps} steps");
    }
}

/// Submits requests with the prompts that `prompt` gives for their indices, eight choices each; returns the most that admission has looked
/// at in a step, and the number of sequences.
fn most_looked_at(requests: u32, prompt: impl Fn(u32) -> Vec<u32>) -> (usize, usize) {
    let script = Script {
        script: Name::Tokens,
        parallel: 4,
        context_tokens: 4_096,
        batch_tokens: 512,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let choices = 8;
    let submit = |index| {
        let mut request = GenerationRequest::new(Prompt::Tokens(prompt(index)));
        (request.params.n, request.params.max_tokens) = (Some(choices), Some(1));
        bench.submit(request)
    };
    let handles: Vec<_> = (0..requests).map(submit).collect();
    let reports = bench.settle();
    drop(handles);
    let looked_at = reports.iter().map(|report| report.looked_at);
    (looked_at.max().unwrap(), (requests * choices) as usize)
}

/// The work of a step is counted, not timed. Prompts that share ever more of their beginning wait each for the one before it: each sequence
/// is looked at when its reason to wait may have ended, and again as it is passed over. Those that have a turn are compared with the prompts
/// in progress, at most four here.
#[test]
fn a_step_looks_at_each_waiting_sequence_a_few_times_at_most() {
    for requests in [64, 256] {
        let (looked_at, sequences) = most_looked_at(requests, |index| {
            let shared = std::iter::repeat_n(97, 32 + index as usize);
            shared.chain([98]).collect()
        });
        assert!(looked_at >= sequences / 2, "{looked_at} of {sequences}");
        assert!(looked_at <= 2 * sequences, "{looked_at} of {sequences}");
    }
}

/// Four slots, and an end to the look at what waits once they are taken.
#[test]
fn an_admission_does_not_look_at_those_behind_it() {
    for requests in [64, 256] {
        let (looked_at, sequences) =
            most_looked_at(requests, |index| vec![97 + index % 8, 100 + index / 8, 99]);
        assert!(looked_at <= 64, "{looked_at} of {sequences}");
    }
}
