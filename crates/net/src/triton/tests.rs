//! Servers whose every byte the test controls, and the client's results.

mod grpc;
mod http;

use futures::StreamExt;
use sapwood_proto::generate::{Datatype, Strings, TensorData};
use serde_json::json;

use super::*;

/// A text model as most servers declare it.
fn demo() -> Arc<ModelSignature> {
    let tensor = |name: &str, datatype, optional| Declared {
        name: name.into(),
        datatype,
        shape: vec![-1, 1],
        optional,
    };
    Arc::new(ModelSignature {
        name: "demo".into(),
        platform: "test".into(),
        inputs: vec![
            tensor("text_input", Datatype::Bytes, false),
            tensor("max_tokens", Datatype::Int32, true),
            tensor("stream", Datatype::Bool, true),
        ],
        outputs: vec![
            tensor("text_output", Datatype::Bytes, false),
            tensor("score", Datatype::Fp32, false),
        ],
        decoupled: true,
    })
}

fn texts(list: &[&str]) -> TensorData {
    TensorData::Bytes(list.iter().map(|text| text.as_bytes()).collect::<Strings>())
}

/// A request for two words, with a parameter.
fn two_words() -> InferRequest {
    let mut request = InferRequest::new(demo());
    request.inputs.push((0, texts(&["Say two words"])));
    request.inputs.push((1, TensorData::Int(vec![16])));
    request.inputs.push((2, TensorData::Bool(vec![true])));
    request.parameters.push(("top_k".into(), json!(5)));
    request.timeout = Some(Duration::from_millis(1_500));
    request
}

/// The text of all responses, and how the stream ended.
async fn read(mut responses: ModelResponses) -> (Vec<String>, Result<(), Error>) {
    let mut all = Vec::new();
    while let Some(response) = responses.next().await {
        match response {
            Ok(response) => all.push(text(&response)),
            Err(error) => {
                assert!(responses.next().await.is_none(), "it ends once");
                return (all, Err(error));
            }
        }
    }
    assert!(responses.next().await.is_none(), "the end is permanent");
    (all, Ok(()))
}

fn text(response: &ModelResponse) -> String {
    let parts = response.outputs.iter().map(|(_, data)| match data {
        TensorData::Bytes(list) => list.iter().map(String::from_utf8_lossy).collect::<String>(),
        other => format!("{other:?}"),
    });
    parts.collect()
}

async fn asked(client: &TritonClient, request: InferRequest) -> (Vec<String>, Result<(), Error>) {
    match client.generate(request).await {
        Ok(responses) => read(responses).await,
        Err(error) => (Vec::new(), Err(error)),
    }
}

fn reply(error: Error) -> ErrorReply {
    match error {
        Error::Reply(received) => received,
        other => panic!("{other:?}"),
    }
}
