//! Metrics of the engines, read from their counters without a lock when `/metrics` is rendered, under our names and
//! under vLLM's (OA-801, OA-802).

use std::sync::Arc;

use sapwood_engine::Engine;
use sapwood_engine::embedding::Embedder;
use sapwood_engine::stats::{CONTROLLER_FAILURES, EngineStats, Histogram};

use super::format::MetricsText;
use super::names::{self, vllm};

/// An engine whose counters are read: one that generates, or one that embeds.
#[derive(Clone, Debug)]
pub struct WatchedEngine {
    /// The name of its model.
    pub(crate) name: Arc<str>,
    stats: Arc<EngineStats>,
}

impl WatchedEngine {
    /// Its counters.
    pub(crate) fn stats(&self) -> &Arc<EngineStats> {
        &self.stats
    }
}

impl From<&Engine> for WatchedEngine {
    fn from(engine: &Engine) -> Self {
        Self {
            name: engine.info().name.as_str().into(),
            stats: Arc::clone(engine.stats()),
        }
    }
}

impl From<Engine> for WatchedEngine {
    fn from(engine: Engine) -> Self {
        Self::from(&engine)
    }
}

impl From<&Embedder> for WatchedEngine {
    fn from(embedder: &Embedder) -> Self {
        Self {
            name: embedder.info().name.as_str().into(),
            stats: Arc::clone(embedder.stats()),
        }
    }
}

/// One number of an engine.
struct EngineNumber {
    name: &'static str,
    /// Its name in vLLM, if it has one.
    vllm: Option<&'static str>,
    kind: &'static str,
    help: &'static str,
    read: fn(&EngineStats) -> f64,
}

/// One histogram of an engine.
struct EngineHistogram {
    name: &'static str,
    vllm: Option<&'static str>,
    help: &'static str,
    pick: fn(&EngineStats) -> &Histogram,
}

/// Writes all metrics of all engines, labelled with the model.
pub(super) fn write(engines: &[WatchedEngine], text: &mut MetricsText) {
    // A family without samples would be noise on a server that only forwards.
    if engines.is_empty() {
        return;
    }
    // The engines in the inner loop: all samples of a family have to follow its header.
    for number in NUMBERS {
        for (name, labels) in spellings(number.name, number.vllm) {
            text.family(name, number.kind, number.help);
            for engine in engines {
                let value = (number.read)(engine.stats());
                text.sample(name, &labels(&engine.name), value);
            }
        }
    }
    for shape in HISTOGRAMS {
        for (name, labels) in spellings(shape.name, shape.vllm) {
            text.family(name, "histogram", shape.help);
            for engine in engines {
                let histogram = (shape.pick)(engine.stats());
                text.histogram(name, &labels(&engine.name), histogram);
            }
        }
    }
    write_cache(engines, text);
    write_threads(engines, text);
    write_endings(engines, text);
    write_controller_failures(engines, text);
}

/// How a model's name becomes the labels of a sample.
type Labelled = fn(&str) -> Vec<(&str, &str)>;

fn spellings(
    own: &'static str,
    vllm: Option<&'static str>,
) -> impl Iterator<Item = (&'static str, Labelled)> {
    let ours: Labelled = |model| vec![("model", model)];
    let theirs: Labelled = vllm_labels;
    std::iter::once((own, ours)).chain(vllm.map(|name| (name, theirs)))
}

fn vllm_labels(model: &str) -> Vec<(&str, &str)> {
    // Dashboards for vLLM select by `engine`, its number among data-parallel replicas.
    vec![("model_name", model), ("engine", "0")]
}

/// Writes vLLM's info metric of the cache, whose constants are labels. Our cells hold one token each.
fn write_cache(engines: &[WatchedEngine], text: &mut MetricsText) {
    text.family(vllm::CACHE_CONFIG, "gauge", "The cache, in its labels.");
    for engine in engines {
        let blocks = engine.stats().cells_total.get().to_string();
        let mut labels = vllm_labels(&engine.name);
        labels.extend([("block_size", "1"), ("num_gpu_blocks", blocks.as_str())]);
        text.sample(vllm::CACHE_CONFIG, &labels, 1);
    }
}

