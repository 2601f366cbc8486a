//! [`RunningEngines`]: the engines of loaded models, until the server ends.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::call_count::CallCount;
use crate::loaded_model::LoadedModel;

/// The engines by the names of their models. Once the server ends, none is added.
#[derive(Debug, Default)]
pub(super) struct RunningEngines {
    engines: Mutex<BTreeMap<String, RunningEngine>>,
    /// Whether the server ends, and so loads no model any more.
    ending: watch::Sender<bool>,
}

/// The engine of a model.
#[derive(Debug)]
pub(super) struct RunningEngine {
    pub(super) engine: LoadedModel,
    /// The calls of its function.
    pub(super) calls: CallCount,
}

impl RunningEngines {
    /// Adds the engine of a model. Returns the one that is to be ended: that which it replaces, or itself if the server
    /// ends.
    pub(super) fn insert(&self, name: &str, running: RunningEngine) -> Option<LoadedModel> {
        let mut engines = self.engines();
        // Under the lock: `take_all` comes after `begin_end`.
        let replaced = if self.is_ending() {
            Some(running)
        } else {
            engines.insert(name.to_owned(), running)
        };
        replaced.map(|it| it.engine)
    }

    pub(super) fn remove(&self, name: &str) -> Option<RunningEngine> {
        self.engines().remove(name)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.engines().contains_key(name)
    }

    /// Handles of all engines.
    pub(super) fn all(&self) -> Vec<LoadedModel> {
        let engines = self.engines();
        engines.values().map(|it| it.engine.clone()).collect()
    }

    /// The models whose engines have ended by themselves.
    pub(super) fn lost(&self) -> Vec<String> {
        let engines = self.engines();
        let lost = engines.iter().filter(|(_, it)| it.engine.is_lost());
        lost.map(|(name, _)| name.clone()).collect()
    }

    /// Whether the engine of a model has ended by itself.
    pub(super) fn is_lost(&self, name: &str) -> bool {
        let engines = self.engines();
        engines.get(name).is_some_and(|it| it.engine.is_lost())
    }

    /// Adds no engine from here on.
    pub(super) fn begin_end(&self) {
        self.ending.send_replace(true);
    }

    /// Whether the server ends.
    pub(super) fn is_ending(&self) -> bool {
        *self.ending.borrow()
    }

    /// Waits until the server ends.
    pub(super) async fn until_ending(&self) {
        let mut ending = self.ending.subscribe();
        // Fails only without its sender, which is here.
        let _ = ending.wait_for(|it| *it).await;
    }

    /// Takes all engines out.
    pub(super) fn take_all(&self) -> Vec<LoadedModel> {
        let engines = std::mem::take(&mut *self.engines());
        engines.into_values().map(|it| it.engine).collect()
    }

    fn engines(&self) -> MutexGuard<'_, BTreeMap<String, RunningEngine>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl RunningEngines {
    pub(super) fn get(&self, name: &str) -> LoadedModel {
        self.engines()[name].engine.clone()
    }
}
