//! Text models.

use crate::args;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::from_chunks::Json;
use crate::generate::{Targets, generate};
use crate::meta::ChoiceFinish;
use crate::model::GenerateConfig;
use crate::name::{Mime, Port};
use crate::node::Node;
use crate::want::RequestedPorts;
use sapwood_proto::params::GenerationParams;

use super::*;

/// Prompt and text only.
pub(super) fn bare() -> (Value, Value) {
    let metadata = json!({
        "name": "bare",
        "inputs": [tensor("text_input", "BYTES", &[1])],
        "outputs": [tensor("text_output", "BYTES", &[-1])],
    });
    (
        metadata,
        json!({"model_transaction_policy": {"decoupled": false}}),
    )
}

/// The signature of the vLLM backend.
fn vllm() -> (Value, Value) {
    let inputs = [
        ("text_input", "BYTES"),
        ("stream", "BOOL"),
        ("sampling_parameters", "BYTES"),
        ("exclude_input_in_output", "BOOL"),
        ("return_finish_reason", "BOOL"),
        ("return_num_input_tokens", "BOOL"),
        ("return_num_output_tokens", "BOOL"),
    ];
    let outputs = [
        ("text_output", "BYTES"),
        ("finish_reason", "BYTES"),
        ("num_input_tokens", "UINT32"),
        ("num_output_tokens", "UINT32"),
    ];
    model("vllm", &inputs, &outputs)
}

/// The signature of an ensemble of TensorRT-LLM, with batches.
fn ensemble() -> (Value, Value) {
    let inputs = [
        ("text_input", "BYTES"),
        ("max_tokens", "INT32"),
        ("min_length", "INT32"),
        ("stop_words", "BYTES"),
        ("bad_words", "BYTES"),
        ("top_k", "INT32"),
        ("top_p", "FP32"),
        ("temperature", "FP32"),
        ("random_seed", "UINT64"),
        ("stream", "BOOL"),
    ];
    model("ensemble", &inputs, &[("text_output", "BYTES")])
}

