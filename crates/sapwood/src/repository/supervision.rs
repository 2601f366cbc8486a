//! What happens to models without a request: a call loads one, an idle one is unloaded, and one whose engine has ended is
//! loaded again.

use std::convert::Infallible;
use std::sync::{Arc, Weak};

use futures::FutureExt;
use sapwood_engine::PrefixDiskConfig;
use sapwood_kernel::{Error, Result};
use sapwood_server::ops::health::HealthState;
use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep};

use super::loading::LoadFailure;
use super::model_locks::Change;
use super::on_demand::{OnDemand, SharedLoad};
use super::{RepositoryInner, ServedModels};
use crate::loaded_model::LoadedModel;
use crate::models::PlannedModel;

/// How often the models are looked at: engines have counters, but no notification.
const LOOK: Duration = Duration::from_millis(500);
/// How long engines may take before their saved prefixes are left to them: for the disk, and for a step.
const TRIM_MAX: Duration = PrefixDiskConfig::MOVE_MAX.saturating_add(Duration::from_secs(1));
/// How long a model stays after its last use, whoever needs the memory.
const RECENT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);

impl ServedModels {
    /// Supervises the models. Never returns.
    pub(crate) async fn supervise(&self) -> Infallible {
        let mut ticks = interval(LOOK);
        // After a pause of the process one look is enough.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.0.look(Instant::now());
        }
    }
}

/// Loads a model that is not loaded.
///
/// # Errors
/// `unavailable`, if it cannot be loaded now.
pub(super) async fn demanded(inner: Option<Arc<RepositoryInner>>, name: String) -> Result<()> {
    let load = inner.and_then(|inner| inner.begin_demand(&name));
    load.ok_or_else(|| stopping(&name))?.await
}

fn stopping(name: &str) -> Error {
    Error::Unavailable {
        why: format!("the model {name} is not served any more"),
        retry_after: None,
    }
}

impl RepositoryInner {
    /// Starts what has to be done at this time, each in a task of its own. A model that is being changed is left until the
    /// next look.
    pub(super) fn look(&self, now: Instant) {
        let Some(me) = self.me.upgrade() else { return };
        if self.engines.is_ending() {
            return;
        }
        for name in self.engines.lost() {
            if let Some(change) = self.locks.try_change(&name) {
                let me = Arc::clone(&me);
                tokio::spawn(async move { me.recover(&name, change).await });
            }
        }
        for name in self.history.lost_and_due(now) {
            if let Some(change) = self.locks.try_change(&name) {
                let me = Arc::clone(&me);
                tokio::spawn(async move { me.restart(&name, change).await });
            }
        }
        for (name, model) in &self.on_demand {
            let Some(change) = self.locks.try_change(name) else {
                continue;
            };
            let is_due = match self.shared.health.state(name) {
                // One look early: a retry at the end of the wait, which was named to the caller, must find a model that can be
                // called. Until then the model's function refuses calls with the rest of the wait.
                Some(HealthState::Failed) => self.history.wait(name, now + LOOK).is_none(),
                // Again: streams that wait for the model notice changes of its state only, and demand it then.
                Some(HealthState::OnDemand) => self.history.take_end_of_postponement(name, now),
                _ => false,
            };
            if is_due {
                self.await_demand(name);
            }
            if model.withdraw_idle(now) {
                let (me, model) = (Arc::clone(&me), Arc::clone(model));
                tokio::spawn(async move { me.retire(&model, "idle", change).await });
            }
        }
    }

    /// Records that a model could not be loaded. Returns the time until the next try.
    fn failed(&self, name: &str, failure: Option<&LoadFailure>) -> Duration {
        let now = Instant::now();
        match failure {
            // Nothing is wrong with the model: it may fit as soon as another one is idle.
            Some(LoadFailure::Memory(_)) => self.history.postponed(name, now),
            Some(LoadFailure::Broken(_)) | None => self.history.failed(name, now),
        }
    }

