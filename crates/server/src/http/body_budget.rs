//! The byte budget: memory for everything that is read from clients (HTTP bodies, gRPC, LMTP and WebSocket messages,
//! and what compressed ones unpack to) (D-47).
//!
//! Bytes are charged when they have arrived, not when a length was declared, and refunded when the reader is done with them. A
//! request that finds no room waits; one that has waited for too long is refused, which refunds what it held. So requests
//! that hold some bytes and wait for more can wait for each other, but not for longer than that. Large bodies that trickle in,
//! or many small ones of few callers, do not block everybody else: a quarter of the whole budget is for callers that hold
//! little, and a quarter of each caller's budget for requests that hold little.
//!
//! ```text
//!   piece arrives ─► fits the server's budget and its caller's? ─ yes ─► charged ─► read ─► refunded
//!                                     └─ no ─► waits for a refund ─ too long ─► overloaded, everything refunded
//! ```

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use prometheus::{IntCounter, IntGauge};
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::auth::identity::CallerIdentity;
use crate::http::rejection::Rejection;

/// Limits of the byte budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes of all callers together.
    pub total: usize,
    /// Bytes of one caller: a key, or an address without one.
    pub each: usize,
    /// How long a piece waits for room.
    pub wait: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            total: 160 << 20,
            each: 112 << 20,
            wait: Duration::from_secs(5),
        }
    }
}

impl Config {
    /// The largest amount that one request can hold.
    const fn most(&self) -> usize {
        // Written out, because `Ord::min` is not `const`.
        let least = if self.each < self.total {
            self.each
        } else {
            self.total
        };
        if least <= LITTLE {
            least
        } else {
            least - least / 4
        }
    }
}

/// The part of `most` that may be used; its last quarter is reserved for holders of little.
const fn room(most: usize, holds_little: bool) -> usize {
    if holds_little { most } else { most - most / 4 }
}

/// The bytes that are held for all callers.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    config: Config,
    state: Mutex<BudgetState>,
    /// Notified at each refund.
    refunded: Notify,
    in_use: IntGauge,
    refused: IntCounter,
}

/// The sum of `callers` is `used`, and none of them is 0.
#[derive(Debug, Default)]
struct BudgetState {
    used: usize,
    callers: HashMap<CallerIdentity, usize>,
}

/// No room became free in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetFull;

impl BodyBudget {
    /// An empty budget; `in_use` shows how much is charged, and `refused` counts requests that found no room.
    pub(crate) fn new(config: Config, in_use: IntGauge, refused: IntCounter) -> Self {
        Self {
            config,
            state: Mutex::default(),
            refunded: Notify::new(),
            in_use,
            refused,
        }
    }

    /// A reservation of nothing yet.
    pub(crate) fn reserve(self: &Arc<Self>, caller: CallerIdentity) -> Reservation {
        Reservation {
            budget: Arc::clone(self),
            caller,
            charged: 0,
            waiting: None,
        }
    }

    /// Bytes of one caller.
    pub(crate) const fn each(&self) -> usize {
        self.config.each
    }

    /// Charges `bytes` more to `caller`, if there is room for a request that holds `whole` bytes afterwards.
    fn charge(&self, caller: &CallerIdentity, bytes: usize, whole: usize) -> bool {
        let mut state = self.lock();
        let theirs = state.callers.get(caller).copied().unwrap_or_default();
        let Config { total, each, .. } = self.config;
        let fits = |used: usize, most| used.checked_add(bytes).is_some_and(|sum| sum <= most);
        // Little is judged by all that the caller holds: many small requests of one caller are not little. Where there are
        // others it is also no more than what is left, so that each of many callers leaves half of what it found; otherwise
        // a few of them would fill the reserved quarter.
        let is_alone = theirs == state.used;
        let left = if is_alone { total } else { total - state.used };
        let theirs_is_little = fits(theirs, left.min(LITTLE.max(total / LITTLE_PART)));
        if !fits(state.used, room(total, theirs_is_little))
            || !fits(theirs, room(each, whole <= LITTLE))
        {
            return false;
        }
        state.used += bytes;
        *state.callers.entry(caller.clone()).or_default() += bytes;
        self.show(&state);
        true
    }

    fn refund(&self, caller: &CallerIdentity, bytes: usize) {
        let mut state = self.lock();
        state.used = state.used.saturating_sub(bytes);
        if let Entry::Occupied(mut theirs) = state.callers.entry(caller.clone()) {
            *theirs.get_mut() = theirs.get().saturating_sub(bytes);
            if *theirs.get() == 0 {
                theirs.remove();
            }
        }
        self.show(&state);
        // Unlocked first: a woken task charges at once, and would wait for this lock.
        drop(state);
        // All and not one: the first in line may need more than was refunded, while another one fits.
        self.refunded.notify_waiters();
    }

