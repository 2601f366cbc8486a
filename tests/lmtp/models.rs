//! MODEL_INFO, and which models are served.

use std::sync::Arc;

use sapwood_kernel::Kernel;
use sapwood_server::auth::rate_limit::{RateLimits, TokenMeter};
use sapwood_server::auth::scopes::KeyFingerprint;
use serde_json::{Value, json};

use super::transports::http;
use super::{chatter, client, kernel, message, of_parrot, parrot, stepped, stream, tokens_and_end};
use sapwood_tests::socket::Socket;
use sapwood_tests::{Faces, Running, key, spawned};

#[tokio::test]
async fn lm_331_model_info_describes_the_model() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    socket
        .send_text(
            r#"MODEL_INFO {"stream_id": "a", "model": "parrot", "data": {"model": "parrot"}}"#,
        )
        .await;
    let (word, items) = message(&mut socket).await;
    assert_eq!((word.as_str(), items.len()), ("MSG", 1));
    assert_eq!(items[0]["stream_id"], json!("a"));
    let info = &items[0]["model_info"];
    let keys: Vec<&str> = info
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let expect = [
        "model",
        "constructor",
        "model_type",
        "vocab_size",
        "max_context",
        "bos",
        "eos",
        "tokenizer",
        "version",
        "deterministic",
    ];
    assert_eq!(keys, expect);
    for (key, value) in [
        ("model", json!("parrot")),
        ("constructor", json!("sapwood:scripted scripted: echo")),
        ("vocab_size", json!(258)),
        ("max_context", json!(4096)),
        ("bos", json!(256)),
        ("eos", json!([257])),
        ("deterministic", json!(true)),
    ] {
        assert_eq!(info[key], value, "{key}");
    }
    assert_eq!(info["tokenizer"]["kind"], json!("bytes"));
    assert_eq!(info["tokenizer"]["sha256"].as_str().map(str::len), Some(64));
    socket
        .send_text(r#"MODEL_INFO {"stream_id":1,"model":"nobody"}"#)
        .await;
    let (word, items) = message(&mut socket).await;
    assert_eq!(
        (word.as_str(), &items[0]["code"]),
        ("MSG", &json!("model_not_found"))
    );
}

#[tokio::test]
async fn lm_951_model_info_describes_the_tokenizer_and_its_url() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    socket
        .send_text(r#"MODEL_INFO {"stream_id":1,"model":"parrot"}"#)
        .await;
    let facts = message(&mut socket).await.1[0]["model_info"]["tokenizer"].clone();
    for (key, value) in [
        ("kind", json!("bytes")),
        ("vocab_size", json!(258)),
        ("bos", json!(256)),
        ("eos", json!([257])),
        ("add_bos", json!(true)),
        ("special", json!([[256, "<s>"], [257, "</s>"]])),
        ("url", json!("/lmtp/tokenizer/parrot")),
    ] {
        assert_eq!(facts[key], value, "{key}");
    }
    let (head, body) = http(&server, "GET /lmtp/tokenizer/parrot", "").await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    let digest = KeyFingerprint::of(&body).to_string();
    assert_eq!(facts["sha256"], json!(digest), "of the file's bytes");
    assert!(head.contains(&format!("etag: \"{digest}\"")), "{head}");
    let file: Value = serde_json::from_str(&body).unwrap();
    let vocabulary = file["model"]["vocab"].as_object().unwrap();
    assert_eq!(vocabulary.len(), 258);
    for (shown, token) in [("A", 65), ("Ġ", 32), ("Ċ", 10), ("ÿ", 255), ("</s>", 257)] {
        assert_eq!(vocabulary[shown], json!(token));
    }
    let known = format!("GET /lmtp/tokenizer/parrot\nif-none-match: \"{digest}\"");
    assert!(
        http(&server, &known, "")
            .await
            .0
            .starts_with("http/1.1 304")
    );
    let unknown = http(&server, "GET /lmtp/tokenizer/nobody", "").await.0;
    assert!(unknown.starts_with("http/1.1 404"), "{unknown}");
    // Models with word tokenizers have a file, too.
    let words = super::with_config(kernel("m", spawned(chatter())), Default::default()).await;
    let (head, body) = http(&words, "GET /lmtp/tokenizer/m", "").await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    let file: Value = serde_json::from_str(&body).unwrap();
    let vocabulary = file["model"]["vocab"].as_object().unwrap();
    assert_eq!(vocabulary.len(), 32_000);
}

