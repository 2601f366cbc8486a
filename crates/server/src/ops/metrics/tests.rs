//! What `/metrics` says, and that saying it waits for nobody.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};

use futures::{StreamExt, stream};
use sapwood_engine::Engine;
use sapwood_engine::api::{GenerationRequest, ModelInfo, Prompt, SharedVocabulary};
use sapwood_engine::model::{
    BatchEntry, Capacity, DecodeStop, Model, OutputRow, SlotId, SlotPurpose, ThreadNumbers,
};
use sapwood_engine::scripted::{Config as Script, Scripted};
use sapwood_engine::{Config, EngineOwner};
use sapwood_kernel::{Chunk, Chunks, Node, Result, Spec, raw};
use sapwood_proto::time::Time;

use super::*;

#[test]
fn oa_801_numbers_are_rendered_under_their_own_names() {
    let metrics = ServerMetrics::new().unwrap();
    metrics.connections_open.set(3);
    metrics.rejected.with_label_values(&["drain"]).inc();
    let text = metrics.render(Format::Text);
    for line in [
        "sapwood_connections_open 3",
        "sapwood_rejected_total{reason=\"drain\"} 1",
        "sapwood_rejected_total{reason=\"queue\"} 0",
        "sapwood_cancelled_total{reason=\"stall\"} 0",
        "sapwood_panics_total ",
        "sapwood_poll_seconds_bucket{le=\"0.05\"} ",
        "process_open_fds ",
        "process_start_time_seconds ",
        "# TYPE sapwood_evergreen_sessions_open gauge",
        "sapwood_draining 0",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    assert!(!text.contains("# EOF"));
    assert!(metrics.render(Format::OpenMetrics).ends_with("\n# EOF\n"));
}

/// One request of two choices, stepped by hand.
fn busy(model: &str) -> (EngineOwner, Engine) {
    let script = Script {
        name: model.into(),
        ..Script::default()
    };
    let (mut owner, engine) =
        Engine::by_hand(Box::new(Scripted::new(script).unwrap()), Config::default());
    let mut request = GenerationRequest::new(Prompt::Text("abc".into()));
    request.params.n = Some(2);
    let handle = engine.submit(request).unwrap();
    for step in 1..10 {
        owner.step(Time::from_millis(step));
    }
    drop(handle);
    (owner, engine)
}

/// The whole table, each number under both names with the same value.
#[test]
fn oa_802_each_metric_has_its_name_in_vllm() {
    let metrics = ServerMetrics::new().unwrap();
    let (_owner, engine) = busy("parrot");
    metrics.watch(engine);
    let text = metrics.render(Format::Text);
    let value = |name: &str, labels: &str| -> f64 {
        let sample = format!("{name}{{{labels}}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&sample));
        line.unwrap_or_else(|| panic!("{sample}is missing in\n{text}"))
            .parse()
            .unwrap()
    };
    let both = |own: &str, vllm: &str| {
        let ours = value(own, "model=\"parrot\"");
        assert_eq!(
            ours,
            value(vllm, "model_name=\"parrot\",engine=\"0\""),
            "{own}"
        );
        ours
    };
    for (own, vllm) in [
        ("requests_running", "num_requests_running"),
        ("requests_waiting", "num_requests_waiting"),
        ("kv_cache_usage_ratio", "kv_cache_usage_perc"),
        ("prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("preemptions_total", "num_preemptions_total"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
    ] {
        both(&format!("sapwood_{own}"), &format!("vllm:{vllm}"));
    }
    for (own, vllm) in [
        ("time_to_first_token_seconds", "time_to_first_token_seconds"),
        ("inter_token_seconds", "inter_token_latency_seconds"),
        (
            "time_per_output_token_seconds",
            "request_time_per_output_token_seconds",
        ),
        ("request_seconds", "e2e_request_latency_seconds"),
        ("queue_seconds", "request_queue_time_seconds"),
        ("prefill_seconds", "request_prefill_time_seconds"),
        ("decode_seconds", "request_decode_time_seconds"),
        ("inference_seconds", "request_inference_time_seconds"),
        ("request_prompt_tokens", "request_prompt_tokens"),
        ("request_generation_tokens", "request_generation_tokens"),
        ("request_n", "request_params_n"),
        ("request_max_tokens", "request_params_max_tokens"),
        ("step_tokens", "iteration_tokens_total"),
    ] {
        let count = both(
            &format!("sapwood_{own}_count"),
            &format!("vllm:{vllm}_count"),
        );
        assert!(count >= 1.0, "{own} was never observed");
    }
    let bucket = "model_name=\"parrot\",engine=\"0\",le=\"1.0\"";
    assert_eq!(
        value("vllm:time_to_first_token_seconds_bucket", bucket),
        1.0
    );
    let ended = "model_name=\"parrot\",engine=\"0\",finished_reason=\"stop\"";
    assert_eq!(value("vllm:request_success_total", ended), 2.0);
    assert!(text.contains(
        "vllm:cache_config_info{model_name=\"parrot\",engine=\"0\",block_size=\"1\",num_gpu_blocks="
    ));
}

#[tokio::test]
async fn oa_913_panics_are_summed_wherever_they_were_caught() {
    let metrics = ServerMetrics::new().unwrap();
    let before = sapwood_kernel::source_panics();
    let rules = r#"{"script": "steps", "rules": [{"steps": [{"panic": true}]}]}"#;
    let model = Scripted::new(serde_json::from_str(rules).unwrap()).unwrap();
    let (mut owner, engine) = Engine::by_hand(Box::new(model), Config::default());
    metrics.watch(engine.clone());
    let _handle = engine
        .submit(GenerationRequest::new(Prompt::Text("x".into())))
        .unwrap();
    owner.step(Time::from_millis(1));
    let kernel = Kernel::new();
    kernel
        .add(raw(Spec::new("broken", ""), |_| -> Chunks {
            panic!("on purpose")
        }))
        .unwrap();
    metrics.watch_kernel(kernel.clone());
    assert!(kernel.run::<String>("broken", ()).await.is_err());
    metrics.panics.inc();
    let broken = Node::new(stream::iter([()]).map(|()| -> Result<Chunk> { panic!("on purpose") }));
    assert!(broken.read().next().await.unwrap().is_err());
    let line = format!("\nsapwood_panics_total {}\n", before + 4);
    assert!(metrics.render(Format::Text).contains(&line));
}

/// An engine that goes takes nothing off the sums, neither while somebody still holds it nor afterwards.
#[test]
fn oa_913_counts_of_a_removed_engine_stay_in_the_sums() {
    let metrics = ServerMetrics::new().unwrap();
    let count = |metrics: &ServerMetrics, name: &str| {
        let text = metrics.render(Format::Text);
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    let names = [
        "sapwood_panics_total",
        "sapwood_rejected_total{reason=\"queue\"}",
    ];
    let before = names.map(|name| count(&metrics, name));
    let rules = r#"{"script": "steps", "rules": [{"steps": [{"panic": true}]}]}"#;
    for round in 1..=3 {
        let model = Scripted::new(serde_json::from_str(rules).unwrap()).unwrap();
        let config = Config {
            queue_requests: 1,
            ..Config::default()
        };
        let (mut owner, engine) = Engine::by_hand(Box::new(model), config);
        metrics.watch(engine.clone());
        let ask = || engine.submit(GenerationRequest::new(Prompt::Text("x".into())));
        let _handle = ask().unwrap();
        assert!(ask().is_err(), "the queue is full");
        metrics.unwatch(&engine);
        // It counts while it ends.
        owner.step(Time::from_millis(1));
        let grown = names.map(|name| count(&metrics, name));
        assert_eq!(grown, before.map(|count| count + round));
    }
}

/// A model that stays in its forward pass until it is let go.
struct Stuck {
    model: Scripted,
    go: Arc<Mutex<Receiver<()>>>,
    reached: std::sync::mpsc::SyncSender<()>,
}

impl Model for Stuck {
    fn info(&self) -> ModelInfo {
        self.model.info()
    }
    fn vocabulary(&self) -> SharedVocabulary {
        self.model.vocabulary()
    }
    fn capacity(&self) -> Capacity {
        self.model.capacity()
    }
    fn threads(&self) -> Option<ThreadNumbers> {
        Some(ThreadNumbers {
            decode: 3,
            prefill: 4,
            few: 2,
        })
    }
    fn open(&mut self, slot: SlotId, opening: &SlotPurpose<'_>) {
        self.model.open(slot, opening);
    }
    fn release(&mut self, slot: SlotId) {
        self.model.release(slot);
    }
    fn fork(&mut self, from: SlotId, to: SlotId, tokens: u32) {
        self.model.fork(from, to, tokens);
    }
    fn truncate(&mut self, slot: SlotId, tokens: u32) {
        self.model.truncate(slot, tokens);
    }
    fn decode(&mut self, batch: &[BatchEntry], now: Time) -> Result<(), DecodeStop> {
        self.reached.send(()).unwrap();
        let _ = self.go.lock().unwrap().recv();
        self.model.decode(batch, now)
    }
    fn row(&mut self, index: usize, now: Time) -> OutputRow<'_> {
        self.model.row(index, now)
    }
}

#[test]
fn oa_801_rendering_does_not_wait_for_an_engine_in_the_middle_of_a_step() {
    let (go, wait) = sync_channel(1);
    let (reached, there) = sync_channel(1);
    let model = Stuck {
        model: Scripted::new(Script::default()).unwrap(),
        go: Arc::new(Mutex::new(wait)),
        reached,
    };
    let engine = Engine::spawn(Box::new(model), Config::default()).unwrap();
    let metrics = ServerMetrics::new().unwrap();
    metrics.watch(engine.clone());
    let handle = engine
        .submit(GenerationRequest::new(Prompt::Text("x".into())))
        .unwrap();
    there.recv().unwrap();
    // The thread is inside the model, and stays there until after this.
    let text = metrics.render(Format::Text);
    assert!(text.contains("sapwood_engine_steps_total{model="));
    for (calls, threads) in [("decode", 3), ("prefill", 4), ("few", 2)] {
        let end = format!(",calls=\"{calls}\"}} {threads}");
        let mut lines = text.lines();
        let found = lines.any(|it| it.starts_with("sapwood_engine_threads{") && it.ends_with(&end));
        assert!(found, "{calls}");
    }
    drop(go);
    drop(handle);
}
