//! Models that are no text models.

use crate::args;
use crate::chunk::Chunk;
use crate::from_chunks::Json;
use crate::name::{Mime, Port};

use super::*;

/// Numbers in, numbers and words out.
pub(super) fn sums() -> (Value, Value) {
    let metadata = json!({
        "name": "sums.2-x",
        "inputs": [
            tensor("LEFT", "INT8", &[2, -1]),
            tensor("SCALE", "FP32", &[1]),
            tensor("FLAG", "BOOL", &[1]),
            tensor("LABELS", "BYTES", &[-1]),
            tensor("NAME", "BYTES", &[1]),
        ],
        "outputs": [
            tensor("SUMS", "INT64", &[-1]),
            tensor("Top-Label", "BYTES", &[2]),
            tensor("note", "BYTES", &[-1]),
        ],
    });
    let optional =
        ["SCALE", "FLAG", "LABELS", "NAME"].map(|name| json!({"name": name, "optional": true}));
    (
        metadata,
        json!({"input": optional, "model_transaction_policy": {"decoupled": false}}),
    )
}

async fn serving(decoupled: bool, answer: (u16, String)) -> Server {
    let (metadata, mut config) = sums();
    config["model_transaction_policy"]["decoupled"] = decoupled.into();
    let models = vec![(metadata, config)];
    Server::start(World { models, answer }).await
}

#[tokio::test]
async fn tr_1308_a_shape_of_any_dimensions_is_imported() {
    let (mut metadata, config) = sums();
    // The product is 0 where it wraps around, which would make it a tensor without elements.
    metadata["inputs"][0]["shape"] = json!([1_i64 << 32, 1_i64 << 32]);
    let answer = events(&[]);
    let server = Server::start(World {
        models: vec![(metadata, config)],
        answer,
    })
    .await;
    assert_eq!(server.kernel.specs().len(), 1);
}

#[tokio::test]
async fn tr_1308_ports_are_derived_from_tensors() {
    let server = serving(false, events(&[])).await;
    let spec = server.kernel.specs().remove(0);
    let inputs: Vec<_> = spec
        .inputs
        .iter()
        .map(|it| (&*it.name, it.required))
        .collect();
    assert_eq!(
        inputs,
        [
            ("LEFT", true),
            ("SCALE", false),
            ("FLAG", false),
            ("LABELS", false),
            ("NAME", false)
        ]
    );
    let outputs: Vec<_> = spec
        .outputs
        .iter()
        .map(|it| (&*it.port, &*it.wire, it.mimes[0].as_str()))
        .collect();
    let expect = [
        ("", "SUMS", "application/json"),
        ("top_label", "Top-Label", "application/json"),
        ("note", "note", "text/plain"),
    ];
    assert_eq!(outputs, expect);
    assert_eq!(spec.inputs[1].schema, json!({"type": "number"}));
    assert_eq!(spec.inputs[0].schema, json!({"type": ["integer", "array"]}));
}

#[tokio::test]
async fn tr_308_inputs_are_json_and_outputs_too() {
    let event = json!({"SUMS": [3, 7], "Top-Label": ["a", "b"], "note": ["x", "y"], "odd": 1});
    let server = serving(false, events(&[event])).await;
    let args = args! {
        LEFT: json!([[1, 2], [3, 4.0]]), SCALE: json!(0.5), FLAG: json!(true), LABELS: json!(["p", "q"]), NAME: "[n]",
    };
    let run = server.kernel.run::<Json<Vec<i64>>>("sums._2_x", args);
    let sums = run.finish().await.unwrap().0;
    assert_eq!(sums, [[3, 7]]);
    let expect = json!({"LEFT": [1, 2, 3, 4], "SCALE": 0.5, "FLAG": true, "LABELS": ["p", "q"], "NAME": "[n]"});
    assert_eq!(server.request(), expect);
    let run = server
        .kernel
        .run::<Json<Vec<String>>>("sums._2_x", args! { LEFT: json!([1, 2]) });
    let labels = run.port("top_label").finish().await.unwrap().0;
    assert_eq!(labels, [["a", "b"]]);
    let run = server
        .kernel
        .run::<String>("sums._2_x", args! { LEFT: json!([1, 2]) });
    assert_eq!(run.port("note").await.unwrap(), "x\ny");
}

/// Each response of a decoupled model is a line.
#[tokio::test]
async fn tr_407_every_response_is_a_value_of_its_own() {
    let answer = events(&[
        json!({"SUMS": 1, "note": "a"}),
        json!({"SUMS": [2, 3], "note": "b"}),
        json!({"note": "c"}),
    ]);
    let server = serving(true, answer).await;
    let mut run = server
        .kernel
        .run::<Chunk>("sums._2_x", args! { LEFT: json!([1, 2]) });
    let mut seen = Vec::new();
    while let Some(chunk) = run.next().await {
        let chunk = chunk.unwrap();
        seen.push((
            chunk.port.to_string(),
            chunk.mime.clone(),
            chunk.to_string(),
        ));
    }
    let line = |port: &str, mime: Mime, text: &str| (port.to_owned(), mime, text.to_owned());
    let expect = [
        line("", Mime::NDJSON, "1\n"),
        line("note", Mime::TEXT, "a"),
        line("", Mime::NDJSON, "[2,3]\n"),
        line("note", Mime::TEXT, "b"),
        line("note", Mime::TEXT, "c"),
    ];
    seen.retain(|(_, _, text)| !text.is_empty());
    assert_eq!(seen, expect);
    assert_eq!(Port::MAIN.as_str(), "");
}

#[tokio::test]
async fn tr_311_values_that_are_not_of_the_type_are_refused_before_work() {
    let server = serving(false, events(&[])).await;
    for (left, scale) in [
        (json!([1, 200]), json!(1)),
        (json!(["1", 2]), json!(1)),
        (json!([1.5, 2]), json!(1)),
        (json!({"a": 1}), json!(1)),
        (json!([1, 2, 3]), json!(1)),
        (json!([1, 2]), json!([1, 2])),
        (json!([1, 2]), json!("x")),
    ] {
        let run = server
            .kernel
            .run::<Chunk>("sums._2_x", args! { LEFT: left, SCALE: scale });
        let error = run.finish().await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidRequest, "{error}");
    }
    let error = server
        .kernel
        .run::<Chunk>("sums._2_x", ())
        .finish()
        .await
        .unwrap_err();
    assert_eq!(error.reason(), "MISSING_INPUT");
    assert_eq!(server.requests(), 0);
}
