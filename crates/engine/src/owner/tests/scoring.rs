//! Tokens that are scored instead of generated.

use super::harness::{Bench, read, request_for};
use crate::api::{ChoiceEnd, EventKind, FinishReason, GenerationRequest, Prompt, Sampled};
use crate::scripted::{Config as Script, Script as Name};
use crate::{Config, RequestHandle};

fn wanders() -> Script {
    Script {
        script: Name::Tokens,
        gap: 2.0,
        vocab: 1024,
        ..Script::default()
    }
}

fn score(prompt: &[u32], scored: &[u32]) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Tokens(prompt.to_vec()));
    request.scored = Some(scored.to_vec());
    request
}

fn tokens(handle: &mut RequestHandle) -> Vec<Sampled> {
    let mut all = Vec::new();
    while let Some(event) = handle.try_next() {
        if let EventKind::Tokens(tokens) = event.kind {
            all.extend(tokens.tokens);
        }
    }
    all
}

fn scores(bench: &mut Bench, prompt: &[u32], scored: &[u32]) -> Vec<f32> {
    let mut handle = bench.submit(score(prompt, scored));
    bench.settle();
    let tokens = tokens(&mut handle);
    let ids: Vec<_> = tokens.iter().map(|token| token.id).collect();
    assert_eq!(ids, scored);
    tokens.iter().map(|token| token.logprob).collect()
}

#[test]
fn lm_311_each_scored_token_is_reported_once_in_order_and_the_last_ends_with_stop() {
    let mut bench = Bench::new(Script::default());
    let mut request = score(&[256, 97], &[98, 257, 99, 98]);
    // Parameters of generation have no effect.
    (request.params.max_tokens, request.params.stop) = (Some(1), vec!["b".to_owned()]);
    request.params.stop_sequences = vec![vec![98]];
    let answer = bench.answer(request);
    assert_eq!(answer.choices[0].1, [98, 257, 99, 98]);
    assert_eq!(answer.text(), "bcb");
    let finish = ChoiceEnd {
        reason: FinishReason::Stop,
        stop: None,
    };
    assert_eq!(answer.choices[0].2, Some(finish));
    let usage = answer.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (2, 4));
    assert!(bench.owner.is_empty());
}

#[test]
fn lm_311_one_prefill_gives_every_row() {
    let mut bench = Bench::new(wanders());
    let mut handle = bench.submit(score(&[1; 10], &[2; 20]));
    let report = bench.step();
    assert_eq!(
        report.prefilled,
        [(0, 29)],
        "the row of the last token is not computed"
    );
    assert_eq!(report.finished, [0]);
    assert_eq!(tokens(&mut handle).len(), 20);
}

/// The probabilities of all tokens at one position sum to one.
#[test]
fn lm_312_a_score_is_the_logprob_over_the_whole_vocabulary_without_bias() {
    let mut bench = Bench::new(wanders());
    let vocabulary = bench.engine.info().vocabulary_tokens;
    let prompt = [5, 6, 7];
    let mut total = 0.0;
    for token in 0..vocabulary {
        let mut request = score(&prompt, &[token]);
        request.params.logit_bias = [(token, 50.0)].into();
        let mut handle = bench.submit(request);
        bench.settle();
        total += f64::from(tokens(&mut handle)[0].logprob).exp();
    }
    assert!((total - 1.0).abs() < 1e-3, "{total}");
}

#[test]
fn lm_312_with_an_empty_prompt_the_first_score_is_zero() {
    let mut bench = Bench::new(wanders());
    assert_eq!(scores(&mut bench, &[], &[9]), [0.0]);
    let score_only = scores(&mut bench, &[], &[9, 8, 7]);
    assert_eq!(score_only[0], 0.0);
    assert_eq!(score_only[1..], scores(&mut bench, &[9], &[8, 7]));
    assert!(score_only[1] < 0.0);
}

