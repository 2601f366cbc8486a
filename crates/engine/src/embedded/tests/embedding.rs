//! Models that embed, on random encoders of 100 KB: batches, poolings, the tokens around texts.

use futures::executor::block_on;

use super::*;
use crate::embedding::{
    Embedder, EmbeddingInput, EmbeddingModel, EmbeddingRequest, EncodeStop, Pooling, RerankRequest,
    Vectors,
};

const BEGIN: Token = IM_START + 2;
const END: Token = IM_START + 1;

fn encoder(shape: &RandomModelShape, change: impl FnOnce(&mut LoadOptions)) -> EmbeddedEncoder {
    try_encoder(shape, EmbeddingOptions::default(), change).unwrap()
}

fn try_encoder(
    shape: &RandomModelShape,
    embedding: EmbeddingOptions,
    change: impl FnOnce(&mut LoadOptions),
) -> Result<EmbeddedEncoder, LoadError> {
    let bytes: &'static [u8] = Vec::leak(written(shape));
    let mut options = options();
    change(&mut options);
    let source = ModelSource::Bytes(bytes);
    load_embedding("tiny", &source, &options, embedding, &mut |_| true)
}

fn rows(model: &mut EmbeddedEncoder, texts: &[&[Token]]) -> Vec<f32> {
    let mut rows = Vec::new();
    model.encode(texts, &mut rows).unwrap();
    rows
}

fn near(left: &[f32], right: &[f32]) -> bool {
    let pairs = left.iter().zip(right);
    left.len() == right.len()
        && pairs
            .into_iter()
            .all(|(left, right)| (left - right).abs() < 1e-4)
}

/// A decoder that was trained to embed.
fn decoder() -> RandomModelShape {
    let mut shape = RandomModelShape::tiny();
    shape.numbers.push(("llama.pooling_type".to_owned(), 3));
    shape
}

#[test]
fn a_batch_gives_the_rows_of_its_texts_alone() {
    let shapes = [1, 2, 4].map(RandomModelShape::tiny_encoder);
    let others = ENCODERS.map(|it| RandomModelShape::tiny_encoder_of(it, 1));
    for shape in shapes.into_iter().chain(others).chain([decoder()]) {
        let mut model = encoder(&shape, |_| {});
        let width = model.info().dimensions as usize;
        // Longer than a window.
        let long: Vec<Token> = (5..45).collect();
        let texts: [&[Token]; 4] = [&[1, 2, 3], &[4], &long, &[1, 2, 3]];
        let together = rows(&mut model, &texts);
        assert_eq!(together.len(), 4 * width);
        for (text, row) in texts.iter().zip(together.chunks_exact(width)) {
            assert!(near(row, &rows(&mut model, &[text])), "{text:?}");
        }
        let row = |index: usize| &together[index * width..(index + 1) * width];
        assert!(near(row(0), row(3)) && row(0) != row(1), "{shape:?}");
        // Positions count, whatever is pooled.
        let turned = rows(&mut model, &[&[2, 1, 3]]);
        assert!(!near(&turned, row(0)), "{shape:?}");
    }
}

/// Encoders other than BERT itself. `docs/models.md` lists those that are not here.
const ENCODERS: [&str; 8] = [
    "eurobert",
    "gemma-embedding",
    "jina-bert-v3",
    "llama-embed",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
];

#[test]
fn the_pooling_is_that_of_the_file_or_of_the_configuration() {
    for (number, name) in [(1, "mean"), (2, "cls"), (4, "rank")] {
        let info = encoder(&RandomModelShape::tiny_encoder(number), |_| {}).info();
        assert_eq!((info.pooling.name(), info.ranks()), (name, number == 4));
        assert_eq!(info.dimensions, if number == 4 { 1 } else { 64 });
    }
    let mean = RandomModelShape::tiny_encoder(1);
    let with = |pooling| {
        let embedding = EmbeddingOptions {
            pooling: Some(pooling),
            ..EmbeddingOptions::default()
        };
        try_encoder(&mean, embedding, |_| {})
    };
    let poolings = [Pooling::Mean, Pooling::Cls, Pooling::Last];
    let [all, first, last] = poolings.map(|it| rows(&mut with(it).unwrap(), &[&[7, 8, 9]]));
    assert!(all != first && first != last);
    // Of a single token all are the same.
    let [all, first, last] = poolings.map(|it| rows(&mut with(it).unwrap(), &[&[7]]));
    assert!(near(&all, &first) && near(&first, &last));
    let error = with(Pooling::Rank).unwrap_err();
    assert!(error.to_string().contains("classification head"), "{error}");
    // Of a file that names none.
    let info = encoder(&RandomModelShape::tiny(), |_| {}).info();
    assert_eq!(info.pooling, Pooling::Last);
}

