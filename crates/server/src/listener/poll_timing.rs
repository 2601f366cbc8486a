//! Measures how long each poll of a connection task occupies a worker thread.
//!
//! A worker thread that is occupied serves no other task, so slow work belongs on the thread pool
//! ([`sapwood_kernel::pool`]). This measures whether all of it is there. The runtime belongs to the whole process, and so does
//! the histogram.

use std::future::Future;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};
use std::time::Instant;

use hyper::rt::Executor;
use prometheus::{Histogram, HistogramOpts};

pin_project_lite::pin_project! {
    /// A task whose polls are measured.
    pub(crate) struct TimedTask<F> {
        #[pin]
        work: F,
    }
}

/// Wraps `work` for a task of its own. Costs two reads of the clock per poll.
pub(crate) const fn timed<F: Future>(work: F) -> TimedTask<F> {
    TimedTask { work }
}

impl<F: Future> Future for TimedTask<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let began = Instant::now();
        let polled = self.project().work.poll(cx);
        if let Some(seconds) = &*SECONDS {
            seconds.observe(began.elapsed().as_secs_f64());
        }
        polled
    }
}

/// Spawns hyper's tasks of HTTP/2 streams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimedExecutor;

impl<F> Executor<F> for TimedExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, work: F) {
        // Not joined by us, as with hyper's own executor: each of them ends with its connection, which it watches.
        tokio::spawn(timed(work));
    }
}

/// The histogram since the start of the process.
pub(crate) fn seconds() -> Option<&'static Histogram> {
    SECONDS.as_ref()
}

// A static, because tasks are polled far from any handle. The bounds are constant and ascending, so it never is `None`.
static SECONDS: LazyLock<Option<Histogram>> = LazyLock::new(|| {
    // In no registry, so the name does not matter: that of the metric is given where it is rendered.
    let options = HistogramOpts::new("seconds", "-").buckets(BOUNDS.to_vec());
    Histogram::with_opts(options).ok()
});

/// In seconds. A poll of more than a twentieth is a defect.
const BOUNDS: [f64; 8] = [0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0];

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_poll_of_a_task_is_measured() {
        let count = || seconds().unwrap().get_sample_count();
        let before = count();
        timed(tokio::task::yield_now()).await;
        assert!(count() - before >= 2);
    }
}
