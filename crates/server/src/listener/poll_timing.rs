//! Measures how long each poll of a connection task occupies a worker thread.
//!
//! A thread that is held serves nobody else, so whatever takes long belongs on the threads for slow work
//! ([`sapwood_kernel::pool`]). This measures whether all of it is there. The runtime belongs to the whole process, and so
//! does the number.

use std::future::Future;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};
use std::time::Instant;

use hyper::rt::Executor;
use prometheus::{Histogram, HistogramOpts};

use crate::ops::metrics::POLL_SECONDS;

pin_project_lite::pin_project! {
    /// A task whose polls are measured.
    pub(crate) struct TimedTask<F> {
        #[pin]
        work: F,
    }
}

/// `work`, for a task of its own. Costs two looks at the clock per poll.
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

/// Where hyper begins the tasks of HTTP/2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimedExecutor;

impl<F> Executor<F> for TimedExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, work: F) {
        // As with hyper's own executor they end with their connection, which each of them watches.
        tokio::spawn(timed(work));
    }
}

/// What was measured since the process began.
pub(crate) fn seconds() -> Option<&'static Histogram> {
    SECONDS.as_ref()
}

/// The bounds are constant and ascending, so that there always is one.
static SECONDS: LazyLock<Option<Histogram>> = LazyLock::new(|| {
    let options = HistogramOpts::new(POLL_SECONDS, "-").buckets(BOUNDS.to_vec());
    Histogram::with_opts(options).ok()
});

/// In seconds. What lasts longer than a twentieth is a defect.
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
