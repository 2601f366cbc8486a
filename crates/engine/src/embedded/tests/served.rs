//! The embedded model in an engine, as in production: threads, batches, cached prefixes.

use futures::StreamExt;
use futures::executor::block_on;
use sapwood_proto::steer::Token;

use super::{TEXT, loaded, options};
use crate::api::{EventKind, GenerationRequest, Prompt, TokenUsage};
use crate::{Config, Engine, RequestHandle};

fn engine() -> Engine {
    Engine::spawn(Box::new(loaded(&options())), Config::default()).unwrap()
}

fn request(prompt: Vec<Token>, max_tokens: u32) -> GenerationRequest {
    let mut request = GenerationRequest::new(Prompt::Tokens(prompt));
    request.params.temperature = Some(0.0);
    request.params.ignore_eos = Some(true);
    request.params.max_tokens = Some(max_tokens);
    request
}

fn answer(handle: RequestHandle) -> (Vec<Token>, TokenUsage) {
    let mut tokens = Vec::new();
    for event in block_on(handle.collect::<Vec<_>>()) {
        match event.kind {
            EventKind::Tokens(got) => tokens.extend(got.tokens.iter().map(|token| token.id)),
            EventKind::Finish(_) | EventKind::Report(_) => {}
            EventKind::Usage(usage) => return (tokens, usage),
            EventKind::Failed(error) | EventKind::Error(error) => panic!("{error}"),
        }
    }
    panic!("the stream ended early");
}

#[test]
fn a_second_turn_computes_only_new_tokens() {
    let engine = engine();
    let first = TEXT.repeat(8);
    let (answered, usage) = answer(engine.submit(request(first.clone(), 20)).unwrap());
    assert_eq!((answered.len(), usage.cached_tokens), (20, 0));
    let second = [first, answered, TEXT.to_vec()].concat();
    let tokens = second.len() as u32;
    let (_, usage) = answer(engine.submit(request(second, 1)).unwrap());
    assert!(tokens - usage.cached_tokens < 50, "{usage:?}");
}

/// Prompt logprobs equal the scores of the prompt's tokens, cached or not, in one step or in several.
#[test]
fn lm_974_prompt_logprobs_equal_scores_of_the_same_tokens() {
    let engine = engine();
    let prompt = TEXT.repeat(8);
    let received = |mut request: GenerationRequest| {
        request.params.top_logprobs = Some(0);
        let handle = engine.submit(request).unwrap();
        let (mut prompt, mut output) = (Vec::new(), Vec::new());
        for event in block_on(handle.collect::<Vec<_>>()) {
            if let EventKind::Tokens(tokens) = event.kind {
                prompt.extend(tokens.prompt.iter().flat_map(|prompt| prompt.to_vec()));
                output.extend(tokens.tokens.iter().map(|token| token.logprob));
            }
        }
        (prompt, output)
    };
    let mut scored = request(prompt[..1].to_vec(), 1);
    scored.scored = Some(prompt[1..].to_vec());
    let (_, scores) = received(scored);
    for _ in 0..2 {
        let mut asked = request(prompt.clone(), 3);
        asked.prompt_logprobs = true;
        let (weights, output) = received(asked);
        assert_eq!((weights.len(), output.len()), (prompt.len() - 1, 3));
        let per_slot = weights.iter().zip(&scores).map(|(a, b)| (a - b).abs());
        assert!(per_slot.fold(0.0, f32::max) < 1e-2);
    }
}

#[test]
fn requests_beyond_the_slots_get_equal_answers() {
    let engine = engine();
    let handles: Vec<RequestHandle> = (0..12)
        .map(|number| {
            engine
                .submit(request([&[number], TEXT].concat(), 30))
                .unwrap()
        })
        .collect();
    let together: Vec<_> = handles.into_iter().map(|handle| answer(handle).0).collect();
    for (number, tokens) in together.iter().enumerate() {
        assert_eq!(tokens.len(), 30, "request {number}");
    }
}

#[test]
fn dropping_a_busy_engine_ends_its_thread() {
    let engine = engine();
    let prompt = TEXT.repeat(40);
    let handle = engine.submit(request(prompt, 20)).unwrap();
    drop(engine);
    // Whatever was published before, the stream ends.
    let _ = block_on(handle.collect::<Vec<_>>());
}
