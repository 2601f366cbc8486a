//! Whether the server is alive and whether it takes work: one state, read by every kind of probe (OA-901, OA-902).
//!
//! Owns: the list of parts, the engine watchdog, the answers of the probes, and telling whoever follows readiness.
//! Refuses to know: what an engine is; a part is a name and a closure that tells for how long it has been in a step.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sapwood_proto::code::Code;
use tokio::sync::watch;

use crate::drain::{Drain, Phase};
use crate::refusal::Refusal;

/// Tells for how long a part has been in its present step; zero while it is idle. Called from probes: must return at
/// once and take no lock that the part needs.
pub type Probe = Box<dyn Fn() -> Duration + Send + Sync>;

/// The state of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not ready yet.
    Loading,
    /// Ready.
    Ok,
    /// Without a step for longer than the watchdog allows.
    Stuck,
    /// It could not be loaded.
    Failed,
}

impl State {
    /// The name in `/readyz?verbose`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Ok => "ok",
            Self::Stuck => "stuck",
            Self::Failed => "failed",
        }
    }
}

enum Part {
    Loading,
    Failed,
    Running(Probe),
}

/// The health of the whole server.
pub struct Health {
    parts: Mutex<BTreeMap<String, Part>>,
    changed: watch::Sender<()>,
    /// What [`Health::watch`] found last.
    readiness: watch::Sender<bool>,
    drain: Drain,
    watchdog: Duration,
}

impl Health {
    /// Nothing to watch yet. A busy part that makes no step for `watchdog` counts as stuck.
    #[must_use]
    pub fn new(drain: Drain, watchdog: Duration) -> Self {
        Self {
            parts: Mutex::default(),
            changed: watch::Sender::new(()),
            readiness: watch::Sender::new(false),
            drain,
            watchdog,
        }
    }

    /// A part that will come: the server is not ready until it has.
    pub fn loading(&self, name: &str) {
        self.put(name, Part::Loading);
    }

    /// A part that will not come; it does not make the others unready.
    pub fn failed(&self, name: &str) {
        self.put(name, Part::Failed);
    }

    /// A part that is there.
    pub fn running(&self, name: &str, probe: Probe) {
        self.put(name, Part::Running(probe));
    }

    fn put(&self, name: &str, part: Part) {
        self.parts().insert(name.into(), part);
        self.changed.send_replace(());
    }

    /// Whether the server is ready, and every change of it. Kept by [`Health::watch`]; false until that has begun.
    #[must_use]
    pub fn readiness(&self) -> watch::Receiver<bool> {
        self.readiness.subscribe()
    }

    /// Keeps [`Health::readiness`] true to [`Health::ready`] until the drain begins.
    pub async fn watch(&self) {
        let mut changes = self.changed.subscribe();
        while self.drain.phase() == Phase::Serving {
            self.tell();
            // Every arm may be cancelled: each only says that it is time to look again. That a part is stuck or has
            // moved on is announced by nobody, so it is looked for when it can first be.
            tokio::select! {
                () = self.drain.reached(Phase::Grace) => {}
                // The sender lives in `self`: waiting cannot fail.
                _ = changes.changed() => {}
                () = tokio::time::sleep(self.until_stuck()) => {}
            }
        }
        self.tell();
    }

    fn tell(&self) {
        let now = self.ready().is_ok();
        self.readiness
            .send_if_modified(|ready| std::mem::replace(ready, now) != now);
    }

    /// How long it takes until a part can be stuck that is not; a part that is stuck may move on at any time.
    fn until_stuck(&self) -> Duration {
        let parts = self.parts();
        let left = parts.values().filter_map(|part| match part {
            Part::Running(probe) => Some(match self.watchdog.checked_sub(probe()) {
                Some(left) => left + TICK,
                None => LOOK,
            }),
            Part::Loading | Part::Failed => None,
        });
        left.min().unwrap_or(self.watchdog)
    }

    /// Every part and its state.
    #[must_use]
    pub fn parts_now(&self) -> Vec<(String, State)> {
        let parts = self.parts();
        parts
            .iter()
            .map(|(name, part)| (name.clone(), part.state(self.watchdog)))
            .collect()
    }

