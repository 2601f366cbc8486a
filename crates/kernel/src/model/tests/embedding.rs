//! Models that embed, and those that score documents.

use sapwood_engine::embedding::{
    Embedder, Pooling, ScriptedEmbedding, ScriptedEmbeddingConfig, TEXT_BYTES_MAX,
};

use super::*;
use crate::name::{Mime, Port};
use crate::node::Node;
use crate::want::{RequestedPorts, Want};

/// A kernel with the models `embeds` and `ranks`, and with one that generates.
fn models() -> Kernel {
    let kernel = states("hello");
    for (name, pooling) in [("embeds", Pooling::Mean), ("ranks", Pooling::Rank)] {
        let model = ScriptedEmbedding::new(ScriptedEmbeddingConfig {
            name: name.to_owned(),
            pooling,
            context_tokens: 64,
            ..ScriptedEmbeddingConfig::default()
        });
        let embedder = Embedder::spawn(Box::new(model), &EngineConfig::default()).unwrap();
        kernel.add(embedding_model(name, embedder)).unwrap();
    }
    kernel
}

fn embedded(kernel: &Kernel, text: impl Into<Node>, config: Value) -> Result<Vec<Vec<f32>>> {
    whole(kernel.run::<Json<Vec<f32>>>("embeds", args! { text: text, config: config }))
}

#[test]
fn texts_are_embedded_in_their_order() {
    let kernel = models();
    let rows = block_on(kernel.embed("embeds", ["one", "two", "one"])).unwrap();
    assert_eq!((rows.len(), rows[0].len()), (3, 8));
    assert!(rows[0] == rows[2] && rows[0] != rows[1]);
    // The same texts in other forms.
    for texts in [
        json!(["one", "two", "one"]),
        json!([[256, 111, 110, 101, 257], "two", "one"]),
    ] {
        assert_eq!(embedded(&kernel, texts, json!({})).unwrap(), rows);
    }
    assert_eq!(embedded(&kernel, "one", json!({})).unwrap(), rows[..1]);
    let tokens = embedded(&kernel, json!([256, 111, 110, 101, 257]), json!({}));
    assert_eq!(tokens.unwrap(), rows[..1]);
}

#[test]
fn the_config_sets_dimensions_scale_and_truncation() {
    let kernel = models();
    let length = |rows: &[Vec<f32>]| rows[0].iter().map(|it| it * it).sum::<f32>();
    let cut = embedded(&kernel, "one", json!({"dimensions": 3})).unwrap();
    assert!(cut[0].len() == 3 && (length(&cut) - 1.0).abs() < 1e-5);
    let raw = embedded(&kernel, "one", json!({"normalize": false})).unwrap();
    assert!((length(&raw) - 1.0).abs() > 0.1);
    let long = "x".repeat(63);
    let error = embedded(&kernel, long.clone(), json!({})).unwrap_err();
    assert_eq!(error.reason(), "PROMPT_TOO_LONG");
    let truncated = embedded(&kernel, long, json!({"truncate": true})).unwrap();
    assert_eq!(
        truncated,
        embedded(&kernel, "x".repeat(62), json!({})).unwrap()
    );
    for (config, expect) in [
        (json!({"dimensions": 9}), "from 1 to 8"),
        (json!({"dimensions": "3"}), "must be a number"),
        (json!({"normalize": 1}), "true or false"),
        (json!({"temperature": 1}), "not known"),
        (json!([]), "JSON object"),
    ] {
        let error = embedded(&kernel, "one", config).unwrap_err();
        assert_eq!(error.reason(), "BAD_CONFIG");
        assert!(error.to_string().contains(expect), "{error}");
    }
}

