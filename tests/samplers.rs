//! The samplers of llama.cpp's clients: every face carries each of their parameters, under one name.

use std::sync::Arc;

use sapwood_engine::adapters::AdapterInfo;
use sapwood_engine::scripted::{Config, Script, ScriptedTokenizer};
use sapwood_engine::tokenizer::{FileTokenizer, SpecialTokens, TokenizerFiles};
use sapwood_kernel::connect::lmtp::{LmtpModelTerms, function};
use sapwood_kernel::{Kernel, model};
use sapwood_net::lmtp::pool::LmtpPool;
use sapwood_net::lmtp::{ConnectOptions, LmtpClient, PeerAddress};
use sapwood_proto::evergreen::Metadata;
use sapwood_tests::http::Wire;
use sapwood_tests::socket::{Socket, SocketReply};
use sapwood_tests::{Running, request, spawned};
use serde_json::{Map, Value, json};

/// A prompt that a model likes to continue with more of the same, as its bias of `a` makes it.
const PROMPT: &str = "abababababababababab";

/// LoRA adapters, of which one computes unless a request chooses others.
fn adapters() -> Vec<AdapterInfo> {
    let adapter = |name: &str, applied| AdapterInfo {
        name: name.into(),
        scale: 0.5,
        applied,
    };
    vec![adapter("style", true), adapter("code", false)]
}

/// A model of bytes, so that the tokens of the prompt are known to every face.
async fn server() -> Running {
    let engine = spawned(Config {
        name: "wanderer".into(),
        script: Script::Tokens,
        tokenizer: Some(ScriptedTokenizer::Bytes),
        gap: 0.5,
        adapters: adapters(),
        ..Config::default()
    });
    let kernel = Kernel::new();
    kernel.add(model("wanderer", engine)).unwrap();
    Running::start(kernel, Default::default(), Vec::new()).await
}

/// A server whose model is that of another one, over LMTP. The other one is returned too, because it ends when dropped.
async fn servers() -> (Running, Running) {
    let back = server().await;
    let address = PeerAddress::parse(&format!("{}/lmtp", back.address)).unwrap();
    let file = address.fetch("/lmtp/tokenizer/wanderer").await.unwrap();
    let client = LmtpClient::connect(address, ConnectOptions::default());
    let pool = LmtpPool::of(client.await.unwrap(), "wanderer").await;
    let pool = pool.unwrap();
    let files = TokenizerFiles {
        tokenizer: file,
        ..TokenizerFiles::default()
    };
    let special = SpecialTokens {
        bos: Some(Some(256)),
        ends: vec![257],
        infill: None,
    };
    let terms = LmtpModelTerms {
        vocabulary: Some(Arc::new(FileTokenizer::new(&files, special).unwrap())),
        ..LmtpModelTerms::default()
    };
    let kernel = Kernel::new();
    kernel.add(function(&pool, "wanderer", terms)).unwrap();
    let front = Running::start(kernel, Default::default(), Vec::new()).await;
    (front, back)
}

type Params = Map<String, Value>;

fn merged(base: &Value, more: &Value) -> Params {
    let mut all = base.as_object().unwrap().clone();
    all.extend(more.as_object().unwrap().clone());
    all
}

/// The text of the generate endpoint for this body.
async fn generated(server: &Running, body: &Params) -> String {
    let mut wire = Wire::connect(server.address).await;
    let body = Value::Object(body.clone()).to_string();
    let answer = wire.post("/v2/models/wanderer/generate", &body).await;
    let text = &answer.json()["text_output"];
    text.as_str()
        .unwrap_or_else(|| panic!("{body}: {}", answer.json()))
        .to_owned()
}

/// The parameters as members of the body: inputs and parameters. What is no list is a parameter, so objects are text.
async fn by_members(server: &Running, params: &Params) -> String {
    let mut body = params.clone();
    if let Some(bias) = body.get_mut("logit_bias") {
        *bias = bias.to_string().into();
    }
    body.insert("text_input".into(), PROMPT.into());
    generated(server, &body).await
}

