//! Many requests at once: shared batches, long prompts, slow readers, and a simulation of all of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use sapwood_proto::time::Time;

use super::super::step_clock::StepClock;
use super::harness::{Answer, Bench, TestClock, read, request_for};
use super::hooked_model::{HookedModel, ModelHooks};
use crate::Config;
use crate::api::{EventKind, FinishReason, GenerationRequest};
use crate::config::SpeculationMode;
use crate::model::{BatchEntry, Capacity, DecodeStop, Model};
use crate::ranking::mix;
use crate::scripted::{Config as Script, Script as Name, Scripted, ScriptedTokenizer};

/// Emits letters that sampling chooses, so that every difference is visible.
fn wandering() -> Script {
    Script {
        script: Name::Tokens,
        tokenizer: Some(ScriptedTokenizer::Bytes),
        gap: 0.0,
        count: 40,
        parallel: 16,
        kept_prefixes: 8,
        ..Script::default()
    }
}

fn sampled(text: &str, seed: u64) -> GenerationRequest {
    let mut request = request_for(text);
    (
        request.params.temperature,
        request.params.top_p,
        request.params.seed,
    ) = (Some(0.9), Some(0.95), Some(seed));
    request
}

#[test]
fn d_21_output_does_not_depend_on_batch_mates() {
    let alone = Bench::new(wandering()).answer(sampled("mine", 3));
    for mates in [1, 5, 15] {
        let mut bench = Bench::new(wandering());
        let others: Vec<_> = (0..mates)
            .map(|seed| bench.submit(sampled("other", seed)))
            .collect();
        bench.step();
        let mut mine = bench.submit(sampled("mine", 3));
        bench.settle();
        let answer = read(&mut mine);
        assert_eq!(answer.choices, alone.choices, "beside {mates}");
        drop(others);
    }
}

#[test]
fn a_long_prefill_does_not_stall_running_streams() {
    let mut bench = Bench::new(Script {
        script: Name::Tokens,
        tokenizer: Some(ScriptedTokenizer::Bytes),
        count: 500,
        ..Script::default()
    });
    let _running: Vec<_> = (0..4)
        .map(|seed| bench.submit(sampled("run", seed)))
        .collect();
    bench.step();
    let mut long = bench.submit(sampled(&"long ".repeat(400), 9));
    let mut steps = 0;
    while read(&mut long).choices.is_empty() {
        let report = bench.step();
        steps += 1;
        assert_eq!(
            report.decoded.len(),
            4,
            "each running sequence gets a token in every step"
        );
        let prefill: u32 = report.prefilled.iter().map(|prefill| prefill.1).sum();
        assert!(
            prefill <= 128,
            "a step beside streams stays short: {prefill}"
        );
    }
    assert!((2001 / 128..=2001 / 64).contains(&steps), "{steps}");
}

/// Each step brings another prompt that is shorter than what is left of the long one.
#[test]
fn a_long_prompt_advances_beside_shorter_ones() {
    let mut bench = Bench::new(wandering());
    let _stream = bench.submit(sampled("stream", 0));
    bench.step();
    let _long = bench.submit(sampled(&"x".repeat(3_000), 1));
    let mut others = Vec::new();
    let mut without = 0;
    for seed in 2..14 {
        others.push(bench.submit(sampled(&"y".repeat(900), seed)));
        let report = bench.step();
        // Numbers of sequences follow the order of submission; the stream is 0.
        let advances = report.prefilled.iter().any(|prefill| prefill.0 == 1);
        without = if advances { 0 } else { without + 1 };
        assert!(without <= 3, "passed over {without} times");
    }
}

/// A model whose tokens take 2 ms each, beside a fixed time, and whose calls wait so long for other models.
struct Beside {
    clock: TestClock,
    fixed: Duration,
    waits: VecDeque<Duration>,
    wait: Duration,
}

