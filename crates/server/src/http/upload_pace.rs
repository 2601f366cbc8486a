//! The minimum rate at which a client must send what is charged to the byte budget (D-47).
//!
//! A limit on pauses alone would let a client hold megabytes by sending one byte now and then, and so fill the budget of a key
//! that many share. Only the time counts in which the server waits for the client.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Bytes that must arrive within each time limit.
pub(crate) const LEAST_BYTES: usize = 16 << 10;

/// The clock of one body.
pub(crate) struct UploadPace {
    /// The time limit for [`LEAST_BYTES`].
    within: Duration,
    /// What is left of it.
    left: Duration,
    /// Bytes that have arrived in it.
    brought: usize,
    /// Since when the server waits for the client, and the timer for what is left.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl UploadPace {
    /// [`LEAST_BYTES`] must arrive in each period of `within`.
    pub(crate) const fn new(within: Duration) -> Self {
        Self {
            within,
            left: within,
            brought: 0,
            waiting: None,
        }
    }

    /// `bytes` have arrived.
    pub(crate) fn came(&mut self, bytes: usize) {
        // The timer goes with each arrival and only its time is kept: while the reader or the budget is busy the body is not
        // polled, and that time must not count against the client.
        if let Some((since, _)) = self.waiting.take() {
            self.left = self.left.saturating_sub(since.elapsed());
        }
        self.brought = self.brought.saturating_add(bytes);
        if self.brought >= LEAST_BYTES {
            self.rest();
        }
    }

    /// Begins a new period: enough has arrived, or nothing is held.
    pub(crate) fn rest(&mut self) {
        *self = Self::new(self.within);
    }

    /// Polled while the server waits for the client; ready when the time is over.
    pub(crate) fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // Only made when a wait begins: most bodies are there at once, and need no timer.
        let left = self.left;
        let begun = || (Instant::now(), Box::pin(sleep(left)));
        let (_, sleep) = self.waiting.get_or_insert_with(begun);
        sleep.as_mut().poll(cx)
    }
}