/// The parameters in the JSON of `sampling_parameters`.
async fn by_sampling_parameters(server: &Running, params: &Params) -> String {
    let sampling = Value::Object(params.clone()).to_string();
    let body = json!({"text_input": PROMPT, "sampling_parameters": sampling});
    generated(server, body.as_object().unwrap()).await
}

async fn evergreen(server: &Running, params: &Params) -> String {
    let mut config = params.clone();
    config.insert("prompt_mode".into(), "raw".into());
    let session = server.session().await;
    let leaf = async |mime: &str, data: String| {
        let metadata = Arc::new(Metadata::of(mime));
        let mut writer = session.write().unwrap();
        writer.write(&metadata, data.into()).await.unwrap();
        writer.end(&metadata).unwrap()
    };
    let prompt = leaf("text/plain", PROMPT.into()).await;
    let config = leaf("application/json", Value::Object(config).to_string()).await;
    let inputs = [("prompt", &prompt), ("config", &config)];
    let call = session
        .call(request("wanderer", &inputs, &["response"]))
        .unwrap();
    let response = call.output("response").unwrap().read().whole().await;
    String::from_utf8_lossy(&response.unwrap()).into_owned()
}

async fn lmtp(server: &Running, params: &Params) -> String {
    let mut generate = params.clone();
    // The other faces add BOS to the text.
    let prompt: Vec<u32> = [256]
        .into_iter()
        .chain(PROMPT.bytes().map(u32::from))
        .collect();
    generate.extend([
        ("model".to_owned(), "wanderer".into()),
        ("stream_id".to_owned(), 1.into()),
        ("prompt".to_owned(), prompt.into()),
    ]);
    let mut socket = Socket::open(server, "/lmtp", &[]).await.unwrap();
    let generate = Value::Object(generate);
    socket.send_text(&format!("GENERATE {generate}")).await;
    let mut bytes = Vec::new();
    loop {
        let SocketReply::Text(text) = socket.received().await else {
            panic!("no message");
        };
        let items = text
            .strip_prefix("TOKEN ")
            .unwrap_or_else(|| panic!("{generate}: {text}"));
        for item in serde_json::from_str::<Vec<Value>>(items).unwrap() {
            let token = item["token"].as_u64().unwrap();
            // Tokens above are control tokens.
            bytes.extend(u8::try_from(token));
            if !item["finish_reason"].is_null() {
                return String::from_utf8_lossy(&bytes).into_owned();
            }
        }
    }
}

/// The text of the first sequence of a run without a controller.
async fn run(server: &Running, params: &Params) -> String {
    let mut body = params.clone();
    body.extend([
        ("controller".to_owned(), "none".into()),
        ("prompt".to_owned(), PROMPT.into()),
    ]);
    let mut wire = Wire::connect(server.address).await;
    let answer = wire.post("/v1/run", &Value::Object(body).to_string()).await;
    let events = String::from_utf8(answer.body).unwrap();
    let events = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    events
        .filter_map(|event| Some(event["forks"][0]["text"].as_str()?.to_owned()))
        .collect()
}

