//! Fill in the middle with what else a request may have: the answer is that to the tokens of its prompt.

use sapwood_proto::params::LoraUse;
use sapwood_proto::steer::{Branch, ConditionalSplice, Mid, Sample, Splice, Token};

use super::harness::{Answer, Bench};
use super::probe::{Probe, free};
use crate::adapters::AdapterInfo;
use crate::api::{GenerationRequest, Prompt};
use crate::scripted::{Config as Script, Scripted};
use crate::{Config, DraftModel, SpeculationMode};

const PREFIX: &str = "abc";
const SUFFIX: &str = "def <fim_middle>";

/// BOS, the prefix behind its mark, the suffix behind its mark, and the mark of the middle.
fn tokens() -> Vec<Token> {
    let bytes = |text: &str| text.bytes().map(Token::from).collect::<Vec<_>>();
    [
        &[256, 258][..],
        &bytes(PREFIX),
        &[259],
        &bytes(SUFFIX),
        &[260],
    ]
    .concat()
}

/// The tokens of the output are likely to be those of the prompt, with `gap`.
fn script(gap: f32) -> Script {
    let adapter = |name: &str| AdapterInfo {
        name: name.to_owned(),
        scale: 1.0,
        applied: false,
    };
    Script {
        infill: true,
        gap,
        adapters: vec![adapter("style"), adapter("code")],
        ..Script::default()
    }
}

/// The answer of a fresh engine to the texts, which is that to their tokens.
fn answer(bench: impl Fn() -> Bench, more: impl Fn(&mut GenerationRequest)) -> Answer {
    let texts = Prompt::Infill {
        prefix: PREFIX.to_owned(),
        suffix: SUFFIX.to_owned(),
    };
    let [texts, tokens] = [texts, Prompt::Tokens(tokens())].map(|prompt| {
        let mut request = GenerationRequest::new(prompt);
        request.params.temperature = Some(1.0);
        request.params.seed = Some(7);
        request.params.max_tokens = Some(12);
        request.params.ignore_eos = Some(true);
        more(&mut request);
        bench().answer(request)
    });
    assert_eq!(texts, tokens);
    assert_eq!(texts.error, None);
    texts
}

fn outputs(answer: &Answer) -> Vec<&[Token]> {
    let choices = answer.choices.iter();
    choices.map(|(_, tokens, _)| &**tokens).collect()
}

#[test]
fn choices_of_a_filled_place_differ() {
    let answer = answer(
        || Bench::new(script(0.5)),
        |request| request.params.n = Some(3),
    );
    let mut outputs = outputs(&answer);
    outputs.sort_unstable();
    outputs.dedup();
    assert_eq!(outputs.len(), 3);
}

#[test]
fn adapters_compute_a_filled_place() {
    let mut all: Vec<Answer> = [vec![], vec!["style"], vec!["code"], vec!["style", "code"]]
        .map(|names| {
            answer(
                || Bench::new(script(0.5)),
                |request| {
                    let names = names.iter();
                    request.params.lora = Some(names.map(|name| LoraUse::named(*name)).collect());
                },
            )
        })
        .into();
    all.dedup_by(|a, b| outputs(a) == outputs(b));
    assert_eq!(all.len(), 4);
}

#[test]
fn a_controller_forks_a_filled_place() {
    let mut probe = Probe::new();
    probe.mid = |round| {
        let splice = |backtrack, tokens: &[Token]| Splice {
            backtrack,
            tokens: tokens.to_vec(),
        };
        Ok(Some(match round {
            1 => Mid::Fork(vec![
                Branch::Sample(Sample::default()),
                Branch::Splice(splice(0, &[121, 122])),
                Branch::Sample(Sample {
                    splices: vec![ConditionalSplice {
                        when_sampled: Vec::new(),
                        keeps_sampled: false,
                        splice: splice(1, &[119]),
                    }],
                    ..Sample::default()
                }),
            ]),
            _ => free(),
        }))
    };
    let answer = answer(
        || Bench::new(script(40.0)),
        |request| {
            request.params.max_tokens = Some(4);
            request.steer = Some(Box::new(probe.clone()));
        },
    );
    let texts: Vec<&str> = answer.choices.iter().map(|choice| &*choice.0).collect();
    assert_eq!(texts, ["abcd", "ayzd", "wbc"]);
}

#[test]
fn a_draft_model_drafts_a_filled_place() {
    let plain = answer(|| Bench::new(script(3.0)), |_| {});
    let drafting = || {
        let [model, draft] = [(); 2].map(|()| Scripted::new(script(3.0)).unwrap());
        let draft = DraftModel::new(Box::new(draft), &model, 0.3).unwrap();
        let config = Config {
            speculation: SpeculationMode::Draft,
            ..Config::default()
        };
        Bench::drafting(Box::new(model), Some(draft), config)
    };
    let drafted = answer(drafting, |_| {});
    assert_eq!(outputs(&drafted), outputs(&plain));
    let mut bench = drafting();
    bench.answer(GenerationRequest::new(Prompt::Infill {
        prefix: PREFIX.to_owned(),
        suffix: SUFFIX.to_owned(),
    }));
    assert!(bench.engine.stats().accepted_tokens.get() > 0);
}
