//! The activity of one connection: how many requests are in flight, since when there is none, and whether one has
//! begun to arrive (OA-911).
//!
//! ```text
//!   idle (75 s) ─ first byte ─► head (10 s) ─ whole ─► in flight ─ answered ─► idle
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
    /// The head of a request has begun to arrive, and is not whole.
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

    /// Bytes have arrived. While a request is in flight they are its body or the next one in its tracks.
    pub(crate) fn touch(&self) {
        self.0.send_if_modified(|count| {
            // Only the first byte of a head wakes anybody: this runs with each read, and a client that sends byte by byte
            // must not buy time with each.
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
            // A request may be whole, and the next one arriving, before this is polled: then it is another head.
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
            // A request that is answered at once has come and gone before this is polled: its number shows it.
            let busy = count.wait_for(|count| count.in_flight > 0 || count.begun != begun);
            if tokio::time::timeout(limit, busy).await.is_err() {
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
    async fn oa_911_a_head_has_its_time_and_waiting_for_one_has_another() {
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
        // Waiting for a request costs no time of its head.
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
        // Another byte buys no time.
        activity.touch();
        assert!(!late.is_finished());
        late.await.unwrap();
        assert_eq!(began.elapsed(), Duration::from_secs(10));
    }
}
