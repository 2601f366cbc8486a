//! Exports spans of generations and histograms of engines to an OpenTelemetry collector (OA-803). Off unless a
//! collector is configured.
//!
//! ```text
//!   call of a model ─ [`Spans`] ─► span ─► queue (2,048) ─► batch: 512, 2 MiB or 5 s ─► collector
//!   engines' histograms ─────────────────────────────────► every minute ───────► collector
//! ```
//!
//! Nothing waits for a collector: spans that find the queue full are dropped and counted, and spans that could not be delivered
//! are not kept.

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
    /// Spans contain prompts and outputs.
    pub content: bool,
    /// The longest time that a span waits for others of its batch.
    pub batch_every: Duration,
    /// The interval of histograms.
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

/// The sending end of the queue; clones share it.
#[derive(Clone, Debug)]
struct SpanSender {
    spans: mpsc::Sender<SpanData>,
    dropped: Arc<AtomicU64>,
}

impl SpanSender {
    fn put(&self, span: SpanData) {
        // Never waits: this runs in the task that serves the call.
        if self.spans.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The task that exports; run [`Telemetry::run`] until the server has ended.
pub struct Telemetry {
    collector: Collector,
    metrics: Arc<ServerMetrics>,
    config: Config,
    spans: mpsc::Receiver<SpanData>,
    dropped: Arc<AtomicU64>,
    began: SystemTime,
    /// The last delivery failed; logged once, not for each.
    failing: bool,
}

/// Opens an export to `collector`: the layer that makes spans, and the task that sends them.
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
    /// Exports until `ended`; then sends what is left, once.
    pub async fn run(mut self, ended: impl Future<Output = ()>) {
        tokio::pin!(ended);
        let mut ticks = tokio::time::interval(self.config.metrics_every);
        // A slow collector must not get a burst of histograms afterwards.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is immediate, when there is nothing to report yet.
        ticks.tick().await;
        let (mut batch, mut due) = (SpanBatch::default(), Instant::now());
        loop {
            // All arms may be cancelled: a span that was not received stays in the queue. Deliveries are awaited in the bodies
            // of the arms, which are not cancelled; meanwhile the queue takes the spans.
            tokio::select! {
                () = &mut ended => break,
                span = self.spans.recv() => match span {
                    Some(span) => {
                        // From the first span of the batch: later ones must not put it off.
                        if batch.is_empty() {
                            due = Instant::now() + self.config.batch_every;
                        }
                        if batch.put(span) {
                            self.send(std::mem::take(&mut batch)).await;
                        }
                    }
                    // All senders were dropped.
                    None => break,
                },
                () = sleep_until(due), if !batch.is_empty() => {
                    self.send(std::mem::take(&mut batch)).await;
                }
                _ = ticks.tick() => self.export_metrics().await,
            }
        }
        // Without waiting for more: the server has ended, and this has to end too.
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

    /// Logs when deliveries begin to fail and when they succeed again, but not each of them.
    fn note(&mut self, sent: Result<(), DeliveryError>, spans: usize) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "spans were dropped: the collector is too slow");
        }
        match sent {
            Err(error) if !self.failing => {
                tracing::warn!(%error, spans, "could not export to the collector; spans are dropped meanwhile");
                self.failing = true;
            }
            Ok(()) if self.failing => {
                tracing::info!("the export to the collector works again");
                self.failing = false;
            }
            Ok(()) | Err(_) => {}
        }
    }
}

/// Spans of one delivery.
#[derive(Default)]
struct SpanBatch {
    spans: Vec<SpanData>,
    bytes: usize,
}

impl SpanBatch {
    /// Adds a span. Returns whether the batch is full.
    fn put(&mut self, span: SpanData) -> bool {
        self.bytes += span::size(&span);
        self.spans.push(span);
        self.spans.len() >= BATCH_SPANS || self.bytes >= BATCH_BYTES
    }

    const fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

/// Maximum of spans that wait for the collector; more are dropped.
const QUEUE_SPANS: usize = 2048;
/// Maximum of spans in one delivery.
const BATCH_SPANS: usize = 512;
/// Bytes at which a batch is sent. Collectors refuse messages of more than 4 MiB by default, and one span may exceed this.
const BATCH_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests;
