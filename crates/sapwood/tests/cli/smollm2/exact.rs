//! Answers are equal to the last bit whatever is computed beside them, and whatever of their prompt is cached.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::SmolLm2;
use crate::process::folder;

/// A prompt of so many words, without meaning.
fn prompt(seed: usize, words: usize) -> String {
    const WORDS: [&str; 11] = [
        "the", "river", "of", "a", "morning", "in", "which", "nobody", "had", "seen", "boats",
    ];
    let word = |place: usize| WORDS[(place * place * 7 + place * seed + seed) % WORDS.len()];
    (0..words).map(word).collect::<Vec<_>>().join(" ")
}

/// Text, tokens and log-probabilities of an answer.
fn ask(model: &SmolLm2, prompt: &str, temperature: f64) -> Value {
    let sampling = json!({
        "temperature": temperature, "seed": 5, "max_tokens": 12, "logprobs": 3, "ignore_eos": true,
    });
    let body = json!({
        "text_input": prompt, "return_logprobs": true, "sampling_parameters": sampling.to_string(),
    });
    let answer = model.post("/v2/models/smollm2/generate", &body);
    let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{answer}"));
    let tokens = answer["logprobs"].as_str();
    let tokens = tokens.map(|rows| rows.matches("\"rank\":1,").count());
    assert_eq!(tokens, Some(12), "{answer}");
    json!([answer["text_output"], answer["logprobs"]])
}

/// Long and short, some with the same beginning; more tokens and cells than one part of llama.cpp's own attention has.
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn d_48_smollm2_answers_are_equal_to_the_last_bit_whatever_is_beside_them() {
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    let model = SmolLm2::start("smollm2-exact");
    let config = model.serving.get("/v2/models/smollm2/config", "");
    let promise = r#""deterministic":{"string_value":"true"}"#;
    assert!(config.contains(promise), "{config}");
    let long = prompt(1, 600);
    let questions: Vec<(String, f64)> = [
        (prompt(2, 5), 0.0),
        (prompt(3, 90), 0.8),
        (long.clone(), 0.0),
        (format!("{long} {}", prompt(4, 70)), 0.8),
        (prompt(5, 300), 0.0),
        (prompt(6, 64), 0.0),
    ]
    .into();
    let ask_one = |(prompt, temperature): &(String, f64)| ask(&model, prompt, *temperature);
    let alone: Vec<Value> = questions.iter().map(ask_one).collect();
    let cached: Vec<Value> = questions.iter().map(ask_one).collect();
    assert!(cached == alone, "{cached:#?} {alone:#?}");
    for round in 0..2 {
        let beside: Vec<Value> = thread::scope(|scope| {
            // Others, which are not looked at, and take the place of what is cached.
            for other in 0..6 {
                let (model, text) = (&model, prompt(20 + 6 * round + other, 150));
                scope.spawn(move || ask(model, &text, 1.0));
            }
            let asked: Vec<_> = questions
                .iter()
                .map(|question| scope.spawn(|| ask_one(question)))
                .collect();
            asked.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert!(beside == alone, "{beside:#?} {alone:#?}");
    }
}

/// The number and the bytes of the files in a folder and those below.
fn files(folder: &Path) -> (usize, u64) {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    entries.fold((0, 0), |(number, bytes), entry| {
        let of_entry = match entry.file_type().unwrap().is_dir() {
            true => files(&entry.path()),
            false => (1, entry.metadata().unwrap().len()),
        };
        (number + of_entry.0, bytes + of_entry.1)
    })
}

/// Slots have cells of their own, so that each prefix comes back to other cells than those it was computed in.
#[test]
#[ignore = "needs the model that `cargo xtask ci --lane embedded` installs"]
fn d_48_smollm2_answers_are_equal_to_the_last_bit_after_a_restart_over_a_disk() {
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    // One is asked again, the others go on.
    let turns = [
        (prompt(1, 400), String::new()),
        (prompt(5, 150), format!(" {}", prompt(4, 70))),
        (prompt(3, 90), format!(" {}", prompt(6, 200))),
    ];
    let asked = |model: &SmolLm2| -> Vec<Value> {
        let ask = |(begin, rest): &(String, String)| ask(model, &format!("{begin}{rest}"), 0.0);
        // In another order than they were computed in.
        turns.iter().rev().map(ask).collect()
    };
    let cold = SmolLm2::start("smollm2-cold");
    let expected = asked(&cold);
    let hits = cold.serving.metric("sapwood_prefix_cache_hits_total");
    assert!(hits < 10.0, "{hits} tokens were not computed");
    drop(cold);

    let here = folder("smollm2-disk");
    let prefixes = here.join("prefixes");
    let engine = format!("prefix_dir = {prefixes:?}");
    let first = SmolLm2::start_in(here.clone(), &engine);
    for (begin, _) in &turns {
        ask(&first, begin, 0.0);
    }
    first.serving.signal(Signal::TERM);
    let (code, log) = first.serving.end();
    assert_eq!(code, 0, "{log}");

    let again = SmolLm2::start_in(here, &engine);
    let (number, bytes) = files(&prefixes);
    // Beside its state, a file has tokens and what the model is. What is read before a prompt asks for it is not waited for.
    let states = (bytes - 16_384 * number as u64) as f64;
    let read = || {
        let read = "sapwood_prefix_cache_disk_read_bytes_total";
        again.serving.metric(read)
    };
    let begun = Instant::now();
    while read() < states {
        let waited = begun.elapsed();
        assert!(waited < Duration::from_secs(60), "{} of {states}", read());
        thread::yield_now();
    }
    let answers = asked(&again);
    assert!(answers == expected, "{answers:#?} {expected:#?}");
    let restored = again
        .serving
        .metric("sapwood_prefix_cache_restored_tokens_total");
    // A word is a token at least, and the last one of a prompt is always computed.
    assert!(restored >= 639.0, "{restored}");
    let failures = again
        .serving
        .metric("sapwood_prefix_cache_disk_failures_total");
    assert_eq!(failures, 0.0);
}
