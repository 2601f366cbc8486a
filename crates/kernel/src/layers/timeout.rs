//! Timeouts for the first item, between items, and in total.
//!
//! Needs a tokio runtime.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt};
use tokio::time::{Sleep, sleep_until};

use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::layer::{Layer, Next};
use crate::{Chunks, Result};

/// Fails with `Deadline` if no chunk comes within `first`, none within `idle` of the last, or the end not within
/// `total`. Time during which the consumer does not poll does not count for `first` and `idle`.
#[must_use]
pub const fn timeout(first: Duration, idle: Duration, total: Duration) -> Timeout {
    Timeout { first, idle, total }
}

/// The layer of [`timeout`].
#[derive(Clone, Copy, Debug)]
pub struct Timeout {
    first: Duration,
    idle: Duration,
    total: Duration,
}

impl Layer for Timeout {
    fn call(&self, mut call: Call, next: Next) -> Chunks {
        let total = Instant::now().checked_add(self.total);
        // The inner function gets the deadline too, and may pass it to a peer.
        call.deadline = call.deadline.into_iter().chain(total).min();
        TimedStream {
            chunks: Some(next.call(call)),
            limits: *self,
            total,
            seen: false,
            timer: None,
        }
        .boxed()
    }
}

struct TimedStream {
    chunks: Option<Chunks>,
    limits: Timeout,
    total: Option<Instant>,
    seen: bool,
    /// Set while the source is pending and the consumer waits.
    timer: Option<Pin<Box<Sleep>>>,
}

impl TimedStream {
    fn fail(&mut self) -> Poll<Option<Result<Chunk>>> {
        self.chunks = None;
        self.timer = None;
        Poll::Ready(Some(Err(Error::Deadline)))
    }

    /// The instant at which the current wait times out.
    fn due(&self) -> Option<Instant> {
        let wait = if self.seen {
            self.limits.idle
        } else {
            self.limits.first
        };
        let own = Instant::now().checked_add(wait);
        own.into_iter().chain(self.total).min()
    }
}

impl Stream for TimedStream {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(chunks) = &mut this.chunks else {
            return Poll::Ready(None);
        };
        match chunks.as_mut().poll_next(cx) {
            Poll::Ready(item) => {
                this.seen = true;
                this.timer = None;
                // A source that is always ready never reaches the timer below.
                let late = this.total.is_some_and(|total| Instant::now() > total);
                // An end is an end, also a late one.
                if late && item.is_some() {
                    return this.fail();
                }
                return Poll::Ready(item);
            }
            Poll::Pending => {}
        }
        // Set when the source is first pending, so time in which the consumer does not poll is not counted.
        if this.timer.is_none() {
            let Some(due) = this.due() else {
                return Poll::Pending;
            };
            this.timer = Some(Box::pin(sleep_until(due)));
        }
        let over = |timer: &mut Pin<Box<Sleep>>| timer.as_mut().poll(cx).is_ready();
        if this.timer.as_mut().is_some_and(over) {
            return this.fail();
        }
        Poll::Pending
    }
}
