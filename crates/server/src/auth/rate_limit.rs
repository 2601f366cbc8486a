//! The limits of one key: its models, and its requests and tokens per minute (OA-905, OA-906).
//!
//! ```text
//!   call of a model ─► model allowed? running? a request left? ─► prompt charged when known ─► output as it is made
//!                                                                  what an upstream reports is charged at its end
//! ```

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use sapwood_kernel::{Chunk, Error, Name, Result, RunUsage, TokenCharge};
use sapwood_proto::error_reason::ErrorReason;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// What a key may use. `None` is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// The models it may call.
    pub models: Option<Arc<HashSet<Name>>>,
    /// Calls of models that run at the same time.
    pub requests_running: Option<u32>,
    /// Calls of models that may begin per minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and of outputs per minute.
    pub tokens_per_minute: Option<u32>,
}

/// A key's limits and what is left of them.
#[derive(Debug)]
pub struct TokenMeter {
    limits: RwLock<Arc<RateLimits>>,
    /// Separates the cached prefixes of this key from those of others in the engines. By its name, so that prefixes which an
    /// engine has saved in a file belong to the same key when the server starts again.
    prefix_scope: u64,
    state: Mutex<LimiterState>,
}

#[derive(Debug)]
struct LimiterState {
    running: u32,
    requests: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
}

/// The scope of the cached prefixes of a key or a certificate; never 0, which is that of all callers without either.
fn prefix_scope(owner: &[u8]) -> u64 {
    let digest = Sha256::digest(owner);
    let (first, _) = digest.split_first_chunk().unwrap_or((&[1; 8], &[]));
    u64::from_le_bytes(*first).max(1)
}

impl TokenMeter {
    /// All of `limits`, unused, of the key of this name.
    #[must_use]
    pub fn new(key: &str, limits: RateLimits) -> Self {
        Self::with_scope(prefix_scope(key.as_bytes()), limits)
    }

    /// The meter of the certificate with this subject, which no key names: without limits, but its callers do not share cached
    /// prefixes with others.
    pub(super) fn of_certificate(subject: &str) -> Self {
        // The first byte is in no key's name, which is text: a certificate never has the scope of a key.
        let owner = [&b"\xffcertificate:"[..], subject.as_bytes()].concat();
        Self::with_scope(prefix_scope(&owner), RateLimits::default())
    }

    fn with_scope(prefix_scope: u64, limits: RateLimits) -> Self {
        let bucket = |per_minute: Option<u32>| per_minute.map(TokenBucket::new);
        let state = LimiterState {
            running: 0,
            requests: bucket(limits.requests_per_minute),
            tokens: bucket(limits.tokens_per_minute),
        };
        Self {
            limits: RwLock::new(Arc::new(limits)),
            prefix_scope,
            state: Mutex::new(state),
        }
    }

