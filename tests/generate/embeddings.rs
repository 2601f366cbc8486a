//! Models that embed texts or score documents, over HTTP and gRPC.

use sapwood_engine::embedding::{Embedder, Pooling, ScriptedEmbedding, ScriptedEmbeddingConfig};
use sapwood_proto::generated::inference::model_infer_request::InferInputTensor;
use sapwood_proto::generated::inference::{ModelInferRequest, ModelInferResponse};
use sapwood_tests::Running;
use sapwood_tests::http::{Answer, Wire, head, post};
use serde_json::{Value, json};
use tonic::Request;

use super::grpc::Grpc;
use super::*;

/// A server with the models `embeds`, `ranks` and `demo`, which generates.
async fn server() -> Running {
    let kernel = kernel(&[("demo", script(Script::Words))]);
    for (name, pooling) in [("embeds", Pooling::Mean), ("ranks", Pooling::Rank)] {
        let model = ScriptedEmbedding::new(ScriptedEmbeddingConfig {
            name: name.to_owned(),
            pooling,
            dimensions: 4,
            context_tokens: 64,
            ..ScriptedEmbeddingConfig::default()
        });
        let embedder = Embedder::spawn(Box::new(model), &sapwood_engine::Config::default());
        let function = sapwood_kernel::embedding_model(name, embedder.unwrap());
        kernel.add(function).unwrap();
    }
    let config = Config::default();
    Running::generating(kernel, config).await
}

async fn ask(server: &Running, path: &str, body: &Value) -> Answer {
    let body = body.to_string();
    let request = post(&format!("/v2/models/{path}"), &[], body.as_bytes());
    Wire::connect(server.address).await.ask(request).await
}

fn input(name: &str, shape: &[usize], data: &Value) -> Value {
    json!({"name": name, "shape": shape, "datatype": "BYTES", "data": data})
}

/// The numbers as they were before they were text.
fn numbers(value: &Value) -> Vec<f32> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|it| it.as_f64().unwrap() as f32).collect()
}

#[tokio::test]
async fn tr_103_metadata_has_the_tensors_of_embeddings_and_of_scores() {
    let server = server().await;
    for (model, inputs, output) in [
        (
            "embeds",
            json!([["text_input", [-1]], ["input_text", [-1]]]),
            json!({"name": "embedding", "datatype": "FP32", "shape": [-1, 4]}),
        ),
        (
            "ranks",
            json!([["query", [1]], ["documents", [-1]]]),
            json!({"name": "score", "datatype": "FP32", "shape": [-1]}),
        ),
    ] {
        let mut wire = Wire::connect(server.address).await;
        let metadata = wire
            .ask(head("GET", &format!("/v2/models/{model}"), &[]))
            .await
            .json();
        let shown = metadata["inputs"].as_array().unwrap().iter();
        let shown: Vec<_> = shown.map(|it| json!([it["name"], it["shape"]])).collect();
        assert_eq!(Value::from(shown), inputs);
        assert_eq!(metadata["outputs"], json!([output]));
        let config = wire
            .ask(head("GET", &format!("/v2/models/{model}/config"), &[]))
            .await;
        let config = config.json();
        assert_eq!(config["model_transaction_policy"]["decoupled"], false);
        assert_eq!(config["output"][0]["data_type"], "TYPE_FP32");
    }
}

#[tokio::test]
async fn tr_103_texts_give_a_row_each_in_json_and_in_binary() {
    let server = server().await;
    let texts = json!(["one", "two", "one"]);
    let mut seen = Vec::new();
    for (name, shape, data) in [
        ("text_input", &[3][..], texts.clone()),
        ("input_text", &[3], texts.clone()),
        ("text_input", &[3, 1], json!([["one"], ["two"], ["one"]])),
    ] {
        let body = json!({"inputs": [input(name, shape, &data)]});
        let answer = ask(&server, "embeds/infer", &body).await.json();
        let output = &answer["outputs"][0];
        assert_eq!(output["name"], "embedding");
        assert_eq!(
            (&output["datatype"], &output["shape"]),
            (&json!("FP32"), &json!([3, 4]))
        );
        seen.push(numbers(&output["data"]));
    }
    assert!(seen[0] == seen[1] && seen[1] == seen[2]);
    assert!(seen[0][..4] == seen[0][8..] && seen[0][..4] != seen[0][4..8]);
    let length: f32 = seen[0][..4].iter().map(|it| it * it).sum();
    assert!((length - 1.0).abs() < 1e-5);
    let body = json!({
        "inputs": [input("text_input", &[3], &texts)],
        "parameters": {"binary_data_output": true},
    });
    let answer = ask(&server, "embeds/infer", &body).await;
    let json_bytes = answer.head.header("inference-header-content-length");
    let raw = &answer.body[json_bytes.unwrap().parse::<usize>().unwrap()..];
    let floats = raw
        .chunks_exact(4)
        .map(|it| f32::from_le_bytes(it.try_into().unwrap()));
    assert_eq!(floats.collect::<Vec<_>>(), seen[0]);
    // `generate` has the same as members.
    let answer = ask(&server, "embeds/generate", &json!({"text_input": texts})).await;
    assert_eq!(numbers(&answer.json()["embedding"]), seen[0]);
}

