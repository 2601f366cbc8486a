//! Speculative decoding: the output is that of decoding without drafts.

mod drafter;
mod figures;
mod parrot;
mod streams;

use proptest::prelude::*;
use sapwood_proto::steer::Token;

use super::harness::{Answer, Bench, read, request_for};
use crate::api::{EventKind, FinishReason, GenerationRequest, Prompt, StopCause};
use crate::scripted::{Config as Script, Script as Name};
use crate::{Config, DraftModel, RequestHandle, SpeculationMode};
use parrot::{END, Output, Parrot};

const MODES: [SpeculationMode; 2] = [SpeculationMode::Off, SpeculationMode::Lookup];

fn config(speculation: SpeculationMode) -> Config {
    Config {
        speculation,
        ..Config::default()
    }
}

/// Engines with and without drafts.
fn benches(script: &Script, output: impl Fn() -> Output) -> [Bench; 2] {
    MODES.map(|mode| {
        let parrot = parrot::parrot(script.clone(), output(), None);
        Bench::over(Box::new(parrot), config(mode))
    })
}

/// The same, with an engine that has a draft model too.
fn all_benches(script: &Script, output: impl Fn() -> Output, draft: Output) -> [Bench; 3] {
    let [plain, lookup] = benches(script, &output);
    let parrot = parrot::parrot(script.clone(), output(), None);
    let draft = parrot::parrot(script.clone(), draft, None);
    [
        plain,
        lookup,
        drafting(parrot, draft, 0.3, config(SpeculationMode::Draft)),
    ]
}

/// An engine whose second model drafts.
fn drafting(model: Parrot, mut draft: Parrot, p_min: f32, config: Config) -> Bench {
    draft.hooks.copies_count = true;
    let draft = DraftModel::new(Box::new(draft), &model, p_min).unwrap();
    Bench::drafting(Box::new(model), Some(draft), config)
}

fn letters() -> Output {
    Output::Letters(4)
}

/// A request for text that is sampled.
fn sampled(prompt: &str, seed: u64) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Text(prompt.to_owned()));
    request.params.temperature = Some(0.8);
    request.params.seed = Some(seed);
    request.params.max_tokens = Some(60);
    request
}

/// How many tokens an engine has drafted and accepted.
fn drafted(bench: &Bench) -> (u64, u64) {
    let stats = bench.engine.stats();
    (stats.draft_tokens.get(), stats.accepted_tokens.get())
}

/// The events of each choice without their steps; times and the cache depend on what else runs.
fn events(handle: &mut RequestHandle, seen: &mut Vec<Vec<String>>) {
    while let Some(event) = handle.try_next() {
        let choice = event.choice as usize;
        seen.resize(seen.len().max(choice + 1), Vec::new());
        seen[choice].push(match event.kind {
            EventKind::Usage(usage) => format!(
                "{} {} {}",
                usage.prompt_tokens, usage.completion_tokens, usage.sampled_tokens
            ),
            kind => format!("{kind:?}"),
        });
    }
}

#[test]
fn an_answer_that_repeats_its_prompt_takes_few_steps() {
    let text = "the quick brown fox jumps over the lazy dog and the quick brown fox sleeps";
    let [mut plain, mut drafting] = MODES.map(|mode| Bench::with(Script::default(), config(mode)));
    let expected = plain.answer(request_for(text));
    let answer = drafting.answer(request_for(text));
    assert_eq!(answer, expected);
    let stats = [&plain, &drafting].map(|bench| bench.engine.stats());
    let [before, after] = [&stats[0], &stats[1]].map(|stats| stats.steps.get());
    assert!(after * 3 < before, "{after} of {before}");
    let [before, after] = [&stats[0], &stats[1]].map(|stats| stats.cells_used.get());
    assert_eq!(after, before, "the rest of a draft is dropped");
}

