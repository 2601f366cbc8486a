//! Liveness and readiness: one state for every kind of probe (OA-901, OA-902).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use tokio::sync::watch;

use crate::http::rejection::Rejection;
use crate::ops::drain::{Drain, DrainPhase};

/// Returns for how long a part has been in its present step; zero while it is idle. Called from probes: it must return at once
/// and take no lock that the part holds during a step.
pub type StepClock = Box<dyn Fn() -> Duration + Send + Sync>;

/// Starts to load a part that is loaded on demand. Called from requests: it must return at once.
pub type LoadTrigger = Box<dyn Fn() + Send + Sync>;

/// The state of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthState {
    /// Not ready yet.
    Loading,
    /// Ready.
    Ok,
    /// Without a step for longer than the watchdog allows.
    Stuck,
    /// It could not be loaded.
    Failed,
    /// Being unloaded: running requests may finish.
    Unloading,
    /// Unloaded on request.
    Unloaded,
    /// Served by an upstream that does not answer.
    Away,
    /// Not loaded, or being loaded for a request: the next request that needs it loads it.
    OnDemand,
}

impl HealthState {
    /// The name in `/readyz?verbose`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Ok => "ok",
            Self::Stuck => "stuck",
            Self::Failed => "failed",
            Self::Unloading => "unloading",
            Self::Unloaded => "unloaded",
            Self::Away => "away",
            Self::OnDemand => "on_demand",
        }
    }
}

struct HealthPart {
    stage: HealthStage,
    /// The server is ready without it.
    optional: bool,
}

enum HealthStage {
    Loading,
    Failed,
    Running(StepClock),
    Unloading,
    Unloaded,
    Away,
    OnDemand(LoadTrigger),
}

/// The health of the whole server.
pub struct Health {
    parts: Mutex<BTreeMap<String, HealthPart>>,
    changed: watch::Sender<()>,
    /// The last result of [`Health::watch`].
    readiness: watch::Sender<bool>,
    drain: Drain,
    watchdog: Duration,
}

impl Health {
    /// Without parts. A busy part that makes no step for `watchdog` counts as stuck.
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

    /// Notified whenever a part becomes ready or not.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// A part is being loaded: the server is not ready until it runs, unless it is [`Health::optional`].
    pub fn loading(&self, name: &str) {
        self.put(name, HealthStage::Loading);
    }

    /// A part could not be loaded; that does not make the server unready.
    pub fn failed(&self, name: &str) {
        self.put(name, HealthStage::Failed);
    }

    /// A part runs.
    pub fn running(&self, name: &str, probe: StepClock) {
        self.put(name, HealthStage::Running(probe));
    }

    /// A part is being unloaded.
    pub fn unloading(&self, name: &str) {
        self.put(name, HealthStage::Unloading);
    }

    /// A part was unloaded, and may be loaded again.
    pub fn unloaded(&self, name: &str) {
        self.put(name, HealthStage::Unloaded);
    }

    /// The upstream of a part does not answer at the moment. The server is not ready while it requires the part, nor while no
    /// other part runs.
    pub fn away(&self, name: &str) {
        self.put(name, HealthStage::Away);
    }

    /// A part is not loaded, and is loaded by the next request that needs it, or by [`Health::demand`]. The server is ready,
    /// because it can serve such a request.
    pub fn on_demand(&self, name: &str, load: LoadTrigger) {
        self.put(name, HealthStage::OnDemand(load));
    }

    /// Starts to load a part that is loaded on demand and is not loaded. For protocols whose requests cannot wait for that.
    pub fn demand(&self, name: &str) {
        let parts = self.parts();
        if let Some(HealthStage::OnDemand(load)) = parts.get(name).map(|part| &part.stage) {
            load();
        }
    }

    /// Removes a part.
    pub fn remove(&self, name: &str) {
        self.parts().remove(name);
        self.changed.send_replace(());
    }

    /// Marks a part as optional: the server is ready without it (TR-709).
    pub fn optional(&self, name: &str) {
        self.change(name, |part| part.optional = true);
    }

