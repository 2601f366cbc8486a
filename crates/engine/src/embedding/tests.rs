use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::executor::block_on;
use futures::future::join_all;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::steer::Token;
use sapwood_proto::time::Time;

use super::*;
use crate::api::{EngineError, SharedVocabulary};
use crate::config::Config;
use crate::template::{RerankTemplate, SpecialTexts};

fn scripted(change: impl FnOnce(&mut ScriptedEmbeddingConfig)) -> Box<ScriptedEmbedding> {
    let mut config = ScriptedEmbeddingConfig::default();
    change(&mut config);
    Box::new(ScriptedEmbedding::new(config))
}

fn texts(texts: &[&str]) -> EmbeddingRequest {
    let inputs = texts.iter();
    let inputs = inputs.map(|text| EmbeddingInput::Text((*text).to_owned()));
    EmbeddingRequest {
        inputs: inputs.collect(),
        ..EmbeddingRequest::default()
    }
}

fn rerank(query: &str, documents: &[&str]) -> RerankRequest {
    RerankRequest {
        query: query.to_owned(),
        documents: documents.iter().map(|it| (*it).to_owned()).collect(),
        ..RerankRequest::default()
    }
}

/// An engine that is stepped by the test.
struct Bench {
    owner: EmbeddingOwner,
    embedder: Embedder,
}

impl Bench {
    fn new(model: Box<dyn EmbeddingModel>) -> Self {
        Self::with(model, &Config::default())
    }

    fn with(model: Box<dyn EmbeddingModel>, config: &Config) -> Self {
        let (owner, embedder) = Embedder::by_hand(model, config);
        Self { owner, embedder }
    }

    /// Steps until nothing is left.
    fn run(&mut self) {
        while self.owner.step(Time::ZERO) {}
    }

    fn embed(&mut self, request: EmbeddingRequest) -> Result<Vectors, EngineError> {
        let handle = self.embedder.embed(request)?;
        self.run();
        handle.now_or_never().expect("it was computed")
    }

    fn rerank(&mut self, request: RerankRequest) -> Result<Vectors, EngineError> {
        let handle = self.embedder.rerank(request)?;
        self.run();
        handle.now_or_never().expect("it was computed")
    }
}

#[test]
fn rows_come_in_the_order_of_the_texts_whatever_the_batches_are() {
    let given = ["one", "two and more", "", "one"];
    let mut bench = Bench::new(scripted(|_| {}));
    let one_by_one = given.map(|text| bench.embed(texts(&[text])).unwrap().numbers);
    for (batch_tokens, parallel) in [(512, 16), (1, 1), (10, 2), (512, 3)] {
        let mut bench = Bench::new(scripted(|config| {
            config.batch_tokens = batch_tokens;
            config.parallel = parallel;
        }));
        let vectors = bench.embed(texts(&given)).unwrap();
        assert_eq!(vectors.width, 8);
        let rows: Vec<&[f32]> = vectors.rows().collect();
        assert_eq!(rows, one_by_one, "{batch_tokens} {parallel}");
        // Two special tokens around each.
        assert_eq!(vectors.prompt_tokens, 3 + 12 + 3 + 4 * 2);
        assert_ne!(rows[0], rows[1]);
    }
}

#[test]
fn tokens_are_used_as_they_are() {
    let mut bench = Bench::new(scripted(|_| {}));
    let written = bench.embed(texts(&["ab"])).unwrap();
    let (begin, end) = (256, 257);
    let tokens = |tokens: Vec<Token>| EmbeddingRequest {
        inputs: vec![EmbeddingInput::Tokens(tokens)],
        ..EmbeddingRequest::default()
    };
    let given = vec![begin, 97, 98, end];
    assert_eq!(bench.embed(tokens(given)), Ok(written));
    let error = bench.embed(tokens(vec![97, 300])).unwrap_err();
    assert_eq!(error.reason, ErrorReason::BAD_TOKENS);
    assert!(error.message.contains("300") && error.message.contains("258"));
    let error = bench.embed(tokens(Vec::new())).unwrap_err();
    assert_eq!(error.reason, ErrorReason::EMPTY_PROMPT);
}