#[test]
fn lm_314_scoring_what_was_generated_gives_the_logprobs_of_generating() {
    for script in [wanders(), Script::default()] {
        let mut bench = Bench::new(script);
        let mut request = request_for("hello there");
        (request.params.top_logprobs, request.params.max_tokens) = (Some(3), Some(12));
        let prompt = {
            let vocabulary = bench.engine.vocabulary();
            let mut prompt: Vec<u32> = vocabulary.bos().into_iter().collect();
            prompt.extend(vocabulary.tokenize("hello there", false));
            prompt
        };
        let mut handle = bench.submit(request);
        bench.settle();
        let generated = tokens(&mut handle);
        let ids: Vec<_> = generated.iter().map(|token| token.id).collect();
        let mut request = score(&prompt, &ids);
        request.params.top_logprobs = Some(3);
        let mut handle = bench.submit(request);
        bench.settle();
        assert_eq!(tokens(&mut handle), generated);
    }
}

/// LM-609: without being requested, and for requests submitted at the same time.
#[test]
fn lm_314_concurrent_requests_with_a_common_prefix_prefill_it_once() {
    let mut bench = Bench::new(wanders());
    let prompt: Vec<u32> = (0..400).collect();
    let mut handles: Vec<_> = (0..20)
        .map(|index| bench.submit(score(&prompt, &[index, index + 1])))
        .collect();
    let mut generating = GenerationRequest::new(Prompt::Tokens(prompt.clone()));
    generating.params.max_tokens = Some(4);
    handles.push(bench.submit(generating));
    let computed: u32 = bench
        .settle()
        .iter()
        .flat_map(|report| &report.prefilled)
        .map(|(_, tokens)| tokens)
        .sum();
    assert!(computed < 400 + 21 * 4, "{computed}");
    for (index, handle) in (0..20).zip(&mut handles) {
        let together: Vec<_> = tokens(handle).iter().map(|token| token.logprob).collect();
        let alone = scores(&mut Bench::new(wanders()), &prompt, &[index, index + 1]);
        assert_eq!(together, alone);
    }
}

#[test]
fn a_request_that_awaits_a_prefix_continues_when_its_leader_ends() {
    let mut bench = Bench::new(wanders());
    let prompt: Vec<u32> = (0..3000).map(|index| index % 1000).collect();
    let leader = bench.submit(score(&prompt, &[1]));
    let mut follower = bench.submit(score(&prompt, &[2]));
    assert_eq!(bench.step().admitted, [0]);
    drop(leader);
    bench.settle();
    assert_eq!(tokens(&mut follower).len(), 1);
    assert!(bench.owner.is_empty());
}

#[test]
fn lm_312_the_first_scored_token_is_no_part_of_an_empty_prompt() {
    let bench = Bench::new(wanders());
    for (prompt, tokens) in [(&[][..], 0), (&[5], 1)] {
        assert_eq!(bench.submit(score(prompt, &[7, 8])).prompt_tokens(), tokens);
    }
}

/// Many steps, a pace that makes it wait, few cells, and sequences that cannot be truncated.
fn ways() -> [(Script, Config); 4] {
    let small = Script {
        batch_tokens: 16,
        parallel: 16,
        ..wanders()
    };
    let paced = Script {
        tokens_per_s: 1000.0,
        ..wanders()
    };
    let tight = Script {
        context_tokens: 120,
        cells: Some(150),
        parallel: 2,
        ..wanders()
    };
    let recurrent = Script {
        truncates: false,
        ..paced.clone()
    };
    [
        (small, Config::default()),
        (paced, Config::default()),
        (tight, Config::default()),
        (recurrent, Config::default()),
    ]
}

#[test]
fn lm_312_scores_do_not_depend_on_how_they_are_computed() {
    let scored: Vec<u32> = (0..90).map(|index| index * 7).collect();
    let expected = scores(&mut Bench::new(wanders()), &[3, 1], &scored);
    for (script, config) in ways() {
        let mut bench = Bench::with(script, config);
        let mut beside = bench.submit(score(&[3, 2], &scored));
        assert_eq!(scores(&mut bench, &[3, 1], &scored), expected);
        assert_eq!(tokens(&mut beside).len(), 90);
        assert!(bench.owner.is_empty());
    }
}

/// LM-506, LM-607.
#[test]
fn scoring_parks_for_a_slow_reader_and_is_cancelled_without_one() {
    let script = Script {
        batch_tokens: 4,
        parallel: 4,
        ..wanders()
    };
    let config = Config {
        outbox_events: 2,
        ..Config::default()
    };
    let mut bench = Bench::with(script, config);
    let mut slow = bench.submit(score(&[1], &[2; 100]));
    bench.settle();
    let first = read(&mut slow).choices[0].1.len();
    assert!(first < 100, "{first}");
    let parked = bench.step();
    assert!(parked.finished.is_empty());
    drop(slow);
    assert_eq!(bench.step().cancelled, [0]);
    assert!(bench.owner.is_empty());
}

