//! The server's metrics, and their text for scrapers (OA-801, OA-802, EV-904).
//!
//! Labels come from closed sets; rendering takes no lock that an engine needs.

mod engines;
mod format;
mod names;
mod pools;
mod process;
mod triton;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use sapwood_engine::stats::EngineStats;
use sapwood_kernel::{Kernel, pool};
use sapwood_net::lmtp::pool::LmtpPool;

pub use self::engines::WatchedEngine;
pub use self::format::Format;
use self::format::MetricsText;
use self::triton::TritonNames;
use crate::listener::poll_timing;

/// The face through which work came in; a closed set, because it is a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaceLabel {
    /// Evergreen sessions over gRPC.
    Evergreen,
    /// LMTP, over whichever transport.
    Lmtp,
    /// Triton's generate extension and the KServe protocol around it.
    Generate,
    /// Uploads and runs of controllers.
    Controllers,
    /// Plain HTTP routes that belong to no protocol of ours.
    Http,
}

impl FaceLabel {
    /// The label's value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Evergreen => "evergreen",
            Self::Lmtp => "lmtp",
            Self::Generate => "generate",
            Self::Controllers => "controllers",
            Self::Http => "http",
        }
    }
}

/// The parts with metrics of their own, which are read at each rendering.
#[derive(Clone, Default)]
struct MetricSources {
    engines: Vec<WatchedEngine>,
    /// The counters of removed engines that may still count while they end.
    ending: Vec<Arc<EngineStats>>,
    ended: RetiredEngineCounts,
    kernels: Vec<Kernel>,
    /// How long loading a model took.
    loaded: BTreeMap<String, Duration>,
    /// With the model that they serve.
    pools: Vec<(String, LmtpPool)>,
    /// The number of dropped log lines.
    log: Option<Arc<AtomicU64>>,
    controllers: Option<ReadControllers>,
}

/// Reads the numbers of the process's controllers, without waiting for anything.
pub type ReadControllers = Arc<dyn Fn() -> ControllerNumbers + Send + Sync>;

/// Numbers of all controllers in WebAssembly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerNumbers {
    /// Sequences that they steer now.
    pub live: u64,
    /// Bytes of memory that they have, all together.
    pub memory_bytes: u64,
    /// Processes that run them and were started after one that had ended.
    pub restarts: u64,
}

/// The final counts of removed engines. They stay part of the sums, because a counter must never fall.
#[derive(Clone, Copy, Default)]
struct RetiredEngineCounts {
    panics: u64,
    rejected_queue: u64,
    rejected_tokens: u64,
}

impl MetricSources {
    /// Replaces the counters of each removed engine by their sums, once nobody else can count with them.
    fn fold(&mut self) {
        // Not when the engine is removed: its thread may still end requests, and those counts would be lost.
        let (ended, ending) = (&mut self.ended, &mut self.ending);
        ending.retain(|stats| {
            let counts = Arc::strong_count(stats) > 1;
            if !counts {
                ended.panics += stats.panics.get();
                ended.rejected_queue += stats.rejected_queue.get();
                ended.rejected_tokens += stats.rejected_tokens.get();
            }
            counts
        });
    }
}

impl std::fmt::Debug for MetricSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetricSources")
            .field("engines", &self.engines)
            .finish_non_exhaustive()
    }
}

