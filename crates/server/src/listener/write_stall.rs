//! Write-stall timeout: resets a response whose client has stopped reading (TR-609).
//!
//! ```text
//!   a piece goes to HTTP ─► HTTP asks for the next one: it goes on            there is room, or the face has nothing yet
//!                        └► HTTP has not asked for `limit`: the body is let go, and with it the work behind it
//! ```
//!
//! HTTP/1 carries one answer at a time, so its connection is reset. On HTTP/2 the others go on; the stream that nobody
//! reads is reset when its client looks at it again.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::ops::metrics::ServerMetrics;

/// The answers that leave over one connection; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct WriteStallWatch(Arc<StallWatchShared>);

#[derive(Debug)]
struct StallWatchShared {
    opened: Instant,
    bodies: Mutex<Vec<Weak<WatchedBody>>>,
    more: Notify,
    reset: AtomicBool,
}

/// One body on its way.
#[derive(Debug)]
struct WatchedBody {
    body: Mutex<Option<Body>>,
    /// Milliseconds from the connection's opening to the last piece that HTTP took and has not asked beyond; [`MOVING`]
    /// while it waits for more.
    since: AtomicU64,
    /// Nothing else goes over the connection meanwhile.
    alone: bool,
    metrics: Arc<ServerMetrics>,
    let_go: Arc<AtomicBool>,
}

const MOVING: u64 = u64::MAX;

/// What one look at all bodies finds.
enum WatchResult {
    /// Nothing leaves.
    Nothing,
    /// None can be late before then.
    Again(Instant),
    /// The connection carries nothing else than what was let go.
    Over,
}

impl WriteStallWatch {
    pub(crate) fn new() -> Self {
        Self(Arc::new(StallWatchShared {
            opened: Instant::now(),
            bodies: Mutex::default(),
            more: Notify::new(),
            reset: AtomicBool::new(false),
        }))
    }

    /// The body as one whose client has to read it. `alone`: the connection carries one answer at a time. `let_go` is set
    /// before the work behind it is ended.
    pub(crate) fn watching(
        &self,
        body: Body,
        alone: bool,
        metrics: Arc<ServerMetrics>,
        let_go: Arc<AtomicBool>,
    ) -> Body {
        if body.is_end_stream() || body.size_hint().exact().is_some() {
            // Nothing waits behind a body that is whole.
            return body;
        }
        let leaf = Arc::new(WatchedBody {
            body: Mutex::new(Some(body)),
            since: AtomicU64::new(MOVING),
            alone,
            metrics,
            let_go,
        });
        self.bodies().push(Arc::downgrade(&leaf));
        self.0.more.notify_one();
        Body::new(UnreadBody {
            leaf,
            opened: self.0.opened,
        })
    }

    /// Resolves when the connection has to be reset, because its client has taken nothing for `limit`.
    pub(crate) async fn stalled(&self, limit: Duration) {
        loop {
            match self.look(limit) {
                WatchResult::Over => return,
                WatchResult::Again(at) => sleep_until(at).await,
                WatchResult::Nothing => self.0.more.notified().await,
            }
        }
    }

    /// From now on the socket takes nothing more.
    pub(crate) fn reset(&self) {
        self.0.reset.store(true, Ordering::Relaxed);
    }

    /// Whether the socket takes nothing more.
    pub(crate) fn is_reset(&self) -> bool {
        self.0.reset.load(Ordering::Relaxed)
    }

    fn look(&self, limit: Duration) -> WatchResult {
        let now = Instant::now();
        let mut first = now + limit;
        let mut bodies = self.bodies();
        // Weak references: a body that hyper has dropped is not watched any more, and nobody has to sign off.
        bodies.retain(|leaf| leaf.strong_count() > 0);
        for leaf in bodies.iter().filter_map(Weak::upgrade) {
            let since = leaf.since.load(Ordering::Relaxed);
            if since == MOVING {
                continue;
            }
            let due = self.0.opened + Duration::from_millis(since) + limit;
            if due > now {
                first = first.min(due);
            } else if leaf.let_go() && leaf.alone {
                return WatchResult::Over;
            }
        }
        if bodies.is_empty() {
            WatchResult::Nothing
        } else {
            WatchResult::Again(first)
        }
    }

