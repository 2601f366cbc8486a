//! Rows that are sampled on several threads give what a single thread gives.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use sapwood_proto::params::GenerationParams;
use sapwood_proto::time::Time;

use super::harness::{Bench, request_for};
use super::hooked_model::{HookedModel, ModelHooks};
use super::reference::Random;
use crate::api::{EngineEvent, EventKind, GenerationRequest};
use crate::model::{BatchEntry, DecodeStop, Model, OutputRow};
use crate::ranking::mix;
use crate::scripted::{Config as Script, Scripted};
use crate::{Config, SpeculationMode};

/// Gives rows as models of real weights do: logits, and those of several entries at once.
#[derive(Default)]
struct LogitRows {
    now: Time,
    rows: Vec<Vec<f32>>,
    /// What there is instead of logits, by the index of the entry, if that was asked for with others.
    others: Vec<(usize, OutputRow<'static>)>,
    /// How many rows were given with others.
    together: Arc<AtomicUsize>,
}

impl LogitRows {
    /// The logits of a row, or what there is instead.
    fn of(
        model: &mut Scripted,
        index: usize,
        now: Time,
        row: &mut Vec<f32>,
    ) -> Option<OutputRow<'static>> {
        match model.row(index, now) {
            OutputRow::Ranked(ranking) => {
                ranking.fill(row);
                // A model with a defect: the request with this token ends there.
                if ranking.first() == u32::from(b'!') {
                    row[7] = f32::NAN;
                }
                None
            }
            OutputRow::NotBefore(until) => Some(OutputRow::NotBefore(until)),
            OutputRow::End(reason) => Some(OutputRow::End(reason)),
            OutputRow::Failed(error) => Some(OutputRow::Failed(error)),
            OutputRow::Logits(_) => unreachable!("scripted rows are in closed form"),
        }
    }
}

impl ModelHooks for LogitRows {
    fn decode(
        &mut self,
        model: &mut Scripted,
        batch: &[BatchEntry],
        now: Time,
    ) -> Result<(), DecodeStop> {
        self.now = now;
        self.others.clear();
        self.rows.resize_with(batch.len(), Vec::new);
        model.decode(batch, now)
    }

    fn row<'a>(&'a mut self, model: &'a mut Scripted, index: usize, now: Time) -> OutputRow<'a> {
        if let Some(at) = self.others.iter().position(|(at, _)| *at == index) {
            return self.others.swap_remove(at).1;
        }
        let row = &mut self.rows[index];
        let other = Self::of(model, index, now, row);
        other.unwrap_or(OutputRow::Logits(row))
    }

    fn rows<'a>(
        &'a mut self,
        model: &'a mut Scripted,
        indexes: &[usize],
    ) -> Vec<Option<&'a mut [f32]>> {
        assert!(indexes.is_sorted_by(|left, right| left < right));
        let mut given = Vec::new();
        for (index, row) in self.rows.iter_mut().enumerate() {
            if indexes.binary_search(&index).is_err() {
                continue;
            }
            // Some are left, to be asked for alone.
            if index % 5 == 3 {
                given.push(None);
                continue;
            }
            match Self::of(model, index, self.now, row) {
                Some(other) => {
                    self.others.push((index, other));
                    given.push(None);
                }
                None => given.push(Some(&mut row[..])),
            }
        }
        let logits = given.iter().flatten().count();
        self.together.fetch_add(logits, Ordering::Relaxed);
        given
    }
}

/// What the script echoes: it repeats itself, so that drafts are looked up and penalties apply.
const TEXTS: [&str; 4] = [
    "the quick fox jumps over the lazy dog, the quick fox jumps over the lazy dog",
    "abcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabc",
    "a short one",
    "this one ends! with a defect of the model",
];

/// A request with other parameters for each seed.
fn request(seed: u64) -> GenerationRequest {
    let mut state = seed;
    let mut below = |limit: u64| {
        state = mix(state);
        state % limit
    };
    let text = usize::try_from(below(4)).unwrap();
    let mut request = request_for(TEXTS[text]);
    let params = &mut request.params;
    params.seed = Some(seed);
    params.max_tokens = Some(24);
    params.temperature = [Some(0.0), Some(0.0), Some(0.7), Some(1.2)][below(4) as usize];
    let number = u32::try_from(below(4)).unwrap();
    match below(9) {
        0 => params.top_p = Some(0.9),
        1 => params.min_p = Some(0.05),
        2 => params.top_k = Some(1 + number),
        3 => params.repetition_penalty = Some(1.3),
        4 => params.dry_multiplier = Some(0.8),
        5 => params.mirostat = Some(2),
        6 => params.typical_p = Some(0.8),
        7 => {
            params.frequency_penalty = Some(0.5);
            params.penalty_last_n = Some(8);
        }
        _ => {}
    }
    let mut prompt_logprobs = false;
    match below(6) {
        0 => params.top_logprobs = Some(number),
        1 => params.bad_words = vec!["fox".to_owned(), "ab".to_owned()],
        2 => params.logit_bias = [(97, 3.0), (98, f32::NEG_INFINITY)].into(),
        3 => params.min_tokens = Some(16),
        4 => prompt_logprobs = true,
        _ => {}
    }
    match below(4) {
        0 => params.n = Some(1 + number),
        1 if !prompt_logprobs => request.steer = Some(Box::new(Random::new(seed))),
        _ => {}
    }
    request.prompt_logprobs = prompt_logprobs;
    request
}

