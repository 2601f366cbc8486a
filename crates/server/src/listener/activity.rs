//! The activity of one connection: the number of requests in flight, and whether the head of one has begun to arrive
//! (OA-911).
//!
//! ```text
//!   idle (75 s) ─ first byte ─► head (10 s) ─ complete ─► in flight ─ response sent ─► idle
//! ```

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// The count of one connection; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Activity(Arc<watch::Sender<Count>>);

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    in_flight: u32,
    /// Requests that have begun since the connection was opened.
    begun: u64,
    /// The head of a request has begun to arrive, and is not complete.
    arriving: bool,
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
            count.begun += 1;
            count.arriving = false;
        });
        InFlight(self.clone())
    }

    /// Bytes have arrived. While a request is in flight they are its body or a pipelined request.
    pub(crate) fn touch(&self) {
        self.0.send_if_modified(|count| {
            // Only the first byte of a head wakes the watchers: this runs with each read, and a client that sends byte by byte
            // must not get more time with each.
            let update = count.in_flight == 0 && !count.arriving;
            count.arriving |= update;
            update
        });
    }

    /// Resolves when the head of a request has been arriving for `limit`.
    pub(crate) async fn late_head(&self, limit: Duration) {
        let mut count = self.0.subscribe();
        loop {
            let _ = count.wait_for(|count| count.arriving).await;
            let begun = count.borrow().begun;
            // The head may be complete, and that of the next request arriving, before this is polled: `begun` tells them apart.
            let next = count.wait_for(|count| !count.arriving || count.begun != begun);
            if tokio::time::timeout(limit, next).await.is_err() {
                return;
            }
        }
    }

    /// Resolves when there has been a request.
    pub(crate) async fn begun(&self) {
        // The sender lives in `self`: waiting cannot fail, here and below.
        let _ = self.0.subscribe().wait_for(|count| count.begun > 0).await;
    }

    /// Resolves when nothing has been in flight for `limit` on end.
    pub(crate) async fn idle_for(&self, limit: Duration) {
        let mut count = self.0.subscribe();
        loop {
            let _ = count.wait_for(|count| count.in_flight == 0).await;
            let begun = count.borrow().begun;
            // A request that is answered at once is over before this is polled; `begun` shows that there was one.
            let busy = count.wait_for(|count| count.in_flight > 0 || count.begun != begun);
            if tokio::time::timeout(limit, busy).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // On drop, so that a request counts as in flight until its response is sent or its client gone.
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

    #[tokio::test(start_paused = true)]
    async fn oa_911_requests_that_are_answered_at_once_count_as_activity() {
        let activity = Activity::new();
        let began = Instant::now();
        let idle = tokio::spawn({
            let activity = activity.clone();
            async move { activity.idle_for(Duration::from_secs(75)).await }
        });
        tokio::task::yield_now().await;
        advance(Duration::from_secs(60)).await;
        drop(activity.begin());
        idle.await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 60 + 75);
    }

    #[tokio::test(start_paused = true)]
    async fn oa_911_the_head_timeout_begins_with_the_first_byte_of_a_head() {
        let activity = Activity::new();
        let late = tokio::spawn({
            let activity = activity.clone();
            async move { activity.late_head(Duration::from_secs(10)).await }
        });
        let step = async |seconds| {
            tokio::task::yield_now().await;
            advance(Duration::from_secs(seconds)).await;
            tokio::task::yield_now().await;
        };
        // The idle wait does not count against the head.
        step(70).await;
        activity.touch();
        step(9).await;
        let request = activity.begin();
        activity.touch();
        step(1_000).await;
        drop(request);
        step(70).await;
        assert!(!late.is_finished());
        let began = Instant::now();
        activity.touch();
        step(6).await;
        // Another byte does not extend the timeout.
        activity.touch();
        assert!(!late.is_finished());
        late.await.unwrap();
        assert_eq!(began.elapsed(), Duration::from_secs(10));
    }
}
