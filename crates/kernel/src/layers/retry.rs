//! Retries a call as long as nothing of it has been delivered.
//!
//! Inputs can be read again because they are nodes.
//!
//! ```text
//!   calling ── first chunk ──► through, to the end, whatever it is
//!      ▲  └── retryable error, attempts left ──► waiting (backoff, or `retry_after`) ───────┐
//!      └──────────────────────────────────────────────────────────────────────────────────┘
//! ```

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::{Stream, StreamExt};
use tokio::time::{Sleep, sleep};

use crate::call::Call;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::layer::{Layer, Next};
use crate::spec::Effect;
use crate::{Chunks, Result};

const FIRST_DELAY: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(10);
/// The longest `retry_after` that is waited for.
const ASKED_MAX: Duration = Duration::from_secs(60);

/// Calls again, up to `times`, after a retryable error and only while no chunk was delivered. Functions with effects
/// are not retried unless [`RetryLayer::force`]d; models have none. Needs a tokio runtime once it has to wait.
#[must_use]
pub const fn retry(times: u32) -> RetryLayer {
    RetryLayer {
        times,
        forced: false,
    }
}

/// The layer of [`retry`].
#[derive(Clone, Copy, Debug)]
pub struct RetryLayer {
    times: u32,
    forced: bool,
}

impl RetryLayer {
    /// Retries functions with effects too.
    #[must_use]
    pub const fn force(mut self) -> Self {
        self.forced = true;
        self
    }
}

impl Layer for RetryLayer {
    fn call(&self, call: Call, next: Next) -> Chunks {
        let spec = next.spec();
        // Without a wrapper: a call that is never repeated costs nothing here.
        if self.times == 0 || !(self.forced || spec.model || spec.effect != Effect::Effect) {
            return next.call(call);
        }
        RetryStream {
            chunks: Some(next.call(call.clone())),
            waiting: None,
            again: Some((call, next)),
            made: 0,
            times: self.times,
        }
        .boxed()
    }
}

struct RetryStream {
    chunks: Option<Chunks>,
    waiting: Option<Pin<Box<Sleep>>>,
    /// The call to repeat; `None` once a chunk was delivered.
    again: Option<(Call, Next)>,
    made: u32,
    times: u32,
}

impl RetryStream {
    /// Handles an error: `None` to wait and call again, else the error to deliver.
    fn judge(&mut self, error: Error) -> Option<Error> {
        let Some((call, _)) = &self.again else {
            return Some(error);
        };
        // Creating the timer would panic without a runtime; the error is then simply delivered (D-16).
        let can_wait = tokio::runtime::Handle::try_current().is_ok();
        if self.made == self.times || !error.retryable() || !can_wait {
            return Some(error);
        }
        let delay = match error.retry_after() {
            // Who says to come back after an hour is not asked again within this call, which may have no deadline.
            Some(asked) if asked > ASKED_MAX => return Some(error),
            Some(asked) => asked,
            None => delay(call.id.get(), self.made),
        };
        self.made += 1;
        // The failed attempt is dropped before the wait: it may hold a slot or a connection.
        self.chunks = None;
        self.waiting = Some(Box::pin(sleep(delay)));
        None
    }
}

impl Stream for RetryStream {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(waiting) = &mut this.waiting {
                ready!(waiting.as_mut().poll(cx));
                this.waiting = None;
                this.chunks = this
                    .again
                    .as_ref()
                    .map(|(call, next)| next.call(call.clone()));
            }
            let Some(chunks) = &mut this.chunks else {
                return Poll::Ready(None);
            };
            match ready!(chunks.as_mut().poll_next(cx)) {
                Some(Ok(chunk)) => {
                    // From here on a repetition would duplicate text; the inputs need not be kept for one.
                    this.again = None;
                    return Poll::Ready(Some(Ok(chunk)));
                }
                Some(Err(error)) => {
                    if let Some(error) = this.judge(error) {
                        this.chunks = None;
                        return Poll::Ready(Some(Err(error)));
                    }
                }
                None => {
                    this.chunks = None;
                    return Poll::Ready(None);
                }
            }
        }
    }
}

/// A random delay between half and all of an exponential backoff. The jitter is derived from the call's id: different
/// calls spread, and no source of randomness is needed.
fn delay(id: u64, made: u32) -> Duration {
    let full = FIRST_DELAY.saturating_mul(1 << made.min(16)).min(DELAY_MAX);
    let mixed = (id ^ (u64::from(made) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let share = u32::try_from(mixed % 1000).unwrap_or(0);
    full / 2 + full * share / 2000
}
