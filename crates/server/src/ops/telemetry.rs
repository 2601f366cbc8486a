//! Exports spans of generations and histograms of engines to an OpenTelemetry collector (OA-803). Off unless a
//! collector is configured.
//!
//! ```text
//!   call of a model ─ [`Spans`] ─► span ─► queue (2,048) ─► batch: 512, 2 MiB or 5 s ─► collector
//!   engines' histograms ─────────────────────────────────► every minute ───────► collector
//! ```
//!
//! Nothing waits for a collector: what the queue has no room for is dropped and counted, and what could not be delivered
//! is not kept.

mod histograms;
mod layer;
mod parent;
mod span;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sapwood_net::otlp::{Collector, DeliveryError, SpanData};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, sleep_until};

use crate::ops::metrics::ServerMetrics;

pub use layer::Spans;
pub(crate) use parent::Parent;

/// What is exported, and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Prompts and outputs are part of spans.
    pub content: bool,
    /// Spans wait for others at most so long.
    pub batch_every: Duration,
    /// Histograms are sent this often.
    pub metrics_every: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            content: false,
            batch_every: Duration::from_secs(5),
            metrics_every: Duration::from_secs(60),
        }
    }
}

/// The near end of the queue; clones share it.
#[derive(Clone, Debug)]
struct SpanSender {
    spans: mpsc::Sender<SpanData>,
    dropped: Arc<AtomicU64>,
}

impl SpanSender {
    fn put(&self, span: SpanData) {
        if self.spans.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The far end. [`Telemetry::run`] it until the server has ended.
pub struct Telemetry {
    collector: Collector,
    metrics: Arc<ServerMetrics>,
    config: Config,
    spans: mpsc::Receiver<SpanData>,
    dropped: Arc<AtomicU64>,
    began: SystemTime,
    /// The last delivery failed; said once, not for each.
    failing: bool,
}

/// A way for spans to `collector`: the layer that makes them, and the task that sends them.
#[must_use]
pub fn open(
    collector: Collector,
    metrics: Arc<ServerMetrics>,
    config: Config,
) -> (Spans, Telemetry) {
    let (sender, spans) = mpsc::channel(QUEUE_SPANS);
    let dropped = Arc::new(AtomicU64::new(0));
    let outlet = SpanSender {
        spans: sender,
        dropped: Arc::clone(&dropped),
    };
    let telemetry = Telemetry {
        collector: collector.with_service("sapwood", crate::VERSION),
        metrics,
        config,
        spans,
        dropped,
        began: SystemTime::now(),
        failing: false,
    };
    (Spans::new(outlet, config.content), telemetry)
}

impl Telemetry {
    /// Sends what comes, until `ended`; then what is left, once.
    pub async fn run(mut self, ended: impl Future<Output = ()>) {
        tokio::pin!(ended);
        let mut ticks = tokio::time::interval(self.config.metrics_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes at once, when nothing has happened yet.
        ticks.tick().await;
        let (mut batch, mut due) = (SpanBatch::default(), Instant::now());
        loop {
            // All arms may be cancelled: a span that was not received stays in the queue.
            tokio::select! {
                () = &mut ended => break,
                span = self.spans.recv() => match span {
                    Some(span) => {
                        if batch.is_empty() {
                            due = Instant::now() + self.config.batch_every;
                        }
                        if batch.put(span) {
                            self.send(std::mem::take(&mut batch)).await;
                        }
                    }
                    // Every layer is gone.
                    None => break,
                },
                () = sleep_until(due), if !batch.is_empty() => {
                    self.send(std::mem::take(&mut batch)).await;
                }
                _ = ticks.tick() => self.export_metrics().await,
            }
        }
        while let Ok(span) = self.spans.try_recv() {
            if batch.put(span) {
                self.send(std::mem::take(&mut batch)).await;
            }
        }
        if !batch.is_empty() {
            self.send(batch).await;
        }
        self.export_metrics().await;
    }

    async fn send(&mut self, SpanBatch { spans, .. }: SpanBatch) {
        let count = spans.len();
        let sent = self.collector.traces(spans).await;
        self.note(sent, count);
    }

    async fn export_metrics(&mut self) {
        let engines = &self.metrics.engines();
        let Some(request) = histograms::request(engines, self.began, self.collector.resource())
        else {
            return;
        };
        let sent = self.collector.metrics(request).await;
        self.note(sent, 0);
    }

    /// Says when deliveries begin to fail and when they go through again, not each time.
    fn note(&mut self, sent: Result<(), DeliveryError>, spans: usize) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "spans were dropped: the collector is too slow");
        }
        match sent {
            Err(error) if !self.failing => {
                tracing::warn!(%error, spans, "the collector takes nothing; spans are dropped until it does");
                self.failing = true;
            }
            Ok(()) if self.failing => {
                tracing::info!("the collector takes spans again");
                self.failing = false;
            }
            Ok(()) | Err(_) => {}
        }
    }
}

/// Spans that are delivered together.
#[derive(Default)]
struct SpanBatch {
    spans: Vec<SpanData>,
    bytes: usize,
}

impl SpanBatch {
    /// Whether it has to go now.
    fn put(&mut self, span: SpanData) -> bool {
        self.bytes += span::size(&span);
        self.spans.push(span);
        self.spans.len() >= BATCH_SPANS || self.bytes >= BATCH_BYTES
    }

    const fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

/// Spans that wait for the collector; more are dropped.
const QUEUE_SPANS: usize = 2048;
/// Spans in one delivery.
const BATCH_SPANS: usize = 512;
/// Bytes after which an export is sent. Collectors refuse messages of more than 4 MiB by default.
const BATCH_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests;