#[test]
fn the_kind_of_a_model_is_found_in_its_header() {
    let found = |shape: &RandomModelShape| {
        let bytes: &'static [u8] = Vec::leak(written(shape));
        embeds(&ModelSource::Bytes(bytes), &LlamaOptions::default()).unwrap()
    };
    assert!(found(&RandomModelShape::tiny_encoder(1)));
    // 0: the file names no pooling, and its architecture decides.
    assert!(found(&RandomModelShape::tiny_encoder(0)));
    for architecture in ENCODERS {
        let shape = RandomModelShape::tiny_encoder_of(architecture, 0);
        assert!(found(&shape), "{architecture}");
    }
    assert!(found(&decoder()));
    assert!(!found(&RandomModelShape::tiny()));
    let mut none = RandomModelShape::tiny();
    none.numbers.push(("llama.pooling_type".to_owned(), 0));
    assert!(!found(&none));
}

#[test]
fn a_model_of_the_other_kind_is_refused_with_a_remedy() {
    let bytes: &'static [u8] = Vec::leak(written(&RandomModelShape::tiny_encoder(1)));
    let error = load("tiny", &ModelSource::Bytes(bytes), &options(), &mut |_| {
        true
    })
    .unwrap_err();
    assert!(matches!(error, LoadError::NotGenerative(_)), "{error}");
    assert!(error.to_string().contains("embedding = false"), "{error}");
    for shape in [
        RandomModelShape::tiny_recurrent(),
        RandomModelShape::tiny_hybrid(),
    ] {
        let error = try_encoder(&shape, EmbeddingOptions::default(), |_| {}).unwrap_err();
        assert!(matches!(error, LoadError::NotEmbedding(_)), "{error}");
    }
}

#[test]
fn texts_stand_between_the_tokens_that_the_file_asks_for() {
    let layout = encoder(&RandomModelShape::tiny_encoder(4), |_| {})
        .info()
        .layout;
    assert_eq!(
        (&layout.begin[..], &layout.end[..]),
        (&[BEGIN][..], &[END][..])
    );
    assert_eq!(layout.separator, [END, IM_START]);
    let layout = encoder(&decoder(), |_| {}).info().layout;
    assert!(layout.begin.is_empty() && layout.end.is_empty());
    // WordPiece vocabularies end with SEP.
    let mut pieces = RandomModelShape::tiny_encoder(1);
    pieces.kind = "bert";
    pieces.flags.truncate(1);
    let layout = encoder(&pieces, |_| {}).info().layout;
    assert_eq!(
        (&layout.begin[..], &layout.end[..]),
        (&[BEGIN][..], &[IM_START][..])
    );
    assert_eq!(layout.separator, [IM_START]);
}

#[test]
fn a_text_may_have_as_many_tokens_as_the_context() {
    let mut model = encoder(&RandomModelShape::tiny_encoder(1), |options| {
        options.context_tokens = Some(100);
    });
    let info = model.info();
    assert_eq!((info.context_tokens, info.batch_tokens), (100, 64));
    let text: Vec<Token> = (0..100).collect();
    assert_eq!(rows(&mut model, &[&text]).len(), 64);
    // Beyond what the model was trained for there are no positions.
    let model = encoder(&RandomModelShape::tiny_encoder(1), |options| {
        options.context_tokens = Some(4096);
    });
    assert_eq!(model.info().context_tokens, 512);
}