#[test]
fn inputs_that_are_no_texts_are_refused() {
    let kernel = models();
    for text in [
        json!({"a": 1}),
        json!([1.5]),
        json!([["a"]]),
        json!([1, "a"]),
        json!(null),
    ] {
        let error = embedded(&kernel, text.clone(), json!({})).unwrap_err();
        assert_eq!(error.code().name(), "invalid-request", "{text}");
    }
    let error = embedded(&kernel, json!([]), json!({})).unwrap_err();
    assert!(error.to_string().contains("no texts"), "{error}");
    let image = Chunk::bytes("x").with_mime("image/png");
    let error = embedded(&kernel, image, json!({})).unwrap_err();
    assert_eq!(error.reason(), "UNSUPPORTED_MIMETYPE");
    let large = "x".repeat(TEXT_BYTES_MAX);
    let error = embedded(&kernel, large, json!({"truncate": true})).unwrap_err();
    assert_eq!(error.code().name(), "limit-exceeded");
}

#[test]
fn documents_are_scored_in_their_order() {
    let kernel = models();
    let scores = block_on(kernel.rerank("ranks", "ab", ["xyz", "ab", "b"])).unwrap();
    assert_eq!(scores, [0.0, 1.0, 0.5]);
    let documents = json!(["ab", [1, 2]]);
    let run = kernel.run::<Json<f32>>("ranks", args! { query: "ab", documents: documents });
    assert!(whole(run).unwrap_err().to_string().contains("document 1"));
    let config = json!({"normalize": true});
    let args = args! { query: "ab", documents: "a", config: config };
    let error = whole(kernel.run::<Json<f32>>("ranks", args)).unwrap_err();
    assert_eq!(error.reason(), "BAD_CONFIG");
}

#[test]
fn rows_are_lines_of_json_and_packed_floats() {
    let kernel = models();
    let ports = RequestedPorts::Only(vec![Port::VECTORS]);
    let run = kernel.run::<Chunk>("embeds", args! { text: json!(["one", "two"]) });
    let (chunks, meta) = block_on(run.wanting(Want::from(ports)).finish()).unwrap();
    let packed: Vec<u8> = chunks
        .iter()
        .flat_map(|chunk| chunk.data.to_vec())
        .collect();
    let expect = block_on(kernel.embed("embeds", ["one", "two"])).unwrap();
    let bytes: Vec<u8> = expect
        .concat()
        .iter()
        .flat_map(|it| it.to_le_bytes())
        .collect();
    assert_eq!(packed, bytes);
    let mimes: Vec<&Mime> = chunks.iter().map(|chunk| &chunk.mime).collect();
    assert_eq!(mimes.first(), Some(&&Mime::FLOATS));
    assert_eq!(meta.usage, RunUsage::of(5 + 5, 0));
    assert_eq!(meta.model.as_deref(), Some("embeds"));
    let text = whole(kernel.run::<String>("ranks", args! { query: "ab", documents: "b" }));
    assert_eq!(text.unwrap(), "0.5\n");
}

/// Many rows come in several chunks.
#[test]
fn a_large_answer_is_sent_in_pieces() {
    let kernel = models();
    let texts = vec!["a"; 2048];
    let rows = block_on(kernel.embed("embeds", texts.clone())).unwrap();
    assert_eq!(rows.len(), 2048);
    let run = kernel.run::<Chunk>("embeds", args! { text: json!(texts) });
    assert!(whole(run).unwrap().len() > 2);
}

#[test]
fn generate_and_a_model_that_embeds_do_not_mix() {
    let kernel = models();
    kernel
        .add(crate::generate(crate::Targets::default()))
        .unwrap();
    // The only model that generates is the default one.
    let run = kernel.run::<String>("GENERATE", args! { prompt: "x" });
    assert_eq!(whole(run).unwrap(), "hello");
    let run = kernel.run::<String>("GENERATE", args! { prompt: "x", target: "embeds" });
    let error = whole(run).unwrap_err();
    assert_eq!(error.code().name(), "failed-precondition");
    assert!(error.to_string().contains("generates no text"), "{error}");
    let error = block_on(kernel.embed("m", ["x"])).unwrap_err();
    assert_eq!(error.code().name(), "failed-precondition");
    assert!(error.to_string().contains("gives no embeddings"), "{error}");
}
