//! The histogram of the poll times of connection tasks.

use prometheus::core::Metric;

use super::format::MetricsText;
use super::names::POLL_SECONDS;
use crate::listener::poll_timing;

pub(super) fn write(text: &mut MetricsText) {
    let Some(reported) = poll_timing::seconds() else {
        return;
    };
    let help = "Seconds for which a connection's task held a thread.";
    text.family(POLL_SECONDS, "histogram", help);
    let reported = reported.metric();
    let reported = reported.get_histogram();
    // The crate leaves the infinite bucket to whoever renders.
    let last = (f64::INFINITY, reported.get_sample_count());
    let buckets = reported.get_bucket().iter();
    let buckets = buckets.map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
    text.buckets(
        POLL_SECONDS,
        &[],
        buckets.chain([last]),
        reported.get_sample_sum(),
    );
}
