//! Drafts do not change what a model answers, and what they save.

use std::path::{Path, PathBuf};

use super::reuse::{Bench, generated, kinds, text};
use super::*;
use crate::api::{ChatMessage, ChatRequest, GenerationRequest, Prompt};
use crate::{Config, DraftModel, SpeculationMode};

const MODES: [SpeculationMode; 2] = [SpeculationMode::Off, SpeculationMode::Lookup];

fn config(speculation: SpeculationMode) -> Config {
    Config {
        speculation,
        ..Config::default()
    }
}

/// Prompts that repeat themselves, as the answers of a random model do too.
fn requests(temperature: f32) -> Vec<GenerationRequest> {
    let prompts = (1..4).map(|seed| text(seed, 40).repeat(2));
    let request = |(seed, prompt): (u64, Vec<Token>)| {
        let mut request = generated(&prompt, 60, 1);
        request.params.temperature = Some(temperature);
        request.params.seed = Some(seed);
        request
    };
    (0..).zip(prompts).map(request).collect()
}

#[test]
fn oa_511_drafts_do_not_change_the_answers_of_any_kind_of_model() {
    for of in kinds() {
        let kind = of.name;
        for cache_tokens in [None, Some(1024)] {
            let options = LoadOptions {
                cache_tokens,
                ..of.options(&options())
            };
            let mut drafted = 0;
            for temperature in [0.0, 0.1] {
                let what = format!("{kind}, cache {cache_tokens:?}, temperature {temperature}");
                let [plain, drafting] = MODES.map(|mode| {
                    let mut bench = Bench::with(&of.shape, &options, config(mode));
                    let answers = bench.answers(requests(temperature));
                    let stats = bench.engine.stats();
                    assert_eq!(stats.preemptions.get(), 0, "{what}");
                    (answers, stats.draft_tokens.get(), bench.equality)
                });
                for (answer, expected) in drafting.0.iter().zip(&plain.0) {
                    assert_eq!(expected.choices[0].len(), 60);
                    answer.assert_as(expected, plain.2, &what);
                }
                assert_eq!(plain.1, 0);
                drafted += drafting.1;
            }
            let truncates = !matches!(kind, "recurrent" | "hybrid");
            assert_eq!(drafted > 20, truncates, "{kind}: {drafted}");
        }
    }
}

/// A random model of this shape, as one that drafts.
fn draft_of(shape: &RandomModelShape, seed: u64) -> DraftOptions {
    let mut bytes = Vec::new();
    random::write(&mut bytes, shape, seed).unwrap();
    DraftOptions {
        source: ModelSource::Bytes(bytes.leak()),
        gpu_layers: None,
        context_tokens: None,
    }
}

/// Prompts without repetitions. Greedy: where a random model samples, its probabilities are so equal that rounding decides now and
/// then which of two neighbours a draw gives.
fn new_texts(prompt: u32, tokens: u32) -> Vec<GenerationRequest> {
    let request = |seed| generated(&text(seed, prompt), tokens, 1);
    (1..13).map(request).collect()
}

#[test]
fn oa_511_a_draft_model_does_not_change_the_answers_of_any_kind_of_model() {
    for of in kinds() {
        let kind = of.name;
        if matches!(kind, "recurrent" | "hybrid") {
            continue;
        }
        for cache_tokens in [None, Some(1024)] {
            let options = LoadOptions {
                cache_tokens,
                ..of.options(&options())
            };
            let what = format!("{kind}, cache {cache_tokens:?}");
            // Random models mostly repeat their last token, whatever their weights are.
            // So the first answers are too short for a repetition.
            for (prompt, tokens, seed, more) in [(7, 4, 7, 12), (60, 40, 7, 0), (60, 40, 8, 0)] {
                let [plain, lookup, draft] = [
                    (SpeculationMode::Off, None),
                    (SpeculationMode::Lookup, None),
                    (SpeculationMode::Draft, Some(draft_of(&of.shape, seed))),
                ]
                .map(|(mode, draft)| {
                    let options = LoadOptions {
                        draft,
                        ..options.clone()
                    };
                    let mut bench = Bench::with(&of.shape, &options, config(mode));
                    // The second time the prompts are in both caches.
                    let answers = [(); 2].map(|()| bench.answers(new_texts(prompt, tokens)));
                    let stats = bench.engine.stats();
                    assert_eq!((stats.panics.get(), stats.preemptions.get()), (0, 0));
                    (answers, stats.accepted_tokens.get(), bench.equality)
                });
                for (answers, expected) in draft.0.iter().zip(&plain.0) {
                    for (answer, expected) in answers.iter().zip(expected) {
                        answer.assert_as(expected, plain.2, &what);
                    }
                }
                println!("{what}: {} {}", lookup.1, draft.1);
                let is_more = more == 0 || lookup.1 == 0 && draft.1 >= more;
                assert!(is_more, "{what}: {} {}", lookup.1, draft.1);
            }
        }
    }
}