/// Writes the numbers of threads, by what a call computes. Models without weights have none.
fn write_threads(engines: &[WatchedEngine], text: &mut MetricsText) {
    let name = names::ENGINE_THREADS;
    text.family(name, "gauge", "Threads that compute a decode call.");
    for engine in engines {
        let stats = engine.stats();
        for (calls, gauge) in [
            ("decode", &stats.threads_decode),
            ("prefill", &stats.threads_prefill),
            ("few", &stats.threads_few),
        ] {
            let labels = [("model", &*engine.name), ("calls", calls)];
            if gauge.get() > 0 {
                text.sample(name, &labels, gauge.get());
            }
        }
    }
}

/// Writes the ends of choices under vLLM's reasons.
fn write_endings(engines: &[WatchedEngine], text: &mut MetricsText) {
    text.family(
        vllm::REQUEST_SUCCESS,
        "counter",
        "Requests that ended, by how.",
    );
    for engine in engines {
        let stats = engine.stats();
        // In the order of the engine's finish reasons. vLLM has no controllers; an end by one is a regular stop.
        let [stop, length, controller, cancelled] =
            [0, 1, 2, 3].map(|index: usize| stats.finished[index].get());
        for (reason, count) in [
            ("stop", stop + controller),
            ("length", length),
            ("abort", cancelled + stats.cancelled_client.get()),
            ("error", stats.failed.get()),
        ] {
            let mut labels = vllm_labels(&engine.name);
            labels.push(("finished_reason", reason));
            text.sample(vllm::REQUEST_SUCCESS, &labels, count);
        }
    }
}