    fn bodies(&self) -> MutexGuard<'_, Vec<Weak<WatchedBody>>> {
        self.0.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchedBody {
    fn body(&self) -> MutexGuard<'_, Option<Body>> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the work behind the body. Says whether there was any.
    fn let_go(&self) -> bool {
        // Taken out of the lock and dropped at the end of this function, when the flag is set: what ends with the body
        // looks at the flag, and counts itself as its client's doing if it is not there.
        let body = self.body().take();
        if body.is_some() {
            self.let_go.store(true, Ordering::Relaxed);
            self.metrics.cancelled.with_label_values(&["stall"]).inc();
        }
        body.is_some()
    }
}

/// A body that has to be read.
struct UnreadBody {
    leaf: Arc<WatchedBody>,
    opened: Instant,
}

impl hyper::body::Body for UnreadBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut retained = self.leaf.body();
        let Some(body) = retained.as_mut() else {
            return Poll::Ready(Some(Err(axum::Error::new(
                "the client does not read this response",
            ))));
        };
        let polled = Pin::new(body).poll_frame(cx);
        // A piece starts the clock and the next poll stops it: HTTP polls again as soon as it has room. While the face has
        // nothing (`Pending`) the clock stands, because then the client has read all that there is.
        let since = match &polled {
            Poll::Ready(Some(Ok(_))) => {
                u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(0)
            }
            _ => MOVING,
        };
        self.leaf.since.store(since, Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.leaf.body().as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let retained = self.leaf.body();
        retained
            .as_ref()
            .map_or_else(SizeHint::default, |body| body.size_hint())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;
    use http_body_util::BodyExt;
    use tokio::time::{advance, timeout};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A body without an end, and whether it is still there.
    fn endless() -> (Body, Weak<()>) {
        let there = Arc::new(());
        let seen = Arc::downgrade(&there);
        let pieces = stream::unfold(there, |there| async move {
            Some((Ok::<_, Infallible>(Bytes::from_static(b"x")), there))
        });
        (Body::from_stream(pieces), seen)
    }

    fn draining(write_stalls: &WriteStallWatch, alone: bool) -> (Body, Weak<()>) {
        let (body, there) = endless();
        let metrics = Arc::new(ServerMetrics::new().unwrap());
        let body = write_stalls.watching(body, alone, metrics, Arc::default());
        (body, there)
    }

    #[tokio::test(start_paused = true)]
    async fn tr_609_a_body_may_stand_still_for_its_limit_and_not_longer() {
        let write_stalls = WriteStallWatch::new();
        let (mut body, there) = draining(&write_stalls, true);
        let watching = {
            let write_stalls = write_stalls.clone();
            tokio::spawn(async move { write_stalls.stalled(LIMIT).await })
        };
        // Each piece begins the time anew.
        for _ in 0..3 {
            body.frame().await.unwrap().unwrap();
            tokio::task::yield_now().await;
            advance(LIMIT - Duration::from_millis(1)).await;
        }
        assert!(!watching.is_finished() && there.strong_count() == 1);
        advance(Duration::from_millis(2)).await;
        watching.await.unwrap();
        assert_eq!(there.strong_count(), 0, "the work behind it has ended");
        assert!(body.frame().await.unwrap().is_err(), "it did not end well");
    }

    /// Where several answers share a connection, the others go on.
    #[tokio::test(start_paused = true)]
    async fn tr_609_only_the_body_that_stands_still_is_let_go() {
        let write_stalls = WriteStallWatch::new();
        let (mut still, removed) = draining(&write_stalls, false);
        let (mut read, there) = draining(&write_stalls, false);
        let silent = write_stalls.watching(
            Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()),
            false,
            Arc::new(ServerMetrics::new().unwrap()),
            Arc::default(),
        );
        let mut silent = silent;
        still.frame().await.unwrap().unwrap();
        let reading = async {
            for _ in 0..10 {
                read.frame().await.unwrap().unwrap();
                tokio::time::sleep(LIMIT / 4).await;
            }
        };
        // What has nothing to say is not what nobody reads.
        let waiting = timeout(LIMIT * 2, silent.frame());
        let stalled = timeout(LIMIT * 2, write_stalls.stalled(LIMIT));
        let (stalled, waited, ()) = futures::join!(stalled, waiting, reading);
        assert!(stalled.is_err(), "the connection goes on");
        assert!(waited.is_err(), "the silent one still waits");
        assert_eq!((removed.strong_count(), there.strong_count()), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_watched_where_nothing_leaves() {
        let write_stalls = WriteStallWatch::new();
        let metrics = Arc::new(ServerMetrics::new().unwrap());
        let whole = write_stalls.watching(Body::from("whole"), true, metrics, Arc::default());
        drop(draining(&write_stalls, true));
        let _ = timeout(LIMIT * 3, write_stalls.stalled(LIMIT)).await;
        assert!(write_stalls.bodies().is_empty());
        assert_eq!(whole.collect().await.unwrap().to_bytes(), "whole");
    }
}
