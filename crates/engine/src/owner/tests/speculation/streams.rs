//! What drafts do to each stream, and to what is measured of it.

use std::time::Duration;

use sapwood_proto::steer::Token;

use super::super::super::step_clock::StepClock;
use super::super::harness::{Bench, TestClock};
use super::figures::{compute_bound, memory_bound};
use super::parrot::{Machine, Output, parrot};
use super::{MODES, config, drafted};
use crate::api::{EventKind, GenerationRequest, Prompt};
use crate::ranking::mix;
use crate::scripted::{Config as Script, ScriptedTokenizer};
use crate::{RequestHandle, SpeculationMode};

type Takes = fn(usize) -> Duration;

/// Between the two: each further token costs a fifth of a call.
fn balanced(entries: usize) -> Duration {
    Duration::from_micros(10_000 + 2_500 * entries as u64)
}

const MACHINES: [Takes; 3] = [compute_bound, memory_bound, balanced];

/// Steps until the lengths of drafts and what they cost are known, and steps that are measured.
const WARM: usize = 200;
const MEASURED: usize = 500;

/// A stream that repeats its prompt, or one that repeats nothing; both are longer than the test.
fn stream(index: u32, echoes: bool) -> (Vec<Token>, Vec<Token>) {
    let first = 300 + index;
    if echoes {
        let lines: Vec<Token> = (0..60).map(|place| 400 + place).collect();
        ([&[first][..], &lines, &lines].concat(), lines.repeat(250))
    } else {
        let word = |place| 500 + (mix(place ^ u64::from(first) << 32) % 500) as Token;
        (vec![first, 301, 302], (0..15_000).map(word).collect())
    }
}

/// An engine with a clock that moves with each decode call.
fn timed(mode: SpeculationMode, takes: Takes, streams: &[bool]) -> (Bench, TestClock) {
    let script = Script {
        tokenizer: Some(ScriptedTokenizer::Words),
        vocab: 1_024,
        context_tokens: 20_000,
        parallel: streams.len() as u32,
        ..Script::default()
    };
    let machine = Machine {
        clock: TestClock::default(),
        takes,
    };
    let clock = machine.clock.clone();
    let outputs = (0..).zip(streams).map(|(index, &echoes)| {
        let (prompt, output) = stream(index, echoes);
        (prompt[0], output)
    });
    let parrot = parrot(script, Output::ByFirst(outputs.collect()), Some(machine));
    let mut bench = Bench::over(Box::new(parrot), config(mode));
    let now = clock.clone();
    bench.owner.clock = StepClock::running(move || now.now(), |_, _| ());
    (bench, clock)
}

fn tokens_of(handle: &mut RequestHandle) -> usize {
    let mut count = 0;
    while let Some(event) = handle.try_next() {
        if let EventKind::Tokens(tokens) = event.kind {
            count += tokens.tokens.len();
        }
    }
    count
}

/// The time per token of each stream, and the longest step but for the longest twentieth, in seconds.
fn times(mode: SpeculationMode, takes: Takes, streams: &[bool]) -> (Vec<f64>, f64) {
    let (mut bench, clock) = timed(mode, takes, streams);
    let submit = |(index, &echoes)| {
        let mut request = GenerationRequest::new(Prompt::Tokens(stream(index, echoes).0));
        request.params.temperature = Some(0.0);
        bench.submit(request)
    };
    let mut handles: Vec<_> = (0..).zip(streams).map(submit).collect();
    let mut counts = vec![0; streams.len()];
    let mut steps = Vec::new();
    for step in 0..WARM + MEASURED {
        let before = clock.now();
        bench.owner.step(before);
        let took = clock.now().since(before).as_secs_f64();
        for (handle, count) in handles.iter_mut().zip(&mut counts) {
            let tokens = tokens_of(handle);
            *count += if step < WARM { 0 } else { tokens };
        }
        if step >= WARM {
            steps.push(took);
        }
    }
    let all: f64 = steps.iter().sum();
    steps.sort_by(f64::total_cmp);
    let times = counts.iter().map(|&count| all / f64::from(count as u32));
    (times.collect(), steps[MEASURED * 19 / 20])
}

/// The speed of each stream, where 1 is that without drafts.
fn speeds(takes: Takes, streams: &[bool]) -> Vec<f64> {
    let [(plain, step), (drafting, longest)] = MODES.map(|mode| times(mode, takes, streams));
    let speeds: Vec<f64> = plain
        .iter()
        .zip(&drafting)
        .map(|(plain, time)| plain / time)
        .collect();
    println!(
        "{} streams: {speeds:.2?}, steps of {step:.3} s and {longest:.3} s",
        streams.len()
    );
    // By default a step may take 100 ms.
    let most = (step * 1.5).max(0.1);
    assert!(longest <= most * 1.01, "{longest} of {most}");
    speeds
}