#[test]
fn rows_have_length_1_also_with_fewer_dimensions_unless_asked_otherwise() {
    let mut bench = Bench::new(scripted(|_| {}));
    let mut embed = |dimensions, normalize| {
        bench.embed(EmbeddingRequest {
            dimensions,
            normalize,
            ..texts(&["some text"])
        })
    };
    let length = |vectors: &Vectors| {
        let squares = vectors.numbers.iter().map(|number| number * number);
        squares.sum::<f32>().sqrt()
    };
    let raw = embed(None, Some(false)).unwrap();
    assert!((length(&raw) - 1.0).abs() > 0.1);
    for dimensions in [None, Some(3), Some(8)] {
        let row = embed(dimensions, None).unwrap();
        assert_eq!(row.width, dimensions.unwrap_or(8) as usize);
        assert!((length(&row) - 1.0).abs() < 1e-6);
        // In the same direction as the first numbers of the whole row.
        let scale = raw.numbers[0] / row.numbers[0];
        let pairs = row.numbers.iter().zip(&raw.numbers);
        assert!(
            pairs
                .into_iter()
                .all(|(cut, raw)| (cut * scale - raw).abs() < 1e-4)
        );
    }
    for dimensions in [0, 9] {
        let error = embed(Some(dimensions), None).unwrap_err();
        assert_eq!(error.reason, ErrorReason::BAD_CONFIG);
        assert!(error.message.contains("from 1 to 8"), "{error}");
    }
    let mut bench = Bench::new(scripted(|config| config.normalize = false));
    assert_eq!(bench.embed(texts(&["some text"])), Ok(raw));
}

#[test]
fn a_text_that_exceeds_the_context_is_refused_with_both_numbers_or_truncated() {
    let mut bench = Bench::new(scripted(|config| config.context_tokens = 10));
    assert!(bench.embed(texts(&["12345678"])).is_ok(), "at the limit");
    let error = bench.embed(texts(&["1", "123456789"])).unwrap_err();
    assert_eq!(
        (error.code, error.reason),
        (Code::InvalidRequest, ErrorReason::PROMPT_TOO_LONG)
    );
    assert!(error.message.contains("text 1 of 11 tokens"), "{error}");
    assert!(error.message.contains("context of 10 tokens"), "{error}");
    let truncated = bench.embed(EmbeddingRequest {
        truncate: true,
        ..texts(&["123456789abc"])
    });
    // The special tokens stay.
    assert_eq!(truncated, bench.embed(texts(&["12345678"])));
}

#[test]
fn the_texts_of_a_request_are_limited_in_number_and_bytes() {
    let (_owner, embedder) = Embedder::by_hand(
        scripted(|config| config.context_tokens = u32::MAX),
        &Config {
            queue_tokens: usize::MAX / 2,
            ..Config::default()
        },
    );
    let most = vec!["a"; TEXTS_MAX];
    assert!(embedder.embed(texts(&most)).is_ok());
    let long = "a".repeat(TEXT_BYTES_MAX);
    assert!(embedder.embed(texts(&[&long])).is_ok());
    for (request, expect) in [
        (texts(&[&most[..], &["a"]].concat()), "may have 2048 texts"),
        (texts(&[&long, "b"]), "16777216 bytes together"),
        (texts(&[]), "no texts"),
    ] {
        let error = embedder.embed(request).unwrap_err();
        assert_eq!(error.reason, ErrorReason::BAD_CONFIG);
        assert!(error.message.contains(expect), "{error}");
    }
}

#[test]
fn a_small_request_does_not_wait_for_the_end_of_a_large_one() {
    let mut bench = Bench::new(scripted(|config| config.parallel = 2));
    let large = bench.embedder.embed(texts(&["large"; 100])).unwrap();
    let small = bench.embedder.embed(texts(&["small", "one"])).unwrap();
    for _ in 0..2 {
        assert!(bench.owner.step(Time::ZERO));
    }
    assert!(small.now_or_never().expect("computed").is_ok());
    let mut large = large;
    assert!((&mut large).now_or_never().is_none());
    bench.run();
    assert_eq!(large.now_or_never().unwrap().unwrap().rows().len(), 100);
}

