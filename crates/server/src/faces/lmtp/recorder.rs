//! Counts what one connection does in the server's metrics (OA-801, LM-106, LM-207, LM-506).

use std::sync::Arc;

use sapwood_proto::lmtp::LmtpStats;

use crate::ops::drain::Drain;
use crate::ops::metrics::{FaceLabel, ServerMetrics};
use crate::ops::open_streams::OpenStreamGuard;

/// The counts of one connection, which is in the gauges until this is dropped.
pub(super) struct ConnectionRecorder {
    metrics: Arc<ServerMetrics>,
    drain: Drain,
    counted: LmtpStats,
    /// It is in the gauge of open connections.
    connected: bool,
}

impl ConnectionRecorder {
    pub(super) fn begin(metrics: &Arc<ServerMetrics>, drain: &Drain) -> Self {
        metrics.lmtp.connections_open.inc();
        Self {
            metrics: Arc::clone(metrics),
            drain: drain.clone(),
            counted: LmtpStats::default(),
            connected: true,
        }
    }

    /// The connection is lost, and its session goes on.
    pub(super) fn disconnected(&mut self) {
        // Called once for a session that is detached and again when it is dropped.
        if std::mem::take(&mut self.connected) {
            self.metrics.lmtp.connections_open.dec();
        }
    }

    /// Counts a stream that starts; a drain waits for it (LM-509).
    pub(super) fn open(&self) -> OpenStreamGuard {
        OpenStreamGuard::begin(&self.metrics, &self.drain, FaceLabel::Lmtp)
    }

    /// Counts streams that were ended early, by cause.
    pub(super) fn cancelled(&self, streams: usize, why: &'static str) {
        if streams > 0 {
            let cancelled = self.metrics.cancelled.with_label_values(&[why]);
            cancelled.inc_by(streams as u64);
        }
    }

    /// Counts a binary message, which is ignored (LM-106).
    pub(super) fn ignored(&self) {
        self.metrics
            .lmtp
            .ignored
            .with_label_values(&["binary"])
            .inc();
    }

    /// Adds what the session has counted since the last call.
    pub(super) fn record(&mut self, stats: LmtpStats) {
        // Asked after each turn of the connection, of which many count nothing: the counters are shared by all
        // connections.
        if stats == self.counted {
            return;
        }
        let (numbers, before) = (&self.metrics.lmtp, self.counted);
        let malformed = numbers.ignored.with_label_values(&["malformed"]);
        malformed.inc_by(stats.malformed - before.malformed);
        numbers
            .unknown_parameters
            .inc_by(stats.unknown_parameters - before.unknown_parameters);
        numbers
            .messages
            .inc_by(stats.messages_out - before.messages_out);
        numbers.items.inc_by(stats.items_out - before.items_out);
        numbers.refused.inc_by(stats.refused - before.refused);
        self.counted = stats;
    }
}

impl Drop for ConnectionRecorder {
    fn drop(&mut self) {
        self.disconnected();
    }
}
