//! Loads and unloads models while the server runs: by request (TR-706), when a call needs one ([`on_demand`]), and when an
//! engine has ended ([`supervision`]).
//!
//! ```text
//!   running ─ unload ─► refuses new calls ─ what runs ends, or its time is over ─► the engine goes
//!                           ▲──────────────── load: planned ─► engine ◄──────────────────┘
//! ```

mod backoff;
mod on_demand;
mod supervision;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use sapwood_kernel::{Fun, Kernel};
use sapwood_server::ServerContext;
use sapwood_server::faces::generate::{self, ModelControlError, Repository};
use sapwood_server::ops::health::HealthState;
use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, sleep};

use crate::config::{Config, ServedModelConfig};
use crate::controllers::ProcessControllers;
use crate::failure::CliError;
use crate::hub::ModelCache;
use crate::loaded_model::LoadedModel;
use crate::model_loading::{self, StartedModel};
use crate::models::{self, PlannedModel};
use crate::trial;

use self::backoff::LoadBackoff;
use self::on_demand::OnDemand;

/// Poll interval for the end of running requests: engines have counters, but no notification.
const LOOK: Duration = Duration::from_millis(20);

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
    engines: Mutex<BTreeMap<String, LoadedModel>>,
    /// What models were loaded with for the last time: a request may have changed the plan.
    last_plans: Mutex<BTreeMap<String, PlannedModel>>,
    /// Models whose engine ended, and which will be loaded again.
    lost: Mutex<BTreeSet<String>>,
    /// Models that a call may have to load.
    on_demand: BTreeMap<String, Arc<OnDemand>>,
    backoffs: Mutex<BTreeMap<String, LoadBackoff>>,
    /// A lock per model: changes of one model are serialised, changes of different models are concurrent.
    changing: BTreeMap<String, Arc<tokio::sync::Mutex<()>>>,
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
        let changing = planned.iter().map(|it| (it.name.clone(), Arc::default()));
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
            let model = OnDemand::new(&it.name, it.residence.idle_unload, waiting_max);
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
            engines: Mutex::default(),
            last_plans: Mutex::default(),
            lost: Mutex::default(),
            on_demand: on_demand.collect(),
            backoffs: Mutex::default(),
            changing: changing.collect(),
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

    /// Loads the models that are loaded at the start of the server; requests for a change wait until that is done.
    pub(crate) async fn begin(&self, planned: Vec<PlannedModel>) -> Result<(), CliError> {
        let inner = &self.0;
        let planned = inner.at_start(planned).await;
        let mut changing = BTreeMap::new();
        for model in &planned {
            // All are locked before the first is loaded: a request must not load a model that the start is about to
            // load.
            changing.insert(model.name.clone(), inner.change(&model.name).await);
        }
        let changing = Mutex::new(changing);
        model_loading::load_with(
            &inner.kernel,
            &inner.controllers,
            &inner.cache,
            planned,
            |name, loaded, took| {
                match (loaded, inner.planned.get(name)) {
                    (Ok(model), Some(plan)) => inner.register(plan, model, took),
                    (Err(failure), _) => inner.begun_without(name, failure),
                    // Cannot occur: only planned models are loaded.
                    (Ok(_), None) => {}
                }
                // The lock is released for each model on its own, so that a slow one holds up no change of the others.
                let mut changing = changing.lock().unwrap_or_else(PoisonError::into_inner);
                changing.remove(name);
            },
        )
        .await
    }
}

