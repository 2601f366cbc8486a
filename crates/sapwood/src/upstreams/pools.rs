//! The pools of models that servers elsewhere share, as far as they were joined (LM-805).
//!
//! Owns: [`Pools`]: which there are, and what a reloaded configuration says to them. Refuses to know: where streams go.

use std::sync::{Arc, Mutex, PoisonError};

use sapwood_net::lmtp::pool::{Endpoint, Pool};

use super::place;
use crate::client;
use crate::config::Config;
use crate::config::remote_model::RemoteModel;

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

    /// Servers that are not configured any more are drained, those that are again are taken back, and new ones join. A model that
    /// is new or gone needs a restart.
    pub(crate) fn reload(&self, config: &Config) {
        let known = match client::address("", config, client::CONNECT_TIMEOUT) {
            Ok(known) => known,
            Err(status) => {
                tracing::error!(why = status.message, "upstreams stay as they were");
                return;
            }
        };
        let pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (model, pool) in &*pools {
            let endpoints = endpoints(config, model);
            if endpoints.is_empty() {
                continue;
            }
            let endpoints = endpoints.into_iter();
            let endpoints = endpoints.map(|endpoint| place::let_in(endpoint, &known));
            for upstream in pool.keep(endpoints.collect()) {
                tracing::info!(model, upstream, "an upstream joins a pool");
            }
        }
    }
}

/// Where the servers of a model are; nothing if it has none any more. The configuration was checked.
fn endpoints(config: &Config, model: &str) -> Vec<Endpoint> {
    let mut configured = config.models.iter().filter(|one| one.name == model);
    if let Some(upstream) = configured.find_map(|one| one.upstream.as_ref()) {
        return upstream.peers(model).unwrap_or_default();
    }
    let named = config
        .upstreams
        .iter()
        .filter_map(|url| RemoteModel::read(url).ok());
    let named = named.filter(|named| named.model == model);
    let peers = named.flat_map(|named| {
        let name = named.model;
        let peers = named.peers.into_iter();
        peers.map(move |peer| (peer, name.clone()))
    });
    let peers = peers.map(|(address, model)| Endpoint {
        address,
        model,
        weight: 1,
    });
    peers.collect()
}