/// Parameters, and one more that must change what they give.
fn cases() -> Vec<(Value, Value)> {
    let plain = json!({});
    let repeating = json!({"logit_bias": {"97": 12, "98": 12}, "dry_multiplier": 2});
    let penalised = json!({"repetition_penalty": 1.5, "logit_bias": {"97": 7, "98": 7}});
    let xtc = json!({"xtc_probability": 0.5});
    let mirostat = json!({"mirostat": 2});
    let dynamic = json!({"dynatemp_range": 0.9, "temperature": 1.0});
    vec![
        (penalised.clone(), json!({"penalty_last_n": 0})),
        (penalised, json!({"penalty_last_n": 3})),
        (
            json!({"logit_bias": {"97": 7, "98": 7}}),
            json!({"dry_multiplier": 2}),
        ),
        (repeating.clone(), json!({"dry_base": 1})),
        (repeating.clone(), json!({"dry_allowed_length": 19})),
        (repeating.clone(), json!({"dry_penalty_last_n": 2})),
        (repeating, json!({"dry_sequence_breakers": ["a", "b"]})),
        (plain.clone(), xtc.clone()),
        (xtc, json!({"xtc_threshold": 0.5})),
        (plain.clone(), json!({"typical_p": 0.3})),
        (plain.clone(), json!({"top_n_sigma": 0.5})),
        (plain.clone(), mirostat.clone()),
        (mirostat.clone(), json!({"mirostat_tau": 1.5})),
        (mirostat, json!({"mirostat_eta": 1})),
        (plain.clone(), dynamic.clone()),
        (plain.clone(), json!({"lora": "code"})),
        (plain, json!({"lora": []})),
        (
            json!({"lora": ["code"]}),
            json!({"lora": [{"id": 1, "scale": 2.0}]}),
        ),
        (
            json!({"lora": [{"name": "style", "scale": -1}]}),
            json!({"lora": ["code", {"name": "style", "scale": -1}]}),
        ),
        (dynamic, json!({"dynatemp_exponent": 9})),
        (
            json!({"temperature": 0.3, "top_p": 0.7}),
            json!({"samplers": ["top_p", "temperature"]}),
        ),
    ]
}

#[tokio::test]
async fn d_20_every_face_carries_each_sampler_parameter() {
    let server = server().await;
    let fixed = json!({"max_tokens": 48, "seed": 5, "temperature": 1, "ignore_eos": true});
    for (base, more) in cases() {
        let base = merged(&fixed, &base);
        let params = merged(&Value::Object(base.clone()), &more);
        let expected = by_members(&server, &params).await;
        assert_ne!(
            expected,
            by_members(&server, &base).await,
            "{more} changes nothing"
        );
        for (face, text) in [
            (
                "sampling_parameters",
                by_sampling_parameters(&server, &params).await,
            ),
            ("evergreen", evergreen(&server, &params).await),
            ("lmtp", lmtp(&server, &params).await),
            ("run", run(&server, &params).await),
        ] {
            assert_eq!(text, expected, "{face}: {more}");
        }
    }
}

/// The name that llama-server's and Ollama's clients send.
#[tokio::test]
async fn repeat_last_n_is_penalty_last_n() {
    let server = server().await;
    let text = async |more: Value| {
        let base = json!({"max_tokens": 48, "seed": 5, "repetition_penalty": 1.5});
        by_members(&server, &merged(&base, &more)).await
    };
    let window = text(json!({"repeat_last_n": 3})).await;
    assert_eq!(window, text(json!({"penalty_last_n": 3})).await);
    assert_ne!(window, text(json!({})).await);
}

/// The field of vLLM's backend.
#[tokio::test]
async fn lora_name_is_the_name_of_one_adapter() {
    let server = server().await;
    let fixed = json!({"max_tokens": 24, "seed": 5, "temperature": 1});
    let expected = by_members(&server, &merged(&fixed, &json!({"lora": ["code"]}))).await;
    let params = merged(&fixed, &json!({"lora_name": "code"}));
    assert_eq!(by_members(&server, &params).await, expected);
    let text = by_sampling_parameters(&server, &params).await;
    assert_eq!(text, expected);
    let none = by_members(&server, &merged(&fixed, &json!({"lora": []}))).await;
    assert_ne!(none, expected);
    // An empty name is none at all: the adapters of the model compute.
    let unset = by_members(&server, &merged(&fixed, &json!({"lora_name": ""}))).await;
    let default = merged(&fixed, &json!({"lora": "style"}));
    assert_eq!(unset, by_members(&server, &default).await);
    assert!(unset != none && unset != expected);
    let mut wire = Wire::connect(server.address).await;
    let body = json!({"text_input": "x", "lora": [{"name": "prose"}]});
    let url = "/v2/models/wanderer/generate";
    let answer = wire.post(url, &body.to_string()).await;
    let error = answer.json()["error"].to_string();
    assert!(error.contains("style") && error.contains("code"), "{error}");
}

