//! Metrics under Triton's names, with those of the machine that its dashboards show (TR-1001, TR-1002).
//!
//! Metrics that are not measured here are left out: GPUs, the response cache, and tokenising apart from inference.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use prometheus::IntCounterVec;
use prometheus::core::Collector;
use sapwood_engine::stats::{EngineStats, Histogram};
use sapwood_kernel::{Kernel, Name};
use sapwood_proto::code::Code;

use super::engines::WatchedEngine;
use super::format::MetricsText;
use super::names::triton as names;
use super::{MetricSources, ServerMetrics};

/// Bucket bounds of the time to the first response, in milliseconds.
pub(super) const FIRST_RESPONSE_MS: &[f64] = &[
    1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2000.0, 5000.0,
];

/// The models that are rendered under these names.
pub(super) struct TritonNames {
    kernel: Kernel,
    /// The versions of models other than 1.
    versions: BTreeMap<String, u64>,
    /// The processors' ticks at the last rendering, and the busy share that was rendered.
    processors: Mutex<(Ticks, f64)>,
}

impl std::fmt::Debug for TritonNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TritonNames")
            .field("versions", &self.versions)
            .finish_non_exhaustive()
    }
}

/// The outcome of a call in Triton's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CallOutcome {
    Success,
    Rejected,
    Canceled,
    Backend,
    Other,
}

/// Every failure, with its label.
const FAILURES: [(CallOutcome, &str); 4] = [
    (CallOutcome::Rejected, "REJECTED"),
    (CallOutcome::Canceled, "CANCELED"),
    (CallOutcome::Backend, "BACKEND"),
    (CallOutcome::Other, "OTHER"),
];

impl CallOutcome {
    /// The outcome for the `code` label of `sapwood_requests_total`.
    fn of(label: &str) -> Self {
        match Code::from_name(label) {
            None if label == "ok" => Self::Success,
            Some(Code::Overloaded | Code::RateLimited | Code::Unavailable) => Self::Rejected,
            Some(Code::Cancelled) => Self::Canceled,
            Some(
                Code::Internal | Code::UpstreamFailed | Code::ControllerFailed | Code::Truncated,
            ) => Self::Backend,
            _ => Self::Other,
        }
    }
}

/// A model, and the engine behind it if it is computed here.
struct ModelMetrics<'a> {
    name: Name,
    version: String,
    engine: Option<&'a WatchedEngine>,
}

impl ModelMetrics<'_> {
    fn labels(&self) -> [(&str, &str); 2] {
        [("model", &self.name), ("version", &self.version)]
    }
}

impl TritonNames {
    pub(super) fn new(kernel: Kernel, versions: BTreeMap<String, u64>) -> Self {
        Self {
            kernel,
            versions,
            processors: Mutex::new((Ticks::read().unwrap_or_default(), 0.0)),
        }
    }

    /// Writes what is known of every model, and of the machine.
    pub(super) fn write(
        &self,
        metrics: &ServerMetrics,
        watched: &MetricSources,
        text: &mut MetricsText,
    ) {
        let models = self.models(&watched.engines);
        write_requests(&models, &metrics.requests, text);
        for (name, help, pick) in DURATIONS {
            text.family(name, "counter", help);
            for (model, stats) in computed(&models) {
                let micros = (pick(stats).sum() * 1e6).round();
                text.sample(name, &model.labels(), micros);
            }
        }
        text.family(names::PENDING, "gauge", "Requests waiting for a place.");
        for (model, stats) in computed(&models) {
            let waiting = stats.requests_waiting.get();
            text.sample(names::PENDING, &model.labels(), waiting);
        }
        write_cache(&models, text);
        text.family(names::LOAD, "gauge", "Seconds that loading a model took.");
        for model in &models {
            if let Some(time) = watched.loaded.get(&*model.name) {
                text.sample(names::LOAD, &model.labels(), time.as_secs_f64());
            }
        }
        write_first_responses(&models, metrics, text);
        self.write_machine(text);
    }