    /// The load of a model that is loaded on demand; begun, unless it runs. In a task of its own: a caller that disconnects
    /// does not stop a load that others wait for.
    fn begin_demand(self: Arc<Self>, name: &str) -> Option<SharedLoad> {
        let model = Arc::clone(self.on_demand.get(name)?);
        let runtime = self.runtime.clone();
        let name = name.to_owned();
        Some(model.load(|running| {
            let task = runtime.spawn(async move {
                let _running = running;
                self.demand(&name).await
            });
            let ended = task.map(|ended| {
                ended.unwrap_or_else(|why| {
                    tracing::error!(%why, "loading a model ended unexpectedly");
                    Err(Error::Unavailable {
                        why: "loading the model ended unexpectedly".into(),
                        retry_after: None,
                    })
                })
            });
            ended.boxed().shared()
        }))
    }

    /// Loads a model for a call, unless it is loaded.
    async fn demand(&self, name: &str) -> Result<()> {
        let _changing = self.locks.change(name).await;
        let (Some(model), Some(plan)) = (self.on_demand.get(name), self.last_plan(name)) else {
            // Cannot occur: only such models are demanded.
            return Err(stopping(name));
        };
        if self.engines.is_ending() {
            return Err(stopping(name));
        }
        if model.enter()?.is_some() {
            return Ok(());
        }
        let failed = "could not be loaded, and is tried again later";
        // A file that cannot be loaded is not read for each call.
        if let Some(wait) = self.history.wait(name, Instant::now()) {
            return Err(model.unavailable(failed, Some(wait)));
        }
        let brought = tokio::select! {
            brought = self.bring_up(&plan) => brought,
            // An unload by request waits for this lock, and not for gigabytes. Dropping the load stops it.
            () = model.until_closed() => {
                self.cache.release(name);
                return Err(model.unavailable("is unloaded", None));
            }
        };
        if let Err(failure) = brought {
            let wait = self.failed(name, Some(&failure));
            tracing::error!(model = name, %failure, "a model could not be loaded for a call");
            // Without memory nothing is wrong with the model: it stays on demand, because faces do not pass calls on to a
            // model that has failed, and the retry that this error asks for would find no model.
            if matches!(failure, LoadFailure::Broken(_)) {
                self.shared.health.failed(name);
            }
            return Err(model.unavailable(failed, Some(wait)));
        }
        Ok(())
    }

    /// Makes a model that is not loaded wait for a call.
    pub(super) fn await_demand(&self, name: &str) {
        let Some(model) = self.on_demand.get(name) else {
            return;
        };
        // Replaced, because the specification of a loaded model holds its vocabulary, and with that its weights.
        self.kernel.replace(self.demanding(model));
        let inner = Weak::clone(&self.me);
        let trigger = {
            let name = name.to_owned();
            // Its error is in the log, and in the state of the model.
            move || drop(inner.upgrade().and_then(|inner| inner.begin_demand(&name)))
        };
        self.shared.health.on_demand(name, Box::new(trigger));
    }

    /// Ends the engine of a model that was withdrawn, and makes it wait for a call.
    pub(super) async fn retire(&self, model: &OnDemand, why: &str, _: Change) {
        self.await_demand(model.name());
        self.take_out(model.name()).await;
        tracing::info!(model = model.name(), why, "unloaded until the next call");
    }

    /// Makes room for a model that is to be loaded, as far as it lacks memory: drops the prefixes that engines have saved, then
    /// unloads models that nobody uses, the one first that has not been used for longest. If that was in vain it is not done
    /// again for a while: a model that can never fit would keep all others out of the memory.
    pub(super) async fn make_room(&self, wanted: &PlannedModel) {
        let name = wanted.name.as_str();
        let in_vain = self.history.eviction_wait(name, Instant::now());
        if in_vain.is_some() || !self.lacks(wanted).await {
            return;
        }
        self.drop_saved_prefixes(wanted).await;
        let mut has_evicted = false;
        while self.lacks(wanted).await {
            let Some((model, change)) = self.withdraw_longest_unused(name, Instant::now()) else {
                if has_evicted {
                    self.history.evicted_in_vain(name, Instant::now());
                }
                return;
            };
            has_evicted = true;
            let Some(me) = self.me.upgrade() else { return };
            // In a task of its own: a load that is stopped meanwhile must not leave the other model's engine half ended.
            let retired =
                tokio::spawn(async move { me.retire(&model, "memory", change).await }).await;
            if let Err(why) = retired {
                tracing::error!(%why, "unloading a model ended unexpectedly");
            }
        }
    }