    fn show(&self, state: &BudgetState) {
        self.in_use
            .set(i64::try_from(state.used).unwrap_or(i64::MAX));
    }

    /// Charges `bytes` as soon as there is room; `false` if that takes too long.
    async fn charge_later(
        self: Arc<Self>,
        caller: CallerIdentity,
        bytes: usize,
        whole: usize,
    ) -> bool {
        let charging = async {
            loop {
                let mut refunded = pin!(self.refunded.notified());
                // Registered before the attempt: a refund between the attempt and the wait would be missed.
                refunded.as_mut().enable();
                if self.charge(&caller, bytes, whole) {
                    return;
                }
                refunded.await;
            }
        };
        timeout(self.config.wait, charging).await.is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, BudgetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type PendingCharge = Pin<Box<dyn Future<Output = bool> + Send + Sync>>;

/// Bytes of one body or message; dropping it refunds them.
pub(crate) struct Reservation {
    budget: Arc<BodyBudget>,
    caller: CallerIdentity,
    charged: usize,
    /// The additional bytes that are waited for, and the wait.
    waiting: Option<(usize, PendingCharge)>,
}

impl Reservation {
    /// Holds `bytes` in all: waits for room to grow, and refunds when it shrinks. Up to [`FREE`] bytes are not charged.
    ///
    /// # Errors
    /// [`BudgetFull`]; everything that was held is refunded then.
    pub(crate) fn poll_hold(
        &mut self,
        bytes: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), BudgetFull>> {
        let bytes = if bytes <= FREE { 0 } else { bytes };
        let Some(more) = bytes.checked_sub(self.charged).filter(|more| *more > 0) else {
            self.shrink(bytes);
            return Poll::Ready(Ok(()));
        };
        // Never fits: refused at once instead of waiting for room that cannot become free.
        if bytes > self.budget.config.most() {
            return Poll::Ready(Err(self.overrun()));
        }
        // A wait for another amount is dropped. It has charged nothing: `charge_later` charges in the poll that resolves it.
        if self
            .waiting
            .as_ref()
            .is_some_and(|(wanted, _)| *wanted != more)
        {
            self.waiting = None;
        }
        // Only without a wait in progress: otherwise this would charge once here and again when the wait is polled.
        if self.waiting.is_none() && self.budget.charge(&self.caller, more, bytes) {
            self.charged = bytes;
            return Poll::Ready(Ok(()));
        }
        let (_, waiting) = self.waiting.get_or_insert_with(|| {
            let budget = Arc::clone(&self.budget);
            (
                more,
                Box::pin(budget.charge_later(self.caller.clone(), more, bytes)),
            )
        });
        let charged = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        if !charged {
            return Poll::Ready(Err(self.overrun()));
        }
        self.charged = bytes;
        Poll::Ready(Ok(()))
    }

    /// As [`Self::poll_hold`].
    pub(crate) async fn hold(&mut self, bytes: usize) -> Result<(), BudgetFull> {
        std::future::poll_fn(|cx| self.poll_hold(bytes, cx)).await
    }

    /// Holds no more than `bytes`.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        // What was waited for is not wanted any more, and the next `poll_hold` must not find a wait for an old amount.
        self.waiting = None;
        if bytes < self.charged {
            self.budget.refund(&self.caller, self.charged - bytes);
            self.charged = bytes;
        }
    }

    /// What is charged.
    pub(crate) const fn bytes(&self) -> usize {
        self.charged
    }

    /// Whether nothing is charged.
    pub(crate) const fn is_empty(&self) -> bool {
        self.charged == 0
    }

    fn overrun(&mut self) -> BudgetFull {
        // Everything and not only what was asked for: requests that wait for each other go on when one of them gives up.
        self.shrink(0);
        self.budget.refused.inc();
        BudgetFull
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

/// The answer to a request that found no room.
pub(crate) fn overloaded() -> Rejection {
    let message =
        "The server's memory for request bodies is in use: retry later, or send less at a time.";
    Rejection::new(Code::Overloaded, ErrorReason::SERVER_OVERLOADED, message)
}

/// Small bodies are not charged: the limits of connections and streams bound them.
pub(crate) const FREE: usize = 4 << 10;
/// The maximum that an ordinary request holds.
const LITTLE: usize = 1 << 20;
/// A caller that holds no more than this part of the whole budget holds little.
const LITTLE_PART: usize = 16;

#[cfg(test)]
mod tests;