    fn models<'a>(&self, engines: &'a [WatchedEngine]) -> Vec<ModelMetrics<'a>> {
        let specs = self.kernel.specs();
        let models = specs.iter().filter(|spec| spec.model);
        models
            .map(|spec| ModelMetrics {
                name: spec.name.clone(),
                version: self.versions.get(&*spec.name).unwrap_or(&1).to_string(),
                engine: engines.iter().find(|engine| *engine.name == *spec.name),
            })
            .collect()
    }

    fn write_machine(&self, text: &mut MetricsText) {
        if let Some(ticks) = Ticks::read() {
            let busy = {
                // Two scrapes within one tick see no progress, and get the last value instead of a division by zero.
                let mut last = self
                    .processors
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                let busy = ticks.busy_since(&last.0).unwrap_or(last.1);
                *last = (ticks, busy);
                busy
            };
            let help = "Share of all processors in use since the last scrape, 0 to 1.";
            text.gauge(names::CPU_UTILIZATION, help, busy);
        }
        // Without `/proc` the families are left out: 0 would be a false value.
        if let Some((total, available)) = memory() {
            let used = total.saturating_sub(available);
            text.gauge(names::CPU_MEMORY_TOTAL, "Memory of the machine.", total);
            text.gauge(
                names::CPU_MEMORY_USED,
                "Memory of the machine in use.",
                used,
            );
        }
    }
}

/// Name, help, and the histogram whose sum it is.
type Duration = (&'static str, &'static str, fn(&EngineStats) -> &Histogram);

const DURATIONS: [Duration; 3] = [
    (
        names::REQUEST_DURATION,
        "Microseconds from submission to the end.",
        |stats| &stats.request_seconds,
    ),
    (
        names::QUEUE_DURATION,
        "Microseconds that requests waited.",
        |stats| &stats.queue_seconds,
    ),
    (
        names::INFER_DURATION,
        "Microseconds spent on prompts and outputs.",
        |stats| &stats.inference_seconds,
    ),
];

/// The models with an engine in this process.
fn computed<'a>(
    models: &'a [ModelMetrics<'a>],
) -> impl Iterator<Item = (&'a ModelMetrics<'a>, &'a EngineStats)> {
    models
        .iter()
        .filter_map(|model| Some((model, &**model.engine?.stats())))
}

/// Writes the counts of requests. A request counts as one inference and one execution, because its sequences join the running
/// batch: there is no batch of requests that could be counted.
fn write_requests(models: &[ModelMetrics<'_>], requests: &IntCounterVec, text: &mut MetricsText) {
    let ended = ended(requests);
    let count = |model: &ModelMetrics<'_>, outcome| {
        let key = (model.name.to_string(), outcome);
        ended.get(&key).copied().unwrap_or(0.0)
    };
    for (name, help) in [
        (names::SUCCESS, "Requests that ended well."),
        (names::COUNT, "Inferences that ended well."),
        (names::EXECUTIONS, "Executions that ended well."),
    ] {
        text.family(name, "counter", help);
        for model in models {
            text.sample(name, &model.labels(), count(model, CallOutcome::Success));
        }
    }
    text.family(
        names::FAILURE,
        "counter",
        "Requests that failed, by reason.",
    );
    for model in models {
        let [name, version] = model.labels();
        for (outcome, reason) in FAILURES {
            let labels = [name, version, ("reason", reason)];
            text.sample(names::FAILURE, &labels, count(model, outcome));
        }
    }
}

/// The number of calls of each model by outcome, summed over the faces.
fn ended(requests: &IntCounterVec) -> BTreeMap<(String, CallOutcome), f64> {
    let mut ended = BTreeMap::new();
    for metric in requests.collect().iter().flat_map(|it| it.get_metric()) {
        let labels = metric.get_label();
        let label = |name| labels.iter().find(|label| label.name() == name);
        // Several codes and all faces add to one outcome.
        if let (Some(model), Some(code)) = (label("model"), label("code")) {
            let key = (model.value().to_owned(), CallOutcome::of(code.value()));
            *ended.entry(key).or_insert(0.0) += metric.get_counter().get_value();
        }
    }
    ended
}

