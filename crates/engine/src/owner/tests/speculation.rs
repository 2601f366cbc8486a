//! Speculative decoding: the output is that of decoding without drafts.

use super::harness::{Bench, request_for};
use crate::scripted::Config as Script;
use crate::{Config, SpeculationMode};

fn config(speculation: SpeculationMode) -> Config {
    Config {
        speculation,
        ..Config::default()
    }
}

#[test]
fn an_answer_that_repeats_its_prompt_takes_few_steps() {
    let text = "the quick brown fox jumps over the lazy dog and the quick brown fox sleeps";
    let mut plain = Bench::with(Script::default(), config(SpeculationMode::Off));
    let mut drafting = Bench::with(Script::default(), config(SpeculationMode::Lookup));
    let expected = plain.answer(request_for(text));
    let answer = drafting.answer(request_for(text));
    assert_eq!(answer, expected);
    let steps = |bench: &Bench| bench.engine.stats().steps.get();
    assert!(steps(&drafting) * 2 < steps(&plain), "{}", steps(&drafting));
}