fn model(name: &str, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> (Value, Value) {
    let tensors = |list: &[(&str, &str)]| -> Value {
        list.iter()
            .map(|(name, datatype)| tensor(name, datatype, &[-1, -1]))
            .collect()
    };
    let metadata = json!({"name": name, "inputs": tensors(inputs), "outputs": tensors(outputs)});
    (
        metadata,
        json!({"model_transaction_policy": {"decoupled": true}}),
    )
}

async fn serving(model: (Value, Value), answer: (u16, String)) -> Server {
    let models = vec![model];
    Server::start(World { models, answer }).await
}

fn states(text: &str) -> Value {
    json!({"model_name": "m", "model_version": "1", "text_output": text})
}

/// What the function lists, it gives: nothing takes the text of such a server apart as it comes.
#[tokio::test]
async fn ke_307_a_model_elsewhere_lists_no_events() {
    let server = serving(bare(), events(&[])).await;
    let spec = server.kernel.specs().remove(0);
    let ports = spec.outputs.iter().map(|output| &*output.port);
    let ports: Vec<&str> = ports.collect();
    assert!(!ports.contains(&"events"), "{ports:?}");
    assert!(ports.contains(&"meta"), "{ports:?}");
}

/// Every parameter goes to an input that can take it.
#[tokio::test]
async fn tr_403_fields_go_into_inputs_then_sampling_parameters_then_parameters() {
    let config = json!({
        "max_tokens": 16, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 7,
        "stop": ["\n"], "presencePenalty": 0.5,
    });
    let sampling = json!({
        "max_tokens": 16, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 7,
        "stop": ["\n"], "presence_penalty": 0.5,
    });
    for (model, expect) in [
        (
            bare(),
            json!({"text_input": "hi", "parameters": {
                "max_tokens": 16, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 7,
                "stop": "\n", "presence_penalty": 0.5,
            }}),
        ),
        (
            ensemble(),
            json!({
                "text_input": "hi", "stream": true, "max_tokens": 16, "min_length": 2, "temperature": 0.7, "top_p": 0.9,
                "top_k": 5, "random_seed": 7, "stop_words": "\n", "parameters": {"presence_penalty": 0.5},
            }),
        ),
        (
            vllm(),
            json!({
                "text_input": "hi", "stream": true, "exclude_input_in_output": true, "return_finish_reason": true,
                "return_num_input_tokens": true, "return_num_output_tokens": true,
                "sampling_parameters": sampling,
            }),
        ),
    ] {
        let name = Name::shared(model.0["name"].as_str().unwrap());
        let server = serving(model, events(&[])).await;
        let run = server
            .kernel
            .run::<String>(&name, args! { prompt: "hi", config: config.clone() });
        assert_eq!(run.await.unwrap(), "");
        let mut request = server.request();
        if let Some(text) = request.get("sampling_parameters").and_then(Value::as_str) {
            request["sampling_parameters"] = serde_json::from_str(text).unwrap();
        }
        assert_eq!(request, expect, "{name}");
    }
}

/// Without a configuration no sampling parameter is sent; stop tokens and biases are sent where the model takes JSON.
#[tokio::test]
async fn tr_402_unset_fields_are_not_sent() {
    for (config, sampling) in [
        (json!({}), None),
        (json!({"top_k": 0}), Some(json!({"top_k": -1}))),
        (
            json!({"stop_token_ids": [3, 4], "logit_bias": {"5": -100, "6": 1.5}}),
            Some(json!({"stop_token_ids": [3, 4], "logit_bias": {"5": -100.0, "6": 1.5}})),
        ),
        (
            json!({
                "dry_multiplier": 0.5, "dry_sequence_breakers": ["#"], "samplers": ["dry", "top_k"],
                "include_stop_str_in_output": true, "logit_bias": [["5", false], [6, 1.5]],
            }),
            Some(json!({
                "dry_multiplier": 0.5, "dry_sequence_breakers": ["#"], "samplers": ["dry", "top_k"],
                "include_stop_str_in_output": true, "logit_bias": [[6, 1.5], ["5", -100.0]],
            })),
        ),
    ] {
        let server = serving(vllm(), events(&[])).await;
        let run = server
            .kernel
            .run::<String>("vllm", args! { prompt: "hi", config: config });
        run.await.unwrap();
        let request = server.request();
        let sent = request
            .get("sampling_parameters")
            .map(|text| serde_json::from_str::<Value>(text.as_str().unwrap()).unwrap());
        assert_eq!(sent, sampling);
        assert!(request.get("parameters").is_none());
    }
}

/// Bad words go into the input of this name, else into the object, and nowhere else: a model that does not know them
/// would generate them.
#[tokio::test]
async fn tr_401_bad_words_go_to_their_input_or_to_sampling_parameters() {
    let config = json!({"bad_words": ["no", "never"]});
    for (model, expect) in [
        (ensemble(), Some(json!(["no", "never"]))),
        (vllm(), Some(json!({"bad_words": ["no", "never"]}))),
        (bare(), None),
    ] {
        let name = Name::shared(model.0["name"].as_str().unwrap());
        let server = serving(model, events(&[])).await;
        let run = server
            .kernel
            .run::<String>(&name, args! { prompt: "hi", config: config.clone() });
        let Some(expect) = expect else {
            assert_eq!(run.await.unwrap_err().code(), Code::Unimplemented);
            continue;
        };
        run.await.unwrap();
        let request = server.request();
        let object = request.get("sampling_parameters").and_then(Value::as_str);
        let object = object.map(|text| serde_json::from_str::<Value>(text).unwrap());
        let sent = request.get("bad_words").cloned().or(object);
        assert_eq!(sent, Some(expect), "{name}");
    }
}

/// An adapter that the model's server ignores would be another answer.
#[tokio::test]
async fn adapters_go_to_a_server_that_takes_them() {
    let text = |name: &str| (name.to_owned(), "BYTES");
    let with = |names: &[&str]| {
        let inputs = ["text_input"].iter().chain(names).map(|name| text(name));
        let inputs: Vec<_> = inputs.collect();
        let inputs: Vec<_> = inputs.iter().map(|(name, kind)| (&**name, *kind)).collect();
        model("with", &inputs, &[("text_output", "BYTES")])
    };
    let scaled = json!([{"name": "style", "scale": 0.5}]);
    let listed = r#"[{"name":"style"}]"#;
    for (model, lora, expect) in [
        (
            with(&["lora_name", "lora"]),
            json!("style"),
            Some(json!({"lora_name": "style"})),
        ),
        (
            with(&["lora"]),
            json!("style"),
            Some(json!({"lora": listed})),
        ),
        (
            with(&["lora_name", "lora"]),
            scaled.clone(),
            Some(json!({"lora": r#"[{"name":"style","scale":0.5}]"#})),
        ),
        (with(&["lora"]), json!([]), Some(json!({"lora": "[]"}))),
        (
            vllm(),
            json!("style"),
            Some(json!({"sampling_parameters": r#"{"lora_name":"style"}"#})),
        ),
        (vllm(), scaled.clone(), None),
        (vllm(), json!([{"id": 0}]), None),
        (vllm(), json!([]), None),
        (with(&["lora_name"]), json!(["style", "code"]), None),
        (bare(), json!("style"), None),
    ] {
        let name = Name::shared(model.0["name"].as_str().unwrap());
        let server = serving(model, events(&[])).await;
        let config = json!({"lora": lora});
        let run = server
            .kernel
            .run::<String>(&name, args! { prompt: "hi", config: config });
        let Some(expect) = expect else {
            assert_eq!(run.await.unwrap_err().code(), Code::Unimplemented, "{lora}");
            continue;
        };
        run.await.unwrap();
        let request = server.request();
        let sent = ["lora_name", "lora", "sampling_parameters"].into_iter();
        let sent = sent.filter_map(|name| Some((name.to_owned(), request.get(name)?.clone())));
        assert_eq!(Value::Object(sent.collect()), expect, "{lora}");
        assert!(request.get("parameters").is_none());
    }
}

/// A face in this process passes its configuration as a typed value, with the core's ranges.
#[tokio::test]
async fn tr_404_a_typed_configuration_and_a_deadline_reach_the_server() {
    let server = serving(ensemble(), events(&[])).await;
    let config = GenerateConfig::from(GenerationParams {
        max_tokens: Some(3),
        temperature: Some(50.0),
        ..GenerationParams::default()
    });
    let args = vec![
        (Name::new("prompt"), Node::from("hi".to_owned())),
        (Name::new("config"), Node::from(config.into_chunk())),
    ];
    let run = server.kernel.run::<String>("ensemble", args);
    run.timeout(std::time::Duration::from_secs(1_000))
        .await
        .unwrap();
    let request = server.request();
    assert_eq!(
        (&request["max_tokens"], &request["temperature"]),
        (&json!(3), &json!(50.0))
    );
    let timeout = request["parameters"]["timeout"].as_u64().unwrap();
    assert!(
        (900_000_000..=1_000_000_000).contains(&timeout),
        "{timeout} microseconds"
    );
}

/// The error of a call of the model `bare` with these inputs, reading these ports.
async fn rejection(
    server: &Server,
    inputs: Vec<(&'static str, Node)>,
    ports: RequestedPorts,
) -> Error {
    let inputs = inputs
        .into_iter()
        .map(|(name, node)| (Name::new(name), node));
    let inputs: Vec<_> = inputs.collect();
    let run = server.kernel.run::<Chunk>("bare", inputs);
    run.wanting(ports.into()).finish().await.unwrap_err()
}

fn json_node(value: &Value) -> Node {
    Node::from(Chunk::json(value).unwrap())
}

/// Refused before anything was sent.
#[tokio::test]
async fn tr_407_fields_that_a_text_server_cannot_keep_are_refused_before_work() {
    let server = serving(bare(), events(&[states("x")])).await;
    let typed = |config: GenerateConfig| Node::from(config.into_chunk());
    let usual = GenerateConfig::default;
    let configs = [
        json_node(&json!({"top_logprobs": 2})),
        json_node(&json!({"n": 2})),
        json_node(&json!({"stop": ["a", "b"]})),
        json_node(&json!({"logit_bias": {"1": 1}})),
        json_node(&json!({"controller": "c"})),
        json_node(&json!({"prompt_mode": "chat"})),
        json_node(&json!({"template_args": {}})),
        typed(GenerateConfig {
            scored: Some(vec![1]),
            ..usual()
        }),
        typed(GenerateConfig {
            params: GenerationParams {
                stop_sequences: vec![vec![1, 2]],
                ..GenerationParams::default()
            },
            ..usual()
        }),
    ];
    for (index, config) in configs.into_iter().enumerate() {
        let inputs = vec![("prompt", Node::from("hi".to_owned())), ("config", config)];
        let error = rejection(&server, inputs, RequestedPorts::All).await;
        assert_eq!(error.code(), Code::Unimplemented, "{index}: {error}");
    }
    assert_eq!(server.requests(), 0);
}

#[tokio::test]
async fn tr_407_inputs_and_ports_that_need_tokens_are_refused_before_work() {
    let server = serving(bare(), events(&[states("x")])).await;
    let hi = || ("prompt", Node::from("hi".to_owned()));
    let tokens = Chunk::bytes(vec![1, 0, 0, 0]).with_mime(Mime::TOKENS);
    let messages = json_node(&json!([{"role": "user", "content": "hi"}]));
    let tools = json_node(&json!([{"type": "function", "function": {"name": "f"}}]));
    for (name, inputs, ports) in [
        (
            "tokens",
            vec![hi()],
            RequestedPorts::Only(vec![Port::TOKENS]),
        ),
        (
            "logprobs",
            vec![hi()],
            RequestedPorts::Only(vec![Port::LOGPROBS]),
        ),
        (
            "token prompt",
            vec![("prompt", Node::from(tokens))],
            RequestedPorts::All,
        ),
        (
            "messages",
            vec![("messages", messages)],
            RequestedPorts::All,
        ),
        ("tools", vec![hi(), ("tools", tools)], RequestedPorts::All),
        (
            "suffix",
            vec![hi(), ("suffix", Node::from("x".to_owned()))],
            RequestedPorts::All,
        ),
    ] {
        let error = rejection(&server, inputs, ports).await;
        assert_eq!(error.code(), Code::Unimplemented, "{name}: {error}");
    }
    assert_eq!(server.requests(), 0);
}

#[tokio::test]
async fn tr_406_counts_of_tokens_beyond_64_bits_saturate() {
    let most = u64::MAX;
    let last = json!({"text_output": "x", "num_input_tokens": [most, most], "num_output_tokens": [most, 1]});
    let server = serving(vllm(), events(&[last])).await;
    let run = server.kernel.run::<String>("vllm", args! { prompt: "hi" });
    let (_, meta) = run.finish().await.unwrap();
    assert_eq!(meta.usage.prompt_tokens, most);
}

#[tokio::test]
async fn tr_406_text_finish_and_usage_become_chunks_and_metadata() {
    let last = json!({"text_output": " tea", "finish_reason": "length", "num_input_tokens": 3, "num_output_tokens": 2});
    let first = json!({"text_output": "green", "finish_reason": "None", "num_input_tokens": 3, "num_output_tokens": 1});
    let server = serving(vllm(), events(&[first, last])).await;
    let run = server.kernel.run::<String>("vllm", args! { prompt: "hi" });
    let (text, meta) = run.finish().await.unwrap();
    assert_eq!(
        (text.as_str(), &meta.finish[&0]),
        ("green tea", &ChoiceFinish::Length)
    );
    assert_eq!(
        (meta.usage.prompt_tokens, meta.usage.completion_tokens),
        (3, 3)
    );
    assert_eq!(meta.model, Some(Name::new("vllm")));

    let run = server
        .kernel
        .run::<Json<Value>>("vllm", args! { prompt: "hi" })
        .port("meta");
    let document = run.finish().await.unwrap().0.remove(0);
    assert_eq!(document["finish_reason"], "length");
    assert_eq!(document["usage"]["completion_tokens"], 3);

    let server = serving(bare(), events(&[states("all")])).await;
    let (text, meta) = server
        .kernel
        .run::<String>("bare", args! { prompt: "hi" })
        .finish()
        .await
        .unwrap();
    assert_eq!(
        (text.as_str(), &meta.finish[&0]),
        ("all", &ChoiceFinish::Stop)
    );
}

/// GENERATE finds it like a local model.
#[tokio::test]
async fn tr_1311_a_text_model_is_a_target_of_generate() {
    let server = serving(bare(), events(&[states("hello")])).await;
    server.kernel.add(generate(Targets::default())).unwrap();
    let run = server
        .kernel
        .run::<String>("GENERATE", args! { prompt: "hi", target: "bare" });
    assert_eq!(run.await.unwrap(), "hello");
}

/// Conversations go to servers that apply a chat template.
#[tokio::test]
async fn tr_1306_messages_and_tools_go_to_a_model_that_declares_them() {
    let inputs = [
        ("text_input", "BYTES"),
        ("messages", "BYTES"),
        ("tools", "BYTES"),
    ];
    let server = serving(
        model("chat", &inputs, &[("text_output", "BYTES")]),
        events(&[states("hello")]),
    )
    .await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let run = server.kernel.run::<String>(
        "chat",
        args! { messages: messages.clone(), tools: tools.clone() },
    );
    assert_eq!(run.await.unwrap(), "hello");
    let request = server.request();
    for (name, expect) in [("messages", messages), ("tools", tools)] {
        let sent: Value = serde_json::from_str(request[name].as_str().unwrap()).unwrap();
        assert_eq!(sent, expect);
    }
    assert!(request.get("text_input").is_none());
}

#[tokio::test]
async fn tr_402_a_suffix_goes_to_a_model_that_declares_it() {
    let inputs = [("text_input", "BYTES"), ("suffix", "BYTES")];
    let filler = model("filler", &inputs, &[("text_output", "BYTES")]);
    let server = serving(filler, events(&[states("hello")])).await;
    let args = args! { prompt: "a", suffix: "b" };
    let run = server.kernel.run::<String>("filler", args);
    assert_eq!(run.await.unwrap(), "hello");
    let request = server.request();
    assert_eq!(
        (&request["text_input"], &request["suffix"]),
        (&json!("a"), &json!("b"))
    );
}

/// D-30; KE-313 for the stream that is cut off.
#[tokio::test]
async fn tr_604_errors_follow_the_received_output_and_have_kernel_codes() {
    let tired = json!({"error": "the parrot is tired"});
    let refused = |status, text: &str| (status, format!("data: {{\"error\":\"{text}\"}}\n\n"));
    let (_, cut) = events(&[states("green")]);
    let cut = (200, format!("{cut}data: {{\"text_out"));
    for (answer, text, code, reason) in [
        (
            events(&[states("green"), tired.clone()]),
            "green",
            Code::UpstreamFailed,
            "",
        ),
        (events(&[tired]), "", Code::UpstreamFailed, ""),
        (
            refused(500, "the parrot is tired"),
            "",
            Code::UpstreamFailed,
            "",
        ),
        (
            refused(
                400,
                "prompt of 9 tokens exceeds the model's context of 8 tokens",
            ),
            "",
            Code::InvalidRequest,
            "PROMPT_TOO_LONG",
        ),
        (
            refused(503, "Exceeds maximum queue size"),
            "",
            Code::Overloaded,
            "ENGINE_BUSY",
        ),
        (
            refused(503, "Request timeout expired"),
            "",
            Code::DeadlineExceeded,
            "DEADLINE",
        ),
        (cut, "green", Code::Truncated, ""),
        (events(&[json!([1])]), "", Code::Internal, ""),
    ] {
        let server = serving(vllm(), answer).await;
        let mut run = server.kernel.run::<Chunk>("vllm", args! { prompt: "hi" });
        let mut seen = String::new();
        let error = loop {
            match run.next().await.unwrap() {
                Ok(chunk) => seen.push_str(&chunk.to_string()),
                Err(error) => break error,
            }
        };
        assert_eq!(seen, text, "{error}");
        assert_eq!((error.code(), error.reason()), (code, reason), "{error}");
        assert!(run.next().await.is_none());
    }
}

#[tokio::test]
async fn tr_608_dropping_the_run_ends_the_request() {
    let (status, mut text) = events(&[states("green")]);
    text.push_str("...");
    let server = serving(bare(), (status, text)).await;
    let mut run = server.kernel.run::<String>("bare", args! { prompt: "hi" });
    assert_eq!(run.next().await.unwrap().unwrap(), "green");
    drop(run);
    server.left.notified().await;
}

/// The address of the server is not for clients.
#[tokio::test]
async fn tr_1501_a_server_that_is_gone_is_unavailable() {
    let server = serving(bare(), events(&[])).await;
    let kernel = server.kernel.clone();
    server.task.abort();
    // The listener is closed when its task has ended.
    while !server.task.is_finished() {
        tokio::task::yield_now().await;
    }
    let error = kernel
        .run::<String>("bare", args! { prompt: "hi" })
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(!error.to_string().contains("127.0.0.1"), "{error}");
}
