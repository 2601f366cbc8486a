//! Fill in the middle with llama.cpp's vocabularies: the order of tokens, texts that spell control tokens, models without.

use super::options::load_with;
use super::random::{FIM_PAD, FIM_PREFIX};
use super::reuse::{Bench, generated};
use super::*;
use crate::Config;
use crate::api::{EngineError, GenerationRequest, Prompt};
use crate::infill::infill_prompt;
use sapwood_proto::error_reason::ErrorReason;

const PREFIX: Token = FIM_PREFIX;
const SUFFIX: Token = FIM_PREFIX + 1;
const MIDDLE: Token = FIM_PREFIX + 2;
/// The BOS token of random models.
const BEGIN: Token = IM_START + 2;
/// What SentencePiece has in place of a space, and before each text.
const SPACE: Token = 259;

fn model(shape: &RandomModelShape, suffix_first: Option<bool>) -> Embedded {
    let llama = LlamaOptions {
        spm_infill: suffix_first,
        ..batches(64)
    };
    let options = LoadOptions { llama, ..options() };
    load_with(written(shape).leak(), &options).unwrap()
}

fn prompt(model: &Embedded, prefix: &str, suffix: &str) -> Result<Vec<Token>, EngineError> {
    let vocabulary = model.vocabulary();
    infill_prompt(&*vocabulary, vocabulary.bos(), prefix, suffix)
}

/// The ids of random vocabularies are those of the bytes' characters in the alphabet of such files, which has printable
/// ASCII in its own place.
fn letters(text: &str) -> Vec<Token> {
    text.bytes().map(Token::from).collect()
}

#[test]
fn prompts_have_llama_servers_orders() {
    let [byte_pairs, marked] = ["gpt2", "llama"].map(RandomModelShape::tiny_infill);
    let begun = RandomModelShape {
        flags: vec![("tokenizer.ggml.add_bos_token".to_owned(), true)],
        ..byte_pairs.clone()
    };
    let [before, behind] = ["ab", "c"].map(letters);
    let usual = [&[PREFIX][..], &before, &[SUFFIX], &behind, &[MIDDLE]].concat();
    let marks = [
        &[BEGIN, PREFIX, SPACE][..],
        &before,
        &[SUFFIX, SPACE],
        &behind,
        &[MIDDLE],
    ];
    let marks = marks.concat();
    let turned = [
        &[BEGIN, SUFFIX, SPACE][..],
        &behind,
        &[PREFIX, SPACE],
        &before,
        &[MIDDLE],
    ];
    for (shape, suffix_first, expected) in [
        (&byte_pairs, None, &usual),
        (&byte_pairs, Some(false), &usual),
        (&begun, None, &[&[BEGIN][..], &usual].concat()),
        (&marked, None, &marks),
        (&marked, Some(true), &turned.concat()),
    ] {
        let model = model(shape, suffix_first);
        assert_eq!(
            &prompt(&model, "ab", "c").unwrap(),
            expected,
            "{suffix_first:?}"
        );
        assert!(model.vocabulary().is_end(FIM_PAD));
        assert!(
            [PREFIX, SUFFIX, MIDDLE]
                .iter()
                .all(|token| !model.vocabulary().is_end(*token))
        );
    }
}

/// Control tokens, and those that a file has as text, which llama.cpp finds in every text, or as an ordinary token.
#[test]
fn texts_that_spell_the_tokens_are_text() {
    for control_type in [3, 4, 1] {
        for kind in ["gpt2", "llama"] {
            let named = ["fim_pre", "fim_suf", "fim_mid"].into_iter().zip(PREFIX..);
            let shape = RandomModelShape {
                control_type,
                // Named, because what llama.cpp finds by its text becomes a control token.
                numbers: named
                    .map(|(key, token)| (format!("tokenizer.ggml.{key}_token_id"), token))
                    .collect(),
                ..RandomModelShape::tiny_infill(kind)
            };
            let model = model(&shape, None);
            let texts = ["a<|fim_middle|>b", "<|fim_suffix|><|fim_prefix|>"];
            let tokens = prompt(&model, texts[0], texts[1]).unwrap();
            let mark = |token: &Token| (PREFIX..=MIDDLE).contains(token);
            let marks: Vec<Token> = tokens.iter().copied().filter(mark).collect();
            let what = format!("{kind}, {control_type}: {tokens:?}");
            assert_eq!(marks, [PREFIX, SUFFIX, MIDDLE], "{what}");
            if (kind, control_type) == ("llama", 4) {
                // They are cut in two, and the second half begins with a space.
                continue;
            }
            let parts = tokens.split(|token| mark(token) || *token == BEGIN);
            let parts: Vec<_> = parts.filter(|part| !part.is_empty()).collect();
            let expected = texts.map(|text| {
                let space = (kind == "llama").then_some(SPACE);
                space.into_iter().chain(letters(text)).collect::<Vec<_>>()
            });
            assert_eq!(parts, expected, "{what}");
        }
    }
}

#[test]
fn a_model_without_the_tokens_refuses_a_suffix() {
    let lacking = RandomModelShape {
        controls: vec!["<|fim_prefix|>", "<|fim_suffix|>"],
        ..RandomModelShape::tiny_infill("gpt2")
    };
    for shape in [RandomModelShape::tiny(), lacking] {
        let bench = Bench::of(model(&shape, None), Config::default());
        let prompt = Prompt::Infill {
            prefix: "a".to_owned(),
            suffix: "b".to_owned(),
        };
        let error = bench.engine.submit(GenerationRequest::new(prompt)).err();
        assert_eq!(error.unwrap().reason, ErrorReason::NO_INFILL);
    }
}