    /// What may be used now.
    #[must_use]
    pub fn limits(&self) -> Arc<RateLimits> {
        Arc::clone(&self.limits.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the limits, for open calls too. A bucket whose limit stays keeps its level; one whose limit changes gets no
    /// more than was left.
    pub(crate) fn renew(&self, limits: &RateLimits) {
        let mut state = self.lock();
        let LimiterState {
            requests, tokens, ..
        } = &mut *state;
        for (bucket, per_minute) in [
            (requests, limits.requests_per_minute),
            (tokens, limits.tokens_per_minute),
        ] {
            // What is left now stays the upper bound: a change of the limits must not be a way to a full bucket.
            let left = bucket.as_ref().map(|bucket| bucket.level);
            if bucket.as_ref().map(|bucket| bucket.size) != per_minute {
                *bucket = per_minute.map(TokenBucket::new);
            }
            if let (Some(bucket), Some(left)) = (bucket, left) {
                bucket.level = bucket.level.min(left);
            }
        }
        // Stored while the buckets are locked, so that two reloads cannot leave the limits of one with the buckets of the
        // other.
        let limits = Arc::new(limits.clone());
        *self.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// Adds the rate-limit headers that OpenAI's clients read; none for what is not limited.
    pub(crate) fn add_headers(&self, headers: &mut HeaderMap) {
        let mut state = self.lock();
        let now = Instant::now();
        let LimiterState {
            requests, tokens, ..
        } = &mut *state;
        for (names, bucket) in [(&REQUESTS, requests), (&TOKENS, tokens)] {
            let Some(bucket) = bucket else { continue };
            // A bucket is only brought up to date when it is looked at.
            bucket.refill(now);
            let values = [
                bucket.size.to_string(),
                bucket.whole().to_string(),
                spell(bucket.until(bucket.size)),
            ];
            for (name, value) in names.iter().zip(values) {
                if let Ok(value) = HeaderValue::try_from(value) {
                    headers.insert(name, value);
                }
            }
        }
    }

    /// Begins a call of a model, which ends when the returned value is dropped.
    pub(super) fn begin(self: &Arc<Self>, model: &Name) -> Result<ChargedRun> {
        let limits = self.limits();
        if let Some(models) = &limits.models
            && !models.contains(model)
        {
            return Err(Error::Engine {
                code: sapwood_proto::code::Code::PermissionDenied,
                reason: ErrorReason::INSUFFICIENT_SCOPE,
                message: format!("this key may not call the model {model:?}"),
                retry_after: None,
            });
        }
        // One lock over all checks, and nothing is taken before the last of them has passed: a call that is refused has
        // used up nothing.
        let mut state = self.lock();
        if let Some(most) = limits.requests_running
            && state.running >= most
        {
            return Err(Error::RateLimited {
                why: format!(
                    "this key may have {most} requests running at once: wait for one to end"
                ),
                // Nobody knows when one of them ends: the shortest wait that clients accept.
                retry_after: Some(Duration::from_secs(1)),
            });
        }
        // The prompt's length is not known yet; with no token left, none can be admitted. Not taken: `prompt` charges it all.
        if let Some(tokens) = &mut state.tokens {
            tokens.expect(1, "tokens")?;
        }
        // Last, because it is the only check that takes something.
        if let Some(requests) = &mut state.requests {
            requests.take(1, "requests")?;
        }
        state.running += 1;
        Ok(ChargedRun {
            allowance: Arc::clone(self),
            charged: AtomicU64::new(0),
            charges_itself: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refills evenly, up to one minute's allowance; may be overdrawn by output, whose length is not known before.
#[derive(Debug)]
struct TokenBucket {
    size: u32,
    /// At most `size`; negative while overdrawn.
    level: f64,
    filled: Instant,
}

impl TokenBucket {
    fn new(size: u32) -> Self {
        Self {
            size,
            level: f64::from(size),
            filled: Instant::now(),
        }
    }

    fn refill(&mut self, now: Instant) {
        let minutes = now.saturating_duration_since(self.filled).as_secs_f64() / 60.0;
        self.level = (self.level + minutes * f64::from(self.size)).min(f64::from(self.size));
        self.filled = now;
    }

    /// How long until there is `amount`.
    fn until(&self, amount: u32) -> Duration {
        let missing = (f64::from(amount) - self.level).max(0.0);
        // A limit of 0 is allowed and locks a key; dividing by it would make a duration that panics.
        Duration::from_secs_f64(missing * 60.0 / f64::from(self.size.max(1)))
    }

    /// What is left, in whole.
    fn whole(&self) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and a u32"
        )]
        let whole = self.level.max(0.0) as u32;
        whole
    }

    fn take(&mut self, amount: u32, what: &str) -> Result<()> {
        self.expect(amount, what)?;
        self.level -= f64::from(amount);
        Ok(())
    }

    /// Fails unless there is `amount`.
    fn expect(&mut self, amount: u32, what: &str) -> Result<()> {
        self.refill(Instant::now());
        let size = self.size;
        if amount > size {
            return Err(Error::RateLimited {
                why: format!("this needs {amount} {what}, and this key may use {size} per minute"),
                // No wait helps: the bucket never holds so many.
                retry_after: None,
            });
        }
        if self.level < f64::from(amount) {
            let wait = self.until(amount);
            return Err(Error::RateLimited {
                why: format!(
                    "this key may use {size} {what} per minute, and {} are left: retry in {}",
                    self.whole(),
                    spell(wait)
                ),
                retry_after: Some(wait),
            });
        }
        Ok(())
    }

    fn overdraw(&mut self, amount: u32) {
        self.refill(Instant::now());
        // May go below zero. Output is known only after it was generated, so it cannot be refused any more: the key pays for
        // it by a longer wait before its next call.
        self.level -= f64::from(amount);
    }
}

/// A call of a model that is charged to a token meter.
#[derive(Debug)]
pub(crate) struct ChargedRun {
    allowance: Arc<TokenMeter>,
    /// Tokens charged so far.
    charged: AtomicU64,
    /// The model charges its tokens itself, as local ones do; a remote one reports its usage at the end.
    charges_itself: AtomicBool,
}

impl ChargedRun {
    /// Charges one token for a chunk of a remote model, so that a call that is cut short has paid for something.
    pub(super) fn guess(&self, chunk: &Chunk) {
        // A local model charges its prompt before its first chunk, so the flag is set by then.
        if !self.charges_itself.load(Ordering::Relaxed) && !chunk.data.is_empty() {
            self.output(1);
        }
    }

    /// Refunds the request of a call that was not served.
    pub(super) fn excuse(&self) {
        if let Some(requests) = &mut self.allowance.lock().requests {
            // May lift it above the bucket's size; the next refill, which comes before every reading, cuts that off.
            requests.level += 1.0;
        }
    }

    /// Charges what a remote model reports as used, beyond what was charged while it ran.
    pub(super) fn settle(&self, usage: RunUsage) {
        // Saturating, because the numbers come from another server.
        let used = usage.prompt_tokens.saturating_add(usage.completion_tokens);
        // Only what exceeds the guesses. Where they were too high nothing is refunded: a model that reports less than it
        // has sent would otherwise be free.
        let owed = used.saturating_sub(self.charged.load(Ordering::Relaxed));
        self.output(u32::try_from(owed).unwrap_or(u32::MAX));
    }
}

impl TokenCharge for ChargedRun {
    fn prefix_scope(&self) -> u64 {
        self.allowance.prefix_scope
    }

    fn prompt(&self, tokens: u32) -> Result<()> {
        self.charges_itself.store(true, Ordering::Relaxed);
        if let Some(bucket) = &mut self.allowance.lock().tokens {
            bucket.take(tokens, "tokens")?;
        }
        self.charged.fetch_add(u64::from(tokens), Ordering::Relaxed);
        Ok(())
    }

    fn output(&self, tokens: u32) {
        if tokens == 0 {
            return;
        }
        if let Some(bucket) = &mut self.allowance.lock().tokens {
            bucket.overdraw(tokens);
        }
        self.charged.fetch_add(u64::from(tokens), Ordering::Relaxed);
    }
}

impl Drop for ChargedRun {
    fn drop(&mut self) {
        // Frees only the place among running calls. Requests and tokens stay charged however the call ended: a client that
        // disconnects early must not get them for nothing.
        self.allowance.lock().running -= 1;
    }
}

/// A duration as OpenAI's clients read it: `120ms`, `1.5s`, `6m0s`.
fn spell(wait: Duration) -> String {
    // Seconds are rounded up: a client that waits exactly this long must not be refused again.
    let milliseconds = wait.as_millis();
    if milliseconds < 1000 {
        format!("{milliseconds}ms")
    } else if milliseconds < 60_000 {
        format!("{}s", (milliseconds as f64 / 1000.0 * 10.0).ceil() / 10.0)
    } else {
        let seconds = wait.as_secs_f64().ceil() as u64;
        format!("{}m{}s", seconds / 60, seconds % 60)
    }
}

const REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

#[cfg(test)]
mod tests;
