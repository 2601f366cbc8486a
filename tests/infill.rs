//! Fill in the middle at every face: the same prefix and suffix make the same prompt, and so the same text.

use std::sync::Arc;

use sapwood_engine::scripted::{Config, Script, ScriptedTokenizer};
use sapwood_kernel::{Kernel, model};
use sapwood_proto::evergreen::Metadata;
use sapwood_proto::generated::inference::InferParameter;
use sapwood_proto::generated::inference::infer_parameter::ParameterChoice;
use sapwood_tests::http::{Answer, Wire};
use sapwood_tests::socket::Socket;
use sapwood_tests::{Running, request, spawned};
use serde_json::{Value, json};

use crate::generate::grpc::{Grpc, prompt, text};
use crate::lmtp::{message, stream as items};

const PREFIX: &str = "def add(a, b):\n    ";
/// It spells a control token, which it must not become.
const SUFFIX: &str = "\n    return c  # <fim_middle>";

/// Models of bytes whose output depends on every token of the prompt: `filler` has tokens for fill in the middle, `plain`
/// has none.
async fn server() -> Running {
    let kernel = Kernel::new();
    for (name, infill) in [("filler", true), ("plain", false)] {
        let engine = spawned(Config {
            name: name.into(),
            script: Script::Tokens,
            tokenizer: Some(ScriptedTokenizer::Bytes),
            gap: 0.5,
            infill,
            ..Config::default()
        });
        kernel.add(model(name, engine)).unwrap();
    }
    Running::start(kernel, Default::default(), Vec::new()).await
}

/// The tokens of the prompt: BOS, the prefix behind its mark, the suffix behind its mark, the mark of the middle.
fn tokens() -> Vec<u32> {
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    [
        &[256, 258][..],
        &bytes(PREFIX),
        &[259],
        &bytes(SUFFIX),
        &[260],
    ]
    .concat()
}

async fn asked(server: &Running, model: &str, body: Value) -> Answer {
    let mut wire = Wire::connect(server.address).await;
    let path = format!("/v2/models/{model}/generate");
    wire.post(&path, &body.to_string()).await
}

async fn generated(server: &Running, more: Value) -> Value {
    let mut body = json!({"text_input": PREFIX, "max_tokens": 24, "temperature": 1, "seed": 5});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    asked(server, "filler", body).await.json()
}

/// The text of a GENERATE, and the tokens of its prompt.
async fn lmtp(server: &Running, members: Value) -> (String, Value) {
    let headers = [("sec-websocket-protocol", "lmtp.v2")];
    let mut socket = Socket::open(server, "/lmtp", &headers).await.unwrap();
    let mut generate = json!({"model": "filler", "stream_id": 1, "max_tokens": 24, "temperature": 1, "seed": 5, "text": true, "echo_prompt_tokens": true});
    generate
        .as_object_mut()
        .unwrap()
        .extend(members.as_object().unwrap().clone());
    socket.send_text(&format!("GENERATE {generate}")).await;
    let items = items(&mut socket, 1).await;
    let text = items
        .iter()
        .map(|item| item["text"].as_str().unwrap_or_default());
    (text.collect(), items[0]["prompt_tokens"].clone())
}

async fn evergreen(server: &Running) -> String {
    let session = server.session().await;
    let leaf = async |mime: &str, data: &str| {
        let metadata = Arc::new(Metadata::of(mime));
        let mut writer = session.write().unwrap();
        writer
            .write(&metadata, data.to_owned().into())
            .await
            .unwrap();
        writer.end(&metadata).unwrap()
    };
    let prompt = leaf("text/plain", PREFIX).await;
    let suffix = leaf("text/plain", SUFFIX).await;
    let config = leaf(
        "application/json",
        r#"{"max_tokens": 24, "temperature": 1, "seed": 5}"#,
    )
    .await;
    let inputs = [
        ("prompt", &prompt),
        ("suffix", &suffix),
        ("config", &config),
    ];
    let call = session
        .call(request("filler", &inputs, &["response"]))
        .unwrap();
    let response = call.output("response").unwrap().read().whole().await;
    String::from_utf8_lossy(&response.unwrap()).into_owned()
}