/// All metrics of the server. Clone the field that you count with; clones share the value.
#[derive(Debug)]
pub struct ServerMetrics {
    registry: Registry,
    watched: RwLock<MetricSources>,
    /// The models that are rendered under Triton's names too, if any.
    triton: OnceLock<TritonNames>,
    /// TCP connections open now.
    pub connections_open: IntGauge,
    /// Bytes that are charged to the byte budget now (D-47).
    pub body_bytes: IntGauge,
    /// 1 from the beginning of a drain.
    pub draining: IntGauge,
    /// Requests without a valid key.
    pub auth_failures: IntCounter,
    /// Refused work, by `reason`: `queue`, `tokens`, `key` (a key's own limits), `share` (a caller's quota), `body` (the byte
    /// budget), `drain`, `malformed`.
    pub rejected: IntCounterVec,
    /// Work that ended early, by `reason`: `client`, `stall`, `timeout`, `drain`, `delete`, `revoked`, `panic`.
    pub cancelled: IntCounterVec,
    /// Handlers of requests that panicked; functions and models are counted where they run.
    pub panics: IntCounter,
    /// Streams open now, by `face`.
    pub streams_open: IntGaugeVec,
    /// Calls ended, by `face`, `model` and `code` (`ok` or an error code).
    pub requests: IntCounterVec,
    /// Milliseconds from the first poll of a call to its first output, by `model` (TR-1001). Engines count tokens instead.
    pub first_response_ms: HistogramVec,
    /// Unknown parameters of requests (TR-307, LM-207).
    pub unknown_parameters: IntCounter,
    /// Metrics of Evergreen sessions (EV-904).
    pub evergreen: EvergreenMetrics,
    /// Metrics of LMTP connections.
    pub lmtp: LmtpMetrics,
}

/// Metrics of LMTP connections.
#[derive(Debug)]
pub struct LmtpMetrics {
    /// Connections open now, of every transport.
    pub connections_open: IntGauge,
    /// GENERATE and SCORE messages that were refused with an error item.
    pub refused: IntCounter,
    /// Messages sent.
    pub messages: IntCounter,
    /// Items sent; divided by `messages`, the number of items per message (LM-601).
    pub items: IntCounter,
    /// Ignored messages, by `reason`: `binary`, `malformed`.
    pub ignored: IntCounterVec,
    /// Unknown members of GENERATE (LM-207).
    pub unknown_parameters: IntCounter,
}

/// Metrics of Evergreen sessions (EV-904).
#[derive(Debug)]
pub struct EvergreenMetrics {
    /// Sessions open now.
    pub sessions_open: IntGauge,
    /// Actions that have begun and not ended.
    pub actions_open: IntGauge,
    /// Fragments, by `direction`: `in`, `out`.
    pub fragments: IntCounterVec,
    /// Payload bytes, by `direction`: `in`, `out`.
    pub bytes: IntCounterVec,
    /// Sessions aborted, by `reason`.
    pub aborts: IntCounterVec,
    /// Actions failed, by `reason`.
    pub failures: IntCounterVec,
    /// Bytes retained by all sessions now.
    pub retained_bytes: IntGauge,
    /// Fragments without effect, by `reason`: `duplicate`, `discarded`.
    pub ignored: IntCounterVec,
}

