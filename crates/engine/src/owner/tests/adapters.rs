//! Requests with LoRA adapters of their own: each is answered as if it were alone, and sets take turns.

use std::sync::Arc;

use proptest::prelude::*;
use sapwood_proto::params::{LoraName, LoraUse};
use sapwood_proto::time::Time;

use super::harness::{Answer, Bench, read, request_for};
use super::hooked_model::{HookedModel, ModelHooks};
use crate::Config;
use crate::adapters::AdapterInfo;
use crate::api::{GenerationRequest, Prompt};
use crate::config::SpeculationMode;
use crate::model::{BatchEntry, DecodeStop, Model};
use crate::scripted::{Config as Script, Scripted};
use crate::stats::Counter;

fn adapters() -> Vec<AdapterInfo> {
    let adapter = |name: &str, scale, applied| AdapterInfo {
        name: name.to_owned(),
        scale,
        applied,
    };
    vec![adapter("style", 1.0, true), adapter("code", 0.5, false)]
}

/// A model whose output varies with its rows, which depend on the adapters that computed each token.
fn script() -> Script {
    Script {
        adapters: adapters(),
        gap: 0.5,
        ..Script::default()
    }
}

fn sampled(text: &str, seed: u64, lora: Option<Vec<LoraUse>>) -> GenerationRequest {
    let mut request = request_for(text);
    request.params.temperature = Some(1.0);
    request.params.seed = Some(seed);
    request.params.max_tokens = Some(12);
    request.params.ignore_eos = Some(true);
    request.params.lora = lora;
    request
}

/// Some sets: the model's own, the same by name, none, and others.
fn set(index: usize) -> Option<Vec<LoraUse>> {
    let by_number = LoraUse {
        adapter: LoraName::Index(1),
        scale: None,
    };
    [
        None,
        Some(vec![LoraUse::named("style")]),
        Some(vec![]),
        Some(vec![by_number.clone()]),
        Some(vec![LoraUse::named("style").scaled(0.25), by_number]),
    ][index]
        .clone()
}

fn outputs(answer: &Answer) -> Vec<Vec<u32>> {
    assert_eq!(answer.error, None);
    let choices = answer.choices.iter();
    choices.map(|(_, tokens, _)| tokens.clone()).collect()
}

#[test]
fn adapters_change_the_output_and_equal_sets_do_not() {
    let one = |index| {
        let answer = Bench::new(script()).answer(sampled("a prompt", 1, set(index)));
        outputs(&answer)
    };
    let mut all: Vec<_> = (1..5).map(one).collect();
    assert_eq!(one(0), all[0], "the set of the model, by name");
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 4);
}

