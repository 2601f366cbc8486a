//! A draft model: what it computes, when it is asked, and what its failures do.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;

use super::super::super::step_clock::StepClock;
use super::super::harness::{Bench, TestClock, read};
use super::parrot::{Machine, Output, parrot};
use super::{config, drafted, drafting};
use crate::SpeculationMode;
use crate::api::{EngineError, EventKind, GenerationRequest, Prompt};
use crate::model::DecodeStop;
use crate::ranking::mix;
use crate::scripted::{Config as Script, ScriptedTokenizer};

/// Words that do not repeat themselves, so that nothing is found by looking it up.
fn words(seed: u64, count: u64) -> Vec<Token> {
    let word = |at| 300 + (mix(at ^ seed << 32) % 700) as Token;
    (0..count).map(word).collect()
}

fn script() -> Script {
    Script {
        tokenizer: Some(ScriptedTokenizer::Words),
        vocab: 1_024,
        context_tokens: 8_192,
        parallel: 4,
        ..Script::default()
    }
}

fn request(prompt: &[Token]) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Tokens(prompt.to_vec()));
    request.params.temperature = Some(0.0);
    request
}

/// An engine whose answers are these words, its draft model's are `drafts`, and the sizes of the draft model's calls.
fn bench(answer: &[Token], drafts: &[Token], script: Script) -> (Bench, Arc<Mutex<Vec<usize>>>) {
    let model = parrot(self::script(), Output::Given(answer.to_vec()), None);
    let draft = parrot(script, Output::Given(drafts.to_vec()), None);
    let calls = Arc::clone(&draft.hooks.calls);
    let bench = drafting(model, draft, 0.75, config(SpeculationMode::Draft));
    (bench, calls)
}

fn sum(calls: &Mutex<Vec<usize>>) -> usize {
    std::mem::take(&mut *calls.lock().unwrap()).iter().sum()
}

#[test]
fn a_draft_model_that_agrees_saves_steps() {
    let (prompt, answer) = (words(1, 20), words(2, 100));
    let (mut bench, calls) = bench(&answer, &answer, script());
    let got = bench.answer(request(&prompt));
    assert_eq!(got.choices[0].1[..100], answer);
    let (tokens, accepted) = drafted(&bench);
    assert!(
        accepted >= 85 && tokens <= accepted + 10,
        "{accepted} of {tokens}"
    );
    let steps = bench.engine.stats().steps.get();
    assert!(steps < 20, "{steps}");
    // Each token once: rejected ones are none.
    let computed = sum(&calls);
    assert!((100..125).contains(&computed), "{computed}");
}

#[test]
fn a_draft_model_that_never_agrees_is_asked_less_and_less() {
    let (prompt, answer) = (words(1, 20), words(2, 250));
    let (mut bench, calls) = bench(&answer, &words(3, 250), script());
    let got = bench.answer(request(&prompt));
    assert_eq!(got.choices[0].1[..250], answer);
    let (tokens, accepted) = drafted(&bench);
    assert!(
        accepted < 3 && (5..25).contains(&tokens),
        "{accepted} of {tokens}"
    );
    // It follows all the same when it is asked: each token once.
    let computed = sum(&calls);
    assert!((200..300).contains(&computed), "{computed}");
}

/// Rows of letters are never sure.
#[test]
fn an_unsure_draft_model_drafts_nothing() {
    let script = Script::default();
    let model = parrot(script.clone(), Output::Letters(4), None);
    let draft = parrot(script, Output::Letters(4), None);
    let calls = Arc::clone(&draft.hooks.calls);
    let mut bench = drafting(model, draft, 1.0, config(SpeculationMode::Draft));
    let mut request = super::sampled("ad", 3);
    request.params.ignore_eos = Some(true);
    request.params.max_tokens = Some(1_000);
    request.params.logit_bias = [(97, 5.0)].into();
    bench.answer(request);
    let looked_up = drafted(&bench);
    let asked = calls.lock().unwrap().len();
    assert!((3..200).contains(&asked), "{asked} calls, {looked_up:?}");
}

