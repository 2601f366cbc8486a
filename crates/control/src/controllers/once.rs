//! [`Once`]: work under a key that several callers want at the same time, done by the first of them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Shares the result of work among those who ask for it while it is done. Afterwards it is forgotten.
pub(super) struct Once<K, V>(Mutex<Running<K, V>>);

type Running<K, V> = HashMap<K, Arc<OnceLock<V>>>;

impl<K, V> Default for Once<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Copy + Eq + Hash, V: Clone> Once<K, V> {
    /// Returns the result of `work`, or of the work that another caller does for this key already.
    pub(super) fn get(&self, key: K, work: impl FnOnce() -> V) -> V {
        let cell = Arc::clone(self.running().entry(key).or_default());
        // Also if the work panics. Who waits for it then does it instead.
        let _removal = Removal {
            once: self,
            key,
            cell: &cell,
        };
        cell.get_or_init(work).clone()
    }

    fn running(&self) -> MutexGuard<'_, Running<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets later callers do the work anew.
struct Removal<'a, K: Copy + Eq + Hash, V: Clone> {
    once: &'a Once<K, V>,
    key: K,
    cell: &'a Arc<OnceLock<V>>,
}

impl<K: Copy + Eq + Hash, V: Clone> Drop for Removal<'_, K, V> {
    fn drop(&mut self) {
        let mut running = self.once.running();
        let mine = |cell: &Arc<OnceLock<V>>| Arc::ptr_eq(cell, self.cell);
        if running.get(&self.key).is_some_and(mine) {
            running.remove(&self.key);
        }
    }
}
