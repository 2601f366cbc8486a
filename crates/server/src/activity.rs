//! How many requests of one connection are in flight, and since when none is.
//!
//! Owns: the count behind the idle limit. Refuses to know: what a connection is.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// The count of one connection; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Activity(Arc<watch::Sender<Count>>);

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    in_flight: u32,
    /// There has been a request at all.
    begun: bool,
}

/// A request in flight, until dropped.
#[derive(Debug)]
pub(crate) struct InFlight(Activity);

impl Activity {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Count::default())))
    }

    pub(crate) fn begin(&self) -> InFlight {
        self.0.send_modify(|count| {
            count.in_flight += 1;
            count.begun = true;
        });
        InFlight(self.clone())
    }

    /// Resolves when there has been a request.
    pub(crate) async fn begun(&self) {
        // The sender lives in `self`: waiting cannot fail, here and below.
        let _ = self.0.subscribe().wait_for(|count| count.begun).await;
    }

    /// Resolves when nothing has been in flight for `limit` on end.
    pub(crate) async fn idle_for(&self, limit: Duration) {
        let mut count = self.0.subscribe();
        loop {
            let _ = count.wait_for(|count| count.in_flight == 0).await;
            let busy =
                tokio::time::timeout(limit, count.wait_for(|count| count.in_flight > 0)).await;
            if busy.is_err() {
                return;
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| count.in_flight -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::{Instant, advance};

    #[tokio::test(start_paused = true)]
    async fn oa_911_idle_time_begins_again_after_each_request() {
        let activity = Activity::new();
        let began = Instant::now();
        let idle = tokio::spawn({
            let activity = activity.clone();
            async move { activity.idle_for(Duration::from_secs(75)).await }
        });
        tokio::task::yield_now().await;
        advance(Duration::from_secs(74)).await;
        let request = activity.begin();
        tokio::task::yield_now().await;
        advance(Duration::from_secs(1_000)).await;
        assert!(!idle.is_finished());
        drop(request);
        idle.await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 74 + 1_000 + 75);
    }
}
