//! [`ModelLocks`]: changes of one model are serialised, changes of different models are concurrent.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::join_all;
use tokio::sync::OwnedMutexGuard;

/// A change of one model, which holds its lock.
pub(super) type Change = OwnedMutexGuard<()>;

/// A lock for each model.
#[derive(Debug)]
pub(super) struct ModelLocks {
    locks: BTreeMap<String, Arc<tokio::sync::Mutex<()>>>,
    /// The locks of all models, until the start of the server takes them.
    starting: Mutex<BTreeMap<String, Change>>,
}

impl ModelLocks {
    /// Locks for the models of these names. All are locked before anybody can call the models: a request must not load one
    /// that the start of the server is about to load.
    pub(super) fn starting(names: impl Iterator<Item = String>) -> Self {
        let locks: BTreeMap<String, Arc<tokio::sync::Mutex<()>>> =
            names.map(|name| (name, Arc::default())).collect();
        let starting = locks.iter().filter_map(|(name, lock)| {
            let change = Arc::clone(lock).try_lock_owned().ok()?;
            Some((name.clone(), change))
        });
        Self {
            starting: Mutex::new(starting.collect()),
            locks,
        }
    }

    /// The locks that are held since [`ModelLocks::starting`], once.
    pub(super) fn take_starting(&self) -> BTreeMap<String, Change> {
        let mut starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut starting)
    }

    /// Locks a model for a change; `None` for a name that is not planned.
    pub(super) async fn change(&self, name: &str) -> Option<Change> {
        let lock = self.locks.get(name)?;
        Some(Arc::clone(lock).lock_owned().await)
    }

    /// Locks a model for a change, unless it is being changed.
    pub(super) fn try_change(&self, name: &str) -> Option<Change> {
        let lock = self.locks.get(name)?;
        Arc::clone(lock).try_lock_owned().ok()
    }

    /// Locks all models, when none is being changed.
    pub(super) async fn change_all(&self) -> Vec<Change> {
        let locks = self.locks.values();
        join_all(locks.map(|lock| Arc::clone(lock).lock_owned())).await
    }
}