    async fn drop_saved_prefixes(&self, wanted: &PlannedModel) {
        let engines = self.engines.all();
        let saved = |engine: &LoadedModel| engine.stats().prefix_saved_bytes.get();
        // All at once: each may write for seconds what it had saved.
        let mut left: Vec<_> = engines.iter().filter(|it| saved(it) > 0).collect();
        for engine in &left {
            engine.drop_saved_prefixes();
        }
        let begun = Instant::now();
        let mut looked = begun;
        loop {
            left.retain(|engine| saved(engine) > 0);
            let now = Instant::now();
            if left.is_empty() || now >= begun + TRIM_MAX {
                return;
            }
            // An engine that serves requests saves others meanwhile, and may never be seen without any: what matters is the memory.
            if now >= looked + LOOK {
                looked = now;
                if !self.lacks(wanted).await {
                    return;
                }
            }
            sleep(POLL).await;
        }
    }

    /// Withdraws the model that has not been used for longest. One that was used just now stays: the callers of two models that
    /// do not fit together would unload each other's with every call.
    pub(super) fn withdraw_longest_unused(
        &self,
        except: &str,
        now: Instant,
    ) -> Option<(Arc<OnDemand>, Change)> {
        let others = self.on_demand.values().filter(|it| it.name() != except);
        let mut unused: Vec<_> = others
            .filter_map(|model| Some((model.unused_since()?, model)))
            .filter(|(since, _)| now.saturating_duration_since(*since) >= RECENT)
            .collect();
        unused.sort_by_key(|(since, _)| *since);
        unused.into_iter().find_map(|(_, model)| {
            // Not awaited: two models that make room would wait for each other.
            let change = self.locks.try_change(model.name())?;
            model.withdraw_unused().then(|| (Arc::clone(model), change))
        })
    }

    /// Takes out an engine that has ended.
    async fn recover(&self, name: &str, _: Change) {
        if !self.engines.is_lost(name) {
            return;
        }
        let wait = self.failed(name, None);
        tracing::error!(
            model = name,
            ?wait,
            "the engine of a model ended unexpectedly; the model is loaded again"
        );
        if let Some(model) = self.on_demand.get(name) {
            model.withdraw();
            self.await_demand(name);
            self.take_out(name).await;
            return;
        }
        // Not ready, but alive: it is being dealt with.
        self.shared.health.loading(name);
        self.put_absent(name, "is being loaded again after an error");
        self.take_out(name).await;
        self.history.set_lost(name, true);
    }

    /// Loads a model again whose engine has ended.
    async fn restart(&self, name: &str, _: Change) {
        let Some(plan) = self.last_plan(name).filter(|_| self.history.is_lost(name)) else {
            return;
        };
        match self.bring_up(&plan).await {
            Ok(()) => {
                self.history.set_lost(name, false);
            }
            Err(failure) => {
                let wait = self.failed(name, Some(&failure));
                tracing::error!(model = name, %failure, ?wait, "a model could not be loaded again");
                if self.history.is_hopeless(name) {
                    // Whatever supervises the process may have more success (OA-913).
                    let health = &self.shared.health;
                    health.running(name, Box::new(|| Duration::MAX));
                }
            }
        }
    }

    /// Whether a model lacks memory now.
    pub(super) async fn lacks(&self, wanted: &PlannedModel) -> bool {
        let (wanted, lacks_memory) = (wanted.clone(), self.lacks_memory);
        let lacks = tokio::task::spawn_blocking(move || lacks_memory(&wanted)).await;
        lacks.unwrap_or(false)
    }
}