impl ModelHooks for Beside {
    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        self.wait = self.waits.pop_front().unwrap_or_default();
        let took = self.fixed + Duration::from_millis(2) * u32::try_from(batch.len()).unwrap();
        self.clock.go_to(self.clock.now() + self.wait + took);
        model.decode(batch, now)
    }

    fn waited(&self, _: &Scripted) -> Duration {
        self.wait
    }
}

/// Prompt tokens of the second step of a long prompt, after waits for other models of so many milliseconds, and beside so many
/// equal requests, which wait for it to be computed.
fn second_step(waits_ms: [u64; 2], equal: usize) -> u32 {
    let clock = TestClock::default();
    let hooks = Beside {
        clock: clock.clone(),
        fixed: Duration::ZERO,
        waits: waits_ms.map(Duration::from_millis).into(),
        wait: Duration::ZERO,
    };
    let model = HookedModel::new(wandering(), hooks);
    let mut bench = Bench::over(Box::new(model), Config::default());
    let now = clock.clone();
    bench.owner.clock = StepClock::running(move || now.now(), |_, _| {});
    let prompt = || sampled(&"x".repeat(3_000), 1);
    let _requests: Vec<_> = (0..=equal).map(|_| bench.submit(prompt())).collect();
    bench.owner.step(clock.now());
    bench.owner.step(clock.now());
    let report = bench.owner.step(clock.now());
    assert_eq!(report.prefilled.len(), 1, "one of them computes");
    report.prefilled[0].1
}

/// Streams of other models wait for the processors, as those of the same model do.
#[test]
fn a_prompt_takes_short_steps_beside_others() {
    let alone = second_step([0, 0], 0);
    assert!((150..=225).contains(&alone), "{alone}");
    for waits in [[30, 30], [30, 0]] {
        let beside = second_step(waits, 0);
        assert!((35..=55).contains(&beside), "{waits:?}: {beside}");
    }
    let shared = second_step([0, 0], 3);
    assert!((75..=110).contains(&shared), "{shared}");
}

/// A model with a KV cache for each slot: sequences with different numbers of tokens are computed one after the other, each in a pass
/// over the weights of 30 ms. A token takes 1 ms.
struct Passes {
    clock: TestClock,
    is_known: bool,
}

impl ModelHooks for Passes {
    fn capacity(&self, model: &Scripted) -> Capacity {
        Capacity {
            computes_together: !self.is_known,
            ..model.capacity()
        }
    }

    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        let mut tokens = BTreeMap::new();
        for entry in batch {
            *tokens.entry(entry.slot).or_insert(0) += 1;
        }
        let passes = tokens.values().collect::<BTreeSet<&usize>>().len();
        let took = Duration::from_millis((30 * passes + batch.len()) as u64);
        self.clock.go_to(self.clock.now() + took);
        model.decode(batch, now)
    }
}

/// Short prompts beside a stream: how many are computed in the first step that has them, what it takes, and how many steps it takes
/// to compute all.
fn short_prompts_in_passes(is_known: bool) -> (usize, Duration, u32) {
    let clock = TestClock::default();
    let hooks = Passes {
        clock: clock.clone(),
        is_known,
    };
    let model = HookedModel::new(
        Script {
            count: 500,
            ..wandering()
        },
        hooks,
    );
    let config = Config {
        step_ms: 200,
        ..Config::default()
    };
    let mut bench = Bench::over(Box::new(model), config);
    let now = clock.clone();
    bench.owner.clock = StepClock::running(move || now.now(), |_, _| {});
    let _stream = bench.submit(sampled("stream", 0));
    // Long enough to have measured what a stream takes, and then a prompt token.
    for _ in 0..10 {
        bench.owner.step(clock.now());
    }
    let _long = bench.submit(sampled(&"x".repeat(1_000), 1));
    while bench.owner.step(clock.now()).decoded.len() < 2 {}
    let _prompts: Vec<_> = (3..9)
        .map(|length| bench.submit(sampled(&"y".repeat(length), 2)))
        .collect();
    let before = clock.now();
    let first = bench.owner.step(clock.now());
    assert!(!first.decoded.is_empty(), "the stream goes on");
    let took = clock.now().since(before);
    let mut steps = 1;
    while !bench.owner.step(clock.now()).prefilled.is_empty() {
        steps += 1;
    }
    (first.prefilled.len(), took, steps)
}