/// Everything that the engine sends for these requests, with so many threads; and how many rows were sampled ahead.
fn events(seeds: &[u64], threads: u32, script: &Script, drafts: bool) -> (Vec<String>, usize) {
    let hooks = LogitRows::default();
    let together = Arc::clone(&hooks.together);
    let model = Box::new(HookedModel::new(script.clone(), hooks));
    let config = Config {
        sample_threads: Some(threads),
        speculation: if drafts {
            SpeculationMode::Lookup
        } else {
            SpeculationMode::Off
        },
        prefix_tokens_min: 1,
        ..Config::default()
    };
    let mut bench = Bench::over(model, config);
    let submit = |&seed: &u64| Some(bench.submit(request(seed)));
    let mut handles: Vec<_> = seeds.iter().map(submit).collect();
    for _ in 0..6 {
        bench.step();
    }
    // A reader leaves while its request runs.
    handles[0] = None;
    bench.settle();
    assert!(bench.owner.is_empty());
    assert_eq!(bench.engine.stats().panics.get(), 0);
    let read = |handle: &mut _| {
        let mut events = Vec::new();
        let handle: &mut crate::RequestHandle = handle;
        while let Some(event) = handle.try_next() {
            // As text, because a log-probability that was not asked for is not a number.
            events.push(format!("{event:?}"));
        }
        events
    };
    let events = handles.iter_mut().flatten().flat_map(read).collect();
    (events, together.load(Ordering::Relaxed))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn lm_603_the_number_of_threads_changes_nothing(
        seeds in prop::collection::vec(any::<u64>(), 4..14),
        parallel in 2..12_u32,
        truncates in any::<bool>(),
        full in any::<bool>(),
        drafts in any::<bool>(),
    ) {
        let script = Script {
            parallel,
            truncates,
            context_tokens: 160,
            cells: full.then_some(300),
            ..Script::default()
        };
        let (alone, together) = events(&seeds, 1, &script, drafts);
        prop_assert_eq!(together, 0, "one thread asks for one row at a time");
        for threads in [2, 4] {
            let (with_others, _) = events(&seeds, threads, &script, drafts);
            prop_assert_eq!(&with_others, &alone, "{} threads", threads);
        }
    }
}

/// Plain requests are sampled together, and so is the first row of a sequence with a draft.
#[test]
fn rows_of_a_step_are_sampled_together() {
    let script = Script {
        parallel: 8,
        ..Script::default()
    };
    for drafts in [false, true] {
        let hooks = LogitRows::default();
        let together = Arc::clone(&hooks.together);
        let config = Config {
            sample_threads: Some(3),
            speculation: if drafts {
                SpeculationMode::Lookup
            } else {
                SpeculationMode::Off
            },
            ..Config::default()
        };
        let model = Box::new(HookedModel::new(script.clone(), hooks));
        let mut bench = Bench::over(model, config);
        let submit = |_| {
            let mut request = request_for(TEXTS[1]);
            request.params = GenerationParams {
                temperature: Some(0.2),
                max_tokens: Some(20),
                ..GenerationParams::default()
            };
            bench.submit(request)
        };
        let mut handles: Vec<_> = (0..8).map(submit).collect();
        bench.settle();
        let tokens = |event: EngineEvent| match event.kind {
            EventKind::Tokens(tokens) => tokens.tokens.len(),
            _ => 0,
        };
        let mut sampled = 0;
        for handle in &mut handles {
            while let Some(event) = handle.try_next() {
                sampled += tokens(event);
            }
        }
        assert_eq!(sampled, 160);
        let together = together.load(Ordering::Relaxed);
        // Most tokens are those of drafts, after the first of a step.
        let least = if drafts { 10 } else { 100 };
        assert!(together > least, "{together} of {sampled} rows");
    }
}

/// A model may give its rows one at a time alone; the scripted one does.
#[test]
fn a_model_without_several_rows_is_asked_for_them_once() {
    struct OneByOne(Arc<AtomicUsize>);

    impl ModelHooks for OneByOne {
        fn rows<'a>(
            &'a mut self,
            model: &'a mut Scripted,
            indexes: &[usize],
        ) -> Vec<Option<&'a mut [f32]>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            model.rows(indexes)
        }
    }

    let asked = Arc::new(AtomicUsize::new(0));
    let script = Script {
        parallel: 8,
        ..Script::default()
    };
    let model = HookedModel::new(script, OneByOne(Arc::clone(&asked)));
    let config = Config {
        sample_threads: Some(3),
        ..Config::default()
    };
    let mut bench = Bench::over(Box::new(model), config);
    let handles: Vec<_> = (0..8)
        .map(|_| bench.submit(request_for(TEXTS[0])))
        .collect();
    bench.settle();
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    drop(handles);
}
