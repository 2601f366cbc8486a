//! LoRA adapters that requests choose: each is answered as if it were alone, with cold and warm caches.

use sapwood_proto::params::LoraUse;

use super::options::{adapter, load_with, with_adapters};
use super::reuse::{Answer, Bench, Equality, generated, text};
use super::*;
use crate::Config;
use crate::api::GenerationRequest;

/// Strong enough that a token computed with another set is found.
const SCALE: f32 = 10.0;

fn with(lora: Option<Vec<LoraUse>>, request: GenerationRequest) -> GenerationRequest {
    let mut request = request;
    request.params.lora = lora;
    request
}

fn sets() -> [Option<Vec<LoraUse>>; 4] {
    let two = LoraUse::named("lora-sets-two");
    [
        None,
        Some(vec![]),
        Some(vec![two.clone().scaled(SCALE)]),
        Some(vec![
            LoraUse::named("lora-sets-one").scaled(-SCALE),
            two.scaled(SCALE),
        ]),
    ]
}

fn far(a: &Answer, b: &Answer) -> bool {
    let all = a.choices.iter().flatten().zip(b.choices.iter().flatten());
    let mut differ = all.map(|(a, b)| a.0 != b.0 || (a.1 - b.1).abs() > 0.1);
    differ.any(|differs| differs)
}

#[test]
fn requests_with_different_adapters_run_together_as_alone() {
    let shape = RandomModelShape::tiny();
    let (one, two) = (
        adapter("lora-sets-one", &shape, 1),
        adapter("lora-sets-two", &shape, 9),
    );
    for cache_tokens in [None, Some(1024)] {
        let mut options = LoadOptions {
            cache_tokens,
            ..with_adapters(&[(&one, f64::from(SCALE)), (&two, 1.0)])
        };
        options.lora[1].apply = false;
        for (adapter, name) in options
            .lora
            .iter_mut()
            .zip(["lora-sets-one", "lora-sets-two"])
        {
            adapter.name = Some(name.to_owned());
        }
        let bench = || Bench::of(load_with(tiny(), &options).unwrap(), Config::default());
        let prompt = text(1, 60);
        let asked = |set: &Option<Vec<LoraUse>>| with(set.clone(), generated(&prompt, 12, 2));
        let alone: Vec<_> = sets()
            .iter()
            .map(|set| bench().answers(vec![asked(set)]).remove(0))
            .collect();
        for (at, one) in alone.iter().enumerate() {
            for other in &alone[..at] {
                assert!(far(one, other), "not told apart: {one:?} {other:?}");
            }
        }
        let mut together = bench();
        for round in 0..3 {
            let answers = together.answers(sets().iter().map(asked).collect());
            for (answer, alone) in answers.iter().zip(&alone) {
                let what = format!("cache {cache_tokens:?}, round {round}");
                // Matrices of F32, which ggml multiplies with one token in another way than with several.
                answer.assert_as(alone, Equality::Within(0.02), &what);
                // The last token of the prompt is computed again.
                assert_eq!(answer.cached, if round > 0 { 59 } else { 0 });
            }
        }
    }
}

#[test]
fn an_adapter_that_is_not_applied_changes_nothing_until_it_is_chosen() {
    let shape = RandomModelShape::tiny();
    let one = adapter("lora-unapplied", &shape, 1);
    let mut options = with_adapters(&[(&one, f64::from(SCALE))]);
    let answer = |options: &LoadOptions, lora| {
        let model = load_with(tiny(), options).unwrap();
        let request = with(lora, generated(&text(1, 20), 5, 1));
        let mut bench = Bench::of(model, Config::default());
        (bench.answers(vec![request]).remove(0), bench.equality)
    };
    let name = options.lora[0].shown_name();
    let (applied, _) = answer(&options, None);
    options.lora[0].apply = false;
    let (plain, equality) = answer(&super::options(), None);
    let (unapplied, _) = answer(&options, None);
    unapplied.assert_as(&plain, equality, "not applied");
    let (chosen, _) = answer(&options, Some(vec![LoraUse::named(name)]));
    chosen.assert_as(&applied, equality, "chosen, with its own scale");
    assert!(far(&applied, &plain));
}
