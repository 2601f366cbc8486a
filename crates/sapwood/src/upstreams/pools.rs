//! The pools of models that servers elsewhere share, as far as they were joined (LM-805).
//!
//! Owns: [`Pools`]: which there are, and what a reloaded configuration says to them. Refuses to know: where streams go.

use std::sync::{Arc, Mutex, PoisonError};

use sapwood_net::lmtp::Address;
use sapwood_net::lmtp::pool::{Endpoint, Pool};

use crate::config::Config;

/// The pools by the names of their models. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Pools(Arc<Mutex<Vec<(String, Pool)>>>);

impl Pools {
    /// One was joined.
    pub(super) fn add(&self, model: &str, pool: Pool) {
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|(other, _)| other != model);
        pools.push((model.to_owned(), pool));
    }

    /// Servers that are not configured any more are drained, and those that are again are taken back. A new one needs a
    /// restart, and so does a model that is new or gone.
    pub(crate) fn reload(&self, config: &Config) {
        let pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (model, pool) in &*pools {
            let places = places(config, model);
            if places.is_empty() {
                continue;
            }
            let places: Vec<&str> = places.iter().map(String::as_str).collect();
            for upstream in pool.keep(&places) {
                tracing::warn!(model, upstream, "a new upstream is asked after a restart");
            }
        }
    }
}

/// Where the servers of a model are; nothing if it has none any more. The configuration was checked.
fn places(config: &Config, model: &str) -> Vec<String> {
    let shown = |address: &Address| format!("{address:?}");
    let mut configured = config.models.iter().filter(|one| one.name == model);
    if let Some(upstream) = configured.find_map(|one| one.upstream.as_ref()) {
        let peers = upstream.peers(model).unwrap_or_default();
        return peers
            .iter()
            .map(|peer: &Endpoint| shown(&peer.address))
            .collect();
    }
    let named = config
        .upstreams
        .iter()
        .filter_map(|url| Address::of_model(url).ok());
    let named = named.filter(|(_, name)| name == model);
    named
        .flat_map(|(peers, _)| peers)
        .map(|peer| shown(&peer))
        .collect()
}
