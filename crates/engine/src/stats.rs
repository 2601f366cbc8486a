//! Counters of an engine: plain atomics that are read without a lock (OA-801).
//!
//! The owner thread writes nearly all of them; the few that submitters write are marked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use crate::api::{EngineError, FinishReason};
use crate::model::ThreadNumbers;

/// A number that only increases.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Returns its value.
    #[must_use]
    pub fn get(&self) -> u64 {
        // Nothing else depends on these numbers, so a scrape in the middle of a step may see some of them before
        // others.
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }
}

/// The value as of the last step.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Returns its value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

/// Observations in buckets, with their sum.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds: the last counts the values above every bound.
    buckets: Box<[AtomicU64]>,
    /// In millionths, so that it can be an integer.
    sum_millionths: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let buckets = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self {
            bounds,
            buckets,
            sum_millionths: AtomicU64::new(0),
        }
    }

    /// Returns the upper bounds of the buckets, ascending, without the infinite one.
    #[must_use]
    pub fn bounds(&self) -> &'static [f64] {
        self.bounds
    }

    /// Returns how many observations each bucket has (not cumulative); the last counts the values above every bound.
    pub fn counts(&self) -> impl Iterator<Item = u64> + '_ {
        self.buckets
            .iter()
            .map(|bucket| bucket.load(Ordering::Relaxed))
    }

    /// Returns the sum of all observations.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53 millionths")]
    pub fn sum(&self) -> f64 {
        self.sum_millionths.load(Ordering::Relaxed) as f64 / 1e6
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "observations are durations and counts: never negative, far below 2^64 millionths"
    )]
    pub(crate) fn observe(&self, value: f64) {
        // Bounds are inclusive, as `le` in the text format of Prometheus.
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_millionths
            .fetch_add((value * 1e6) as u64, Ordering::Relaxed);
    }

    pub(crate) fn observe_span(&self, span: Duration) {
        self.observe(span.as_secs_f64());
    }
}

/// The times of what steers the sequences of one engine, counted by the threads that spend them: those of the constraints
/// and of the controllers, which may end after the engine.
#[derive(Debug)]
pub struct SteeringTimes {
    /// Processor time of controllers, each time that their callbacks have run.
    pub controller_step_seconds: Histogram,
    /// From the beginning of the compilation of a grammar to its end, or to its time limit.
    pub constraint_compile_seconds: Histogram,
    /// Of each mask, or other step of a grammar, on a thread for masks.
    pub constraint_mask_seconds: Histogram,
}

impl SteeringTimes {
    /// Counts that the callbacks of a controller have run for a time.
    pub fn controller_step(&self, time: Duration) {
        self.controller_step_seconds.observe_span(time);
    }
}

impl Default for SteeringTimes {
    fn default() -> Self {
        Self {
            controller_step_seconds: Histogram::new(STEERING),
            constraint_compile_seconds: Histogram::new(COMPILE),
            constraint_mask_seconds: Histogram::new(STEERING),
        }
    }
}

/// Time to the first token, in seconds (OA-802).
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// Time between tokens, in seconds (OA-802).
const INTER_TOKEN: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// Whole requests and their phases, in seconds.
const REQUEST: &[f64] = &[
    0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
/// Steps of controllers and masks, in seconds: from the resolution of a controller's clock to twice the time that a mask
/// may take.
const STEERING: &[f64] = &[
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.0,
];
/// Compilations of grammars, in seconds: most take milliseconds, and requests wait for them two seconds at most.
const COMPILE: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0,
];
/// Counts of tokens.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
    20_000.0, 50_000.0, 100_000.0,
];
/// Counts of sequences and choices.
const COUNT: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0,
];

/// The reasons by which failures of controllers are counted: all that they have.
pub const CONTROLLER_FAILURES: [ErrorReason; 10] = [
    ErrorReason::TRAP,
    ErrorReason::TIMEOUT,
    ErrorReason::MEMORY,
    ErrorReason::LIMIT,
    ErrorReason::BAD_RESULT,
    ErrorReason::INIT,
    ErrorReason::DEADLOCK,
    ErrorReason::CONSTRAINT_FAILED,
    ErrorReason::RUNTIME_LOST,
    ErrorReason::FUEL,
];