#[test]
fn a_request_whose_handle_is_dropped_is_not_computed() {
    let mut bench = Bench::new(scripted(|config| config.parallel = 1));
    let dropped = bench.embedder.embed(texts(&["a"; 50])).unwrap();
    let kept = bench.embedder.embed(texts(&["b"])).unwrap();
    bench.owner.step(Time::ZERO);
    drop(dropped);
    bench.run();
    assert!(kept.now_or_never().unwrap().is_ok());
    let stats = bench.embedder.stats();
    assert_eq!((stats.steps.get(), stats.cancelled_client.get()), (2, 1));
    assert_eq!(
        stats.requests_running.get() + stats.requests_waiting.get(),
        0
    );
}

#[test]
fn d_54_a_full_queue_refuses_and_is_refunded() {
    let config = Config {
        queue_requests: 16,
        ..Config::default()
    };
    let mut bench = Bench::with(scripted(|_| {}), &config);
    let ask = |embedder: &Embedder, caller| {
        embedder.embed(EmbeddingRequest {
            caller,
            ..texts(&["a"])
        })
    };
    let handles: Vec<_> = (0..16).map(|_| ask(&bench.embedder, 7).unwrap()).collect();
    let error = ask(&bench.embedder, 7).unwrap_err();
    assert_eq!(
        (error.code, error.reason),
        (Code::Overloaded, ErrorReason::ENGINE_BUSY)
    );
    assert!(error.retry_after.is_some());
    let other = ask(&bench.embedder, 8).expect("another caller finds room");
    bench.run();
    for handle in handles.into_iter().chain([other]) {
        assert!(handle.now_or_never().unwrap().is_ok());
    }
    assert!(ask(&bench.embedder, 7).is_ok());
    assert_eq!(bench.embedder.stats().rejected_queue.get(), 1);
}

/// One caller's long request does not keep others out until its end.
#[test]
fn d_54_a_request_is_refunded_text_by_text() {
    let config = Config {
        queue_tokens: 100,
        ..Config::default()
    };
    let mut bench = Bench::with(scripted(|config| config.parallel = 5), &config);
    // Three tokens each.
    let ask = |embedder: &Embedder, count| embedder.embed(texts(&vec!["a"; count]));
    let error = ask(&bench.embedder, 34).unwrap_err();
    assert_eq!(
        (error.code, error.reason),
        (Code::InvalidRequest, ErrorReason::BAD_CONFIG)
    );
    assert!(error.message.contains("100 tokens") && error.message.contains("102"));
    let long = ask(&bench.embedder, 33).unwrap();
    let error = ask(&bench.embedder, 10).unwrap_err();
    assert_eq!(error.reason, ErrorReason::ENGINE_BUSY);
    bench.owner.step(Time::ZERO);
    bench.owner.step(Time::ZERO);
    let second = ask(&bench.embedder, 10).expect("30 of 99 tokens are computed");
    drop(long);
    bench.owner.step(Time::ZERO);
    drop(second);
    bench.run();
    let whole = ask(&bench.embedder, 33).expect("the rest was refunded once");
    assert!(ask(&bench.embedder, 10).is_err());
    bench.run();
    assert!(whole.now_or_never().unwrap().is_ok());
}

#[test]
fn d_54_a_callers_many_requests_do_not_hold_up_another() {
    let mut bench = Bench::new(scripted(|config| config.parallel = 2));
    let of = |caller, count| EmbeddingRequest {
        caller,
        ..texts(&vec!["a"; count])
    };
    let many = (0..50).map(|_| bench.embedder.embed(of(1, 20)).unwrap());
    let many: Vec<_> = many.collect();
    let one = bench.embedder.embed(of(2, 3)).unwrap();
    for _ in 0..3 {
        bench.owner.step(Time::ZERO);
    }
    assert!(one.now_or_never().expect("computed in turn").is_ok());
    drop(many);
}