#[test]
fn options_of_the_context_apply() {
    let text: &[Token] = &[1, 2, 3, 4, 5, 6, 7, 8];
    let row = |shape: &RandomModelShape, json: &str| {
        let mut llama: LlamaOptions = serde_json::from_str(json).unwrap();
        llama.batch_tokens = Some(64);
        let mut model = encoder(shape, |options| options.llama = llama);
        rows(&mut model, &[text])
    };
    let plain = row(&decoder(), "{}");
    for json in [
        r#"{"rope_freq_base": 50}"#,
        r#"{"rope_scaling": "linear", "rope_scale": 4}"#,
        r#"{"cache_type_k": "bf16", "cache_type_v": "bf16"}"#,
    ] {
        assert_ne!(row(&decoder(), json), plain, "{json}");
    }
    // An encoder has no KV cache that could have a type.
    let encoder = RandomModelShape::tiny_encoder(1);
    let types = r#"{"cache_type_k": "q8_0", "cache_type_v": "q8_0"}"#;
    assert!(near(&row(&encoder, types), &row(&encoder, "{}")));
    let error = try_encoder(&decoder(), EmbeddingOptions::default(), |options| {
        options.llama = serde_json::from_str(types).unwrap();
    });
    let error = error.unwrap_err();
    assert!(error.to_string().contains("cache_type_k"), "{error}");
}

#[test]
fn a_context_is_longer_than_the_trained_one_where_positions_are_scaled() {
    let scaled = |options: &mut LoadOptions| {
        options.context_tokens = Some(1024);
        options.llama.rope_scale = Some(4.0);
    };
    let mut model = encoder(&decoder(), scaled);
    assert_eq!(model.info().context_tokens, 1024);
    let text: Vec<Token> = (0..1024).map(|token| token % 200).collect();
    assert_eq!(rows(&mut model, &[&text]).len(), 64);
    for architecture in ENCODERS {
        let shape = RandomModelShape::tiny_encoder_of(architecture, 1);
        let context_tokens = encoder(&shape, scaled).info().context_tokens;
        assert_eq!(context_tokens, 1024, "{architecture}");
    }
    // The positions of BERT are a table.
    let model = encoder(&RandomModelShape::tiny_encoder(1), scaled);
    assert_eq!(model.info().context_tokens, 512);
}

#[test]
fn a_batch_that_throws_fails_alone() {
    let graphs = guard::throwing_graphs();
    for shape in [RandomModelShape::tiny_encoder(1), decoder()] {
        let mut model = encoder(&shape, |_| {});
        let expected = rows(&mut model, &[&[1, 2, 3]]);
        graphs.store(1, std::sync::atomic::Ordering::Relaxed);
        let failed = model.encode(&[&[1, 2, 3]], &mut Vec::new());
        assert!(matches!(failed, Err(EncodeStop::Failed(_))), "{failed:?}");
        assert!(near(&rows(&mut model, &[&[1, 2, 3]]), &expected));
    }
}

