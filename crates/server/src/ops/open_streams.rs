//! Counts a generation as open from its start to its end, for the metrics and the drain, whichever face it came
//! through (OA-801, OA-904).

use prometheus::IntGauge;

use crate::ops::drain::{Drain, DrainGuard};
use crate::ops::metrics::{FaceLabel, ServerMetrics};

/// An open stream, until dropped. A drain waits for it.
#[derive(Debug)]
pub(crate) struct OpenStreamGuard {
    streams: IntGauge,
    _work: DrainGuard,
}

impl OpenStreamGuard {
    /// Counts a stream of `face` as begun.
    pub(crate) fn begin(metrics: &ServerMetrics, drain: &Drain, face: FaceLabel) -> Self {
        let streams = metrics.streams_open.with_label_values(&[face.name()]);
        streams.inc();
        Self {
            streams,
            _work: drain.hold(),
        }
    }
}

impl Drop for OpenStreamGuard {
    fn drop(&mut self) {
        self.streams.dec();
    }
}