impl ServerMetrics {
    /// All numbers at zero.
    ///
    /// # Errors
    /// Only if two of our own names collide, which a test rules out.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = MetricsRegistrar(Registry::new());
        let build = registry.gauges(
            names::BUILD_INFO,
            "What is running.",
            &["version", "commit"],
        )?;
        build
            .with_label_values(&[crate::VERSION, crate::COMMIT])
            .set(1);
        let lmtp = LmtpMetrics::new(&registry)?;
        Ok(Self {
            connections_open: registry
                .gauge(names::CONNECTIONS_OPEN, "TCP connections open now.")?,
            body_bytes: registry
                .gauge(names::BODY_BYTES, "Bytes of requests that are read now.")?,
            draining: registry.gauge(names::DRAINING, "1 while the server is shutting down.")?,
            auth_failures: registry
                .counter(names::AUTH_FAILURES, "Requests without a valid key.")?,
            // Not in the registry: these are rendered as sums with the counts of engines and kernels, and a family must appear
            // only once in the text.
            rejected: IntCounterVec::new(Opts::new(names::REJECTED, "-"), &["reason"])?,
            cancelled: IntCounterVec::new(Opts::new(names::CANCELLED, "-"), &["reason"])?,
            watched: RwLock::default(),
            triton: OnceLock::new(),
            first_response_ms: HistogramVec::new(
                HistogramOpts::new(names::triton::FIRST_RESPONSE, "-")
                    .buckets(triton::FIRST_RESPONSE_MS.to_vec()),
                &["model"],
            )?,
            panics: IntCounter::new(names::PANICS, "-")?,
            streams_open: registry.gauges(names::STREAMS_OPEN, "Streams open now.", &["face"])?,
            requests: registry.counters(
                names::REQUESTS,
                "Calls ended, by how.",
                &["face", "model", "code"],
            )?,
            // One counter for all faces that ignore unknown parameters.
            unknown_parameters: lmtp.unknown_parameters.clone(),
            evergreen: EvergreenMetrics::new(&registry)?,
            lmtp,
            registry: registry.0,
        })
    }

    /// Adds an engine, whose metrics are read at each rendering.
    pub fn watch(&self, engine: impl Into<WatchedEngine>) {
        let engine = engine.into();
        self.change(|watched| {
            // Here and in `unwatch`, so that engines that are loaded and unloaded for ever do not accumulate.
            watched.fold();
            watched.engines.push(engine);
        });
    }

    /// Removes an engine. Its part of the sums of all engines stays.
    pub fn unwatch(&self, engine: impl Into<WatchedEngine>) {
        let engine = engine.into();
        let removed = engine.stats();
        self.change(|watched| {
            watched.fold();
            // By identity and not by name: a reloaded model has the name of the one that it replaces.
            watched
                .engines
                .retain(|it| !Arc::ptr_eq(it.stats(), removed));
            watched.ending.push(Arc::clone(removed));
        });
    }

    /// Adds a kernel, whose panics are read at each rendering.
    pub fn watch_kernel(&self, kernel: Kernel) {
        self.change(|watched| watched.kernels.push(kernel));
    }

    /// Records how long loading a model took.
    pub fn loaded_in(&self, model: &str, time: Duration) {
        self.change(|watched| {
            watched.loaded.insert(model.to_owned(), time);
        });
    }

    /// Renders the models of this kernel under Triton's names as well, each with its version, which is 1 by default (TR-1002).
    /// Only the first call has an effect.
    pub fn spell_for_triton(&self, kernel: Kernel, versions: BTreeMap<String, u64>) {
        self.triton
            .get_or_init(|| TritonNames::new(kernel, versions));
    }

    /// Adds the upstreams that serve a model, whose metrics are read at each rendering.
    pub fn watch_pool(&self, model: &str, pool: LmtpPool) {
        self.change(|watched| {
            // Two pools of one model would render samples with equal labels, which a scraper refuses.
            watched.pools.retain(|(other, _)| other != model);
            watched.pools.push((model.to_owned(), pool));
        });
    }

    /// Adds the counter of dropped log lines, which is read at each rendering.
    pub fn watch_log(&self, dropped: Arc<AtomicU64>) {
        self.change(|watched| watched.log = Some(dropped));
    }

    /// Adds the numbers of the process's controllers, which are read at each rendering.
    pub fn watch_controllers(&self, read: ReadControllers) {
        self.change(|watched| watched.controllers = Some(read));
    }

    /// The models of all kernels, those of upstreams included.
    pub(crate) fn models(&self) -> BTreeSet<String> {
        let watched = self.watched.read();
        let kernels = &watched.unwrap_or_else(PoisonError::into_inner).kernels;
        let specs = kernels.iter().flat_map(Kernel::specs);
        let models = specs.filter(|spec| spec.model);
        models.map(|spec| spec.name.as_str().to_owned()).collect()
    }

    /// The engines that were added and not removed.
    pub(crate) fn engines(&self) -> Vec<WatchedEngine> {
        let watched = self.watched.read();
        watched
            .unwrap_or_else(PoisonError::into_inner)
            .engines
            .clone()
    }

    fn change(&self, change: impl FnOnce(&mut MetricSources)) {
        change(&mut self.watched.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// The text that a scraper reads.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        // Cloned, so that the lock is free while the text is made: loading and unloading models takes it.
        let watched = self.watched.read();
        let watched = watched.unwrap_or_else(PoisonError::into_inner).clone();
        let mut text = MetricsText::new(format);
        text.gathered(&self.registry.gather());
        self.write_sums(&watched, &mut text);
        engines::write(&watched.engines, &mut text);
        write_loads(&watched, &mut text);
        pools::write(&watched.pools, &mut text);
        // OpenMetrics requires counters to end in `_total`, which Triton's do not (D-36).
        if format == Format::Text
            && let Some(triton) = self.triton.get()
        {
            triton.write(self, &watched, &mut text);
        }
        write_slow_work(&mut text);
        if let Some(seconds) = poll_timing::seconds() {
            let help = "Seconds for which a connection's task held a thread.";
            text.family(names::POLL_SECONDS, "histogram", help);
            text.observed(names::POLL_SECONDS, &[], seconds);
        }
        process::write(&mut text);
        text.end()
    }

    /// The families that are sums over the server, its engines and its kernels. Each event is counted by only one of them.
    fn write_sums(&self, watched: &MetricSources, text: &mut MetricsText) {
        let ended = &watched.ended;
        let engines = || {
            let running = watched.engines.iter().map(WatchedEngine::stats);
            running.chain(&watched.ending)
        };
        let sum = |read: fn(&EngineStats) -> u64| engines().map(|stats| read(stats)).sum::<u64>();
        text.family(names::REJECTED, "counter", "Work that was refused.");
        // Every reason, those with 0 too: a rate over a series that appears with its first event misses that event.
        for (reason, engines) in [
            (
                "queue",
                ended.rejected_queue + sum(|stats| stats.rejected_queue.get()),
            ),
            (
                "tokens",
                ended.rejected_tokens + sum(|stats| stats.rejected_tokens.get()),
            ),
            ("key", 0),
            ("drain", 0),
            ("share", 0),
            ("body", 0),
            ("malformed", 0),
        ] {
            let connection = self.rejected.with_label_values(&[reason]).get();
            text.sample(names::REJECTED, &[("reason", reason)], connection + engines);
        }
        text.family(names::CANCELLED, "counter", "Work that ended early.");
        let reasons = [
            "client", "stall", "timeout", "drain", "delete", "revoked", "panic",
        ];
        for reason in reasons {
            let count = self.cancelled.with_label_values(&[reason]).get();
            text.sample(names::CANCELLED, &[("reason", reason)], count);
        }
        let functions: u64 = watched.kernels.iter().map(Kernel::panics).sum();
        let code = functions
            + sapwood_kernel::source_panics()
            + sapwood_net::evergreen::panics()
            + pool::BlockingPool::global().stats().panics;
        let engines = ended.panics + sum(|stats| stats.panics.get());
        let panics = self.panics.get() + code + engines;
        text.counter(names::PANICS, "Panics that were caught.", panics);
        if let Some(dropped) = &watched.log {
            let help = "Log lines that were dropped because the log was not read in time.";
            text.counter(
                names::LOG_LINES_DROPPED,
                help,
                dropped.load(Ordering::Relaxed),
            );
        }
        if let Some(read) = &watched.controllers {
            let numbers = read();
            let help = "Sequences that a controller in Wasm steers now.";
            text.family(names::CONTROLLERS_LIVE, "gauge", help);
            text.sample(names::CONTROLLERS_LIVE, &[], numbers.live);
            let help = "Memory of the controllers in Wasm, all together.";
            text.family(names::CONTROLLER_MEMORY, "gauge", help);
            text.sample(names::CONTROLLER_MEMORY, &[], numbers.memory_bytes);
            let help = "Processes of controllers that were started after one that had ended.";
            text.counter(names::RUNTIME_RESTARTS, help, numbers.restarts);
        }
    }
}