/// A model that the key may not use and one that does not exist get the same answer.
#[tokio::test]
async fn d_45_a_key_for_some_models_learns_nothing_of_the_others() {
    let mut some = key("anna", "rye");
    some.allowance = Some(Arc::new(TokenMeter::new(
        "key",
        RateLimits {
            models: Some(Arc::new(["mine".into()].into())),
            ..RateLimits::default()
        },
    )));
    let kernel = kernel("parrot", spawned(parrot()));
    let server =
        Running::start_faces(Default::default(), kernel, Faces::default(), vec![some]).await;
    let bearer = [("authorization", "Bearer rye")];
    let mut socket = Socket::open(&server, "/lmtp", &bearer).await.unwrap();
    for (name, expect) in [
        ("parrot", "insufficient_scope"),
        ("nobody", "insufficient_scope"),
        ("mine", "model_not_found"),
    ] {
        let asked = format!(r#"MODEL_INFO {{"stream_id":1,"model":"{name}"}}"#);
        socket.send_text(&asked).await;
        let (_, items) = message(&mut socket).await;
        assert_eq!(items[0]["code"], json!(expect), "{name}");
    }
}

#[tokio::test]
async fn lm_331_model_info_distinguishes_word_and_byte_tokenizers() {
    let server = super::with_config(kernel("m", spawned(chatter())), Default::default()).await;
    let mut socket = client(&server).await;
    socket
        .send_text(r#"MODEL_INFO {"stream_id":1,"model":"m"}"#)
        .await;
    let info = message(&mut socket).await.1[0]["model_info"].clone();
    assert_eq!(info["tokenizer"]["kind"], json!("words"));
    assert_eq!(info["vocab_size"], json!(32_000));
}

/// The engine is never stepped.
#[tokio::test]
async fn lm_332_model_info_is_answered_while_the_engine_is_stalled() {
    let (_owner, server) = stepped(parrot()).await;
    let mut socket = client(&server).await;
    socket
        .send_text(r#"GENERATE {"model":"parrot","prompt":[1],"stream_id":1}"#)
        .await;
    socket
        .send_text(r#"MODEL_INFO {"model":"parrot","stream_id":1}"#)
        .await;
    assert_eq!(message(&mut socket).await.0, "MSG");
}

/// The header of the file is enough for MODEL_INFO; generation waits (LM-322).
#[tokio::test]
async fn lm_332_model_info_of_a_loading_model_comes_from_its_file() {
    let engine = spawned(parrot());
    let facts = sapwood_kernel::ModelFacts {
        info: engine.info().clone(),
        vocabulary: engine.vocabulary().clone(),
        defaults: Default::default(),
    };
    let mut spec = sapwood_kernel::Spec::new("later", "");
    spec.model = true;
    spec.facts = Some(Arc::new(facts));
    let kernel = Kernel::new();
    let none = |_| Box::pin(futures::stream::empty()) as sapwood_kernel::Chunks;
    kernel.add(sapwood_kernel::raw(spec, none)).unwrap();
    let server = Running::start(kernel.clone(), Default::default(), Vec::new()).await;
    let health = &server.shared.health;
    health.loading("later");
    let mut socket = client(&server).await;
    let ask = r#"MODEL_INFO {"model":"later","stream_id":1}"#;
    socket
        .send_text(r#"GENERATE {"model":"later","prompt":[7],"stream_id":2}"#)
        .await;
    socket.send_text(ask).await;
    let (word, received) = message(&mut socket).await;
    assert_eq!(word, "MSG");
    let info = &received[0]["model_info"];
    assert_eq!(
        (&info["loading"], &info["vocab_size"]),
        (&json!(true), &json!(258))
    );
    kernel.replace(sapwood_kernel::model("later", engine));
    health.running("later", Box::new(|| std::time::Duration::ZERO));
    let items = stream(&mut socket, 2).await;
    assert_eq!(tokens_and_end(&items).0, [7, 257]);
    socket.send_text(ask).await;
    let (_, received) = message(&mut socket).await;
    assert!(
        received[0]["model_info"].get("loading").is_none(),
        "{received:?}"
    );
}

/// A dashboard asks for ever, and would keep a model loaded that nobody uses.
#[tokio::test]
async fn lm_332_a_model_that_is_loaded_on_demand_is_loaded_by_a_stream_and_not_by_model_info() {
    let engine = spawned(parrot());
    let facts = sapwood_kernel::ModelFacts {
        info: engine.info().clone(),
        vocabulary: engine.vocabulary().clone(),
        defaults: Default::default(),
    };
    let mut spec = sapwood_kernel::Spec::new("later", "");
    spec.model = true;
    spec.facts = Some(Arc::new(facts));
    let kernel = Kernel::new();
    let none = |_| Box::pin(futures::stream::empty()) as sapwood_kernel::Chunks;
    kernel.add(sapwood_kernel::raw(spec, none)).unwrap();
    let server = Running::start(kernel.clone(), Default::default(), Vec::new()).await;
    let demanded = Arc::new(tokio::sync::Notify::new());
    let trigger = {
        let demanded = Arc::clone(&demanded);
        Box::new(move || demanded.notify_one())
    };
    server.shared.health.on_demand("later", trigger);
    let mut socket = client(&server).await;
    let ask = r#"MODEL_INFO {"model":"later","stream_id":1}"#;
    socket.send_text(ask).await;
    let (_, received) = message(&mut socket).await;
    assert_eq!(received[0]["model_info"]["loading"], json!(true));
    assert!(futures::poll!(Box::pin(demanded.notified())).is_pending());
    socket
        .send_text(r#"GENERATE {"model":"later","prompt":[7],"stream_id":2}"#)
        .await;
    demanded.notified().await;
    kernel.replace(sapwood_kernel::model("later", engine));
    let health = &server.shared.health;
    health.running("later", Box::new(|| std::time::Duration::ZERO));
    let items = stream(&mut socket, 2).await;
    assert_eq!(tokens_and_end(&items).0, [7, 257]);
}

/// A function that takes only text is not a model.
#[tokio::test]
async fn lm_322_a_stream_waits_for_a_model_that_is_loading() {
    let kernel = Kernel::new();
    let spec = |name: &'static str| sapwood_kernel::Spec::new(name, "");
    let none = |_| Box::pin(futures::stream::empty()) as sapwood_kernel::Chunks;
    for name in ["later", "never", "upper"] {
        kernel.add(sapwood_kernel::raw(spec(name), none)).unwrap();
    }
    let server = Running::start(kernel.clone(), Default::default(), Vec::new()).await;
    let health = &server.shared.health;
    health.loading("later");
    health.loading("never");
    let mut socket = client(&server).await;
    for (id, model) in [(1, "later"), (2, "never"), (3, "upper")] {
        socket
            .send_text(&format!(
                r#"GENERATE {{"model":"{model}","prompt":[7],"stream_id":{id}}}"#
            ))
            .await;
    }
    let items = stream(&mut socket, 3).await;
    assert_eq!(tokens_and_end(&items).1, "unsupported_operation");
    kernel.replace(sapwood_kernel::model("later", spawned(parrot())));
    health.running("later", Box::new(|| std::time::Duration::ZERO));
    // By the load itself, and not by the next ping of the connection.
    let started = tokio::time::timeout(BEFORE_A_PING, stream(&mut socket, 1)).await;
    assert_eq!(
        tokens_and_end(&started.unwrap()),
        (vec![7, 257], "stop".to_owned())
    );
    health.failed("never");
    let items = stream(&mut socket, 2).await;
    assert_eq!(tokens_and_end(&items).1, "engine_error");
    assert_eq!(items[0]["retryable"], Value::from(true));
}

/// Half of the interval at which the server pings a WebSocket (D-32), which wakes its connection in any case.
const BEFORE_A_PING: std::time::Duration = std::time::Duration::from_secs(10);
