//! Typed inputs and outputs of faces in this process: configuration, token ids, tokens with their log-probabilities.

use bytes::BufMut;

use super::*;

fn ids(tokens: &[u32]) -> Chunk {
    let mut data = bytes::BytesMut::new();
    tokens.iter().for_each(|id| data.put_u32_le(*id));
    Chunk::bytes(data.freeze()).with_mime(Mime::TOKENS)
}

/// All chunks of the answer to a raw prompt of token ids.
fn chunks(kernel: &Kernel, prompt: &[u32], config: GenerateConfig) -> Result<Vec<Chunk>> {
    let config = GenerateConfig {
        prompt_mode: PromptMode::Raw,
        ..config
    };
    whole(kernel.run::<Chunk>(
        "m",
        args! { prompt: ids(prompt), config: config.into_chunk() },
    ))
}

fn sampled(chunks: &[Chunk]) -> Vec<api::Sampled> {
    let tokens = chunks
        .iter()
        .filter_map(|chunk| chunk.inner::<api::Tokens>());
    tokens.flat_map(|tokens| tokens.tokens.clone()).collect()
}

fn received_events(chunks: &[Chunk]) -> Vec<u32> {
    sampled(chunks).iter().map(|token| token.id).collect()
}

fn finish(chunks: &[Chunk]) -> ChoiceFinish {
    let meta = chunks.last().unwrap().meta.clone().unwrap();
    meta.finish[&0].clone()
}

#[test]
fn d_20_a_typed_config_has_the_cores_ranges() {
    let kernel = kernel(json!({}));
    let config = GenerateConfig::from(GenerationParams {
        temperature: Some(100.0),
        presence_penalty: Some(-100.0),
        top_logprobs: Some(258),
        logit_bias: [(98, -100.0)].into(),
        stop: vec!["zz".into(); 64],
        top_k: Some(1),
        max_tokens: Some(2),
        ..GenerationParams::default()
    });
    let answer = sampled(&chunks(&kernel, &[256, 97], config).unwrap());
    assert_eq!(answer[0].top.len(), 258);
    let past = GenerateConfig::from(GenerationParams {
        temperature: Some(100.5),
        ..GenerationParams::default()
    });
    let error = chunks(&kernel, &[97], past).unwrap_err();
    assert_eq!(error.reason(), "BAD_CONFIG");
}

/// LM-404
#[test]
fn lm_307_the_end_and_the_token_that_completes_a_stop_are_reported() {
    let kernel = kernel(json!({}));
    type Case<'a> = (&'a [&'a [u32]], &'a [u32], &'a str);
    let cases: [Case<'_>; 3] = [
        (&[], &[97, 98, 99, 257], "abc"),
        (&[&[97, 98]], &[97, 98], "a"),
        (&[&[99], &[98, 99]], &[97, 98, 99], "ab"),
    ];
    for (stops, expected, text) in cases {
        let config = GenerateConfig::from(GenerationParams {
            stop_sequences: stops.iter().map(|stop| stop.to_vec()).collect(),
            ..GenerationParams::default()
        });
        let answer = chunks(&kernel, &[256, 97, 98, 99], config).unwrap();
        assert_eq!(
            (received_events(&answer), finish(&answer)),
            (expected.to_vec(), ChoiceFinish::Stop)
        );
        let main = answer.iter().filter(|chunk| chunk.port == *"");
        let shown: String = main.map(ToString::to_string).collect();
        assert_eq!(shown, text);
    }
}

/// LM-311, LM-312
#[test]
fn lm_314_scored_tokens_come_with_the_logprobs_of_generating_them() {
    let kernel = kernel(json!({"script": "tokens", "gap": 3, "vocab": 1024}));
    let generate = GenerateConfig::from(GenerationParams {
        temperature: Some(0.0),
        max_tokens: Some(7),
        top_logprobs: Some(1),
        ..GenerationParams::default()
    });
    let generated = sampled(&chunks(&kernel, &[5, 6], generate).unwrap());
    let scored: Vec<u32> = generated.iter().map(|token| token.id).collect();
    let score = GenerateConfig {
        params: GenerationParams {
            top_logprobs: Some(1),
            ..GenerationParams::default()
        },
        scored: Some(scored),
        ..GenerateConfig::default()
    };
    let answer = chunks(&kernel, &[5, 6], score.clone()).unwrap();
    assert_eq!(sampled(&answer), generated);
    assert_eq!(finish(&answer), ChoiceFinish::Stop);
    let usage = answer.last().unwrap().meta.clone().unwrap().usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (2, 7));
    // An empty prompt is valid too.
    let score_only = sampled(&chunks(&kernel, &[], score).unwrap());
    assert_eq!((score_only.len(), score_only[0].logprob), (7, 0.0));
}

#[test]
fn d_20_a_bias_of_minus_100_in_json_forbids() {
    let kernel = states("ab");
    let forbid = json!({"logit_bias": {"97": -100}, "max_tokens": 1, "temperature": 0});
    assert_ne!(whole(run(&kernel, forbid)).unwrap(), "a");
    // All tokens are 100 less likely, which changes nothing.
    let all: Map<String, Value> = (0..258)
        .map(|id: u32| (id.to_string(), json!(-99.9)))
        .collect();
    let lowered = json!({"logit_bias": all, "max_tokens": 1, "temperature": 0});
    assert_eq!(whole(run(&kernel, lowered)).unwrap(), "a");
}

/// The same for every caller, typed or in JSON.
#[test]
fn tr_401_bad_words_reach_the_engine() {
    let kernel = states("abcab");
    let text = whole(run(&kernel, json!({"badWords": "ab", "temperature": 0}))).unwrap();
    assert!(text.starts_with('a') && !text.contains("ab"), "{text}");
    let config = GenerateConfig::from(GenerationParams {
        bad_words: vec!["ab".into(); 64],
        temperature: Some(0.0),
        ..GenerationParams::default()
    });
    let answer = chunks(&kernel, &[256], config.clone()).unwrap();
    let ids = received_events(&answer);
    assert_eq!((ids[0], ids[2], ids.len()), (97, 99, 6));
    assert!(ids.windows(2).all(|pair| pair != [97, 98]), "{ids:?}");
    let past = GenerateConfig {
        params: GenerationParams {
            bad_words: vec!["ab".into(); 65],
            ..GenerationParams::default()
        },
        ..config
    };
    let error = chunks(&kernel, &[256], past).unwrap_err();
    assert!(error.to_string().contains("bad_words"), "{error}");
}