#[test]
fn a_stream_that_repeats_itself_does_not_slow_others_down_much() {
    for takes in MACHINES {
        for others in [1, 3, 15] {
            let mut streams = vec![false; others + 1];
            streams[others / 2] = true;
            let mut speeds = speeds(takes, &streams);
            let echo = speeds.remove(others / 2);
            assert!(echo > 0.97, "{echo}");
            let slowest = speeds.iter().copied().fold(f64::INFINITY, f64::min);
            assert!(slowest > 0.78, "{others}: {slowest}");
        }
    }
    assert!(speeds(memory_bound, &[false, true])[1] > 2.0);
}

#[test]
fn streams_that_repeat_themselves_are_equally_fast() {
    for takes in MACHINES {
        for count in [2, 4, 8] {
            let speeds = speeds(takes, &vec![true; count]);
            let slowest = speeds.iter().copied().fold(f64::INFINITY, f64::min);
            let fastest = speeds.iter().copied().fold(0.0, f64::max);
            assert!(slowest > 0.97, "{count}: {slowest}");
            assert!(slowest > fastest * 0.9, "{count}: {slowest} and {fastest}");
        }
    }
    assert!(speeds(memory_bound, &[true; 2])[1] > 4.0);
}

/// Prompts are computed in every step, so no step says what drafts cost.
#[test]
fn nothing_is_tried_beside_prompts() {
    let (mut bench, clock) = timed(SpeculationMode::Lookup, compute_bound, &[true, false]);
    let request = |prompt| GenerationRequest::new(Prompt::Tokens(prompt));
    let mut echo = bench.submit(request(stream(0, true).0));
    while tokens_of(&mut echo) == 0 {
        bench.owner.step(clock.now());
    }
    let long = (0..10_000).map(|place| 500 + (mix(place) % 500) as Token);
    let prompt = [vec![301], long.collect()].concat();
    let mut other = bench.submit(request(prompt));
    let mut tokens = 0;
    for _ in 0..300 {
        bench.owner.step(clock.now());
        tokens += tokens_of(&mut echo);
    }
    assert_eq!(tokens_of(&mut other), 0, "its prompt is not computed yet");
    assert!(tokens >= 300);
    assert_eq!(drafted(&bench), (0, 0));
}

#[test]
fn the_tokens_of_a_step_share_the_time_since_the_last() {
    let (mut bench, clock) = timed(SpeculationMode::Lookup, compute_bound, &[true]);
    let mut request = GenerationRequest::new(Prompt::Tokens(stream(0, true).0));
    request.params.max_tokens = Some(400);
    let mut handle = bench.submit(request);
    let (mut tokens, mut first) = (0, None);
    while tokens < 400 {
        bench.owner.step(clock.now());
        tokens += tokens_of(&mut handle);
        if tokens > 0 {
            first.get_or_insert_with(|| clock.now());
        }
    }
    assert!(drafted(&bench).1 > 200);
    let gaps = &bench.engine.stats().inter_token_seconds;
    assert_eq!(gaps.counts().sum::<u64>(), 399);
    let all = clock.now().since(first.unwrap()).as_secs_f64();
    assert!((gaps.sum() - all).abs() < 0.001, "{} of {all}", gaps.sum());
    // No token takes less than it costs.
    let short = gaps.bounds().iter().zip(gaps.counts());
    let short: u64 = short
        .filter(|(bound, _)| **bound < 0.013)
        .map(|(_, count)| count)
        .sum();
    assert_eq!(short, 0);
}

#[test]
fn a_draft_token_that_ends_an_output_is_accepted() {
    let text = "one two three four five six seven eight nine ten";
    let output: Vec<Token> = text.bytes().map(Token::from).collect();
    let parrot = parrot(Script::default(), Output::Given(output), None);
    let calls = std::sync::Arc::clone(&parrot.hooks.calls);
    let mut bench = Bench::over(Box::new(parrot), config(SpeculationMode::Lookup));
    let mut request = super::request_for(&text.repeat(2));
    request.params.stop = vec!["seven".to_owned()];
    let answer = bench.answer(request);
    // Each call but the last gives a token beside those of the draft.
    let sampled = calls.lock().unwrap().len() as u64 - 1;
    let tokens = answer.choices[0].1.len() as u64;
    assert_eq!(drafted(&bench).1 + sampled, tokens);
}