#[tokio::test]
async fn parameters_set_dimensions_scale_and_truncation() {
    let server = server().await;
    let embed = async |text: &str, parameters: Value| {
        let body = json!({"inputs": [input("text_input", &[1], &json!([text]))], "parameters": parameters});
        ask(&server, "embeds/infer", &body).await
    };
    let answer = embed("one", json!({"dimensions": 2})).await.json();
    assert_eq!(answer["outputs"][0]["shape"], json!([1, 2]));
    let raw = embed("one", json!({"normalize": false})).await.json();
    let length: f32 = numbers(&raw["outputs"][0]["data"])
        .iter()
        .map(|it| it * it)
        .sum();
    assert!((length - 1.0).abs() > 0.1);
    let long = "x".repeat(100);
    let answer = embed(&long, json!({})).await;
    assert_eq!(answer.summary().0, 400);
    let message = error(&answer);
    assert!(
        message.contains("102 tokens") && message.contains("64 tokens"),
        "{message}"
    );
    assert_eq!(
        embed(&long, json!({"truncate": true})).await.summary().0,
        200
    );
    for parameters in [
        json!({"dimensions": 5}),
        json!({"dimensions": "2"}),
        json!({"truncate": 1}),
    ] {
        let answer = embed("one", parameters.clone()).await;
        assert_eq!(answer.summary().0, 400, "{parameters}");
    }
}

#[tokio::test]
async fn documents_get_a_score_each() {
    let server = server().await;
    let request = |documents: &Value, shape: &[usize]| {
        json!({"inputs": [
            input("query", &[1], &json!(["ab"])),
            input("documents", shape, documents),
        ]})
    };
    for (documents, shape) in [
        (json!(["xyz", "ab", "b"]), &[3][..]),
        (json!([["xyz"], ["ab"], ["b"]]), &[3, 1]),
    ] {
        let answer = ask(&server, "ranks/infer", &request(&documents, shape)).await;
        let output = &answer.json()["outputs"][0];
        assert_eq!(
            (&output["name"], &output["shape"]),
            (&json!("score"), &json!([3]))
        );
        assert_eq!(numbers(&output["data"]), [0.0, 1.0, 0.5]);
    }
    let body = json!({"query": "ab", "documents": ["ab", "b"]});
    let answer = ask(&server, "ranks/generate", &body).await.json();
    assert_eq!(numbers(&answer["score"]), [1.0, 0.5]);
}

#[tokio::test]
async fn requests_of_the_other_kind_are_refused_with_what_is_missing() {
    let server = server().await;
    let many = vec!["a"; 2049];
    for (path, body, expect) in [
        (
            "embeds/generate",
            json!({}),
            "no input 'text_input' or 'input_text'",
        ),
        (
            "embeds/generate",
            json!({"text_input": "a", "input_text": "b"}),
            "not both",
        ),
        (
            "embeds/generate",
            json!({"text_input": many}),
            "may have 2048 elements",
        ),
        ("embeds/generate", json!({"text_input": []}), "no texts"),
        (
            "embeds/generate",
            json!({"messages": "x"}),
            "no input 'text_input'",
        ),
        (
            "ranks/generate",
            json!({"text_input": "a"}),
            "missing required input(s) ['query','documents']",
        ),
        (
            "ranks/generate",
            json!({"query": "a", "documents": ["b"], "normalize": true}),
            "normalize",
        ),
        (
            "ranks/infer",
            json!({"inputs": [input("query", &[1], &json!(["a"]))]}),
            "['documents']",
        ),
        (
            "demo/infer",
            json!({"inputs": [input("documents", &[1], &json!(["a"]))]}),
            "unexpected inference input 'documents'",
        ),
    ] {
        let answer = ask(&server, path, &body).await;
        let message = error(&answer);
        assert_eq!(answer.summary().0, 400, "{path}: {message}");
        assert!(message.contains(expect), "{path}: {message}");
    }
}

#[tokio::test]
async fn grpc_gives_the_same_rows() {
    let server = server().await;
    let mut grpc = Grpc::connect(&server).await;
    let texts = ["one", "two"];
    let mut raw = Vec::new();
    for text in texts {
        raw.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
        raw.extend(text.as_bytes());
    }
    let message = ModelInferRequest {
        model_name: "embeds".into(),
        inputs: vec![InferInputTensor {
            name: "text_input".into(),
            datatype: "BYTES".into(),
            shape: vec![2, 1],
            ..InferInputTensor::default()
        }],
        raw_input_contents: vec![raw.into()],
        ..ModelInferRequest::default()
    };
    let answer = grpc.send("ModelInfer", Request::new(message)).await;
    let answer: ModelInferResponse = answer.unwrap();
    let output = &answer.outputs[0];
    assert_eq!((&*output.name, &*output.datatype), ("embedding", "FP32"));
    assert_eq!(output.shape, [2, 4]);
    let floats = answer.raw_output_contents[0].chunks_exact(4);
    let floats = floats.map(|it| f32::from_le_bytes(it.try_into().unwrap()));
    let body = json!({"inputs": [input("text_input", &[2], &json!(texts))]});
    let expect = ask(&server, "embeds/infer", &body).await.json();
    assert_eq!(
        floats.collect::<Vec<_>>(),
        numbers(&expect["outputs"][0]["data"])
    );
}
