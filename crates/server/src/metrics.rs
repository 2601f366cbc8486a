//! What the server counts, each number once, and the text in which scrapers read it (OA-801, OA-802, EV-904).
//!
//! Owns: one typed struct whose fields are handed to whoever counts, and the rendering of `/metrics`. Refuses to know:
//! what the numbers mean to a face. Labels come from closed sets; rendering takes no lock that an engine needs.

mod names;

use prometheus::core::Collector;
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

/// The face through which work came in; a closed set, because it is a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Face {
    /// Evergreen sessions over gRPC.
    Evergreen,
    /// Plain HTTP routes that belong to no protocol of ours.
    Http,
}

impl Face {
    /// The label's value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Evergreen => "evergreen",
            Self::Http => "http",
        }
    }
}

/// Every number of the server. Clone the field you count with; clones share the number.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// TCP connections open now.
    pub connections_open: IntGauge,
    /// 1 from the beginning of a drain.
    pub draining: IntGauge,
    /// Requests without a valid key.
    pub auth_failures: IntCounter,
    /// Work refused at the door, by `reason`: `queue`, `tokens`, `key`, `drain`.
    pub rejected: IntCounterVec,
    /// Work that ended early, by `reason`: `client`, `stall`, `timeout`, `drain`, `delete`.
    pub cancelled: IntCounterVec,
    /// Handlers that panicked.
    pub panics: IntCounter,
    /// Streams open now, by `face`.
    pub streams_open: IntGaugeVec,
    /// Calls ended, by `face`, `model` and `code` (`ok` or an error code).
    pub requests: IntCounterVec,
    /// Seconds from a call's first poll to its end, by `model`.
    pub request_seconds: HistogramVec,
    /// Seconds from a call's first poll to its first output, by `model`.
    pub time_to_first_token: HistogramVec,
    /// Seconds between outputs of a call, by `model`.
    pub inter_token: HistogramVec,
    /// What Evergreen sessions count (EV-904).
    pub evergreen: Evergreen,
}

/// What Evergreen sessions count (EV-904).
#[derive(Debug)]
pub struct Evergreen {
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

/// OA-802: time to the first token, in seconds.
const FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

/// OA-802: time between tokens, in seconds.
const INTER_TOKEN_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];

impl Metrics {
    /// All numbers at zero.
    ///
    /// # Errors
    /// Only if two of our own names collide, which a test rules out.
    pub fn new() -> Result<Self, prometheus::Error> {
        let shelf = Shelf(Registry::new());
        let build = shelf.gauges(
            names::BUILD_INFO,
            "What is running.",
            &["version", "commit"],
        )?;
        build
            .with_label_values(&[crate::VERSION, crate::COMMIT])
            .set(1);
        Ok(Self {
            connections_open: shelf.gauge(names::CONNECTIONS_OPEN, "TCP connections open now.")?,
            draining: shelf.gauge(names::DRAINING, "1 while the server is shutting down.")?,
            auth_failures: shelf.counter(names::AUTH_FAILURES, "Requests without a valid key.")?,
            rejected: shelf.counters(names::REJECTED, "Work refused at the door.", &["reason"])?,
            cancelled: shelf.counters(names::CANCELLED, "Work that ended early.", &["reason"])?,
            panics: shelf.counter(names::PANICS, "Handlers that panicked.")?,
            streams_open: shelf.gauges(names::STREAMS_OPEN, "Streams open now.", &["face"])?,
            requests: shelf.counters(
                names::REQUESTS,
                "Calls ended, by how.",
                &["face", "model", "code"],
            )?,
            request_seconds: shelf.histograms(
                names::REQUEST_SECONDS,
                "Seconds from a call's start to its end.",
                FIRST_TOKEN_BUCKETS,
            )?,
            time_to_first_token: shelf.histograms(
                names::TIME_TO_FIRST_TOKEN,
                "Seconds from a call's start to its first output.",
                FIRST_TOKEN_BUCKETS,
            )?,
            inter_token: shelf.histograms(
                names::INTER_TOKEN,
                "Seconds between two outputs of a call.",
                INTER_TOKEN_BUCKETS,
            )?,
            evergreen: Evergreen::new(&shelf)?,
            registry: shelf.0,
        })
    }

    /// Adds numbers that somebody else counts and that are read when rendered.
    ///
    /// # Errors
    /// If a name is taken.
    pub fn register(&self, collector: Box<dyn Collector>) -> Result<(), prometheus::Error> {
        self.registry.register(collector)
    }

    /// The text format 0.0.4.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = Vec::new();
        // Writing into a vector fails only for a family without metrics, which is then left out.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Evergreen {
    fn new(shelf: &Shelf) -> Result<Self, prometheus::Error> {
        let way = &["direction"];
        let why = &["reason"];
        Ok(Self {
            sessions_open: shelf.gauge(names::EVERGREEN_SESSIONS_OPEN, "Sessions open now.")?,
            actions_open: shelf.gauge(names::EVERGREEN_ACTIONS_OPEN, "Actions running now.")?,
            fragments: shelf.counters(names::EVERGREEN_FRAGMENTS, "Fragments carried.", way)?,
            bytes: shelf.counters(names::EVERGREEN_BYTES, "Payload bytes carried.", way)?,
            aborts: shelf.counters(names::EVERGREEN_ABORTS, "Sessions aborted.", why)?,
            failures: shelf.counters(names::EVERGREEN_FAILURES, "Actions failed.", why)?,
            retained_bytes: shelf.gauge(names::EVERGREEN_RETAINED_BYTES, "Bytes retained now.")?,
            ignored: shelf.counters(names::EVERGREEN_IGNORED, "Fragments without effect.", why)?,
        })
    }
}

/// Makes metrics and registers them in one go.
struct Shelf(Registry);

impl Shelf {
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

    fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
    ) -> Result<HistogramVec, prometheus::Error> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.put(HistogramVec::new(options, &["model"])?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_801_numbers_are_rendered_under_their_own_names() {
        let metrics = Metrics::new().unwrap();
        metrics.connections_open.set(3);
        metrics.rejected.with_label_values(&["drain"]).inc();
        metrics
            .time_to_first_token
            .with_label_values(&["demo"])
            .observe(0.03);
        let text = metrics.render();
        for line in [
            "sapwood_connections_open 3",
            "sapwood_rejected_total{reason=\"drain\"} 1",
            "sapwood_time_to_first_token_seconds_bucket{model=\"demo\",le=\"0.04\"} 1",
            "# TYPE sapwood_evergreen_sessions_open gauge",
            "sapwood_draining 0",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