    /// The state of the part of this name.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<State> {
        let parts = self.parts();
        parts.get(name).map(|part| part.state(self.watchdog))
    }

    /// Whether the process works: no part is stuck.
    ///
    /// # Errors
    /// `unavailable`, reason `engine_dead`.
    pub fn live(&self) -> Result<(), Refusal> {
        for (name, state) in self.parts_now() {
            if state == State::Stuck {
                let message = format!("The engine of `{name}` is {}.", state.name());
                return Err(Refusal::new(Code::Unavailable, "engine_dead", message));
            }
        }
        Ok(())
    }

    /// Whether the server takes work: it lives, is not draining, and every model that can be loaded is.
    ///
    /// # Errors
    /// `unavailable`, reason `draining`, `engine_dead` or `model_loading`.
    pub fn ready(&self) -> Result<(), Refusal> {
        if self.drain.phase() > Phase::Serving {
            let message = "The server is shutting down.";
            return Err(Refusal::new(Code::Unavailable, "draining", message));
        }
        self.live()?;
        let parts = self.parts_now();
        if let Some((name, _)) = parts.iter().find(|(_, state)| *state == State::Loading) {
            let message = format!("The model `{name}` is still loading.");
            return Err(Refusal::new(Code::Unavailable, "model_loading", message));
        }
        Ok(())
    }

    fn parts(&self) -> MutexGuard<'_, BTreeMap<String, Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    fn state(&self, watchdog: Duration) -> State {
        match self {
            Self::Loading => State::Loading,
            Self::Failed => State::Failed,
            Self::Running(probe) if probe() > watchdog => State::Stuck,
            Self::Running(_) => State::Ok,
        }
    }
}

/// Timers count in milliseconds, and a part is stuck only past its limit.
const TICK: Duration = Duration::from_millis(1);
/// A part that is stuck is looked at this often.
const LOOK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use tokio::time::Instant;

    #[test]
    fn oa_901_an_engine_that_stops_stepping_fails_liveness() {
        let health = Health::new(Drain::default(), Duration::from_secs(30));
        let stalled = Arc::new(Mutex::new(Duration::ZERO));
        let probe = Arc::clone(&stalled);
        health.running("demo", Box::new(move || *probe.lock().unwrap()));
        for (milliseconds, live) in [(0, true), (30_000, true), (30_001, false), (5, true)] {
            *stalled.lock().unwrap() = Duration::from_millis(milliseconds);
            assert_eq!(health.live().is_ok(), live, "{milliseconds} ms");
            let why = health.ready().map_err(|refusal| refusal.reason);
            assert_eq!(why, if live { Ok(()) } else { Err("engine_dead") });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn oa_902_a_loading_model_is_alive_and_not_ready() {
        let drain = Drain::default();
        let health = Health::new(drain.clone(), Duration::from_secs(30));
        health.loading("big");
        assert!(health.live().is_ok());
        assert_eq!(health.ready().unwrap_err().reason, "model_loading");
        health.running("big", Box::new(|| Duration::ZERO));
        health.failed("other");
        assert!(health.ready().is_ok());
        tokio::spawn(async move { drain.run().await });
        health.drain.reached(Phase::Grace).await;
        assert_eq!(health.ready().unwrap_err().reason, "draining");
        assert!(health.live().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn oa_901_whoever_follows_readiness_is_told_when_it_changes() {
        let drain = Drain::default();
        let health = Arc::new(Health::new(drain.clone(), Duration::from_secs(30)));
        health.loading("demo");
        let mut ready = health.readiness();
        let watching = Arc::clone(&health);
        let watching = tokio::spawn(async move { watching.watch().await });
        let began = Instant::now();
        let mut told = async |expect: bool| {
            ready.changed().await.unwrap();
            assert_eq!(*ready.borrow_and_update(), expect);
            began.elapsed().as_secs()
        };
        // Idle for ten seconds, then in one step until the fiftieth.
        let probe = move || match began.elapsed().as_secs() {
            10..50 => began.elapsed() - Duration::from_secs(10),
            _ => Duration::ZERO,
        };
        health.running("demo", Box::new(probe));
        assert_eq!(told(true).await, 0);
        assert_eq!(told(false).await, 40);
        assert!((50..=51).contains(&told(true).await));
        tokio::spawn(async move { drain.run().await });
        assert!(told(false).await <= 51);
        watching.await.unwrap();
    }
}