#[test]
fn the_next_turn_and_other_choices_share_what_is_computed() {
    let (prompt, answer) = (words(1, 400), words(2, 40));
    let (mut bench, calls) = bench(&answer, &answer, script());
    let got = bench.answer(request(&prompt)).choices.remove(0).1;
    let first = sum(&calls);
    assert!((430..460).contains(&first), "{first}");
    let next = [&prompt[..], &got[..30], &words(4, 10)].concat();
    bench.answer(request(&next));
    let second = sum(&calls);
    assert!((40..80).contains(&second), "{second}");
    // Another prompt, and four answers to it at once.
    let mut choices = request(&words(5, 400));
    choices.params.n = Some(4);
    bench.answer(choices);
    let all = sum(&calls);
    // They are equal, and are copied from each other.
    assert!((440..700).contains(&all), "{all}");
    // Nobody else can tell from the time what was computed.
    let mut other = request(&words(5, 400));
    other.prefix_scope = 7;
    bench.answer(other);
    assert!(sum(&calls) >= 440);
}

#[test]
fn a_draft_model_may_be_smaller_than_the_model() {
    let (prompt, answer) = (words(1, 20), words(2, 100));
    for small in [
        Script {
            context_tokens: 60,
            ..script()
        },
        Script {
            batch_tokens: 6,
            parallel: 1,
            kept_prefixes: 0,
            ..script()
        },
        Script {
            cells: Some(70),
            context_tokens: 60,
            kept_prefixes: 0,
            ..script()
        },
    ] {
        let (mut bench, _calls) = bench(&answer, &answer, small);
        let mut handles = [0, 1, 2].map(|_| bench.submit(request(&prompt)));
        bench.settle();
        for handle in &mut handles {
            assert_eq!(read(handle).choices[0].1[..100], answer);
        }
        let drafted = drafted(&bench);
        println!("{drafted:?}");
        assert!(drafted.1 > 10, "{drafted:?}");
    }
}

#[test]
fn tokens_that_one_of_the_vocabularies_lacks_are_not_computed_or_drafted() {
    let larger = Script {
        vocab: 1_100,
        ..script()
    };
    let answer = words(2, 30);
    // The draft model has tokens that the model lacks.
    let (mut bench, _calls) = bench(&answer, &[1_090; 40], larger.clone());
    assert_eq!(
        bench.answer(request(&words(1, 20))).choices[0].1[..30],
        answer
    );
    assert_eq!(drafted(&bench), (0, 0));
    // And the other way round; it drafts until there is such a token.
    let answer = [&answer[..], &[1_090], &words(3, 30)].concat();
    let model = parrot(larger, Output::Given(answer.clone()), None);
    let draft = parrot(script(), Output::Given(answer.clone()), None);
    let mut bench = drafting(model, draft, 0.75, config(SpeculationMode::Draft));
    assert_eq!(
        bench.answer(request(&words(1, 20))).choices[0].1[..61],
        answer
    );
    let (_, accepted) = drafted(&bench);
    assert!((20..31).contains(&accepted), "{accepted}");
}

#[test]
fn a_draft_model_that_fails_is_dropped_and_the_engine_goes_on() {
    let (prompt, answer) = (words(1, 20), words(2, 100));
    let error = || EngineError::new(Code::Internal, ErrorReason::NONE, "broken");
    let failures: [fn(EngineError) -> Option<DecodeStop>; 5] = [
        |_| None,
        |error| Some(DecodeStop::Failed(error)),
        |error| Some(DecodeStop::Dead(error)),
        |_| Some(DecodeStop::Full),
        |_| Some(DecodeStop::Aborted),
    ];
    for (index, failure) in failures.into_iter().enumerate() {
        let model = parrot(script(), Output::Given(answer.clone()), None);
        let mut draft = parrot(script(), Output::Given(answer.clone()), None);
        draft.hooks.fails = Some(Box::new(move |call| match call {
            0..4 => Ok(()),
            _ => Err(failure(error()).expect("a panic on purpose")),
        }));
        let calls = Arc::clone(&draft.hooks.calls);
        let mut bench = drafting(model, draft, 0.75, config(SpeculationMode::Draft));
        for _ in 0..2 {
            let got = bench.answer(request(&prompt));
            assert_eq!(got.choices[0].1[..100], answer, "{index}");
            assert_eq!(got.error, None);
        }
        assert!(drafted(&bench).1 > 0, "{index}");
        let is_over = index < 3;
        let called = calls.lock().unwrap().len();
        assert_eq!(called == 5, is_over, "{index}: {called} calls");
        let panics = bench.engine.stats().panics.get();
        assert_eq!(panics, u64::from(index == 0));
        assert_eq!(bench.engine.stats().dead.get(), 0);
    }
}

type Takes = fn(usize) -> Duration;

