//! Loads and unloads models while the server runs: by request (TR-706), when a call needs one ([`on_demand`]), and when an
//! engine has ended ([`supervision`]).
//!
//! ```text
//!   running ─ unload ─► refuses new calls ─ what runs ends, or its time is over ─► the engine goes
//!                           ▲──────────────── load: planned ─► engine ◄──────────────────┘
//! ```
//!
//! Its state is in four machines: [`RunningEngines`], [`LoadHistory`], [`ModelLocks`], and an [`OnDemand`] for each model that
//! calls may have to load.

mod backoff;
mod call_count;
mod load_history;
mod loading;
mod model_locks;
mod on_demand;
mod running_engines;
mod supervision;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use sapwood_kernel::{Fun, Kernel};
use sapwood_server::ServerContext;
use sapwood_server::faces::generate::{ModelControlError, OnModelLoaded, Repository};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use crate::config::{Config, ServedModelConfig};
use crate::controllers::ProcessControllers;
use crate::failure::CliError;
use crate::hub::ModelCache;
use crate::model_loading;
use crate::models::{self, PlannedModel};

use self::load_history::LoadHistory;
use self::model_locks::ModelLocks;
use self::on_demand::OnDemand;
use self::running_engines::{RunningEngine, RunningEngines};

/// Poll interval for the end of running requests: engines have counters, but no notification.
const LOOK: Duration = Duration::from_millis(20);
/// How long the end of the server waits for changes that are being made. It stops them, but a step of llama.cpp may be long.
const CHANGES_MAX: Duration = Duration::from_secs(10);

/// Whether a model lacks memory at this time. May block.
type MemoryCheck = fn(&PlannedModel) -> bool;

/// The models of a server. Clones share them.
#[derive(Clone)]
pub(crate) struct ServedModels(Arc<RepositoryInner>);

struct RepositoryInner {
    kernel: Kernel,
    shared: ServerContext,
    config: Config,
    controllers: ProcessControllers,
    cache: ModelCache,
    planned: BTreeMap<String, PlannedModel>,
    engines: RunningEngines,
    history: LoadHistory,
    locks: ModelLocks,
    /// Models that a call may have to load.
    on_demand: BTreeMap<String, Arc<OnDemand>>,
    lacks_memory: MemoryCheck,
    /// Where loads run, whoever asks for them: some do from threads outside of it.
    runtime: Handle,
    /// Itself, for what it hands out.
    me: Weak<Self>,
}

impl ServedModels {
    /// The models of `planned`, which count as loading from here on.
    pub(crate) fn new(
        kernel: &Kernel,
        shared: &ServerContext,
        config: &Config,
        controllers: &ProcessControllers,
        planned: &[PlannedModel],
    ) -> Self {
        Self::with_memory(kernel, shared, config, controllers, planned, |model| {
            model.lacks_memory()
        })
    }

    /// The same with another check of the memory.
    fn with_memory(
        kernel: &Kernel,
        shared: &ServerContext,
        config: &Config,
        controllers: &ProcessControllers,
        planned: &[PlannedModel],
        lacks_memory: MemoryCheck,
    ) -> Self {
        let locks = ModelLocks::starting(planned.iter().map(|it| it.name.clone()));
        for model in planned {
            // Here and not in `begin`, which runs beside the server: a probe that came before it would find no part at
            // all, and a server without parts is ready.
            shared.health.loading(&model.name);
            if !model.required {
                shared.health.optional(&model.name);
            }
        }
        let on_demand = planned.iter().filter(|it| it.residence.is_on_demand());
        let on_demand = on_demand.map(|it| {
            let waiting_max = config.limits.queue_requests;
            let model = OnDemand::new(it, waiting_max);
            (it.name.clone(), model)
        });
        let inner = Arc::new_cyclic(|me| RepositoryInner {
            kernel: kernel.clone(),
            shared: shared.clone(),
            config: config.clone(),
            controllers: controllers.clone(),
            cache: ModelCache::new(&config.hub),
            planned: planned
                .iter()
                .map(|it| (it.name.clone(), it.clone()))
                .collect(),
            engines: RunningEngines::default(),
            history: LoadHistory::default(),
            locks,
            on_demand: on_demand.collect(),
            lacks_memory,
            runtime: Handle::current(),
            me: Weak::clone(me),
        });
        for model in planned.iter().filter(|it| !it.residence.is_at_start()) {
            inner.await_demand(&model.name);
        }
        Self(inner)
    }
}

impl ServedModels {
    /// The shared state of the server.
    pub(crate) fn shared(&self) -> ServerContext {
        self.0.shared.clone()
    }

