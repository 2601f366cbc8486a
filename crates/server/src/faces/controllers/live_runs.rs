//! [`LiveRuns`]: the runs whose responses are open, by their ids, and the variables of each (AI-1006).

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use sapwood_proto::steer::{RequestVariables, VariablesSharer};

use crate::auth::identity::CallerIdentity;

/// The open runs of this face. Each has an open response, which bounds their number.
#[derive(Default)]
pub(super) struct LiveRuns(Mutex<HashMap<Arc<str>, Arc<LiveRun>>>);

/// One of them.
pub(super) struct LiveRun {
    owner: CallerIdentity,
    /// What is set before the controller starts, until it is.
    initial: Mutex<Vec<(String, Vec<u8>)>>,
    variables: OnceLock<Arc<dyn RequestVariables>>,
}

/// Ends the run's entry when it is dropped.
pub(super) struct LiveRunGuard {
    runs: Arc<LiveRuns>,
    id: Arc<str>,
}

impl LiveRuns {
    /// Adds a run, which this caller alone may look at.
    pub(super) fn begin(
        self: &Arc<Self>,
        id: &str,
        owner: CallerIdentity,
        initial: Vec<(String, Vec<u8>)>,
    ) -> (Arc<LiveRun>, LiveRunGuard) {
        let run = Arc::new(LiveRun {
            owner,
            initial: Mutex::new(initial),
            variables: OnceLock::new(),
        });
        let id: Arc<str> = id.into();
        self.lock().insert(Arc::clone(&id), Arc::clone(&run));
        let runs = Arc::clone(self);
        (run, LiveRunGuard { runs, id })
    }

    /// The run of this id, if it is this caller's. Those of others are as unknown as those that never were.
    pub(super) fn find(&self, id: &str, caller: &CallerIdentity) -> Option<Arc<LiveRun>> {
        let run = self.lock().get(id).cloned();
        run.filter(|run| caller.may_use_what(&run.owner))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<LiveRun>>> {
        // Each change is one call, so a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LiveRun {
    /// The variables of its controller; `None` before it starts, and for ever if it has none.
    pub(super) fn variables(&self) -> Option<&Arc<dyn RequestVariables>> {
        self.variables.get()
    }
}

impl VariablesSharer for LiveRun {
    fn take_initial(&self) -> Vec<(String, Vec<u8>)> {
        std::mem::take(&mut *self.initial.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn opened(&self, variables: Arc<dyn RequestVariables>) {
        // Only the first could be meant: a request has one controller.
        let _ = self.variables.set(variables);
    }
}

// By hand: values are the caller's business and not that of logs.
impl fmt::Debug for LiveRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveRun").finish_non_exhaustive()
    }
}

impl Drop for LiveRunGuard {
    fn drop(&mut self) {
        let removed = self.runs.lock().remove(&self.id);
        // Without the lock: the last reference may free what a controller has written.
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_1006_a_run_is_known_to_its_caller_and_while_it_runs() {
        let runs = Arc::new(LiveRuns::default());
        let key = |name: &str| CallerIdentity::Key(name.into());
        let (_, guard) = runs.begin("run-1", key("ada"), Vec::new());
        let nobody = CallerIdentity::Anonymous(None);
        assert!(runs.find("run-1", &key("ada")).is_some());
        for stranger in [
            key("bob"),
            CallerIdentity::Certificate("ada".into()),
            nobody.clone(),
        ] {
            assert!(runs.find("run-1", &stranger).is_none(), "{stranger:?}");
        }
        assert!(runs.find("run-2", &key("ada")).is_none());
        // Without keys the id alone says who it is, and it cannot be guessed.
        let (_, second) = runs.begin("run-2", nobody, Vec::new());
        let remote = CallerIdentity::Anonymous(Some([10, 0, 0, 1].into()));
        assert!(runs.find("run-2", &remote).is_some());
        assert!(runs.find("run-2", &key("ada")).is_none());
        drop((guard, second));
        assert!(runs.find("run-1", &key("ada")).is_none());
        assert_eq!(runs.lock().len(), 0);
    }
}