/// What a prompt adds to a step is a pass over the weights, however short it is.
#[test]
fn short_prompts_that_need_a_pass_each_are_not_all_in_one_step() {
    let (more, longer, _) = short_prompts_in_passes(false);
    let (prompts, took, steps) = short_prompts_in_passes(true);
    // The more take longer than the stream should wait.
    assert!(
        prompts < more,
        "{prompts} where passes are known, {more} where not"
    );
    assert!(took < longer * 3 / 4, "{took:?}, {longer:?}");
    assert!((2..=4).contains(&prompts), "{prompts}");
    assert!(took < Duration::from_millis(200), "{took:?}");
    // Five short steps, which together take no longer than three that are as long as they may be.
    assert!(steps <= 5, "{steps}");
    assert!(
        took * steps <= Duration::from_millis(600),
        "{steps} steps of {took:?}"
    );
}

/// Beside prompts without end, a step now and then has a single token of them, and no draft: it shows what the streams take.
#[test]
fn what_streams_take_is_measured_while_prompts_wait() {
    let clock = TestClock::default();
    let hooks = Beside {
        clock: clock.clone(),
        // Drafts pay.
        fixed: Duration::from_millis(50),
        waits: VecDeque::new(),
        wait: Duration::ZERO,
    };
    let model = HookedModel::new(Script::default(), hooks);
    let config = Config {
        speculation: SpeculationMode::Lookup,
        ..Config::default()
    };
    let mut bench = Bench::over(Box::new(model), config);
    let now = clock.clone();
    bench.owner.clock = StepClock::running(move || now.now(), |_, _| {});
    // It repeats its prompt, so that each step has a draft if it may.
    let mut stream = request_for(&"abcd".repeat(200));
    stream.params.max_tokens = Some(800);
    let _stream = bench.submit(stream);
    for _ in 0..20 {
        bench.owner.step(clock.now());
    }
    assert!(bench.engine.stats().draft_tokens.get() > 0);
    let _long = bench.submit(request_for(&"x".repeat(3_000)));
    let tokens: Vec<u32> = (0..40)
        .map(|_| bench.owner.step(clock.now()))
        .map(|report| report.prefilled.iter().map(|share| share.1).sum())
        .collect();
    let single: Vec<usize> = (0..40).filter(|&step| tokens[step] == 1).collect();
    assert_eq!(single, [16, 33], "{tokens:?}");
}

#[test]
fn a_short_prompt_overtakes_a_long_one() {
    let mut bench = Bench::new(wandering());
    let mut long = bench.submit(sampled(&"x".repeat(3000), 1));
    bench.step();
    let mut short = bench.submit(sampled("short", 2));
    bench.step();
    assert_eq!(
        read(&mut short).choices.len(),
        1,
        "its first token comes in its first step"
    );
    assert!(read(&mut long).choices.is_empty());
}