    fn put(&self, name: &str, stage: HealthStage) {
        self.change(name, |part| part.stage = stage);
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut HealthPart)) {
        let mut parts = self.parts();
        // Inserted by whichever call comes first: `optional` may be called before or after `loading`.
        let part = parts.entry(name.into()).or_insert(HealthPart {
            stage: HealthStage::Loading,
            optional: false,
        });
        change(part);
        // Unlocked first: receivers of the notification read the state, and would wait for this lock.
        drop(parts);
        self.changed.send_replace(());
    }

    /// Readiness and its changes. Updated by [`Health::watch`]; false until that has begun.
    #[must_use]
    pub fn readiness(&self) -> watch::Receiver<bool> {
        self.readiness.subscribe()
    }

    /// Keeps [`Health::readiness`] equal to [`Health::ready`] until the drain begins.
    pub async fn watch(&self) {
        let mut changes = self.changed.subscribe();
        while self.drain.phase() == DrainPhase::Serving {
            self.publish();
            // Every arm may be cancelled: each only means that it is time to check again. A part that gets stuck or goes on
            // notifies nobody, so the check is timed for the first moment at which that is possible.
            tokio::select! {
                () = self.drain.reached(DrainPhase::Grace) => {}
                // The sender is owned by `self`: waiting cannot fail.
                _ = changes.changed() => {}
                () = tokio::time::sleep(self.until_stuck()) => {}
            }
        }
        // Once more, because the drain has made the server unready; from here on that does not change.
        self.publish();
    }

    fn publish(&self) {
        let now = self.ready().is_ok();
        self.readiness
            .send_if_modified(|ready| std::mem::replace(ready, now) != now);
    }

    /// The time until a part can get stuck at the earliest; a stuck part may go on at any time, so it is checked often.
    fn until_stuck(&self) -> Duration {
        let parts = self.parts();
        let left = parts.values().filter_map(|part| match &part.stage {
            HealthStage::Running(probe) => Some(match self.watchdog.checked_sub(probe()) {
                Some(left) => left + TICK,
                None => LOOK,
            }),
            _ => None,
        });
        left.min().unwrap_or(self.watchdog)
    }

    /// Every part and its state.
    #[must_use]
    pub fn parts_now(&self) -> Vec<(String, HealthState)> {
        let parts = self.parts();
        parts
            .iter()
            .map(|(name, part)| (name.clone(), part.state(self.watchdog)))
            .collect()
    }

    /// The state of the part of this name.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<HealthState> {
        let parts = self.parts();
        parts.get(name).map(|part| part.state(self.watchdog))
    }

    /// Liveness: no part is stuck.
    ///
    /// # Errors
    /// `unavailable`, reason `engine_dead`.
    pub fn live(&self) -> Result<(), Rejection> {
        let parts = self.parts_now();
        match parts.iter().find(|(_, state)| *state == HealthState::Stuck) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("The engine of `{name}` is stuck.");
                Err(unavailable(ErrorReason::ENGINE_DEAD, message))
            }
        }
    }

    /// Readiness: the server is live and not draining, and every required model that can be loaded is loaded.
    ///
    /// # Errors
    /// `unavailable`, reason `draining`, `engine_dead`, `model_loading`, `model_unloaded` or `upstream_away`.
    pub fn ready(&self) -> Result<(), Rejection> {
        if self.drain.phase() > DrainPhase::Serving {
            let message = "The server is shutting down.";
            return Err(unavailable(ErrorReason::DRAINING, message));
        }
        // Before the lock: `live` takes it too.
        self.live()?;
        let parts = self.parts();
        let required = parts.iter().filter(|(_, part)| !part.optional);
        for (name, part) in required {
            let (reason, what) = match part.stage {
                HealthStage::Loading => (ErrorReason::MODEL_LOADING, "still loading"),
                HealthStage::Unloading | HealthStage::Unloaded => {
                    (ErrorReason::MODEL_UNLOADED, "unloaded")
                }
                HealthStage::Away => (ErrorReason::UPSTREAM_AWAY, "at an upstream that is away"),
                // A model that failed to load will not come by waiting, so it must not keep the others from being used.
                HealthStage::Failed | HealthStage::Running(_) | HealthStage::OnDemand(_) => {
                    continue;
                }
            };
            let message = format!("The model `{name}` is {what}.");
            return Err(unavailable(reason, message));
        }
        let serves = parts.values().any(|part| {
            matches!(
                part.stage,
                HealthStage::Running(_) | HealthStage::OnDemand(_)
            )
        });
        // Optional upstreams make a server unready together: one that only forwards requests could not serve any (OA-902).
        let is_away = parts
            .values()
            .any(|part| matches!(part.stage, HealthStage::Away));
        if is_away && !serves {
            let message = "No upstream of this server answers.";
            return Err(unavailable(ErrorReason::UPSTREAM_AWAY, message));
        }
        Ok(())
    }

    fn parts(&self) -> MutexGuard<'_, BTreeMap<String, HealthPart>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unavailable(reason: ErrorReason, message: impl Into<String>) -> Rejection {
    Rejection::new(Code::Unavailable, reason, message)
}