#[test]
fn the_numbers_of_an_answer_are_limited() {
    let mut bench = Bench::new(scripted(|config| config.dimensions = 1 << 16));
    let most = NUMBERS_MAX >> 16;
    let handle = bench.embedder.embed(texts(&vec!["a"; most]));
    drop(handle.expect("at the limit"));
    let error = bench.embed(texts(&vec!["a"; most + 1])).unwrap_err();
    assert_eq!(error.reason, ErrorReason::BAD_CONFIG);
    assert!(error.message.contains("2097152 numbers"), "{error}");
    let fewer = EmbeddingRequest {
        dimensions: Some(8),
        ..texts(&vec!["a"; most + 1])
    };
    assert!(bench.embed(fewer).is_ok());
}

#[test]
fn requests_end_at_their_deadline_and_when_they_wait_too_long() {
    let config = Config {
        queue_timeout_ms: 100,
        ..Config::default()
    };
    let mut bench = Bench::with(scripted(|config| config.parallel = 1), &config);
    let timeout = Some(Duration::from_millis(50));
    let ask = |count, timeout| {
        let request = EmbeddingRequest {
            timeout,
            ..texts(&vec!["a"; count])
        };
        bench.embedder.embed(request).unwrap()
    };
    let (running, timed, waiting) = (ask(9, None), ask(1, timeout), ask(1, None));
    assert!(bench.owner.step(Time::ZERO));
    assert!(bench.owner.step(Time::from_millis(100)));
    let reason = |handle: EmbeddingHandle| handle.now_or_never().unwrap().unwrap_err().reason;
    assert_eq!(reason(timed), ErrorReason::TIMEOUT);
    assert_eq!(reason(waiting), ErrorReason::QUEUE_TIMEOUT);
    bench.run();
    assert!(running.now_or_never().unwrap().is_ok(), "it had begun");
}

#[test]
fn a_queue_timeout_of_zero_is_none() {
    let config = Config {
        queue_timeout_ms: 0,
        ..Config::default()
    };
    let mut bench = Bench::with(scripted(|config| config.parallel = 1), &config);
    let ask = |count| bench.embedder.embed(texts(&vec!["a"; count])).unwrap();
    let (first, waiting) = (ask(9), ask(1));
    assert!(bench.owner.step(Time::ZERO));
    assert!(bench.owner.step(Time::from_millis(1_000_000)));
    bench.run();
    for handle in [first, waiting] {
        assert!(handle.now_or_never().unwrap().is_ok());
    }
}

/// Fails on texts that contain one of these tokens.
struct Failing(Box<ScriptedEmbedding>);

impl EmbeddingModel for Failing {
    fn info(&self) -> EmbeddingInfo {
        self.0.info()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        self.0.vocabulary()
    }

    fn encode(&mut self, texts: &[&[Token]], rows: &mut Vec<f32>) -> Result<(), EncodeStop> {
        let has = |letter: u8| texts.iter().any(|text| text.contains(&letter.into()));
        if has(b'!') {
            let error = EngineError::internal(ErrorReason::NONE, "the model failed");
            return Err(EncodeStop::Failed(error));
        }
        assert!(!has(b'#'), "a defect of the model");
        self.0.encode(texts, rows)?;
        if has(b'?') {
            rows[0] = f32::NAN;
        }
        if has(b'-') {
            rows.pop();
        }
        Ok(())
    }
}

#[test]
fn a_failure_ends_the_requests_of_its_batch_and_no_others() {
    let mut bench = Bench::new(Box::new(Failing(scripted(|config| config.parallel = 1))));
    for (bad, expect) in [
        ("!", ErrorReason::NONE),
        ("#", ErrorReason::MODEL_PANIC),
        ("?", ErrorReason::ENGINE_ERROR),
        ("-", ErrorReason::ENGINE_ERROR),
    ] {
        let good = bench.embedder.embed(texts(&["a", "b"])).unwrap();
        let failing = bench.embedder.embed(texts(&["a", bad, "c"])).unwrap();
        bench.run();
        let error = failing.now_or_never().unwrap().unwrap_err();
        assert_eq!((error.code, error.reason), (Code::Internal, expect));
        assert!(good.now_or_never().unwrap().is_ok());
    }
    let stats = bench.embedder.stats();
    assert_eq!((stats.failed.get(), stats.panics.get()), (4, 1));
}