#[test]
fn adapters_are_refused() {
    let error = try_encoder(&decoder(), EmbeddingOptions::default(), |options| {
        options.lora = vec![crate::llama_options::LoraAdapter {
            path: "style.gguf".into(),
            scale: 1.0,
            name: None,
            apply: true,
        }];
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("lora") && error.contains("embed"), "{error}");
}

/// Replaced metadata decides, and repairs a file before it is looked at.
#[test]
fn override_kv_reaches_the_kind_of_a_model() {
    let found = |shape: &RandomModelShape, entry: &str| {
        let bytes: &'static [u8] = Vec::leak(written(shape));
        let options = LlamaOptions {
            override_kv: Some(vec![entry.to_owned()]),
            ..LlamaOptions::default()
        };
        embeds(&ModelSource::Bytes(bytes), &options)
    };
    let pooling = "llama.pooling_type=int:";
    assert!(found(&RandomModelShape::tiny(), &format!("{pooling}1")).unwrap());
    assert!(!found(&decoder(), &format!("{pooling}0")).unwrap());
    let refused = found(&decoder(), "llama.attention.head_count=int:0");
    assert!(refused.is_err(), "{refused:?}");
    let mut damaged = decoder();
    damaged
        .numbers
        .push(("llama.expert_used_count".to_owned(), 5));
    let plain = embeds(
        &ModelSource::Bytes(Vec::leak(written(&damaged))),
        &LlamaOptions::default(),
    );
    assert!(plain.is_err(), "{plain:?}");
    assert!(found(&damaged, "llama.expert_used_count=int:0").unwrap());
}

#[test]
fn batches_that_break_the_contract_are_errors() {
    let mut model = encoder(&RandomModelShape::tiny_encoder(1), |options| {
        options.context_tokens = Some(16);
    });
    let long: Vec<Token> = (0..17).collect();
    let many: Vec<&[Token]> = vec![&[1]; 5];
    let bad: [Vec<&[Token]>; 5] = [vec![], vec![&[]], vec![&long], vec![&[9_999]], many];
    for texts in bad {
        assert!(model.encode(&texts, &mut Vec::new()).is_err(), "{texts:?}");
    }
    assert_eq!(rows(&mut model, &[&[1]]).len(), 64);
}

#[test]
fn an_interrupted_batch_is_aborted() {
    let mut model = encoder(&RandomModelShape::tiny_encoder(1), |_| {});
    let flag = Interrupt::default();
    model.interrupt(flag.clone());
    flag.raise();
    let stopped = model.encode(&[&[1, 2]], &mut Vec::new()).unwrap_err();
    assert_eq!(stopped, EncodeStop::Aborted);
    flag.lower();
    assert_eq!(rows(&mut model, &[&[1, 2]]).len(), 64);
}

#[test]
fn memory_is_estimated_before_a_model_is_loaded() {
    let shape = RandomModelShape::tiny_encoder(1);
    let error = try_encoder(&shape, EmbeddingOptions::default(), |options| {
        options.memory_bytes = Some(1 << 20);
    });
    let error = error.unwrap_err();
    assert!(
        matches!(error, LoadError::Memory { cache: 0, .. }),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("quantisation, or a shorter context"),
        "{error}"
    );
    let error = try_encoder(&shape, EmbeddingOptions::default(), |options| {
        options.parallel = 0
    });
    assert!(matches!(error.unwrap_err(), LoadError::Option(_)));
    // Nobody can make room below a configured limit, and this one needs less than there is.
    let bytes: &'static [u8] = Vec::leak(written(&shape));
    let source = ModelSource::Bytes(bytes);
    let lacks = |options: &LoadOptions| {
        lacks_memory_embedding(&source, options, EmbeddingOptions::default())
    };
    let mut options = options();
    assert!(!lacks(&options));
    options.memory_bytes = Some(1);
    assert!(!lacks(&options));
}

fn spawned(shape: &RandomModelShape) -> Embedder {
    let model = Box::new(encoder(shape, |_| {}));
    Embedder::spawn(model, &crate::Config::default()).unwrap()
}

#[test]
fn concurrent_requests_get_their_own_rows() {
    let embedder = spawned(&RandomModelShape::tiny_encoder(1));
    let embed = |text: &str| {
        let request = EmbeddingRequest {
            inputs: vec![EmbeddingInput::Text(text.to_owned())],
            ..EmbeddingRequest::default()
        };
        embedder.embed(request).unwrap()
    };
    let texts: Vec<String> = (1..40)
        .map(|length| "the text ".repeat(length % 5) + "a")
        .collect();
    let alone: Vec<Vectors> = texts
        .iter()
        .map(|text| block_on(embed(text)).unwrap())
        .collect();
    let handles: Vec<_> = texts.iter().map(|text| embed(text)).collect();
    for (handle, alone) in handles.into_iter().zip(&alone) {
        let row = block_on(handle).unwrap();
        assert!(near(&row.numbers, &alone.numbers));
        let length: f32 = row.numbers.iter().map(|number| number * number).sum();
        assert!((length - 1.0).abs() < 1e-5);
    }
    assert!(
        embedder.stats().steps.get() < 39 + 39,
        "batches were shared"
    );
}

#[test]
fn a_rank_model_scores_documents_in_their_order() {
    let embedder = spawned(&RandomModelShape::tiny_encoder(4));
    let score = |documents: &[&str]| {
        let request = RerankRequest {
            query: "the query".to_owned(),
            documents: documents.iter().map(|it| (*it).to_owned()).collect(),
            ..RerankRequest::default()
        };
        block_on(embedder.rerank(request).unwrap()).unwrap()
    };
    let together = score(&["one", "another", "the third document"]);
    assert_eq!((together.width, together.numbers.len()), (1, 3));
    let alone = ["one", "another", "the third document"].map(|it| score(&[it]).numbers[0]);
    assert!(near(&together.numbers, &alone), "{together:?} {alone:?}");
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);
}