impl HealthPart {
    fn state(&self, watchdog: Duration) -> HealthState {
        match &self.stage {
            HealthStage::Loading => HealthState::Loading,
            HealthStage::Failed => HealthState::Failed,
            HealthStage::Running(probe) if probe() > watchdog => HealthState::Stuck,
            HealthStage::Running(_) => HealthState::Ok,
            HealthStage::Unloading => HealthState::Unloading,
            HealthStage::Unloaded => HealthState::Unloaded,
            HealthStage::Away => HealthState::Away,
            HealthStage::OnDemand(_) => HealthState::OnDemand,
        }
    }
}

/// Added to the watchdog's limit: timers count in milliseconds, and a part is stuck only beyond the limit.
const TICK: Duration = Duration::from_millis(1);
/// How often a stuck part is checked.
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
            let why = health.ready().map_err(|rejection| rejection.reason.name());
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
        health.drain.reached(DrainPhase::Grace).await;
        assert_eq!(health.ready().unwrap_err().reason, "draining");
        assert!(health.live().is_ok());
    }

    /// A part that the server needs makes it unready wherever it is but running; one that it does not need never does.
    #[test]
    fn tr_709_the_server_is_ready_when_its_required_models_are() {
        let health = Health::new(Drain::default(), Duration::from_secs(30));
        health.running("needed", Box::new(|| Duration::ZERO));
        health.optional("other");
        let stage = |name: &str| {
            let steps = [
                (HealthState::Loading, "model_loading"),
                (HealthState::Unloading, "model_unloaded"),
                (HealthState::Unloaded, "model_unloaded"),
            ];
            let reported = steps.map(|(state, reason)| {
                match state {
                    HealthState::Loading => health.loading(name),
                    HealthState::Unloading => health.unloading(name),
                    _ => health.unloaded(name),
                }
                assert_eq!(health.state(name), Some(state));
                health
                    .ready()
                    .err()
                    .map(|rejection| rejection.reason == reason)
            });
            health.running(name, Box::new(|| Duration::ZERO));
            assert!(health.ready().is_ok());
            reported
        };
        assert_eq!(stage("other"), [None; 3]);
        assert_eq!(stage("needed"), [Some(true); 3]);
    }

    /// A server that only forwards requests is ready while an upstream answers.
    #[test]
    fn oa_902_a_server_without_any_upstream_is_not_ready() {
        let health = Health::new(Drain::default(), Duration::from_secs(30));
        for name in ["one", "two"] {
            health.optional(name);
            health.away(name);
        }
        assert_eq!(health.ready().unwrap_err().reason, "upstream_away");
        health.running("two", Box::new(|| Duration::ZERO));
        assert!(health.ready().is_ok());
        health.remove("two");
        assert_eq!(health.ready().unwrap_err().reason, "upstream_away");
        health.running("local", Box::new(|| Duration::ZERO));
        assert!(health.ready().is_ok());
        // One that is needed is needed beside others too.
        health.away("needed");
        assert_eq!(health.ready().unwrap_err().reason, "upstream_away");
    }

    #[tokio::test(start_paused = true)]
    async fn oa_901_readiness_notifies_its_receivers_of_each_change() {
        let drain = Drain::default();
        let health = Arc::new(Health::new(drain.clone(), Duration::from_secs(30)));
        health.loading("demo");
        let mut ready = health.readiness();
        let watching = Arc::clone(&health);
        let watching = tokio::spawn(async move { watching.watch().await });
        let began = Instant::now();
        let mut reported = async |expect: bool| {
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
        assert_eq!(reported(true).await, 0);
        assert_eq!(reported(false).await, 40);
        assert!((50..=51).contains(&reported(true).await));
        tokio::spawn(async move { drain.run().await });
        assert!(reported(false).await <= 51);
        watching.await.unwrap();
    }
}