/// The metrics of one engine.
#[derive(Debug)]
#[expect(
    missing_docs,
    reason = "the table of `server::ops::metrics::engines` has the name and the help text of each; units are in the name"
)]
pub struct EngineStats {
    pub requests_running: Gauge,
    pub requests_waiting: Gauge,
    /// Parked sequences: their reader is slow.
    pub streams_parked: Gauge,
    /// KV cells in use, cached prefixes included.
    pub cells_used: Gauge,
    pub cells_total: Gauge,
    /// 1 while the owner has nothing to do, 0 while it steps.
    pub idle: Gauge,
    /// Milliseconds since the engine's start at which the last step began.
    pub last_step_ms: Gauge,
    /// 1 once the model is lost: every request then fails.
    pub dead: Gauge,
    /// Threads of calls that compute one token of each sequence, of those with many tokens of a prompt, and of those with a
    /// few tokens of a sequence; 0 for a model that has none.
    pub threads_decode: Gauge,
    pub threads_prefill: Gauge,
    pub threads_few: Gauge,

    pub steps: Counter,
    pub prompt_tokens: Counter,
    pub generation_tokens: Counter,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: Counter,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: Counter,
    /// Prompt tokens that were copied back from saved prefixes; they are among `prefix_hits`.
    pub prefix_restored: Counter,
    /// Bytes of the prefixes that are saved in memory.
    pub prefix_saved_bytes: Gauge,
    /// What the files of saved prefixes count for.
    pub prefix_disk_bytes: Gauge,
    /// Bytes of states that were read from files.
    pub prefix_disk_read_bytes: Counter,
    /// Bytes of states that were written to files.
    pub prefix_disk_written_bytes: Counter,
    /// Files that could not be read or written, and prompts that did not wait longer for one.
    pub prefix_disk_failures: Counter,
    pub preemptions: Counter,
    /// Tokens that were drafted and computed.
    pub draft_tokens: Counter,
    /// Those of them that were sampled then.
    pub accepted_tokens: Counter,
    /// Choices that ended, by reason: stop, length, controller, cancelled.
    pub finished: [Counter; 4],
    /// Requests that ended with an error.
    pub failed: Counter,
    /// Requests whose reader was dropped.
    pub cancelled_client: Counter,
    /// Requests whose deadline passed while they were queued or running.
    pub cancelled_timeout: Counter,
    /// Requests refused because too many are queued. Written by submitters.
    pub rejected_queue: Counter,
    /// Requests refused because too many prompt tokens are queued. Written by submitters.
    pub rejected_tokens: Counter,
    /// Panics of the model and of steerers, each of which ended a request or a choice.
    pub panics: Counter,
    /// Controllers and constraints that failed, by the reasons of [`CONTROLLER_FAILURES`].
    pub controller_failures: [Counter; CONTROLLER_FAILURES.len()],
    /// Given to what steers the sequences of this engine.
    pub steering: Arc<SteeringTimes>,

    pub first_token_seconds: Histogram,
    pub inter_token_seconds: Histogram,
    pub request_seconds: Histogram,
    pub queue_seconds: Histogram,
    pub prefill_seconds: Histogram,
    pub decode_seconds: Histogram,
    /// From admission to the end.
    pub inference_seconds: Histogram,
    /// For each request, the mean time between the tokens of a choice.
    pub output_token_seconds: Histogram,
    pub request_prompt_tokens: Histogram,
    pub request_generation_tokens: Histogram,
    pub request_n: Histogram,
    pub request_max_tokens: Histogram,
    pub step_seconds: Histogram,
    /// Tokens computed per step.
    pub step_tokens: Histogram,
    /// Sequences in a step's batch.
    pub batch_size: Histogram,
}

impl EngineStats {
    pub(crate) fn set_threads(&self, threads: ThreadNumbers) {
        self.threads_decode.set(threads.decode.into());
        self.threads_prefill.set(threads.prefill.into());
        self.threads_few.set(threads.few.into());
    }

