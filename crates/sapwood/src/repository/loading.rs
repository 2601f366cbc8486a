//! Loads models, at the start and later, and registers their engines.

use std::fmt;
use std::time::Duration;

use sapwood_server::ops::health::HealthState;
use tokio::time::Instant;

use super::RepositoryInner;
use super::call_count::CallCount;
use super::running_engines::RunningEngine;
use crate::failure::CliError;
use crate::model_loading::{self, StartedModel};
use crate::models::PlannedModel;
use crate::trial;

/// Why a model was not loaded.
#[derive(Debug)]
pub(super) enum LoadFailure {
    /// The memory is too little for it, at this time.
    Memory(CliError),
    /// Anything else.
    Broken(CliError),
}

impl From<CliError> for LoadFailure {
    fn from(failure: CliError) -> Self {
        Self::Broken(failure)
    }
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(failure) | Self::Broken(failure) => failure.fmt(f),
        }
    }
}

impl RepositoryInner {
    /// Loads models at the start, and calls `done` with the name of each.
    pub(super) async fn begin_with(
        &self,
        planned: Vec<PlannedModel>,
        done: &impl Fn(&str),
    ) -> Result<(), CliError> {
        let (kernel, controllers) = (&self.kernel, &self.controllers);
        let began = planned.clone();
        model_loading::load_with(
            kernel,
            controllers,
            &self.cache,
            planned,
            |name, loaded, took| {
                match (loaded, self.planned.get(name)) {
                    (Ok(model), Some(plan)) => self.register(plan, model, took),
                    (Err(failure), _) => self.begun_without(name, failure),
                    // Cannot occur: only planned models are loaded.
                    (Ok(_), None) => {}
                }
                done(name);
            },
        )
        .await?;
        // After the loads, which are waited for: these facts are for the time when they are not loaded.
        for model in began {
            let _changing = self.locks.change(&model.name).await;
            self.outline(&model).await;
        }
        Ok(())
    }

    /// Reads the files of models that are loaded on demand, and calls `done` with the name of each. Returns those that are
    /// loaded at the start all the same: one that embeds is called in another way than one that generates, and faces see
    /// which only when it is loaded.
    pub(super) async fn described(
        &self,
        first_use: Vec<PlannedModel>,
        done: &impl Fn(&str),
    ) -> Vec<PlannedModel> {
        let mut embedding = Vec::new();
        for model in first_use {
            if model_loading::embeds(&model.clone().found(&self.cache)).await {
                embedding.push(model);
                continue;
            }
            self.outline(&model).await;
            done(&model.name);
        }
        embedding
    }

    /// Loads a model and registers its function. The model is locked for a change, and not loaded.
    pub(super) async fn bring_up(&self, plan: &PlannedModel) -> Result<(), LoadFailure> {
        let began = Instant::now();
        let loading = async {
            let located = plan.clone().located(&self.cache).await?;
            if self.shared.health.state(&plan.name) == Some(HealthState::Loading) {
                model_loading::announce(&self.kernel, &located).await;
            }
            self.outline(&located).await;
            self.load_located(&located).await
        };
        let loaded = tokio::select! {
            loaded = loading => loaded,
            // Dropping the load stops it.
            () = self.engines.until_ending() => Err(CliError::new("the server ends").into()),
        };
        let loaded = loaded.inspect_err(|_| self.cache.release(&plan.name))?;
        self.register(plan, loaded, began.elapsed());
        Ok(())
    }

    /// Loads a model whose file is on this machine, after it has made room for it.
    async fn load_located(&self, located: &PlannedModel) -> Result<StartedModel, LoadFailure> {
        let mut failure = None;
        // Twice, because what was free may have been taken since the room was made.
        for _ in 0..2 {
            self.make_room(located).await;
            if failure.is_some() && self.lacks(located).await {
                break;
            }
            match self.try_and_start(located).await {
                Ok(loaded) => return Ok(loaded),
                Err(why) if self.lacks(located).await => failure = Some(why),
                Err(why) => return Err(LoadFailure::Broken(why)),
            }
        }
        let unknown = || CliError::new("the memory is too little for it");
        Err(LoadFailure::Memory(failure.unwrap_or_else(unknown)))
    }

    async fn try_and_start(&self, located: &PlannedModel) -> Result<StartedModel, CliError> {
        // A crash of llama.cpp would end the requests of all other models.
        trial::pass(located).await?;
        model_loading::start(located.clone(), &self.controllers).await
    }

    /// Reads the file of a model that is loaded on demand, for those who ask about it while it is not loaded. The model is
    /// locked for a change.
    async fn outline(&self, plan: &PlannedModel) {
        let Some(model) = self.on_demand.get(&plan.name) else {
            return;
        };
        if model.is_described() {
            return;
        }
        let there = plan.clone().found(&self.cache);
        let Some(outline) = model_loading::outline(&there).await else {
            return;
        };
        model.describe(outline);
        if self.shared.health.state(&plan.name) == Some(HealthState::OnDemand) {
            self.kernel.replace(self.demanding(model));
        }
    }

    /// Registers a model that was loaded, so that it can be called.
    fn register(&self, plan: &PlannedModel, loaded: StartedModel, took: Duration) {
        let StartedModel { engine, function } = loaded;
        let name = plan.name.as_str();
        let calls = CallCount::default();
        let function = calls.counting(function);
        let running = RunningEngine {
            engine: engine.clone(),
            calls,
        };
        if let Some(replaced) = self.engines.insert(name, running) {
            self.shared.metrics.unwatch(replaced.watched());
            replaced.end();
            // The last handle joins the engine's thread.
            self.runtime.spawn_blocking(move || drop(replaced));
        }
        if self.engines.is_ending() {
            self.runtime
                .spawn_blocking(move || drop((engine, function)));
            return;
        }
        engine.log(name);
        self.shared.metrics.watch(engine.watched());
        self.shared.metrics.loaded_in(name, took);
        self.history.loaded(plan, Instant::now());
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
        let probe = Box::new(move || engine.stalled_for());
        self.shared.health.running(name, probe);
    }

    /// Records that a model could not be loaded at the start of a server that runs without it.
    fn begun_without(&self, name: &str, failure: &CliError) {
        // One that is loaded on demand is tried again, by the next call after this time.
        self.history.failed(name, Instant::now());
        self.shared.health.failed(name);
        tracing::error!(model = name, %failure, "a model could not be loaded; the server runs without it");
    }
}