/// Writes the blocks of the KV cache: one cell is one block, and holds one token.
fn write_cache(models: &[ModelMetrics<'_>], text: &mut MetricsText) {
    text.family(names::CACHE_BLOCKS, "gauge", "Blocks of the token cache.");
    for (model, stats) in computed(models) {
        let (used, most) = (stats.cells_used.get(), stats.cells_total.get());
        let [name, version] = model.labels();
        for (kind, blocks) in [
            ("used", used),
            ("free", most.saturating_sub(used)),
            ("max", most),
            ("tokens_per", 1),
        ] {
            let labels = [name, version, ("kv_cache_block_type", kind)];
            text.sample(names::CACHE_BLOCKS, &labels, blocks);
        }
    }
}

fn write_first_responses(
    models: &[ModelMetrics<'_>],
    metrics: &ServerMetrics,
    text: &mut MetricsText,
) {
    let help = "Milliseconds to the first output of a request.";
    text.family(names::FIRST_RESPONSE, "histogram", help);
    for model in models {
        let first = metrics.first_response_ms.with_label_values(&[&*model.name]);
        text.observed(names::FIRST_RESPONSE, &model.labels(), &first);
    }
}

/// Ticks of all processors together since the machine was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    all: u64,
    idle: u64,
}

impl Ticks {
    fn read() -> Option<Self> {
        Self::of(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal. The guest times after them
    /// are part of the first two.
    fn of(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks = line.split_whitespace().take(8).map(str::parse);
        let ticks: Vec<u64> = ticks.collect::<Result<_, _>>().ok()?;
        Some(Self {
            all: ticks.iter().sum(),
            // Waiting for a device is idle too: the processor could do other work.
            idle: ticks.get(3)? + ticks.get(4).unwrap_or(&0),
        })
    }

    /// The busy share since `last`; `None` if no time has passed.
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53 ticks")]
    fn busy_since(&self, last: &Self) -> Option<f64> {
        let all = self.all.checked_sub(last.all).filter(|all| *all > 0)?;
        // Clamped, because iowait may decrease (proc(5)).
        let idle = self.idle.saturating_sub(last.idle).min(all);
        Some((all - idle) as f64 / all as f64)
    }
}

/// The machine's memory in bytes: total and available.
fn memory() -> Option<(u64, u64)> {
    let reported = std::fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |name: &str| {
        let line = reported.lines().find_map(|line| line.strip_prefix(name))?;
        let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
        Some(kibibytes * 1_024)
    };
    // Not `MemFree`, which counts the page cache as used.
    Some((bytes("MemTotal:")?, bytes("MemAvailable:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_1001_failures_have_the_reasons_of_triton() {
        for code in Code::ALL {
            let expect = match code {
                Code::Overloaded | Code::RateLimited | Code::Unavailable => "REJECTED",
                Code::Cancelled => "CANCELED",
                Code::Internal
                | Code::UpstreamFailed
                | Code::ControllerFailed
                | Code::Truncated => "BACKEND",
                _ => "OTHER",
            };
            let outcome = CallOutcome::of(code.name());
            let label = FAILURES.iter().find(|(known, _)| *known == outcome);
            assert_eq!(label.map(|(_, label)| *label), Some(expect), "{code}");
        }
        assert_eq!(CallOutcome::of("ok"), CallOutcome::Success);
    }

    #[test]
    fn tr_1001_processors_are_busy_while_they_are_not_idle() {
        let before = Ticks::of("cpu  100 0 50 800 50 0 0 0 9 9\ncpu0 1 2\n").unwrap();
        assert_eq!((before.all, before.idle), (1_000, 850));
        let after = Ticks::of("cpu  130 0 60 850 60 0 0 0 9 9\n").unwrap();
        assert_eq!(after.busy_since(&before), Some(0.4));
        assert_eq!(after.busy_since(&after), None);
        // After a suspend the counts may be lower than before.
        assert_eq!(before.busy_since(&after), None);
        for text in ["", "intr 1 2", "cpu  1 2 x 4", "cpu  1 2"] {
            assert_eq!(Ticks::of(text), None, "{text:?}");
        }
    }
}
