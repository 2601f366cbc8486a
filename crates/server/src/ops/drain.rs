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
    /// Requests whose response has not begun.
    requests: watch::Sender<u64>,
    /// Other pieces of work.
    open: watch::Sender<u64>,
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
            requests: watch::Sender::new(0),
            open: watch::Sender::new(0),
            config,
        }))
    }

    /// The phase now.
    #[must_use]
    pub fn phase(&self) -> DrainPhase {
        *self.0.phase.borrow()
    }

    /// Number of pieces of work that are held now.
    #[must_use]
    pub fn open(&self) -> u64 {
        *self.0.open.borrow()
    }

    /// Admits a request: hold the guard until its response begins. What goes on after that has guards of [`Self::hold`].
    ///
    /// # Errors
    /// `unavailable`, reason `draining`, once the grace is over; each face encodes it in its own way.
    pub fn admit(&self) -> Result<DrainGuard, Rejection> {
        // Counted before the phase is read: a drain that has set `Refusing` and sees no requests must not miss one that is
        // being admitted at that moment.
        let request = DrainGuard::count(&self.0.requests);
        if self.phase() < DrainPhase::Refusing {
            return Ok(request);
        }
        let message = "The server is shutting down and takes no new work: try another one.";
        Err(Rejection::new(
            Code::Unavailable,
            ErrorReason::DRAINING,
            message,
        ))
    }

    /// A guard for work that belongs to something already admitted, such as a generation, or an action of a live session. The
    /// caller checks the phase itself.
    #[must_use]
    pub fn hold(&self) -> DrainGuard {
        DrainGuard::count(&self.0.open)
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
        let cut = match tokio::time::timeout(self.0.config.deadline, self.finished()).await {
            Ok(()) => 0,
            // Not the sum: a request whose response has not begun may hold work as well.
            Err(_) => self.open().max(*self.0.requests.borrow()),
        };
        if cut > 0 {
            self.advance(DrainPhase::Cutting);
            // Every face sends its final error; work that ignores the cut ends with the process.
            let _ = tokio::time::timeout(self.0.config.last_word, self.finished()).await;
        }
        // Also if guards are still held: the listener waits for this phase, and work that ignores the cut must not keep the
        // process alive.
        self.advance(DrainPhase::Over);
        DrainOutcome { cut }
    }

    /// Resolves when no guard is held.
    async fn finished(&self) {
        // Requests first, because they begin work. `Refusing` is set, and `admit` counts before it reads the phase: once there
        // are none, none can come.
        for count in [&self.0.requests, &self.0.open] {
            let _ = count.subscribe().wait_for(|open| *open == 0).await;
        }
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

/// Something that a drain waits for, until it is dropped.
#[derive(Debug)]
pub struct DrainGuard(watch::Sender<u64>);

impl DrainGuard {
    fn count(held: &watch::Sender<u64>) -> Self {
        held.send_modify(|held| *held += 1);
        Self(held.clone())
    }
}

impl Drop for DrainGuard {
    fn drop(&mut self) {
        self.0.send_modify(|held| *held -= 1);
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
        let work = drain.hold();
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
        assert_eq!(drain.open(), 1);
        let cutting = tokio::spawn({
            let drain = drain.clone();
            async move { drain.cutting().await }
        });
        drop(work);
        tokio::task::yield_now().await;
        assert_eq!(drain.phase(), DrainPhase::Refusing);
        drop(early);
        // A request that was admitted late begins its work.
        let work = drain.hold();
        drop(lagging);
        tokio::task::yield_now().await;
        assert_eq!(drain.phase(), DrainPhase::Refusing);
        drop(work);
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
        // A request with work of its own counts once.
        let stubborn = (drain.admit().unwrap(), drain.hold());
        let obedient = drain.hold();
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
