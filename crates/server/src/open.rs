//! One stream as the numbers and a drain see it: a request for a generation that has begun and not ended, whichever face it
//! came through (OA-801, OA-904).
//!
//! Owns: [`Open`]. Refuses to know: what the stream carries, and how it ends.

use prometheus::IntGauge;

use crate::drain::{Drain, Work};
use crate::metrics::{Face, Metrics};

/// An open stream, until dropped. A drain waits for it.
#[derive(Debug)]
pub(crate) struct Open {
    streams: IntGauge,
    _work: Work,
}

impl Open {
    /// A stream of `face` begins.
    pub(crate) fn begin(metrics: &Metrics, drain: &Drain, face: Face) -> Self {
        let streams = metrics.streams_open.with_label_values(&[face.name()]);
        streams.inc();
        Self {
            streams,
            _work: drain.hold(),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.streams.dec();
    }
}
