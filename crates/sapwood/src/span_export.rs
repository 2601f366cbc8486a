//! Exports spans and histograms to a collector, from the server's start to its end (OA-803).

use std::sync::Arc;
use std::time::Duration;

use sapwood_kernel::Kernel;
use sapwood_server::ServerContext;
use sapwood_server::ops::telemetry;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use crate::config::Config;
use crate::failure::CliError;

/// Spans and histograms on their way to a collector, if one is configured.
pub(crate) struct SpanExport {
    end: oneshot::Sender<()>,
    task: Option<AbortOnDropHandle<()>>,
}

impl SpanExport {
    /// Must come after the other layers: a span describes calls of the model, not those that were refused before.
    ///
    /// # Errors
    /// [`CliError::usage`] if the collector's address or headers cannot be used.
    pub(crate) fn begin(
        config: &Config,
        shared: &ServerContext,
        kernel: &Kernel,
    ) -> Result<Self, CliError> {
        let (end, ended) = oneshot::channel();
        let collector = config.trace.collector()?;
        let task = collector.map(|collector| {
            let metrics = Arc::clone(&shared.metrics);
            let (spans, telemetry) = telemetry::open(collector, metrics, config.trace.telemetry());
            kernel.layer(spans);
            let run = telemetry.run(async move {
                // Resolves at the end, and also if the sender is dropped because the server could not start.
                let _ = ended.await;
            });
            AbortOnDropHandle::new(tokio::spawn(run))
        });
        Ok(Self { end, task })
    }

    /// Sends the remaining spans. If the collector does not answer, this ends at a timeout.
    pub(crate) async fn end(self) {
        // The receiver is gone only if the task has ended already.
        let _ = self.end.send(());
        if let Some(task) = self.task {
            // Spans that are not sent by then are lost: a collector must not keep the server from ending.
            let _ = tokio::time::timeout(LAST_SPANS, task).await;
        }
    }
}

/// Timeout of the last export.
const LAST_SPANS: Duration = Duration::from_secs(5);
