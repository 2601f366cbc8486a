//! How long polls of connections' tasks last.

use prometheus::core::Metric;

use super::format::Text;
use super::names::POLL_SECONDS;
use crate::polls;

pub(super) fn write(text: &mut Text) {
    let Some(told) = polls::seconds() else {
        return;
    };
    let help = "Seconds for which a connection's task held a thread.";
    text.family(POLL_SECONDS, "histogram", help);
    let told = told.metric();
    let told = told.get_histogram();
    let last = (f64::INFINITY, told.get_sample_count());
    let buckets = told.get_bucket().iter();
    let buckets = buckets.map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
    text.buckets(
        POLL_SECONDS,
        &[],
        buckets.chain([last]),
        told.get_sample_sum(),
    );
}