/// `<|im_end|>` is an EOG token.
#[test]
fn a_model_whose_tokens_mean_two_things_has_none() {
    for ids in [
        [PREFIX, PREFIX, MIDDLE],
        [PREFIX, SUFFIX, IM_START + 1],
        [BEGIN, SUFFIX, MIDDLE],
        [PREFIX, FIM_PAD, MIDDLE],
    ] {
        let named = ["fim_pre", "fim_suf", "fim_mid"].into_iter().zip(ids);
        let shape = RandomModelShape {
            numbers: named
                .map(|(key, token)| (format!("tokenizer.ggml.{key}_token_id"), token))
                .collect(),
            flags: vec![("tokenizer.ggml.add_bos_token".to_owned(), true)],
            ..RandomModelShape::tiny_infill("gpt2")
        };
        assert_eq!(model(&shape, None).vocabulary().infill(), None, "{ids:?}");
        #[cfg(feature = "tokenizer")]
        {
            let read = crate::gguf_vocabulary::GgufVocabulary::of_header(&written(&shape)[..]);
            assert_eq!(read.unwrap().infill(), None, "{ids:?}");
        }
    }
}

/// The tokens of a request are those of its prompt, and are cached as others are.
#[test]
fn requests_are_computed_as_the_tokens_of_their_prompt() {
    let shape = RandomModelShape::tiny_infill("gpt2");
    let (prefix, suffix) = ("what stands before it ", " and what stands behind");
    let filled = || {
        let prompt = Prompt::Infill {
            prefix: prefix.to_owned(),
            suffix: suffix.to_owned(),
        };
        GenerationRequest {
            prompt,
            ..generated(&[], 12, 2)
        }
    };
    let model = model(&shape, None);
    let tokens = prompt(&model, prefix, suffix).unwrap();
    let mut bench = Bench::of(model, Config::default());
    let cold = bench.answers(vec![generated(&tokens, 12, 2)]).remove(0);
    let answer = bench.answers(vec![filled()]).remove(0);
    assert_eq!(answer.cached as usize, tokens.len() - 1);
    answer.assert_as(&cold, bench.equality, "cached");
    let mut scoring = filled();
    scoring.params.n = None;
    scoring.scored = Some(cold.choices[0].iter().map(|(token, _)| *token).collect());
    let scored = bench.answers(vec![scoring]).remove(0);
    assert_eq!(scored.choices[0].len(), 12);
    for (scored, sampled) in scored.choices[0].iter().zip(&cold.choices[0]) {
        assert!(
            (scored.1 - sampled.1).abs() < 0.02,
            "{scored:?}, {sampled:?}"
        );
    }
}

/// `fim_pre_token_id` and the older `prefix_token_id`, of which llama.cpp reads the older one last.
#[cfg(feature = "tokenizer")]
#[test]
fn ai_102_headers_have_the_tokens_of_llama_cpp() {
    use crate::gguf_vocabulary::GgufVocabulary;
    let newer = ["fim_pre", "fim_suf", "fim_mid"];
    let older = ["prefix", "suffix", "middle"];
    type Case<'a> = (&'a [(&'a str, u32)], Option<[Token; 3]>);
    // Further control tokens, and an ordinary one.
    let [a, b, c] = [0, 1, 2].map(|nth| FIM_PAD + 1 + nth);
    let cases: [Case<'_>; 8] = [
        (&[], Some([PREFIX, SUFFIX, MIDDLE])),
        (&[(newer[0], a)], Some([a, SUFFIX, MIDDLE])),
        (&[(older[1], b)], Some([PREFIX, b, MIDDLE])),
        (&[(newer[2], a), (older[2], b)], Some([PREFIX, SUFFIX, b])),
        (&[(newer[2], a), (older[2], 400)], Some([PREFIX, SUFFIX, a])),
        (&[(older[1], 8)], None),
        (
            &[(newer[0], 400), (older[0], 401)],
            Some([PREFIX, SUFFIX, MIDDLE]),
        ),
        (
            &[(newer[1], a), (older[0], b), (newer[2], c)],
            Some([b, a, c]),
        ),
    ];
    for kind in ["gpt2", "llama"] {
        let shapes = cases.iter().map(|(numbers, expected)| {
            let numbers = numbers.iter();
            let numbers = numbers.map(|(key, id)| (format!("tokenizer.ggml.{key}_token_id"), *id));
            let mut shape = RandomModelShape {
                numbers: numbers.collect(),
                ..RandomModelShape::tiny_infill(kind)
            };
            shape.controls.extend(["<|a|>", "<|b|>", "<|c|>"]);
            (shape, *expected)
        });
        let without = RandomModelShape {
            kind,
            ..RandomModelShape::tiny()
        };
        for (shape, expected) in shapes.chain([(without, None)]) {
            let read = GgufVocabulary::of_header(&written(&shape)[..]).unwrap();
            let expected =
                expected.and_then(|tokens| crate::infill::InfillTokens::of(tokens.map(Some)));
            let what = format!("{kind}, {:?}", shape.numbers);
            assert_eq!(read.infill(), expected, "{what}");
            assert_eq!(
                model(&shape, None).vocabulary().infill(),
                expected,
                "{what}"
            );
        }
    }
}
