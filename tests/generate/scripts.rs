//! Effects of a scripted model's configuration on the responses of this face.

use sapwood_engine::scripted::{self, Script, ScriptStep};
use sapwood_server::faces::generate::Config;
use sapwood_tests::Running;
use serde_json::Value;

use super::{ask, kernel, playing, script};

fn texts(events: &[Value]) -> Vec<&str> {
    let texts = events.iter().map(|event| event["text_output"].as_str());
    texts.map(Option::unwrap).collect()
}

#[tokio::test]
async fn tr_1105_a_chunk_step_is_one_response() {
    let chunk = "one chunk, however many tokens";
    let server = playing(vec![
        ScriptStep::Text("ab".into()),
        ScriptStep::Chunk(chunk.into()),
        ScriptStep::Text("c".into()),
    ])
    .await;
    let body = r#"{"text_input":"x","stream":true,"return_num_output_tokens":true}"#;
    let answer = ask(&server, "/v2/models/m/generate_stream", body).await;
    let events = answer.events();
    // The end is an event of its own, because it has the final number of tokens.
    assert_eq!(texts(&events), ["a", "b", chunk, "c", ""]);
    assert_eq!(events[2]["num_output_tokens"], chunk.len());
    let whole = ask(&server, "/v2/models/m/generate", r#"{"text_input":"x"}"#).await;
    assert_eq!(whole.json()["text_output"], format!("ab{chunk}c"));
}

#[tokio::test]
async fn tr_1104_tokens_per_chunk_sets_the_tokens_of_a_response() {
    let config = scripted::Config {
        tokens_per_chunk: 4,
        ..script(Script::Tokens)
    };
    let server = Running::generating(kernel(&[("m", config)]), Config::default()).await;
    let body =
        r#"{"text_input":"x","stream":true,"max_tokens":10,"return_num_output_tokens":true}"#;
    let answer = ask(&server, "/v2/models/m/generate_stream", body).await;
    let events = answer.events();
    let tokens: Vec<_> = events
        .iter()
        .map(|event| event["num_output_tokens"].as_u64().unwrap())
        .collect();
    assert_eq!(tokens.iter().sum::<u64>(), 10);
    assert_eq!(tokens[..2], [4, 4], "{tokens:?}");
}