#[tokio::test]
async fn adapters_reach_a_model_on_another_server() {
    let (front, back) = servers().await;
    let fixed = json!({"max_tokens": 24, "seed": 5, "temperature": 1, "ignore_eos": true});
    let mut texts = Vec::new();
    for lora in [json!([]), json!("style"), json!([{"id": 1, "scale": 0.25}])] {
        let params = merged(&fixed, &json!({"lora": lora}));
        let text = by_sampling_parameters(&back, &params).await;
        assert_eq!(
            by_sampling_parameters(&front, &params).await,
            text,
            "{lora}"
        );
        assert!(!texts.contains(&text), "{lora}");
        texts.push(text);
    }
}

#[tokio::test]
async fn lm_312_scores_are_those_of_the_adapters() {
    let server = server().await;
    let mut socket = Socket::open(&server, "/lmtp", &[]).await.unwrap();
    let mut scores = Vec::new();
    for lora in [json!(null), json!([]), json!(["style"]), json!([{"id": 0}])] {
        let score = json!({"model": "wanderer", "prompt": [1, 2], "scored": [3], "stream_id": 1, "lora": lora});
        socket.send_text(&format!("SCORE {score}")).await;
        let SocketReply::Text(text) = socket.received().await else {
            panic!("no message");
        };
        let items = text.strip_prefix("TOKEN ").unwrap();
        let items: Value = serde_json::from_str(items).unwrap();
        scores.push(items[0]["logprob"].clone());
    }
    // `null` is what the model applies.
    assert!(
        scores[0] == scores[2] && scores[2] == scores[3],
        "{scores:?}"
    );
    assert_ne!(scores[1], scores[2]);
}

#[tokio::test]
async fn d_20_biases_are_by_text_too() {
    let (front, back) = servers().await;
    let params = |bias: Value| {
        merged(
            &json!({"max_tokens": 4, "temperature": 0}),
            &json!({"logit_bias": bias}),
        )
    };
    for (bias, expected) in [
        (json!({"z": 100}), "zzzz"),
        (json!([["z", 100]]), "zzzz"),
        // Each token of the text, and the biases of one token add up.
        (json!([["yz", 60], [121, 30]]), "yyyy"),
        (json!([["yz", 60], ["z", 30], ["z", false]]), "yyyy"),
        // An id as a key, and a text of digits in a pair.
        (json!({"122": 100}), "zzzz"),
        (json!([["7", 100]]), "7777"),
    ] {
        let params = params(bias);
        for server in [&front, &back] {
            assert_eq!(by_members(server, &params).await, expected, "{params:?}");
            let text = by_sampling_parameters(server, &params).await;
            assert_eq!(text, expected, "{params:?}");
            assert_eq!(evergreen(server, &params).await, expected, "{params:?}");
        }
    }
}

#[tokio::test]
async fn the_stop_stays_in_the_output_if_asked() {
    let (front, back) = servers().await;
    for (stop, kept, cut) in [
        (json!({"stop": ["zz"]}), "zz", ""),
        (json!({"stop_token_ids": [122]}), "z", ""),
        (json!({"stop": ["zzz", "yz"]}), "zzz", ""),
    ] {
        for (include, expected) in [(true, kept), (false, cut)] {
            let fixed = json!({"max_tokens": 9, "temperature": 0, "logit_bias": {"122": 100}});
            let mut params = merged(&fixed, &stop);
            params.insert("include_stop_str_in_output".into(), include.into());
            for server in [&front, &back] {
                let text = by_sampling_parameters(server, &params).await;
                assert_eq!(text, expected, "{params:?}");
                assert_eq!(evergreen(server, &params).await, expected, "{params:?}");
            }
        }
    }
}