/// The draws depend on seed and position alone, so the same seed gives the same tokens.
#[test]
fn oa_511_sampled_text_is_the_same_with_and_without_drafts() {
    // The draft model knows a letter less.
    let mut benches = all_benches(&Script::default(), letters, Output::Letters(3));
    for seed in 0..40 {
        let answers = benches.each_mut().map(|bench| {
            let mut handle = bench.submit(sampled("abcabcabc", seed));
            bench.settle();
            let mut seen = Vec::new();
            events(&mut handle, &mut seen);
            (seen, bench.engine.stats().cells_used.get())
        });
        assert_eq!(answers[1], answers[0]);
        assert_eq!(answers[2], answers[0]);
    }
    let [plain, lookup, model] = benches.each_ref().map(drafted);
    for (tokens, accepted) in [lookup, model] {
        assert!(
            tokens > 500 && accepted > tokens / 5 && accepted < tokens,
            "{accepted} of {tokens}"
        );
    }
    assert!(model.1 > lookup.1 + 200, "{model:?} {lookup:?}");
    assert_eq!(plain, (0, 0));
}

/// The frequencies of tokens after each pair of tokens, compared with their probabilities.
#[test]
fn oa_511_tokens_have_the_distribution_of_the_model() {
    let [_, lookup, model] = all_benches(&Script::default(), letters, Output::Letters(3));
    assert_has_the_distribution(lookup);
    assert_has_the_distribution(model);
}

fn assert_has_the_distribution(mut drafting: Bench) {
    let mut counts = std::collections::BTreeMap::<[Token; 2], [f64; 5]>::new();
    for seed in 0..300 {
        let mut request = sampled("abcabcabc", seed);
        request.params.temperature = Some(1.0);
        let answer = drafting.answer(request);
        let tokens = [&[98, 99][..], &answer.choices[0].1].concat();
        for three in tokens.windows(3) {
            let place = if three[2] == END { 4 } else { three[2] - 97 };
            counts.entry([three[0], three[1]]).or_default()[place as usize] += 1.0;
        }
    }
    let (tokens, accepted) = drafted(&drafting);
    assert!(
        accepted > 1_000 && tokens > accepted + 500,
        "{accepted} of {tokens}"
    );
    let (mut chi_square, mut free) = (0.0, 0.0);
    for (pair, counts) in counts {
        let row = letters().logits(&pair, 0);
        let all = [97, 98, 99, 100, END].map(|token| f64::from(row[token as usize]).exp());
        let (total, seen): (f64, f64) = (all.iter().sum(), counts.iter().sum());
        for (count, weight) in counts.iter().zip(all) {
            let expected = seen * weight / total;
            chi_square += (count - expected).powi(2) / expected.max(0.5);
        }
        free += 4.0;
    }
    // Mean and deviation of the distribution: four deviations are less likely than one in ten thousand.
    let most = free + 4.0 * (2.0_f64 * free).sqrt();
    assert!(free > 40.0 && chi_square < most, "{chi_square} of {most}");
}

/// An output that repeats its prompt, so that every draft is right as far as it goes.
fn echo(text: &str) -> (Vec<Bench>, GenerationRequest) {
    let output = text.bytes().map(Token::from);
    let benches = benches(&Script::default(), || {
        Output::Given(output.clone().collect())
    });
    (benches.into(), request_for(&text.repeat(2)))
}

fn ends(change: impl Fn(&mut GenerationRequest)) -> Answer {
    let (mut benches, mut request) = echo("one two three four five six seven eight nine ten");
    change(&mut request);
    let answers: Vec<Answer> = benches
        .iter_mut()
        .map(|bench| {
            let mut again = request_for("");
            again.prompt =
                Prompt::Text("one two three four five six seven eight nine ten".repeat(2));
            again.params = request.params.clone();
            bench.answer(again)
        })
        .collect();
    assert_eq!(answers[0], answers[1], "usage included");
    let (drafted, accepted) = drafted(&benches[1]);
    assert!(
        accepted >= 5 && accepted <= drafted,
        "{accepted} of {drafted}"
    );
    answers.into_iter().next().unwrap()
}

