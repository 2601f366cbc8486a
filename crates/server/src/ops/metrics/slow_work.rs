//! Metrics of the thread pool for CPU-bound work.

use sapwood_kernel::pool::BlockingPool;

use super::format::MetricsText;
use super::names;

pub(super) fn write(text: &mut MetricsText) {
    let stats = BlockingPool::global().stats();
    let gauges = [
        (
            names::SLOW_WORK_WAITING,
            "Pieces of slow work that wait now.",
            stats.waiting,
        ),
        (
            names::SLOW_WORK_RUNNING,
            "Pieces of slow work that run now.",
            stats.running,
        ),
    ];
    for (name, help, value) in gauges {
        text.family(name, "gauge", help);
        text.sample(name, &[], value);
    }
    text.family(names::SLOW_WORK, "counter", "Pieces of slow work done.");
    text.sample(names::SLOW_WORK, &[], stats.done);
    text.family(
        names::SLOW_WORK_WAIT,
        "counter",
        "Seconds that slow work waited.",
    );
    text.sample(names::SLOW_WORK_WAIT, &[], stats.waited.as_secs_f64());
    text.family(
        names::SLOW_WORK_REFUSED,
        "counter",
        "Pieces of slow work refused.",
    );
    text.sample(names::SLOW_WORK_REFUSED, &[], stats.refused);
}
