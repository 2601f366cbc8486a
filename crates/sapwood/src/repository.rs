//! Loads and unloads models while the server runs (TR-706).
//!
//! ```text
//!   running ─ unload ─► refuses new calls ─ what runs ends, or its time is over ─► the engine goes
//!                           ▲──────────────── load: planned ─► engine ◄──────────────────┘
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use sapwood_kernel::Kernel;
use sapwood_server::ServerContext;
use sapwood_server::faces::generate::{self, ModelControlError, Repository};
use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, sleep};

use crate::config::{Config, ServedModelConfig};
use crate::controllers::ProcessControllers;
use crate::failure::CliError;
use crate::hub::ModelCache;
use crate::loaded_model::LoadedModel;
use crate::model_loading;
use crate::models::{self, PlannedModel};
use crate::trial;

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
    /// A lock per model: changes of one model are serialised, changes of different models are concurrent.
    changing: BTreeMap<String, Arc<tokio::sync::Mutex<()>>>,
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
        let planned = planned.iter();
        Self(Arc::new(RepositoryInner {
            kernel: kernel.clone(),
            shared: shared.clone(),
            config: config.clone(),
            controllers: controllers.clone(),
            cache: ModelCache::new(&config.hub),
            planned: planned.map(|it| (it.name.clone(), it.clone())).collect(),
            engines: Mutex::default(),
            changing: changing.collect(),
        }))
    }
}

impl ServedModels {
    /// The shared state of the server.
    pub(crate) fn shared(&self) -> ServerContext {
        self.0.shared.clone()
    }

    /// Loads the models at the start of the server; requests for a change wait until that is done.
    pub(crate) async fn begin(&self, planned: Vec<PlannedModel>) -> Result<(), CliError> {
        let inner = &self.0;
        let mut changing = BTreeMap::new();
        for model in &planned {
            // All are locked before the first is loaded: a request must not load a model that the start is about to
            // load.
            changing.insert(model.name.clone(), inner.change(&model.name).await);
        }
        let changing = Mutex::new(changing);
        model_loading::load(
            &inner.kernel,
            &inner.controllers,
            &inner.cache,
            planned,
            |name, loaded, took| {
                // The lock is released for each model on its own, so that a slow one holds up no change of the others.
                inner.loaded(name, loaded, took);
                let mut changing = changing.lock().unwrap_or_else(PoisonError::into_inner);
                changing.remove(name);
            },
        )
        .await
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
            inner.take_out(&name).await;
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
        self.take_out(name).await;
        self.shared.health.loading(name);
        self.kernel
            .replace(model_loading::absent(name, "is still loading"));
        let began = Instant::now();
        let loading = async {
            let planned = planned.located(&self.cache).await?;
            model_loading::announce(&self.kernel, &planned).await;
            // A crash of llama.cpp would end the requests of all other models.
            trial::pass(&planned).await?;
            let parsers = planned.parsers;
            let engine = model_loading::engine(planned).await?;
            let function =
                model_loading::function(name, &engine, &self.controllers, parsers).await?;
            Ok::<_, CliError>((engine, function))
        };
        match loading.await {
            Ok((engine, function)) => {
                // Registered in the kernel first, so that it can be called once it is reported.
                self.kernel.replace(function);
                self.loaded(name, Ok(&engine), began.elapsed());
                Ok(served)
            }
            Err(failure) => {
                tracing::error!(model = name, %failure, "a model could not be loaded");
                self.cache.release(name);
                self.kernel
                    .replace(model_loading::absent(name, "could not be loaded"));
                self.shared.health.unloaded(name);
                Err(ModelControlError::Broken)
            }
        }
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

    /// Records that a model was loaded, or that it failed to load.
    fn loaded(&self, name: &str, loaded: Result<&LoadedModel, &CliError>, took: Duration) {
        let engine = match loaded {
            Ok(engine) => engine,
            Err(failure) => {
                self.shared.health.failed(name);
                tracing::error!(model = name, %failure, "a model could not be loaded; the server runs without it");
                return;
            }
        };
        self.shared.metrics.watch(engine.watched());
        self.shared.metrics.loaded_in(name, took);
        let watched = engine.clone();
        let probe = Box::new(move || watched.stalled_for());
        self.shared.health.running(name, probe);
        self.engines().insert(name.into(), engine.clone());
        engine.log(name);
    }

    /// Unloads a model, if it is loaded. Running requests may finish within `unload_timeout`.
    async fn take_out(&self, name: &str) {
        // Removed first, so that it is unloaded once, whoever comes second.
        let Some(engine) = self.engines().remove(name) else {
            return;
        };
        self.shared.health.unloading(name);
        self.kernel
            .replace(model_loading::absent(name, "is unloaded"));
        let until = Instant::now() + self.config.generate.unload_timeout;
        let stats = engine.stats();
        // No new call can come: the function is replaced already.
        while stats.requests_running.get() + stats.requests_waiting.get() > 0
            && Instant::now() < until
        {
            sleep(LOOK).await;
        }
        self.shared.metrics.unwatch(engine.watched());
        // Running requests fail with the reason that the model was unloaded.
        engine.end();
        // The last handle joins the engine's thread, which may be in the middle of a step.
        let _ = tokio::task::spawn_blocking(move || drop(engine)).await;
        self.cache.release(name);
        self.shared.health.unloaded(name);
        tracing::info!(model = name, "unloaded");
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
    for key in ["name", "backend", "path"] {
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
        ..given
    })
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use sapwood_kernel::args;
    use sapwood_server::Server;
    use sapwood_server::ops::health::HealthState;
    use sapwood_server::server;

    use super::*;
    use crate::config::layers::{Flags, Layers};

    const FILE: &str = r#"
        [generate]
        model_control = "explicit"
        unload_timeout = "100ms"
        [[models]]
        name = "m"
        backend = "mock"
        mock = { script = "text", text = "one" }
        [[models]]
        name = "slow"
        backend = "mock"
        mock = { script = "steps", rules = [{ steps = [{ text = "a" }, { hang = true }] }] }
    "#;

    /// Models that are planned and not yet loaded.
    fn planned() -> (ServedModels, Vec<PlannedModel>, Kernel, ServerContext) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sapwood.toml");
        std::fs::write(&file, FILE).unwrap();
        let layers = Layers::read(Some(&file), Flags::default()).unwrap();
        let config = layers.config().unwrap();
        let planned = models::plan(&config).unwrap();
        let kernel = model_loading::kernel(&config, &planned).unwrap();
        let builder = Server::builder(server::Config::default(), Vec::new()).unwrap();
        let shared = builder.shared().clone();
        let controllers = ProcessControllers::new(&config.controllers).unwrap();
        let models = ServedModels::new(&kernel, &shared, &config, &controllers, &planned);
        (models, planned, kernel, shared)
    }