/// Writes the failures of controllers and constraints, by their reasons.
fn write_controller_failures(engines: &[WatchedEngine], text: &mut MetricsText) {
    let name = names::CONTROLLER_FAILURES;
    let help = "Sequences that ended because their controller or constraint failed.";
    text.family(name, "counter", help);
    for engine in engines {
        let counters = &engine.stats().controller_failures;
        for (reason, counter) in CONTROLLER_FAILURES.iter().zip(counters) {
            let labels = [("model", &*engine.name), ("reason", reason.name())];
            text.sample(name, &labels, counter.get());
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
fn used_ratio(stats: &EngineStats) -> f64 {
    // `max(1)`: an engine without a cache has a ratio of 0 and not NaN.
    stats.cells_used.get() as f64 / stats.cells_total.get().max(1) as f64
}

macro_rules! number {
    ($kind:literal $name:ident, $vllm:expr, $field:ident, $help:literal) => {{
        #[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
        fn read(stats: &EngineStats) -> f64 {
            stats.$field.get() as f64
        }
        EngineNumber {
            name: names::$name,
            vllm: $vllm,
            kind: $kind,
            help: $help,
            read,
        }
    }};
}

#[rustfmt::skip]
const NUMBERS: &[EngineNumber] = &[
    number!("gauge" REQUESTS_RUNNING, Some(vllm::REQUESTS_RUNNING), requests_running, "Requests being computed."),
    number!("gauge" REQUESTS_WAITING, Some(vllm::REQUESTS_WAITING), requests_waiting, "Requests waiting in the queue."),
    number!("gauge" STREAMS_PARKED, None, streams_parked, "Sequences waiting for their reader."),
    number!("gauge" KV_USED, None, cells_used, "KV cache cells in use, those of the prefix cache included."),
    number!("gauge" KV_TOTAL, None, cells_total, "Size of the KV cache in cells."),
    EngineNumber {
        name: names::KV_RATIO,
        vllm: Some(vllm::KV_RATIO),
        kind: "gauge",
        help: "Share of the KV cache in use, 0 to 1.",
        read: used_ratio,
    },
    number!("counter" PREFIX_QUERIES, Some(vllm::PREFIX_QUERIES), prefix_queries, "Prompt tokens looked up in the prefix cache."),
    number!("counter" PREFIX_HITS, Some(vllm::PREFIX_HITS), prefix_hits, "Prompt tokens found in the prefix cache."),
    number!("counter" PREFIX_RESTORED, None, prefix_restored, "Prompt tokens copied back from prefixes saved in memory."),
    number!("gauge" PREFIX_SAVED_BYTES, None, prefix_saved_bytes, "Bytes of prefixes saved in memory."),
    number!("gauge" PREFIX_DISK_BYTES, None, prefix_disk_bytes, "Bytes of the files of prefixes on the disk."),
    number!("counter" PREFIX_DISK_READ_BYTES, None, prefix_disk_read_bytes, "Bytes of prefixes read from the disk."),
    number!("counter" PREFIX_DISK_WRITTEN_BYTES, None, prefix_disk_written_bytes, "Bytes of prefixes written to the disk."),
    number!("counter" PREFIX_DISK_FAILURES, None, prefix_disk_failures, "Files of prefixes that could not be read or written, or not in time."),
    number!("counter" PREEMPTIONS, Some(vllm::PREEMPTIONS), preemptions, "Sequences preempted because the KV cache was full."),
    number!("counter" DRAFT_TOKENS, Some(vllm::DRAFT_TOKENS), draft_tokens, "Tokens proposed by speculative decoding."),
    number!("counter" ACCEPTED_TOKENS, Some(vllm::ACCEPTED_TOKENS), accepted_tokens, "Proposed tokens that became output."),
    number!("counter" PROMPT_TOKENS, Some(vllm::PROMPT_TOKENS), prompt_tokens, "Prompt tokens of started requests."),
    number!("counter" GENERATION_TOKENS, Some(vllm::GENERATION_TOKENS), generation_tokens, "Tokens generated."),
    number!("counter" ENGINE_STEPS, None, steps, "Steps of the engine loop, one decode call each."),
    number!("counter" REQUESTS_FAILED, None, failed, "Requests that ended with an error."),
];

macro_rules! shape {
    ($name:ident, $vllm:expr, $($field:ident).+, $help:literal) => {
        EngineHistogram {
            name: names::$name,
            vllm: $vllm,
            help: $help,
            pick: |stats| &stats.$($field).+,
        }
    };
}

#[rustfmt::skip]
const HISTOGRAMS: &[EngineHistogram] = &[
    shape!(TIME_TO_FIRST_TOKEN, Some(vllm::TIME_TO_FIRST_TOKEN), first_token_seconds, "Seconds from submission to the first token."),
    shape!(INTER_TOKEN, Some(vllm::INTER_TOKEN), inter_token_seconds, "Seconds between two tokens."),
    shape!(OUTPUT_TOKEN, Some(vllm::OUTPUT_TOKEN), output_token_seconds, "Seconds between two tokens, the mean of each request."),
    shape!(REQUEST_SECONDS, Some(vllm::REQUEST_SECONDS), request_seconds, "Seconds from submission to the end."),
    shape!(QUEUE_SECONDS, Some(vllm::QUEUE_SECONDS), queue_seconds, "Seconds a request waited."),
    shape!(PREFILL_SECONDS, Some(vllm::PREFILL_SECONDS), prefill_seconds, "Seconds spent on a prompt."),
    shape!(DECODE_SECONDS, Some(vllm::DECODE_SECONDS), decode_seconds, "Seconds spent on an output."),
    shape!(INFERENCE_SECONDS, Some(vllm::INFERENCE_SECONDS), inference_seconds, "Seconds spent on prompt and output."),
    shape!(REQUEST_PROMPT_TOKENS, Some(vllm::REQUEST_PROMPT_TOKENS), request_prompt_tokens, "Tokens per prompt."),
    shape!(REQUEST_GENERATION_TOKENS, Some(vllm::REQUEST_GENERATION_TOKENS), request_generation_tokens, "Tokens per output."),
    shape!(REQUEST_N, Some(vllm::REQUEST_N), request_n, "Choices asked for."),
    shape!(REQUEST_MAX_TOKENS, Some(vllm::REQUEST_MAX_TOKENS), request_max_tokens, "Tokens allowed per choice."),
    shape!(STEP_SECONDS, None, step_seconds, "Seconds per step."),
    shape!(STEP_TOKENS, Some(vllm::STEP_TOKENS), step_tokens, "Tokens computed per step."),
    shape!(BATCH_SIZE, None, batch_size, "Sequences per step."),
    shape!(CONTROLLER_STEP, None, steering.controller_step_seconds, "Seconds of processor time per run of a controller's callbacks."),
    shape!(CONSTRAINT_COMPILE, None, steering.constraint_compile_seconds, "Seconds that compiling a grammar took."),
    shape!(CONSTRAINT_MASK, None, steering.constraint_mask_seconds, "Seconds that computing a mask took."),
];