/// Reading the weights takes the time of some tokens.
fn large(entries: usize) -> Duration {
    Duration::from_micros(40_000 + 1_000 * entries as u64)
}

/// A tenth of it.
fn small(entries: usize) -> Duration {
    large(entries) / 10
}

/// As slow as the model itself.
fn as_large(entries: usize) -> Duration {
    large(entries)
}

/// An engine with a clock that moves with each decode call of both models. The answers begin with the first word of the prompt;
/// the draft model agrees with so many of ten tokens.
fn timed(takes: Takes, agrees: u64, mode: SpeculationMode, parallel: u32) -> (Bench, TestClock) {
    let script = Script {
        parallel,
        ..script()
    };
    timed_with(takes, agrees, mode, script.clone(), script)
}

/// The same of a model and a draft model with these scripts.
fn timed_with(
    takes: Takes,
    agrees: u64,
    mode: SpeculationMode,
    script: Script,
    of_draft: Script,
) -> (Bench, TestClock) {
    let clock = TestClock::default();
    let machine = |takes| {
        Some(Machine {
            clock: clock.clone(),
            takes,
        })
    };
    let outputs = |agrees: u64| {
        let output = move |first: Token| {
            let word = |(at, word): (u64, Token)| match mix(at) % 10 < agrees {
                true => word,
                false => 300 + (word - 299) % 700,
            };
            (
                first,
                (0..).zip(words(first.into(), 4_000)).map(word).collect(),
            )
        };
        Output::ByFirst((300..310).map(output).collect())
    };
    let model = parrot(script, outputs(10), machine(large));
    let draft = parrot(of_draft, outputs(agrees), machine(takes));
    let mut bench = drafting(model, draft, 0.75, config(mode));
    let now = clock.clone();
    bench.owner.clock = StepClock::running(move || now.now(), |_, _| ());
    (bench, clock)
}

/// Steps; returns the tokens of each stream and the times of the steps.
fn steps(
    bench: &mut Bench,
    clock: &TestClock,
    handles: &mut [crate::RequestHandle],
    steps: usize,
) -> (Vec<usize>, Vec<f64>) {
    let mut tokens = vec![0; handles.len()];
    let mut times = Vec::new();
    for _ in 0..steps {
        let before = clock.now();
        bench.owner.step(before);
        times.push(clock.now().since(before).as_secs_f64());
        for (handle, tokens) in handles.iter_mut().zip(&mut tokens) {
            while let Some(event) = handle.try_next() {
                if let EventKind::Tokens(event) = event.kind {
                    *tokens += event.tokens.len();
                }
            }
        }
    }
    (tokens, times)
}

fn prompt(first: Token, tokens: u64) -> GenerationRequest {
    let prompt = [&[first][..], &words(u64::from(first) + 50, tokens)].concat();
    request(&prompt)
}

/// The speed of `streams` streams together with a draft model, where 1 is that without drafts.
fn speed(takes: Takes, agrees: u64, streams: u32) -> f64 {
    let speeds = [SpeculationMode::Off, SpeculationMode::Draft].map(|mode| {
        let (mut bench, clock) = timed(takes, agrees, mode, streams);
        let submit = |first| bench.submit(prompt(300 + first, 20));
        let mut handles: Vec<_> = (0..streams).map(submit).collect();
        steps(&mut bench, &clock, &mut handles, 100);
        let (tokens, times) = steps(&mut bench, &clock, &mut handles, 400);
        tokens.iter().sum::<usize>() as f64 / times.iter().sum::<f64>()
    });
    speeds[1] / speeds[0]
}

#[test]
fn a_draft_model_is_asked_where_that_makes_streams_faster() {
    for (takes, agrees, streams, expected) in [
        (small as Takes, 10, 1, 4.0..7.0),
        (small, 8, 1, 1.4..3.0),
        (small, 0, 1, 0.97..1.01),
        (small, 9, 4, 1.3..4.0),
        // Its time counts: a draft costs as much as it saves.
        (as_large, 10, 1, 0.93..1.01),
        (as_large, 5, 1, 0.93..1.01),
        (as_large, 5, 4, 0.93..1.01),
    ] {
        let speed = speed(takes, agrees, streams);
        println!("{agrees} of ten, {streams} streams: {speed:.2}");
        assert!(expected.contains(&speed), "{agrees} {streams}: {speed}");
    }
}

