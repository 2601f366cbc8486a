//! Write-stall timeout: resets a response whose client has stopped reading (TR-609).
//!
//! ```text
//!   hyper takes a piece ─► it polls for the next one: not stalled (the send buffer has room)
//!                       └► it has not polled for `limit`: the body is dropped, and with it the work behind it
//! ```
//!
//! HTTP/1 sends one response at a time, so its connection is reset. On HTTP/2 the other streams go on; the stalled one is reset
//! when its client reads again.

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

/// The responses that are being sent over one connection; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct WriteStallWatch(Arc<StallWatchShared>);

#[derive(Debug)]
struct StallWatchShared {
    opened: Instant,
    bodies: Mutex<Vec<Weak<WatchedBody>>>,
    more: Notify,
    reset: AtomicBool,
}

/// One body that is being sent.
#[derive(Debug)]
struct WatchedBody {
    body: Mutex<Option<SentBody>>,
    /// Milliseconds from the connection's opening to the last piece that hyper took, or to the body's beginning, if it has
    /// not polled since; else [`MOVING`].
    since: AtomicU64,
    /// Nothing else is sent over the connection meanwhile.
    alone: bool,
    metrics: Arc<ServerMetrics>,
    let_go: Arc<AtomicBool>,
}

/// What is left of a body.
#[derive(Debug)]
struct SentBody {
    body: Body,
    /// What is left of a long piece of a complete body; empty for others.
    rest: Bytes,
    /// It was complete when it began, and is sent in pieces of [`PIECE_BYTES`].
    complete: bool,
}

/// The client is not behind: it has read everything, or the face has nothing to send.
const MOVING: u64 = u64::MAX;

/// Bytes that hyper takes at once of a complete body. A shorter body is not watched: what a connection can hold of those is
/// small.
const PIECE_BYTES: usize = 16 << 10;

/// The result of one check of all bodies.
enum WatchResult {
    /// No body is being sent.
    Nothing,
    /// No body can stall before then.
    Again(Instant),
    /// The body that was dropped was the only one of the connection.
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

    /// Wraps a body so that a stall is noticed. `alone`: the connection sends one response at a time. `let_go` is set before
    /// the work behind the body is dropped.
    pub(crate) fn watching(
        &self,
        body: Body,
        alone: bool,
        metrics: Arc<ServerMetrics>,
        let_go: Arc<AtomicBool>,
    ) -> Body {
        let length = body.size_hint().exact();
        if body.is_end_stream() || length.is_some_and(|length| length <= PIECE_BYTES as u64) {
            // No work waits behind it, and it takes little memory.
            return body;
        }
        let sent = SentBody {
            body,
            rest: Bytes::new(),
            complete: length.is_some(),
        };
        let leaf = Arc::new(WatchedBody {
            body: Mutex::new(Some(sent)),
            // On HTTP/2 hyper does not even poll for the first piece before the client's window has room for it.
            since: AtomicU64::new(since(self.0.opened)),
            alone,
            metrics,
            let_go,
        });
        self.watch(Arc::downgrade(&leaf));
        self.0.more.notify_one();
        Body::new(UnreadBody {
            leaf,
            opened: self.0.opened,
        })
    }

    fn watch(&self, leaf: Weak<WatchedBody>) {
        let mut bodies = self.bodies();
        // `look` removes those that have ended, but only once in a limit, and a client may begin very many in that time.
        if bodies.len() == bodies.capacity() {
            bodies.retain(|leaf| leaf.strong_count() > 0);
            // As much again, so that not every body that follows is the reason for such a walk.
            let live = bodies.len();
            bodies.reserve(live + 1);
        }
        bodies.push(leaf);
    }

    /// Resolves when the connection has to be reset, because its client has read nothing for `limit`.
    pub(crate) async fn stalled(&self, limit: Duration) {
        loop {
            match self.look(limit) {
                WatchResult::Over => return,
                // A body that begins during this sleep cannot stall before it ends.
                WatchResult::Again(at) => sleep_until(at).await,
                WatchResult::Nothing => self.0.more.notified().await,
            }
        }
    }

    /// Makes all further writes of the socket fail.
    pub(crate) fn reset(&self) {
        self.0.reset.store(true, Ordering::Relaxed);
    }

    /// Whether writes of the socket fail.
    pub(crate) fn is_reset(&self) -> bool {
        self.0.reset.load(Ordering::Relaxed)
    }