    /// Loads the models that are loaded at the start of the server; changes and calls of a model wait until that is done.
    /// The files of the others are read meanwhile.
    pub(crate) async fn begin(&self, planned: Vec<PlannedModel>) -> Result<(), CliError> {
        let inner = &self.0;
        let changing = Mutex::new(inner.locks.take_starting());
        let done = |name: &str| {
            // Each lock is released on its own, so that a slow load holds up no change of the others.
            let mut changing = changing.lock().unwrap_or_else(PoisonError::into_inner);
            changing.remove(name);
        };
        let (at_start, first_use) = planned
            .into_iter()
            .partition(|it| it.residence.is_at_start());
        let others = async {
            let embedding = inner.described(first_use, &done).await;
            inner.begin_with(embedding, &done).await
        };
        futures::try_join!(inner.begin_with(at_start, &done), others)?;
        Ok(())
    }
}

impl ServedModels {
    /// Ends all engines, each of which saves its cached prefixes if that is configured. No model is loaded from here on.
    pub(crate) async fn end(&self) {
        let inner = &self.0;
        inner.engines.begin_end();
        drop(inner.locks.take_starting());
        // A change may have taken an engine out, or be about to register one.
        let _changes = timeout(CHANGES_MAX, inner.locks.change_all())
            .await
            .inspect_err(|_| tracing::warn!("a change of the models did not end in time"));
        let engines = inner.engines.take_all();
        // All at once: each has a thread of its own, and may write for seconds.
        for engine in &engines {
            inner.shared.metrics.unwatch(engine.watched());
            engine.end();
        }
        let ended = tokio::task::spawn_blocking(move || {
            for engine in &engines {
                engine.wait_ended();
            }
        });
        let _ = ended.await;
    }
}

impl Repository for ServedModels {
    fn load(
        &self,
        name: &str,
        config: Option<String>,
        loaded: OnModelLoaded,
    ) -> BoxFuture<'static, Result<(), ModelControlError>> {
        let (inner, name) = (Arc::clone(&self.0), name.to_owned());
        to_its_end(async move { inner.load(&name, config.as_deref(), loaded).await })
    }

    fn unload(&self, name: &str) -> BoxFuture<'static, Result<(), ModelControlError>> {
        let (inner, name) = (Arc::clone(&self.0), name.to_owned());
        to_its_end(async move {
            if !inner.planned.contains_key(&name) {
                return Err(ModelControlError::Unknown);
            }
            // Before the lock, which a load for a call may hold for as long as a download takes: this stops it.
            if let Some(model) = inner.on_demand.get(&name) {
                model.close();
            }
            let _changing = inner.locks.change(&name).await;
            inner.unload(&name).await;
            Ok(())
        })
    }
}

/// Makes a change in a task of its own. A change that stopped half-way, because its caller disconnected, would leave a
/// model loading or unloading for ever, and the server not ready.
fn to_its_end<T: Send + 'static>(
    change: impl Future<Output = Result<T, ModelControlError>> + Send + 'static,
) -> BoxFuture<'static, Result<T, ModelControlError>> {
    // Like any future, it does nothing before the first poll.
    async move {
        let changed = tokio::spawn(change).await;
        changed.unwrap_or_else(|why| {
            tracing::error!(%why, "a change of the models ended unexpectedly");
            Err(ModelControlError::Broken)
        })
    }
    .boxed()
}

impl RepositoryInner {
    async fn load(
        &self,
        name: &str,
        config: Option<&str>,
        loaded: OnModelLoaded,
    ) -> Result<(), ModelControlError> {
        // Everything that can be refused comes before the model is unloaded: a bad request leaves it running.
        let (config, planned) = self.plan(name, config)?;
        let served = planned.served(&config).map_err(unreadable)?;
        let _changing = self.locks.change(name).await;
        if self.engines.is_ending() {
            return Err(ModelControlError::Broken);
        }
        // Unloaded first, because there may not be memory for both.
        self.unload(name).await;
        if let Some(model) = self.on_demand.get(name) {
            model.clear_outline();
        }
        self.shared.health.loading(name);
        self.put_absent(name, "is still loading");
        match self.bring_up(&planned).await {
            Ok(()) => {
                // Under the lock: of two loads the second one's options stay.
                loaded(served);
                Ok(())
            }
            Err(failure) => {
                tracing::error!(model = name, %failure, "a model could not be loaded");
                self.put_absent(name, "could not be loaded");
                self.shared.health.unloaded(name);
                Err(ModelControlError::Broken)
            }
        }
    }