impl ServedModels {
    /// Ends all engines, each of which saves its cached prefixes if that is configured.
    pub(crate) async fn end(&self) {
        let engines = std::mem::take(&mut *self.0.engines());
        // All at once: each has a thread of its own, and may write for seconds.
        for engine in engines.values() {
            self.0.shared.metrics.unwatch(engine.watched());
            engine.end();
        }
        let ended = tokio::task::spawn_blocking(move || {
            for engine in engines.values() {
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
    ) -> BoxFuture<'static, Result<generate::ModelOptions, ModelControlError>> {
        let (inner, name) = (Arc::clone(&self.0), name.to_owned());
        to_its_end(async move { inner.load(&name, config.as_deref()).await })
    }

    fn unload(&self, name: &str) -> BoxFuture<'static, Result<(), ModelControlError>> {
        let (inner, name) = (Arc::clone(&self.0), name.to_owned());
        to_its_end(async move {
            if !inner.planned.contains_key(&name) {
                return Err(ModelControlError::Unknown);
            }
            let _changing = inner.change(&name).await;
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
    ) -> Result<generate::ModelOptions, ModelControlError> {
        // Everything that can be refused comes before the model is unloaded: a bad request leaves it running.
        let (config, planned) = self.plan(name, config)?;
        let served = planned.served(&config).map_err(unreadable)?;
        let _changing = self.change(name).await;
        // Unloaded first, because there may not be memory for both.
        self.unload(name).await;
        self.shared.health.loading(name);
        self.kernel
            .replace(model_loading::absent(name, "is still loading"));
        match self.bring_up(&planned).await {
            Ok(()) => Ok(served),
            Err(failure) => {
                tracing::error!(model = name, %failure, "a model could not be loaded");
                self.kernel
                    .replace(model_loading::absent(name, "could not be loaded"));
                self.shared.health.unloaded(name);
                Err(ModelControlError::Broken)
            }
        }
    }

    /// Loads a model and registers its function. The model is locked for a change, and not loaded.
    async fn bring_up(&self, plan: &PlannedModel) -> Result<(), CliError> {
        let began = Instant::now();
        let loading = async {
            let located = plan.clone().located(&self.cache).await?;
            if self.shared.health.state(&plan.name) == Some(HealthState::Loading) {
                model_loading::announce(&self.kernel, &located).await;
            }
            self.make_room(&located).await;
            // A crash of llama.cpp would end the requests of all other models.
            trial::pass(&located).await?;
            model_loading::start(located, &self.controllers).await
        };
        let loaded = loading
            .await
            .inspect_err(|_| self.cache.release(&plan.name))?;
        self.register(plan, loaded, began.elapsed());
        Ok(())
    }

    /// Locks a model for a change; `None` for a name that is not planned.
    async fn change(&self, name: &str) -> Option<OwnedMutexGuard<()>> {
        let changing = self.changing.get(name)?;
        Some(Arc::clone(changing).lock_owned().await)
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

    /// The models that are loaded at the start; of the others their files are read.
    async fn at_start(&self, planned: Vec<PlannedModel>) -> Vec<PlannedModel> {
        let mut at_start = Vec::new();
        for model in planned {
            let asked = model.clone();
            // One that embeds is called in another way than one that generates, and faces see which only when it is loaded.
            let embeds = tokio::task::spawn_blocking(move || asked.embeds());
            if model.residence.is_at_start() || embeds.await.unwrap_or(false) {
                at_start.push(model);
            } else {
                self.describe(&model).await;
            }
        }
        at_start
    }

    /// Registers a model that was loaded, so that it can be called.
    fn register(&self, plan: &PlannedModel, loaded: StartedModel, took: Duration) {
        let StartedModel { engine, function } = loaded;
        let name = plan.name.as_str();
        engine.log(name);
        self.shared.metrics.watch(engine.watched());
        self.shared.metrics.loaded_in(name, took);
        self.backoffs()
            .entry(name.into())
            .or_default()
            .loaded(Instant::now());
        let watched = engine.clone();
        self.last_plans().insert(name.into(), plan.clone());
        self.engines().insert(name.into(), engine);
        // In the kernel before it is reported as running.
        match self.on_demand.get(name) {
            Some(model) => {
                model.loaded(function);
                self.kernel.replace(self.demanding(model));
            }
            None => {
                self.kernel.replace(function);
            }
        }
        let probe = Box::new(move || watched.stalled_for());
        self.shared.health.running(name, probe);
    }

    /// Records that a model could not be loaded at the start of a server that runs without it.
    fn begun_without(&self, name: &str, failure: &CliError) {
        // One that is loaded on demand is tried again, by the next call after this time.
        let now = Instant::now();
        self.backoffs().entry(name.into()).or_default().failed(now);
        self.shared.health.failed(name);
        tracing::error!(model = name, %failure, "a model could not be loaded; the server runs without it");
    }

    /// Unloads a model by request, if it is loaded. Running requests may finish within `unload_timeout`.
    async fn unload(&self, name: &str) {
        let was_lost = self.lost().remove(name);
        let is_loaded = self.engines().contains_key(name);
        if let Some(model) = self.on_demand.get(name) {
            model.close();
        } else if !is_loaded && !was_lost {
            return;
        }
        self.kernel
            .replace(model_loading::absent(name, "is unloaded"));
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
        let Some(engine) = self.engines().remove(name) else {
            return;
        };
        let until = Instant::now() + self.config.generate.unload_timeout;
        let stats = engine.stats();
        while stats.requests_running.get() + stats.requests_waiting.get() > 0
            && Instant::now() < until
            // An engine that has ended finishes no request.
            && !engine.is_lost()
        {
            sleep(LOOK).await;
        }
        self.shared.metrics.unwatch(engine.watched());
        // Running requests fail with the reason that the model was unloaded.
        engine.end();
        // The last handle joins the engine's thread, which may be in the middle of a step.
        let _ = tokio::task::spawn_blocking(move || drop(engine)).await;
        self.cache.release(name);
    }

    /// The function of a model that a call may have to load.
    fn demanding(&self, model: &Arc<OnDemand>) -> Fun {
        let (inner, name) = (Weak::clone(&self.me), model.name().to_owned());
        model.function(move || supervision::demanded(Weak::clone(&inner), name.clone()))
    }

    /// What a model was loaded with for the last time, or is planned.
    fn last_plan(&self, name: &str) -> Option<PlannedModel> {
        let last = self.last_plans().get(name).cloned();
        last.or_else(|| self.planned.get(name).cloned())
    }

    fn last_plans(&self) -> MutexGuard<'_, BTreeMap<String, PlannedModel>> {
        self.last_plans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn backoffs(&self) -> MutexGuard<'_, BTreeMap<String, LoadBackoff>> {
        self.backoffs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn engines(&self) -> MutexGuard<'_, BTreeMap<String, LoadedModel>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
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
    for key in ["name", "backend", "path", "lora"] {
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
        ..given
    })
}

#[cfg(test)]
mod tests;