#[test]
fn an_output_may_end_within_a_draft() {
    let all = ends(|_| {});
    assert_eq!(
        all.choices[0].2.as_ref().unwrap().reason,
        FinishReason::Stop
    );
    for max in 8..30 {
        let cut = ends(|request| request.params.max_tokens = Some(max));
        assert_eq!(cut.choices[0].1, all.choices[0].1[..max as usize]);
        assert_eq!(
            cut.choices[0].2.as_ref().unwrap().reason,
            FinishReason::Length
        );
    }
    for stop in ["four", "e si", "nine t", "ght"] {
        let stopped = ends(|request| request.params.stop = vec![stop.to_owned()]);
        let end = stopped.choices[0].2.clone().unwrap();
        assert_eq!(end.stop, Some(StopCause::Text(stop.to_owned())));
        assert_eq!(stopped.text(), all.text().split(stop).next().unwrap());
    }
    let sequence: Vec<Token> = "five".bytes().map(Token::from).collect();
    let stopped = ends(|request| request.params.stop_sequences = vec![sequence.clone()]);
    assert_eq!(
        stopped.choices[0].2.clone().unwrap().stop,
        Some(StopCause::Tokens(sequence))
    );
}

#[test]
fn nothing_is_evicted_or_preempted_for_a_draft() {
    // One cell more than prompt and output need, then fewer and fewer of the next request.
    let text = "abcdefgh".repeat(4);
    for cells in [70, 90, 110, 128] {
        let script = Script {
            parallel: 2,
            kept_prefixes: 2,
            context_tokens: 64,
            cells: Some(cells),
            ..Script::default()
        };
        let output: Vec<Token> = text.bytes().take(24).map(Token::from).collect();
        let both = benches(&script, || Output::Given(output.clone()));
        let answers = both.map(|mut bench| {
            let mut handles = [0, 1].map(|_| bench.submit(request_for(&text)));
            bench.settle();
            let answers = handles.each_mut().map(read).map(|answer| answer.choices);
            let stats = bench.engine.stats();
            (answers, stats.preemptions.get() > 0)
        });
        assert_eq!(answers[1].0, answers[0].0, "{cells}");
        assert!(
            !answers[1].1 || answers[0].1,
            "{cells}: preempted for a draft"
        );
    }
}

#[test]
fn a_model_without_room_for_a_draft_decodes_without() {
    let output: Vec<Token> = "abcdefgh".repeat(4).bytes().map(Token::from).collect();
    let mut parrot = parrot::parrot(Script::default(), Output::Given(output), None);
    parrot.hooks.entries_max = 3;
    let calls = std::sync::Arc::clone(&parrot.hooks.calls);
    let mut bench = Bench::over(Box::new(parrot), config(SpeculationMode::Lookup));
    // Few enough tokens for a call of its own.
    let answer = bench.answer(request_for("ab"));
    assert_eq!(answer.text(), "abcdefgh".repeat(4));
    assert!(calls.lock().unwrap().iter().all(|&entries| entries <= 3));
    assert_eq!(bench.engine.stats().preemptions.get(), 0);
}

#[test]
fn models_that_cannot_truncate_and_steered_sequences_have_no_drafts() {
    let script = Script {
        truncates: false,
        ..Script::default()
    };
    let mut bench = Bench::with(script, config(SpeculationMode::Lookup));
    bench.answer(request_for("abcabcabcabcabc"));
    assert_eq!(drafted(&bench), (0, 0));
    let mut bench = Bench::with(Script::default(), config(SpeculationMode::Lookup));
    let mut request = request_for("abcabcabcabcabc");
    request.steer = Some(Box::new(super::probe::Probe::new()));
    assert_eq!(bench.answer(request).text(), "abcabcabcabcabc");
    assert_eq!(drafted(&bench), (0, 0));
    bench.answer(request_for("abcabcabcabcabc"));
    assert!(drafted(&bench).1 > 5);
}