/// A long prompt is computed by the draft model beside the streams, a part of it at a time.
#[test]
fn catching_up_with_a_long_prompt_holds_no_stream_up() {
    let (mut bench, clock) = timed(small, 9, SpeculationMode::Draft, 2);
    let mut handles = vec![bench.submit(prompt(300, 20))];
    steps(&mut bench, &clock, &mut handles, 100);
    handles.push(bench.submit(prompt(301, 4_000)));
    // The prompt itself.
    while steps(&mut bench, &clock, &mut handles, 1).0[1] == 0 {}
    let plain = large(2).as_secs_f64();
    let (tokens, times) = steps(&mut bench, &clock, &mut handles, 40);
    let longest = times.iter().copied().fold(0.0, f64::max);
    assert!(longest <= 0.2, "{longest}");
    let all: f64 = times.iter().sum();
    let of_step = tokens[0] as f64 / (all / plain);
    assert!(of_step > 0.8, "{of_step} tokens in the time of a step");
    // It has caught up some steps later, and the second stream is faster too.
    steps(&mut bench, &clock, &mut handles, 300);
    let (tokens, times) = steps(&mut bench, &clock, &mut handles, 100);
    let all: f64 = times.iter().sum();
    let of_step = tokens[0].min(tokens[1]) as f64 / (all / plain);
    assert!(of_step > 1.2, "{tokens:?}, {of_step} in the time of a step");
}

/// One sequence for which nothing can be drafted leaves the drafts of the others judged.
#[test]
fn a_prompt_longer_than_the_context_of_the_draft_model_changes_nothing_for_others() {
    let speeds = [SpeculationMode::Off, SpeculationMode::Draft].map(|mode| {
        let script = Script {
            parallel: 2,
            ..script()
        };
        let of_draft = Script {
            context_tokens: 2_000,
            ..script.clone()
        };
        let (mut bench, clock) = timed_with(as_large, 10, mode, script, of_draft);
        let mut handles = vec![
            bench.submit(prompt(300, 20)),
            bench.submit(prompt(301, 3_000)),
        ];
        while steps(&mut bench, &clock, &mut handles, 1).0[1] == 0 {}
        steps(&mut bench, &clock, &mut handles, 100);
        let (tokens, times) = steps(&mut bench, &clock, &mut handles, 400);
        assert!(tokens.iter().all(|&tokens| tokens >= 400));
        tokens.iter().sum::<usize>() as f64 / times.iter().sum::<f64>()
    });
    let speed = speeds[1] / speeds[0];
    assert!((0.93..1.01).contains(&speed), "{speed}");
}

/// Alone too: its answer begins at nearly its usual speed.
#[test]
fn a_stream_that_catches_up_alone_is_not_held_up() {
    let (mut bench, clock) = timed(small, 9, SpeculationMode::Draft, 1);
    let mut handles = [bench.submit(prompt(301, 4_000))];
    while steps(&mut bench, &clock, &mut handles, 1).0[0] == 0 {}
    let plain = large(1).as_secs_f64();
    let (_, times) = steps(&mut bench, &clock, &mut handles, 40);
    let longest = times.iter().copied().fold(0.0, f64::max);
    assert!(longest < 1.3 * plain, "{longest} and {plain} without");
    // It has caught up some steps later.
    steps(&mut bench, &clock, &mut handles, 100);
    let (tokens, times) = steps(&mut bench, &clock, &mut handles, 100);
    let of_step = tokens[0] as f64 / (times.iter().sum::<f64>() / plain);
    assert!(of_step > 1.5, "{of_step} in the time of a step");
}

/// What is left of an answer has to save more than catching up takes.
#[test]
fn nothing_catches_up_for_a_short_answer() {
    let (mut bench, clock) = timed(small, 9, SpeculationMode::Draft, 1);
    // What tokens take is measured.
    let mut request = prompt(300, 500);
    request.params.max_tokens = Some(400);
    let mut handles = [bench.submit(request)];
    assert_eq!(steps(&mut bench, &clock, &mut handles, 500).0, [400]);
    let mut request = prompt(301, 4_000);
    request.params.max_tokens = Some(10);
    let mut handles = [bench.submit(request)];
    while steps(&mut bench, &clock, &mut handles, 1).0[0] == 0 {}
    let (tokens, times) = steps(&mut bench, &clock, &mut handles, 8);
    let of_step = tokens[0] as f64 / (times.iter().sum::<f64>() / large(1).as_secs_f64());
    assert!(of_step > 0.97, "{of_step} in the time of a step");
}
