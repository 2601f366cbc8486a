//! Models whose slots lose what they had before they went on: recurrent ones, and those with a sliding window.

use super::harness::{Bench, request_for};
use crate::scripted::{Config as Script, Script as Name, ScriptedTokenizer};

#[test]
fn d_48_an_answer_is_regenerated_and_a_turn_edited_from_saved_states() {
    for (truncates, window_tokens) in [(false, 0), (true, 8)] {
        regenerate_and_edit(Script {
            truncates,
            window_tokens,
            saves: true,
            ..Script::default()
        });
    }
}

fn regenerate_and_edit(script: Script) {
    let mut bench = Bench::new(script);
    let first = "a question that is longer than thirty-two tokens";
    let length = first.len() as u32 + 1;
    let cached = |bench: &mut Bench, prompt: &str| {
        let answer = bench.answer(request_for(prompt));
        (
            answer.text().to_owned(),
            answer.usage.unwrap().cached_tokens,
        )
    };
    assert_eq!(cached(&mut bench, first).1, 0);
    assert_eq!(
        cached(&mut bench, first),
        (first.to_owned(), length - 1),
        "regenerated"
    );
    let turn = |question: &str| format!("{first}{first}{question}");
    assert_eq!(cached(&mut bench, &turn("a second one")).1, 2 * length - 1);
    // The second turn has gone on from there, and another one still can.
    assert_eq!(
        cached(&mut bench, &turn("another one")).1,
        2 * length - 1,
        "edited"
    );
}

/// A prompt of which the slot was taken, with another end: it goes on from the last checkpoint within.
#[test]
fn d_48_a_long_prompt_with_another_end_goes_on_from_within() {
    let document = "0123456789abcdef".repeat(300);
    for (truncates, window_tokens) in [(false, 0), (true, 100)] {
        let script = Script {
            truncates,
            window_tokens,
            saves: true,
            script: Name::Tokens,
            tokenizer: Some(ScriptedTokenizer::Bytes),
            count: 20,
            context_tokens: 8192,
            parallel: 1,
            kept_prefixes: 0,
            ..Script::default()
        };
        let mut bench = Bench::new(script);
        let mut cached = |prompt: String| {
            let answer = bench.answer(request_for(&prompt));
            let usage = answer.usage.unwrap();
            (usage.prompt_tokens, usage.cached_tokens)
        };
        assert_eq!(cached(format!("{document} first question")), (4816, 0));
        let (tokens, found) = cached(format!("{document} another question"));
        assert_eq!((tokens, found), (4818, 4096), "{truncates}");
        // In a slot that was taken meanwhile, by another document.
        assert_eq!(cached(document.to_uppercase()).1, 0);
        let (_, found) = cached(format!("{document} first question"));
        assert_eq!(found, 4815, "{truncates}");
    }
}

/// Users of one system prompt, each with a question of their own.
#[test]
fn d_48_a_third_prompt_begins_where_the_second_departed_from_the_first() {
    let system = "0123456789abcdef".repeat(60);
    for (truncates, window_tokens, kept_prefixes) in [(false, 0, 4), (true, 100, 4), (true, 100, 0)]
    {
        let script = Script {
            truncates,
            window_tokens,
            saves: true,
            script: Name::Tokens,
            tokenizer: Some(ScriptedTokenizer::Bytes),
            count: 20,
            context_tokens: 8192,
            parallel: 2,
            kept_prefixes,
            ..Script::default()
        };
        let mut bench = Bench::new(script);
        let cached: Vec<u32> = [
            "a question",
            "borrowed words",
            "counted sheep",
            "delayed again",
        ]
        .map(|question| {
            let answer = bench.answer(request_for(&format!("{system}{question}")));
            answer.usage.unwrap().cached_tokens
        })
        .into();
        // BOS is a token too.
        assert_eq!(cached[..2], [0, 0], "{truncates}");
        assert!(
            cached[2] >= 960 && cached[3] >= 960,
            "{truncates} {kept_prefixes}: {cached:?}"
        );
    }
}
