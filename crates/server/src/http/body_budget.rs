//! The byte budget: memory for everything that is read from clients (HTTP bodies, gRPC, LMTP and WebSocket messages,
//! and what compressed ones unpack to) (D-47).
//!
//! Bytes are charged when they have arrived, not when a length was declared, and refunded when the reader has done with
//! them. Who finds no room waits; who has waited for too long is refused, which refunds what it held. So requests that hold
//! some and wait for more can wait for each other, but not for longer than that. Large bodies that trickle in, or many small
//! ones of few callers, do not hold up everybody else: a quarter of all room is for callers who hold little, and a quarter of
//! each caller's for requests that do.
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

/// How much may be read at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes of all callers together.
    pub total: usize,
    /// Bytes of one caller: a key, or an address where there is none.
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
    /// The largest that one request can be.
    const fn most(&self) -> usize {
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

/// So much may be held of `most`, where a quarter of it is for those who hold little.
const fn room(most: usize, holds_little: bool) -> usize {
    if holds_little { most } else { most - most / 4 }
}

/// What is read, of everybody.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    config: Config,
    state: Mutex<BudgetState>,
    /// Something was refunded.
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

/// No room came in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetFull;

impl BodyBudget {
    /// An empty budget; `in_use` shows how much is charged, and `refused` counts requests that were refused for want of room.
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

    /// Charges so many bytes more to `caller`, if there is room for a request that holds `whole` then.
    fn charge(&self, caller: &CallerIdentity, bytes: usize, whole: usize) -> bool {
        let mut state = self.lock();
        let theirs = state.callers.get(caller).copied().unwrap_or_default();
        let Config { total, each, .. } = self.config;
        let fits = |used: usize, most| used.checked_add(bytes).is_some_and(|sum| sum <= most);
        // Many small requests of one caller are not little; nor is more than is left where there are others, so that each of
        // many callers leaves half of what it found.
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
        // Whoever is woken charges at once, and would wait for this lock.
        drop(state);
        self.refunded.notify_waiters();
    }

    fn show(&self, state: &BudgetState) {
        self.in_use
            .set(i64::try_from(state.used).unwrap_or(i64::MAX));
    }

    /// Charges so many bytes as soon as there is room; `false` if that takes too long.
    async fn charge_later(
        self: Arc<Self>,
        caller: CallerIdentity,
        bytes: usize,
        whole: usize,
    ) -> bool {
        let charging = async {
            loop {
                let mut refunded = pin!(self.refunded.notified());
                // Before the look: a refund between that and the waiting would be missed.
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
    /// For how much more, and until when.
    waiting: Option<(usize, PendingCharge)>,
}

impl Reservation {
    /// Holds `bytes` in all: waits for room if that is more than now, and refunds the rest if it is less. The first
    /// [`FREE`] bytes are not charged.
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
        // Would never fit: refused at once, instead of waiting for room that cannot come.
        if bytes > self.budget.config.most() {
            return Poll::Ready(Err(self.overrun()));
        }
        if self
            .waiting
            .as_ref()
            .is_some_and(|(wanted, _)| *wanted != more)
        {
            self.waiting = None;
        }
        // Only where nothing waits: with a waiter of its own this would charge twice, once here and once when the waiter is
        // polled.
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
        self.waiting = None;
        if bytes < self.charged {
            self.budget.refund(&self.caller, self.charged - bytes);
            self.charged = bytes;
        }
    }

    /// Whether nothing is charged.
    pub(crate) const fn is_empty(&self) -> bool {
        self.charged == 0
    }

    fn overrun(&mut self) -> BudgetFull {
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

/// What a request is answered that found no room.
pub(crate) fn overloaded() -> Rejection {
    let message =
        "The server is reading as much as it may: send this again later, or send less at a time.";
    Rejection::new(Code::Overloaded, ErrorReason::SERVER_OVERLOADED, message)
}

/// Small bodies are not charged: the limits of connections and streams bound them.
pub(crate) const FREE: usize = 4 << 10;
/// What an ordinary request holds at most.
const LITTLE: usize = 1 << 20;
/// Who holds no more than such a part of all that may be held holds little.
const LITTLE_PART: usize = 16;

#[cfg(test)]
mod tests;