/// Returns prompt logprobs, output, and the number of cached prompt tokens of a request.
fn scored(bench: &mut Bench, mut request: GenerationRequest) -> (Vec<f32>, Vec<u32>, u32) {
    request.prompt_logprobs = true;
    let mut handle = bench.submit(request);
    bench.settle();
    let (mut prompt, mut output, mut cached) = (Vec::new(), Vec::new(), None);
    while let Some(event) = handle.try_next() {
        match event.kind {
            EventKind::Tokens(tokens) => {
                let first = output.is_empty() && event.choice == 0;
                assert_eq!(
                    tokens.prompt.is_some(),
                    first,
                    "once, with the first tokens"
                );
                prompt.extend(
                    tokens
                        .prompt
                        .iter()
                        .flat_map(|prompt| prompt.iter().copied()),
                );
                if event.choice == 0 {
                    output.extend(tokens.tokens.iter().map(|token| token.id));
                }
            }
            EventKind::Usage(usage) => cached = Some(usage.cached_tokens),
            EventKind::Finish(_) | EventKind::Report(_) => {}
            EventKind::Failed(error) | EventKind::Error(error) => panic!("{error}"),
        }
    }
    (prompt, output, cached.unwrap())
}

fn generate(prompt: &[u32]) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Tokens(prompt.to_vec()));
    request.params.max_tokens = Some(5);
    request.params.temperature = Some(0.0);
    request
}

/// The probabilities of all tokens at one position of a prompt sum to one, with or without a bias.
#[test]
fn lm_974_prompt_logprobs_are_over_the_whole_vocabulary_without_bias() {
    let mut bench = Bench::new(wanders());
    let vocabulary = bench.engine.info().vocabulary_tokens;
    let mut total = 0.0;
    for token in 0..vocabulary {
        let mut request = generate(&[5, 6, token]);
        request.params.logit_bias = [(token, 50.0)].into();
        let (prompt, _, cached) = scored(&mut bench, request);
        assert_eq!((prompt.len(), cached), (2, 0));
        total += f64::from(prompt[1]).exp();
    }
    assert!((total - 1.0).abs() < 1e-3, "{total}");
}

/// LM-609: cached tokens are computed again, in any number of steps, and the output is unchanged.
#[test]
fn lm_974_prompt_logprobs_do_not_depend_on_how_they_are_computed() {
    let prompt: Vec<u32> = (0..90).map(|index| index * 7).collect();
    let expected = scored(&mut Bench::new(wanders()), generate(&prompt));
    assert_eq!((expected.0.len(), expected.2), (89, 0));
    assert!(expected.0.iter().all(|logprob| *logprob < 0.0));
    let ways = ways().into_iter().chain([(wanders(), Config::default())]);
    for (script, config) in ways {
        let mut bench = Bench::with(script, config);
        let mut before = bench.submit(generate(&prompt));
        bench.settle();
        let output: Vec<u32> = tokens(&mut before).iter().map(|token| token.id).collect();
        assert_eq!(output, expected.1);
        let _beside = bench.submit(generate(&[&prompt[..40], &[1; 30]].concat()));
        assert_eq!(scored(&mut bench, generate(&prompt)), expected);
        let mut several = generate(&prompt);
        several.params.n = Some(3);
        let (weights, _, _) = scored(&mut bench, several);
        assert_eq!(weights, expected.0, "one of the choices reports them");
        assert!(bench.owner.is_empty());
    }
}

/// LM-312
#[test]
fn lm_974_a_prompt_of_one_token_has_no_logprobs_and_scoring_includes_them() {
    let mut bench = Bench::new(wanders());
    assert!(scored(&mut bench, generate(&[5])).0.is_empty());
    let (prompt, output, _) = scored(&mut bench, score(&[5, 6, 7], &[8, 9]));
    assert_eq!((prompt.len(), output), (2, vec![8, 9]));
    assert_eq!(prompt, scored(&mut bench, generate(&[5, 6, 7])).0);
    let (prompt, output, _) = scored(&mut bench, score(&[], &[8, 9]));
    assert!(prompt.is_empty() && output == [8, 9]);
}