#[test]
fn documents_are_scored_in_their_order() {
    let mut bench = Bench::new(scripted(|config| {
        config.pooling = Pooling::Rank;
        config.context_tokens = 16;
        config.parallel = 2;
    }));
    let scores = bench.rerank(rerank("ab", &["xyz", "ab", "b"])).unwrap();
    assert_eq!(
        (scores.width, &scores.numbers[..]),
        (1, &[0.0, 1.0, 0.5][..])
    );
    // Four special tokens and the query leave room for ten.
    let long = "-".repeat(10);
    assert!(bench.rerank(rerank("ab", &[&long])).is_ok());
    let longer = long + "ab";
    let request = rerank("ab", &["a", &longer]);
    let error = bench.rerank(request.clone()).unwrap_err();
    assert_eq!(error.reason, ErrorReason::PROMPT_TOO_LONG);
    assert!(error.message.contains("document 1 of 18 tokens"), "{error}");
    let truncate = true;
    let scores = bench.rerank(RerankRequest {
        truncate,
        ..request
    });
    assert_eq!(scores.unwrap().numbers, [0.5, 0.0]);
    // Nothing of a document fits beside this query.
    let request = RerankRequest {
        truncate,
        ..rerank(&"q".repeat(12), &["a"])
    };
    assert_eq!(
        bench.rerank(request).unwrap_err().reason,
        ErrorReason::PROMPT_TOO_LONG
    );
}

#[test]
fn a_model_does_either_and_says_which() {
    let mut embeds = Bench::new(scripted(|_| {}));
    let error = embeds.rerank(rerank("a", &["b"])).unwrap_err();
    assert_eq!(error.code, Code::FailedPrecondition);
    assert!(error.message.contains("gives embeddings"), "{error}");
    let mut ranks = Bench::new(scripted(|config| config.pooling = Pooling::Rank));
    let error = ranks.embed(texts(&["a"])).unwrap_err();
    assert_eq!(error.code, Code::FailedPrecondition);
    assert!(error.message.contains("scores documents"), "{error}");
}

/// A query cannot open or close the parts of the template, and a template may cut a document.
#[test]
fn texts_in_a_rerank_template_are_plain() {
    let special = SpecialTexts {
        all: vec!["<|end|>".to_owned()],
        ..SpecialTexts::default()
    };
    let template = RerankTemplate::new("{Q: {query}\nD: {document}<|end|>", &special).unwrap();
    let vocabulary = scripted(|_| {}).vocabulary();
    let text = |query: &str, document: &str| {
        let tokens = template.tokens(query, document, &*vocabulary);
        let bytes = tokens
            .iter()
            .flat_map(|token| vocabulary.bytes(*token).to_vec());
        String::from_utf8(bytes.collect()).unwrap()
    };
    assert_eq!(
        text("{document}<|end|>", "a{query}"),
        "{Q: {document}<|end|>\nD: a{query}<|end|>"
    );
    let most = "{query}{document}".repeat(4);
    assert!(RerankTemplate::new(&most, &special).is_ok());
    for source in ["{query}", "{document}", "", &format!("{most}{{query}}")] {
        assert!(RerankTemplate::new(source, &special).is_err(), "{source}");
    }
}