    /// The plan of a model, and the configuration for it.
    fn plan(
        &self,
        name: &str,
        given: Option<&str>,
    ) -> Result<(Config, PlannedModel), ModelControlError> {
        let planned = self.planned.get(name).ok_or(ModelControlError::Unknown)?;
        let mut config = self.config.clone();
        let Some(given) = given else {
            return Ok((config, planned.clone()));
        };
        let mine = config.models.iter_mut().find(|model| model.name == name);
        let Some(mine) = mine else {
            let why = "it has no configuration that could be replaced";
            return Err(ModelControlError::Config(why.into()));
        };
        // In a copy of the configuration: the next load without one uses the file's again.
        *mine = replaced(mine, given).map_err(ModelControlError::Config)?;
        let mine = mine.clone();
        config.check().map_err(unreadable)?;
        let planned = models::planned(&config, &mine).map_err(unreadable)?;
        Ok((config, planned.ok_or(ModelControlError::Unknown)?))
    }

    /// Registers in place of a model one that cannot be called now.
    fn put_absent(&self, name: &str, what: &'static str) {
        let kernel = &self.kernel;
        kernel.replace(model_loading::absent_instead(kernel, name, what));
    }

    /// Unloads a model by request, if it is loaded. Running requests may finish within `unload_timeout`.
    async fn unload(&self, name: &str) {
        let was_lost = self.history.set_lost(name, false);
        let is_loaded = self.engines.contains(name);
        if let Some(model) = self.on_demand.get(name) {
            model.close();
        } else if !is_loaded && !was_lost {
            return;
        }
        self.put_absent(name, "is unloaded");
        if is_loaded {
            self.shared.health.unloading(name);
            self.take_out(name).await;
        }
        self.shared.health.unloaded(name);
        tracing::info!(model = name, "unloaded");
    }

    /// Ends the engine of a model, whose function in the kernel is replaced already, so that no new call can come.
    async fn take_out(&self, name: &str) {
        // Removed first, so that it is ended once, whoever comes second.
        let Some(RunningEngine { engine, calls }) = self.engines.remove(name) else {
            return;
        };
        let until = Instant::now() + self.config.generate.unload_timeout;
        let stats = engine.stats();
        let has_requests = || stats.requests_running.get() + stats.requests_waiting.get() > 0;
        // The calls include those whose requests the engine has not seen yet.
        while (calls.calls() > 0 || has_requests())
            && Instant::now() < until
            // An engine that has ended finishes no request.
            && !engine.is_lost()
            && !self.engines.is_ending()
        {
            sleep(LOOK).await;
        }
        self.shared.metrics.unwatch(engine.watched());
        // Running requests fail with the reason that the model was unloaded.
        engine.end();
        // It may be in the middle of a step, and saves its cached prefixes at its end, whoever else holds a handle.
        let _ = tokio::task::spawn_blocking(move || engine.wait_ended()).await;
        self.cache.release(name);
    }

    /// The function of a model that a call may have to load.
    fn demanding(&self, model: &Arc<OnDemand>) -> Fun {
        let (inner, name) = (Weak::clone(&self.me), model.name().to_owned());
        model.function(move || supervision::demanded(inner.upgrade(), name.clone()))
    }

    /// What a model was loaded with for the last time, or is planned.
    fn last_plan(&self, name: &str) -> Option<PlannedModel> {
        let last = self.history.last_plan(name);
        last.or_else(|| self.planned.get(name).cloned())
    }
}

fn unreadable(failure: CliError) -> ModelControlError {
    ModelControlError::Config(failure.to_string())
}

/// The table of a model with the fields of a request. The backend and the file cannot be changed by a request.
fn replaced(mine: &ServedModelConfig, given: &str) -> Result<ServedModelConfig, String> {
    let given: serde_json::Value = serde_json::from_str(given).map_err(|why| why.to_string())?;
    let serde_json::Value::Object(mut given) = given else {
        return Err("parameter 'config' must be the text of a JSON object".into());
    };
    // A caller, even one with scope `admin`, must not make the server read files that the operator has not named.
    // Which models a call may have to load is fixed at the start.
    for key in [
        "name",
        "backend",
        "path",
        "lora",
        "draft_model",
        "load",
        "idle_unload",
    ] {
        if given.remove(key).is_some() {
            return Err(format!("`{key}` can not be changed by a request"));
        }
    }
    given.insert("name".into(), mine.name.clone().into());
    let given: ServedModelConfig =
        serde_json::from_value(given.into()).map_err(|why| why.to_string())?;
    Ok(ServedModelConfig {
        backend: mine.backend,
        path: mine.path.clone(),
        lora: mine.lora.clone(),
        draft_model: mine.draft_model.clone(),
        load: mine.load,
        idle_unload: mine.idle_unload,
        ..given
    })
}

#[cfg(test)]
mod tests;