    pub(crate) fn count_finish(&self, reason: FinishReason) {
        let index = match reason {
            FinishReason::Stop => 0,
            FinishReason::Length | FinishReason::Fuel => 1,
            FinishReason::Controller => 2,
            FinishReason::Cancelled => 3,
        };
        self.finished[index].add(1);
    }

    /// Counts an error of a request or a choice, if a controller or a constraint is at fault.
    pub(crate) fn count_controller_failure(&self, error: &EngineError) {
        if error.code != Code::ControllerFailed {
            return;
        }
        let reasons = CONTROLLER_FAILURES.iter();
        let known = reasons.zip(&self.controller_failures);
        if let Some((_, counter)) = known
            .into_iter()
            .find(|(reason, _)| **reason == error.reason)
        {
            counter.add(1);
        }
    }
}

impl Default for EngineStats {
    fn default() -> Self {
        Self {
            requests_running: Gauge::default(),
            requests_waiting: Gauge::default(),
            streams_parked: Gauge::default(),
            cells_used: Gauge::default(),
            cells_total: Gauge::default(),
            idle: Gauge::default(),
            last_step_ms: Gauge::default(),
            dead: Gauge::default(),
            threads_decode: Gauge::default(),
            threads_prefill: Gauge::default(),
            threads_few: Gauge::default(),
            steps: Counter::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            prefix_restored: Counter::default(),
            prefix_saved_bytes: Gauge::default(),
            prefix_disk_bytes: Gauge::default(),
            prefix_disk_read_bytes: Counter::default(),
            prefix_disk_written_bytes: Counter::default(),
            prefix_disk_failures: Counter::default(),
            preemptions: Counter::default(),
            draft_tokens: Counter::default(),
            accepted_tokens: Counter::default(),
            finished: Default::default(),
            failed: Counter::default(),
            cancelled_client: Counter::default(),
            cancelled_timeout: Counter::default(),
            rejected_queue: Counter::default(),
            rejected_tokens: Counter::default(),
            panics: Counter::default(),
            controller_failures: Default::default(),
            steering: Arc::default(),
            first_token_seconds: Histogram::new(FIRST_TOKEN),
            inter_token_seconds: Histogram::new(INTER_TOKEN),
            request_seconds: Histogram::new(REQUEST),
            queue_seconds: Histogram::new(REQUEST),
            prefill_seconds: Histogram::new(REQUEST),
            decode_seconds: Histogram::new(REQUEST),
            inference_seconds: Histogram::new(REQUEST),
            output_token_seconds: Histogram::new(INTER_TOKEN),
            request_prompt_tokens: Histogram::new(TOKENS),
            request_generation_tokens: Histogram::new(TOKENS),
            request_n: Histogram::new(COUNT),
            request_max_tokens: Histogram::new(TOKENS),
            step_seconds: Histogram::new(INTER_TOKEN),
            step_tokens: Histogram::new(TOKENS),
            batch_size: Histogram::new(COUNT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds as OA-802 lists them.
    #[test]
    fn oa_802_the_buckets_are_those_that_dashboards_expect() {
        let bounds = |text: &str| -> Vec<f64> {
            text.split(' ')
                .map(|bound| bound.parse().unwrap())
                .collect()
        };
        let stats = EngineStats::default();
        let first =
            ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560";
        let inter = ".0005 .001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80";
        assert_eq!(stats.first_token_seconds.bounds(), bounds(first));
        for histogram in [&stats.inter_token_seconds, &stats.output_token_seconds] {
            assert_eq!(histogram.bounds(), bounds(inter));
        }
    }

    #[test]
    fn an_observation_falls_into_the_bucket_whose_bound_it_does_not_exceed() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 9.0] {
            histogram.observe(value);
        }
        assert_eq!(histogram.counts().collect::<Vec<_>>(), [2, 1, 1]);
        assert!((histogram.sum() - 12.0).abs() < 1e-9);
    }
}
