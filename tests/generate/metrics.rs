//! Metrics under Triton's names, as a scraper reads them (section 10).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use sapwood_engine::scripted::{Script, ScriptStep, ScriptedFailure};
use sapwood_kernel::Kernel;
use sapwood_server::faces::generate::{Config, ModelOptions};
use sapwood_tests::http::{Answer, Wire, head, post};
use sapwood_tests::{Running, scripted, spawned, until};

use super::{ask, script, steps};

/// Every sample of a text, by name and labels.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name, value.parse().unwrap())
        })
        .collect()
}

async fn scrape(server: &Running) -> String {
    let mut wire = Wire::connect(server.address).await;
    let answer = wire.get("/metrics").await;
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    assert_eq!(
        (answer.summary().0, answer.summary().1.as_str()),
        (200, kind)
    );
    answer.text().to_owned()
}

/// A server of a model `m` in version 3 that generates three words, one `tired` that fails, and one `hangs`.
async fn server(metrics: bool) -> Running {
    let tired = ScriptStep::Error(ScriptedFailure {
        code: "internal".into(),
        message: "tired".into(),
    });
    let kernel = Kernel::new();
    let mut engines = Vec::new();
    for (name, mut config) in [
        ("m", script(Script::Words)),
        ("tired", steps(vec![tired])),
        (
            "hangs",
            steps(vec![ScriptStep::Text("a".into()), ScriptStep::Hang(true)]),
        ),
    ] {
        config.name = name.into();
        let engine = spawned(config);
        engines.push(engine.clone());
        kernel.add(sapwood_kernel::model(name, engine)).unwrap();
    }
    let model = ModelOptions {
        versions: vec![1, 3],
        ..ModelOptions::default()
    };
    let config = Config {
        metrics,
        models: [("m".to_owned(), model)].into(),
        ..Config::default()
    };
    let server = Running::generating(kernel, config).await;
    for engine in engines {
        server.shared.metrics.watch(engine);
    }
    let took = Duration::from_millis(1_500);
    server.shared.metrics.loaded_in("m", took);
    server
}

/// The samples of one scrape.
struct Scrape {
    text: String,
}

impl Scrape {
    fn value(&self, name: &str) -> f64 {
        let received = samples(&self.text);
        let value = received.get(name);
        *value.unwrap_or_else(|| panic!("{name} is missing in\n{}", self.text))
    }

    /// A metric of the model `m`.
    fn of_m(&self, name: &str, more: &str) -> f64 {
        self.value(&format!("{name}{{model=\"m\",version=\"3\"{more}}}"))
    }

    fn failures(&self, model: &str, version: u64) -> [f64; 4] {
        ["REJECTED", "CANCELED", "BACKEND", "OTHER"].map(|reason| {
            self.value(&format!(
                "nv_inference_request_failure{{model=\"{model}\",version=\"{version}\",reason=\"{reason}\"}}"
            ))
        })
    }
}

/// A scrape after three responses of `m`, one failure, and one client that disconnected.
async fn worked() -> Scrape {
    let server = server(true).await;
    for _ in 0..3 {
        let body = r#"{"text_input":"one two"}"#;
        let answer = ask(&server, "/v2/models/m/generate", body).await;
        assert_eq!(answer.summary().0, 200);
    }
    let body = r#"{"text_input":"x","stream":true}"#;
    let answer = ask(&server, "/v2/models/tired/generate", body).await;
    assert_eq!(answer.summary().0, 500);
    let mut wire = Wire::connect(server.address).await;
    wire.send(post(
        "/v2/models/hangs/generate_stream",
        &[],
        body.as_bytes(),
    ))
    .await;
    wire.head().await;
    drop(wire);
    let metrics = &server.shared.metrics;
    let streams = metrics.streams_open.with_label_values(&["generate"]);
    until("it has gone", || streams.get() == 0).await;
    let text = scrape(&server).await;
    Scrape { text }
}

#[tokio::test]
async fn tr_1001_requests_are_counted_under_tritons_metric_names() {
    let received = worked().await;
    for (name, expect) in [
        ("nv_inference_request_success", 3.0),
        ("nv_inference_count", 3.0),
        ("nv_inference_exec_count", 3.0),
        ("nv_inference_pending_request_count", 0.0),
        ("nv_model_load_duration_secs", 1.5),
        ("nv_inference_first_response_histogram_ms_count", 3.0),
    ] {
        assert_eq!(received.of_m(name, ""), expect, "{name}");
    }
    // All four reasons exist before anything fails.
    assert_eq!(received.failures("m", 3), [0.0; 4]);
    assert_eq!(received.failures("tired", 1), [0.0, 0.0, 1.0, 0.0]);
    assert_eq!(received.failures("hangs", 1), [0.0, 1.0, 0.0, 0.0]);
    let mut before = 0.0;
    for bound in [
        "1.0", "5.0", "10.0", "25.0", "50.0", "100.0", "250.0", "500.0", "1000.0", "2000.0",
        "5000.0", "+Inf",
    ] {
        let name = "nv_inference_first_response_histogram_ms_bucket";
        let count = received.of_m(name, &format!(",le=\"{bound}\""));
        assert!(before <= count, "{bound}");
        before = count;
    }
    assert_eq!(before, 3.0);
    assert!((0.0..=1.0).contains(&received.value("nv_cpu_utilization")));
    let total = received.value("nv_cpu_memory_total_bytes");
    assert!((1.0..total).contains(&received.value("nv_cpu_memory_used_bytes")));
    // What is not measured is absent.
    for absent in [
        "nv_gpu",
        "nv_energy",
        "nv_cache",
        "compute_input",
        "_summary_us",
    ] {
        assert!(!received.text.contains(absent), "{absent}");
    }
    let lines = received.text.lines();
    let heads: Vec<&str> = lines.filter(|line| line.starts_with("# TYPE")).collect();
    let separate: BTreeSet<&str> = heads.iter().copied().collect();
    assert_eq!(heads.len(), separate.len(), "each family has one head");
}

