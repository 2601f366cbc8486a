//! Metadata, configuration, statistics and index of models, and the error texts of failed look-ups.

use futures::{StreamExt, stream};
use sapwood_engine::adapters::AdapterInfo;
use sapwood_engine::scripted::Script;
use sapwood_kernel::{Chunk, Spec, raw};
use sapwood_server::faces::generate::{Config, ModelOptions};
use sapwood_tests::http::{Wire, head, post};
use sapwood_tests::{Running, key};
use serde_json::json;

use super::{ask, demo, error, kernel, parrot, parrot_signature, script};

/// A server whose model `m` has the versions 1 and 3, and is loading unless `ready`.
async fn versions(ready: bool) -> Running {
    let model = ModelOptions {
        versions: vec![1, 3],
        ..ModelOptions::default()
    };
    let config = Config {
        models: [("m".to_owned(), model)].into(),
        ..Config::default()
    };
    let server = Running::generating(kernel(&[("m", script(Script::Echo))]), config).await;
    if !ready {
        server.shared.health.loading("m");
    }
    server
}

/// TR-205
#[tokio::test]
async fn tr_204_unknown_models_and_versions_have_exact_error_texts() {
    let long = "9".repeat(30);
    let stol = format!(
        "failed to get model version from specified version string '{long}' (details: stol), version should be an \
         integral value > 0"
    );
    let unknown = "Request for unknown model: ";
    let (ready, loading) = (versions(true).await, versions(false).await);
    for (server, path, status, expect) in [
        (&ready, format!("m/versions/{long}"), 400, stol),
        (
            &ready,
            "x".into(),
            400,
            format!("{unknown}'x' is not found"),
        ),
        (
            &ready,
            "m/versions/0".into(),
            404,
            format!("{unknown}'m' version 0 is not found"),
        ),
        (
            &ready,
            "m/versions/2".into(),
            404,
            format!("{unknown}'m' version 2 is not found"),
        ),
        (
            &loading,
            "m".into(),
            404,
            format!("{unknown}'m' has no available versions"),
        ),
        (
            &loading,
            "m/versions/1".into(),
            503,
            format!("{unknown}'m' version 1 is not at ready state"),
        ),
    ] {
        for tail in ["generate", "generate_stream"] {
            let answer = ask(server, &format!("/v2/models/{path}/{tail}"), "{}").await;
            assert_eq!(error(&answer), expect);
            assert_eq!(answer.summary().0, status, "{expect}");
            assert_eq!(answer.summary().1, "application/json", "{expect}");
        }
    }
    for (path, version) in [("m", "3"), ("m/versions/1", "1")] {
        let answer = ask(
            &ready,
            &format!("/v2/models/{path}/generate"),
            r#"{"text_input":"hi"}"#,
        )
        .await;
        assert_eq!(answer.json()["model_version"], version);
    }
}

#[tokio::test]
async fn tr_204_the_status_of_an_unknown_model_can_be_404() {
    let config = Config {
        unknown_model_status: 404,
        ..Config::default()
    };
    let server = Running::generating(kernel(&[]), config).await;
    let answer = ask(&server, "/v2/models/x/generate", "{}").await;
    assert_eq!(answer.summary().0, 404);
}

