//! D-48: equal text with a cold and a warm cache, with a vocabulary as large as those of Qwen, and with SentencePiece.

use super::reuse::{Bench, generated, text};
use super::*;
use crate::Config;
use crate::api::GenerationRequest;

/// Tokens from all over the vocabulary.
fn prompt(seed: u32) -> Vec<Token> {
    text(seed, 100).iter().map(|token| token * 607).collect()
}

/// At a temperature of 1 a random model draws from all of its tokens.
fn drawn(prompt: &[Token]) -> GenerationRequest {
    let mut request = generated(prompt, 10, 1);
    request.params.temperature = Some(1.0);
    request.params.seed = Some(3);
    request
}

#[test]
fn d_48_a_large_vocabulary_gives_equal_text() {
    let bytes: &'static [u8] = written(&RandomModelShape::many_tokens()).leak();
    // Loading takes most of the time of this test.
    let bench = |cache_tokens, kept_prefixes| {
        let options = LoadOptions {
            cache_tokens,
            kept_prefixes: Some(kept_prefixes),
            ..options()
        };
        let model = load("m", &ModelSource::Bytes(bytes), &options, &mut |_| true).unwrap();
        Bench::of(model, Config::default())
    };
    let prompts = [prompt(1), [&prompt(1)[..90], &prompt(2)[..10]].concat()];
    let ask = |bench: &mut Bench, prompt: &[Token]| bench.answers(vec![drawn(prompt)]).remove(0);
    let mut per_slot = bench(None, 4);
    let cold = [
        ask(&mut per_slot, &prompts[0]),
        ask(&mut bench(None, 4), &prompts[1]),
    ];
    let large = cold[0].choices[0].iter().filter(|it| it.0 > 1 << 16);
    assert!(large.count() > 2, "{:?}", cold[0]);
    let mut shared = bench(Some(1024), 0);
    ask(&mut shared, &prompts[0]);
    for warm in [&mut per_slot, &mut shared] {
        for (prompt, cold) in prompts.iter().zip(&cold) {
            let answer = ask(warm, prompt);
            answer.assert_as(cold, warm.equality, &format!("{:?}", warm.equality));
            assert!(answer.cached >= 89, "{answer:?}");
        }
    }
}

/// Pieces of words, and bytes for what has none.
#[test]
fn a_sentence_piece_vocabulary_falls_back_to_bytes() {
    let bytes: &'static [u8] = written(&RandomModelShape::tiny_sentence_piece()).leak();
    let model = load("m", &ModelSource::Bytes(bytes), &options(), &mut |_| true).unwrap();
    let vocabulary = model.vocabulary();
    let text = "the th\u{e9} \u{65e5}\u{1f980}";
    let tokens = vocabulary.tokenize(text, false);
    let received = tokens
        .iter()
        .flat_map(|&token| vocabulary.bytes(token).to_vec());
    let received = String::from_utf8(received.collect()).unwrap();
    assert_eq!(received.strip_prefix(' '), Some(text));
    // Two words, of which one goes on in bytes.
    assert!(tokens.len() < text.len(), "{tokens:?}");
    assert!(
        tokens.iter().any(|&token| token < 256) && tokens.iter().any(|&token| token > IM_START + 2)
    );
}
