//! Bad words with real sampling: no output contains one, whatever else is requested.

use proptest::prelude::*;
use sapwood_proto::steer::Mask;

use super::harness::{Answer, Bench, read, request_for};
use super::probe::{Probe, forced, free, masked, splice};
use crate::api::{EngineError, EventKind, FinishReason, GenerationRequest};
use crate::scripted::{Config as Script, Script as Name};

fn forbidding(text: &str, words: &[&str]) -> GenerationRequest {
    let mut request = request_for(text);
    request.params.bad_words = words.iter().map(|word| (*word).to_owned()).collect();
    request
}

fn echo() -> Bench {
    Bench::new(Script::default())
}

/// Every word of the vocabulary, and the EOG token, is equally likely.
fn wandering() -> Bench {
    Bench::new(Script {
        script: Name::Tokens,
        gap: 0.0,
        vocab: 1024,
        ..Script::default()
    })
}

/// Every token that a bias can forbid, except `spared`.
fn all_but(spared: u32) -> Vec<(u32, f32)> {
    let others = (0..258).filter(|&token| token != spared);
    others.map(|token| (token, f32::NEG_INFINITY)).collect()
}

#[test]
fn tr_401_a_bad_word_is_not_generated_and_the_script_continues() {
    for (text, words, expect) in [
        ("a cat sat", &["cat"][..], "a ca? sat"),
        ("a cat sat", &["cat", "a s"], "a ca? ?at"),
        ("a cat sat", &["c", "t s"], "a ?at ?at"),
        // The prompt does not count as output.
        ("t", &["tt", "at"], "t"),
        ("naïve", &["ï"], "na?ve"),
    ] {
        let answer = echo().answer(forbidding(text, words));
        let seen = answer.text();
        let like = |(seen, expect): (char, char)| expect == '?' || seen == expect;
        assert!(
            seen.chars().zip(expect.chars()).all(like),
            "{seen} {expect}"
        );
        let mut retained = words.iter().filter(|word| seen.contains(**word));
        assert_eq!(retained.next(), None, "{seen}");
        assert_eq!(
            answer.usage.unwrap().completion_tokens as usize,
            text.len() + 1
        );
    }
}

/// D-22: bad words are masked before log-probabilities are computed.
#[test]
fn tr_401_masked_tokens_are_not_in_the_top_list() {
    let mut bench = wandering();
    let mut request = forbidding("x", &[" the", "e"]);
    (
        request.params.max_tokens,
        request.params.top_logprobs,
        request.params.ignore_eos,
    ) = (Some(8), Some(1000), Some(true));
    let mut handle = bench.submit(request);
    bench.settle();
    let vocabulary = bench.engine.vocabulary();
    let mut seen = 0;
    while let Some(event) = handle.try_next() {
        let EventKind::Tokens(tokens) = event.kind else {
            continue;
        };
        for token in &tokens.tokens {
            let harmless = |&(id, _): &(u32, f32)| !vocabulary.bytes(id).contains(&b'e');
            assert!(token.top.len() < 1000 && token.top.iter().all(harmless));
            let total: f32 = token.top.iter().map(|(_, logprob)| logprob.exp()).sum();
            assert!((total - 1.0).abs() < 1e-3, "{total}");
            seen += 1;
        }
    }
    assert_eq!(seen, 8);
}