#[test]
fn a_draft_model_needs_memory_and_the_same_vocabulary() {
    let source = ModelSource::Bytes(tiny());
    let need = |draft: Option<DraftOptions>, memory_bytes| {
        let options = LoadOptions {
            draft,
            memory_bytes: Some(memory_bytes),
            ..options()
        };
        load("tiny", &source, &options, &mut |_| true)
    };
    let draft = || Some(draft_of(&RandomModelShape::tiny(), 8));
    let Err(LoadError::Memory { need: alone, .. }) = need(None, 1) else {
        panic!("a byte is too little");
    };
    let Err(LoadError::Memory { need: both, .. }) = need(draft(), alone) else {
        panic!("there is no memory for the draft model");
    };
    // Of the same size, but without cached prefixes.
    assert!(
        both > alone + alone / 3 && both <= 2 * alone,
        "{both} {alone}"
    );
    let mut model = need(draft(), both).unwrap();
    assert!(model.try_out().is_ok());
    assert_eq!(
        model.saved_identity(),
        need(None, both).unwrap().saved_identity(),
        "its saved prefixes are those of the model alone"
    );
    let drafts = model.take_draft().unwrap();
    assert_eq!(drafts.info().context_tokens, model.info().context_tokens);
    assert!(model.take_draft().is_none());
    DraftModel::new(Box::new(drafts), &model, 0.5).unwrap();
    let missing = DraftOptions {
        source: ModelSource::File("/no/such.gguf".into()),
        ..draft().unwrap()
    };
    let why = need(Some(missing), both).unwrap_err().to_string();
    assert!(why.contains("its draft model: there is no file"), "{why}");
}

/// Neither is loaded: the headers tell.
#[test]
fn a_draft_model_of_another_kind_is_refused_before_it_is_loaded() {
    let kinds = kinds();
    let of = |name| kinds.iter().find(|of| of.name == name).unwrap();
    let recurrent = of("recurrent");
    let tiny = RandomModelShape::tiny();
    for (draft, target) in [(&recurrent.shape, &tiny), (&tiny, &recurrent.shape)] {
        let options = LoadOptions {
            draft: Some(draft_of(draft, 8)),
            ..options()
        };
        let source = draft_of(target, 7).source;
        let error = load("m", &source, &options, &mut |_| panic!("it is loaded"));
        let why = error.unwrap_err();
        let LoadError::Draft(mismatch) = &why else {
            panic!("{why}");
        };
        assert!(matches!(**mismatch, LoadError::Mismatch(_)), "{why}");
        assert!(why.to_string().contains("truncated"), "{why}");
    }
}

/// A function whose text the answers repeat.
const FUNCTION: &str = "def total_price(items, tax_rate):\n    subtotal = 0\n    for item in items:\n        \
    subtotal += item.price * item.quantity\n    tax = subtotal * tax_rate\n    return subtotal + tax\n";

fn tasks() -> [(&'static str, String); 2] {
    [
        (
            "code",
            format!("Repeat this function exactly:\n```python\n{FUNCTION}```"),
        ),
        (
            "free text",
            "Why is the sky blue? Explain it to a child.".to_owned(),
        ),
    ]
}

fn asked(text: &str) -> GenerationRequest {
    let message = ChatMessage {
        role: "user".to_owned(),
        content: text.to_owned(),
        ..ChatMessage::default()
    };
    let chat = ChatRequest {
        messages: vec![message],
        ..ChatRequest::default()
    };
    let mut request = GenerationRequest::new(Prompt::Chat(chat));
    request.params.temperature = Some(0.0);
    request.params.max_tokens = Some(60);
    request.params.top_logprobs = Some(0);
    request
}

fn smollm2() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// A bench whose decode calls do not depend on time, so that their numbers can be compared: a prompt is one call, and every call
/// has the same number of threads.
fn timeless(options: LoadOptions, speculation: SpeculationMode) -> Bench {
    let options = LoadOptions {
        threads: Some(2),
        ..options
    };
    let config = Config {
        step_ms: 600_000,
        ..config(speculation)
    };
    let model = load("m", &ModelSource::File(smollm2()), &options, &mut |_| true).unwrap();
    Bench::of(model, config)
}

/// The tokens of an answer do not depend on drafts; the calls do. Stepped by hand.
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn smollm2_takes_fewer_calls_where_answers_repeat() {
    let mut saved = 0.0_f64;
    for (task, prompt) in tasks() {
        let [plain, drafting] = MODES.map(|mode| {
            let mut bench = timeless(LoadOptions::default(), mode);
            let answer = bench.answers(vec![asked(&prompt)]).remove(0);
            let stats = bench.engine.stats();
            let drafted = (stats.draft_tokens.get(), stats.accepted_tokens.get());
            (answer, stats.steps.get(), drafted, bench.equality)
        });
        drafting.0.assert_as(&plain.0, plain.3, task);
        let tokens = [&plain, &drafting].map(|run| run.0.choices[0].len() as f64);
        let per_token = [plain.1 as f64 / tokens[0], drafting.1 as f64 / tokens[1]];
        println!(
            "{task}: {per_token:.2?} calls for a token, {:?} drafted",
            drafting.2
        );
        saved = saved.max(1.0 - per_token[1] / per_token[0]);
        assert!(per_token[1] <= per_token[0] * 1.02, "{task}");
    }
    assert!(saved > 0.2, "{saved}");
}

/// Its own draft model: nearly every token is accepted.
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn smollm2_accepts_its_own_drafts() {
    let draft = DraftOptions {
        source: ModelSource::File(smollm2()),
        gpu_layers: None,
        context_tokens: Some(512),
    };
    let [plain, drafting] = [None, Some(draft)].map(|draft| {
        let options = LoadOptions {
            context_tokens: Some(1024),
            draft,
            ..LoadOptions::default()
        };
        let mut bench = timeless(options, SpeculationMode::Draft);
        let answer = bench.answers(vec![asked(&tasks()[1].1)]).remove(0);
        let stats = bench.engine.stats();
        let drafted = (stats.draft_tokens.get(), stats.accepted_tokens.get());
        (answer, stats.steps.get(), drafted, bench.equality)
    });
    drafting.0.assert_as(&plain.0, plain.3, "free text");
    println!("{} and {} steps, {:?}", plain.1, drafting.1, drafting.2);
    let (tokens, accepted) = drafting.2;
    assert!(accepted * 10 > tokens * 8, "{accepted} of {tokens}");
    assert!(drafting.1 * 2 < plain.1, "{} of {}", drafting.1, plain.1);
}
