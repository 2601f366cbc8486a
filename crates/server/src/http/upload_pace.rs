//! The least rate at which a client must send what is charged to the byte budget (D-47).
//!
//! A limit of pauses alone lets a client hold megabytes with one byte now and then, and a key that many share can have all
//! its room filled so. Only the time counts in which the client is waited for.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Bytes that must come within the time for them.
pub(crate) const LEAST_BYTES: usize = 16 << 10;

/// The clock of one body.
pub(crate) struct UploadPace {
    /// The time for [`LEAST_BYTES`].
    within: Duration,
    /// What is left of it.
    left: Duration,
    /// What has come in it.
    brought: usize,
    /// Since when the client is waited for, and until when.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl UploadPace {
    /// [`LEAST_BYTES`] must come `within` each such time of waiting.
    pub(crate) const fn new(within: Duration) -> Self {
        Self {
            within,
            left: within,
            brought: 0,
            waiting: None,
        }
    }

    /// So many bytes came.
    pub(crate) fn came(&mut self, bytes: usize) {
        if let Some((since, _)) = self.waiting.take() {
            self.left = self.left.saturating_sub(since.elapsed());
        }
        self.brought = self.brought.saturating_add(bytes);
        if self.brought >= LEAST_BYTES {
            self.rest();
        }
    }

    /// Nothing is held that others could use: begins anew.
    pub(crate) fn rest(&mut self) {
        *self = Self::new(self.within);
    }

    /// While the client is waited for; ready when that has taken too long.
    pub(crate) fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let left = self.left;
        let begun = || (Instant::now(), Box::pin(sleep(left)));
        let (_, sleep) = self.waiting.get_or_insert_with(begun);
        sleep.as_mut().poll(cx)
    }
}
