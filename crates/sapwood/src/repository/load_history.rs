//! [`LoadHistory`]: how the last loads of each model went, and when those that failed are tried again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::{Duration, Instant};

use super::backoff::LoadBackoff;
use crate::models::PlannedModel;

/// The loads of all models. A model without a record has never been loaded, nor failed.
#[derive(Debug, Default)]
pub(super) struct LoadHistory(Mutex<BTreeMap<String, ModelHistory>>);

#[derive(Debug, Default)]
struct ModelHistory {
    /// What it was loaded with for the last time: a request may have changed the plan.
    last_plan: Option<PlannedModel>,
    /// Its engine has ended unexpectedly, and it is to be loaded again.
    is_lost: bool,
    backoff: LoadBackoff,
    /// Of unloading other models for it, which was in vain.
    eviction: LoadBackoff,
}

impl LoadHistory {
    /// Records that a model was loaded.
    pub(super) fn loaded(&self, plan: &PlannedModel, now: Instant) {
        self.change(&plan.name, |model| {
            model.last_plan = Some(plan.clone());
            model.backoff.loaded(now);
            model.eviction = LoadBackoff::default();
        });
    }

    /// Records that a model could not be loaded, or that its engine has ended. Returns the time until the next try.
    pub(super) fn failed(&self, name: &str, now: Instant) -> Duration {
        self.change(name, |model| model.backoff.failed(now))
    }

    /// Records that a model could not be loaded for a reason outside of it. Returns the time until the next try.
    pub(super) fn postponed(&self, name: &str, now: Instant) -> Duration {
        self.change(name, |model| model.backoff.postponed(now))
    }

    /// Whether the wait of a model that was [postponed](Self::postponed) is over; true once.
    pub(super) fn take_end_of_postponement(&self, name: &str, now: Instant) -> bool {
        let mut models = self.models();
        models
            .get_mut(name)
            .is_some_and(|it| it.backoff.take_end_of_postponement(now))
    }

    /// The time until a model may be loaded again; `None` if it may be now.
    pub(super) fn wait(&self, name: &str, now: Instant) -> Option<Duration> {
        self.models().get(name)?.backoff.wait(now)
    }

    /// Whether loads of a model failed so often that a restart of the process may help more than another try.
    pub(super) fn is_hopeless(&self, name: &str) -> bool {
        let models = self.models();
        models.get(name).is_some_and(|it| it.backoff.is_hopeless())
    }

    /// What a model was loaded with for the last time.
    pub(super) fn last_plan(&self, name: &str) -> Option<PlannedModel> {
        self.models().get(name)?.last_plan.clone()
    }

    /// Records that other models were unloaded for this one, and that it lacks memory all the same.
    pub(super) fn evicted_in_vain(&self, name: &str, now: Instant) {
        self.change(name, |model| model.eviction.failed(now));
    }

    /// The time until other models may be unloaded for this one; `None` if they may be now.
    pub(super) fn eviction_wait(&self, name: &str, now: Instant) -> Option<Duration> {
        self.models().get(name)?.eviction.wait(now)
    }

    /// Records whether a model is to be loaded again because its engine has ended. Returns what it was before.
    pub(super) fn set_lost(&self, name: &str, is_lost: bool) -> bool {
        self.change(name, |model| std::mem::replace(&mut model.is_lost, is_lost))
    }

    /// Whether a model is to be loaded again because its engine has ended.
    pub(super) fn is_lost(&self, name: &str) -> bool {
        self.models().get(name).is_some_and(|model| model.is_lost)
    }

    /// The names of such models that may be loaded now.
    pub(super) fn lost_and_due(&self, now: Instant) -> Vec<String> {
        let models = self.models();
        let due = models
            .iter()
            .filter(|(_, model)| model.is_lost && model.backoff.wait(now).is_none());
        due.map(|(name, _)| name.clone()).collect()
    }

    fn change<T>(&self, name: &str, change: impl FnOnce(&mut ModelHistory) -> T) -> T {
        change(self.models().entry(name.to_owned()).or_default())
    }

    fn models(&self) -> MutexGuard<'_, BTreeMap<String, ModelHistory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