/// D-6, D-7.
#[test]
fn a_slow_reader_parks_only_its_own_sequence_and_loses_no_event() {
    let script = Script {
        script: Name::Tokens,
        count: 100,
        parallel: 2,
        ..Script::default()
    };
    let mut bench = Bench::with(
        script,
        Config {
            outbox_events: 8,
            ..Config::default()
        },
    );
    let mut slow = bench.submit(request_for("slow"));
    let mut brisk: Vec<_> = (0..3)
        .map(|seed| bench.submit(sampled("brisk", seed)))
        .collect();
    let (mut answers, mut parked) = (vec![Answer::default(); 3], 0);
    for _ in 0..400 {
        parked += bench
            .step()
            .parked
            .iter()
            .filter(|&&number| number == 0)
            .count();
        for (handle, answer) in brisk.iter_mut().zip(&mut answers) {
            while let Some(event) = handle.try_next() {
                answer.take(event);
            }
        }
    }
    assert_eq!(
        parked, 1,
        "it is parked once, and does not count as running"
    );
    assert!(
        answers
            .iter()
            .all(|answer| answer.usage.unwrap().completion_tokens == 101)
    );
    assert_eq!(bench.engine.stats().streams_parked.get(), 1);
    let mut answer = Answer::default();
    while answer.usage.is_none() {
        let event = slow.try_next();
        if let Some(event) = event {
            answer.take(event);
        } else {
            bench.step();
        }
    }
    assert_eq!(answer.usage.unwrap().completion_tokens, 101);
    let alone = Bench::new(Script {
        script: Name::Tokens,
        count: 100,
        ..Script::default()
    });
    assert_eq!(answer.text(), { alone }.answer(request_for("slow")).text());
}

/// OA-910: `queue_timeout`. OA-911.
#[test]
fn timeouts_end_running_and_queued_requests() {
    let script = Script {
        script: Name::Tokens,
        count: 1000,
        tokens_per_s: 10.0,
        parallel: 1,
        ..Script::default()
    };
    let mut bench = Bench::with(
        script,
        Config {
            queue_timeout_ms: 2000,
            ..Config::default()
        },
    );
    let mut request = request_for("x");
    request.timeout = Some(Duration::from_millis(3050));
    let (mut runs, mut waits) = (bench.submit(request), bench.submit(request_for("y")));
    bench.settle();
    let runs = read(&mut runs);
    assert_eq!(
        (
            runs.error.as_ref().unwrap().reason.name(),
            runs.choices[0].1.len()
        ),
        ("timeout", 31)
    );
    let waits = read(&mut waits).error.unwrap();
    assert_eq!(
        (waits.reason.name(), waits.code.name()),
        ("queue_timeout", "unavailable")
    );
    assert_eq!(bench.engine.stats().cancelled_timeout.get(), 2);
}

/// Also a request that finds a free slot is queued until the next step.
#[test]
fn a_queue_timeout_of_zero_is_none() {
    let script = Script {
        script: Name::Tokens,
        count: 100,
        tokens_per_s: 1.0,
        parallel: 1,
        ..Script::default()
    };
    let config = Config {
        queue_timeout_ms: 0,
        ..Config::default()
    };
    let mut bench = Bench::with(script, config);
    let (mut runs, mut waits) = (
        bench.submit(request_for("x")),
        bench.submit(request_for("y")),
    );
    bench.settle();
    for handle in [&mut runs, &mut waits] {
        let answer = read(handle);
        assert!(answer.error.is_none(), "{:?}", answer.error);
        assert_eq!(answer.choices[0].1.len(), 101, "with the end");
    }
}

#[test]
fn stop_keeps_the_output_so_far() {
    let mut bench = Bench::new(Script {
        script: Name::Text,
        text: "one STOP".to_owned(),
        ..Script::default()
    });
    let mut request = request_for("x");
    (request.params.stop, request.params.n) = (vec!["STOPPED".to_owned()], Some(2));
    let mut handle = bench.submit(request);
    for _ in 0..8 {
        bench.step();
    }
    handle.stop();
    bench.step();
    let answer = read(&mut handle);
    for (text, _, finish) in &answer.choices {
        assert!(
            text.starts_with("one S"),
            "held-back text is released: {text}"
        );
        assert_eq!(finish.as_ref().unwrap().reason, FinishReason::Cancelled);
    }
    assert!(answer.usage.is_some());
}

