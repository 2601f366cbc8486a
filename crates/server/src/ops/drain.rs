//! Graceful shutdown: new work is refused, and running work gets time to end (OA-904, EV-960, D-31).
//!
//! ```text
//!   Serving ──begin──► Grace (5 s) ──► Refusing ──all work done──► Over
//!                                          └──── deadline (30 s) ──► Cutting ──► Over
//! ```
//!
//! Readiness is false from `Grace` on. New work is still taken in `Grace`, because load balancers notice late. From `Refusing`
//! on it is refused, and idle connections close. In `Cutting` every face ends its streams with its own final error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::sync::watch;

use crate::http::rejection::Rejection;

/// How long the phases last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// From the signal until new work is refused.
    pub grace: Duration,
    /// From the end of the grace until running work is cut.
    pub deadline: Duration,
    /// How long faces may take to send their final error after the cut.
    pub last_word: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(5),
            deadline: Duration::from_secs(30),
            last_word: Duration::from_secs(1),
        }
    }
}

/// The phase of the shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DrainPhase {
    /// No shutdown.
    Serving,
    /// Asked to shut down; unready, still taking work.
    Grace,
    /// Taking no new work, finishing what runs.
    Refusing,
    /// The deadline has passed: end everything now.
    Cutting,
    /// The drain has ended.
    Over,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainOutcome {
    /// Pieces of work that had to be cut.
    pub cut: u64,
}

#[derive(Debug)]
struct DrainState {
    phase: watch::Sender<DrainPhase>,
    open: watch::Sender<u64>,
    refused: AtomicU64,
    config: Config,
}

/// A handle on the drain; clones share it.
#[derive(Clone, Debug)]
pub struct Drain(Arc<DrainState>);

impl Drain {
    /// A server that is serving.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self(Arc::new(DrainState {
            phase: watch::Sender::new(DrainPhase::Serving),
            open: watch::Sender::new(0),
            refused: AtomicU64::new(0),
            config,
        }))
    }

    /// The phase now.
    #[must_use]
    pub fn phase(&self) -> DrainPhase {
        *self.0.phase.borrow()
    }

    /// Number of guards that are held now.
    #[must_use]
    pub fn open(&self) -> u64 {
        *self.0.open.borrow()
    }

    /// Number of requests that were refused because of the drain.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// Admits a piece of work (a request, an action, a generation): hold the guard until it is finished.
    ///
    /// # Errors
    /// `unavailable`, reason `draining`, once the grace is over; each face encodes it in its own way.
    pub fn admit(&self) -> Result<DrainGuard, Rejection> {
        // Counted before the phase is read: a drain that has set `Refusing` and sees zero open guards must not miss work that
        // is being admitted at that moment.
        let work = self.hold();
        if self.phase() < DrainPhase::Refusing {
            return Ok(work);
        }
        self.0.refused.fetch_add(1, Ordering::Relaxed);
        let message = "The server is shutting down and takes no new work: try another one.";
        Err(Rejection::new(
            Code::Unavailable,
            ErrorReason::DRAINING,
            message,
        ))
    }

    /// A guard for work that belongs to something already admitted, such as an action of a live session. The caller checks
    /// the phase itself.
    #[must_use]
    pub fn hold(&self) -> DrainGuard {
        self.0.open.send_modify(|open| *open += 1);
        DrainGuard(self.clone())
    }

    /// Resolves once the server is in `phase` or a later one. Cancel safe: it never misses a phase.
    pub async fn reached(&self, phase: DrainPhase) {
        let mut phases = self.0.phase.subscribe();
        // The sender is owned by `self`, so waiting cannot fail.
        let _ = phases.wait_for(|now| *now >= phase).await;
    }

    /// Resolves when running work is cut; never if all of it finishes in time.
    pub async fn cutting(&self) {
        // `==` and not `>=`: after a drain in which all work finished, `Over` must not end streams with a drain error.
        let mut phases = self.0.phase.subscribe();
        let _ = phases.wait_for(|now| *now == DrainPhase::Cutting).await;
    }

    /// Runs the drain to its end, through all phases.
    pub async fn run(&self) -> DrainOutcome {
        self.advance(DrainPhase::Grace);
        tokio::time::sleep(self.0.config.grace).await;
        self.advance(DrainPhase::Refusing);
        let mut open = self.0.open.subscribe();
        // `Refusing` is set, and `admit` counts before it reads the phase: once this is zero, none of its work can begin.
        let finished = open.wait_for(|open| *open == 0);
        let cut = match tokio::time::timeout(self.0.config.deadline, finished).await {
            Ok(_) => 0,
            Err(_) => self.open(),
        };
        if cut > 0 {
            self.advance(DrainPhase::Cutting);
            // Every face sends its final error; work that ignores the cut ends with the process.
            let mut open = self.0.open.subscribe();
            let _ = tokio::time::timeout(self.0.config.last_word, open.wait_for(|open| *open == 0))
                .await;
        }
        // Also if guards are still held: the listener waits for this phase, and work that ignores the cut must not keep the
        // process alive.
        self.advance(DrainPhase::Over);
        DrainOutcome { cut }
    }

    fn advance(&self, to: DrainPhase) {
        self.0.phase.send_if_modified(|phase| {
            // A phase is never reverted: code that has seen `Refusing` relies on it.
            let forward = to > *phase;
            if forward {
                *phase = to;
            }
            forward
        });
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

/// A piece of work that a drain waits for, until it is dropped.
#[derive(Debug)]
pub struct DrainGuard(Drain);

impl Drop for DrainGuard {
    fn drop(&mut self) {
        self.0.0.open.send_modify(|open| *open -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn oa_904_new_work_is_admitted_in_the_grace_and_refused_after_it() {
        let drain = Drain::default();
        let early = drain.admit().unwrap();
        let running = tokio::spawn({
            let drain = drain.clone();
            async move { drain.run().await }
        });
        drain.reached(DrainPhase::Grace).await;
        let lagging = drain.admit().unwrap();
        let began = Instant::now();
        drain.reached(DrainPhase::Refusing).await;
        assert_eq!(began.elapsed(), Duration::from_secs(5));
        assert_eq!(drain.admit().unwrap_err().reason, "draining");
        assert_eq!((drain.refused(), drain.open()), (1, 2));
        let cutting = tokio::spawn({
            let drain = drain.clone();
            async move { drain.cutting().await }
        });
        drop((early, lagging));
        assert_eq!(running.await.unwrap(), DrainOutcome { cut: 0 });
        assert_eq!(drain.phase(), DrainPhase::Over);
        tokio::task::yield_now().await;
        assert!(!cutting.is_finished(), "what has finished is not cut");
        // All work was finished, so the deadline was not waited for.
        assert_eq!(began.elapsed(), Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn oa_904_what_outlives_the_deadline_is_cut_and_counted() {
        let drain = Drain::default();
        let stubborn = drain.admit().unwrap();
        let obedient = drain.admit().unwrap();
        let began = Instant::now();
        let running = tokio::spawn({
            let drain = drain.clone();
            async move { drain.run().await }
        });
        drain.reached(DrainPhase::Cutting).await;
        assert_eq!(began.elapsed(), Duration::from_secs(35));
        drop(obedient);
        assert_eq!(running.await.unwrap(), DrainOutcome { cut: 2 });
        drop(stubborn);
    }
}