fn write_loads(watched: &MetricSources, text: &mut MetricsText) {
    if watched.loaded.is_empty() {
        return;
    }
    let help = "Seconds that loading a model took.";
    text.family(names::MODEL_LOAD, "gauge", help);
    for (model, time) in &watched.loaded {
        text.sample(names::MODEL_LOAD, &[("model", model)], time.as_secs_f64());
    }
}

/// The thread pool for CPU-bound work.
fn write_slow_work(text: &mut MetricsText) {
    let stats = pool::BlockingPool::global().stats();
    let waited = stats.waited.as_secs_f64();
    text.gauge(
        names::SLOW_WORK_WAITING,
        "Pieces of slow work that wait now.",
        stats.waiting,
    );
    text.gauge(
        names::SLOW_WORK_RUNNING,
        "Pieces of slow work that run now.",
        stats.running,
    );
    text.counter(names::SLOW_WORK, "Pieces of slow work done.", stats.done);
    text.counter(
        names::SLOW_WORK_WAIT,
        "Seconds that slow work waited.",
        waited,
    );
    text.counter(
        names::SLOW_WORK_REFUSED,
        "Pieces of slow work refused.",
        stats.refused,
    );
}

impl EvergreenMetrics {
    fn new(registry: &MetricsRegistrar) -> Result<Self, prometheus::Error> {
        let way = &["direction"];
        let why = &["reason"];
        Ok(Self {
            sessions_open: registry.gauge(names::EVERGREEN_SESSIONS_OPEN, "Sessions open now.")?,
            actions_open: registry.gauge(names::EVERGREEN_ACTIONS_OPEN, "Actions running now.")?,
            fragments: registry.counters(names::EVERGREEN_FRAGMENTS, "Fragments carried.", way)?,
            bytes: registry.counters(names::EVERGREEN_BYTES, "Payload bytes carried.", way)?,
            aborts: registry.counters(names::EVERGREEN_ABORTS, "Sessions aborted.", why)?,
            failures: registry.counters(names::EVERGREEN_FAILURES, "Actions failed.", why)?,
            retained_bytes: registry
                .gauge(names::EVERGREEN_RETAINED_BYTES, "Bytes retained now.")?,
            ignored: registry.counters(
                names::EVERGREEN_IGNORED,
                "Fragments without effect.",
                why,
            )?,
        })
    }
}