/// OA-910: the queue is bounded by requests and by prompt tokens, and the error of a refused request has a retry time.
#[test]
fn ev_609_a_full_queue_refuses_and_has_room_again() {
    let script = Script {
        script: Name::Tokens,
        parallel: 1,
        ..Script::default()
    };
    let config = Config {
        queue_requests: 2,
        queue_tokens: 100,
        ..Config::default()
    };
    let mut bench = Bench::with(script, config);
    let _first = bench.submit(request_for("a"));
    let second = bench.submit(request_for("b"));
    let rejection = bench.engine.submit(request_for("c")).unwrap_err();
    assert_eq!(
        (rejection.reason.name(), rejection.code.name()),
        ("ENGINE_BUSY", "overloaded")
    );
    assert_eq!(rejection.retry_after, Some(Duration::from_secs(1)));
    bench.step();
    let long = bench
        .engine
        .submit(request_for(&"~".repeat(100)))
        .unwrap_err();
    assert_eq!(
        long.reason, "ENGINE_BUSY",
        "too many tokens beside the one that waits"
    );
    drop(second);
    bench.step();
    let _alone = bench.submit(request_for(&"~".repeat(100)));
    let stats = bench.engine.stats();
    assert_eq!(
        (stats.rejected_queue.get(), stats.rejected_tokens.get()),
        (1, 1)
    );
}

#[test]
fn oa_910_a_queued_request_whose_reader_left_is_removed_before_its_turn() {
    let script = Script {
        script: Name::Tokens,
        parallel: 1,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let _runs = bench.submit(request_for("a"));
    let (left, stays) = (
        bench.submit(request_for("b")),
        bench.submit(request_for("c")),
    );
    bench.step();
    let stats = std::sync::Arc::clone(bench.engine.stats());
    assert_eq!(stats.requests_waiting.get(), 2);
    drop(left);
    let report = bench.step();
    assert_eq!(
        (report.cancelled.len(), stats.requests_waiting.get()),
        (1, 1)
    );
    drop(stays);
    bench.step();
    assert_eq!(
        (stats.requests_waiting.get(), stats.requests_running.get()),
        (0, 1)
    );
}

/// Each phase of a request is observed once, and the phases add up.
#[test]
fn oa_801_each_phase_of_a_request_is_observed_once() {
    let script = Script {
        script: Name::Tokens,
        count: 5,
        tokens_per_s: 10.0,
        parallel: 1,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let (first, second) = (
        bench.submit(request_for("a")),
        bench.submit(request_for("b")),
    );
    bench.settle();
    let stats = bench.engine.stats();
    let parts = [
        &stats.queue_seconds,
        &stats.prefill_seconds,
        &stats.decode_seconds,
        &stats.inference_seconds,
        &stats.request_seconds,
        &stats.output_token_seconds,
    ];
    for part in parts {
        assert_eq!(part.counts().sum::<u64>(), 2);
    }
    let [queue, prefill, decode, inference, request, mean] = parts.map(|part| part.sum());
    assert!((prefill + decode - inference).abs() < 1e-5);
    assert!((queue + inference - request).abs() < 1e-5);
    assert!(queue > 0.4 && decode > 0.8, "{queue} {decode}");
    // Four gaps of a tenth of a second in each of two answers, and an end.
    assert!((0.2..0.25).contains(&mean), "{mean}");
    drop((first, second));
}

/// Seeded randomness of the simulation.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % below
    }
}

/// One client of the simulation: its request, and what it has read.
struct Client {
    handle: crate::RequestHandle,
    answer: Answer,
    seed: u64,
    text: String,
    n: u32,
}

impl Client {
    fn request(&self) -> GenerationRequest {
        let mut request = sampled(&self.text, self.seed);
        request.params.n = Some(self.n);
        request
    }
}

/// Clients that arrive, read at their own pace and leave, with a KV cache that is too small for them.
struct Crowd {
    dice: Dice,
    bench: Bench,
    clients: Vec<Client>,
    done: Vec<Client>,
}

