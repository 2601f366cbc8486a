//! Statistics of each model: the number of requests and how long they took (TR-704). A drain waits for requests that run
//! (OA-904).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use sapwood_kernel::Name;
use sapwood_proto::generated::inference::{
    InferResponseStatistics, InferStatistics, ModelStatistics, StatisticDuration,
};
use tokio::time::Instant;

use super::call::CallResponses;
use super::catalog::FoundModel;
use super::request_end::{RequestEnd, WatchedResponses};
use crate::context::ServerContext;
use crate::ops::drain::Drain;
use crate::ops::metrics::{FaceLabel, ServerMetrics};
use crate::ops::open_streams::OpenStreamGuard;

/// Index from which on responses are counted together (TR-704).
const RESPONSES_PER_SAMPLE: usize = 16;

/// The counts of every model that was called.
pub(super) struct InferenceStats {
    /// Bounded: only versions of models that exist are counted.
    all: Mutex<BTreeMap<(Name, u64), VersionStats>>,
    metrics: Arc<ServerMetrics>,
    drain: Drain,
}

/// The counts of one version of a model.
type VersionStats = Arc<Mutex<Counts>>;

/// A number of times, and how long they took together.
#[derive(Clone, Copy, Debug, Default)]
struct DurationTotal {
    count: u64,
    ns: u64,
}

#[derive(Clone, Debug, Default)]
struct Counts {
    last_ms: u64,
    success: DurationTotal,
    fail: DurationTotal,
    infer: DurationTotal,
    responses: Vec<DurationTotal>,
}

impl DurationTotal {
    fn add(&mut self, ns: u64) {
        self.count += 1;
        self.ns = self.ns.saturating_add(ns);
    }

    const fn to_message(self) -> Option<StatisticDuration> {
        Some(StatisticDuration {
            count: self.count,
            ns: self.ns,
        })
    }
}

impl InferenceStats {
    pub(super) fn new(shared: &ServerContext) -> Self {
        Self {
            all: Mutex::default(),
            metrics: Arc::clone(&shared.metrics),
            drain: shared.drain.clone(),
        }
    }

    /// Counts a request from now on. It counts as failed, unless [`RequestTimer::succeeded`] is called before it is
    /// dropped.
    pub(super) fn begin(&self, found: &FoundModel) -> RequestTimer {
        let key = (found.function.clone(), found.version);
        // The timer holds the counts of its model, so that this lock is taken once per request and not per response.
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        RequestTimer {
            counts: Arc::clone(all.entry(key).or_default()),
            began: now,
            last: now,
            responses: 0,
            ok: false,
            ending: RequestEnd::new(&self.metrics),
            _open: OpenStreamGuard::begin(&self.metrics, &self.drain, FaceLabel::Generate),
        }
    }

    /// The statistics of one version of a model.
    pub(super) fn message(&self, function: &Name, shown: &str, version: u64) -> ModelStatistics {
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        // A model that was not called yet has counts of zero, and no entry.
        let counts = all.get(&(function.clone(), version)).cloned();
        drop(all);
        let counts = counts.unwrap_or_default();
        let counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.to_message(shown, version)
    }
}

impl Counts {
    fn to_message(&self, name: &str, version: u64) -> ModelStatistics {
        let none = Some(StatisticDuration::default());
        let count = self.success.count;
        // The phases inside an engine are not measured apart here: all of the time counts as inference.
        let passed = Some(StatisticDuration { count, ns: 0 });
        let responses = self.responses.iter().enumerate().map(|(index, span)| {
            let reported = InferResponseStatistics {
                // Nothing but inference is measured, so each response succeeded in the time that it was inferred in.
                compute_infer: span.to_message(),
                compute_output: none,
                success: span.to_message(),
                fail: none,
                empty_response: none,
                cancel: none,
            };
            (index.to_string(), reported)
        });
        ModelStatistics {
            name: name.into(),
            version: version.to_string(),
            last_inference: self.last_ms,
            inference_count: count,
            execution_count: count,
            inference_stats: Some(InferStatistics {
                success: self.success.to_message(),
                fail: self.fail.to_message(),
                queue: passed,
                compute_input: passed,
                compute_infer: self.infer.to_message(),
                compute_output: passed,
                cache_hit: none,
                cache_miss: none,
            }),
            response_stats: responses.collect(),
            ..ModelStatistics::default()
        }
    }
}

/// A request that is being counted, until it is dropped.
#[derive(Debug)]
pub(super) struct RequestTimer {
    counts: VersionStats,
    began: Instant,
    last: Instant,
    responses: usize,
    ok: bool,
    ending: RequestEnd,
    _open: OpenStreamGuard,
}

impl RequestTimer {
    /// Wraps the responses of the request, so that an early end is counted by its cause.
    pub(super) fn watch(&self, responses: CallResponses) -> CallResponses {
        WatchedResponses::new(responses, self.ending()).boxed()
    }

    /// How the request ends; the first decision counts.
    pub(super) fn ending(&self) -> RequestEnd {
        self.ending.clone()
    }

    /// Counts responses that were ready together.
    pub(super) fn responded(&mut self, responses: usize) {
        if responses == 0 {
            return;
        }
        let now = Instant::now();
        let mut took = nanoseconds(self.last, now);
        self.last = now;
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..responses {
            let index = self.responses.min(RESPONSES_PER_SAMPLE);
            self.responses += 1;
            if counts.responses.len() <= index {
                counts
                    .responses
                    .resize_with(index + 1, DurationTotal::default);
            }
            // The time belongs to the first of them; the others were there at once.
            counts.responses[index].add(std::mem::take(&mut took));
        }
    }

    /// The call has ended without an error.
    pub(super) const fn succeeded(&mut self) {
        self.ok = true;
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        let took = nanoseconds(self.began, Instant::now());
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        // In `Drop`, so that a request whose client disconnects counts as failed, although nothing reports it.
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.last_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        if self.ok {
            counts.success.add(took);
            counts.infer.add(took);
        } else {
            counts.fail.add(took);
        }
    }
}

fn nanoseconds(from: Instant, to: Instant) -> u64 {
    let time = to.saturating_duration_since(from).as_nanos();
    u64::try_from(time).unwrap_or(u64::MAX)
}