#[test]
fn a_document_in_a_template_is_cut_until_it_fits() {
    struct Templated(Box<ScriptedEmbedding>);
    impl EmbeddingModel for Templated {
        fn info(&self) -> EmbeddingInfo {
            let mut info = self.0.info();
            let special = SpecialTexts::default();
            let template = RerankTemplate::new("<{query}|{document}>", &special);
            info.layout.rerank = Some(template.unwrap());
            info
        }
        fn vocabulary(&self) -> SharedVocabulary {
            self.0.vocabulary()
        }
        fn encode(&mut self, texts: &[&[Token]], rows: &mut Vec<f32>) -> Result<(), EncodeStop> {
            rows.extend(texts.iter().map(|text| text.len() as f32));
            Ok(())
        }
    }
    let model = scripted(|config| {
        config.pooling = Pooling::Rank;
        config.context_tokens = 32;
    });
    let mut bench = Bench::new(Box::new(Templated(model)));
    // The vocabulary adds BOS, which no template of its own has.
    let lengths = bench.rerank(rerank("ab", &["cd", &"é".repeat(13)]));
    assert_eq!(lengths.unwrap().numbers, [8.0, 32.0]);
    let request = rerank("ab", &[&"é".repeat(9_000)]);
    assert!(bench.rerank(request.clone()).is_err());
    let truncate = true;
    let cut = bench
        .rerank(RerankRequest {
            truncate,
            ..request
        })
        .unwrap();
    assert!((20.0..=32.0).contains(&cut.numbers[0]), "{cut:?}");
    // Too much together: nothing is tokenised again for each document.
    let many = bench.rerank(rerank(&"q".repeat(20), &["a"; 2048]));
    assert!(many.is_ok(), "{many:?}");
    let config = Config {
        queue_tokens: 40_000,
        ..Config::default()
    };
    let mut small = Bench::with(
        Box::new(Templated(scripted(|config| {
            config.pooling = Pooling::Rank;
            config.context_tokens = 32;
        }))),
        &config,
    );
    let many = small.rerank(rerank(&"q".repeat(20), &["a"; 2048]));
    assert!(many.unwrap_err().message.contains("40000 tokens together"));
    let request = rerank(&"q".repeat(40), &["a"]);
    let error = bench.rerank(RerankRequest {
        truncate,
        ..request
    });
    let error = error.unwrap_err();
    assert_eq!(error.reason, ErrorReason::PROMPT_TOO_LONG);
}

/// Counts what is in each batch.
struct Counting {
    model: Box<ScriptedEmbedding>,
    batches: Arc<Mutex<Vec<usize>>>,
}

impl EmbeddingModel for Counting {
    fn info(&self) -> EmbeddingInfo {
        self.model.info()
    }

    fn vocabulary(&self) -> SharedVocabulary {
        self.model.vocabulary()
    }

    fn encode(&mut self, texts: &[&[Token]], rows: &mut Vec<f32>) -> Result<(), EncodeStop> {
        self.batches.lock().unwrap().push(texts.len());
        self.model.encode(texts, rows)
    }
}

#[test]
fn texts_of_different_requests_share_a_batch() {
    let batches = Arc::default();
    let mut bench = Bench::new(Box::new(Counting {
        model: scripted(|_| {}),
        batches: Arc::clone(&batches),
    }));
    let handles: Vec<_> = (0..5)
        .map(|_| bench.embedder.embed(texts(&["a", "b"])).unwrap())
        .collect();
    bench.run();
    assert_eq!(*batches.lock().unwrap(), [10]);
    assert!(
        handles
            .into_iter()
            .all(|it| it.now_or_never().unwrap().is_ok())
    );
}

#[test]
fn a_thread_serves_concurrent_callers_until_it_is_ended() {
    let embedder = Embedder::spawn(scripted(|_| {}), &Config::default()).unwrap();
    let expect = block_on(embedder.embed(texts(&["a", "b"])).unwrap()).unwrap();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let handles = (0..20).map(|_| embedder.embed(texts(&["a", "b"])).unwrap());
                for vectors in block_on(join_all(handles)) {
                    assert_eq!(vectors.as_ref(), Ok(&expect));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 80);
    embedder.end();
    let ended = loop {
        match embedder.embed(texts(&["a"])) {
            // Taken before the thread has seen that it is ended.
            Ok(handle) => match block_on(handle) {
                Ok(_) => {}
                Err(error) => break error,
            },
            Err(error) => break error,
        }
    };
    assert_eq!(ended.reason, ErrorReason::MODEL_UNLOADED);
}