    fn look(&self, limit: Duration) -> WatchResult {
        let now = Instant::now();
        let mut first = now + limit;
        let mut bodies = self.bodies();
        // Weak references, so that a body that hyper has dropped disappears without unregistering itself.
        bodies.retain(|leaf| leaf.strong_count() > 0);
        for leaf in bodies.iter().filter_map(Weak::upgrade) {
            // Relaxed: a value that is a moment old only delays or repeats the check.
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
    fn body(&self) -> MutexGuard<'_, Option<SentBody>> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the body and so ends the work behind it. Returns whether it was still there.
    fn let_go(&self) -> bool {
        // Taken out under the lock and dropped at the end of this function, after the flag is set: the work that ends with the
        // body reads the flag, and counts itself as cancelled by the client without it.
        let body = self.body().take();
        if body.is_some() {
            self.let_go.store(true, Ordering::Relaxed);
            self.metrics.cancelled.with_label_values(&["stall"]).inc();
        }
        body.is_some()
    }
}

impl SentBody {
    fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            let polled = Pin::new(&mut self.body).poll_frame(cx);
            if !self.complete {
                return polled;
            }
            match polled {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                polled => return polled,
            }
        }
        let piece = self.rest.split_to(self.rest.len().min(PIECE_BYTES));
        // A copy: hyper may hold the last piece for long, and a part of the whole would hold all of it.
        let piece = Bytes::copy_from_slice(&piece);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.len() as u64;
        let behind = self.body.size_hint();
        let mut hint = SizeHint::default();
        hint.set_lower(behind.lower() + rest);
        if let Some(upper) = behind.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

/// Milliseconds since the connection was opened.
fn since(opened: Instant) -> u64 {
    u64::try_from(opened.elapsed().as_millis()).unwrap_or(0)
}

/// A body whose client has to keep reading.
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
        // Held during the poll, which must not wait; `let_go` from the connection's task waits for it.
        let mut retained = self.leaf.body();
        let Some(body) = retained.as_mut() else {
            return Poll::Ready(Some(Err(axum::Error::new(
                "the client does not read this response",
            ))));
        };
        let polled = body.poll_piece(cx);
        // A piece starts the clock and the next poll stops it: hyper polls again as soon as it has room. While the face has
        // nothing (`Pending`) the clock stands still, because the client has then read all that there is.
        let since = match &polled {
            Poll::Ready(Some(Ok(_))) => since(self.opened),
            _ => MOVING,
        };
        self.leaf.since.store(since, Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.leaf
            .body()
            .as_ref()
            .is_some_and(SentBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let retained = self.leaf.body();
        retained
            .as_ref()
            .map_or_else(SizeHint::default, SentBody::size_hint)
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
    async fn tr_609_a_body_may_stall_up_to_its_limit() {
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
    async fn tr_609_only_the_stalled_body_of_a_connection_is_dropped() {
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
        // A body that has nothing to send is not stalled.
        let waiting = timeout(LIMIT * 2, silent.frame());
        let stalled = timeout(LIMIT * 2, write_stalls.stalled(LIMIT));
        let (stalled, waited, ()) = futures::join!(stalled, waiting, reading);
        assert!(stalled.is_err(), "the connection goes on");
        assert!(waited.is_err(), "the silent one still waits");
        assert_eq!((removed.strong_count(), there.strong_count()), (0, 1));
    }

    /// A connection may send many answers before it is looked at again.
    #[tokio::test(start_paused = true)]
    async fn bodies_that_have_ended_do_not_pile_up() {
        let write_stalls = WriteStallWatch::new();
        let mut live: Vec<_> = (0..5).map(|_| draining(&write_stalls, true)).collect();
        for _ in 0..1_000 {
            drop(draining(&write_stalls, true));
            assert!(write_stalls.bodies().capacity() <= 32);
        }
        assert!(live.iter().all(|(_, there)| there.strong_count() == 1));
        live.clear();
    }

    /// Otherwise one poll would take a whole list, and no other would show that its client does not read it.
    #[tokio::test(start_paused = true)]
    async fn tr_609_a_long_complete_body_is_sent_in_pieces_and_may_stall_too() {
        let write_stalls = WriteStallWatch::new();
        let whole: Bytes = (0..40_000_u32).map(|at| (at % 251) as u8).collect();
        let metrics = Arc::new(ServerMetrics::new().unwrap());
        let watched = |body: Bytes| {
            let metrics = Arc::clone(&metrics);
            write_stalls.watching(Body::from(body), false, metrics, Arc::default())
        };
        let mut body = watched(whole.clone());
        assert_eq!(body.size_hint().exact(), Some(40_000));
        let mut pieces = Vec::new();
        while let Some(piece) = body.frame().await {
            pieces.push(piece.unwrap().into_data().unwrap());
            let sent: usize = pieces.iter().map(Bytes::len).sum();
            assert_eq!(body.size_hint().exact(), Some(40_000 - sent as u64));
            assert_eq!(body.is_end_stream(), sent == 40_000);
        }
        assert_eq!(pieces.iter().map(Bytes::len).max(), Some(PIECE_BYTES));
        assert_eq!(pieces.concat(), whole);
        // One that hyper never polls, because the client's window is closed.
        let mut unread = watched(whole);
        let _ = timeout(LIMIT * 2, write_stalls.stalled(LIMIT)).await;
        assert!(unread.frame().await.unwrap().is_err(), "it was dropped");
        assert_eq!(metrics.cancelled.with_label_values(&["stall"]).get(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn short_complete_and_dropped_bodies_are_not_watched() {
        let write_stalls = WriteStallWatch::new();
        let metrics = Arc::new(ServerMetrics::new().unwrap());
        let whole = write_stalls.watching(Body::from("whole"), true, metrics, Arc::default());
        drop(draining(&write_stalls, true));
        let _ = timeout(LIMIT * 3, write_stalls.stalled(LIMIT)).await;
        assert!(write_stalls.bodies().is_empty());
        assert_eq!(whole.collect().await.unwrap().to_bytes(), "whole");
    }
}