    async fn begun() -> (ServedModels, Kernel, ServerContext) {
        let (models, planned, kernel, shared) = planned();
        models.begin(planned).await.unwrap();
        (models, kernel, shared)
    }

    /// The port answers before the first model begins to load: a probe must not take that for a server without models.
    #[tokio::test]
    async fn oa_902_a_server_is_not_ready_before_its_models_begin_to_load() {
        let (models, planned, _, shared) = planned();
        assert_eq!(shared.health.ready().unwrap_err().reason, "model_loading");
        assert_eq!(shared.health.state("m"), Some(HealthState::Loading));
        models.begin(planned).await.unwrap();
        assert!(shared.health.ready().is_ok());
    }

    async fn states(kernel: &Kernel) -> Result<String, &'static str> {
        let run = kernel.run::<String>("m", args! { prompt: "x" });
        run.await.map_err(|error| error.code().name())
    }

    #[tokio::test]
    async fn tr_706_a_model_is_unloaded_and_loaded_with_its_own_or_a_given_configuration() {
        let (models, kernel, shared) = begun().await;
        assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
        assert!(shared.health.ready().is_ok());
        models.unload("m").await.unwrap();
        assert_eq!(states(&kernel).await, Err("unavailable"));
        assert_eq!(shared.health.ready().unwrap_err().reason, "model_unloaded");
        // Unloading again changes nothing.
        models.unload("m").await.unwrap();
        let other = r#"{"mock": {"script": "text", "text": "two"}, "versions": [3]}"#;
        let reported = models.load("m", Some(other.into())).await.unwrap();
        assert_eq!(reported.versions, [3]);
        assert_eq!(states(&kernel).await.as_deref(), Ok("two"));
        assert!(shared.health.ready().is_ok());
        // The next load uses the configured table again, and there is one version.
        let reported = models.load("m", None).await.unwrap();
        assert_eq!(reported.versions, [1]);
        assert_eq!(states(&kernel).await.as_deref(), Ok("one"));
        for (name, config, expect) in [
            ("nobody", None, "Unknown"),
            ("m", Some("{"), "EOF while parsing"),
            ("m", Some("[]"), "must be the text of a JSON object"),
            (
                "m",
                Some(r#"{"path": "/etc/passwd"}"#),
                "`path` can not be changed",
            ),
            ("m", Some(r#"{"odd": 1}"#), "unknown field `odd`"),
            (
                "m",
                Some(r#"{"versions": [0]}"#),
                "versions must be integers",
            ),
        ] {
            let failed = models.load(name, config.map(str::to_owned)).await;
            let failed = format!("{:?}", failed.unwrap_err());
            assert!(failed.contains(expect), "{failed}");
        }
        assert_eq!(
            states(&kernel).await.as_deref(),
            Ok("one"),
            "it was left alone"
        );
        assert_eq!(
            models.unload("nobody").await,
            Err(ModelControlError::Unknown)
        );
    }

    /// A request that does not end in time is ended, and its caller gets the reason.
    #[tokio::test]
    async fn tr_706_running_requests_are_ended_after_the_unload_timeout() {
        let (models, kernel, _) = begun().await;
        let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
        assert_eq!(run.next().await.unwrap().unwrap(), "a");
        models.unload("slow").await.unwrap();
        let error = run.next().await.unwrap().unwrap_err();
        assert_eq!(error.code().name(), "unavailable");
        assert!(error.to_string().contains("was unloaded"), "{error}");
        models.load("slow", None).await.unwrap();
        let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
        assert_eq!(run.next().await.unwrap().unwrap(), "a");
    }

    /// A change continues to its end even if its caller disconnects.
    #[tokio::test]
    async fn tr_706_a_change_continues_after_its_caller_is_gone() {
        let (models, kernel, shared) = begun().await;
        let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
        assert_eq!(run.next().await.unwrap().unwrap(), "a");
        let mut unloading = models.unload("slow");
        assert!(futures::poll!(&mut unloading).is_pending());
        drop(unloading);
        let error = run.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("was unloaded"), "{error}");
        let mut changes = shared.health.changes();
        let mut loading = models.load("slow", None);
        assert!(futures::poll!(&mut loading).is_pending());
        drop(loading);
        while shared.health.ready().is_err() {
            changes.changed().await.unwrap();
        }
        let mut run = kernel.run::<String>("slow", args! { prompt: "x" });
        assert_eq!(run.next().await.unwrap().unwrap(), "a");
    }
}