/// LM-305: if no token is allowed at all, this request fails; while the EOG token is allowed, it ends.
#[test]
fn tr_401_bad_words_that_allow_no_token_fail_only_their_request() {
    let refused = |words: &[&str], bias: Vec<(u32, f32)>| -> Answer {
        let mut bench = echo();
        let mut beside = bench.submit(request_for("ab"));
        let mut request = forbidding("aaaa", words);
        request.params.logit_bias = bias.into();
        let answer = bench.answer(request);
        assert_eq!(read(&mut beside).text(), "ab");
        answer
    };
    let answer = refused(&["aa"], all_but(97));
    assert_eq!(answer.text(), "a", "the output before the error is sent");
    let EngineError {
        code,
        reason,
        message,
        ..
    } = answer.error.unwrap();
    assert_eq!(
        (code.name(), reason.name()),
        ("invalid-request", "constraint_failed")
    );
    assert!(message.contains("bad_words"), "{message}");
    // A bias does not override the mask; the EOG token has no text.
    let mut endless = all_but(97);
    endless.retain(|(token, _)| *token != 257);
    endless.push((97, 1e20));
    let answer = refused(&["aa"], endless);
    let finish = answer.choices[0].2.clone().unwrap();
    assert_eq!((answer.text(), finish.reason), ("a", FinishReason::Stop));
}

#[test]
fn tr_401_bad_words_apply_with_masks_and_after_forced_tokens() {
    let mut probe = Probe::new();
    // After "ca", which the steerer forces, the model would sample "t".
    probe.pre = |round| Ok(forced(if round == 0 { &[99, 97] } else { &[] }));
    probe.mid = |round| {
        Ok(Some(if round == 2 {
            // Rewinds over the "a": "c" followed by "at" would be the word again.
            splice(3, &[97])
        } else {
            free()
        }))
    };
    let steered = |words: &[&str]| {
        let mut request = forbidding("xxtttt", words);
        request.steer = Some(Box::new(probe.clone()));
        request.params.max_tokens = Some(8);
        echo().answer(request)
    };
    let plain = steered(&[]);
    assert!(plain.text().contains("cat"), "{}", plain.text());
    let answer = steered(&["cat"]);
    assert!(
        answer.error.is_none() && !answer.text().contains("cat"),
        "{}",
        answer.text()
    );
    // If a mask and bad words together allow no token, the request is at fault: the mask alone allows one.
    let mut probe = Probe::new();
    probe.mid = |_| {
        let mut mask = Mask::none(258);
        mask.allow(97);
        Ok(Some(masked(mask)))
    };
    let mut request = forbidding("aaa", &["aa"]);
    request.steer = Some(Box::new(probe));
    let cause = echo().answer(request).error.unwrap();
    assert_eq!(
        (cause.code.name(), cause.reason.name()),
        ("invalid-request", "constraint_failed")
    );
}

#[test]
fn tr_401_bad_words_do_not_apply_to_scored_tokens() {
    let mut request = forbidding("x", &["a"]);
    request.scored = Some(vec![97, 98]);
    let answer = echo().answer(request);
    assert_eq!(answer.choices[0].1, [97, 98]);
    assert_eq!(answer.error, None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Words of the vocabulary, parts of them, and texts that only several tokens form.
    #[test]
    fn tr_401_no_output_contains_a_bad_word(
        seed in any::<u64>(),
        words in prop::collection::vec(
            prop::sample::select(&["e", "th", " the", "a ", "ba", "de fi", "o t", "s", "ing", " ", "ka", "zagoba", "é"][..]),
            1..6,
        ),
        n in 1..4_u32,
        limits in (prop_oneof![Just(0_u32), Just(5)], prop_oneof![Just(1.0_f32), Just(0.4)]),
    ) {
        let mut request = forbidding("x", &words);
        (request.params.n, request.params.max_tokens, request.params.ignore_eos) = (Some(n), Some(40), Some(true));
        request.params.temperature = Some(1.0);
        request.params.seed = Some(seed);
        (request.params.top_k, request.params.top_p) = (Some(limits.0), Some(limits.1));
        request.params.frequency_penalty = Some(if seed % 2 == 0 { 1.0 } else { 0.0 });
        let answer = wandering().answer(request);
        prop_assert_eq!(answer.error, None);
        for (text, ids, _) in &answer.choices {
            prop_assert_eq!(ids.len(), 40);
            for word in &words {
                prop_assert!(!text.contains(word), "{:?} in {:?}", word, text);
            }
        }
    }
}