/// TR-201
#[tokio::test]
async fn tr_202_unknown_paths_and_methods_get_json_errors() {
    let server = demo().await;
    let mut wire = Wire::connect(server.address).await;
    for path in [
        "/v2/",
        "/v2/models/demo/generate/",
        "/v2/nothing",
        "/v2/models/%zz/generate",
        "/v2/models/demo/versions/x/generate",
    ] {
        let answer = wire.get(path).await;
        assert_eq!(
            answer.summary(),
            (404, "application/json".into(), r#"{"error":"Not Found"}"#),
            "{path}"
        );
    }
    for (method, path, allow) in [
        ("GET", "/v2/models/nobody/generate", "POST"),
        ("DELETE", "/v2/models/demo/generate_stream", "POST"),
        ("POST", "/v2", "GET, HEAD"),
        ("PUT", "/v2/logging", "GET, HEAD, POST"),
    ] {
        let answer = wire.ask(head(method, path, &["content-length: 0"])).await;
        assert_eq!(
            answer.summary(),
            (
                405,
                "application/json".into(),
                r#"{"error":"Method Not Allowed"}"#
            )
        );
        assert_eq!(
            answer.head.header("allow").as_deref(),
            Some(allow),
            "{path}"
        );
    }
    // An encoded slash in a name, and a query that is ignored.
    let kernel = kernel(&[("org/name", script(Script::Echo))]);
    let server = Running::generating(kernel, Config::default()).await;
    let answer = ask(
        &server,
        "/v2/models/org%2Fname/generate?a=b",
        r#"{"text_input":"hi"}"#,
    )
    .await;
    assert_eq!(answer.json()["model_name"], "org/name");
}

#[tokio::test]
async fn tr_206_the_error_code_and_the_retry_delay_are_headers() {
    let server = versions(false).await;
    let answer = ask(&server, "/v2/models/m/versions/1/generate", "{}").await;
    assert_eq!(
        answer.head.header("sapwood-error").as_deref(),
        Some("unavailable")
    );
    assert_eq!(answer.head.header("retry-after").as_deref(), Some("1"));
    assert!(answer.head.header("x-request-id").is_some());
}

#[tokio::test]
async fn tr_207_connections_stay_open_after_errors() {
    let server = demo().await;
    let mut wire = Wire::connect(server.address).await;
    for _ in 0..3 {
        assert_eq!(
            wire.post("/v2/models/x/generate", "{}").await.summary().0,
            400
        );
        assert_eq!(
            wire.post("/v2/models/demo/generate", "[").await.summary().0,
            400
        );
        assert_eq!(
            wire.post("/v2/models/demo/generate", r#"{"text_input":"hi"}"#)
                .await
                .summary()
                .0,
            200
        );
        let mut head = head("HEAD", "/v2/health/live", &[]);
        head.push_str(&sapwood_tests::http::head("GET", "/v2/health/live", &[]));
        wire.send(head).await;
        assert_eq!(
            (wire.head().await.status, wire.answer().await.summary().0),
            (200, 200)
        );
    }
}

#[tokio::test]
async fn tr_205_a_missing_key_is_an_error_in_tritons_format() {
    let kernel = kernel(&[("demo", script(Script::Echo))]);
    let keys = vec![key("anna", "secret")];
    let server = Running::start(
        kernel,
        sapwood_server::faces::evergreen::Config::default(),
        keys,
    )
    .await;
    let mut wire = Wire::connect(server.address).await;
    let body = br#"{"text_input":"hi"}"#;
    let answer = wire.ask(post("/v2/models/demo/generate", &[], body)).await;
    assert_eq!(
        (answer.summary().0, answer.summary().1.as_str()),
        (401, "application/json")
    );
    assert!(!error(&answer).is_empty());
    assert_eq!(
        answer.head.header("sapwood-error").as_deref(),
        Some("unauthenticated")
    );
    let mut wire = Wire::connect(server.address).await;
    let answer = wire
        .ask(post(
            "/v2/models/demo/generate",
            &["authorization: Bearer secret"],
            body,
        ))
        .await;
    assert_eq!(answer.summary().0, 200);
}

/// TR-101, TR-709
#[tokio::test]
async fn tr_701_server_metadata_and_health_routes_respond() {
    let server = demo().await;
    let mut wire = Wire::connect(server.address).await;
    let about = wire.get("/v2").await.json();
    assert_eq!(about["name"], "sapwood");
    assert_eq!(about["version"], sapwood_server::VERSION);
    let extensions = about["extensions"].as_array().unwrap();
    assert!(
        extensions.contains(&json!("generate"))
            && extensions.contains(&json!("binary_tensor_data"))
    );
    for path in [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/demo/ready",
        "/v2/models/demo/versions/1/ready",
    ] {
        assert_eq!(
            wire.get(path).await.summary(),
            (200, String::new(), ""),
            "{path}"
        );
    }
    server.shared.health.loading("demo");
    assert_eq!(wire.get("/v2/health/live").await.summary().0, 200);
    assert_eq!(
        wire.get("/v2/health/ready").await.summary(),
        (400, String::new(), "")
    );
    let ready = wire.get("/v2/models/demo/ready").await;
    assert_eq!(
        ready.summary(),
        (
            400,
            "application/json".into(),
            r#"{"error":"Model version not ready"}"#
        )
    );
}

/// TR-103
#[tokio::test]
async fn tr_702_metadata_shows_the_signature() {
    let server = parrot(|model| model.platform = "mock".into()).await;
    let mut wire = Wire::connect(server.address).await;
    let expect = json!({
        "name": "parrot", "versions": ["1"], "platform": "mock",
        "inputs": [
            {"name": "QUESTION", "datatype": "BYTES", "shape": [1, 1]},
            {"name": "LIVE", "datatype": "BOOL", "shape": [1, 1]},
            {"name": "hints", "datatype": "INT32", "shape": [1, -1]},
        ],
        "outputs": [{"name": "ANSWER", "datatype": "BYTES", "shape": [1, -1]}],
    });
    assert_eq!(wire.get("/v2/models/parrot").await.json(), expect);
    assert_eq!(
        wire.get("/v2/models/parrot/versions/1").await.json(),
        expect
    );
    let union = demo().await;
    let demo = Wire::connect(union.address)
        .await
        .get("/v2/models/demo")
        .await
        .json();
    assert_eq!(
        demo["inputs"][0],
        json!({"name": "text_input", "datatype": "BYTES", "shape": [1]})
    );
    assert_eq!(
        demo["outputs"][0],
        json!({"name": "text_output", "datatype": "BYTES", "shape": [-1]})
    );
}

#[tokio::test]
async fn tr_703_the_configuration_lists_the_adapters_of_a_model() {
    let adapter = |name: &str, applied| AdapterInfo {
        name: name.into(),
        scale: 0.1,
        applied,
    };
    let adapters = vec![adapter("style", true), adapter("code", false)];
    let server = parrot(|model| model.adapters = adapters).await;
    let mut wire = Wire::connect(server.address).await;
    let config = wire.get("/v2/models/parrot/config").await.json();
    let list = config["parameters"]["lora"]["string_value"].as_str();
    let list: serde_json::Value = serde_json::from_str(list.unwrap()).unwrap();
    let expected = json!([
        {"id": 0, "name": "style", "scale": 0.1, "apply": true},
        {"id": 1, "name": "code", "scale": 0.1, "apply": false},
    ]);
    assert_eq!(list, expected);
}

/// TR-102
#[tokio::test]
async fn tr_703_the_configuration_has_every_field_that_load_generators_read() {
    let mut signature = parrot_signature();
    signature.max_batch_size = 4;
    signature.decoupled = false;
    let server = parrot(|model| model.signature = Some(signature)).await;
    let mut wire = Wire::connect(server.address).await;
    let config = wire.get("/v2/models/parrot/config").await.json();
    assert_eq!(config["max_batch_size"], 4);
    assert_eq!(
        config["model_transaction_policy"],
        json!({"decoupled": false})
    );
    assert_eq!(
        config["version_policy"],
        json!({"specific": {"versions": [1]}})
    );
    assert_eq!(
        config["input"][0],
        json!({"name": "QUESTION", "data_type": "TYPE_STRING", "format": "FORMAT_NONE", "dims": [1, 1],
            "is_shape_tensor": false, "allow_ragged_batch": false, "optional": false})
    );
    assert_eq!(config["input"][2]["optional"], true);
    assert_eq!(
        config["output"][0],
        json!({"name": "ANSWER", "data_type": "TYPE_STRING", "dims": [1, -1], "label_filename": "",
            "is_shape_tensor": false})
    );
    for absent in ["dynamic_batching", "sequence_batching"] {
        assert!(config.get(absent).is_none(), "{absent}");
    }
    // Metadata includes the batch dimension, the configuration does not.
    let shape = &wire.get("/v2/models/parrot").await.json()["inputs"][0]["shape"];
    assert_eq!(*shape, json!([-1, 1, 1]));
}

#[tokio::test]
async fn tr_704_statistics_have_every_field_as_a_number() {
    let server = demo().await;
    let mut wire = Wire::connect(server.address).await;
    wire.post("/v2/models/demo/generate", r#"{"text_input":"hi"}"#)
        .await;
    wire.post(
        "/v2/models/demo/generate_stream",
        r#"{"text_input":"one two","stream":true}"#,
    )
    .await;
    wire.post(
        "/v2/models/demo/generate",
        r#"{"text_input":"hi","top_p":2}"#,
    )
    .await;
    for path in [
        "/v2/models/stats",
        "/v2/models/demo/stats",
        "/v2/models/demo/versions/1/stats",
    ] {
        let stats = wire.get(path).await.json();
        let model = &stats["model_stats"][0];
        assert_eq!(
            (&model["name"], &model["version"]),
            (&json!("demo"), &json!("1"))
        );
        assert_eq!(
            (
                model["inference_count"].as_u64(),
                model["execution_count"].as_u64()
            ),
            (Some(2), Some(2))
        );
        assert!(model["last_inference"].as_u64().unwrap() > 0);
        let spans = &model["inference_stats"];
        for name in [
            "success",
            "fail",
            "queue",
            "compute_input",
            "compute_infer",
            "compute_output",
            "cache_hit",
            "cache_miss",
        ] {
            assert!(
                spans[name]["count"].is_u64() && spans[name]["ns"].is_u64(),
                "{name}"
            );
        }
        assert_eq!(
            (&spans["success"]["count"], &spans["fail"]["count"]),
            (&json!(2), &json!(1))
        );
        assert_eq!(model["response_stats"]["0"]["success"]["count"], 2);
        assert_eq!(model["response_stats"]["1"]["success"]["count"], 1);
        assert_eq!(
            (&model["batch_stats"], &model["memory_usage"]),
            (&json!([]), &json!([]))
        );
    }
}

/// TR-706
#[tokio::test]
async fn tr_705_the_repository_lists_models_and_loads_none() {
    let server = versions(false).await;
    let mut wire = Wire::connect(server.address).await;
    let entry =
        |version: &str| json!({"name": "m", "version": version, "state": "LOADING", "reason": ""});
    for (body, expect) in [
        ("", json!([entry("1"), entry("3")])),
        ("{}", json!([entry("1"), entry("3")])),
        (r#"{"ready":false}"#, json!([entry("1"), entry("3")])),
        (r#"{"ready":true}"#, json!([])),
    ] {
        assert_eq!(
            wire.post("/v2/repository/index", body).await.json(),
            expect,
            "{body}"
        );
    }
    let not_allowed = "explicit model load / unload is not allowed if polling is enabled";
    for (path, body, status, expect) in [
        (
            "/v2/repository/index",
            r#"{"ready":1}"#,
            400,
            "Invalid value for 'ready': expected a boolean",
        ),
        (
            "/v2/repository/mine/index",
            "",
            501,
            "'repository_name' specification is not supported",
        ),
        ("/v2/repository/models/m/load", "", 503, not_allowed),
        ("/v2/repository/models/m/unload", "{}", 503, not_allowed),
    ] {
        let answer = wire.post(path, body).await;
        assert_eq!(
            (answer.summary().0, error(&answer).as_str()),
            (status, expect)
        );
    }
}

/// TR-708
#[tokio::test]
async fn tr_707_trace_and_log_settings_are_read_only() {
    let server = demo().await;
    let mut wire = Wire::connect(server.address).await;
    let trace = wire.get("/v2/trace/setting").await.json();
    assert_eq!(
        trace,
        wire.get("/v2/models/demo/trace/setting").await.json()
    );
    assert_eq!(trace["trace_level"], json!(["OFF"]));
    assert_eq!(trace["trace_rate"], "1000");
    let logging = wire.get("/v2/logging").await.json();
    assert_eq!(logging["log_verbose_level"], 0);
    assert_eq!(
        wire.post("/v2/logging", r#"{"log_info":true,"log_error":null}"#)
            .await
            .json(),
        logging
    );
    for (path, body, status, expect) in [
        (
            "/v2/trace/setting",
            r#"{"trace_file":"x"}"#,
            501,
            "trace file location can not be updated through network protocol",
        ),
        (
            "/v2/logging",
            r#"{"log_file":"x"}"#,
            501,
            "log file location can not be updated through network protocol",
        ),
        (
            "/v2/logging",
            r#"{"log_infos":true}"#,
            400,
            "unknown setting 'log_infos'",
        ),
        (
            "/v2/systemsharedmemory/region/a/register",
            "{}",
            501,
            "shared memory is not supported",
        ),
    ] {
        let answer = wire.post(path, body).await;
        assert_eq!(
            (answer.summary().0, error(&answer).as_str()),
            (status, expect)
        );
    }
    assert_eq!(
        wire.get("/v2/cudasharedmemory/status").await.json(),
        json!([])
    );
    assert_eq!(
        wire.post("/v2/systemsharedmemory/unregister", "")
            .await
            .summary()
            .0,
        200
    );
}

#[tokio::test]
async fn tr_1308_every_function_is_a_model_with_its_ports_as_tensors() {
    let server = demo().await;
    let mut wire = Wire::connect(server.address).await;
    let echo = wire.get("/v2/models/fn.echo").await.json();
    assert_eq!(echo["inputs"][0]["name"], "text");
    assert_eq!(echo["outputs"][0]["name"], "response");
    for name in ["echo", "fn.echo"] {
        let answer = wire
            .post(
                &format!("/v2/models/{name}/generate"),
                r#"{"text":"hello","id":"1"}"#,
            )
            .await;
        let expect = format!(
            r#"{{"id":"1","model_name":"{name}","model_version":"1","response":"hello","sapwood-mime":"text/plain"}}"#
        );
        assert_eq!(
            answer.summary(),
            (200, "application/json".into(), expect.as_str())
        );
    }
    let events = wire
        .post("/v2/models/echo/generate_stream", r#"{"text":"hello"}"#)
        .await
        .events();
    let text: String = events
        .iter()
        .map(|event| event["response"].as_str().unwrap())
        .collect();
    assert_eq!(text, "hello");
    // A model is not listed as a function.
    assert_eq!(wire.get("/v2/models/fn.demo").await.summary().0, 400);
    let missing = wire.post("/v2/models/echo/generate", "{}").await;
    assert!(error(&missing).contains("missing required input(s) ['text']"));
}

/// Functions and models of upstreams may be endless.
#[tokio::test]
async fn d_47_a_single_response_has_at_most_16_mib_of_text() {
    let kernel = kernel(&[]);
    for (name, is_model) in [("function", false), ("model", true)] {
        let mut spec = Spec::new(name, "It says the same for ever.");
        spec.model = is_model;
        let generate = sapwood_kernel::generate(Default::default());
        spec.inputs = generate.spec().inputs.clone();
        spec.outputs = generate.spec().outputs.clone();
        let piece = Chunk::text("x".repeat(1 << 20));
        let endless = move |_| stream::repeat(piece.clone()).map(Ok).boxed();
        kernel.add(raw(spec, endless)).unwrap();
    }
    let server = Running::generating(kernel, Config::default()).await;
    for (name, input) in [("function", "prompt"), ("model", "text_input")] {
        let path = format!("/v2/models/{name}/generate");
        let answer = ask(&server, &path, &json!({input: "x"}).to_string()).await;
        let reply = error(&answer);
        assert_eq!(answer.summary().0, 400, "{name}: {reply}");
        assert!(
            reply.contains("holds at most 16777216 bytes"),
            "{name}: {reply}"
        );
    }
}

/// GENERATE as a function: text and metadata, and no token ids in place of text.
#[tokio::test]
async fn tr_1308_binary_ports_and_log_probabilities_are_returned_on_request() {
    let kernel = kernel(&[("demo", script(Script::Words))]);
    kernel
        .add(sapwood_kernel::generate(Default::default()))
        .unwrap();
    let server = Running::generating(kernel, Config::default()).await;
    let mut wire = Wire::connect(server.address).await;
    let body = r#"{"prompt":"one two","config":{"top_logprobs":1,"prompt_mode":"raw"}}"#;
    let answer = wire.post("/v2/models/GENERATE/generate", body).await.json();
    assert_eq!(answer["response"], "one two");
    let meta: serde_json::Value = serde_json::from_str(answer["meta"].as_str().unwrap()).unwrap();
    assert_eq!(meta["finish_reason"], "stop");
    for absent in ["tokens", "logprobs", "events"] {
        assert!(answer.get(absent).is_none(), "{answer}");
    }
    let events = wire.post("/v2/models/GENERATE/generate_stream", body).await;
    for event in events.events() {
        for absent in ["tokens", "logprobs", "events"] {
            assert!(event.get(absent).is_none(), "{event}");
        }
    }
    let inputs = serde_json::json!([{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["one two"]}]);
    let asked = serde_json::json!({"inputs": inputs, "outputs": [{"name": "logprobs"}, {"name": "response"}]});
    let answer = wire
        .post("/v2/models/GENERATE/infer", &asked.to_string())
        .await;
    let names: Vec<_> = answer.json()["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|output| output["name"].clone())
        .collect();
    assert!(names.contains(&"logprobs".into()), "{names:?}");
    assert!(!names.contains(&"meta".into()), "{names:?}");
}