#[tokio::test]
async fn every_face_makes_the_same_prompt_of_a_prefix_and_a_suffix() {
    let server = server().await;
    let (expected, echoed) = lmtp(&server, json!({"prompt": tokens()})).await;
    assert_eq!(echoed, json!(tokens()));
    assert!(expected.len() >= 20, "{expected:?}");
    let texts = json!({"prompt_text": PREFIX, "suffix": SUFFIX});
    assert_eq!(lmtp(&server, texts).await, (expected.clone(), echoed));
    assert_eq!(evergreen(&server).await, expected);
    let sampling =
        json!({"suffix": SUFFIX, "max_tokens": 24, "temperature": 1, "seed": 5}).to_string();
    for more in [
        json!({"suffix": SUFFIX}),
        json!({"parameters": {"suffix": SUFFIX}}),
        json!({"sampling_parameters": sampling}),
        // As an input it takes precedence.
        json!({"sampling_parameters": r#"{"max_tokens": 24, "temperature": 1, "seed": 5, "suffix": "x"}"#, "suffix": SUFFIX}),
    ] {
        let answer = generated(&server, more.clone()).await;
        assert_eq!(answer["text_output"], expected, "{more}: {answer}");
    }
    let mut message = prompt("filler", "", PREFIX, false);
    let of = |choice| InferParameter {
        parameter_choice: Some(choice),
    };
    message.parameters = [
        (
            "suffix".into(),
            of(ParameterChoice::StringParam(SUFFIX.into())),
        ),
        ("max_tokens".into(), of(ParameterChoice::Int64Param(24))),
        ("temperature".into(), of(ParameterChoice::Int64Param(1))),
        ("seed".into(), of(ParameterChoice::Int64Param(5))),
    ]
    .into();
    let answer = Grpc::connect(&server).await.infer(message).await.unwrap();
    assert_eq!(text(&answer), expected);
    for (other, what) in [
        (json!({}), "no suffix"),
        (json!({"suffix": ""}), "an empty suffix is none"),
    ] {
        let plain = generated(&server, other).await;
        assert_ne!(plain["text_output"], expected, "{what}");
        let (prompt, _) = lmtp(&server, json!({"prompt_text": PREFIX})).await;
        assert_eq!(plain["text_output"], prompt, "{what}");
    }
}

#[tokio::test]
async fn model_info_has_the_tokens_of_models_that_fill_in() {
    let server = server().await;
    let headers = [("sec-websocket-protocol", "lmtp.v2")];
    let mut socket = Socket::open(&server, "/lmtp", &headers).await.unwrap();
    for (model, infill) in [
        (
            "filler",
            json!({"prefix": 258, "suffix": 259, "middle": 260, "suffix_first": false}),
        ),
        ("plain", Value::Null),
    ] {
        let ask = json!({"stream_id": 1, "model": model});
        socket.send_text(&format!("MODEL_INFO {ask}")).await;
        let (_, items) = message(&mut socket).await;
        let info = &items[0]["model_info"];
        assert_eq!(info["tokenizer"]["infill"], infill, "{info}");
    }
}

#[tokio::test]
async fn the_rest_of_a_request_goes_with_a_suffix() {
    let server = server().await;
    let text = generated(&server, json!({"suffix": SUFFIX})).await["text_output"].clone();
    let text = text.as_str().unwrap();
    // What is repeated is the prompt as it was sent: the suffix belongs behind the output.
    let more = json!({
        "suffix": SUFFIX, "exclude_input_in_output": false, "return_num_input_tokens": true, "return_finish_reason": true,
    });
    let answer = generated(&server, more).await;
    assert_eq!(answer["text_output"], format!("{PREFIX}{text}"));
    assert_eq!(answer["num_input_tokens"], tokens().len());
    assert_eq!(answer["finish_reason"], "length");
    let more = json!({
        "suffix": SUFFIX, "return_logprobs": true,
        "sampling_parameters": r#"{"n": 2, "logprobs": 1, "max_tokens": 24, "temperature": 1, "seed": 5}"#,
    });
    let answer = generated(&server, more).await;
    assert_eq!(answer["text_output"][0], text);
    assert_ne!(answer["text_output"][1], text);
    // SCORE: how likely a text is between the two.
    let headers = [("sec-websocket-protocol", "lmtp.v2")];
    let mut socket = Socket::open(&server, "/lmtp", &headers).await.unwrap();
    let mut scores = Vec::new();
    for (id, prompt) in [
        json!({"prompt_text": PREFIX, "suffix": SUFFIX}),
        json!({"prompt": tokens()}),
        json!({"prompt_text": PREFIX}),
    ]
    .into_iter()
    .enumerate()
    {
        let mut score = json!({"model": "filler", "stream_id": id, "scored": [97, 98], "prompt_logprobs": true});
        let members = score.as_object_mut().unwrap();
        members.extend(prompt.as_object().unwrap().clone());
        socket.send_text(&format!("SCORE {score}")).await;
        let mut items = items(&mut socket, id).await;
        items.iter_mut().for_each(|item| {
            let item = item.as_object_mut().unwrap();
            item.retain(|name, _| name.contains("logprob"));
        });
        scores.push(items);
    }
    assert_eq!(scores[0], scores[1]);
    assert_ne!(scores[0], scores[2]);
    let prompt = scores[0][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(prompt.len(), tokens().len());
}

#[tokio::test]
async fn a_constraint_keeps_what_is_filled_in_within_its_schema() {
    let server = server().await;
    let names = ["alpha", "beta", "gamma", "delta"];
    let schema = json!({"enum": names}).to_string();
    for (controller, argument) in [
        ("sapwood:json-schema", schema.as_str()),
        ("sapwood:lark", "start: /[a-d]+/ \";\""),
    ] {
        let with = |mut members: Value| {
            let members_of = members.as_object_mut().unwrap();
            members_of.insert("controller".to_owned(), json!(controller));
            members_of.insert("controller_arg".to_owned(), json!(argument));
            members
        };
        let texts = with(json!({"prompt_text": PREFIX, "suffix": SUFFIX}));
        let filled = lmtp(&server, texts).await;
        let of_tokens = lmtp(&server, with(json!({"prompt": tokens()}))).await;
        assert_eq!(filled, of_tokens);
        let (text, prompt) = filled;
        assert_eq!(prompt, json!(tokens()));
        let allowed = match controller {
            "sapwood:lark" => text.chars().all(|letter| "abcd;".contains(letter)),
            _ => names.iter().any(|name| text == format!("{name:?}")),
        };
        assert!(allowed && !text.is_empty(), "{text}");
    }
}

#[tokio::test]
async fn a_suffix_that_cannot_be_used_is_refused() {
    let server = server().await;
    let messages = json!([{"role": "user", "content": "x"}]);
    for (model, body, part) in [
        (
            "plain",
            json!({"text_input": "a", "suffix": "b"}),
            "leave out the suffix",
        ),
        (
            "filler",
            json!({"messages": messages, "suffix": "b"}),
            "'messages'",
        ),
        (
            "filler",
            json!({"text_input": "a", "suffix": 5}),
            "JSON non-string",
        ),
        (
            "filler",
            json!({"text_input": "a", "sampling_parameters": "{\"suffix\":[]}"}),
            "suffix",
        ),
        (
            "filler",
            json!({"text_input": "a", "suffix": "b".repeat(5000)}),
            "context",
        ),
    ] {
        let answer = asked(&server, model, body.clone()).await;
        let error = answer.json()["error"].to_string();
        assert_eq!(answer.head.status, 400, "{body}: {error}");
        assert!(error.contains(part), "{error}");
    }
    let headers = [("sec-websocket-protocol", "lmtp.v2")];
    let mut socket = Socket::open(&server, "/lmtp", &headers).await.unwrap();
    let ask = json!({"model": "plain", "stream_id": 1, "prompt_text": "a", "suffix": "b"});
    socket.send_text(&format!("GENERATE {ask}")).await;
    let error = items(&mut socket, 1).await.remove(0);
    assert_eq!(error["code"], "unsupported_operation", "{error}");
}