/// Each of them equals a metric under our own name.
#[tokio::test]
async fn tr_1002_metrics_under_tritons_names_equal_our_own() {
    let received = worked().await;
    let ours = r#"sapwood_requests_total{code="ok",face="generate",model="m"}"#;
    assert_eq!(
        received.value(ours),
        received.of_m("nv_inference_request_success", "")
    );
    for (theirs, ours) in [
        (
            "nv_inference_request_duration_us",
            "sapwood_request_seconds_sum",
        ),
        (
            "nv_inference_queue_duration_us",
            "sapwood_queue_seconds_sum",
        ),
        (
            "nv_inference_compute_infer_duration_us",
            "sapwood_inference_seconds_sum",
        ),
    ] {
        let seconds = received.value(&format!("{ours}{{model=\"m\"}}"));
        assert!(
            (received.of_m(theirs, "") - seconds * 1e6).abs() < 1.0,
            "{theirs}"
        );
    }
    let blocks = |kind: &str| {
        let label = format!(",kv_cache_block_type=\"{kind}\"");
        received.of_m("nv_trt_llm_kv_cache_block_metrics", &label)
    };
    let cells = |name: &str| received.value(&format!("sapwood_kv_blocks_{name}{{model=\"m\"}}"));
    assert_eq!(blocks("used"), cells("used"));
    assert_eq!(blocks("max"), cells("total"));
    assert_eq!(blocks("free"), cells("total") - cells("used"));
    assert_eq!(blocks("tokens_per"), 1.0);
}

/// D-36: OpenMetrics does not allow counters of such names.
#[tokio::test]
async fn tr_1002_tritons_names_can_be_disabled_and_are_absent_from_open_metrics() {
    let received = |server: Running| async move {
        let mut wire = Wire::connect(server.address).await;
        let open = ["accept: application/openmetrics-text"];
        let open = wire.ask(head("GET", "/metrics", &open)).await;
        let answer = wire.ask(head("POST", "/metrics", &[])).await;
        assert_eq!(answer.summary().0, 405);
        [scrape(&server).await, open.text().to_owned()].map(|text| text.contains("nv_"))
    };
    assert_eq!(received(server(true).await).await, [true, false]);
    assert_eq!(received(server(false).await).await, [false, false]);
}

/// The load of the model in a response header, for load balancers that ask for it.
#[tokio::test]
async fn tr_1003_responses_have_a_load_header_on_request() {
    let server = server(true).await;
    let ask = |path: &'static str, form: &'static str| {
        let address = server.address;
        async move {
            let mut wire = Wire::connect(address).await;
            let body: &[u8] = match path.ends_with("infer") {
                true => br#"{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["x"]}]}"#,
                false => br#"{"text_input":"x"}"#,
            };
            let format = format!("endpoint-load-metrics-format: {form}");
            let answer: Answer = wire.ask(post(path, &[&format], body)).await;
            assert_eq!(answer.summary().0, 200, "{}", answer.text());
            answer.head.header("endpoint-load-metrics")
        }
    };
    for path in [
        "/v2/models/m/generate",
        "/v2/models/m/generate_stream",
        "/v2/models/m/infer",
    ] {
        let text = ask(path, "text").await.unwrap();
        let rest = text
            .strip_prefix("TEXT named_metrics.kv_cache_utilization=")
            .unwrap();
        let (share, most) = rest
            .split_once(", named_metrics.max_token_capacity=")
            .unwrap();
        assert!(
            (0.0..=1.0).contains(&share.parse::<f64>().unwrap()),
            "{text}"
        );
        assert!(most.parse::<u64>().unwrap() > 0, "{text}");
        let json = ask(path, "json").await.unwrap();
        let json: serde_json::Value =
            serde_json::from_str(json.strip_prefix("JSON ").unwrap()).unwrap();
        assert_eq!(
            json["named_metrics"]["max_token_capacity"].to_string(),
            most
        );
        assert!(json["named_metrics"]["kv_cache_utilization"].is_number());
        assert_eq!(ask(path, "xml").await, None);
    }
    let mut wire = Wire::connect(server.address).await;
    let asked = ["endpoint-load-metrics-format: text"];
    let answer = wire.ask(head("GET", "/v2/models/m", &asked)).await;
    assert_eq!(answer.head.header("endpoint-load-metrics"), None);
}

/// A request that is refused because the queue is full counts as REJECTED.
#[tokio::test]
async fn tr_1001_a_full_queue_counts_as_rejected() {
    let mut config = script(Script::Echo);
    config.name = "m".into();
    let limits = sapwood_engine::Config {
        queue_requests: 1,
        ..sapwood_engine::Config::default()
    };
    let (_owner, engine) = sapwood_engine::Engine::by_hand(scripted(config), limits);
    let kernel = Kernel::new();
    kernel
        .add(sapwood_kernel::model("m", engine.clone()))
        .unwrap();
    let server = Running::generating(kernel, Config::default()).await;
    let prompt = sapwood_engine::api::Prompt::Text("x".into());
    let _waiting = engine
        .submit(sapwood_engine::api::GenerationRequest::new(prompt))
        .unwrap();
    let answer = ask(&server, "/v2/models/m/generate", r#"{"text_input":"x"}"#).await;
    assert_eq!(answer.summary().0, 503);
    let text = scrape(&server).await;
    let rejected = r#"nv_inference_request_failure{model="m",version="1",reason="REJECTED"}"#;
    assert_eq!(samples(&text)[rejected], 1.0);
}