#[test]
fn a_slow_reader_has_no_more_unread_events_than_its_quota() {
    let config = Config {
        outbox_events: 4,
        ..config(SpeculationMode::Lookup)
    };
    let mut bench = Bench::with(Script::default(), config);
    let text = "abcdefgh".repeat(8);
    let mut handle = bench.submit(request_for(&text));
    let mut read = String::new();
    bench.step();
    while !bench.owner.is_empty() {
        bench.settle();
        let mut unread = 0;
        while let Some(event) = handle.try_next() {
            if let EventKind::Tokens(tokens) = event.kind {
                unread += 1;
                read.push_str(&tokens.text);
            }
        }
        assert!(unread <= 4, "{unread}");
    }
    assert_eq!(read, text);
    assert!(drafted(&bench).1 > 10);
}

/// A row of a draft is asked when it is due, as without drafts: the script decides when. In a text of one letter the last token
/// is always that which the draft has next.
#[test]
fn a_paced_model_keeps_its_pace() {
    let script = Script {
        tokens_per_s: 100.0,
        ..Script::default()
    };
    for text in ["abcabcabcabc", "aaaaaaaaaaaa"] {
        let times = MODES.map(|mode| {
            let mut bench = Bench::with(script.clone(), config(mode));
            let answer = bench.answer(request_for(text));
            assert_eq!(answer.text(), text);
            let usage = answer.usage.unwrap();
            (bench.now, usage.processed_tokens, usage.sampled_tokens)
        });
        assert_eq!(times[0], times[1]);
    }
}

#[derive(Clone, Debug)]
struct Asked {
    seed: u64,
    prompt: String,
    temperature: f32,
    max: u32,
    n: u32,
    kind: u8,
}

impl Asked {
    fn request(&self) -> GenerationRequest {
        let mut request = sampled(&self.prompt, self.seed);
        let params = &mut request.params;
        params.temperature = Some(self.temperature);
        (params.max_tokens, params.n) = (Some(self.max), Some(self.n));
        match self.kind {
            1 => params.stop = vec!["dd".to_owned(), "abca".to_owned()],
            2 => params.top_logprobs = Some(2),
            3 => {
                params.repetition_penalty = Some(1.3);
                params.presence_penalty = Some(0.4);
                params.penalty_last_n = Some(9);
            }
            4 => {
                params.dry_multiplier = Some(0.8);
                params.dry_allowed_length = Some(2);
                params.dry_sequence_breakers = Some(vec![]);
            }
            5 => params.bad_words = vec!["ca".to_owned(), "bb".to_owned()],
            6 => params.min_tokens = Some(20.min(self.max)),
            7 => (params.mirostat, params.mirostat_tau) = (Some(2), Some(1.5)),
            8 => (params.ignore_eos, params.top_k) = (Some(true), Some(2)),
            9 => params.frequency_penalty = Some(0.3),
            _ => {}
        }
        request
    }
}

fn any_asked() -> impl Strategy<Value = Asked> {
    let temperature = prop_oneof![Just(0.0_f32), Just(0.6), Just(1.0)];
    (
        0..9_u64,
        "[a-d]{1,6}",
        1..4_usize,
        temperature,
        1..50_u32,
        1..3_u32,
        0..10_u8,
    )
        .prop_map(|(seed, prompt, times, temperature, max, n, kind)| Asked {
            seed,
            prompt: prompt.repeat(times),
            temperature,
            max,
            n,
            kind,
        })
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Submit,
    Step,
    /// Reads all events of a request.
    Read(usize),
    /// Drops a request, or ends it.
    Drop(usize),
    Stop(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(Op::Submit),
        6 => Just(Op::Step),
        2 => (0..6_usize).prop_map(Op::Read),
        1 => (0..6_usize).prop_map(Op::Drop),
        1 => (0..6_usize).prop_map(Op::Stop),
    ]
}