impl LmtpMetrics {
    fn new(registry: &MetricsRegistrar) -> Result<Self, prometheus::Error> {
        Ok(Self {
            connections_open: registry
                .gauge(names::LMTP_CONNECTIONS_OPEN, "LMTP connections open now.")?,
            refused: registry.counter(names::LMTP_REFUSED, "LMTP streams refused.")?,
            messages: registry.counter(names::LMTP_MESSAGES, "LMTP messages sent.")?,
            items: registry.counter(names::LMTP_ITEMS, "LMTP items sent.")?,
            ignored: registry.counters(
                names::LMTP_IGNORED,
                "LMTP messages without effect.",
                &["reason"],
            )?,
            unknown_parameters: registry
                .counter(names::UNKNOWN_PARAMETERS, "Unknown parameters of requests.")?,
        })
    }
}

/// Creates metrics and registers them.
struct MetricsRegistrar(Registry);

impl MetricsRegistrar {
    fn put<C: Collector + Clone + 'static>(&self, metric: C) -> Result<C, prometheus::Error> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        self.put(IntGauge::new(name, help)?)
    }

    fn gauges(
        &self,
        name: &str,
        help: &str,
        by: &[&str],
    ) -> Result<IntGaugeVec, prometheus::Error> {
        self.put(IntGaugeVec::new(Opts::new(name, help), by)?)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        self.put(IntCounter::new(name, help)?)
    }

    fn counters(
        &self,
        name: &str,
        help: &str,
        by: &[&str],
    ) -> Result<IntCounterVec, prometheus::Error> {
        self.put(IntCounterVec::new(Opts::new(name, help), by)?)
    }
}

#[cfg(test)]
mod tests;