#[test]
fn an_adapter_that_is_not_there_is_refused_at_once() {
    let refused = |script: Script, lora: &str| {
        let bench = Bench::new(script);
        let request = sampled("x", 1, Some(vec![LoraUse::named(lora)]));
        bench.engine.submit(request).err().unwrap().message
    };
    let message = refused(script(), "other");
    assert!(message.contains(r#""style", "code""#), "{message}");
    let message = refused(Script::default(), "style");
    assert!(message.contains("no adapters"), "{message}");
}

#[test]
fn a_prefix_is_shared_within_a_set_alone() {
    let script = Script {
        saves: true,
        context_tokens: 256,
        cells: Some(256),
        kept_prefixes: 2,
        ..script()
    };
    let mut bench = Bench::with(script, Config::default());
    let prompt = "a prompt that is long enough to be kept in the memory of slots";
    let mut cached = |index| {
        let answer = bench.answer(sampled(prompt, 1, set(index)));
        answer.usage.unwrap().cached_tokens
    };
    for index in [0, 2, 3, 4] {
        assert_eq!(cached(index), 0, "{index}");
    }
    // In KV cells, or saved.
    for index in [1, 2, 3, 4, 0] {
        assert!(cached(index) > 50, "{index}");
    }
}

/// Counts what the owner asks of a model.
#[derive(Clone, Default)]
struct CallCounts {
    decodes: Arc<Counter>,
    changes: Arc<Counter>,
}

impl ModelHooks for CallCounts {
    fn set_adapters(&mut self, model: &mut Scripted, scales: &[f32]) {
        self.changes.add(1);
        model.set_adapters(scales);
    }

    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        self.decodes.add(1);
        model.decode(batch, now)
    }
}

/// Decode calls, and changes of the adapters, that these requests take together.
fn calls(script: Script, requests: Vec<GenerationRequest>) -> (u64, u64) {
    let counts = CallCounts::default();
    let model = HookedModel::new(script, counts.clone());
    let mut bench = Bench::over(Box::new(model), Config::default());
    let submit = |request| bench.submit(request);
    let handles: Vec<_> = requests.into_iter().map(submit).collect();
    bench.settle();
    for mut handle in handles {
        assert_eq!(read(&mut handle).error, None);
    }
    (counts.decodes.get(), counts.changes.get())
}

#[test]
fn one_set_takes_as_many_calls_as_a_model_without_adapters() {
    let requests = |sets: &[usize]| {
        let all = (0..8).zip(sets.iter().cycle());
        all.map(|(seed, &index)| sampled(&format!("prompt {seed}"), seed, set(index)))
            .collect::<Vec<_>>()
    };
    let without = Script {
        adapters: Vec::new(),
        ..script()
    };
    let plain = calls(without, requests(&[0]));
    assert_eq!(plain.1, 0);
    assert_eq!(calls(script(), requests(&[0])), plain);
    assert_eq!(calls(script(), requests(&[0, 1])), plain, "the same set");
    assert_eq!(calls(script(), requests(&[3])), (plain.0, 1));
    let (decodes, changes) = calls(script(), requests(&[0, 3]));
    assert_eq!(decodes, 2 * plain.0, "each set has its own");
    // The first call is with what is set already.
    assert_eq!(changes, decodes - 1);
}

#[test]
fn sets_take_turns_and_new_ones_do_not_overtake() {
    let script = Script {
        parallel: 4,
        context_tokens: 512,
        ..script()
    };
    let mut bench = Bench::new(script);
    let long = |text: &str, index| {
        let mut request = sampled(text, 1, set(index));
        request.params.max_tokens = Some(200);
        bench.submit(request)
    };
    // Two of one set have their turns together.
    let _streams = [long("a", 0), long("b", 2), long("c", 2)];
    let mut last = [0_u64; 3];
    let mut brief = Vec::new();
    for step in 1..150_u16 {
        // In each step a further request with a set of its own, which ends after one token.
        let scale = f32::from(step) / 16.0;
        let mut request = sampled("d", 1, Some(vec![LoraUse::named("code").scaled(scale)]));
        request.params.max_tokens = Some(1);
        brief.push(bench.submit(request));
        let report = bench.step();
        for sequence in report.batch().filter(|sequence| *sequence < 3) {
            last[usize::try_from(sequence).unwrap()] = report.step;
        }
        assert_eq!(last[1], last[2]);
        // Four slots: two of these sets, and at most two others.
        let longest = last.iter().map(|last| report.step - last).max();
        assert!(longest <= Some(4), "{report:?}");
    }
    // One of four sequences has a set like theirs, and a quarter of the turns.
    let ended = brief.iter_mut().filter_map(|it| read(it).usage).count();
    assert!(ended > 30, "{ended}");
}

#[test]
fn a_set_has_turns_for_its_sequences() {
    let script = Script {
        parallel: 8,
        context_tokens: 512,
        ..script()
    };
    let mut bench = Bench::new(script);
    let requests = (0..8).map(|seed| {
        let mut request = sampled("a", seed, set(if seed == 0 { 3 } else { 0 }));
        request.params.max_tokens = Some(400);
        request
    });
    let _streams: Vec<_> = requests.map(|request| bench.submit(request)).collect();
    let mut turns = [0_u32; 8];
    for _ in 0..160 {
        let report = bench.step();
        for sequence in report.batch() {
            turns[usize::try_from(sequence).unwrap()] += 1;
        }
    }
    assert!((19..=22).contains(&turns[0]), "{turns:?}");
    assert!(turns[1..].iter().all(|turns| *turns >= 138), "{turns:?}");
}

#[derive(Clone, Debug)]
struct Asked {
    prompt: String,
    seed: u64,
    set: usize,
    choices: u32,
    after: u8,
    is_scored: bool,
}

impl Asked {
    fn request(&self) -> GenerationRequest {
        let mut request = sampled(&self.prompt, self.seed, set(self.set));
        request.params.n = Some(self.choices);
        request.params.top_logprobs = Some(1);
        if self.is_scored {
            request.prompt = Prompt::Text(self.prompt.clone());
            request.params.n = None;
            request.scored = Some(b"text to score".map(u32::from).to_vec());
        }
        request
    }
}

fn asked() -> impl Strategy<Value = Asked> {
    // Prompts that are often equal or begin alike.
    let prompt = ("(ab|cd){1,3}", 0..3_usize);
    let prompt = prompt.prop_map(|(end, times)| "a shared beginning ".repeat(times) + &end);
    (
        prompt,
        0..3_u64,
        0..5_usize,
        1..4_u32,
        0..20_u8,
        any::<bool>(),
    )
        .prop_map(|(prompt, seed, set, choices, after, is_scored)| Asked {
            prompt,
            seed,
            set,
            choices,
            after,
            is_scored: is_scored && choices == 1,
        })
}

/// The tokens of each choice with their log-probabilities.
type Scored = Vec<Vec<(u32, u32)>>;

fn scored(handle: &mut crate::RequestHandle, into: &mut Scored) {
    while let Some(event) = handle.try_next() {
        let choice = event.choice as usize;
        match event.kind {
            crate::api::EventKind::Tokens(tokens) => {
                into.resize(into.len().max(choice + 1), Vec::new());
                let tokens = tokens.tokens.iter();
                into[choice].extend(tokens.map(|it| (it.id, it.logprob.to_bits())));
            }
            crate::api::EventKind::Error(error) => panic!("{error}"),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever runs beside a request, and whatever is cached of other sets: it has the tokens and log-probabilities that
    /// it has alone, with few slots, few cells, and models that cannot truncate.
    #[test]
    fn each_request_is_answered_as_if_it_were_alone(
        asked in prop::collection::vec(asked(), 1..9),
        truncates in any::<bool>(),
        saves in any::<bool>(),
        parallel in 1..6_u32,
        full in any::<bool>(),
        drafts in any::<bool>(),
    ) {
        let script = Script {
            truncates,
            saves,
            parallel,
            kept_prefixes: 3,
            context_tokens: 128,
            cells: full.then_some(160),
            ..script()
        };
        let config = || Config {
            prefix_tokens_min: 1,
            speculation: if drafts { SpeculationMode::Lookup } else { SpeculationMode::Off },
            ..Config::default()
        };
        let mut bench = Bench::with(script.clone(), config());
        let mut running: Vec<_> = asked.iter().map(|_| (None, Scored::new())).collect();
        for round in 0..=20 {
            for (one, (handle, _)) in asked.iter().zip(&mut running) {
                if one.after == round {
                    *handle = Some(bench.submit(one.request()));
                }
            }
            bench.step();
        }
        bench.settle();
        prop_assert!(bench.owner.is_empty());
        for (one, (handle, answer)) in asked.iter().zip(&mut running) {
            scored(handle.as_mut().unwrap(), answer);
            let mut alone = Bench::with(script.clone(), config());
            let mut handle = alone.submit(one.request());
            alone.settle();
            let mut expected = Scored::new();
            scored(&mut handle, &mut expected);
            prop_assert!(!expected.is_empty());
            prop_assert_eq!(&*answer, &expected, "{:?}", one);
        }
    }
}