/// Plays a list of operations, then lets all requests end; returns what each has sent, `None` for one that was dropped or
/// ended early.
fn play(mut bench: Bench, asked: &[Asked], ops: &[Op]) -> (Vec<Option<Vec<Vec<String>>>>, Bench) {
    let mut requests: Vec<(Option<RequestHandle>, Vec<Vec<String>>, bool)> = Vec::new();
    for op in ops {
        match *op {
            Op::Submit => {
                if let Some(one) = asked.get(requests.len()) {
                    requests.push((Some(bench.submit(one.request())), Vec::new(), true));
                }
            }
            Op::Step => drop(bench.step()),
            Op::Read(index) => {
                if let Some((Some(handle), seen, _)) = requests.get_mut(index) {
                    events(handle, seen);
                }
            }
            Op::Drop(index) => {
                if let Some((handle, ..)) = requests.get_mut(index) {
                    *handle = None;
                }
            }
            Op::Stop(index) => {
                if let Some((Some(handle), _, whole)) = requests.get_mut(index) {
                    handle.stop();
                    *whole = false;
                }
            }
        }
    }
    bench.step();
    while !bench.owner.is_empty() {
        bench.settle();
        for (handle, seen, _) in &mut requests {
            handle.iter_mut().for_each(|handle| events(handle, seen));
        }
    }
    let mut all = Vec::new();
    for (handle, mut seen, whole) in requests {
        let read = handle.map(|mut handle| events(&mut handle, &mut seen));
        all.push((read.is_some() && whole).then_some(seen));
    }
    (all, bench)
}

/// A draft model that is often right, or often wrong: its letters, the least probability of a token, and its size.
fn any_draft() -> impl Strategy<Value = (u32, f32, Script)> {
    let size = (1..6_u32, 0..3_u32, 72..300_u32, 1..40_u32);
    (2..5_u32, 0.0..0.5_f32, size).prop_map(|(letters, p_min, size)| {
        let script = Script {
            parallel: size.0,
            kept_prefixes: size.1,
            cells: Some(size.2),
            batch_tokens: size.3,
            ..Script::default()
        };
        (letters, p_min, script)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    /// Whatever is requested and happens, with full caches, slow readers and requests that are dropped: every request has
    /// the events that it has without drafts.
    #[test]
    fn oa_511_events_are_those_of_decoding_without_drafts(
        asked in prop::collection::vec(any_asked(), 1..6),
        ops in prop::collection::vec(op(), 1..60),
        (parallel, kept_prefixes) in (1..5_u32, 0..4_u32),
        cells in prop::option::of(90..200_u32),
        batch_tokens in 4..40_u32,
        tokens_per_chunk in 1..4_u32,
        (outbox_events, draft_tokens_max) in (1..9_u32, 1..20_u32),
        draft in any_draft(),
    ) {
        let script = Script {
            script: Name::Text,
            text: "x".repeat(60),
            parallel,
            kept_prefixes,
            cells,
            batch_tokens,
            tokens_per_chunk,
            context_tokens: 80,
            ..Script::default()
        };
        let modes = [SpeculationMode::Off, SpeculationMode::Lookup, SpeculationMode::Draft];
        let [plain, lookup, model] = modes.map(|mode| {
            let parrot = parrot::parrot(script.clone(), letters(), None);
            let config = Config {
                outbox_events,
                draft_tokens_max,
                prefix_tokens_min: 1,
                ..config(mode)
            };
            let bench = match mode {
                SpeculationMode::Draft => {
                    let (letters, p_min, draft) = &draft;
                    let script = Script { context_tokens: 70, ..draft.clone() };
                    let draft = parrot::parrot(script, Output::Letters(*letters), None);
                    drafting(parrot, draft, *p_min, config)
                }
                _ => Bench::over(Box::new(parrot), config),
            };
            play(bench, &asked, &ops)
        });
        for (index, before) in plain.0.iter().enumerate() {
            prop_assert_eq!(before, &lookup.0[index], "request {}", index);
            prop_assert_eq!(before, &model.0[index], "request {}, draft model", index);
        }
        for (_, bench) in [&plain, &lookup, &model] {
            prop_assert_eq!(bench.engine.stats().panics.get(), 0);
        }
        prop_assert_eq!(drafted(&plain.1), (0, 0));
    }
}
