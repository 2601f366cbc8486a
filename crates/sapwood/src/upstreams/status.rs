//! The effect of an upstream's state on the readiness of the server (OA-902).
//!
//! [`UpstreamStatus`] updates the components of [`Health`] that belong to one upstream: the upstream itself, and each
//! model that it serves, so that `/readyz`, the home page and the readiness of a model show them. Their names never
//! contain the address of an upstream.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use sapwood_kernel::Name;
use sapwood_server::ops::health::Health;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// The health components of one upstream.
pub(super) struct UpstreamStatus {
    parts: UpstreamModels,
    /// Follows the changes of an upstream that comes and goes while its link lasts.
    following: Option<AbortOnDropHandle<()>>,
}

#[derive(Clone)]
struct UpstreamModels {
    health: Arc<Health>,
    /// The component that exists as long as the server runs.
    own: String,
    models: BTreeSet<Name>,
}

impl UpstreamStatus {
    /// The upstream with this number in the configuration: the server is ready without it, if anything else is
    /// available.
    pub(super) fn of_server(health: &Arc<Health>, number: usize) -> Self {
        Self::new(health, format!("upstream {number}"), false)
    }

    /// A model of the configuration.
    pub(super) fn of_model(health: &Arc<Health>, name: &str, required: bool) -> Self {
        Self::new(health, name.to_owned(), required)
    }

    fn new(health: &Arc<Health>, own: String, required: bool) -> Self {
        // Before the first state is set, or the server would be unready for a moment because of it.
        if !required {
            health.optional(&own);
        }
        health.away(&own);
        Self {
            parts: UpstreamModels {
                health: Arc::clone(health),
                own,
                models: BTreeSet::new(),
            },
            following: None,
        }
    }

    /// The upstream serves these models. `served`: whether it does may change while it is connected.
    pub(super) fn joined<'a>(
        &mut self,
        models: impl Iterator<Item = &'a Name>,
        mut served: Option<watch::Receiver<bool>>,
    ) {
        let parts = &mut self.parts;
        parts.models = models
            // For a configured model both have the same name, and the component of its own must outlive the session.
            .filter(|name| **name != *parts.own)
            .cloned()
            .collect();
        for name in &parts.models {
            parts.health.optional(name);
        }
        // `borrow_and_update`: every later change is seen by the task, whenever that starts.
        let serves = served
            .as_mut()
            .is_none_or(|served| *served.borrow_and_update());
        parts.show(serves);
        let parts = parts.clone();
        self.following = served.map(|served| {
            let following = parts.follow(served, serves);
            AbortOnDropHandle::new(tokio::spawn(following))
        });
    }

    /// The upstream does not serve this model any more.
    pub(super) fn remove(&mut self, name: &Name) {
        if self.parts.models.remove(name) {
            self.parts.health.remove(name);
        }
    }

    /// The upstream is disconnected, until it is joined again.
    pub(super) fn lost(&mut self) {
        // The task first: it must not show the model as served after this.
        self.following = None;
        self.parts.show(false);
    }
}

impl UpstreamModels {
    fn show(&self, serves: bool) {
        let models = self.models.iter().map(Name::as_str);
        for name in models.chain([&*self.own]) {
            if serves {
                // The server that runs the model reports a stall itself.
                self.health.running(name, Box::new(|| Duration::ZERO));
            } else {
                self.health.away(name);
            }
        }
    }

    async fn follow(self, mut served: watch::Receiver<bool>, mut shown: bool) {
        while served.changed().await.is_ok() {
            let serves = *served.borrow_and_update();
            // The channel is also written when the condition of a single peer changes, without a change for the model.
            if std::mem::replace(&mut shown, serves) != serves {
                self.show(serves);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use sapwood_server::ops::drain::Drain;
    use sapwood_server::ops::health::HealthState;

    use super::*;

    fn health() -> Arc<Health> {
        Arc::new(Health::new(Drain::default(), Duration::from_secs(30)))
    }

    #[tokio::test]
    async fn oa_902_an_upstream_and_its_models_change_state_together() {
        let health = health();
        let mut standing = UpstreamStatus::of_server(&health, 1);
        assert_eq!(health.ready().unwrap_err().reason, "upstream_away");
        let (one, two) = (Name::new("one"), Name::new("two"));
        standing.joined([&one, &two].into_iter(), None);
        assert!(health.ready().is_ok());
        assert_eq!(health.state("two"), Some(HealthState::Ok));
        standing.remove(&two);
        assert_eq!(health.state("two"), None);
        standing.lost();
        assert_eq!(health.ready().unwrap_err().reason, "upstream_away");
        assert_eq!(health.state("one"), Some(HealthState::Away));
        // A model of this server suffices.
        health.running("local", Box::new(|| Duration::ZERO));
        assert!(health.ready().is_ok());
    }

    #[tokio::test]
    async fn lm_804_a_model_is_away_while_its_pool_has_no_usable_peer() {
        let health = health();
        let (served, serves) = watch::channel(true);
        let mut standing = UpstreamStatus::of_model(&health, "far", true);
        let name = Name::new("far");
        standing.joined([&name].into_iter(), Some(serves));
        let mut readiness = health.changes();
        for (now, state) in [(false, HealthState::Away), (true, HealthState::Ok)] {
            served.send_replace(now);
            while health.state("far") != Some(state) {
                readiness.changed().await.unwrap();
            }
            assert_eq!(health.ready().is_ok(), now);
        }
    }
}