impl Crowd {
    fn come(&mut self) {
        let dice = &mut self.dice;
        let text = "p".repeat(dice.roll(60) as usize);
        let (seed, n) = (dice.roll(1000), 1 + dice.roll(3) as u32);
        let mut request = sampled(&text, seed);
        request.params.n = Some(n);
        (request.params.priority, request.caller) = (Some(dice.roll(3) as i32), dice.roll(4));
        request.connection = dice.roll(2);
        let handle = self.bench.submit(request);
        self.clients.push(Client {
            handle,
            answer: Answer::default(),
            seed,
            text,
            n,
        });
    }

    fn step(&mut self, seed: u64) {
        let report = self.bench.step();
        let mut batch: Vec<u64> = report.batch().collect();
        batch.sort_unstable();
        batch.dedup();
        let shares = report.decoded.len() + report.prefilled.len();
        assert_eq!(batch.len(), shares, "seed {seed}: one share each");
        assert!(batch.len() <= 6);
        for client in &mut self.clients {
            for _ in 0..self.dice.roll(4) {
                if let Some(event) = client.handle.try_next() {
                    client.answer.take(event);
                }
            }
        }
        let over =
            |client: &mut Client| client.answer.usage.is_some() || client.answer.error.is_some();
        self.done.extend(self.clients.extract_if(.., over));
    }
}

fn simulate(seed: u64) {
    let mut dice = Dice(seed);
    let script = Script {
        context_tokens: 200,
        parallel: 6,
        kept_prefixes: 4,
        cells: Some(300 + dice.roll(400) as u32),
        truncates: dice.roll(2) == 0,
        window_tokens: [0, 2, 30][dice.roll(3) as usize],
        saves: dice.roll(2) == 0,
        count: 30,
        ..wandering()
    };
    let bench = Bench::with(
        script.clone(),
        Config {
            outbox_events: 5,
            ageing_turns: [0, 1, 8][dice.roll(3) as usize],
            ..Config::default()
        },
    );
    let mut crowd = Crowd {
        dice,
        bench,
        clients: Vec::new(),
        done: Vec::new(),
    };
    for step in 0.. {
        let open = step < 200;
        if open && crowd.dice.roll(4) == 0 {
            crowd.come();
        }
        if open && crowd.dice.roll(40) == 0 && !crowd.clients.is_empty() {
            let removed = crowd.dice.roll(crowd.clients.len() as u64) as usize;
            drop(crowd.clients.swap_remove(removed));
        }
        crowd.step(seed);
        if !open && crowd.clients.is_empty() {
            break;
        }
        assert!(
            step < 20_000,
            "seed {seed}: {} clients wait for ever",
            crowd.clients.len()
        );
    }
    crowd.bench.settle();
    assert!(
        crowd.bench.owner.is_empty(),
        "seed {seed}: something is left behind"
    );
    for client in crowd.done.iter().step_by(7) {
        let script = Script {
            cells: None,
            ..script.clone()
        };
        let alone = Bench::new(script).answer(client.request());
        assert_eq!(
            alone.choices, client.answer.choices,
            "seed {seed}: batch mates changed an answer"
        );
    }
}

#[test]
fn simulated_clients_get_the_output_they_would_get_alone() {
    for seed in 0..6 {
        simulate(seed);
    }
}

#[test]
fn each_step_is_published_whole() {
    let mut bench = Bench::new(wandering());
    let mut handles: Vec<_> = (0..8)
        .map(|seed| bench.submit(sampled("x", seed)))
        .collect();
    for _ in 0..20 {
        let report = bench.step();
        for handle in &mut handles {
            let events: Vec<_> = std::iter::from_fn(|| handle.try_next()).collect();
            assert!(events.iter().all(|event| event.step == report.step));
            assert_eq!(
                events
                    .iter()
                    .filter(|event| matches!(event.kind, EventKind::Tokens(_)))
                    .count(),
                1
            );
        }
    }
}
