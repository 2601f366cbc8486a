//! Pools of upstreams that share a model (LM-805).

use std::sync::{Arc, Mutex, PoisonError};

use sapwood_net::lmtp::pool::{LmtpPool, PoolEndpoint};
use sapwood_proto::evergreen::Status;

use super::target::{self, lmtp};
use crate::config::Config;
use crate::config::remote_model::RemoteModel;
use crate::failure::CliError;

/// The pools by the names of their models. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Pools(Arc<Mutex<Vec<(String, LmtpPool)>>>);

impl Pools {
    /// Registers a pool that was joined.
    pub(super) fn add(&self, model: &str, pool: LmtpPool) {
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A pool that is joined again replaces the one before, which its task has given up.
        pools.retain(|(other, _)| other != model);
        pools.push((model.to_owned(), pool));
    }

    /// Prepares a reload: servers that are not configured any more will be drained, those that are configured again are
    /// restored, and new ones join. Adding or removing a model needs a restart.
    ///
    /// # Errors
    /// [`CliError::usage`] if the servers of a pool cannot be used; nothing is changed.
    pub(crate) fn prepare(&self, config: &Config) -> Result<PreparedPools, CliError> {
        let pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut prepared = Vec::new();
        for (model, pool) in &*pools {
            let endpoints = endpoints(config, model).map_err(|status| {
                CliError::usage(format!("upstreams of `{model}`: {}", status.message))
            })?;
            // An empty list is a model that is not configured any more. Removing a model needs a restart, so its pool
            // stays as it is.
            if !endpoints.is_empty() {
                prepared.push((model.clone(), pool.clone(), endpoints));
            }
        }
        Ok(PreparedPools(prepared))
    }
}

/// The new endpoints of the pools.
pub(crate) struct PreparedPools(Vec<(String, LmtpPool, Vec<PoolEndpoint>)>);

impl PreparedPools {
    /// Applies the new endpoints.
    pub(crate) fn apply(self) {
        for (model, pool, endpoints) in self.0 {
            for upstream in pool.keep(endpoints) {
                tracing::info!(model, upstream, "an upstream joins a pool");
            }
        }
    }
}

/// The endpoints of a model; empty if it has none any more. The configuration has been checked.
///
/// # Errors
/// A key or the trusted authorities cannot be read.
fn endpoints(config: &Config, model: &str) -> Result<Vec<PoolEndpoint>, Status> {
    let mut configured = config.models.iter().filter(|one| one.name == model);
    if let Some(upstream) = configured.find_map(|one| one.upstream.as_ref()) {
        return lmtp::of_model(model, upstream, config);
    }
    let mut endpoints = Vec::new();
    for server in &config.upstreams {
        let named = RemoteModel::read(server.url.expose());
        let Some(named) = named.ok().filter(|named| named.model == model) else {
            continue;
        };
        let access = target::access(server, config)?;
        endpoints.extend(lmtp::named_by_url(named.peers, model, &access));
    }
    Ok(endpoints)
}
